"""Move the options in a checkpoint's configuration to where they belong today.

fairseq drops options of a checkpoint that its task does not know (``tasks.setup_task(..., from_checkpoint=True)``). An
option that has moved from a task to its criterion would silently get its default value.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from fairseq import checkpoint_utils
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import OmegaConf

from mlsm_plugin.fairseq_seams.checkpoint_contents import read_contents, unreadable
from mlsm_plugin.fairseq_seams.version_shims import open_config


def apply() -> None:
    """Let ``checkpoint_utils.load_checkpoint_to_cpu`` take plain data only, and update configurations (idempotent).

    All of fairseq's commands load checkpoints with this function. They report a bad file in one line.
    """
    original = checkpoint_utils.load_checkpoint_to_cpu
    if getattr(original, "moves_options", False):
        return

    @functools.wraps(original)
    def load_checkpoint_to_cpu(path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if os.path.isfile(path):
            read_contents(path)
        try:
            state: dict[str, Any] = original(path, *args, **kwargs)
        except OSError:
            raise
        except Exception as error:  # updating older formats raises errors of no common type
            raise unreadable(path, str(error) or type(error).__name__) from None
        if OmegaConf.is_config(state.get("cfg")):
            move_loss_options(state["cfg"])
        return state

    load_checkpoint_to_cpu.moves_options = True  # type: ignore[attr-defined]
    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu


def registered_name(part: Any) -> str:
    """The registered name of what a part of a configuration makes, such as a task's; empty where it has none."""
    return str(getattr(part, "_name", ""))


def move_loss_options(cfg: Any) -> None:
    """Move options that only the criterion knows from ``cfg.task`` to ``cfg.criterion``, in place.

    In version 0.1 the options of TACO's and NPM's losses belonged to their tasks.

    Args:
        cfg: the whole configuration of a checkpoint. Options that the criterion already has stay as they are.
    """
    task, criterion = cfg.get("task"), cfg.get("criterion")
    if not (OmegaConf.is_config(task) and OmegaConf.is_config(criterion)):
        return
    known = TASK_DATACLASS_REGISTRY.get(task.get("_name"))
    wanted = CRITERION_DATACLASS_REGISTRY.get(criterion.get("_name"))
    if known is None or wanted is None:
        return
    moved = set(wanted.__dataclass_fields__) - set(known.__dataclass_fields__)
    with open_config(task), open_config(criterion):
        for name in sorted(moved & set(task)):
            value = task.pop(name)
            if name not in criterion:
                criterion[name] = value
