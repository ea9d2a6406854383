"""Sentences longer than a sample: each task trains on all of their tokens, in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import tasks

from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings
from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary, load_split
from tests.conftest import CRITERIONS, Pipeline
from tests.long_sentences import TOKENS_PER_SAMPLE, data_with_long_sentences
from tests.tiny_run import batches, training_config

SLOW = pytest.mark.slow
# complete_doc leaves document boundaries out
BREAK_MODES = ["eos", *(pytest.param(mode, marks=SLOW) for mode in ("none", "complete"))]


@pytest.fixture(scope="module")
def data(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return data_with_long_sentences(pipeline, tmp_path_factory.mktemp("long sentences"))


def split_tokens(data: Path) -> list[int]:
    split = load_split(str(data / "train"), load_dictionary(data))
    assert max(split.sizes) > 4 * TOKENS_PER_SAMPLE
    return [token for index in range(len(split)) for token in split[index].tolist()]


def task_of(data: Path, name: str, *flags: object) -> tuple[Any, Any]:
    arch = "denoising_small" if name == "span_denoising" else "mlsm_roberta_tiny"
    cfg = training_config(data, *flags, task=name, criterion=CRITERIONS[name], arch=arch)
    return cfg, tasks.setup_task(cfg.task)


def unmasked_samples(cfg: Any, task: Any) -> list[torch.Tensor]:
    """The samples of an epoch as they were before masking, without padding, in the order of the text."""
    pad, found = task.source_dictionary.pad(), {}
    for batch in batches(cfg, task=task):
        tokens = torch.where(batch["target"].ne(pad), batch["target"], batch["net_input"]["src_tokens"])
        lengths = batch["net_input"]["src_lengths"].tolist()
        for index, row, length in zip(batch["id"].tolist(), tokens, lengths, strict=True):
            found[index] = row[:length]
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("break_mode", BREAK_MODES)
@pytest.mark.parametrize("name", ["masked_latent_semantic", "taco"])
def test_masked_lm_tasks_see_every_token_once(data: Path, name: str, break_mode: str) -> None:
    cfg, task = task_of(data, name, "--sample-break-mode", break_mode)
    samples = unmasked_samples(cfg, task)
    assert max(map(len, samples)) == TOKENS_PER_SAMPLE
    assert {int(sample[0]) for sample in samples} == {task.source_dictionary.bos()}
    assert [token for sample in samples for token in sample[1:].tolist()] == split_tokens(data)


@pytest.mark.parametrize("break_mode", [*BREAK_MODES, pytest.param("complete_doc", marks=SLOW)])
def test_samples_are_what_the_auxiliary_model_sees(data: Path, break_mode: str) -> None:
    cfg, task = task_of(data, "masked_latent_semantic", "--sample-break-mode", break_mode)
    reader = BlockReader(data, "train", BlockSettings(TOKENS_PER_SAMPLE, break_mode))
    seen = [block.tokens.tolist() for index in range(len(reader)) for block in reader.block(index)]
    assert (len(seen) > len(reader)) == (break_mode != "none")
    assert [sample.tolist() for sample in unmasked_samples(cfg, task)] == seen


@pytest.mark.parametrize("break_mode", BREAK_MODES)
def test_codes_stay_with_their_tokens(data: Path, break_mode: str) -> None:
    cfg, task = task_of(data, "masked_latent_semantic", "--sample-break-mode", break_mode, "--mask-prob", 0.5)
    task.load_dataset("train")
    sizes = np.array(task.dataset("train").sizes, np.int64).reshape(-1) - 1  # without BOS
    starts = np.cumsum(sizes) - sizes  # every token is in one sample, in order
    store = CodeStore(data / "train.codes")
    codes, compared = store.rows(0, len(store)).toarray(), 0
    for batch in batches(cfg, task=task):
        sample, place = batch["target"].ne(task.source_dictionary.pad()).nonzero(as_tuple=True)
        expected = codes[starts[batch["id"][sample].numpy()] + place.numpy() - 1]
        expected[(place == 0).numpy()] = 0  # a masked BOS
        found = np.zeros_like(expected)
        for row, atoms, weights in zip(
            found, batch["codes"]["atoms"].numpy(), batch["codes"]["weights"].numpy(), strict=True
        ):
            row[atoms[atoms >= 0]] = weights[atoms >= 0]
        np.testing.assert_array_equal(found, expected)
        compared += int((expected > 0).any(axis=1).sum())
    assert compared > 1000


@pytest.mark.parametrize("break_mode", BREAK_MODES)
def test_groups_of_npm_hold_every_token_once(data: Path, break_mode: str) -> None:
    _, task = task_of(data, "nonparametric_masked_lm", "--sample-break-mode", break_mode, "--group-size", 4)
    task.load_dataset("train")
    dataset = task.dataset("train")
    samples = [dataset.blocks[int(index)] for group in dataset.groups for index in group]
    assert max(map(len, samples)) == TOKENS_PER_SAMPLE
    assert [token for sample in samples for token in sample[1:].tolist()] == split_tokens(data)
    assert len(dataset[0]["sequences"]) == 4


@pytest.mark.parametrize("break_mode", BREAK_MODES)
def test_span_denoising_sees_every_token_once(data: Path, break_mode: str) -> None:
    _, task = task_of(data, "span_denoising", "--sample-break-mode", break_mode)
    task.load_dataset("train")
    dataset, eos = task.dataset("train"), task.dictionary.eos()
    texts = [dataset.blocks[index].tolist() for index in range(len(dataset))]
    assert max(map(len, texts)) == task.text_length
    assert min(map(len, texts)) >= 2
    assert [token for text in texts for token in text] == [token for token in split_tokens(data) if token != eos]
    assert all(len(dataset[index]["source"]) <= TOKENS_PER_SAMPLE for index in range(len(dataset)))
