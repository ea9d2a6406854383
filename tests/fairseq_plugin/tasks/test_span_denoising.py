"""The task of span denoising: which texts its batches hold, and options without meaning."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import tasks

from mlsm_plugin.core.masking.word_boundaries import LONGEST_WORD
from mlsm_plugin.fairseq_plugin.compat.binarized_files import StreamingMMapBuilder
from mlsm_plugin.fairseq_plugin.data.token_blocks import load_split
from tests.conftest import Pipeline
from tests.denoising_flags import TINY
from tests.restored_spans import restore_spans
from tests.tiny_models import TinyData
from tests.tiny_run import training_config

Capture = pytest.CaptureFixture[str]


def task_of(made: Any, *flags: object, split: str = "train") -> Any:
    cfg = training_config(
        made.data_bin, *TINY, *flags, task="span_denoising", criterion="cross_entropy", arch="denoising_small"
    )
    task = tasks.setup_task(cfg.task)
    task.load_dataset(split)
    return task


@pytest.mark.parametrize(
    "mode", ["none", "complete", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("complete_doc", "eos"))]
)
def test_batches_hold_all_text_little_padding_and_right_counts(pipeline: Pipeline, mode: str) -> None:
    task = task_of(pipeline, "--sample-break-mode", mode)
    batches = list(
        task.get_batch_iterator(
            task.dataset("train"), max_sentences=16, required_batch_size_multiple=8, max_positions=(64, 64), seed=1
        ).next_epoch_itr(shuffle=True)
    )
    pad, eos = task.dictionary.pad(), task.dictionary.eos()
    texts = {}
    padding = tokens = 0
    for batch in batches:
        sources, targets = batch["net_input"]["src_tokens"], batch["target"]
        assert batch["nsentences"] == len(sources) == len(targets)
        assert batch["ntokens"] == int((targets != pad).sum())
        assert batch["net_input"]["src_lengths"].tolist() == (sources != pad).sum(dim=1).tolist()
        assert sources.size(1) <= 48
        moved = torch.cat([torch.full((len(targets), 1), eos), targets[:, :-1]], dim=1)
        assert torch.equal(batch["net_input"]["prev_output_tokens"], moved.masked_fill(targets == pad, pad))
        for number, source, target in zip(batch["id"].tolist(), sources, targets, strict=True):
            own = [row[row != pad].numpy() for row in (source, target)]
            texts[number] = restore_spans(*own, sentinels=task.sentinels, eos=eos)
        padding += int((sources == pad).sum() + (targets == pad).sum())
        tokens += sources.numel() + targets.numel()
    assert padding / tokens < 0.02
    split = load_split(str(pipeline.data_bin / "train"), task.dictionary)
    expected = [token for i in range(len(split)) for token in split[i][:-1].tolist()]
    found = [token for number in sorted(texts) for token in texts[number].tolist()]
    assert len(expected) - 2 <= len(found) <= len(expected)  # but for texts of one token
    assert found == expected or Counter(found) <= Counter(expected)


def test_noise_is_new_in_every_epoch_and_the_same_for_a_seed(tiny: TinyData) -> None:
    dataset, same, other = (
        task_of(tiny, "--seed", seed, "--noise-density", 0.3).dataset("train") for seed in (1, 1, 2)
    )
    item = dataset[3]["source"]
    assert np.array_equal(item, dataset[3]["source"])
    assert np.array_equal(item, same[3]["source"])
    assert not np.array_equal(item, other[3]["source"])
    dataset.set_epoch(2)
    assert not np.array_equal(item, dataset[3]["source"])


@pytest.mark.parametrize("density", [0.5, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.15, 0.8))])
def test_whole_words_fit_and_are_whole(pipeline: Pipeline, density: float) -> None:
    task = task_of(pipeline, "--mask-whole-words", "--noise-density", density, "--rotate")
    symbols = task.dictionary.symbols
    dataset = task.dataset("train")
    shares, whole = [], 0
    for index in range(60):
        item = dataset[index]
        assert len(item["source"]) <= 48
        text = dataset.blocks[index].tolist()
        assert restore_spans(item["source"], item["target"], sentinels=task.sentinels, eos=2).tolist() == text
        pieces = [symbols[token] for token in item["source"][:-1]]
        ends_a_word = [not piece.isalnum() for piece in pieces]  # begins with the mark of a word, or is no letter
        behind = [ends_a_word[i + 1] for i, piece in enumerate(pieces[:-1]) if piece.startswith("<extra_id_")]
        begins = [place for place, token in enumerate(text) if symbols[token].startswith("\u2581")]
        long = max(np.diff([0, *begins, len(text)])) > LONGEST_WORD  # its tokens are words
        assert long or 3 in text or all(behind)
        whole += not long
        shares.append(1 - (len(pieces) - sum(piece.startswith("<extra_id_") for piece in pieces)) / len(text))
    assert np.mean(shares) == pytest.approx(density, abs=0.08)
    assert whole > 30


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--noise-density", 1), "options of the span corruption: noise_density must be between 0 and 1, got 1"),
        (("--mean-span-length", 0), "options of the span corruption: mean_span_length must be at least 1, got 0"),
        (("--sentinels", 0), "--sentinels must be at least 1, got 0"),
        (("--tokens-per-sample", 2), "options of the span corruption: sources of 2 tokens are too short"),
    ],
)
def test_options_without_meaning_are_refused(tiny: TinyData, flags: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_of(tiny, *flags)


@pytest.mark.parametrize("mode", ["none", "complete", "complete_doc", "eos"])
def test_texts_of_one_token_are_refused_in_every_mode(tiny: TinyData, tmp_path: Path, mode: str) -> None:
    data = tiny.copy(tmp_path / "data")
    builder = StreamingMMapBuilder(str(data / "valid.bin"), 100)
    documents = np.array([9, 2, 2, 8, 2])  # a token, a boundary, a token
    builder.add_sentences(documents, np.array([2, 1, 2]))
    builder.finalize(str(data / "valid.idx"))
    short = SimpleNamespace(data_bin=data)
    if mode in ("complete_doc", "eos"):
        with pytest.raises(ValueError, match="no text of valid can be corrupted, as all have fewer than 2 tokens"):
            task_of(short, "--sample-break-mode", mode, split="valid")
    else:
        assert len(task_of(short, "--sample-break-mode", mode, split="valid").dataset("valid")) == 1


def test_model_with_too_few_positions_is_refused(tiny: TinyData) -> None:
    cfg = training_config(
        *(tiny.data_bin, *TINY, "--max-source-positions", 30),
        task="span_denoising", criterion="cross_entropy", arch="denoising_small",
    )  # fmt: skip
    with pytest.raises(ValueError, match="--max-source-positions 30 is too few: --tokens-per-sample needs 48"):
        tasks.setup_task(cfg.task).build_model(cfg.model)


def test_too_few_sentinels_for_the_texts_are_said(tiny: TinyData, caplog: pytest.LogCaptureFixture) -> None:
    long = ("--tokens-per-sample", 512, "--max-source-positions", 512, "--max-target-positions", 512)
    task_of(tiny, *long)
    assert not [line for line in caplog.messages if "have a sentinel" in line]
    task_of(tiny, *long, "--sentinels", 4)
    (line,) = [line for line in caplog.messages if "of the noise spans of train have a sentinel; pass" in line]
    assert line.startswith("only 0.1")
    with pytest.raises(ValueError, match=r"^only 0\.0\d+ of the noise spans of train have a sentinel; pass more"):
        task_of(tiny, *long, "--sentinels", 1)
