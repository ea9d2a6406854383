"""Whether the weights of a model are numbers, which those of a training that has diverged are not."""

from collections.abc import Iterable
from typing import Any

from mlsm_plugin.core.files.atomic_files import PathLike


def check_finite_weights(weights: Iterable[tuple[str, Any]], source: PathLike) -> None:
    """Raise ValueError, which names ``source``, if one of these tensors, with their names, has NaN or infinity."""
    for name, values in weights:
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise ValueError(
                f"{source} has weights that are not finite ({name}): it is damaged, or its training has diverged; use "
                "an earlier checkpoint"
            )
