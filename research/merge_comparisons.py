#!/usr/bin/env python3
"""Put several results of ``research/compare_objectives.py`` into one table and one plot.

    python research/merge_comparisons.py --add a/comparison.json --add b/comparison.json --output merged

For seeds from several machines, and for rows with other settings, which need another name: ``--add b/comparison.json
"mlsm+mlm=mlsm+mlm, lambda 0.1"``. If the updates of ``mlm`` take longer in a result, it may have fewer ``--updates``,
so that they cost the same. If several results have the same run (row and seed), the first one is used. Writes
``comparison.json``, ``comparison.md`` and ``comparison.png``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison.report import BASE, OF_A_FOLDER, page, write_report
from comparison.rows import ROWS

from mlsm_plugin.core.files.atomic_files import read_json
from mlsm_plugin.evaluation.masked_batches import MASKED_SHARE

SHARED = (
    *("arch", "layers", "width", "heads", "vocab_size", "batch_size", "tokens_per_sample"),
    *("labelled", "finetune_epochs", "finetune_lr", "finetune_seeds"),
)  # settings that make losses and accuracies comparable
PARTS = frozenset(("settings", "rows", "tasks", "pair_sets", "costs", "baseline", "runs"))
OF_CODES = (
    *("coder", "atoms", "k", "dictionary_tokens", "auxiliary_size", "layer", "share"),
    *("latent_weight", "latent_until", "latent_source"),
)  # settings that do not affect rows without codes
TOLERANCE = 0.05  # relative, for costs: machines differ, and seconds are measured
Figures = dict[str, Any]


def renamed(figures: Figures, names: dict[str, str], file: str) -> Figures:
    """The figures with new names of rows; ``names`` maps old to new.

    Raises:
        ValueError: a row does not exist.
    """
    for old in names:
        if old not in figures["rows"]:
            raise ValueError(f"{file} has no row {old}; it has {', '.join(figures['rows'])}")
    return {
        **figures,
        "rows": [names.get(name, name) for name in figures["rows"]],
        "costs": {names.get(name, name): cost for name, cost in figures["costs"].items()},
        "runs": [{**run, "row": names.get(run["row"], run["row"])} for run in figures["runs"]],
    }


def other_settings(name: str, figures: Figures, first: Figures) -> dict[str, Any]:
    """The settings of a row that differ from the first result."""
    without = (*OF_A_FOLDER, *(OF_CODES if name in ROWS and ROWS[name].codes is None else ()))
    settings = {**figures["settings"], **figures.get("other_settings", {}).get(name, {})}
    common = first["settings"]
    return {key: value for key, value in settings.items() if key not in without and value != common.get(key)}


def budget(figures: Figures) -> float:
    """The budget in seconds: the largest cost of a row. (Other rows stop before an update that would exceed it.)"""
    return float(max(cost["seconds"] for cost in figures["costs"].values()))


def check(figures: Figures, merged: Figures, file: str) -> None:
    """Check that the runs of a result can be compared with the merged runs.

    Raises:
        ValueError: they have another text, size or budget, or a row of the same name has other settings or costs.
    """
    if figures["texts"] != merged["texts"]:
        raise ValueError(f"{file} has other texts than the first result; the losses cannot be compared")
    for name in SHARED:
        value = figures["settings"].get(name)
        first = merged["settings"].get(name)
        if value != first:
            raise ValueError(f"{file} has {name} {value}, the first result {first}; they cannot be compared")
    value = figures["settings"]["updates"]
    first = merged["settings"]["updates"]
    seconds = budget(figures)
    first_seconds = budget(merged)
    if value != first and abs(seconds - first_seconds) > TOLERANCE * first_seconds:
        raise ValueError(
            f"{file} has a budget of {value:,} updates, {seconds:,.0f} s; the first result has {first:,}, "
            f"{first_seconds:,.0f} s; they cannot be compared"
        )
    for name in ("tasks", "pair_sets"):
        if figures[name] and merged[name] and figures[name] != merged[name]:
            raise ValueError(f"{file} has the {name} {figures[name]}, and not {merged[name]}")
    for name in set(figures["costs"]) & set(merged["costs"]):
        value = other_settings(name, figures, merged)
        first = merged["other_settings"].get(name, {})
        if value != first:
            raise ValueError(
                f"{name} has other settings in {file} ({value or 'those of the first result'}) than before "
                f'({first or "those of the first result"}); give it another name: --add {file} "{name}=NAME"'
            )
        for what in ("updates", "seconds"):
            value = figures["costs"][name][what]
            first = merged["costs"][name][what]
            if abs(value - first) > TOLERANCE * first:
                raise ValueError(
                    f"{name} has {value:,.0f} {what} in {file} and {first:,.0f} before; give it another name: "
                    f'--add {file} "{name}=NAME"'
                )


def merge(results: Sequence[tuple[str, Figures]]) -> Figures:
    """Merge several results; if two have the same run, the first one is used.

    Args:
        results: names of files, and their figures.

    Raises:
        ValueError: the results cannot be compared.
    """
    merged: Figures = {**results[0][1], "other_settings": dict(results[0][1].get("other_settings", {}))}
    for file, figures in results[1:]:
        check(figures, merged, file)
        known = {(run["row"], run["seed"]) for run in merged["runs"]}
        for name in figures["rows"]:
            different = other_settings(name, figures, merged)
            if name not in merged["rows"] and different:
                merged["other_settings"][name] = different
        merged["rows"] = [*merged["rows"], *(name for name in figures["rows"] if name not in merged["rows"])]
        merged["costs"] = {**figures["costs"], **merged["costs"]}
        merged["runs"] = [*merged["runs"], *(run for run in figures["runs"] if (run["row"], run["seed"]) not in known)]
        if not (merged["baseline"] or {}).get("finetuned"):  # the earlier results have no tasks
            merged["baseline"] = figures["baseline"]
        for name in ("tasks", "pair_sets"):
            merged[name] = merged[name] or figures[name]
    if BASE not in merged["rows"]:
        raise ValueError(
            f"no result has the row {BASE}, with which the others are compared; they have {merged['rows']}"
        )
    return merged


def read(words: Sequence[str]) -> tuple[str, Figures]:
    """Read a result, and rename its rows.

    Args:
        words: the file, then ``OLD=NEW`` for each name.
    """
    file, *pairs = words
    names = dict(pair.partition("=")[::2] for pair in pairs)
    if not all(names.values()):
        raise ValueError(f"{' '.join(pairs)}: write OLD=NEW for each row that has another name")
    figures = read_json(file)
    if not isinstance(figures, dict) or not set(figures) >= PARTS:
        raise ValueError(f"{file} is not a comparison.json of research/compare_objectives.py")
    if "texts" not in figures:
        raise ValueError(f"{file} is from an older version; run compare_objectives.py again in its folder")
    figures["settings"].setdefault("mask_prob", MASKED_SHARE)  # older results do not have the option
    return file, renamed(figures, names, file)


def main() -> int:
    """Merge the results, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs="+", action="append", required=True, metavar=("JSON", "OLD=NEW"),
                        help="a result, and new names for its rows")  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the three files")
    args = parser.parse_args()
    try:
        figures = merge([read(words) for words in args.add])
    except (OSError, ValueError) as error:
        parser.exit(2, f"merge_comparisons.py: {error}\n")
    args.output.mkdir(parents=True, exist_ok=True)
    write_report(figures, args.output)
    print(page(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
