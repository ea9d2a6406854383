"""Whether this process is the ``mlsm`` command itself."""

import os.path
import sys

MODULE = "mlsm_plugin.cli.main"


def is_mlsm() -> bool:
    """Whether this process was started as ``mlsm`` or ``python -m mlsm_plugin.cli.main``.

    This also works while the package is being imported. A worker process spawned by ``mlsm`` has the same ``sys.argv``,
    but a different command line.
    """
    program = "".join(sys.argv[:1])
    if program == "-m":
        return MODULE in sys.orig_argv
    return os.path.basename(program) in ("mlsm", "mlsm.exe") and program in sys.orig_argv
