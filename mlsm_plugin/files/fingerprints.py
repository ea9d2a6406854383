"""Fingerprints of the contents of files; a size and a time of change only save reading a file again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlsm_plugin.files.atomic_files import sha256_of_files

Fingerprints = dict[str, dict[str, Any]]


def fingerprints_of(paths: Iterable[Path], known: Mapping[str, Any] | None = None) -> Fingerprints:
    """Size, time of change (ns) and SHA-256 of each file, by its path.

    Args:
        paths: files, and folders, whose files count with all folders in them; hidden files do not. What does not exist
            is left out.
        known: earlier fingerprints; a file with the same size and time is not read again.
    """
    found: Fingerprints = {}
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if not file.is_file() or file.name.startswith("."):
                continue
            status = os.stat(file)
            own: dict[str, Any] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
            before = (known or {}).get(str(file)) or {}
            same = all(before.get(name) == value for name, value in own.items())
            own["sha256"] = (before.get("sha256") if same else None) or sha256_of_files(file)
            found[str(file)] = own
    return found


def first_change(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """The first recorded file whose content is another one, or that is missing; other files do not count."""
    for path, own in recorded.items():
        if path not in found or found[path]["sha256"] != own["sha256"]:
            return path
    return None
