"""Folders of models to the branches of a repository of the Hugging Face hub."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import sha256_of_files
from mlsm_plugin.core.files.hf_files import first_line
from mlsm_plugin.core.files.model_folders import FILES_OF_MODELS, FOLDERS_OF_MODULES

FILES_OF_MODULES = ("config.json", "model.safetensors", "pytorch_model.bin")
MAIN = "main"  # the branch that is there from the beginning
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def check_can_push(repository: str, *, dry_run: bool = False) -> None:
    """Raise ValueError if a repository has no valid name, a package is missing, or no user is logged in.

    For a ``dry_run``, the name alone counts.
    """
    if not REPOSITORY.fullmatch(repository):
        raise ValueError(f"{repository} is no name of a repository: OWNER/NAME of letters, digits, -, _ and dots")
    if dry_run:
        return
    try:
        from huggingface_hub import get_token
    except ImportError as error:
        raise _missing(error) from None
    if get_token() is None:
        raise ValueError("nobody is logged in to the hub; run `hf auth login`, or set HF_TOKEN")


def push_branches(
    folders: Mapping[str, Path], repository: str, *, private: bool = False, dry_run: bool = False
) -> Iterator[str]:
    """Push each folder to the branch of its name; yields a line for each.

    Files of another model that the branch has are deleted, since they would be read, too. A branch that already has
    these files is skipped: a stopped push resumes. ``dry_run`` does not contact the hub.
    ValueError if the hub returns an error.
    """
    if dry_run:
        for name, folder in folders.items():
            size = sum(file.stat().st_size for file in _files(folder).values())
            yield f"{name}: {len(_files(folder))} files, {size / 1e6:.1f} MB would be pushed to {repository}"
        return
    try:
        yield from _push(folders, repository, private)
    except ImportError as error:
        raise _missing(error) from None
    except OSError as error:  # those of the hub are, too
        raise ValueError(f"{repository} cannot be written: {first_line(error)}; run the same command again") from error


def _missing(error: ImportError) -> ValueError:
    return ValueError(f"a push needs {error.name}: pip install 'mlsm_plugin[hf]'")


def _push(folders: Mapping[str, Path], repository: str, private: bool) -> Iterator[str]:
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
        new = _files(folder)
        is_there = all(hashes.get(path) in (_git_blob(file), sha256_of_files(file)) for path, file in new.items())
        stale = sorted(path for path in hashes.keys() - new.keys() if _is_of_model(path))
        if is_there and not stale:
            yield f"{name}: up to date"
            continue
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=name,
            commit_message=f"Model {name}",
            delete_patterns=[escape(path) for path in stale],
        )
        yield f"{name}: pushed" + (f"; deleted: {', '.join(stale)}" if stale else "")


def _is_of_model(path: str) -> bool:
    """Whether a file of a repository is read as a part of the model in its main folder."""
    *folders, name = path.split("/")
    if not folders:
        return not name.endswith(".md") and any(fnmatchcase(name, pattern) for pattern in FILES_OF_MODELS)
    return len(folders) == 1 and fnmatchcase(folders[0], FOLDERS_OF_MODULES) and name in FILES_OF_MODULES


def _files(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _git_blob(file: Path) -> str:
    """The name that git gives to the content of a file (SHA-1)."""
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
