"""A checkpoint with the mean of the weights of others, like ``scripts/average_checkpoints.py`` in fairseq."""

from collections.abc import Sequence
from pathlib import Path

import torch
from fairseq.dataclass.configs import FairseqConfig
from torch import Tensor

from mlsm_plugin.core.files import model_files
from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.model_files import DICTIONARIES, NUMBERED, copy_tokenizer, only_checkpoint, symbols_in
from mlsm_plugin.core.sparse_coding.stored_codes import CODES_OVER
from mlsm_plugin.core.text.vocabulary_record import (
    RECORDED,
    SYMBOL_FILES,
    TOKENIZER,
    TOKENIZERS,
    check_vocabulary_record,
)
from mlsm_plugin.fairseq_plugin.compat import checkpoint_states
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import (
    CheckpointState,
    architecture_options,
    check_configuration,
    read_contents,
)
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import save_whole, updates_of, weights_in
from mlsm_plugin.fairseq_plugin.compat.model_parts import ATOM_PROJECTION
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import LAST
from mlsm_plugin.fairseq_plugin.compat.training_options import why_untrained


def last_checkpoints(folder: PathLike, number: int) -> list[Path]:
    """The newest ``number`` numbered checkpoints of a run, of different updates, oldest first; ValueError for fewer."""
    of_update = {updates_of(path): path for path in sorted(Path(folder).glob("*.pt")) if NUMBERED.fullmatch(path.name)}
    if len(of_update) < number:
        raise ValueError(
            f"{folder} has numbered checkpoints of {len(of_update)} different updates, fewer than {number}; "
            "--save-interval-updates and --keep-interval-updates of fairseq-train keep more"
        )
    return [of_update[update] for update in sorted(of_update)[-number:]]


def average_checkpoints(paths: Sequence[PathLike], output: PathLike) -> list[int]:
    """Write atomically a checkpoint with the mean of the weights, computed in float64 and kept in at least float32.

    Everything else, such as the state of the task, comes from the last checkpoint; the state of the optimizer is left
    out. The tokenizer and labels of the last checkpoint are copied to the folder of the output. Returns the number of
    updates of each checkpoint.

    Raises:
        FileNotFoundError: a checkpoint does not exist.
        ValueError: there are fewer than two checkpoints, a file is not a checkpoint, models, heads or codes differ, or
            the folder of the output has another vocabulary.
        OSError: the file cannot be written.
    """
    files = [only_checkpoint(path) for path in paths]
    if len({file.resolve() for file in files}) < max(2, len(files)):
        raise ValueError("averaging needs two or more checkpoints, each of them once")
    contents = [read_contents(file) for file in files]
    for file, content in zip(files, contents, strict=True):
        check_configuration(content, file)
        _check_same_model(files[-1], contents[-1], file, content)
    if names := _differing(Path(output), files[-1]):
        raise ValueError(f"the {names[0]} beside {output} has another vocabulary; choose another folder")
    recorded = contents[-1].get("task_state") or {}
    remedy = "choose another folder for the mean"
    check_vocabulary_record(recorded, Path(output).parent, str(files[-1]), remedy, only=TOKENIZER)
    means = {name: _mean([weights_in(content)[name] for content in contents]) for name in weights_in(contents[-1])}
    for name, mean in means.items():
        if not mean.isfinite().all():
            raise ValueError(f"the mean of {name} is not finite; leave out the checkpoint whose training has diverged")
    updates = [updates_of(file) for file in files]  # before the output replaces one of them
    save_whole({**contents[-1], "model": means, "last_optimizer_state": None}, output)
    if files[-1].parent.resolve() != Path(output).parent.resolve():
        copy_tokenizer(files[-1].parent, Path(output).parent)
        model_files.copy_dicts(files[-1].parent, Path(output).parent)
    return updates


def _check_same_model(last: Path, last_content: CheckpointState, file: Path, content: CheckpointState) -> None:
    """Raise ValueError unless the weights of two checkpoints can be averaged."""
    problem = f"{file} and {last} cannot be averaged"
    if architecture_options(content) != architecture_options(last_content):
        raise ValueError(f"{problem}: their architectures differ")
    _check_same_shapes(problem, content, last_content)
    _check_same_symbols(problem, last, last_content, file, content)
    remedy = "pass checkpoints of one stage of one run, or a smaller --last"
    dictionaries = {_task_state(part).get(CODES_OVER) for part in (content, last_content)}
    if f"{ATOM_PROJECTION}weight" in weights_in(content) and len(dictionaries) > 1:
        raise ValueError(f"{problem}: their latent heads predict codes over different dictionaries; {remedy}")
    configs = [
        checkpoint_states.config_in(checkpoint_states.state_of({**part}, file)) for part in (content, last_content)
    ]
    beginnings = [_beginning(config) for config in configs]
    if beginnings[0] != beginnings[1]:
        raise ValueError(
            f"{problem}: they began with different weights ({beginnings[0]}; {beginnings[1]}), so their mean is not a "
            f"working model; {remedy}"
        )
    if len(untrained := {why_untrained(config) for config in configs}) > 1:
        raise ValueError(f"{problem}: of only one of them, {next(filter(None, untrained))}; {remedy}")


def _check_same_shapes(problem: str, content: CheckpointState, last_content: CheckpointState) -> None:
    shapes = _shapes(content)
    last_shapes = _shapes(last_content)
    if shapes != last_shapes:
        names = sorted({*shapes, *last_shapes})
        name = next(name for name in names if shapes.get(name) != last_shapes.get(name))
        raise ValueError(f"{problem}: the weight {name} is missing in one of them or has another shape")


def _check_same_symbols(
    problem: str, last: Path, last_content: CheckpointState, file: Path, content: CheckpointState
) -> None:
    states = [_task_state(part) for part in (content, last_content)]
    differing = {name for name in RECORDED if len({state.get(name) for state in states} - {None}) > 1}
    differing |= {name for name, file_name in SYMBOL_FILES.items() if file_name in _differing(file, last)}
    if differing and differing <= {*TOKENIZERS}:
        raise ValueError(f"{problem}: their tokenizers differ, and read text differently")
    if differing:
        what = "labels" if differing == {"labels"} else "vocabularies"
        raise ValueError(f"{problem}: their {what} differ, so the same ids mean different ones")


def _shapes(content: CheckpointState) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights_in(content).items()}


def _task_state(content: CheckpointState) -> CheckpointState:
    return content.get("task_state") or {}


def _beginning(config: FairseqConfig) -> str:
    """The initial weights of a run, as text: a checkpoint, or the weights drawn with the seed."""
    checkpoint = config.get("checkpoint") or {}
    start = checkpoint.get("finetune_from_model")
    if not start and checkpoint.get("restore_file") not in (None, "", LAST):
        start = checkpoint.get("restore_file")
    return str(start) if start else f"those of --seed {(config.get('common') or {}).get('seed')}"


def _differing(first: Path, second: Path) -> list[str]:
    """The names of the dictionaries that lie beside both checkpoints and have different symbols."""
    names = (name for name in DICTIONARIES if all((path.parent / name).is_file() for path in (first, second)))
    return [name for name in names if symbols_in(first.parent / name) != symbols_in(second.parent / name)]


def _mean(weights: list[Tensor]) -> Tensor:
    """The mean of weights of one shape; integers, such as counts, are taken from the last."""
    last = weights[-1]
    if not last.is_floating_point():
        return last
    total = sum((weight.double() for weight in weights), torch.zeros(last.shape, dtype=torch.float64))
    return (total / len(weights)).to(torch.promote_types(last.dtype, torch.float32))
