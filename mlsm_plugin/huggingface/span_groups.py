"""Groups of sequences for NPM (Min et al., 2022), and their collator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from mlsm_plugin.data.span_groups import SpanMasking, SpanRules, collate_groups, consecutive_groups, draw_spans
from mlsm_plugin.huggingface.collators import IGNORED, check_samples, check_tokenizer, piece_classes, special_ids
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from mlsm_plugin.tokenization.hf_tokenizer import vocabulary_fingerprint
from mlsm_plugin.tokenization.word_boundaries import SPAN_MASKS


@dataclass(frozen=True)
class SpanGroup:
    """Sequences that follow each other, ``(T_i,)`` each; the epoch and the index decide their spans."""

    sequences: list[np.ndarray]
    index: int
    epoch: int


class SpanGroups(Dataset):
    """Groups of sequences that follow each other in the corpus; the Trainer's batch size counts groups.

    Args:
        input_ids: as of :class:`~mlsm_plugin.huggingface.token_sequences.TokenSequences`, or one of these.
        group_size: sequences of a group, at least 2.

    Raises:
        ValueError: the groups would be too small, or there is only one sequence.
    """

    def __init__(self, input_ids: Any, group_size: int = 16) -> None:
        self.sequences = input_ids if isinstance(input_ids, TokenSequences) else TokenSequences(input_ids)
        if group_size < 2:
            raise ValueError(f"group_size must be at least 2, got {group_size}: spans are found in other sequences")
        if len(self.sequences) < 2:
            raise ValueError("the text is only one sequence; spans are found in other sequences of a group")
        self.groups = consecutive_groups(len(self.sequences), group_size)
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the spans."""
        self._epoch[0] = epoch

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> SpanGroup:
        return SpanGroup([self.sequences[int(one)] for one in self.groups[index]], int(index), int(self._epoch[0]))


class SpanGroupsCollator:
    """Draws the spans that several sequences of a group have in common, and masks them.

    A span becomes ``<mask_s> <mask_e>`` if the tokenizer has these tokens, otherwise two mask tokens.

    Args:
        tokenizer: a tokenizer of the library, with a mask token.
        max_length: positions of the model; a span of one token becomes two masks.
        rules: the rules by which spans are drawn.
        seed: decides the spans of a group, together with the epoch and the number of the group.

    Raises:
        ValueError: the tokenizer has no mask or padding token, or nothing in its vocabulary marks words.
    """

    few_masks: ClassVar[str] = (
        "spans must occur in two sequences of a group: use larger groups, or rules that allow more or longer spans, or "
        "ask for less (mask_prob)"
    )

    def __init__(self, tokenizer: Any, *, max_length: int, rules: SpanRules | None = None, seed: int = 1) -> None:
        check_tokenizer(tokenizer)
        self.vocabulary = vocabulary_fingerprint(tokenizer)
        vocabulary, mask = tokenizer.get_vocab(), int(tokenizer.mask_token_id)
        start, end = (vocabulary.get(symbol, mask) for symbol in SPAN_MASKS)
        self.pad = int(tokenizer.pad_token_id)
        self.masking = SpanMasking(
            pieces=piece_classes(tokenizer, (start, end)),
            rules=rules or SpanRules(),
            start_mask=start,
            end_mask=end,
            pad=self.pad,
            seed=seed,
            max_length=max_length,
        )
        rest = sorted({*special_ids(tokenizer), start, end} - {self.pad})
        self._special = torch.tensor([self.pad, *rest])

    @property
    def mask_prob(self) -> float:
        """The share of the tokens to mask."""
        return self.masking.rules.mask_prob

    def masked_counts(self, batch: dict[str, Any]) -> tuple[int, int]:
        """How many tokens of a batch are masked, and how many there are but special ones."""
        return int(batch["spans"]["length"].sum()), int(batch["content"].sum())

    def _num_content(self, sequences: Sequence[np.ndarray]) -> int:
        special = self._special.numpy()
        return sum(int((~np.isin(ids, special)).sum()) for ids in sequences)

    def __call__(self, groups: Sequence[SpanGroup]) -> dict[str, Any]:
        """A batch of groups with S sequences in all and n spans.

        Returns:
            ``input_ids`` and ``attention_mask`` (S, T') with masks, ``context_ids`` (S, T) without them, ``spans`` as
            of :func:`~mlsm_plugin.data.span_groups.collate_groups`, ``special``: ids that cannot be retrieved, padding
            first, ``content`` (number of groups,): the number of tokens of each but special ones, and ``labels``
            (number of groups, most spans of one): 1 for each span of a group, by which the Trainer counts them, then
            :data:`~mlsm_plugin.huggingface.collators.IGNORED`.

        Raises:
            ValueError: the groups are not those of :class:`SpanGroups`.
        """
        check_samples(groups, SpanGroup)
        drawn = [draw_spans(one.sequences, self.masking, epoch=one.epoch, index=one.index) for one in groups]
        batch = collate_groups(drawn, self.masking)
        masked, context = (
            ids if ids.size(1) else ids.new_full((len(ids), 1), self.pad)  # all sequences are empty
            for ids in (batch["net_input"]["src_tokens"], batch["context"]["src_tokens"])
        )
        counts = torch.tensor([len(one["spans"]) for one in drawn])
        places = torch.arange(max(1, int(counts.max())))
        return {
            # the first entry: the Trainer takes its length as that of the batch, which it counts in groups
            "labels": torch.where(places < counts[:, None], 1, IGNORED),
            "input_ids": masked,
            "attention_mask": (masked != self.pad).long(),
            "context_ids": context,
            "spans": batch["spans"],
            "special": self._special,
            "content": torch.tensor([self._num_content(one.sequences) for one in groups]),
        }
