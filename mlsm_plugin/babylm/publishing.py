"""Push the branches of a submission to a repository of the Hugging Face hub."""

import re
from collections.abc import Iterator
from pathlib import Path

from mlsm_plugin.babylm.ledger import Ledger
from mlsm_plugin.babylm.settings import CHECKPOINTS, MAIN
from mlsm_plugin.core.files.hub_repository import push_branches


def push(run: Path, repository: str, *, private: bool = False, dry_run: bool = False) -> Iterator[str]:
    """Push each checkpoint of a run to a branch of its name, and the last one to ``main``; yields a line for each.

    A branch that already has these files is skipped, so a stopped push resumes. ``dry_run`` does not contact the hub.
    ValueError if the name of the repository has a dot, a folder is missing, or the hub returns an error.
    """
    if not re.fullmatch(r"[\w-]+/[\w-]+", repository):
        raise ValueError(
            f"{repository} must be OWNER/NAME of letters, digits, - and _; the evaluation pipeline cuts a name at a dot"
        )
    folders = {name: run / CHECKPOINTS / name for name in [*Ledger.read(run).names, MAIN]}
    if missing := [name for name, folder in folders.items() if not folder.is_dir()]:
        raise ValueError(f"{run} lacks {', '.join(missing)}; `mlsm babylm check {run}` says more")
    yield from push_branches(folders, repository, private=private, dry_run=dry_run)
