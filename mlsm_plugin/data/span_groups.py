"""Groups of sequences whose common spans are masked, and their batches (Min et al., 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.data.cooccurring_spans import SpanRules, sample_spans
from mlsm_plugin.tokenization.word_boundaries import PieceClasses


@dataclass(frozen=True)
class SpanMasking:
    """How spans are drawn and written.

    Attributes:
        pieces: the classes of all ids.
        rules: the rules by which spans are drawn.
        start_mask, end_mask: the two ids that replace a span.
        pad: the padding id.
        seed: decides the spans of a group, together with the epoch and the number of the group.
        single: mask and retrieve each token of a span separately; one ``start_mask`` replaces it.
        max_length: maximum length of a masked sequence. A span of one token becomes two masks; such spans are dropped
            if the sequence gets too long.
        context_masking_ratio: probability that the keys of a batch come from the masked sequences.
    """

    pieces: PieceClasses
    rules: SpanRules
    start_mask: int
    end_mask: int
    pad: int
    seed: int
    single: bool = False
    max_length: int | None = None
    context_masking_ratio: float = 0.0


def draw_spans(sequences: Sequence[np.ndarray], masking: SpanMasking, *, epoch: int, index: int) -> dict[str, Any]:
    """A group with its masked spans, which depend only on the seed, the epoch and the number of the group.

    Args:
        sequences: ids of each sequence ``(T_i,)``.
        masking: how spans are drawn.
        epoch, index: the epoch, and the number of the group.

    Returns:
        what :func:`collate_groups` reads.
    """
    rng = np.random.default_rng([masking.seed, epoch, index])
    spans = sample_spans(sequences, pieces=masking.pieces, rules=masking.rules, rng=rng)
    if masking.single:
        spans = [(sequence, start + i, 1) for sequence, start, length in spans for i in range(length)]
    return {
        "id": index,
        "sequences": sequences,
        "spans": _fitting(spans, sequences, masking),
        "mask_context": bool(rng.random() < masking.context_masking_ratio),
    }


def collate_groups(samples: list[dict[str, Any]], masking: SpanMasking) -> dict[str, Any]:
    """A batch of groups, which :func:`draw_spans` made.

    Returns:
        a dict of ``net_input`` with the masked ``src_tokens`` (S, T') and ``src_lengths`` (S,) of the S sequences
        of all groups; ``context`` with the unmasked ``src_tokens`` (S, T); ``spans``, a dict of (n,) tensors: the
        ``sequence`` of each span, the positions of its masks in the masked sequence (``query_start`` and
        ``query_end``), and its place in the unmasked sequence (``start`` and ``length``); ``mask_context``, whether
        the keys come from the masked sequences; ``id``, ``nsentences``, ``ntokens``, ``num_groups`` and
        ``num_groups_without_spans``.
    """
    masked: list[np.ndarray] = []
    context: list[np.ndarray] = []
    rows: list[tuple[int, int, int, int, int]] = []
    for sample in samples:
        of_sequence: list[list[tuple[int, int]]] = [[] for _ in sample["sequences"]]
        for sequence, start, length in sample["spans"]:
            of_sequence[sequence].append((start, length))
        for tokens, spans in zip(sample["sequences"], of_sequence, strict=True):
            written, places = _write_masks(tokens, spans, masking)
            rows.extend((len(context), *place, *span) for place, span in zip(places, spans, strict=True))
            masked.append(written)
            context.append(tokens)
    columns = torch.tensor(rows, dtype=torch.long).reshape(-1, 5).unbind(dim=1)
    return {
        "id": torch.tensor([sample["id"] for sample in samples]),
        "nsentences": len(context),
        "ntokens": sum(len(tokens) for tokens in context),
        "num_groups": len(samples),
        "num_groups_without_spans": sum(not sample["spans"] for sample in samples),
        "net_input": {
            "src_tokens": _padded(masked, masking.pad),
            "src_lengths": torch.tensor([len(tokens) for tokens in masked]),
        },
        "context": {"src_tokens": _padded(context, masking.pad)},
        "spans": dict(zip(("sequence", "query_start", "query_end", "start", "length"), columns, strict=True)),
        "mask_context": samples[0]["mask_context"],
    }


def _write_masks(
    tokens: np.ndarray, spans: list[tuple[int, int]], masking: SpanMasking
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """``tokens`` with masks in place of ``spans``, and the positions of the first and last mask of each span."""
    masks = [masking.start_mask] if masking.single else [masking.start_mask, masking.end_mask]
    parts: list[Any] = []
    places = []
    done = written = 0
    for start, length in spans:
        parts += [tokens[done:start], masks]
        written += start - done + len(masks)
        places.append((written - len(masks), written - 1))
        done = start + length
    return np.concatenate([*parts, tokens[done:]]).astype(np.int64), places


def _padded(sequences: list[np.ndarray], pad: int) -> Tensor:
    padded = torch.full((len(sequences), max(map(len, sequences))), pad)
    for row, tokens in zip(padded, sequences, strict=True):
        row[: len(tokens)] = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
    return padded


def _fitting(
    spans: list[tuple[int, int, int]], sequences: Sequence[np.ndarray], masking: SpanMasking
) -> list[tuple[int, int, int]]:
    """``spans`` without those of one token, from the last on, that would make a masked sequence too long."""
    if masking.max_length is None or masking.single:
        return spans
    length = [len(tokens) for tokens in sequences]
    for sequence, _, span_length in spans:
        length[sequence] += 2 - span_length
    kept = []
    for span in reversed(spans):
        if span[2] == 1 and length[span[0]] > masking.max_length:
            length[span[0]] -= 1
        else:
            kept.append(span)
    return kept[::-1]


def consecutive_groups(num_blocks: int, group_size: int, *, order: np.ndarray | None = None) -> list[np.ndarray]:
    """Numbers of the blocks of each group: ``group_size`` consecutive blocks, in the given ``order`` if there is one.

    No group has only one block, unless there is only one block.
    """
    numbers = np.arange(num_blocks) if order is None else order
    groups = [numbers[start : start + group_size] for start in range(0, num_blocks, group_size)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        groups[-2:] = [np.concatenate(groups[-2:])]
    return groups
