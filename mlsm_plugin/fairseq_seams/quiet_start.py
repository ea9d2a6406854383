"""What fairseq says at the start of a run about nothing that its user did, or could change.

Its calls are those of older versions of Hydra and torch, which warn of each. Its trainer reports parameters that are
shared, and takes the biases that layers were made without for one shared parameter.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from fairseq import trainer

# how these warnings begin, their categories, and how the name of the module begins that they are attributed to
OLD_CALLS = (
    (r"hydra\.experimental\.\w+\(\) is no longer experimental", UserWarning, "hydra"),
    (r"\s*The version_base parameter is not specified", UserWarning, "hydra"),
    (r"In 'config': Usage of deprecated keyword in package header", UserWarning, "hydra"),
    (r"\s*'config' is validated against ConfigStore schema", UserWarning, ""),  # attributed to the program
    (r"\s*The strict flag in the compose API is deprecated", UserWarning, "hydra"),
    (r"`torch\.cuda\.amp\.\w+\(args\.\.\.\)` is deprecated", FutureWarning, "fairseq"),
    (r"'pin_memory' argument is set as true but no accelerator is found", UserWarning, "torch"),
)


def apply() -> None:
    """Leave out these messages (idempotent)."""
    for begin, category, module in OLD_CALLS:
        warnings.filterwarnings("ignore", begin, category, module)
    _report_no_missing_parameters()


def _report_no_missing_parameters() -> None:
    """Let the trainer take None, in the place of a parameter that a module does not have, for no parameter."""
    original = trainer._catalog_shared_params
    if getattr(original, "skips_missing", False):
        return

    @functools.wraps(original)
    def catalog_shared_params(module: Any, memo: Any = None, prefix: str = "") -> Any:
        found = original(module, memo, prefix)  # it calls this function for the modules inside, with a memo
        if memo is None:
            return [names for names in found if trainer._get_module_by_path(module, names[0]) is not None]
        return found

    catalog_shared_params.skips_missing = True  # type: ignore[attr-defined]
    trainer._catalog_shared_params = catalog_shared_params
