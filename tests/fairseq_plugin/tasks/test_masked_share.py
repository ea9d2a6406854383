"""What the tasks mask: no unknown tokens, no more of long words than of others, and as much as was asked for."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import tasks
from fairseq.logging import metrics

from mlsm_plugin.core.masking import word_boundaries
from mlsm_plugin.fairseq_plugin.compat.binarized_files import StreamingMMapBuilder
from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary, load_split
from mlsm_plugin.fairseq_plugin.tasks.base_masked_lm import BaseMaskedLMTask
from tests.conftest import CRITERIONS, mlsm
from tests.denoising_flags import TINY
from tests.tiny_hf_models import OWN_TOKENS, add_own_tokens
from tests.tiny_models import TinyData
from tests.tiny_run import seeded_model, training_config

BOS, PAD, EOS, UNK = range(4)
FLAGS: dict[str, tuple[object, ...]] = {
    "plain_masked_lm": (),
    "masked_latent_semantic": ("--latent-weight", 0, "--mlm-weight", 1, "--num-atoms", 4),
    "taco": (),
    "nonparametric_masked_lm": ("--group-size", 4),
    "span_denoising": TINY,
}


@cache
def config(name: str) -> Any:
    """What fairseq-train's options become; that takes long."""
    return training_config("nowhere", *FLAGS[name], task=name, criterion=CRITERIONS[name])


def task_of(data: Path, name: str, *, split: str = "train", **options: Any) -> tuple[Any, Any]:
    """The configuration, and the task with a split."""
    cfg = copy.deepcopy(config(name))
    for option, value in {"data": str(data), **options}.items():
        cfg.task[option] = value
    task = tasks.setup_task(cfg.task)
    if name == "masked_latent_semantic":
        BaseMaskedLMTask.load_dataset(task, split)  # codes do not matter
    else:
        task.load_dataset(split)
    return cfg, task


def with_unknown(data: Path, folder: Path, share: float, *, sentences: int | None = None) -> Path:
    """The same data, or its first sentences, with unknown tokens in the place of a share of the others."""
    shutil.copytree(data, folder)
    dictionary, rng = load_dictionary(data), np.random.default_rng(1)
    for split in ("train", "valid"):
        text = load_split(str(data / split), dictionary)
        builder = StreamingMMapBuilder(str(folder / f"{split}.bin"), len(dictionary))
        for index in range(sentences or len(text)):
            ids = text[index].numpy()
            ids = np.where((rng.random(len(ids)) < share) & (ids != EOS), UNK, ids)
            builder.add_sentences(ids, np.array([len(ids)]))
        builder.finalize(str(folder / f"{split}.idx"))
    return folder


@pytest.fixture(scope="module")
def some_unknown(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_unknown(tiny.data_bin, tmp_path_factory.mktemp("unknown") / "data-bin", 0.3)


def batches_of(task: Any, split: str = "train", *, epochs: int = 2) -> Iterator[dict[str, Any]]:
    dataset = task.dataset(split)
    for epoch in range(1, epochs + 1):
        dataset.set_epoch(epoch)
        for first in range(0, len(dataset), 4):
            yield dataset.collater([dataset[index] for index in range(first, min(first + 4, len(dataset)))])


def predicted(batch: dict[str, Any]) -> torch.Tensor:
    """The ids that a batch asks for."""
    if "spans" not in batch:
        return batch["target"][batch["target"] != PAD]
    spans, context = batch["spans"], batch["context"]["src_tokens"]
    rows = zip(*(spans[name].tolist() for name in ("sequence", "start", "length")), strict=True)
    return torch.cat([context[row, start : start + length] for row, start, length in rows])


@pytest.mark.parametrize("name", FLAGS)
def test_unknown_tokens_are_never_predicted(some_unknown: Path, name: str) -> None:
    share = {"noise_density" if name == "span_denoising" else "mask_prob": 0.4}
    whole = [{}] if name == "nonparametric_masked_lm" else [{}, {"mask_whole_words": True}]
    for more in whole:
        _, task = task_of(some_unknown, name, **share, **more)
        ids = torch.cat([predicted(batch) for batch in batches_of(task)])
        assert len(ids) > 1000
        assert not bool((ids == UNK).any())


@pytest.fixture(scope="module")
def with_own_tokens(hf_tokenizers: dict[str, Path], tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in which every other word is a special token of the list of a Hugging Face tokenizer."""
    root = tmp_path_factory.mktemp("own")
    add_own_tokens(hf_tokenizers["word_piece"], root / "tokenizer")
    lines = (line.split() for line in tiny.text.read_text(encoding="utf-8").splitlines())
    marked = [" ".join(f"{word} {OWN_TOKENS[place % 3]}" for place, word in enumerate(line)) for line in lines]
    (root / "text.txt").write_text("\n".join(marked), encoding="utf-8")
    texts = ("--train", root / "text.txt", "--valid", root / "text.txt")
    mlsm("binarize", "--tokenizer", f"hf:{root / 'tokenizer'}", *texts, "--output", root / "data", "--workers", 1)
    return root / "data"


@pytest.mark.parametrize("name", FLAGS)
def test_special_tokens_of_the_own_list_are_inputs_only(with_own_tokens: Path, name: str) -> None:
    share = {"noise_density" if name == "span_denoising" else "mask_prob": 0.4}
    in_spans = name in ("nonparametric_masked_lm", "span_denoising")
    drawn = {} if in_spans else {"random_token_prob": 0.9, "leave_unmasked_prob": 0.1}
    _, task = task_of(with_own_tokens, name, **share, **drawn)
    own = torch.tensor([*task.source_dictionary.own_special])
    assert len(own) == len(OWN_TOKENS)
    inputs, number = torch.zeros(0, dtype=torch.long), 0
    for batch in batches_of(task):
        assert not torch.isin(predicted(batch), own).any()
        number += len(predicted(batch))
        inputs = torch.cat([inputs, batch["net_input"]["src_tokens"].flatten()])
        if drawn:
            masked = batch["target"] != PAD
            assert not torch.isin(batch["net_input"]["src_tokens"][masked], own).any()
    assert number > 500
    assert torch.isin(own, inputs).all()


def test_unknown_tokens_are_not_compared_in_taco(some_unknown: Path) -> None:
    cfg, task = task_of(some_unknown, "taco")
    criterion = task.build_criterion(cfg.criterion)
    for batch in batches_of(task, epochs=1):
        valid, masked = criterion._valid_and_masked(batch)
        original = torch.where(masked, batch["target"], batch["net_input"]["src_tokens"])
        assert torch.equal(valid, ~torch.isin(original, torch.tensor([BOS, PAD, EOS, UNK])))


def step(cfg: Any, task: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any], Any]:
    """The loss and the log of a training step, and the model with its gradients."""
    model, criterion = seeded_model(cfg, task).train(), task.build_criterion(cfg.criterion)
    optimizer = SimpleNamespace(backward=lambda loss: loss.backward())
    loss, _, log = task.train_step(batch, model, criterion, optimizer, 0)
    return loss, log, model


@pytest.mark.parametrize("name", FLAGS)
def test_a_text_of_unknown_tokens_gives_a_finite_step_or_is_refused(tiny: TinyData, tmp_path: Path, name: str) -> None:
    few = with_unknown(tiny.data_bin, tmp_path / "few", 1.0, sentences=8)
    message = "^only 0 of the tokens of train are masked, and 0.15 were asked for; "
    if name == "nonparametric_masked_lm":
        message = "groups of train have no span that occurs in two of their blocks"
    else:
        cfg, task = task_of(few, name)
        loss, log, model = step(cfg, task, next(batches_of(task)))
        assert bool(loss.isfinite())
        assert log["num_masked_content"] == 0 < log["num_all_content"]
        gradients = [values.grad for values in model.parameters() if values.grad is not None]
        assert gradients
        assert all(bool(values.isfinite().all()) for values in gradients)
    with pytest.raises(ValueError, match=message):
        task_of(with_unknown(tiny.data_bin, tmp_path / "all", 1.0), name)


@pytest.mark.parametrize("name", FLAGS)
def test_what_is_masked_is_logged_and_too_little_is_said(
    tiny: TinyData, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    share = 0.9 if name == "span_denoising" else 0.7  # it masks more of the rest
    cfg, task = task_of(with_unknown(tiny.data_bin, tmp_path / "data-bin", share), name, split="valid")
    assert [line for line in caplog.messages if "of the tokens of valid are masked, and 0.15 were asked for" in line]
    special = torch.tensor([BOS, PAD, EOS, *getattr(task, "sentinels", [])])

    def number(ids: torch.Tensor) -> int:
        return int((~torch.isin(ids, special)).sum())

    total = 0
    for batch in itertools.islice(batches_of(task, "valid"), 2):
        _, log, _ = step(cfg, task, batch)
        masked, inputs = number(predicted(batch)), batch["net_input"]["src_tokens"]
        if "spans" in batch:
            content = number(batch["context"]["src_tokens"])
        elif name == "span_denoising":
            content = masked + number(inputs)
        else:
            content = number(torch.where(batch["target"] != PAD, batch["target"], inputs))
        with metrics.aggregate(new_root=True) as logged:
            task.reduce_metrics([log, log], task.build_criterion(cfg.criterion))
        assert logged.get_smoothed_values()["masked_share"] == pytest.approx(masked / content, abs=6e-4)
        total += masked
    assert total > 5


def test_the_limits_of_npm_may_leave_too_little(tiny: TinyData) -> None:
    limits = {"max_spans_per_sequence": 1, "max_span_length": 1, "tokens_per_sample": 128}
    with pytest.raises(ValueError, match=r"of the tokens of train are masked, .* or ask for less with --mask-prob$"):
        task_of(tiny.data_bin, "nonparametric_masked_lm", **limits)
    task_of(tiny.data_bin, "nonparametric_masked_lm", **limits, mask_prob=0.01)


@pytest.fixture(scope="module")
def without_spaces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """800 lines and 100 for validation, of random words of Chinese characters without spaces."""
    root, rng = tmp_path_factory.mktemp("without-spaces"), np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(0x4E00, 0x4F2C, size=rng.integers(1, 4)))) for _ in range(400)]
    for name, number in (("train", 800), ("valid", 100)):
        lines = [
            "".join(words[min(399, z - 1)] for z in rng.zipf(1.3, size=rng.integers(20, 60))) for _ in range(number)
        ]
        (root / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    mlsm("tokenizer", "--input", root / "train", "--vocab-size", 1000, "--output", root / "tokenizer")
    texts = ("--train", root / "train", "--valid", root / "valid")
    mlsm("binarize", "--tokenizer", root / "tokenizer", *texts, "--output", root / "data-bin", "--workers", 1)
    return root / "data-bin"


@pytest.mark.parametrize("mode", ["complete", "eos"])
def test_text_without_spaces_is_masked_as_much_as_any(
    without_spaces: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One word for each line: NPM found nothing to mask, and whole words left half of the samples without a mask."""
    word_boundaries._say_once.cache_clear()
    for name, split, options in (
        ("plain_masked_lm", "valid", {"mask_whole_words": True}),
        ("span_denoising", "valid", {"mask_whole_words": True, "tokens_per_sample": 64}),
        ("nonparametric_masked_lm", "train", {"group_size": 16}),
    ):
        _, task = task_of(without_spaces, name, split=split, sample_break_mode=mode, **options)
        dataset = task.dataset(split)
        dataset.set_epoch(1)
        batches = [dataset.collater([dataset[index]]) for index in range(len(dataset))]
        counts = np.array([[int(count) for count in task.masked_counts(batch)] for batch in batches])
        masked, content = counts.sum(axis=0)
        assert masked / content == pytest.approx(0.15, abs=0.01), name
        assert counts[:, 0].min() > 0, name
        assert (counts[:, 0] / counts[:, 1]).max() < 0.35, name
    assert [record.levelname for record in caplog.records if "words of more than 10 tokens" in record.getMessage()] == [
        "WARNING"
    ]
