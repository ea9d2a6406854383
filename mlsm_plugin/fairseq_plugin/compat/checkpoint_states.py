"""Open fairseq's checkpoints: read their weights and configuration, and build models. No other module opens them.

A state is the dictionary that fairseq's trainer writes: ``model`` (weights by name), ``cfg`` (the whole configuration),
``optimizer_history`` (an entry for each run, with its ``num_updates``), and more.
"""

import hashlib
import json
import logging
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from fairseq import checkpoint_utils, options, utils
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf, overwrite_args_by_name
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open, remembered_digest
from mlsm_plugin.core.files.finite_weights import check_finite_weights
from mlsm_plugin.core.files.hf_files import first_line
from mlsm_plugin.core.files.model_files import missing_checkpoint
from mlsm_plugin.core.text.vocabulary_record import TOKENIZER, check_vocabulary_record, vocabulary_record
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import (
    NO_FILES,
    CheckpointState,
    Options,
    architecture_options,
    check_configuration,
    names_in,
    read_contents,
    unreadable,
)

SHOWN_CHARACTERS = 400
WORDS = "words"  # key in a task's state (``task_state``): number of words that the run has seen, if it counts them
PUT_BACK = "put back the files that the training has left beside the checkpoint"


def read_state(path: PathLike, overrides: Options | None = None, *, kind: str = "checkpoint") -> CheckpointState:
    """The state in a checkpoint, on the CPU, with its configuration in today's format.

    ``overrides`` are options of the configuration to change, by name. Errors call the file a ``kind``:
    FileNotFoundError if it does not exist, ValueError if it is not a fairseq checkpoint, or must not be used, see
    :mod:`checkpoint_contents`.
    """
    if not Path(path).is_file():
        raise missing_checkpoint(path, kind)
    contents = read_contents(path)
    check_configuration(contents, path)
    return state_of(contents, path, {**(overrides or {}), **NO_FILES})


def state_of(contents: CheckpointState, path: PathLike, overrides: Options | None = None) -> CheckpointState:
    """The state that fairseq's ``load_checkpoint_to_cpu`` would return, from what :func:`read_contents` returned."""
    try:
        if contents.get("args") is not None:
            for name, value in (overrides or {}).items():
                setattr(contents["args"], name, value)
        if contents.get("cfg") is not None:
            contents["cfg"] = OmegaConf.create(contents["cfg"], flags={"allow_objects": True})
            overwrite_args_by_name(contents["cfg"], overrides or {})
        state: CheckpointState = checkpoint_utils._upgrade_state_dict(contents)
    except Exception as error:  # updating older formats raises errors of no common type
        raise unreadable(path, str(error) or type(error).__name__) from None
    return state


def weights_in(state: CheckpointState) -> dict[str, Tensor]:
    """The weights in a state, by name; empty if it holds no model."""
    weights: dict[str, Tensor] = state.get("model", {})
    return weights


def config_in(state: CheckpointState) -> FairseqConfig:
    """The whole configuration in a state: ``model``, ``task``, ``criterion``, ..."""
    return state["cfg"]


def load_model(
    path: PathLike, overrides: Options, *, state: CheckpointState | None = None
) -> tuple[BaseFairseqModel, FairseqConfig, FairseqTask]:
    """The model in a checkpoint, the whole configuration, and the task.

    ``state`` is the result of :func:`read_state` for the same arguments; None reads it. FileNotFoundError if the file,
    or a file of the data such as the dictionary, does not exist. ValueError as for :func:`read_state`, or if the model
    does not fit its weights or the dictionary, a weight is not finite, or the model was trained with other symbols,
    labels or another tokenizer than the data have, or with another tokenizer than lies beside the checkpoint.
    """
    if state is None:
        state = read_state(path, overrides)
    check_finite_weights(weights_in(state).items(), path)
    recorded = state.get("task_state") or {}
    if "data" in overrides:
        check_vocabulary_record(recorded, utils.split_paths(overrides["data"])[0], str(path), PUT_BACK)
    check_vocabulary_record(recorded, Path(path).parent, str(path), PUT_BACK, only=TOKENIZER)
    try:
        models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], overrides, state=state)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        reason = textwrap.shorten(str(error), SHOWN_CHARACTERS, placeholder="...") or type(error).__name__
        raise ValueError(f"the model in {path} cannot be built: {reason}") from error
    return models[0], cfg, task


def updates_of(checkpoint: Path) -> int:
    """Number of updates that a checkpoint has seen; 0 if it does not exist."""
    return 0 if not checkpoint.exists() else int(_last_run(checkpoint).get("num_updates", 0))


def words_of_run(checkpoint: Path) -> int:
    """Number of words that the run of a checkpoint has seen; ValueError if it did not count them."""
    words = (read_contents(checkpoint).get("task_state") or {}).get(WORDS)
    if not isinstance(words, int):
        raise ValueError(f"{checkpoint} does not say how many words it has seen; `mlsm babylm train` counts them")
    return words


def optimizer_of(checkpoint: Path) -> str:
    """Class name of the optimizer whose averages a checkpoint holds."""
    return str(_last_run(checkpoint).get("optimizer_name"))


def architecture_of(checkpoint: Path) -> str:
    """Registered name of the architecture in a checkpoint."""
    return str(names_in(read_contents(checkpoint))["model"])


def model_fingerprint(checkpoint: Path) -> str:
    """SHA-256 of everything that decides the hidden states of a model: its weights and the options of its architecture.

    It does not depend on whether a run was resumed. Errors are those of :func:`read_state`.
    """
    return remembered_digest("model", [checkpoint], lambda: _model_fingerprint(checkpoint))


def _model_fingerprint(checkpoint: Path) -> str:
    contents = read_contents(checkpoint)
    check_configuration(contents, checkpoint)
    digest = hashlib.sha256(json.dumps(architecture_options(contents), sort_keys=True, default=str).encode())
    for name, weight in sorted(weights_in(contents).items()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _last_run(checkpoint: Path) -> CheckpointState:
    history = read_contents(checkpoint).get("optimizer_history")
    if history is None:
        raise unreadable(checkpoint, "it does not say how it was trained")
    return history[-1]


def configuration_of(words: Sequence[str]) -> FairseqConfig:
    """The whole configuration that ``fairseq-train`` makes from its arguments."""
    args = options.parse_args_and_arch(options.get_training_parser(), list(words))
    logging.getLogger("hydra").setLevel(logging.WARNING)  # a module of fairseq lets all messages through
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fairseq calls hydra in a deprecated way
        return convert_namespace_to_omegaconf(args)


def write_untrained(path: PathLike, cfg: FairseqConfig, weights: dict[str, Tensor]) -> None:
    """Write atomically a checkpoint of a model that no fairseq run has trained, such as an imported model.

    It records the vocabulary in its folder, see :mod:`.vocabulary_record`. ``cfg`` is the whole configuration, see
    :func:`configuration_of`. OSError if the file cannot be written.
    """
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": weights,
        "criterion": None,
        "optimizer_history": [
            {"criterion_name": "none", "optimizer_name": "none", "lr_scheduler_state": {}, "num_updates": 0}
        ],
        "task_state": vocabulary_record(Path(path).parent),
        "extra_state": {"train_iterator": {"epoch": 1}},
        "last_optimizer_state": None,
    }
    save_whole(state, path)


def save_whole(state: CheckpointState, path: PathLike) -> None:
    """Write a state atomically; OSError if the file cannot be written, which leaves an older file unchanged."""
    try:
        with atomic_open(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch has its own error for a full disk
        raise OSError(f"{path} cannot be written ({first_line(error)})") from error
