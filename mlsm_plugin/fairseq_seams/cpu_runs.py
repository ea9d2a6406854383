"""A run on the CPU: it uses no GPU that is there, and is refused a precision that trains on a GPU only.

fairseq asks ``torch.cuda.is_available()`` in many places, whatever ``--cpu`` says.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch
from fairseq import utils as fairseq_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer

from mlsm_plugin.fairseq_seams.version_shims import is_fairseq_command


def apply() -> None:
    """Hide the GPUs from a command with ``--cpu``, and replace what fairseq does of which it matters (idempotent)."""
    if is_fairseq_command() and "--cpu" in sys.argv:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fairseq would keep random states there, and start a process for each
    if getattr(fairseq_utils.clip_grad_norm_, "stays_on_cpu", False):
        return
    fairseq_utils.clip_grad_norm_ = _on_cpu(fairseq_utils.clip_grad_norm_)
    distributed_utils.call_main = _with_precision_checked(distributed_utils.call_main)  # before any data are loaded
    Trainer.__init__ = _with_precision_checked(Trainer.__init__)  # where another program trains


def _on_cpu(original: Any) -> Any:
    """Keep the norm of gradients that are on the CPU there, and not on the current GPU."""

    @functools.wraps(original)
    def clip_grad_norm_(params: Any, max_norm: float, aggregate_norm_fn: Any = None) -> torch.Tensor:
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        used = [p for p in params if p is not None and p.grad is not None]
        grads = [p.grad.detach() for p in used if not hasattr(p, "expert")]  # as fairseq: of no expert
        if len(grads) < 2 or any(grad.device.type != "cpu" for grad in grads):
            return original(params, max_norm, aggregate_norm_fn)
        norm = torch.stack([torch.norm(grad, p=2, dtype=torch.float32) for grad in grads]).norm()
        if aggregate_norm_fn is not None:
            norm = aggregate_norm_fn(norm)
        if max_norm > 0:
            torch._foreach_mul_([p.grad.detach() for p in used], (max_norm / (norm + 1e-6)).clamp_(max=1))
        return norm

    clip_grad_norm_.stays_on_cpu = True  # type: ignore[attr-defined]
    return clip_grad_norm_


def _with_precision_checked(original: Any) -> Any:
    """Check the precision of the run whose configuration is among the arguments."""

    @functools.wraps(original)
    def checked(*arguments: Any, **named: Any) -> Any:
        for given in (*arguments, *named.values()):
            if getattr(given, "optimizer", None) is not None and hasattr(given, "common"):  # fairseq-validate has none
                check_precision(given.common)
        return original(*arguments, **named)

    return checked


def check_precision(common: Any) -> None:
    """Check that a run can train in the precision that was asked for.

    Args:
        common: the options of fairseq's group of this name.

    Raises:
        ValueError: its device cannot.
    """
    instead = "leave it out, or pass --autocast bf16 in its place (in the tasks of mlsm_plugin)"
    if common.bf16 and common.tpu and fairseq_utils.xm is None:  # the flag turns on --tpu; Hydra's common.bf16 does not
        raise ValueError(f"fairseq's --bf16 trains on a TPU, with torch_xla; {instead}")
    on_cpu = common.cpu or not torch.cuda.is_available()
    if common.fp16 and on_cpu and not (common.memory_efficient_fp16 or common.fp16_no_flatten_grads):
        raise ValueError(f"--fp16 trains on a GPU, and this run is on the CPU; {instead}")
