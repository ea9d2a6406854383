"""What the masked-LM tasks share: pieces of long sentences, and checkpoints that load from anywhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import tasks
from fairseq.models import BaseFairseqModel
from fairseq.tasks import TASK_REGISTRY

from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary, load_split
from mlsm_plugin.fairseq_plugin.data.token_datasets import NO_POSITION, TokenPositionsDataset
from mlsm_plugin.fairseq_plugin.tasks.base_masked_lm import BaseMaskedLMTask
from tests.conftest import CRITERIONS, WITH_AUXILIARY
from tests.tiny_models import TinyData
from tests.tiny_run import batches, training_config

TACO = {"task": "taco", "criterion": "token_contrastive", "arch": "roberta"}


def task_of(data: object, *flags: object) -> BaseMaskedLMTask:
    task = tasks.setup_task(training_config(data, "--tokens-per-sample", 16, *flags, **TACO).task)
    assert isinstance(task, BaseMaskedLMTask)
    return task


def test_tasks_that_share_it() -> None:
    own = {name for name, task in TASK_REGISTRY.items() if issubclass(task, BaseMaskedLMTask)}
    names = {"plain_masked_lm", "masked_latent_semantic", "taco", "nonparametric_masked_lm", *WITH_AUXILIARY}
    assert own == names


def test_task_is_set_up_with_the_dictionary_alone(tiny: TinyData, tmp_path: Path) -> None:
    shutil.copy(tiny.data_bin / "dict.txt", tmp_path)
    task = task_of(f"{tmp_path}:{tmp_path}/absent")
    assert task.source_dictionary.symbols == load_dictionary(tiny.data_bin).symbols
    with pytest.raises(FileNotFoundError, match=r"no binarized split at .*train\.bin"):
        task.load_dataset("train")
    with pytest.raises(FileNotFoundError, match=r"absent is no.* binarized dataset: dict\.txt is missing"):
        task_of(tmp_path / "absent")


@pytest.mark.parametrize("mode", ["none", "complete", "eos"])
def test_samples_hold_all_tokens_and_positions_follow_them(tiny: TinyData, mode: str) -> None:
    task = task_of(tiny.data_bin, "--sample-break-mode", mode)
    split = load_split(str(tiny.data_bin / "train"), task.source_dictionary)
    text = np.concatenate([split[index].numpy() for index in range(len(split))])
    samples = task.load_samples("train", epoch=1, combine=False)
    places = task.samples_of(TokenPositionsDataset(split.sizes), "train", bos=NO_POSITION)
    assert len(samples) == len(places)
    seen = []
    for index in range(len(samples)):
        tokens, positions = samples[index].numpy(), places[index].numpy()
        assert 2 <= len(tokens) <= 16
        assert (tokens[0], positions[0]) == (task.source_dictionary.bos(), NO_POSITION)
        assert tokens[1:].tolist() == text[positions[1:]].tolist()
        seen += positions[1:].tolist()
    assert seen == list(range(len(text)))


def test_model_is_told_which_batches_have_padding(tiny: TinyData) -> None:
    cfg = training_config(tiny.data_bin, "--tokens-per-sample", 16, **TACO)
    found = batches(cfg)
    pad = load_dictionary(tiny.data_bin).pad()
    told = [batch["net_input"]["has_padding"] for batch in found]
    assert told == [bool(batch["net_input"]["src_tokens"].eq(pad).any()) for batch in found]
    assert set(told) == {True, False}


def test_masks_do_not_depend_on_what_was_read_in_the_epoch_before(tiny: TinyData) -> None:
    def read(index: int, *epochs: int) -> list[int]:
        task = task_of(tiny.data_bin, "--mask-prob", 0.5)
        task.load_dataset("train")
        for epoch in epochs:
            task.dataset("train").set_epoch(epoch)
            item = task.dataset("train")[index]
        return [*item["net_input.src_tokens"].tolist(), *item["target"].tolist()]

    assert read(3, 2) == read(3, 1, 2) != read(3, 1)


@pytest.mark.parametrize("name", list(CRITERIONS))
def test_no_sample_is_left_out_of_training_since_it_is_too_long(tiny: TinyData, name: str) -> None:
    """fairseq would train on what fits."""
    arch = "denoising_small" if name == "span_denoising" else "mlsm_roberta_tiny"
    cfg = training_config(tiny.data_bin, "--tokens-per-sample", 16, task=name, criterion=CRITERIONS[name], arch=arch)
    task = tasks.setup_task(cfg.task)
    if name in WITH_AUXILIARY:
        task.open_auxiliary = lambda: None  # what it computes does not matter
    if name == "masked_latent_semantic":
        BaseMaskedLMTask.load_dataset(task, "train")  # codes do not matter
    else:
        task.load_dataset("train")
    limits = {"max_sentences": 8, "ignore_invalid_inputs": True, "disable_iterator_cache": True}
    assert len(task.get_batch_iterator(task.dataset("train"), max_positions=16, **limits)) > 0
    with pytest.raises(ValueError, match=r"samples are longer than .* allow \(15\).*--tokens-per-sample"):
        task.get_batch_iterator(task.dataset("train"), max_positions=15, **limits)


@pytest.mark.parametrize("task", ["plain_masked_lm", "taco"])
@pytest.mark.slow
def test_validation_has_masks_of_its_own_share(tiny: TinyData, task: str) -> None:
    """Training is that of the larger share, validation that of a run that masks as little everywhere."""

    def masks(split: str, *flags: object) -> list[torch.Tensor]:
        cfg = training_config(tiny.data_bin, *flags, **{**TACO, "task": task})
        return [batch["target"] for batch in batches(cfg, split)]

    own = ("--mask-prob", 0.4, "--valid-mask-prob", 0.1)
    less, more = masks("valid", "--mask-prob", 0.1), masks("train", "--mask-prob", 0.4)
    for found, expected in ((masks("valid", *own), less), (masks("train", *own), more)):
        assert len(found) == len(expected) > 1
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.equal(less[0], masks("valid", "--mask-prob", 0.4)[0])
    # another training split
    assert torch.equal(masks("valid", *own, "--train-subset", "valid")[0], masks("valid", "--mask-prob", 0.4)[0])


@pytest.mark.parametrize("flags", [(), ("--mask-whole-words",)])
def test_share_of_masks_goes_from_one_to_the_other(tiny: TinyData, flags: tuple[str, ...]) -> None:
    """Masks are taken back in an order of their own: the first batches are those of the larger share."""

    def read(*more: object, split: str = "train") -> tuple[BaseMaskedLMTask, list[dict[str, Any]]]:
        cfg = training_config(tiny.data_bin, *more, *flags, **TACO)
        task = tasks.setup_task(cfg.task)
        return task, batches(cfg, split, task=task)

    task, falling = read("--mask-prob", 0.6, "--mask-prob-end", 0.1, "--max-update", 100)
    pad, expected = task.source_dictionary.pad(), read("--mask-prob", 0.6)[1]
    assert len(falling) == len(expected) > 1
    masked, shares = {}, {}
    for update in (0, 50, 100, 200):
        found = [task.with_share(batch, update) for batch in falling]
        masked[update] = torch.cat([batch["target"].ne(pad).flatten() for batch in found])
        shares[update] = masked[update].sum() / masked[0].sum() * 0.6
        for own, other in zip(found, expected, strict=True):
            kept, lost = own["target"].ne(pad), other["target"].ne(pad) & own["target"].eq(pad)
            assert torch.equal(own["target"][kept], other["target"][kept])
            inputs = torch.where(lost, other["target"], other["net_input"]["src_tokens"])
            assert torch.equal(own["net_input"]["src_tokens"], inputs)
            originals = torch.where(other["target"].ne(pad), other["target"], other["net_input"]["src_tokens"])
            for row, here, before in zip(originals, kept, other["target"].ne(pad), strict=True):
                words = task.word_beginnings().gather(0, row).cumsum(0) if flags else torch.arange(len(row))
                for word in words[before].unique():  # what was masked of a word is masked as a whole, or not at all
                    assert here[(words == word) & before].unique().numel() == 1
    assert masked[0].sum() > masked[50].sum() > masked[100].sum() == masked[200].sum()
    assert not (masked[100] & ~masked[50]).any()
    assert shares[50] == pytest.approx(0.35, abs=0.05)
    assert shares[100] == pytest.approx(0.1, abs=0.03)
    for share, update in ((), 100), (("--valid-mask-prob", 0.35), 50):  # the training split as one of validation
        task, falling = read("--mask-prob", 0.6, "--mask-prob-end", 0.1, "--max-update", 100, *share)
        for batch in falling:
            assert torch.equal(task.with_share(batch, None)["target"], task.with_share(batch, update)["target"])
    task, falling = read("--mask-prob", 0.2, "--mask-prob-end", 0.1, "--max-update", 100, "--valid-mask-prob", 0.5)
    with pytest.raises(ValueError, match=r"--valid-mask-prob 0\.5 is more than the training split masks"):
        task.with_share(falling[0], None)
    valid = read("--mask-prob", 0.6, "--mask-prob-end", 0.1, split="valid")[1]
    for own, other in zip(valid, read("--mask-prob", 0.1, split="valid")[1], strict=True):
        assert torch.equal(own["target"], other["target"])


@pytest.mark.parametrize("option", ["--mask-prob", "--valid-mask-prob"])
@pytest.mark.parametrize("share", [0, 1, 1.5, "nan"])
def test_masked_share_must_be_a_share(tiny: TinyData, option: str, share: object) -> None:
    task = task_of(tiny.data_bin, option, share)
    for split in ("train", "valid"):
        with pytest.raises(ValueError, match=rf"^{option} {share} is not between 0 and 1$"):
            task.load_dataset(split)


@pytest.mark.parametrize("task", ["plain_masked_lm", "taco", "nonparametric_masked_lm"])
def test_batches_hold_every_sample(tiny: TinyData, task: str) -> None:
    own = tasks.setup_task(training_config(tiny.data_bin, "--sample-break-mode", "eos", **{**TACO, "task": task}).task)
    for split in ("train", "valid"):
        own.load_dataset(split)
        count = len(own.dataset(split))
        multiple = next(number for number in range(8, 100) if count % number)  # fairseq would leave out the rest
        iterator = own.get_batch_iterator(
            own.dataset(split), max_sentences=multiple, required_batch_size_multiple=multiple
        )
        seen = [index for batch in iterator.next_epoch_itr(shuffle=False) for index in batch["id"].tolist()]
        assert sorted(seen) == list(range(count))


def test_data_folders_take_turns(tiny: TinyData, tmp_path: Path) -> None:
    other = tiny.copy(tmp_path / "other")
    for suffix in ("bin", "idx"):
        (other / f"train.{suffix}").unlink()
    task = task_of(f"{tiny.data_bin}:{other}")
    task.load_samples("train", epoch=3, combine=False)
    with pytest.raises(FileNotFoundError, match="other/train"):
        task.load_samples("train", epoch=2, combine=False)


def test_whole_words_are_those_of_the_tokenizer_of_the_data(tiny: TinyData, tmp_path: Path) -> None:
    task = task_of(tiny.data_bin, "--mask-whole-words")
    begins = task.word_beginnings().begins_word.bool().tolist()
    symbols = task.source_dictionary.symbols
    special = symbols[: task.source_dictionary.nspecial]
    assert begins == [symbol in special or symbol.startswith("\u2581") for symbol in symbols]
    for name in ("dict.txt", "train.bin", "train.idx"):
        shutil.copy(tiny.data_bin / name, tmp_path)
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        task_of(tmp_path, "--mask-whole-words").load_dataset("train")


def test_first_epoch_puts_the_tokenizer_next_to_the_checkpoints(tiny: TinyData, tmp_path: Path) -> None:
    task = task_of(tiny.data_bin, "--save-dir", tmp_path / "model")
    assert not (tmp_path / "model").exists()
    task.begin_epoch(1, BaseFairseqModel())
    for name in ("dict.txt", "sentencepiece.bpe.model"):
        assert (tmp_path / "model" / name).read_bytes() == (tiny.data_bin / name).read_bytes()
