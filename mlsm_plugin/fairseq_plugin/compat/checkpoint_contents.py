"""Check the content of a checkpoint before anything is built from it; see docs/security.md.

Somebody else may have written a checkpoint. It is read as plain data: tensors, numbers, text, lists and dictionaries.
Its configuration names a task, a model and a criterion, and some of fairseq's models evaluate the text of their options
as Python. Only names on the lists here are built, and only with options of the right type.
"""

import argparse
import ast
import errno
import math
import os
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.logging import meters
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.json_checks import shown
from mlsm_plugin.fairseq_plugin.compat.model_parts import TRAINING_OPTIONS

CheckpointState = dict[str, Any]  # what a checkpoint file holds: plain data
Options = dict[str, Any]  # options of a task, a model or a criterion, by name

PACKAGE = __name__.partition(".")[0]
# names of fairseq; everything that this package registers is trusted, too
TRUSTED = {
    "task": {"denoising", "masked_lm", "multilingual_denoising", "sentence_prediction", "span_masked_lm"},
    "model": {"bart", "roberta", "transformer"},
    "criterion": {"cross_entropy", "label_smoothed_cross_entropy", "masked_lm", "sentence_prediction"},
}
# options of models whose text fairseq evaluates as Python
EVALUATED = ("adaptive_input_cutoff", "adaptive_softmax_cutoff", "xformers_att_config")
# Options that name files of weights. The checkpoint holds the weights, so these files are not read.
NO_FILES = {"encoder_embed_path": None, "decoder_embed_path": None}
DEEPEST = 12
MOST_POSITIONS = 1 << 20


def trust(*, tasks: Iterable[str] = (), models: Iterable[str] = (), criterions: Iterable[str] = ()) -> None:
    """Let checkpoints name further tasks, models and criterions; call it in the ``__init__.py`` of a ``--user-dir``.

    Only trust classes that never evaluate, import or run the content of their options. The names are those passed to
    fairseq's decorators; all architectures of a model are trusted.
    """
    for kind, names in (("task", tasks), ("model", models), ("criterion", criterions)):
        TRUSTED[kind].update(names)


def read_contents(path: PathLike, *, mapped: bool = True) -> CheckpointState:
    """The content of a checkpoint file, as plain data; with ``mapped``, weights are only read when they are used.

    OSError if the file cannot be read, ValueError if it is not a checkpoint of fairseq, or holds more than plain data.
    """
    try:
        contents = _loaded(os.fspath(path), mapped)
        _check_contents(contents)
    except OSError as error:
        if error.errno == errno.EINVAL:  # torch's, for a file that is too short
            raise unreadable(path, "it is too short") from None
        raise
    except pickle.UnpicklingError:  # torch's own message advises to load without its protection
        raise unreadable(path, "it is damaged, or holds Python objects, which are not loaded") from None
    except KeyError:  # torch's, for a byte that begins no object
        raise unreadable(path, "it is another kind of file") from None
    except Exception as error:  # reading another kind of file raises errors of no common type
        raise unreadable(path, str(error) or type(error).__name__) from None
    return contents


def unreadable(path: PathLike, reason: str) -> ValueError:
    """The error for a file that is not a checkpoint, in one line."""
    first = (reason.splitlines() or [""])[0]
    return ValueError(f"{path} is not a readable fairseq checkpoint ({first})")


def check_configuration(contents: CheckpointState, path: PathLike) -> None:
    """Check that a model may be built from the result of :func:`read_contents`; ValueError says why not.

    Names must be on the lists, and options of the right type and size.
    """
    parts = parts_of(contents)
    names = names_in(contents)
    for kind, name in names.items():
        if not _is_trusted(kind, name):
            raise ValueError(
                f"{path} names the {kind} {shown(name)}, which is not on the list of what checkpoints may name; "
                "docs/security.md says how to add your own"
            )
    try:
        _check_task(names["task"], parts["task"])
        _check_model(names["model"], parts["model"])
        _check_sizes({**parts["task"], **parts["model"]}, contents.get("model") or {})
    except ValueError as error:
        raise ValueError(f"{path} must not be used: {error}") from None


def names_in(contents: CheckpointState) -> dict[str, Any]:
    """The registered names of ``task``, ``model`` (its architecture) and ``criterion``, or None."""
    return {kind: part.get("_name") for kind, part in parts_of(contents).items()}


def architecture_options(contents: CheckpointState) -> Options:
    """The options of the model's architecture in a checkpoint, by name; without options of its training."""
    options = parts_of(contents)["model"]
    known = {action.dest for action in _actions(str(options["_name"]))} - TRAINING_OPTIONS
    return {name: value for name, value in sorted(options.items()) if name in known}


def _loaded(path: str, mapped: bool) -> CheckpointState:
    """The content of a torch file, on the CPU; this is only safe since torch 2.6 (CVE-2025-32434)."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
    return _loaded(path, mapped=False)  # the format of torch < 1.6


def _check_contents(contents: object) -> None:
    if not isinstance(contents, dict):
        raise ValueError(f"it is {_kind(contents)}, not a dictionary")
    if contents.get("cfg") is None and contents.get("args") is None:
        raise ValueError("it has no configuration")
    for name in ("cfg", "args"):
        if contents.get(name) is not None and not isinstance(contents[name], (dict, argparse.Namespace)):
            raise ValueError(f"its {name} is {_kind(contents[name])}")
        for where, value in _values(contents.get(name), name):
            if isinstance(value, str) and "${" in value:
                raise ValueError(f"{where} is {shown(value)}, and interpolations in a checkpoint are never resolved")
            if name == "args" and isinstance(value, str) and "\\'" in value:
                raise ValueError(f"{where} has an escaped quote, {shown(value)}")
    weights = contents.get("model", {})
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise ValueError("its weights are not a dictionary")
    for name, weight in weights.items():
        if not isinstance(weight, torch.Tensor):
            raise ValueError(f"the weight {shown(name)} is {_kind(weight)}")
    _check_history(contents.get("optimizer_history"))
    _check_meters(contents.get("extra_state"))


def _check_history(history: object) -> None:
    if history is None:  # before fairseq 0.6
        return
    if not isinstance(history, list) or not history or not all(isinstance(entry, dict) for entry in history):
        raise ValueError("its optimizer_history is not a list of runs")
    updates = history[-1].get("num_updates", 0)
    if isinstance(updates, bool) or not isinstance(updates, int) or updates < 0:
        raise ValueError(f"its number of updates is {shown(updates)}")


def _check_meters(state: object) -> None:
    """Check the names of meters, since fairseq looks up their classes by a name from the file."""
    if state is None:
        return
    if not isinstance(state, dict):
        raise ValueError(f"its extra_state is {_kind(state)}")
    groups = state.get("metrics") or {}
    members = vars(meters).items()
    known = {name for name, value in members if isinstance(value, type) and issubclass(value, meters.Meter)}
    for group in groups.values() if isinstance(groups, dict) else [groups]:
        for entry in group if isinstance(group, (list, tuple)) else [group]:
            if not isinstance(entry, (list, tuple)) or len(entry) != 4 or entry[2] not in known:
                raise ValueError(f"{shown(entry)} is not a meter")


def _values(value: object, where: str, depth: int = 0) -> Iterator[tuple[str, object]]:
    """The plain values in a configuration, each with its place; ValueError for other values."""
    if depth > DEEPEST:
        raise ValueError(f"{where} is nested too deeply")
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _values(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _values(item, where, depth + 1)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield where, value
    else:
        raise ValueError(f"{where} is {_kind(value)}, not plain data")


def parts_of(contents: CheckpointState) -> dict[str, Options]:
    """The options of task, model and criterion; in old checkpoints (``args``), each has all options."""
    if contents.get("args") is not None:
        args = _options(contents["args"])
        return {kind: {**args, "_name": args.get("arch" if kind == "model" else kind)} for kind in TRUSTED}
    cfg = _options(contents["cfg"])
    return {kind: _options(cfg.get(kind)) for kind in TRUSTED}


def _options(part: object) -> Options:
    """A part of a configuration as a dictionary; empty for other values."""
    if isinstance(part, argparse.Namespace):
        return vars(part)
    return part if isinstance(part, dict) else {}


def _is_trusted(kind: str, name: object) -> bool:
    registry = {"task": TASK_REGISTRY, "model": ARCH_MODEL_REGISTRY, "criterion": CRITERION_REGISTRY}[kind]
    if not isinstance(name, str) or name not in registry:
        return False
    listed = ARCH_MODEL_NAME_REGISTRY.get(name) if kind == "model" else name
    return listed in TRUSTED[kind] or registry[name].__module__.partition(".")[0] == PACKAGE


def _check_task(name: str, options: Options) -> None:
    """Check the types of a task's options by its dataclass; fairseq drops unknown options."""
    dataclass = TASK_DATACLASS_REGISTRY.get(name)
    if dataclass is None:  # an older task of a user, who trusts it
        return
    typed = OmegaConf.structured(dataclass)
    for option in dataclass.__dataclass_fields__:
        if option not in options:
            continue
        try:
            typed[option] = options[option]
        except OmegaConfBaseException:
            raise ValueError(f"the task {name} has {option} = {shown(options[option])}, of another type") from None


def _check_model(architecture: str, options: Options) -> None:
    """Check the types of a model's options by the parser of its command line."""
    for option, value in options.items():
        if str(option).endswith(EVALUATED) and isinstance(value, str) and not _is_literal(value):
            raise ValueError(f"the model's {option} is {shown(value)}, which fairseq would run")
    for action in _actions(architecture):
        if action.dest in options and not _has_type(action, options[action.dest]):
            raise ValueError(
                f"the architecture {architecture} has {action.dest} = {shown(options[action.dest])}, of another type"
            )


def _actions(architecture: str) -> list[argparse.Action]:
    """The options of an architecture."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ARCH_MODEL_REGISTRY[architecture].add_args(parser)
    return parser._actions


def _has_type(action: argparse.Action, value: object) -> bool:
    """Whether a value can come from an option of the command line."""
    if value is None or value == action.default:
        return True
    if action.nargs == 0:
        return isinstance(value, bool)
    if action.choices is not None:
        return value in action.choices
    if action.type is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if action.type is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if action.type is str:
        return isinstance(value, str)
    # fairseq leaves out the type if the default is another option; else the value is a list of numbers
    return action.type is None or not isinstance(value, str) or _is_literal(value)


def _is_literal(text: str) -> bool:
    """Whether text is empty, a number, or another literal of Python."""
    try:
        ast.literal_eval(text or "None")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _check_sizes(options: Options, weights: dict[str, torch.Tensor]) -> None:
    """Check that the options ask for nothing larger than the weights, before memory for a model is allocated."""
    largest = max((size for weight in weights.values() for size in weight.shape), default=0)
    limits = {
        "_layers": len(weights),
        "_dim": largest,
        "_heads": largest,
        "num_atoms": largest,
        "sentinels": largest,
        "_positions": max(largest, MOST_POSITIONS),
        "tokens_per_sample": max(largest, MOST_POSITIONS),
        "max_spans_per_sequence": MOST_POSITIONS,
    }
    for option, value in options.items():
        for ending, limit in limits.items():
            if str(option).endswith(ending) and isinstance(value, int) and value > limit:
                raise ValueError(f"its weights do not fit {option} = {value}")


def _kind(value: object) -> str:
    return f"of the type {type(value).__name__}"
