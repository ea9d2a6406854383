"""What each module of compat needs of fairseq: a check on the installed fairseq, and a change that it sees.

A row is a function with ``@compat_check(module, what of fairseq, change)``. The function fails where fairseq no longer
has the thing; ``change`` takes the thing away, to show that the function would fail.
"""

from __future__ import annotations

import argparse
import inspect
import io
import logging.handlers
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fairseq.data
import fairseq_cli.train
import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, optim, options, trainer
from fairseq import utils as fairseq_utils
from fairseq.data import (
    Dictionary,
    FairseqDataset,
    ListDataset,
    MaskTokensDataset,
    TokenBlockDataset,
    data_utils,
    iterators,
)
from fairseq.data import indexed_dataset as token_index
from fairseq.data import token_block_dataset as token_blocks
from fairseq.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from fairseq.distributed import utils as distributed
from fairseq.logging import metrics, progress_bar
from fairseq.models.roberta.hub_interface import RobertaHubInterface
from fairseq.models.roberta.model import RobertaEncoder, RobertaLMHead, RobertaModel
from fairseq.models.transformer.transformer_encoder import TransformerEncoderBase
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from fairseq.optim import FairseqOptimizer, lr_scheduler
from fairseq.tasks import TASK_DATACLASS_REGISTRY, FairseqTask
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from torch import nn

import mlsm_plugin  # noqa: F401  (registers)
from mlsm_plugin.fairseq_plugin.compat import (
    binarized_files,
    checkpoint_averaging,
    checkpoint_contents,
    checkpoint_states,
    compiled_steps,
    installation,
    loading_hooks,
    model_parts,
    rank_gather,
    resumed_runs,
    training_options,
    training_progress,
)
from mlsm_plugin.fairseq_plugin.compat.batches import UpdateLookahead, WholeEpochsDataset, WordBeginnings, never_draw
from mlsm_plugin.fairseq_plugin.compat.binarized_files import StreamingMMapBuilder
from mlsm_plugin.fairseq_plugin.tasks.span_denoising import SpanDenoisingTask
from tests.conftest import TINY_MODEL
from tests.fairseq_plugin.compat.test_update_lookahead import watched
from tests.tiny_run import training_config

Change = Callable[[pytest.MonkeyPatch], Any]


@dataclass(frozen=True)
class CompatCheck:
    """A row: a module of compat, what of fairseq it needs, the check, and a change that the check sees."""

    module: str
    needs: str
    check: Callable[[], None]
    change: Change

    def problem(self) -> str | None:
        """None where fairseq has what the module needs, else a line that names both."""
        try:
            self.check()
        except Exception as error:
            found = f"{type(error).__name__}: {error}".split("\n")[0]
            place = f"mlsm_plugin/fairseq_plugin/compat/{self.module}.py"
            return f"{place} relies on something that has changed: {self.needs} ({found})"
        return None


CHECKS: list[CompatCheck] = []


def compat_check(module: str, needs: str, change: Change) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Make a row of the function."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS.append(CompatCheck(module, needs, check, change))
        return check

    return register


def rename(owner: type, attribute: str, patch: pytest.MonkeyPatch) -> None:
    """As if the instances of ``owner`` called an attribute otherwise."""
    original = owner.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        value = getattr(self, attribute)
        delattr(self, attribute)
        setattr(self, f"other_{attribute}", value)

    patch.setattr(owner, "__init__", init)


def without(owner: Any, attribute: str, patch: pytest.MonkeyPatch) -> None:
    """As if fairseq had no longer this function, method or class."""
    patch.delattr(owner, attribute)


def instead(owner: Any, attribute: str, other: Any, patch: pytest.MonkeyPatch) -> None:
    """As if fairseq had another function, method or class there."""
    patch.setattr(owner, attribute, other)


def always_true(owner: type, attribute: str, patch: pytest.MonkeyPatch) -> None:
    """As if an attribute of all instances of ``owner`` were true, whatever it is set to."""
    patch.setattr(owner, attribute, property(lambda self: True, lambda self, value: None), raising=False)


def refusal(function: Callable[..., Any], *args: Any) -> str:
    """What a function says of its arguments, which it must refuse."""
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


# small things of fairseq's

TOKENS = torch.tensor([[0, 4, 5, 2], [0, 6, 2, 1]])


def symbols() -> Dictionary:
    dictionary = Dictionary()
    for symbol in "abcde":
        dictionary.add_symbol(symbol)
    return dictionary


def roberta() -> Any:
    size = {"encoder_layers": 2, "encoder_embed_dim": 8, "encoder_ffn_embed_dim": 16, "encoder_attention_heads": 2}
    args = argparse.Namespace(**size, max_positions=16)
    return RobertaModel.build_model(args, SimpleNamespace(source_dictionary=symbols())).eval()


def sentences() -> ListDataset:
    return ListDataset([torch.tensor([4, 5, 2]), torch.tensor([6, 2])], [3, 2])


@cache
def denoising_config() -> Any:
    words = ("--encoder-layers", 1, "--decoder-layers", 1, "--sentinels", 2)
    return training_config("", *words, task="span_denoising", criterion="cross_entropy", arch="denoising_small")


@cache
def masked_lm_config() -> Any:
    return training_config("", "--max-positions", 16, task="masked_lm", criterion="masked_lm")


def encoder_decoder() -> tuple[Any, Any]:
    cfg = deepcopy(denoising_config())
    dictionary = symbols()
    sentinels = np.array([dictionary.add_symbol(f"<extra_id_{number}>") for number in range(2)])
    task = SpanDenoisingTask(cfg.task, dictionary, sentinels)
    return task, task.build_model(cfg.model).eval()


def saved_checkpoint(folder: str) -> Path:
    """What fairseq's trainer writes, of a RoBERTa that has seen no update, with its dictionary next to it."""
    symbols().save(f"{folder}/dict.txt")
    cfg = deepcopy(masked_lm_config())
    cfg.task.data = folder
    task = MaskedLMTask(cfg.task, symbols())
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    trainer.consolidate_optimizer()  # as fairseq does before it saves
    trainer.save_checkpoint(f"{folder}/checkpoint.pt", {})
    return Path(folder, "checkpoint.pt")


# model_parts: beam_search


def without_scores(original: Any) -> Any:
    def inference_step(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return [[{"tokens": best["tokens"]} for best in own] for own in found]

    return inference_step


@compat_check(
    "model_parts",
    "FairseqTask.inference_step, whose hypotheses have tokens and positional_scores",
    partial(instead, FairseqTask, "inference_step", without_scores(FairseqTask.inference_step)),
)
def _beam_search() -> None:
    task, model = encoder_decoder()
    ids, scores = model_parts.best_hypothesis(task, model, torch.tensor([4, 9, 2]), beam=2, max_length=4)
    assert len(ids) == len(scores) <= 5
    assert ids[-1] == 2
    assert max(scores) <= 0


@compat_check(
    "model_parts", "FairseqTask.build_generator(models, args)", partial(without, FairseqTask, "build_generator")
)
def _generator() -> None:
    task, model = encoder_decoder()
    assert task.build_generator([model], argparse.Namespace(beam=3, max_len_a=0, max_len_b=4)).beam_size == 3


# binarized_files


@compat_check(
    "binarized_files",
    "the format of MMapIndexedDataset.Index: sizes and places after a header",
    partial(instead, binarized_files, "MAGIC", b"OTHER"),
)
@compat_check("binarized_files", "_code_to_dtype, by code", partial(instead, token_index, "_code_to_dtype", {}))
def _index() -> None:
    with tempfile.TemporaryDirectory() as folder:
        builder = MMapIndexedDatasetBuilder(f"{folder}/train.bin", dtype=np.uint16)
        for ids in ([4, 5, 2], [6, 2]):
            builder.add_item(torch.tensor(ids))
        builder.finalize(f"{folder}/train.idx")
        binarized_files.check_splits(f"{folder}/train", 7)


# checkpoint_contents


def other_registry(name: str) -> Change:
    """As if a registry of fairseq were empty."""
    return lambda patch: patch.setattr(checkpoint_contents, name, {})


def set_option(contents: Any, kind: str, name: str, value: object) -> None:
    part = contents["cfg"][kind]
    (vars(part) if isinstance(part, argparse.Namespace) else part)[name] = value


def without_types(original: Any) -> Any:
    def add_args(parser: Any) -> None:
        original(parser)
        for action in parser._actions:
            action.type = None

    return add_args


@compat_check("checkpoint_contents", "TASK_REGISTRY, by name", other_registry("TASK_REGISTRY"))
@compat_check("checkpoint_contents", "TASK_DATACLASS_REGISTRY, by name", other_registry("TASK_DATACLASS_REGISTRY"))
@compat_check("checkpoint_contents", "CRITERION_REGISTRY, by name", other_registry("CRITERION_REGISTRY"))
@compat_check("checkpoint_contents", "ARCH_MODEL_REGISTRY, by name", other_registry("ARCH_MODEL_REGISTRY"))
@compat_check("checkpoint_contents", "ARCH_MODEL_NAME_REGISTRY, by name", other_registry("ARCH_MODEL_NAME_REGISTRY"))
@compat_check(
    "checkpoint_contents",
    "add_args of a model, whose actions have types",
    partial(instead, RobertaModel, "add_args", staticmethod(without_types(RobertaModel.add_args))),
)
def _what_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = saved_checkpoint(folder)
        good = checkpoint_contents.read_contents(path)
        for kind, name, value in (("model", "_name", "roberta_base"), ("task", "seed", 2)):
            set_option(good, kind, name, value)
            checkpoint_contents.check_configuration(good, path)
        for kind, name in {"task": "mask_prob", "model": "encoder_layers"}.items():
            contents = deepcopy(good)
            set_option(contents, kind, name, "many")
            refused = ""
            with suppress(ValueError):
                refused = name
                checkpoint_contents.check_configuration(contents, path)
                refused = ""
            assert refused == name


@compat_check(
    "checkpoint_contents", "meters.Meter, the base of all", partial(without, checkpoint_contents.meters, "Meter")
)
def _meters() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint_contents.read_contents(saved_checkpoint(folder))


# checkpoint_averaging


@compat_check(
    "checkpoint_averaging",
    "the model of Trainer.state_dict, and its last_optimizer_state, which nothing needs",
    partial(instead, Trainer, "state_dict", lambda self: {"weights": self.model.state_dict()}),
)
def _average() -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved, other = saved_checkpoint(folder), Path(folder, "other.pt")
        shutil.copy(saved, other)
        checkpoint_averaging.average_checkpoints([saved, other], Path(folder, "mean.pt"))
        model, _, _ = checkpoint_states.load_model(Path(folder, "mean.pt"), {})
        wanted, _, _ = checkpoint_states.load_model(saved, {})
    for name, weight in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name


# compiled_steps


@compat_check(
    "compiled_steps",
    "Module._compiled_call_impl, which Module.compile sets",
    partial(instead, torch.nn.Module, "compile", lambda self, **options: setattr(self, "compiled", options)),
)
def _compiled() -> None:
    model = roberta()
    (encoder,) = compiled_steps.compile_parts(model, one_length=False)
    assert encoder is model.encoder
    assert encoder._compiled_call_impl is not None
    compiled_steps.forget_compiled([encoder])
    assert encoder._compiled_call_impl is None


# checkpoint_states


@compat_check(
    "checkpoint_states",
    "checkpoint_utils._upgrade_state_dict(state)",
    partial(instead, checkpoint_utils, "_upgrade_state_dict", lambda state: {}),
)
@compat_check(
    "checkpoint_states",
    "dataclass.utils.overwrite_args_by_name(cfg, overrides)",
    partial(instead, checkpoint_states, "overwrite_args_by_name", lambda cfg, overrides: None),
)
def _state() -> None:
    with tempfile.TemporaryDirectory() as folder:
        state = checkpoint_states.read_state(saved_checkpoint(folder), {"dropout": 0.25})
    assert checkpoint_states.config_in(state).model.dropout == 0.25
    assert model_parts.EMBEDDINGS in checkpoint_states.weights_in(state)


@compat_check(
    "checkpoint_states",
    "checkpoint_utils.load_model_ensemble_and_task(filenames, arg_overrides, state=)",
    partial(instead, checkpoint_utils, "load_model_ensemble_and_task", lambda filenames, arg_overrides: None),
)
def _model_of_state() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, cfg, task = checkpoint_states.load_model(saved_checkpoint(folder), {"dropout": 0.25})
    assert isinstance(model, RobertaModel)
    assert cfg.model.dropout == 0.25
    assert type(task) is MaskedLMTask


def without_history(original: Any) -> Any:
    def state_dict(self: Any) -> Any:
        return {key: value for key, value in original(self).items() if key != "optimizer_history"}

    return state_dict


@compat_check(
    "checkpoint_states",
    'the "optimizer_history" of a checkpoint, with num_updates',
    partial(instead, Trainer, "state_dict", without_history(Trainer.state_dict)),
)
def _updates() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert checkpoint_states.updates_of(saved_checkpoint(folder)) == 0


@compat_check(
    "checkpoint_states",
    "options.parse_args_and_arch(parser, words), as convert_namespace_to_omegaconf wants it",
    partial(instead, options, "parse_args_and_arch", lambda parser: None),
)
def _untrained() -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = saved_checkpoint(folder)
        weights = checkpoint_states.weights_in(checkpoint_states.read_state(saved))
        words = [folder, "--task", "masked_lm", "--criterion", "masked_lm", *TINY_MODEL, "--max-positions", "16"]
        path = Path(folder, "untrained.pt")
        checkpoint_states.write_untrained(path, checkpoint_states.configuration_of(words), weights)
        model, cfg, _ = checkpoint_states.load_model(path, {})
        assert checkpoint_states.updates_of(path) == 0
    assert cfg.model.max_positions == 16
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


# installation: compiled modules


def without_compiled(name: str, patch: pytest.MonkeyPatch) -> None:
    patch.delattr(fairseq.data, name, raising=False)
    patch.setitem(sys.modules, f"fairseq.data.{name}", None)


for _name in ("data_utils_fast", "token_block_utils_fast"):
    compat_check("installation", f"the compiled module fairseq.data.{_name}", partial(without_compiled, _name))(
        installation.import_compiled_parts
    )


# training_options: cpu_runs


@compat_check(
    "training_options",
    "FairseqOptimizer.clip_grad_norm, which looks for utils.clip_grad_norm_",
    partial(instead, FairseqOptimizer, "clip_grad_norm", lambda *args, **kwargs: None),
)
def _clipped() -> None:
    optimizer = SimpleNamespace(params=[nn.Parameter(torch.ones(2))])
    with mock.patch.object(fairseq_utils, "clip_grad_norm_") as clip:
        FairseqOptimizer.clip_grad_norm(optimizer, 0.5)
    clip.assert_called_once_with(optimizer.params, 0.5, None)


def without_check(owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    """As if something else began a run."""
    patch.setattr(owner, name, getattr(owner, name).__wrapped__)


@compat_check(
    "training_options", "distributed.utils.call_main(cfg, main)", partial(without_check, distributed, "call_main")
)
def _beginning() -> None:
    cfg = deepcopy(masked_lm_config())
    cfg.common.fp16 = True
    begin = fairseq_cli.train.distributed_utils.call_main
    assert "--fp16 trains on a GPU" in refusal(begin, cfg, lambda cfg: None)


# installation


def no_version(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


@compat_check("installation", "the names of its distributions", partial(instead, metadata, "version", no_version))
def _distributions() -> None:
    assert installation.installed_version(installation.FIXED)


# loading_hooks


@compat_check(
    "loading_hooks",
    "torch's Module._register_load_state_dict_pre_hook",
    partial(without, nn.Module, "_register_load_state_dict_pre_hook"),
)
def _hook() -> None:
    outer = nn.Sequential(nn.Linear(1, 1, bias=False))
    loading_hooks.before_loading(
        outer[0], lambda weights, prefix: weights.update({f"{prefix}weight": torch.ones(1, 1)})
    )
    outer.load_state_dict({"0.weight": torch.zeros(1, 1)})
    assert outer[0].weight.item() == 1


def trainer_in(folder: str, *flags: object) -> Trainer:
    """Of a RoBERTa, whose checkpoints are in the folder; the trainer looks for others elsewhere."""
    flags = ("--max-positions", 16, "--save-dir", f"{folder}/elsewhere", *flags)
    cfg = training_config(folder, *flags, task="masked_lm", criterion="masked_lm")
    task = MaskedLMTask(cfg.task, symbols())
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


def speechless(original: Any) -> Any:
    """As if errors had no text."""

    def function(*args: Any, **kwargs: Any) -> Any:
        with suppress(RuntimeError):
            return original(*args, **kwargs)
        raise RuntimeError

    return function


@compat_check(
    "loading_hooks",
    "how torch names the weights that do not fit, behind Trainer.load_checkpoint(filename)",
    lambda patch: patch.setattr(nn.Module, "load_state_dict", speechless(nn.Module.load_state_dict)),
)
@compat_check(
    "loading_hooks",
    "the names of a trainer's options and properties: save_dir, checkpoint_suffix, data_parallel_world_size",
    partial(without, Trainer, "data_parallel_world_size"),
)
def _weights_that_do_not_fit() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = saved_checkpoint(folder)
        assert "; pass --max-positions 16" in refusal(trainer_in(folder, "--max-positions", 20).load_checkpoint, path)
        assert "it lacks 16 weights (first: " in refusal(
            trainer_in(folder, "--encoder-layers", 3).load_checkpoint, path
        )
        assert "does not exist" in refusal(trainer_in(folder).load_checkpoint, f"{folder}/absent.pt")


@compat_check(
    "loading_hooks",
    "Trainer.load_checkpoint, which names another criterion or optimizer than that of the checkpoint",
    partial(instead, Trainer, "load_checkpoint", lambda self, filename: None),
)
def _another_optimizer() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = saved_checkpoint(folder)
        trainer = trainer_in(folder, "--optimizer", "sgd")
        assert "was trained with --optimizer adam, and not sgd; " in refusal(trainer.load_checkpoint, path)


# batches


@compat_check(
    "batches",
    "MaskTokensDataset.mask_whole_words, of which it reads gather(0, ids)",
    partial(rename, MaskTokensDataset, "mask_whole_words"),
)
def _word_beginnings() -> None:
    one_word = torch.zeros(len(symbols()) + 1, dtype=torch.uint8)
    one_word[0] = 1  # the first token of a sample begins its only word
    words = WordBeginnings(one_word, lambda begins: np.full(len(begins), len(begins) > 3))
    samples = ListDataset([TOKENS[0], TOKENS[1, :3]], [4, 3])
    how: Any = {"pad_idx": 1, "mask_idx": len(symbols()), "return_masked_tokens": True, "mask_whole_words": words}
    targets = MaskTokensDataset(samples, symbols(), mask_prob=0.5, **how)
    for epoch in range(10):
        targets.set_epoch(epoch)
        masked = [int((targets[index] != 1).sum()) for index in range(2)]
        assert masked[0] == 2  # half of its four words
        assert masked[1] in (0, 3)  # its word is not long


@compat_check(
    "batches", "MaskTokensDataset.weights, by which it draws symbols", partial(rename, MaskTokensDataset, "weights")
)
def _drawn_symbols() -> None:
    samples = ListDataset([TOKENS[0]] * 20, [4] * 20)
    how: Any = {"mask_prob": 0.9, "random_token_prob": 1.0, "leave_unmasked_prob": 0.0}
    inputs = MaskTokensDataset(samples, symbols(), pad_idx=1, mask_idx=len(symbols()), **how)
    others = [symbol for symbol in range(symbols().nspecial, len(symbols())) if symbol != 5]
    never_draw(inputs, others)
    drawn = [inputs[index] for index in range(20)]
    assert all(bool(((ids == 5) | (ids == TOKENS[0])).all()) for ids in drawn)
    assert any(bool((ids != TOKENS[0]).any()) for ids in drawn)


# binarized_files: mmap_builder


def written_sentences() -> list[list[int]]:
    """What fairseq reads of a split of two sentences that StreamingMMapBuilder wrote."""
    with tempfile.TemporaryDirectory() as folder:
        builder = StreamingMMapBuilder(f"{folder}/train.bin", vocab_size=9)
        builder.add_sentences(np.array([4, 5, 2, 6, 2]), np.array([3, 2]))
        builder.finalize(f"{folder}/train.idx")
        dataset = MMapIndexedDataset(f"{folder}/train")
        return [dataset[index].tolist() for index in range(len(dataset))]


@compat_check(
    "binarized_files", "MMapIndexedDataset.Index.writer", partial(without, MMapIndexedDataset.Index, "writer")
)
def _index_writer() -> None:
    assert written_sentences() == [[4, 5, 2], [6, 2]]


@compat_check(
    "binarized_files",
    "MMapIndexedDataset._bin_buffer, which has all ids",
    partial(instead, MMapIndexedDataset, "__init__", lambda self, path: None),
)
def _flat_tokens() -> None:
    with tempfile.TemporaryDirectory() as folder:
        builder = binarized_files.StreamingMMapBuilder(f"{folder}/train.bin", 10)
        builder.add_sentences(np.array([4, 5, 2, 6, 2]), np.array([3, 2]))
        builder.finalize(f"{folder}/train.idx")
        dataset = MMapIndexedDataset(f"{folder}/train")
        assert binarized_files.flat_tokens(dataset).tolist() == [4, 5, 2, 6, 2]


# model_parts: model_options


@compat_check("model_parts", "the options of RobertaModel.add_args", partial(without, RobertaModel, "add_args"))
def _model_options() -> None:
    parser = argparse.ArgumentParser()
    RobertaModel.add_args(parser)
    assert vars(parser.parse_args([])).keys() >= model_parts.TRAINING_OPTIONS | {"max_positions"}
    cfg = argparse.Namespace(encoder_layers=3, untie_weights_roberta=True)
    flags = model_parts.flags_of(RobertaModel.add_args, cfg)
    assert flags == ["--encoder-layers", "3", "--untie-weights-roberta"]


# version_shims: quiet_start


@compat_check(
    "version_shims",
    "how the trainer logs shared parameters",
    lambda patch: patch.setattr(trainer, "logger", trainer.logger.getChild("other")),
)
def _shared_parameters() -> None:
    cfg = deepcopy(masked_lm_config())
    task = MaskedLMTask(cfg.task, symbols())
    model = task.build_model(cfg.model)
    model.encoder.sentence_encoder.layers[0].fc1.bias = None
    model.encoder.sentence_encoder.layers[0].fc2.bias = None
    log, said = logging.getLogger("fairseq.trainer"), logging.handlers.BufferingHandler(100)
    level = log.level
    log.addHandler(said)
    log.setLevel(logging.INFO)
    try:
        Trainer(cfg, task, model, task.build_criterion(cfg.criterion))
    finally:
        log.removeHandler(said)
        log.setLevel(level)
    shared = [record.getMessage() for record in said.buffer if "shared parameter" in record.getMessage()]
    assert [line.split(" <- ")[1] for line in shared] == ["encoder.lm_head.weight"]


# rank_gather


def callable_with(name: str, *args: object, **kwargs: object) -> None:
    inspect.signature(getattr(distributed, name)).bind(*args, **kwargs)
    rows = torch.ones(2, 3)
    assert rank_gather.gather_rows(rows)[0].tolist() == rows.tolist()


for _name, _arguments, _named in (
    ("get_data_parallel_group", (), {}),
    ("get_world_size", ("group",), {}),
    ("get_rank", ("group",), {}),
    ("all_gather", ("tensor", "group"), {}),
    ("all_reduce", ("tensor", "group"), {"op": "max"}),
):
    compat_check("rank_gather", f"distributed.utils.{_name}", partial(without, distributed, _name))(
        partial(callable_with, _name, *_arguments, **_named)
    )


# resumed_runs


@compat_check(
    "resumed_runs",
    "checkpoint_utils.torch_persistent_save(obj, filename), which the trainer saves with",
    partial(instead, checkpoint_utils, "torch_persistent_save", lambda obj, filename, async_write=False: None),
)
def _saving() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert saved_checkpoint(folder).is_file()
        assert not list(Path(folder).glob("*.tmp"))


@compat_check(
    "resumed_runs",
    "checkpoint_utils.save_checkpoint, which copies with PathManager.copy and adds to extra_state",
    partial(without, checkpoint_utils, "save_checkpoint"),
)
@compat_check(
    "resumed_runs",
    "checkpoint_utils.load_checkpoint(cfg, trainer), with the names of its options and of the trainer's",
    partial(without, checkpoint_utils, "load_checkpoint"),
)
@compat_check(
    "resumed_runs",
    "fairseq_cli.train.should_stop_early, which counts in best and num_runs",
    partial(instead, fairseq_cli.train, "should_stop_early", lambda cfg, valid_loss: False),
)
@compat_check(
    "resumed_runs",
    "Trainer.state_dict, whose task_state is the state of the task",
    partial(instead, FairseqTask, "state_dict", lambda self: {}),
)
def _stopping() -> None:
    with tempfile.TemporaryDirectory() as folder:
        symbols().save(f"{folder}/dict.txt")
        cfg = deepcopy(masked_lm_config())
        cfg.task.data = cfg.checkpoint.save_dir = folder
        cfg.checkpoint.patience, cfg.checkpoint.save_interval_updates = 2, 1
        task = MaskedLMTask(cfg.task, symbols())
        trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
        state = {"version": 2, "epoch": 1, "iterations_in_epoch": 4, "shuffle": True}
        iterator: Any = SimpleNamespace(epoch=1, end_of_epoch=lambda: False, state_dict=lambda: state)
        iterator.load_state_dict = state.update
        trainer.get_train_iterator = lambda epoch, load_dataset: iterator
        checked: list[Any] = []
        task.state.merge_state_dict({"codes": "first"})
        task.check_resumes = checked.append
        for loss in (1.0, 2.0, 3.0):
            fairseq_cli.train.should_stop_early(cfg, loss)
        trainer.set_num_updates(4)
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, iterator, 3.0)
        last, other = Path(folder, resumed_runs.LAST), Path(folder, "checkpoint_1_4.pt")
        assert last.samefile(other)
        counted = checkpoint_states.read_state(last)["extra_state"][resumed_runs.PATIENCE_STATE]
        assert counted == {"best": 1.0, "num_runs": 2}
        vars(fairseq_cli.train.should_stop_early).clear()
        _, iterator = checkpoint_utils.load_checkpoint(cfg.checkpoint, trainer)
        assert not iterator.next_epoch_idx <= math.inf
        assert checked == [{"codes": "first"}]
        assert fairseq_cli.train.should_stop_early.num_runs == 2
        vars(fairseq_cli.train.should_stop_early).clear()


@compat_check(
    "resumed_runs",
    "Trainer.state_dict, which leaves out what --no-save-optimizer-state says",
    partial(instead, Trainer, "state_dict", lambda self: {"last_optimizer_state": {}, "extra_state": {}}),
)
def _weights_alone() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_in(folder)
        resumed_runs.save_weights(trainer, Path(folder, "kept.pt"))
        state = checkpoint_states.read_state(Path(folder, "kept.pt"))
        assert "last_optimizer_state" not in state
        assert state["model"]
        assert not trainer.cfg.checkpoint.no_save_optimizer_state


# model_parts: roberta_head

for _name in ("dense", "activation_fn", "layer_norm", "weight", "bias"):

    @compat_check("model_parts", f"RobertaLMHead.{_name}", partial(rename, RobertaLMHead, _name))
    def _divided_head() -> None:
        head = model_parts.DividedLMHead(8, 9, "gelu")
        features, masked = torch.randn(2, 4, 8), TOKENS > 4
        assert head.width == 8
        assert torch.equal(head.token_logits(head.transform(features[masked, :])), head(features, masked))
        own = {name for name, _ in head.named_parameters() if "." not in name}
        assert own == {"weight", "bias"}
        assert head.own_token_parameters()[0] is head.bias


def builds_its_own_head(patch: pytest.MonkeyPatch) -> None:
    original = RobertaEncoder.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.lm_head = RobertaLMHead(8, 9, "gelu")

    patch.setattr(RobertaEncoder, "__init__", init)


@compat_check("model_parts", "RobertaEncoder, which makes its head with build_lm_head", builds_its_own_head)
def _build_head() -> None:
    class Encoder(RobertaEncoder):
        def build_lm_head(self, embed_dim: int, output_dim: int, activation_fn: str, weight: Any) -> Any:
            return model_parts.DividedLMHead(embed_dim, output_dim, activation_fn, weight)

    encoder = Encoder(roberta().args, symbols())
    assert type(encoder.lm_head) is model_parts.DividedLMHead
    assert encoder.lm_head.weight is encoder.sentence_encoder.embed_tokens.weight


# model_parts: roberta_hub

for _name in ("cfg", "task", "model", "bpe"):

    @compat_check("model_parts", f"RobertaHubInterface.{_name}", partial(rename, RobertaHubInterface, _name))
    def _hub() -> None:
        cfg, task, model = SimpleNamespace(bpe=None), SimpleNamespace(), roberta()
        hub = model_parts.RobertaHub(cfg, task, model)
        assert (hub.cfg, hub.task, hub.model, hub.bpe) == (cfg, task, model, None)
        assert hub.device == torch.device("cpu")
        assert not hub.has_classification_head("topic")


@compat_check(
    "model_parts",
    "SentencePredictionTask.label_dictionary",
    partial(without, SentencePredictionTask, "label_dictionary"),
)
def _labels() -> None:
    labels = Dictionary()
    labels.add_symbol("sport")
    labels.add_symbol("music")
    task = SentencePredictionTask(SentencePredictionConfig(num_classes=2, regression_target=False), symbols(), labels)
    hub = model_parts.RobertaHub(SimpleNamespace(bpe=None), task, roberta())
    assert not hub.is_regression
    assert [hub.label(0), hub.label(1)] == ["sport", "music"]


# model_parts: roberta_parts

for _name in ("sentence_encoder", "lm_head"):

    @compat_check("model_parts", f"RobertaEncoder.{_name}", partial(rename, RobertaEncoder, _name))
    def _parts() -> None:
        model = roberta()
        assert isinstance(model_parts.sentence_encoder(model), TransformerEncoderBase)
        assert isinstance(model_parts.lm_head(model), RobertaLMHead)


for _name in ("layers", "embed_tokens", "embed_positions", "layernorm_embedding", "layer_norm"):

    @compat_check("model_parts", f"TransformerEncoder.{_name}", partial(rename, TransformerEncoderBase, _name))
    def _encoder_parts() -> None:
        encoder = model_parts.sentence_encoder(roberta())
        assert model_parts.num_layers(encoder) == 2
        assert model_parts.token_embeddings(encoder).weight.shape == (len(symbols()), 8)
        assert model_parts.position_embeddings(encoder).num_embeddings == 16 + 2
        assert model_parts.embedding_norm(encoder).eps > 0
        assert model_parts.final_norm(encoder) is None


@compat_check(
    "model_parts",
    "RobertaModel.classification_heads, where register_classification_head puts heads",
    partial(rename, RobertaModel, "classification_heads"),
)
def _heads() -> None:
    model = roberta()
    assert len(model_parts.classification_heads(model)) == 0
    model.register_classification_head("topic", num_classes=2)
    assert list(model_parts.classification_heads(model)) == ["topic"]


def other_outputs(key: str) -> Change:
    original = TransformerEncoderBase.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return {f"other_{name}" if name == key else name: value for name, value in found.items()}

    return partial(instead, TransformerEncoderBase, "forward", forward)


@compat_check("model_parts", 'the "encoder_out" of TransformerEncoder.forward', other_outputs("encoder_out"))
def _cut_encoder() -> None:
    encoder = model_parts.sentence_encoder(roberta())
    states = encoder(TOKENS[:1], return_all_hiddens=True)["encoder_states"]
    for layer in (2, 1, 0):
        found = model_parts.last_hidden_states(model_parts.keep_first_layers(encoder, layer), TOKENS[:1])
        assert torch.allclose(found, states[layer].transpose(0, 1), atol=1e-6)


@compat_check("model_parts", 'the "encoder_states" of TransformerEncoder.forward', other_outputs("encoder_states"))
def _recorded_states() -> None:
    model = roberta()
    features, extra = model(TOKENS, features_only=True, return_all_hiddens=True)
    embedded, encoded = model_parts.first_and_last_states(model, extra)
    embedded_alone = model_parts.sentence_encoder(model).forward_embedding(TOKENS)[0]
    assert torch.equal(encoded, features)
    assert torch.equal(embedded[0], embedded_alone[0])


def layers_by_name() -> Change:
    original = TransformerEncoderLayerBase.__call__

    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, x=x, **kwargs)

    return partial(instead, TransformerEncoderLayerBase, "__call__", call)


@compat_check("model_parts", "the hidden states as first argument of an encoder layer, time first", layers_by_name())
def _changed_states() -> None:
    model = roberta()
    states = model_parts.sentence_encoder(model)(TOKENS[:1], return_all_hiddens=True)["encoder_states"]
    seen: list[torch.Tensor] = []

    def to_zero(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden)
        return 0 * hidden

    for layer in (0, 1, 2):
        with model_parts.changed_hidden_states(model, layer, to_zero):
            changed = model(TOKENS[:1], features_only=True)[0]
        assert torch.allclose(seen[-1], states[layer].transpose(0, 1), atol=1e-6)
        assert not torch.allclose(changed, states[2].transpose(0, 1))


# loading_hooks: the function that all loading goes through


class ReachedError(Exception):
    """The function was called."""


@compat_check(
    "loading_hooks",
    "load_model_ensemble_and_task, which reads with checkpoint_utils.load_checkpoint_to_cpu",
    partial(instead, checkpoint_utils, "load_model_ensemble_and_task", lambda filenames: None),
)
def _loads_through() -> None:
    reader = mock.patch.object(checkpoint_utils, "load_checkpoint_to_cpu", side_effect=ReachedError)
    with reader as read, suppress(ReachedError):
        checkpoint_utils.load_model_ensemble_and_task([__file__])
    assert read.called


def unregistered(registry: dict[str, Any], name: str, patch: pytest.MonkeyPatch) -> None:
    patch.delitem(registry, name)


@compat_check("checkpoint_contents", "TASK_DATACLASS_REGISTRY", partial(unregistered, TASK_DATACLASS_REGISTRY, "taco"))
def _registries() -> None:
    assert "seed" in refusal(checkpoint_contents._check_task, "taco", {"seed": "many"})


def nameless(original: Any) -> Any:
    def convert(args: Any) -> Any:
        cfg = original(args)
        return SimpleNamespace(task=OmegaConf.create({key: cfg.task[key] for key in cfg.task if key != "_name"}))

    return convert


@compat_check(
    "training_options",
    "the _name in the parts of a configuration",
    partial(
        instead,
        checkpoint_states,
        "convert_namespace_to_omegaconf",
        nameless(checkpoint_states.convert_namespace_to_omegaconf),
    ),
)
def _registered_name() -> None:
    cfg = training_config("", task="masked_lm", criterion="masked_lm")
    assert training_options.registered_name(cfg.task) == "masked_lm"


# binarized_files: token_slices


@compat_check(
    "binarized_files", "TokenBlockDataset.slice_indices", partial(without, TokenBlockDataset, "slice_indices")
)
def _slices() -> None:
    blocks = TokenBlockDataset(sentences(), [3, 2], 2, pad=1, eos=2, break_mode="none")
    assert binarized_files.slices_of(blocks).tolist() == [[0, 2], [2, 4], [4, 5]]


def never_combines(original: Any) -> Any:
    return lambda path, dictionary, combine: original(path, dictionary, combine=False)


@compat_check(
    "binarized_files",
    "load_indexed_dataset(combine=True), which reads PATH, PATH1, PATH2, ...",
    partial(instead, data_utils, "load_indexed_dataset", never_combines(data_utils.load_indexed_dataset)),
)
def _combined() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(("train", "train1", "train2", "train4")):
            builder = StreamingMMapBuilder(f"{folder}/{name}.bin", vocab_size=9)
            builder.add_sentences(np.array([4 + number, 2]), np.array([2]))
            builder.finalize(f"{folder}/{name}.idx")
        found = binarized_files.combined_splits(f"{folder}/train")
        combined = data_utils.load_indexed_dataset(f"{folder}/train", symbols(), combine=True)
        assert found == [f"{folder}/{name}" for name in ("train", "train1", "train2")]
        assert [combined[index].tolist() for index in range(len(combined))] == [[4, 2], [5, 2], [6, 2]]


# training_options


@compat_check(
    "training_options",
    "options.get_training_parser and parse_args_and_arch, which fairseq-train calls by their module",
    partial(instead, fairseq_cli.train, "options", SimpleNamespace()),
)
@compat_check(
    "training_options",
    "the names of the options of a run",
    lambda patch: patch.setattr(options, "parse_args_and_arch", options.parse_args_and_arch.__wrapped__),
)
def _options_of_a_run() -> None:
    words = ["data", "--task", "plain_masked_lm", "--criterion", "masked_lm", "--arch", "mlsm_roberta_tiny"]
    words += ["--optimizer", "adam", "--lr", "1e-3", "--batch-size", "8"]
    with mock.patch.object(sys, "argv", ["fairseq-train", *words]):
        parse = fairseq_cli.train.options.parse_args_and_arch
        assert parse(fairseq_cli.train.options.get_training_parser()).batch_size == 8
        sys.argv += ["--update-freq", "0"]
        assert "--update-freq must be at least 1" in refusal(parse, fairseq_cli.train.options.get_training_parser())


@compat_check(
    "training_options",
    "data_utils._find_extra_valid_paths, behind raise_if_valid_subsets_unintentionally_ignored",
    partial(without, data_utils, "_find_extra_valid_paths"),
)
@compat_check(
    "training_options",
    "fairseq_cli.train.main, which looks for further validation sets",
    partial(instead, fairseq_cli.train, "main", lambda cfg: None),
)
def _more_validation_sets() -> None:
    source = inspect.getsource(fairseq_cli.train.main)
    assert "data_utils.raise_if_valid_subsets_unintentionally_ignored(cfg)" in source
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "valid1.idx").touch()
        cfg = deepcopy(masked_lm_config())
        cfg.task.data = folder
        assert "also has valid1; " in refusal(data_utils.raise_if_valid_subsets_unintentionally_ignored, cfg)


@compat_check(
    "training_options",
    "optim.lr_scheduler.build_lr_scheduler, which the trainer calls by its module",
    partial(instead, lr_scheduler, "build_lr_scheduler", lambda cfg, optimizer: SimpleNamespace(step_update=len)),
)
@compat_check(
    "training_options",
    "optim.build_optimizer, which the trainer calls by its module",
    partial(instead, optim, "build_optimizer", lambda cfg, parameters: None),
)
def _schedule() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert trainer_in(folder).optimizer.optimizer.param_groups
        trainer = trainer_in(folder, "--lr-scheduler", "inverse_sqrt", "--lr", "1,2", "--warmup-updates", 4)
        assert "--lr-scheduler inverse_sqrt: " in refusal(lambda: trainer.optimizer)


# batches: update_lookahead


@compat_check(
    "batches", "EpochBatchIterator.next_epoch_itr", partial(without, iterators.EpochBatchIterator, "next_epoch_itr")
)
@compat_check("batches", "CountingIterator._itr", partial(rename, iterators.CountingIterator, "_itr"))
@compat_check("batches", "CountingIterator.n", partial(rename, iterators.CountingIterator, "n"))
@compat_check("batches", "CountingIterator.total", partial(rename, iterators.CountingIterator, "total"))
def _watched_batches() -> None:
    lookahead = UpdateLookahead()
    batches = watched(lookahead).next_epoch_itr(shuffle=False)
    batches.take(3)
    assert list(batches) == lookahead.take() == [[0], [1], [2]]


@compat_check(
    "batches",
    "GroupedIterator, which fetches all batches of an update before it hands them out",
    partial(instead, iterators, "_chunk_iterator", lambda source, *unused: ([batch] for batch in source)),
)
def _fetched_together() -> None:
    lookahead = UpdateLookahead()
    updates = iterators.GroupedIterator(watched(lookahead).next_epoch_itr(shuffle=False), 4)
    assert next(updates) == lookahead.take() == [[0], [1], [2], [3]]


@compat_check(
    "batches",
    "fairseq_cli.train.validate, which asks for batches with set_dataset_epoch=False",
    partial(instead, fairseq_cli.train, "validate", lambda: None),
)
def _validation_keeps_its_epoch() -> None:
    assert "set_dataset_epoch=False" in inspect.getsource(fairseq_cli.train.validate)
    lookahead = UpdateLookahead()
    list(watched(lookahead).next_epoch_itr(shuffle=False, set_dataset_epoch=False))
    assert lookahead.take() == []


# version_shims


@compat_check(
    "version_shims",
    "options.get_parser, which calls utils.import_user_module",
    partial(instead, options, "utils", SimpleNamespace(import_user_module=lambda args: None)),
)
def _user_module() -> None:
    assert fairseq_utils.import_user_module.accepts_own_user_dir
    with mock.patch.object(fairseq_utils, "import_user_module") as imported:
        options.get_parser("Trainer")
    assert imported.called


@compat_check("version_shims", "the numpy of token_block_dataset", partial(without, token_blocks, "np"))
def _sentences_as_blocks() -> None:
    blocks = TokenBlockDataset(sentences(), [3, 2], None, pad=1, eos=2, break_mode="eos")
    assert [block.tolist() for block in blocks] == [[4, 5, 2], [6, 2]]
    assert hasattr(token_blocks.np, "compat")


@compat_check(
    "version_shims",
    "BackgroundConsumer(queue, source, max_len, cuda_device) and its _queue",
    partial(rename, iterators.BackgroundConsumer.__mro__[1], "_queue"),
)
def _consumer() -> None:
    consumer = iterators.BackgroundConsumer("queue", [1], 1, None)
    assert consumer.stops_before_exit
    assert consumer._queue == "queue"
    assert list(iterators.BufferedIterator(2, [1, 2, 3])) == [1, 2, 3]


def batch_iterator() -> iterators.EpochBatchIterator:
    """What a task of fairseq makes of a dataset, with a process that loads."""
    task = FairseqTask(SimpleNamespace(reuse_dataloader=False))
    return task.get_batch_iterator(Thirteen(), max_sentences=1, num_workers=1)


@compat_check(
    "version_shims",
    "FairseqTask.get_batch_iterator, which reads reuse_dataloader of the task's options",
    partial(always_true, iterators.EpochBatchIterator, "reuse_dataloader"),
)
def _loader_processes() -> None:
    assert not getattr(batch_iterator(), "reuse_dataloader", False)


@compat_check(
    "version_shims",
    "EpochBatchIterator.__init__, which sets persistent_workers",
    partial(always_true, iterators.EpochBatchIterator, "persistent_workers"),
)
def _workers_of_a_loader() -> None:
    assert not batch_iterator().persistent_workers


@compat_check(
    "version_shims",
    "fairseq_cli.train.cli_main, which is fairseq-train",
    partial(without, fairseq_cli.train, "cli_main"),
)
def _train_command() -> None:
    assert callable(fairseq_cli.train.cli_main)


# model_parts: weight_names


@compat_check("model_parts", "the names of RoBERTa's weights", partial(rename, TransformerEncoderLayerBase, "fc1"))
def _names() -> None:
    names = roberta().state_dict().keys()
    assert model_parts.layer_numbers(names) == [0, 1]
    modules = [f"{model_parts.LAYERS}1.{part}" for part in model_parts.LAYER_PARTS.values()]
    modules += [f"{model_parts.LM_HEAD}{part}" for part in model_parts.LM_HEAD_PARTS]
    modules += [model_parts.EMBEDDING_NORM]
    expected = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    expected |= {*model_parts.VOCABULARY_WEIGHTS, model_parts.POSITIONS}
    assert expected - set(names) == set()


@compat_check(
    "model_parts",
    "the name of an encoder-decoder's embeddings",
    partial(rename, TransformerEncoderBase, "embed_tokens"),
)
def _embeddings_of_encoder_decoder() -> None:
    assert model_parts.SOURCE_EMBEDDINGS in encoder_decoder()[1].state_dict()


# batches: whole_epochs


class Thirteen(WholeEpochsDataset):
    """Thirteen samples of one token."""

    def __len__(self) -> int:
        return 13

    def num_tokens(self, index: int) -> int:
        return 1


@compat_check(
    "batches",
    "FairseqDataset.batch_by_size(indices, max_tokens, max_sentences, required_batch_size_multiple)",
    partial(instead, FairseqDataset, "batch_by_size", lambda self, indices, max_sentences: [indices]),
)
@compat_check(
    "batches",
    "FairseqDataset.batch_by_size, which leaves out samples at the end only",
    partial(instead, FairseqDataset, "batch_by_size", lambda self, indices, *unused: [indices[-8:]]),
)
def _last_batch() -> None:
    batches = Thirteen().batch_by_size(np.arange(13), None, 8, 8)
    assert [list(batch) for batch in batches] == [list(range(8)), list(range(8, 13))]


# training_progress


@compat_check(
    "training_progress",
    "SimpleProgressBar of progress_bar, which progress_bar() makes and iterates",
    partial(instead, progress_bar.SimpleProgressBar, "__iter__", lambda self: iter(())),
)
@compat_check(
    "training_progress",
    "metrics.log_scalar('num_updates'), which get_meter('default', 'num_updates') reads",
    partial(instead, metrics, "get_meter", lambda name, key: None),
)
@compat_check(
    "training_progress",
    "Trainer.set_num_updates, which logs num_updates",
    partial(instead, Trainer, "set_num_updates", lambda self, number: None),
)
@compat_check(
    "training_progress",
    "update_config(config) of a bar, with the groups of the options",
    partial(without, fairseq_cli.train, "_flatten_config"),
)
def _shown_progress() -> None:
    config = fairseq_cli.train._flatten_config(OmegaConf.create({"optimization": {"max_update": 5}, **RANK_0}))
    with mock.patch.object(progress_bar, "SimpleProgressBar", training_progress.ShownProgressBar):
        bar = progress_bar.progress_bar([1, 2, 3], log_format="simple", epoch=1)
    bar.update_config(config)
    assert (type(bar), bar.max_update) == (training_progress.ShownProgressBar, 5)
    metrics.reset()  # of other checks
    try:
        Trainer.set_num_updates(SimpleNamespace(lr_step_update=lambda: None, quantizer=None), 4)
        assert training_progress._updates() == 4
    finally:
        metrics.reset()
    with mock.patch.object(sys, "stderr", io.StringIO()):
        assert list(bar) == [1, 2, 3]


RANK_0 = {"distributed_training": {"distributed_rank": 0}}
