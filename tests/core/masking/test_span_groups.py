"""Groups with masked spans outside of fairseq; test_span_groups_dataset has those of real blocks."""

from __future__ import annotations

import numpy as np
import torch

from mlsm_plugin.core.masking.span_groups import SpanMasking, SpanRules, collate_groups, consecutive_groups, draw_spans
from mlsm_plugin.core.masking.word_boundaries import PieceClasses

PAD, MASK = 0, 1


def masking(**options: object) -> SpanMasking:
    pieces = PieceClasses.of_vocabulary(["<pad>", "<mask>", *(f"\u2581{number}" for number in range(8))], [PAD, MASK])
    rules = SpanRules(mask_prob=0.4)
    return SpanMasking(pieces, rules, start_mask=MASK, end_mask=MASK, pad=PAD, seed=3, **options)  # type: ignore[arg-type]


def groups(number: int = 2) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [[rng.integers(2, 10, size=rng.integers(4, 12)) for _ in range(4)] for _ in range(number)]


def test_the_masks_replace_the_spans() -> None:
    drawn = [draw_spans(group, masking(), epoch=1, index=index) for index, group in enumerate(groups())]
    batch = collate_groups(drawn, masking())
    masked, context, spans = batch["net_input"]["src_tokens"], batch["context"]["src_tokens"], batch["spans"]
    sequences = [tokens for group in groups() for tokens in group]
    assert len(spans["length"]) == sum(len(one["spans"]) for one in drawn) > 2
    for row, tokens in enumerate(sequences):
        of_row = spans["sequence"] == row
        assert context[row, : len(tokens)].tolist() == tokens.tolist()
        written, done = [], 0
        for start, length in zip(spans["start"][of_row].tolist(), spans["length"][of_row].tolist(), strict=True):
            written += [*tokens[done:start], MASK, MASK]
            done = start + length
        written += [*tokens[done:]]
        assert masked[row, : len(written)].tolist() == written
        assert bool((masked[row, len(written) :] == PAD).all())
    assert batch["num_groups"] == 2


def test_spans_depend_on_seed_epoch_and_group() -> None:
    (group, _) = groups()
    first = draw_spans(group, masking(), epoch=1, index=0)
    assert draw_spans(group, masking(), epoch=1, index=0)["spans"] == first["spans"]
    assert any(draw_spans(group, masking(), epoch=epoch, index=0)["spans"] != first["spans"] for epoch in range(2, 6))


def test_a_sequence_of_masks_is_not_longer_than_the_model() -> None:
    longest = max(len(tokens) for tokens in groups()[0])
    drawn = draw_spans(groups()[0], masking(max_length=longest), epoch=1, index=0)
    width = collate_groups([drawn], masking())["net_input"]["src_tokens"].size(1)
    assert width <= longest
    single = collate_groups([draw_spans(groups()[0], masking(single=True), epoch=1, index=0)], masking(single=True))
    assert bool((single["spans"]["length"] == 1).all())
    assert torch.equal(single["spans"]["query_start"], single["spans"]["query_end"])


def test_no_group_has_one_block_only() -> None:
    assert [len(group) for group in consecutive_groups(9, 4)] == [4, 5]
    assert [len(group) for group in consecutive_groups(1, 4)] == [1]
