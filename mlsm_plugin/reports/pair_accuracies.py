"""Accuracies on minimal pairs over the checkpoints of a run, whose names say how many words the model has seen."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlsm_plugin.core.files.atomic_files import PathLike, read_json
from mlsm_plugin.core.files.json_checks import check_json, fields, number, optional, values, whole

FACTORS = {"": 1, "K": 1_000, "M": 1_000_000}  # by the ending of a number in the names of `mlsm babylm train`
ACCURACIES = values(fields({"accuracy": number}))
CHECKPOINT = fields({"words": optional(whole()), "fields": ACCURACIES, "folders": ACCURACIES, "mean": number})


def words_seen_by(name: PathLike) -> int | None:
    """The number of words that a checkpoint has seen, from a name such as ``chck_10M``; None for other names.

    Checkpoints of small runs have names such as ``chck_200K`` or ``chck_30``.
    """
    match = re.fullmatch(r"chck_(\d+)([KM]?)", Path(name).name)
    return int(match.group(1)) * FACTORS[match.group(2)] if match else None


def accuracies_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """The accuracies of ``evaluate_pairs`` for a table or plot: of fields, of folders, and the mean of the folders."""
    shown = {name: group["accuracy"] for name, group in figures["fields"].items()}
    for folder, group in figures["folders"].items():
        name = Path(folder).name or folder
        shown[folder if name in shown else name] = group["accuracy"]
    return shown | ({"mean": figures["mean"]} if len(figures["folders"]) > 1 else {})


def read_accuracies(path: PathLike) -> dict[str, list[tuple[int, float]]] | None:
    """The curves in a file of ``mlsm evaluate pairs --output`` on several models: (words, accuracy) pairs by name.

    None if the file is not JSON with models, but a log, for example. ValueError if it is of one model, no model name
    gives its words, or two models have seen the same number of words.
    """
    try:
        content = read_json(path)
    except ValueError:
        return None
    if isinstance(content, dict) and {"files", "folders"} <= set(content):
        raise ValueError(
            f"{path} is of one model; a curve needs several, which one `mlsm evaluate pairs --checkpoint` takes"
        )
    if not isinstance(content, dict) or "models" not in content:
        return None
    models = check_json(content["models"], values(CHECKPOINT), path)
    counted = [model for model in models.values() if model["words"] is not None]
    if len({model["words"] for model in counted}) < len(counted):
        raise ValueError(
            f"{path} has two models that have seen the same number of words; evaluate and plot each run by itself"
        )
    curves: dict[str, list[tuple[int, float]]] = {}
    for model in sorted(counted, key=lambda model: model["words"]):
        for name, accuracy in accuracies_of(model).items():
            curves.setdefault(name, []).append((model["words"], accuracy))
    if not curves:
        raise ValueError(f"{path} has no model whose name says how many words it has seen, such as chck_10M")
    return curves
