"""Groups of real blocks with masked spans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fairseq import tasks

from mlsm_plugin.core.masking.span_groups import consecutive_groups
from tests.conftest import Pipeline
from tests.tiny_run import seeded_model, training_config


def task_of(pipeline: Pipeline, *flags: object, build: bool = False) -> Any:
    words = ("--group-size", 4, "--tokens-per-sample", 48, *flags)
    cfg = training_config(pipeline.data_bin, *words, task="nonparametric_masked_lm", criterion="span_contrastive")
    task = tasks.setup_task(cfg.task)
    if build:
        seeded_model(cfg, task)
    task.load_dataset("train")
    return task


def spans_of(sample: dict[str, Any], row: int) -> list[tuple[int, int, int, int]]:
    columns = [sample["spans"][name] for name in ("query_start", "query_end", "start", "length")]
    return [tuple(values) for values in torch.stack(columns, dim=1)[sample["spans"]["sequence"] == row].tolist()]


@pytest.mark.parametrize("flags", [(), ("--span-mask-symbols", "shared"), ("--span-mode", "single")], ids=str)
def test_masks_stand_where_the_spans_were_and_each_span_occurs_in_another_sequence(
    pipeline: Pipeline, flags: tuple[object, ...]
) -> None:
    task = task_of(pipeline, *flags)
    dataset = task.dataset("train")
    single = "single" in flags
    masks = task.span_masks[:1] if single else task.span_masks
    assert masks == ([task.mask_idx] * len(masks) if flags else [task.mask_idx + 1, task.mask_idx + 2])
    for group in (0, 1, len(dataset) - 1):
        sample = dataset.collater([dataset[group]])
        masked, context = sample["net_input"]["src_tokens"], sample["context"]["src_tokens"]
        originals = [row[row != 1].tolist() for row in context]
        assert len(sample["spans"]["length"]) > 3
        for row, original in enumerate(originals):
            rebuilt = masked[row][: int(sample["net_input"]["src_lengths"][row])].tolist()
            for first, last, start, length in reversed(spans_of(sample, row)):
                assert rebuilt[first : last + 1] == masks
                ngram = original[start : start + length]
                rebuilt[first : last + 1] = ngram
                text = " ".join(map(str, ngram))
                others = [other for number, other in enumerate(originals) if number != row]
                assert any(f" {text} " in f" {' '.join(map(str, other))} " for other in others)
            assert rebuilt == original
        assert not single or bool((sample["spans"]["length"] == 1).all())


@pytest.mark.slow
def test_every_epoch_masks_anew_and_the_same_epoch_the_same(pipeline: Pipeline) -> None:
    def spans(epoch: int, *flags: object) -> list[Any]:
        dataset = task_of(pipeline, *flags).dataset("train")
        dataset.set_epoch(epoch)
        return [dataset[group]["spans"] for group in range(8)]

    first = spans(1)
    assert spans(1) == first
    assert sum(one == other for one, other in zip(spans(2), first, strict=True)) < 4
    assert sum(one == other for one, other in zip(spans(1, "--seed", 5), first, strict=True)) < 4


@pytest.mark.slow
def test_batches_do_not_depend_on_the_number_of_loader_processes(pipeline: Pipeline) -> None:
    def epochs(num_workers: int) -> list[Any]:
        task = task_of(pipeline)
        iterator = task.get_batch_iterator(
            task.dataset("train"), max_sentences=2, max_positions=64, seed=1, num_workers=num_workers
        )
        return [list(iterator.next_epoch_itr(shuffle=True)) for _ in range(2)]

    alone, helped = epochs(0), epochs(2)
    assert len(alone[0]) == len(helped[0]) > 5
    for ours, theirs in zip(alone[0] + alone[1], helped[0] + helped[1], strict=True):
        assert torch.equal(ours["id"], theirs["id"])
        assert torch.equal(ours["net_input"]["src_tokens"], theirs["net_input"]["src_tokens"])
    by_id = [{int(batch["id"][0]): batch["net_input"]["src_tokens"] for batch in epoch} for epoch in alone]
    common = set(by_id[0]) & set(by_id[1])
    assert len(common) > 2
    same = sum(torch.equal(by_id[0][key], by_id[1][key]) for key in common)
    assert same < len(common) / 10  # where little is repeated, all of it is masked


@pytest.mark.slow
def test_masked_sequences_fit_the_positions_of_the_model(pipeline: Pipeline) -> None:
    roomy, tight = (
        task_of(pipeline, "--max-positions", positions, "--mask-prob", 0.4, build=True) for positions in (112, 49)
    )
    longest = max(int(batch["net_input"]["src_lengths"].max()) for batch in collated(roomy))
    assert longest > 49
    assert max(int(batch["net_input"]["src_lengths"].max()) for batch in collated(tight)) <= 49
    default = task_of(pipeline, build=True)
    assert default.model_positions == 48 + 64


def collated(task: Any) -> list[Any]:
    dataset = task.dataset("train")
    return [dataset.collater([dataset[index]]) for index in range(len(dataset))]


def test_sizes_are_those_of_the_groups(pipeline: Pipeline) -> None:
    dataset = task_of(pipeline).dataset("train")
    item = dataset[3]
    assert dataset.num_tokens(3) == sum(map(len, item["sequences"]))
    assert dataset.size(3) == max(map(len, item["sequences"])) <= 48
    batch = dataset.collater([dataset[0], item])
    assert batch["ntokens"] == dataset.num_tokens(0) + dataset.num_tokens(3)
    assert (batch["nsentences"], batch["num_groups"]) == (8, 2)
    assert batch["id"].tolist() == [0, 3]
    assert int(batch["spans"]["sequence"].max()) > 3
    assert dataset.collater([]) == {}
    kept, left_out = dataset.filter_indices_by_size(np.arange(len(dataset)), dataset.size(3) - 1)
    assert 3 in left_out
    assert len(kept) + len(left_out) == len(dataset)


def test_groups_are_blocks_that_follow_each_other_or_random_ones(pipeline: Pipeline) -> None:
    assert [group.tolist() for group in consecutive_groups(7, 3)] == [[0, 1, 2], [3, 4, 5, 6]]
    assert [group.tolist() for group in consecutive_groups(8, 3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [group.tolist() for group in consecutive_groups(1, 3)] == [[0]]
    by_document, at_random = (task_of(pipeline, "--group-by", by).dataset("train") for by in ("document", "random"))
    in_order = np.concatenate(by_document.groups)
    assert bool((np.diff(in_order) > 0).all())
    shuffled = np.concatenate(at_random.groups)
    assert sorted(shuffled) == in_order.tolist() != shuffled.tolist()


def test_text_without_anything_in_common_is_refused_and_with_little_is_said(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    short = ("--group-size", 2, "--sample-break-mode", "none", "--tokens-per-sample")
    with pytest.raises(ValueError, match=r"of train have no span that occurs in two of their blocks: there is nothing"):
        task_of(pipeline, *short, 4, "--mask-prob", 0.01)
    caplog.clear()
    task_of(pipeline, *short, 16)
    assert any("have no span that occurs in two" in record.getMessage() for record in caplog.records)
