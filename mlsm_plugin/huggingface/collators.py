"""Collators for the Trainer: masked LM, MLSM (Berend, 2023) and TACO (Fu et al., 2022).

The masks of a sequence depend on the seed, the epoch and the number of the sequence only, so that a resumed run equals
one that never stopped, whatever the number of worker processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from mlsm_plugin.huggingface.pretraining_sequences import PretrainingSequence, SequenceCodes
from mlsm_plugin.losses.token_contrastive import Contrast, sample_pairs
from mlsm_plugin.sparse_coding.code_selection import strongest_of_padded
from mlsm_plugin.tokenization.hf_tokenizer import vocabulary_fingerprint
from mlsm_plugin.tokenization.word_boundaries import PieceClasses, word_boundaries

IGNORED = -100  # label of a token that is not predicted, as everywhere in the library


@dataclass(frozen=True)
class Masking:
    """BERT's masking.

    Attributes:
        mask_prob: probability that a content token is masked; of a word, with ``whole_words``.
        leave_unmasked_prob: share of the masked tokens that stay unchanged in the input.
        random_token_prob: share of the masked tokens that become a random token.
        whole_words: mask all pieces of a word, or none; the pieces of a word of more than
            :data:`~mlsm_plugin.tokenization.word_boundaries.LONGEST_WORD` are words of their own.
        seed: seed of the masks, not negative.

    Raises:
        ValueError: a value is out of range.
    """

    mask_prob: float = 0.15
    leave_unmasked_prob: float = 0.1
    random_token_prob: float = 0.1
    whole_words: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.mask_prob < 1:
            raise ValueError(f"mask_prob must be between 0 and 1, got {self.mask_prob}")
        shares = self.leave_unmasked_prob, self.random_token_prob
        if min(shares) < 0 or sum(shares) > 1:
            raise ValueError(
                f"leave_unmasked_prob and random_token_prob must not be negative, or together above 1; got {shares}"
            )
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")


class MaskedLmCollator:
    """Masks sequences as BERT does, and pads them. Unknown tokens are never masked.

    Args:
        tokenizer: a tokenizer of the library, with a mask token; ``PreTrainedTokenizerFast`` or the like.
        masking: how much is masked, and how.

    Raises:
        ValueError: the tokenizer has no mask or no padding token, or nothing in its vocabulary marks words although
            ``whole_words`` is asked for.
    """

    few_masks: ClassVar[str] = "the text may have too many unknown tokens: use a model with a tokenizer for such text"

    def __init__(self, tokenizer: Any, masking: Masking | None = None) -> None:
        self.masking = masking or Masking()
        check_tokenizer(tokenizer)
        self.vocabulary = vocabulary_fingerprint(tokenizer)
        self.mask, self.pad = int(tokenizer.mask_token_id), int(tokenizer.pad_token_id)
        self.size = number_of_ids(tokenizer)
        self.special, self.unmasked = np.zeros((2, self.size), bool)
        self.special[special_ids(tokenizer)] = True
        self.unmasked[unmasked_ids(tokenizer)] = True
        self._plain = np.setdiff1d([*tokenizer.get_vocab().values()], unmasked_ids(tokenizer))
        self._pieces = piece_classes(tokenizer) if self.masking.whole_words else None

    def __call__(self, sequences: Sequence[PretrainingSequence]) -> dict[str, Any]:
        """A batch of B sequences, padded to the longest.

        Returns:
            ``input_ids`` (B, T) with masks, ``attention_mask`` (B, T), and ``labels`` (B, T): the id of masked tokens,
            -100 elsewhere; ``content`` (B,): how many tokens of each sequence are not special; all int64.

        Raises:
            ValueError: an id is not in the vocabulary, or the sequences are not those of ``PretrainingSequences``.
        """
        generators = self._generators(sequences)
        return self._written(sequences, self._drawn(sequences, generators), generators)

    def _generators(self, sequences: Sequence[PretrainingSequence]) -> list[np.random.Generator]:
        """What decides the masks of each sequence."""
        check_samples(sequences, PretrainingSequence)
        return [np.random.default_rng([self.masking.seed, one.epoch, one.index]) for one in sequences]

    @property
    def mask_prob(self) -> float:
        """The share of the tokens to mask."""
        return self.masking.mask_prob

    def masked_counts(self, batch: dict[str, Any]) -> tuple[int, int]:
        """How many tokens of a batch are masked, and how many there are but special ones."""
        return int((batch["labels"] != IGNORED).sum()), int(batch["content"].sum())

    def _maskable(self, sequence: PretrainingSequence) -> np.ndarray:
        """Which tokens may be masked, ``(T,)`` bool."""
        ids = sequence.input_ids
        if len(ids) and int(ids.max()) >= self.size:
            raise ValueError(
                f"sequence {sequence.index} has the id {int(ids.max())}, and the tokenizer has only ids below "
                f"{self.size}; pass the tokenizer that made the ids"
            )
        return ~self.unmasked[ids]

    def _drawn(
        self, sequences: Sequence[PretrainingSequence], generators: Sequence[np.random.Generator], share: float = 1.0
    ) -> list[np.ndarray]:
        """Which tokens of each sequence are masked, ``(T,)`` bool, if masks are drawn among a ``share`` of the text."""
        return [
            self._bernoulli(sequence.input_ids, self.masking.mask_prob / share, rng) & self._maskable(sequence)
            for sequence, rng in zip(sequences, generators, strict=True)
        ]

    def _bernoulli(self, ids: np.ndarray, probability: float, rng: np.random.Generator) -> np.ndarray:
        drawn = rng.random(len(ids)) < probability
        if self._pieces is None or len(ids) == 0:
            return drawn
        begins, _ = word_boundaries(ids, np.zeros(len(ids), np.int64), self._pieces)
        word = np.maximum(np.cumsum(begins) - 1, 0)
        return drawn[word]  # the draw of a word's number decides for all its pieces

    def _written(
        self,
        sequences: Sequence[PretrainingSequence],
        masked: Sequence[np.ndarray],
        generators: Sequence[np.random.Generator],
    ) -> dict[str, Any]:
        """The batch in which the tokens ``masked`` are masked."""
        shape = len(sequences), max(1, *(len(sequence.input_ids) for sequence in sequences))
        ids, labels = torch.full(shape, self.pad), torch.full(shape, IGNORED)
        attention = torch.zeros(shape, dtype=torch.int64)
        for row, (sequence, places, rng) in enumerate(zip(sequences, masked, generators, strict=True)):
            original = sequence.input_ids
            length = len(original)
            ids[row, :length] = torch.from_numpy(self._replaced(original, places, rng))
            labels[row, :length] = torch.from_numpy(np.where(places, original, IGNORED))
            attention[row, :length] = torch.from_numpy(original != self.pad)
            attention[row, 0] = 1  # attention to nothing may not be finite
        content = torch.tensor([int((~self.special[one.input_ids]).sum()) for one in sequences])
        return {"input_ids": ids, "attention_mask": attention, "labels": labels, "content": content}

    def _replaced(self, original: np.ndarray, masked: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The ids of a sequence with masks, random tokens and unchanged tokens in the places that are masked."""
        written, fate = original.copy(), rng.random(len(original))
        random = self._plain[rng.integers(len(self._plain), size=len(original))]
        leave, replace = self.masking.leave_unmasked_prob, self.masking.random_token_prob
        written[masked & (fate >= leave + replace)] = self.mask
        at_random = masked & (fate >= leave) & (fate < leave + replace)
        written[at_random] = random[at_random]
        return written


class LatentSemanticCollator(MaskedLmCollator):
    """Masks sequences and looks up the codes of the masked tokens.

    Only tokens that have a code are masked, so that both losses of MLSM + MLM count the same tokens, and the Trainer's
    means over an update are exact. If the codes cover a share of the positions, the masks are drawn among those, so
    that the share of all tokens that is masked stays.

    Args:
        tokenizer: as of :class:`MaskedLmCollator`.
        masking: how much is masked, and how.
        latent_top: how many atoms of a code are kept, those with the largest weights; None: all.

    Raises:
        ValueError: as of :class:`MaskedLmCollator`; ``latent_top`` is below 1.
    """

    few_masks: ClassVar[str] = "too many tokens have no code, or are unknown to the tokenizer"

    def __init__(self, tokenizer: Any, masking: Masking | None = None, *, latent_top: int | None = None) -> None:
        super().__init__(tokenizer, masking)
        if latent_top is not None and latent_top < 1:
            raise ValueError(f"latent_top must be at least 1, got {latent_top}")
        self.latent_top = latent_top

    def __call__(self, sequences: Sequence[PretrainingSequence]) -> dict[str, Any]:
        """A batch of B sequences of one dataset, padded to the longest.

        Returns:
            what :class:`MaskedLmCollator` gives, and ``codes``: ``atoms`` (n, m) int32, padded with -1, and ``weights``
            (n, m) float16, padded with 0, of the n masked tokens in the order in which ``labels != -100`` selects them.

        Raises:
            ValueError: an id is not in the vocabulary, the dataset has no codes, the sequences are of several datasets,
                or the coverage of the codes is below ``mask_prob`` or does not go with ``whole_words``.
        """
        generators = self._generators(sequences)
        codes = self._codes(sequences)
        drawn = self._drawn(sequences, generators, codes.coverage)
        positions = [one.first + np.arange(len(one.input_ids)) for one in sequences]
        drawn = [places & codes.covered(where) for places, where in zip(drawn, positions, strict=True)]
        everywhere, chosen = np.concatenate(positions), np.concatenate(drawn)
        atoms, weights = codes.store.lookup(everywhere[chosen])
        coded = weights.any(axis=1)
        atoms, weights = atoms[coded], weights[coded]
        if self.latent_top is not None:
            atoms, weights = strongest_of_padded(atoms, weights, self.latent_top)
        chosen[chosen] = coded
        masked = np.split(chosen, np.cumsum([len(where) for where in positions])[:-1])
        found = {"atoms": torch.from_numpy(atoms), "weights": torch.from_numpy(weights)}
        return {**self._written(sequences, masked, generators), "codes": found}

    def _codes(self, sequences: Sequence[PretrainingSequence]) -> SequenceCodes:
        codes = sequences[0].codes
        if codes is None:
            raise ValueError("these sequences have no codes; pass the folder of their codes to PretrainingSequences")
        if any(one.codes is not codes for one in sequences):
            raise ValueError(
                "a batch mixes sequences of several datasets, each with codes of its own; put all sequences into one "
                "dataset, and code that"
            )
        if self.masking.mask_prob > codes.coverage:
            raise ValueError(
                f"mask_prob {self.masking.mask_prob} is more than the share {codes.coverage} of the positions that has "
                "codes; encode with a larger --coverage, or use a smaller mask_prob"
            )
        if self.masking.whole_words and codes.coverage < 1:
            raise ValueError("whole_words needs codes of all positions; encode without --coverage")
        return codes


class TokenContrastiveCollator(MaskedLmCollator):
    """Masks sequences, and draws a positive and negatives for each anchor of the batch.

    Args:
        tokenizer, masking: as of :class:`MaskedLmCollator`.
        contrast: what the tokens are compared with.
    """

    def __init__(self, tokenizer: Any, masking: Masking | None = None, contrast: Contrast | None = None) -> None:
        super().__init__(tokenizer, masking)
        self.contrast = contrast or Contrast()

    def __call__(self, sequences: Sequence[PretrainingSequence]) -> dict[str, Any]:
        """A batch of B sequences, padded to the longest.

        Returns:
            what :class:`MaskedLmCollator` gives, and ``pairs``: ``anchors`` (B, T) bool, ``positive`` (B, T) and
            ``negative`` (B, T, K) int64, as :func:`~mlsm_plugin.losses.token_contrastive.sample_pairs` draws them.
        """
        batch = super().__call__(sequences)
        masked = batch["labels"] != IGNORED
        original = torch.where(masked, batch["labels"], batch["input_ids"])
        content = ~torch.from_numpy(self.unmasked)[original]  # padding is among these, too
        first = sequences[0]
        (state,) = np.random.SeedSequence([self.masking.seed, first.epoch, first.index, 1]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state >> np.uint64(1)))
        positive, negative = sample_pairs(
            content,
            window=self.contrast.positive_window,
            num_negatives=self.contrast.negatives,
            generator=generator,
        )
        anchors = self.contrast.anchors_in(content, masked)
        return {**batch, "pairs": {"anchors": anchors, "positive": positive, "negative": negative}}


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ValueError if a tokenizer has no mask or no padding token."""
    for name in ("mask", "pad"):
        if getattr(tokenizer, f"{name}_token_id", None) is None:
            raise ValueError(f"the tokenizer has no {name} token; use the tokenizer of a masked LM")


def check_samples(samples: Sequence[Any], kind: type) -> None:
    """Raise ValueError unless all samples are of a kind: where ids alone come, nothing decides their masks."""
    for other in samples:
        if not isinstance(other, kind):
            raise ValueError(
                f"the collator got a {type(other).__name__}, not a {kind.__name__}: wrap the ids in "
                f"{kind.__name__}s(ids), whose samples have the number and the epoch on which their masks depend"
            )


def number_of_ids(tokenizer: Any) -> int:
    """The largest id of a tokenizer + 1: ids may be left out, as where a vocab.txt has a line twice."""
    return max(tokenizer.get_vocab().values()) + 1


def special_ids(tokenizer: Any) -> list[int]:
    """Ids that are no text, never masked and never coded: of tokens that begin, end and pad a text, and of masks."""
    names = ("cls", "sep", "bos", "eos", "pad", "mask")
    found = {getattr(tokenizer, f"{name}_token_id", None) for name in names}
    return sorted(int(number) for number in found if number is not None)


def unmasked_ids(tokenizer: Any) -> list[int]:
    """Ids that are never masked, nor drawn in the place of masked ones: of special tokens, and of unknown ones."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    return sorted({*special_ids(tokenizer), *([] if unknown is None else [int(unknown)])})


def piece_classes(tokenizer: Any, masks: Sequence[int] = ()) -> PieceClasses:
    """The classes of all ids of a tokenizer; ``masks`` holds ids that are special, too.

    Raises:
        ValueError: nothing in the vocabulary marks where words begin or end.
    """
    found = tokenizer.convert_ids_to_tokens(list(range(number_of_ids(tokenizer))))
    return PieceClasses.of_vocabulary([token or "" for token in found], {*unmasked_ids(tokenizer), *masks})
