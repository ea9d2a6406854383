"""The task of NPM: its symbols, positions, groups and options, without a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, tasks
from fairseq.models import BaseFairseqModel

from mlsm_plugin.fairseq_plugin.compat.binarized_files import StreamingMMapBuilder
from mlsm_plugin.fairseq_plugin.tasks.nonparametric_masked_lm import NonparametricMaskedLMTask
from tests.tiny_models import MASKED_LM, TinyData, save_untrained
from tests.tiny_run import seeded_model, training_config

NPM = {"task": "nonparametric_masked_lm", "criterion": "span_contrastive"}
SIZES = ("--group-size", 4, "--tokens-per-sample", 24)


def config(data: Path, *flags: object) -> Any:
    return training_config(data, *SIZES, *flags, **NPM)


def task_of(data: Path, *flags: object) -> NonparametricMaskedLMTask:
    task = tasks.setup_task(config(data, *flags).task)
    assert isinstance(task, NonparametricMaskedLMTask)
    return task


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--group-size", 1), "--group-size must be at least 2, got 1: spans are found in other blocks"),
        (("--mask-prob", 0), "options of the span masking: .*mask_prob"),
        (("--span-length-p", 0), "options of the span masking: .*length_p"),
        (("--max-span-length", 0), "options of the span masking: .*max_length"),
        (("--context-masking-ratio", 2), r"--context-masking-ratio must be in \[0, 1\], got 2.0"),
    ],
)
def test_options_without_meaning_are_refused(tiny: TinyData, flags: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_of(tiny.data_bin, *flags)


def test_masks_are_symbols_of_their_own_or_the_mask(tiny: TinyData) -> None:
    distinct, shared = (task_of(tiny.data_bin, "--span-mask-symbols", kind) for kind in ("distinct", "shared"))
    assert [distinct.source_dictionary[index] for index in distinct.span_masks] == ["<mask_s>", "<mask_e>"]
    assert shared.span_masks == [shared.mask_idx] * 2
    assert len(distinct.source_dictionary) == len(shared.source_dictionary) + 2
    assert set(distinct.span_masks) < set(distinct.special_ids)


def test_model_has_room_for_masks_that_are_longer_than_what_they_replace(tiny: TinyData) -> None:
    cfg = config(tiny.data_bin, "--max-spans-per-sequence", 10)
    task = tasks.setup_task(cfg.task)
    cfg.model.max_positions = None
    assert seeded_model(cfg, task).max_positions() == task.model_positions == 34
    cfg.model.max_positions = 50
    assert seeded_model(cfg, task).max_positions() == 50


def test_masks_of_a_masked_lm_checkpoint_begin_as_its_mask(tiny: TinyData, tmp_path: Path) -> None:
    start = torch.load(save_untrained(tiny.data_bin, tmp_path / "start", "--max-positions", 50, **MASKED_LM))["model"]
    cfg = config(tiny.data_bin, "--max-positions", 50)
    task = tasks.setup_task(cfg.task)
    model = seeded_model(cfg, task, seed=2)
    model.load_state_dict(start, strict=True)
    weight = model.state_dict()["encoder.sentence_encoder.embed_tokens.weight"]
    known = len(start["encoder.sentence_encoder.embed_tokens.weight"])
    assert torch.equal(weight[:known], start["encoder.sentence_encoder.embed_tokens.weight"])
    for index in task.span_masks:
        assert torch.equal(weight[index], weight[task.mask_idx])
        assert model.encoder.lm_head.bias[index] == start["encoder.lm_head.bias"][task.mask_idx]


@pytest.mark.parametrize("how", ["document", "random"])
def test_every_block_is_in_one_group_and_spans_change_with_the_epoch(tiny: TinyData, how: str) -> None:
    task = task_of(tiny.data_bin, "--group-by", how)
    task.load_dataset("train")
    dataset = task.dataset("train")
    order = [int(index) for group in dataset.groups for index in group]
    assert sorted(order) == list(range(len(dataset.blocks)))
    assert (order == sorted(order)) == (how == "document")
    epochs = []
    for epoch in (1, 1, 2):
        dataset.set_epoch(epoch)
        epochs.append([dataset[index]["spans"] for index in range(5)])
    assert epochs[0] == epochs[1] != epochs[2]


def test_batch_that_only_stands_in_for_a_missing_one_is_marked(tiny: TinyData) -> None:
    class Noting:
        def __init__(self) -> None:
            self.marks: list[bool] = []

        def __call__(self, model: Any, sample: dict[str, Any]) -> Any:
            self.marks.append(bool(sample.get("is_dummy")))
            return 2 * torch.ones((), requires_grad=True), 1, {}

    class NoStep:
        def backward(self, loss: torch.Tensor) -> None:
            loss.backward()

    parts = {"spans": {"length": torch.zeros(0)}, "context": {"src_tokens": torch.zeros(1, 2)}}
    task, sample, criterion = task_of(tiny.data_bin), {"id": 1, **parts}, Noting()
    for ignore in (False, True, False):
        task.train_step(sample, BaseFairseqModel(), criterion, NoStep(), 0, ignore)
    assert criterion.marks == [False, True, False]
    assert sample == {"id": 1, **parts}


def test_text_in_which_nothing_occurs_twice_is_refused(tiny: TinyData, tmp_path: Path) -> None:
    data = tiny.copy(tmp_path / "data-bin")
    builder = StreamingMMapBuilder(str(data / "train.bin"), 200)
    for first in range(10, 190, 20):  # every piece once
        builder.add_sentences(np.array([*range(first, first + 20), 2]), np.array([21]))
    builder.finalize(str(data / "train.idx"))
    message = r"groups of train have no span that occurs in two of their blocks: .*--group-by document"
    with pytest.raises(ValueError, match=message):
        task_of(data).load_dataset("train")


def test_checkpoint_loads_where_there_is_no_data(tiny: TinyData, tmp_path: Path) -> None:
    checkpoint = save_untrained(tiny.data_bin, tmp_path, *SIZES, **NPM)
    overrides = {"data": str(tmp_path)}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], overrides)
    assert task.span_masks[1] == len(task.source_dictionary) - 1
    assert len(model.encoder.sentence_encoder.embed_tokens.weight) == len(task.source_dictionary)
