"""Push the branches of a submission to a repository of the Hugging Face hub."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from mlsm_plugin.babylm.ledger import Ledger
from mlsm_plugin.babylm.settings import CHECKPOINTS, MAIN
from mlsm_plugin.core.files.atomic_files import sha256_of_files
from mlsm_plugin.core.files.hf_files import first_line


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
    if dry_run:
        for name, folder in folders.items():
            size = sum(file.stat().st_size for file in _files(folder).values())
            yield f"{name}: {len(_files(folder))} files, {size / 1e6:.1f} MB would be pushed to {repository}"
        return
    try:
        yield from _push(folders, repository, private)
    except ImportError as error:
        raise ValueError(f"a push needs {error.name}: pip install 'mlsm_plugin[hf]'") from None
    except OSError as error:  # errors of the hub are OSErrors, too
        raise ValueError(f"{repository} cannot be written: {first_line(error)}; run the same command again") from error


def _push(folders: dict[str, Path], repository: str, private: bool) -> Iterator[str]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    api.create_repo(repository, private=private, exist_ok=True)
    for name, folder in folders.items():
        if name != MAIN:
            api.create_branch(repository, branch=name, exist_ok=True)
        tree = api.list_repo_tree(repository, recursive=True, revision=name)
        files = [entry for entry in tree if isinstance(entry, RepoFile)]
        hashes = {entry.path: entry.lfs.sha256 if entry.lfs else entry.blob_id for entry in files}
        if all(hashes.get(path) in (_git_blob(file), sha256_of_files(file)) for path, file in _files(folder).items()):
            yield f"{name}: up to date"
            continue
        api.upload_folder(repo_id=repository, folder_path=folder, revision=name, commit_message=f"Model {name}")
        yield f"{name}: pushed"


def _files(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _git_blob(file: Path) -> str:
    """Git's hash of the content of a file (SHA-1)."""
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
