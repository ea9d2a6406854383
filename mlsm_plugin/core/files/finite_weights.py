"""Check that the weights of a model are finite; they are not if its training diverged."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mlsm_plugin.core.files.atomic_files import PathLike

if TYPE_CHECKING:
    from torch import Tensor


def check_finite_weights(weights: Iterable[tuple[str, "Tensor"]], source: PathLike) -> None:
    """Raise ValueError if one of these named tensors has NaN or infinity; the error names ``source``."""
    for name, values in weights:
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise ValueError(
                f"{source} has weights that are not finite ({name}): it is damaged, or its training has diverged; use "
                "an earlier checkpoint"
            )
