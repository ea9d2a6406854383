"""Collators for the Trainer: masked LM, MLSM (Berend, 2023), TACO (Fu et al., 2022), NPM (Min et al., 2022)
and span denoising (Raffel et al., 2020).

The masks of a sequence depend only on the seed, the epoch and the index of the sequence: a resumed run equals an
uninterrupted run, with any number of worker processes.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mlsm_plugin.core.files.settings import check, option, seed
from mlsm_plugin.core.hidden_states.hf_encoder import check_positions
from mlsm_plugin.core.losses.token_contrastive import Contrast, generator_of, sample_pairs, usable_anchors
from mlsm_plugin.core.masking.masked_share import MaskReplacement
from mlsm_plugin.core.masking.span_corruption import SpanCorruptionCollator, padded
from mlsm_plugin.core.masking.span_groups import SpanMasking, SpanRules, collate_groups, draw_spans
from mlsm_plugin.core.masking.token_ids import check_largest_id, check_padding
from mlsm_plugin.core.masking.word_boundaries import SPAN_MASKS, word_boundaries
from mlsm_plugin.core.text.hf_tokenizer import (
    check_masked_lm_tokenizer,
    number_of_ids,
    piece_classes,
    special_ids,
    unmasked_ids,
    vocabulary_fingerprint,
)
from mlsm_plugin.huggingface.pretraining_sequences import PretrainingSequence, SequenceCodes, SpanGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
Batch = dict[str, Any]  # tensors, and dicts of tensors, by name
TokenIds = Sequence[int] | np.ndarray | Tensor | Mapping[str, Any]  # of a text, or an entry of a dataset with input_ids
FEWEST_TOKENS = 200  # of a batch of NPM; smaller batches may have no common span
NO_TOKEN = -1  # padding of sequences for an auxiliary model, whose padding id the collator does not know
IGNORED = -100  # label of tokens that are not predicted, as in transformers
Rng = np.random.Generator


@dataclass(frozen=True, kw_only=True)
class Masking(MaskReplacement):
    """BERT's masking; ``leave_unmasked_prob`` and ``random_token_prob`` are shares of the masked tokens."""

    mask_prob: float = option(0.15, above=0, most=1, help="share of the tokens (of whole words: of the words) to mask")
    mask_prob_end: float | None = option(
        None,
        above=0,
        most=1,
        help="share at the end of training, to which --mask-prob changes linearly; evaluations use it, too",
    )
    whole_words: bool = option(
        False, help="mask all pieces of a word, or none; each piece of a very long word counts as a word"
    )
    seed: int = seed("of the masks")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self)

    @property
    def largest_share(self) -> float:
        """The largest share that is masked at any point of the training."""
        return max(self.mask_prob, self.mask_prob_end or 0)

    def share_at(self, progress: float) -> float:
        """The share that is masked when the share ``progress`` of the training is done."""
        end = self.mask_prob if self.mask_prob_end is None else self.mask_prob_end
        return self.mask_prob + (end - self.mask_prob) * progress


class _TextCollator:
    """The base of the collators that mask a share of the text."""

    few_masks: ClassVar[str]  # the remedy if hardly anything is masked

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", mask_prob: float) -> None:
        check_masked_lm_tokenizer(tokenizer)
        self.mask_prob = mask_prob
        self.vocabulary = vocabulary_fingerprint(tokenizer)
        self.mask = int(tokenizer.mask_token_id)
        self.pad = int(tokenizer.pad_token_id)
        self.largest_id = number_of_ids(tokenizer) - 1
        self.special = np.zeros(self.largest_id + 1, bool)
        self.special[sorted(special_ids(tokenizer))] = True
        self._unknown = tokenizer.unk_token_id  # None: no text is unknown
        self._is_said = False

    def _warn_once(self, message: str) -> None:
        if not self._is_said:
            self._is_said = True
            logger.warning(message)

    def _checked_content(self, name: str, ids: np.ndarray) -> int:
        """How many ids of a sequence are text; ValueError as in :meth:`_content` and :func:`.check_padding`."""
        check_padding(ids, self.pad, name)
        return self._content(name, ids)

    def unknown_counts(self, name: str, ids: np.ndarray) -> tuple[int, int]:
        """How many of the ids ``(T,)`` of a text are unknown, and how many are not special."""
        return int(np.count_nonzero(ids == self._unknown)), self._content(name, ids)

    def _content(self, name: str, ids: np.ndarray) -> int:
        """How many ids of a sequence are text; ValueError if the tokenizer lacks an id."""
        check_largest_id(ids, self.largest_id, name)
        return int((~self.special[ids]).sum())


class MaskedLmCollator(_TextCollator):
    """Masks sequences as BERT does, and pads them. Unknown tokens are never masked.

    ``tokenizer`` is a ``PreTrainedTokenizerFast`` or similar. ValueError if it has no mask or no padding token, or if
    ``whole_words`` is set and its vocabulary does not mark words.
    """

    few_masks = "the text may have too many unknown tokens: use a model with a tokenizer for such text"

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", masking: Masking | None = None) -> None:
        self.masking = masking or Masking()
        super().__init__(tokenizer, self.masking.share_at(1.0))
        self.unmasked = np.zeros_like(self.special)
        self.unmasked[unmasked_ids(tokenizer)] = True
        plain = np.bincount([*tokenizer.get_vocab().values()]).astype(bool) & ~self.unmasked
        self._cumulative = np.cumsum(plain) / plain.sum()
        self._pieces = piece_classes(tokenizer) if self.masking.whole_words else None

    def __call__(self, sequences: Sequence[PretrainingSequence]) -> Batch:
        """A batch of B sequences, padded to the longest.

        ValueError if an id is not in the vocabulary, or the sequences do not come from ``PretrainingSequences``.

        Returns:
            ``input_ids`` (B, T) with masks, ``attention_mask`` (B, T), ``labels`` (B, T): the ids of masked tokens,
            -100 elsewhere, and ``content`` (B,): how many tokens of each sequence are not special; all int64.
        """
        check_samples(sequences, PretrainingSequence)
        content = [self._checked_content(f"sequence {sequence.index}", sequence.input_ids) for sequence in sequences]
        seed = self.masking.seed
        rngs = [np.random.default_rng([seed, sequence.epoch, sequence.index]) for sequence in sequences]
        masked, further_entries = self._masked(sequences, rngs)
        inputs = []
        attended = []
        labels = []
        for sequence, places, rng in zip(sequences, masked, rngs, strict=True):
            ids = sequence.input_ids
            inputs.append(self.masking.written(ids, places, rng, mask=self.mask, cumulative=self._cumulative))
            attended.append(ids != self.pad)
            labels.append(np.where(places, ids, IGNORED))
        attention = padded(attended, 0)
        attention[:, 0] = 1  # without any token to attend to, attention may not be finite
        return {
            "input_ids": padded(inputs, self.pad),
            "attention_mask": attention,
            "labels": padded(labels, IGNORED),
            "content": torch.tensor(content),
            **further_entries,
        }

    def masked_counts(self, batch: Batch) -> tuple[int, int]:
        """How many tokens of a batch are masked, and how many are not special."""
        return int((batch["labels"] != IGNORED).sum()), int(batch["content"].sum())

    def _masked(
        self, sequences: Sequence[PretrainingSequence], rngs: Sequence[Rng]
    ) -> tuple[Sequence[np.ndarray], Batch]:
        """Which tokens of each sequence are masked, ``(T,)`` bool, and further entries of the batch."""
        return [self._drawn(sequence, rng) for sequence, rng in zip(sequences, rngs, strict=True)], {}

    def _drawn(self, sequence: PretrainingSequence, rng: Rng, share: float = 1.0) -> np.ndarray:
        """Which tokens are masked, ``(T,)`` bool, if only a ``share`` of the text can be masked."""
        ids = sequence.input_ids
        masked: np.ndarray = rng.random(len(ids)) < self.masking.share_at(sequence.progress) / share
        if self._pieces is not None and len(ids):
            begins, _ = word_boundaries(ids, np.zeros_like(ids), self._pieces)
            masked = masked[np.maximum(np.cumsum(begins) - 1, 0)]  # all pieces take the word's random number
        return masked & ~self.unmasked[ids]


class LatentSemanticCollator(MaskedLmCollator):
    """Masks sequences of one dataset, and looks up the codes of the masked tokens.

    Only tokens with a code are masked: both losses of MLSM + MLM count the same tokens, and the Trainer's means over an
    update are exact. If the codes cover only a share of the positions, the probability there is raised, so that the
    masked share of all tokens stays the same.

    A batch also has ``codes``: ``atoms`` (n, m) int32, padded with -1, and ``weights`` (n, m) float16, padded with 0,
    of the n masked tokens, in the order of ``labels != -100``. ValueError if the dataset has no codes, if they cover
    less than ``mask_prob``, or less than all positions with ``whole_words``; the rest is as in
    :class:`MaskedLmCollator`.
    """

    few_masks = "too many tokens have no code, or are unknown to the tokenizer"

    def _masked(
        self, sequences: Sequence[PretrainingSequence], rngs: Sequence[Rng]
    ) -> tuple[Sequence[np.ndarray], Batch]:
        codes = self._codes(sequences)
        positions = [sequence.positions for sequence in sequences]
        masks = [
            self._drawn(sequence, rng, codes.coverage) & (places >= 0) & codes.covered(places)
            for sequence, rng, places in zip(sequences, rngs, positions, strict=True)
        ]
        masked = np.concatenate(masks)
        atoms, weights = codes.lookup(np.concatenate(positions)[masked])
        coded = weights.any(axis=1)
        masked[masked] = coded
        masks = np.split(masked, np.cumsum([len(places) for places in positions])[:-1])
        return masks, {"codes": {"atoms": torch.from_numpy(atoms[coded]), "weights": torch.from_numpy(weights[coded])}}

    def _codes(self, sequences: Sequence[PretrainingSequence]) -> SequenceCodes:
        codes = sequences[0].codes
        if codes is None:
            raise ValueError("these sequences have no codes; pass the folder of their codes to PretrainingSequences")
        if any(sequence.codes is not codes for sequence in sequences):
            raise ValueError(
                "a batch mixes sequences of several datasets, each with its own codes; put all sequences into one "
                "dataset, and code that"
            )
        if self.masking.largest_share > codes.coverage:
            raise ValueError(
                f"mask_prob {self.masking.largest_share} is more than the share {codes.coverage} of the positions "
                "that have codes; encode with a larger --coverage, or use a smaller mask_prob"
            )
        if self.masking.whole_words and codes.coverage < 1:
            raise ValueError("whole_words needs codes of all positions; encode without --coverage")
        return codes


class AuxiliaryTextCollator(MaskedLmCollator):
    """Masks tokens for which another model has a hidden state, and says where it is.

    A batch also has ``auxiliary``: ``ids`` (B, T'), the unmasked text in the other model's tokens, padded with -1, and
    ``places`` (n,), the index in ``ids.flatten()`` of the token whose hidden state belongs to each of the n masked
    tokens, in the order of ``labels != -100``; both int64. ValueError if a place is not in the other model's text.
    """

    few_masks = "too many tokens have no token of the auxiliary model, or are unknown to the tokenizer"

    def _masked(
        self, sequences: Sequence[PretrainingSequence], rngs: Sequence[Rng]
    ) -> tuple[Sequence[np.ndarray], Batch]:
        masks = []
        ids_of_auxiliary = []
        places = []
        for sequence, rng in zip(sequences, rngs, strict=True):
            ids = sequence.input_ids
            places_of_tokens = np.arange(len(ids))
            if sequence.aligned is not None:
                ids = sequence.aligned.sequences[sequence.index]
                places_of_tokens = sequence.aligned.places[sequence.index] - 1
            if places_of_tokens.max(initial=-1) >= len(ids):
                raise ValueError(
                    f"the aligned text of sequence {sequence.index} is shorter than its places; align anew"
                )
            mask = self._drawn(sequence, rng) & (places_of_tokens >= 0)
            masks.append(mask)
            ids_of_auxiliary.append(ids)
            places.append(places_of_tokens[mask])
        batch_ids = padded(ids_of_auxiliary, NO_TOKEN)
        first_places = np.arange(len(sequences)) * batch_ids.size(1)
        flat_places = np.concatenate([row + first for row, first in zip(places, first_places, strict=True)])
        return masks, {"auxiliary": {"ids": batch_ids, "places": torch.from_numpy(flat_places.astype(np.int64))}}


class TokenContrastiveCollator(MaskedLmCollator):
    """Masks sequences, and draws positives and negatives for the anchors of the batch according to ``contrast``.

    A batch also has ``pairs``: ``anchors`` (B, T) bool, and ``positive`` (B, T) and ``negative`` (B, T, K) int64 of
    :func:`~mlsm_plugin.core.losses.token_contrastive.sample_pairs`.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", masking: Masking | None = None, contrast: Contrast | None = None
    ) -> None:
        super().__init__(tokenizer, masking)
        self.contrast = contrast or Contrast()

    def __call__(self, sequences: Sequence[PretrainingSequence]) -> Batch:
        """See the class."""
        batch = super().__call__(sequences)
        masked = batch["labels"] != IGNORED
        original = torch.where(masked, batch["labels"], batch["input_ids"])
        content = ~torch.from_numpy(self.unmasked)[original]  # padding is unmasked, too
        first = sequences[0]
        contrast = self.contrast
        positive, negative = sample_pairs(
            content,
            window=contrast.positive_window,
            num_negatives=contrast.negatives,
            generator=generator_of(self.masking.seed, first.epoch, first.index, 1),
        )
        anchors = contrast.anchors_in(content, masked)
        return {**batch, "pairs": {"anchors": anchors, "positive": positive, "negative": negative}}

    def contrasted_counts(self, batch: Batch) -> tuple[int, int]:
        """How many anchors of a batch have a positive and negatives, and how many anchors it has."""
        pairs = batch["pairs"]
        usable = usable_anchors(anchors=pairs["anchors"], positive=pairs["positive"], negative=pairs["negative"])
        return int(usable.sum()), int(pairs["anchors"].sum())


class SpanDenoisingCollator(SpanCorruptionCollator):
    """A :class:`~mlsm_plugin.core.masking.span_corruption.SpanCorruptionCollator` for stock encoder-decoders that make
    the decoder input from the labels, such as T5.
    """

    def __call__(self, texts: Sequence[ArrayLike | Mapping[str, ArrayLike]]) -> dict[str, Tensor]:
        """``input_ids`` and ``attention_mask`` (B, S), and ``labels`` (B, T): the target, then -100; all int64.

        Texts and errors as in :meth:`pairs`.
        """
        pairs = self.pairs(texts)
        sources = [source for source, _ in pairs]
        targets = [target for _, target in pairs]
        return {
            "input_ids": padded(sources, self.pad),
            "attention_mask": padded([np.ones_like(source) for source in sources], 0),
            "labels": padded(targets, IGNORED),
        }


class SpanGroupsCollator(_TextCollator):
    """Draws spans that several sequences of a group have in common, and masks them.

    A span becomes ``<mask_s> <mask_e>`` if the tokenizer has these tokens, otherwise two mask tokens. ValueError if the
    tokenizer has no mask or padding token, or its vocabulary does not mark words.

    ``max_length`` is the longest sequence that the model takes; masking can lengthen a sequence, since a span of one
    token becomes two masks. The spans of a group depend on ``seed``, the epoch and the index of the group.
    """

    few_masks = (
        "spans must occur in two sequences of a group: use larger groups, or rules that allow more or longer spans, or "
        "ask for less (mask_prob)"
    )

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", *, max_length: int, rules: SpanRules | None = None, seed: int = 1
    ) -> None:
        rules = rules or SpanRules()
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        super().__init__(tokenizer, rules.mask_prob)
        self._longest = max_length
        vocabulary = tokenizer.get_vocab()
        start = vocabulary.get(SPAN_MASKS[0], self.mask)
        end = vocabulary.get(SPAN_MASKS[1], self.mask)
        self.masking = SpanMasking(
            pieces=piece_classes(tokenizer, (start, end)),
            rules=rules,
            start_mask=start,
            end_mask=end,
            pad=self.pad,
            seed=seed,
            max_length=max_length,
        )
        self.special[[start, end]] = True
        special = np.flatnonzero(self.special)
        self._not_retrieved = torch.tensor([self.pad, *special[special != self.pad]])

    def masked_counts(self, batch: Batch) -> tuple[int, int]:
        """How many tokens of a batch are masked, and how many are not special."""
        return int(batch["spans"]["length"].sum()), int(batch["content"].sum())

    def __call__(self, groups: Sequence[SpanGroup]) -> Batch:
        """A batch of groups with S sequences and n spans in total.

        ValueError if an id is not in the vocabulary, a sequence is longer than ``max_length``, or the groups do not
        come from :class:`SpanGroups`.

        Returns:
            ``input_ids`` and ``attention_mask`` (S, T') with masks, ``context_ids`` (S, T) without masks, ``spans`` of
            :func:`~mlsm_plugin.core.masking.span_groups.collate_groups`, ``special``: ids that cannot be retrieved,
            padding first, ``content`` (number of groups,): how many tokens of each group are not special, and
            ``labels`` (number of groups, most spans of a group): 1 for each span, which the Trainer counts, then -100.
        """
        check_samples(groups, SpanGroup)
        for group in groups:
            check_positions(max(map(len, group.sequences)), self._longest, f"a sequence of group {group.index}")
        content = [
            sum(self._checked_content(f"group {group.index}", ids) for ids in group.sequences) for group in groups
        ]
        groups_with_spans = [
            draw_spans(group.sequences, self.masking, epoch=group.epoch, index=group.index) for group in groups
        ]
        batch = collate_groups(groups_with_spans, self.masking)
        masked = batch["net_input"]["src_tokens"]
        if not len(batch["spans"]["start"]) and sum(content) >= FEWEST_TOKENS:
            self._warn_once(f"nothing is masked in a batch of {len(groups)} groups: {self.few_masks}")
        return {
            # the first entry: the Trainer takes its length as the batch size, which it counts in groups
            "labels": padded([np.ones(len(group["spans"])) for group in groups_with_spans], IGNORED),
            "input_ids": masked,
            "attention_mask": (masked != self.pad).long(),
            "context_ids": batch["context"]["src_tokens"],
            "spans": batch["spans"],
            "special": self._not_retrieved,
            "content": torch.tensor(content),
        }


def check_samples(samples: Sequence[object], kind: type) -> None:
    """Raise ValueError unless all samples are of this kind; the masks depend on more than the ids."""
    for sample in samples:
        if not isinstance(sample, kind):
            raise ValueError(
                f"the collator got a {type(sample).__name__}, not a {kind.__name__}: wrap the ids in "
                f"{kind.__name__}s(ids), whose samples have the number and the epoch on which their masks depend"
            )
