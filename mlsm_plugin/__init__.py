"""Masked-language-model pre-training beyond token identity, as a fairseq plugin.

Importing this package registers its tasks, criterions and models with fairseq
(``fairseq-train --user-dir mlsm_plugin`` does exactly that). Without fairseq, it registers nothing, and the modules
that only need Hugging Face (:mod:`mlsm_plugin.huggingface`, ``losses``, ``sparse_coding``) can still be imported.
"""

import logging as _logging
import sys as _sys
import warnings as _warnings

from mlsm_plugin.cli import command_line as _command_line
from mlsm_plugin.core.files.output_lock import end_with_parent as _end_with_parent
from mlsm_plugin.fairseq_plugin.compat import installation as _installation
from mlsm_plugin.version import __version__

_end_with_parent()

# on import, fairseq logs that an optional package of its text-to-speech task is missing
_logging.getLogger("fairseq.tasks.text_to_speech").setLevel(_logging.WARNING)
# fairseq also calls functions that torch 2.14 warns of
_warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", FutureWarning)


def register() -> None:
    """Register everything with fairseq; do nothing without a working fairseq (idempotent).

    Raises:
        ImportError: fairseq was imported, and another one is installed over it.
    """
    if (problem := _installation.fairseq_problem()) is not None:
        if _sys.modules.get("fairseq") is not None:
            raise ImportError(f"mlsm_plugin cannot run here: {problem}")
        return  # the `mlsm` command reports the problem in one line
    level = _logging.root.level
    from mlsm_plugin.fairseq_plugin.compat import (
        loading_hooks,
        resumed_runs,
        training_options,
        training_progress,
        version_shims,
    )

    for module in (version_shims, resumed_runs, training_options, training_progress, loading_hooks):
        module.apply()
    from mlsm_plugin.fairseq_plugin import criterions, models, optimizers, tasks  # noqa: F401
    from mlsm_plugin.fairseq_plugin.coding import fairseq_encoder  # noqa: F401
    from mlsm_plugin.fairseq_plugin.text import text_tokenizer  # noqa: F401

    # a model of fairseq for speech lets every package log its details
    if _logging.root.level == _logging.DEBUG != level:
        _logging.root.setLevel(_logging.INFO)


# the `mlsm` command registers once it knows what it has to do: these imports take seconds
if not _command_line.is_mlsm():
    register()

__all__ = ["__version__", "criterions", "models", "optimizers", "register", "tasks"]
