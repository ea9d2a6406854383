"""Masked-language-model pre-training beyond token identity, as a fairseq plugin.

Importing this package registers its tasks, criterions and models with fairseq
(``fairseq-train --user-dir mlsm_plugin`` does exactly that). Where fairseq is missing, it registers nothing; what works
with Hugging Face alone (:mod:`mlsm_plugin.huggingface`, ``losses``, ``sparse_coding``) can be imported.
"""

import logging as _logging
import os.path as _path
import sys as _sys

from mlsm_plugin.fairseq_seams import installation as _installation
from mlsm_plugin.files.child_process import end_with_parent as _end_with_parent
from mlsm_plugin.files.moved_modules import forward_moved_modules as _forward_moved_modules
from mlsm_plugin.version import __version__

_forward_moved_modules()
_end_with_parent()

# on import, fairseq logs that an optional package of its text-to-speech task is missing
_logging.getLogger("fairseq.tasks.text_to_speech").setLevel(_logging.WARNING)

# `mlsm --help` and `mlsm --version` run nothing, and these imports take seconds
_program, _words = _path.basename("".join(_sys.argv[:1])), _sys.argv[1:]
_runs_nothing = _program in ("mlsm", "mlsm.exe") and all(word.startswith("-") for word in _words)

if not _runs_nothing and _installation.first_problem() is None:
    from mlsm_plugin.fairseq_seams import quiet_start as _quiet_start
    from mlsm_plugin.fairseq_seams import resumed_runs as _resumed_runs
    from mlsm_plugin.fairseq_seams import saved_configurations as _saved_configurations
    from mlsm_plugin.fairseq_seams import version_shims as _version_shims

    _version_shims.apply()
    _quiet_start.apply()
    _saved_configurations.apply()
    _resumed_runs.apply()
    from mlsm_plugin import criterions, models, optimizers, tasks
    from mlsm_plugin.tokenization import hf_bpe as _hf_bpe  # noqa: F401
elif _sys.modules.get("fairseq") is not None:
    _installation.require_supported_installation()
# else: the `mlsm` command reports the problem in one line

__all__ = ["__version__", "criterions", "models", "optimizers", "tasks"]
