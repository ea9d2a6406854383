"""Folders of trainings as earlier versions left them."""

from __future__ import annotations

from pathlib import Path

from mlsm_plugin.core.files.atomic_files import read_json, write_json
from mlsm_plugin.core.files.json_checks import JsonObject


def in_earlier_files(folder: Path, *names: str) -> JsonObject:
    """Move settings from ``steps.json`` to a file for each name, and seconds to ``seconds.json``; the former record."""
    path = folder / "steps.json"
    record: JsonObject = read_json(path)
    steps = {name: entry for name, entry in record.items() if "done" in entry}
    seconds = {name: entry["seconds"] for name, entry in record.items() if name not in steps and "seconds" in entry}
    assert {*steps, *seconds, *names} == {*record}
    for name in names:
        write_json(folder / f"{name}.json", record[name]["signature"]["settings"])
    if seconds:
        write_json(folder / "seconds.json", seconds)
    if steps:
        write_json(path, steps)
    else:
        path.unlink()
    return record
