"""The duality gap of a sparse code, which certifies how far from optimal the code can be."""

from __future__ import annotations

from typing import Any

import numpy as np

# entries of a dense (rows, n_atoms) float64 temporary: 32 MB, whatever the size of the dictionary
DENSE_ENTRIES = 2**22


def relative_gap_of_parts(x: Any, residual: Any, largest: Any, penalty: Any, lambda_: float) -> Any:
    """An upper bound on how far each code is from optimal, relative to its objective, for numpy or torch.

    With ``r = x - a D`` and ``P(a) = 0.5 * ||r||^2 + lambda_ * sum(a)``, the point
    ``theta = r * min(1, lambda_ / max_j (D r)_j)`` satisfies ``D theta <= lambda_``, and is thus feasible for
    the dual ``Q(theta) = 0.5 * ||x||^2 - 0.5 * ||x - theta||^2``. No primal value is below Q(theta) (Fenchel duality;
    Mairal, 2010, appendix D). The gap is ``(P(a) - Q(theta)) / P(a) >= (P(a) - min P) / P(a)``.

    Args:
        x: (rows, dim) float64.
        residual: (rows, dim), ``x - a D``.
        largest: (rows,), the largest entry of ``D r``.
        penalty: (rows,), ``lambda_ * sum(a)``.
        lambda_: weight of the L1 penalty.

    Returns:
        (rows,) float64 in [0, 1]; 0 for a row of zeros with an empty code.
    """
    scale = lambda_ / largest.clip(min=lambda_)
    squared_residual = (residual * residual).sum(-1)
    primal = 0.5 * squared_residual + penalty
    dual = scale * (x * residual).sum(-1) - 0.5 * scale**2 * squared_residual
    return ((primal - dual) / primal.clip(min=np.finfo(np.float64).tiny)).clip(min=0, max=1)
