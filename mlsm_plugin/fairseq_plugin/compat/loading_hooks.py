"""A hook on weights before they are loaded, which is private in torch; errors for checkpoints that do not fit.

``checkpoint_utils.load_checkpoint_to_cpu``, which all commands of fairseq use, then only loads plain data.
"""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
from fairseq import checkpoint_utils
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.file_io import PathManager
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.trainer import Trainer
from torch import Tensor, nn

from mlsm_plugin.core.files.finite_weights import check_finite_weights
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import CheckpointState, Options, names_in, read_contents
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import state_of, weights_in
from mlsm_plugin.fairseq_plugin.compat.model_parts import POSITIONS, SOURCE_EMBEDDINGS, VOCABULARY_WEIGHTS
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import LAST
from mlsm_plugin.fairseq_plugin.compat.version_shims import causes, open_config

Look = Callable[[dict[str, Tensor], str], None]

# beginnings of the errors of torch and fairseq for a checkpoint that does not fit
OTHER_WEIGHTS = "Error(s) in loading state_dict"
OTHER_AVERAGES = "loaded state dict "
MISSHAPEN = re.compile(r"size mismatch for (\S+): .*?torch\.Size\(\[(.*?)\]\).*?torch\.Size\(\[(.*?)\]\)")
OF_ANOTHER = re.compile(r"(Criterion|Optimizer) does not match\b.*\. (\w+) vs (\w+)$")
# weights with a row for each position, after the rows up to the padding index
OPTIONS_OF_POSITIONS = {
    POSITIONS: "--max-positions",
    "encoder.embed_positions.weight": "--max-source-positions",
    "decoder.embed_positions.weight": "--max-target-positions",
}
ROWS_BEFORE_POSITIONS = 2


def before_loading(module: nn.Module, look: Look) -> None:
    """Call ``look(weights, prefix)`` before ``module`` loads weights; the names of its weights begin with ``prefix``.

    ``look`` may change the dictionary in place, or raise.
    """
    module._register_load_state_dict_pre_hook(functools.partial(_show, look))  # a partial can be pickled


def _show(look: Look, weights: dict[str, Tensor], prefix: str, *unused: object) -> None:
    look(weights, prefix)


def apply() -> None:
    """Let the trainer say in one line why a run cannot begin with a checkpoint; each rank reads it (idempotent)."""
    if not getattr(Trainer.load_checkpoint, "says_what_does_not_fit", False):
        Trainer.load_checkpoint = _saying_what_does_not_fit(Trainer.load_checkpoint)
        checkpoint_utils.load_checkpoint_to_cpu = _reading_plain_data(checkpoint_utils.load_checkpoint_to_cpu)


def _reading_plain_data(original: Callable[..., CheckpointState]) -> Callable[..., CheckpointState]:
    @functools.wraps(original)
    def load_checkpoint_to_cpu(
        path: str, arg_overrides: Options | None = None, *args: object, **kwargs: object
    ) -> CheckpointState:
        if not os.path.isfile(path):
            return original(path, arg_overrides, *args, **kwargs)
        state = state_of(read_contents(path, mapped=False), path, arg_overrides)
        check_finite_weights(weights_in(state).items(), path)
        return state

    return load_checkpoint_to_cpu


def _saying_what_does_not_fit(original: Callable[..., CheckpointState]) -> Callable[..., CheckpointState]:
    @functools.wraps(original)
    def load_checkpoint(self: Trainer, filename: str, *args: object, **kwargs: object) -> CheckpointState:
        last = Path(self.cfg.checkpoint.save_dir, LAST.replace(".pt", f"{self.checkpoint_suffix or ''}.pt"))
        resumes = Path(filename) == last
        if not resumes and not PathManager.isfile(filename):  # fairseq would start a new run
            raise ValueError(f"the checkpoint {filename} does not exist")
        if self.data_parallel_world_size > 1:  # torch >= 2.6 refuses the configuration that the first rank would send
            with open_config(self.cfg.checkpoint):
                self.cfg.checkpoint.load_checkpoint_on_all_dp_ranks = True
        try:
            loaded = original(self, filename, *args, **kwargs)
            if loaded is not None:
                check_averages(self.optimizer.optimizer)
        except Exception as error:
            for reason in causes(error):
                if problem := _problem(str(reason), filename, resumes):
                    raise ValueError(f"{filename} {problem}") from error
            raise
        return loaded

    load_checkpoint.says_what_does_not_fit = True  # type: ignore[attr-defined]
    return load_checkpoint


def check_averages(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if a torch optimizer has loaded averages of another size; it would write out of bounds."""
    for parameter, state in optimizer.state.items():
        average = state.get("exp_avg") if isinstance(state, dict) else None
        if isinstance(average, Tensor) and average.shape != parameter.shape:
            raise ValueError(f"{OTHER_AVERAGES}has averages of another size")


def _problem(text: str, filename: str, resumes: bool) -> str | None:
    """The problem with a checkpoint and the remedy, if the text of the error is known here; else None."""
    instead = "pass another --save-dir" if resumes else "to begin with its weights, pass it to --finetune-from-model"
    if text.startswith(OTHER_WEIGHTS):
        return _weights_that_do_not_fit(text, filename, instead if resumes else None)
    if text.startswith(OTHER_AVERAGES):
        return f"holds the averages of an optimizer for other weights than this model has; {instead}"
    if match := OF_ANOTHER.match(" ".join(text.split())):
        kind, saved, requested = match.groups()
        registry = CRITERION_REGISTRY if kind == "Criterion" else OPTIMIZER_REGISTRY
        names = {registered.__name__: name for name, registered in registry.items()}
        flag = f"--{kind.lower()}"
        trained_with = names.get(saved, saved)
        return f"was trained with {flag} {trained_with}, and not {names.get(requested, requested)}; {instead}"
    return None


def _weights_that_do_not_fit(text: str, filename: str, instead: str | None) -> str:
    shapes = {name: (saved.split(", "), new.split(", ")) for name, saved, new in MISSHAPEN.findall(text)}
    rows = {name: (int(saved[0]), int(new[0])) for name, (saved, new) in shapes.items() if saved[1:] == new[1:]}
    missing = _weight_names(text, "Missing")
    unexpected = _weight_names(text, "Unexpected")
    of_symbols = [rows[name] for name in (*VOCABULARY_WEIGHTS, SOURCE_EMBEDDINGS) if name in rows]
    if of_symbols:
        saved_symbols, new_symbols = of_symbols[0]
        return (
            f"was trained with a vocabulary of {saved_symbols} symbols, and dict.txt gives this model {new_symbols}; "
            f"{instead or 'binarize the text with the tokenizer of the checkpoint'}"
        )
    if shapes and not missing and not unexpected and set(shapes) <= set(rows) & set(OPTIONS_OF_POSITIONS):
        flags = [f"{OPTIONS_OF_POSITIONS[name]} {saved - ROWS_BEFORE_POSITIONS}" for name, (saved, _) in rows.items()]
        return f"has other positions than this model; pass {' '.join(flags)}"
    parts = [f"it lacks {len(missing)} weights (first: {missing[0]})"] if missing else []
    parts += [f"it has {len(unexpected)} others (first: {unexpected[0]})"] if unexpected else []
    for name, (saved, new) in list(shapes.items())[:1]:
        parts += [f"{len(shapes)} have another shape ({name}: {' x '.join(saved)}, here {' x '.join(new)})"]
    names = names_in(read_contents(filename))
    return (
        f"does not fit this model: {', '.join(parts)}; "
        f"{instead or 'pass the architecture of the checkpoint and its sizes'} "
        f"(--arch {names['model']}, --task {names['task']})"
    )


def _weight_names(text: str, kind: str) -> list[str]:
    """The names of the ``Missing`` or ``Unexpected`` weights in an error of torch."""
    match = re.search(rf"{kind} key\(s\) in state_dict: (.*)", text)
    return [] if match is None else re.findall('"([^"]+)"', match[1])
