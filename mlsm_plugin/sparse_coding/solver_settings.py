"""What every solver is told."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SolverSettings:
    """The settings that every solver receives; one that cannot honour a setting says so in its docstring."""

    lambda_: float
    """Weight of the l1 penalty."""
    tolerance: float
    """Relative duality gap at which an iterative solver may stop."""
    max_nonzeros: int | None
    """Most non-zeros of a code, or None for no limit."""
    threads: int | None
    """CPU threads, or None for all cores."""
    device: torch.device
    """Where the hidden states came from; solvers written in torch compute there."""
