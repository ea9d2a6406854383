"""Tables and plots of the comparison."""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from comparison.costs import cost_to_reach
from comparison.rows import CONTROLS, CONTROLS_OF_SELF, ROWS
from mlsm_plugin.core.files.atomic_files import atomic_open, write_json

BASE = "mlm"
OF_A_FOLDER = ("objectives", "seeds", "threads")  # settings that do not affect any run
CONFIDENCE = 0.95
COLORS = {"mlm": "black", "mlsm+mlm": "tab:blue", "self": "tab:orange", "taco": "tab:green", "lasso": "tab:cyan"}
PLOTTED_FROM = 0.08  # share of a row's updates; before, the learning rate rises, and the loss would fill the plot
OTHER_COLORS = ("tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:gray")


def mean_and_deviation(values: Sequence[float], digits: int, scale: float = 1.0) -> str:
    """The mean, and the standard deviation if there are several values, for a table."""
    if not values:
        return ""
    mean = f"{scale * statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {scale * statistics.stdev(values):.{digits}f}"


def paired_difference(values: Sequence[float], base: Sequence[float]) -> tuple[float, float, float] | None:
    """Mean difference of pairs, and its confidence interval by Student's t; None with fewer than two pairs."""
    differences = np.asarray(values) - np.asarray(base)
    if len(differences) < 2:
        return None
    mean = float(differences.mean())
    error = float(stats.sem(differences))
    low, high = (mean, mean) if error == 0 else stats.t.interval(CONFIDENCE, len(differences) - 1, mean, error)
    return mean, float(low), float(high)


def runs_of(figures: dict[str, Any], row: str) -> list[dict[str, Any]]:
    """The runs of a row, by seed."""
    return sorted((run for run in figures["runs"] if run["row"] == row), key=lambda run: run["seed"])


def shares_of_cost(figures: dict[str, Any], row: str) -> list[float | None]:
    """For each seed, the share of masked LM's cost at which the run reaches masked LM's final loss; None: never."""
    base = {run["seed"]: run for run in runs_of(figures, BASE)}
    shares: list[float | None] = []
    for run in runs_of(figures, row):
        if run["curve"] and run["seed"] in base:
            base_end = base[run["seed"]]["curve"][-1]
            cost = cost_to_reach([(point["seconds"], point["bits"]) for point in run["curve"]], base_end["bits"])
            shares.append(None if cost is None else cost / base_end["seconds"])
    return shares


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]])


def cost_table(figures: dict[str, Any]) -> str:
    """The cost of each row."""
    rows = []
    for name in figures["rows"]:
        cost = figures["costs"][name]
        rows.append(
            [
                *(name, f"{cost['updates']:,}", f"{cost['seconds_per_update']:.3f}", f"{cost['extra_seconds']:.0f}"),
                *(f"{cost['seconds']:.0f}", f"{cost['operations'] / 1e12:,.0f}", f"{cost['learning_rate']:g}"),
            ]
        )
    head = ("row", "updates", "s an update", "s besides", "s in all", "operations, 10^12", "learning rate")
    return table(head, rows)


def rates_table(figures: dict[str, Any]) -> str | None:
    """The last loss of the short runs with each learning rate; None if no rate was searched."""
    searched = {name: figures["costs"][name].get("searched") for name in figures["rows"]}
    rates = sorted({rate for losses in searched.values() for rate in losses or ()}, key=float)
    rows = [
        [
            name,
            ROWS[name].metric if name in ROWS else "",
            *(f"{losses[rate]:.2f}" if rate in losses else "" for rate in rates),
        ]
        for name, losses in searched.items()
        if losses
    ]
    return table(("row", "loss", *rates), rows) if rows else None


def loss_table(figures: dict[str, Any]) -> str:
    """Masked-LM loss, and the cost to reach the loss of plain masked LM."""
    base = {run["seed"]: run for run in runs_of(figures, BASE)}
    rows = []
    for name in figures["rows"]:
        runs = [run for run in runs_of(figures, name) if run["curve"]]
        if not runs:
            continue
        shares = shares_of_cost(figures, name)
        reached = [share for share in shares if share is not None]
        missed = f" ({len(shares) - len(reached)} not)" if len(reached) < len(shares) else ""
        pairs = [(run["valid_bits"], base[run["seed"]]["valid_bits"]) for run in runs if run["seed"] in base]
        difference = None if name == BASE or not pairs else paired_difference(*zip(*pairs, strict=True))
        rows.append(
            [
                *(name, str(len(runs)), mean_and_deviation([run["valid_bits"] for run in runs], 3)),
                mean_and_deviation([run["test_bits"] for run in runs], 3),
                *(mean_and_deviation(_known(runs, f"valid_{kind}_bits"), 2) for kind in ("repeated", "new")),
                "" if difference is None else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*difference),
                f"{mean_and_deviation(reached, 0, 100) or 'not'}{missed if reached else ''}",
            ]
        )
    head = ("row", "seeds", "validation, bits", "held out, bits", "repeated", "new", "to mlm, bits [95 %]",
            "cost to mlm's loss, %")  # fmt: skip
    return table(head, rows)


def _known(runs: Sequence[dict[str, Any]], name: str) -> list[float]:
    """A figure of each run that has it."""
    return [run[name] for run in runs if run.get(name) is not None]


def round_updates(most: int) -> list[int]:
    """A few round numbers of updates, evenly spaced, below ``most``."""
    exact = max(1.0, most / 6)
    scale = 10 ** int(np.log10(exact))
    step = max(1, round(exact / scale)) * scale
    return list(range(step, most, step))


def seeds_table(figures: dict[str, Any]) -> str:
    """The loss of every run in the validations of its training, by updates; and of repeated and new tokens."""
    base = {run["seed"]: run["curve"][-1]["bits"] for run in runs_of(figures, BASE)}
    columns = round_updates(figures["costs"][BASE]["updates"])
    rows = []
    for name in figures["rows"]:
        runs = [run for run in runs_of(figures, name) if run["curve"]]
        for run, share in zip(runs, shares_of_cost(figures, name), strict=True):
            updates, bits = ([point[key] for point in run["curve"]] for key in ("update", "bits"))
            within = [
                f"{np.interp(at, updates, bits):.2f}" if updates[0] <= at <= updates[-1] else "" for at in columns
            ]
            paired = f"{bits[-1] - base[run['seed']]:+.2f}" if name != BASE and run["seed"] in base else ""
            reached = "not" if share is None else f"{100 * share:.0f}"
            parts = [
                f"{run[part]:.2f}" if run.get(part) is not None else ""
                for part in ("valid_repeated_bits", "valid_new_bits")
            ]
            rows.append([name, str(run["seed"]), *within, f"{bits[-1]:.2f}", paired, reached, *parts])
    ends = ("the end", "to mlm", "cost to mlm's loss, %", "repeated", "new")
    return table(("row", "seed", *(f"{at:,}" for at in columns), *ends), rows)


def use_table(figures: dict[str, Any]) -> str:
    """Fine-tuning, probes and minimal pairs."""
    tasks = [task.partition("=")[0] for task in figures["tasks"]]
    files = figures["pair_sets"]
    rows = []
    if tasks and (figures["baseline"] or {}).get("finetuned"):
        finetuned = (_finetuned([figures["baseline"]], task) for task in tasks)
        rows.append(["random weights", "", *finetuned, *[""] * (len(tasks) + len(files))])
    for name in figures["rows"]:
        runs = [run for run in runs_of(figures, name) if run.get("finetuned") or run.get("pairs")]
        if not runs:
            continue
        rows.append(
            [
                *(name, str(len(runs)), *(_finetuned(runs, task) for task in tasks)),
                *(mean_and_deviation(_figures_of(runs, "probe", task), 1, 100) for task in tasks),
                *(mean_and_deviation(_figures_of(runs, "pairs", file), 1, 100) for file in files),
            ]
        )
    head = ["row", "seeds", *(f"{task}, fine-tuned" for task in tasks), *(f"{task}, probe" for task in tasks), *files]
    return table(head, rows)


def _figures_of(runs: Sequence[dict[str, Any]], kind: str, name: str) -> list[Any]:
    """A figure of each run that has it; merged runs may have been measured on different tasks."""
    return [run[kind][name] for run in runs if name in run.get(kind, {})]


def _finetuned(runs: Sequence[dict[str, Any]], task: str) -> str:
    """Mean and deviation over the seeds; with one run, over its fine-tuning seeds."""
    results = _figures_of(runs, "finetuned", task)
    if len(results) == 1:
        return f"{100 * results[0]['mean']:.1f} ± {100 * results[0]['deviation']:.1f}"
    return mean_and_deviation([result["mean"] for result in results], 1, 100)


def page(figures: dict[str, Any]) -> str:
    """All tables."""
    settings = ", ".join(f"{name} {value}" for name, value in figures["settings"].items() if name not in OF_A_FOLDER)
    parts = ["# Objectives compared", "## Cost", cost_table(figures)]
    if (rates := rates_table(figures)) is not None:
        parts += ["## The last loss of short runs with each learning rate", rates]
    parts += ["## Masked-LM loss", loss_table(figures)]
    parts += ["## Masked-LM loss of each run, bits after so many updates", seeds_table(figures)]
    retrieved = [run for run in figures["runs"] if run["row"] == "npm"]
    if figures["tasks"] or figures["pair_sets"]:
        parts += ["## Use, in %", use_table(figures)]
    for run in retrieved:
        parts.append(f"npm retrieves the right phrase for {100 * run['retrieval_accuracy']:.1f} % of the masked spans.")
    parts.append(f"Settings: {settings}.")
    for name, other in figures.get("other_settings", {}).items():
        parts.append(f"{name}: " + ", ".join(f"{key} {value}" for key, value in other.items()) + ".")
    return "\n\n".join(parts) + "\n"


def write_report(figures: dict[str, Any], folder: Path) -> None:
    """Write ``comparison.json``, ``comparison.md`` and ``comparison.png``."""
    write_json(folder / "comparison.json", figures)
    with atomic_open(folder / "comparison.md", "w") as file:
        file.write(page(figures))
    draw(figures, folder / "comparison.png")


def draw(figures: dict[str, Any], path: Path) -> None:
    """Masked-LM loss over cost and over updates; a thin line for each seed."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq makes the root logger verbose
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    others = itertools.cycle(OTHER_COLORS)
    for name in figures["rows"]:
        runs = [run for run in runs_of(figures, name) if run["curve"]]
        if not runs:
            continue
        style = "--" if name in (*CONTROLS, *CONTROLS_OF_SELF) else "-"
        color = COLORS.get(name) or next(others)
        for number, run in enumerate(runs):
            begin = PLOTTED_FROM * figures["costs"][name]["updates"]
            points = [point for point in run["curve"] if point["update"] >= begin]
            bits = [point["bits"] for point in points]
            for axis, key, scale in ((axes[0], "seconds", 60), (axes[1], "update", 1000)):
                label = name if number == 0 else None
                axis.plot([point[key] / scale for point in points], bits, style, color=color, linewidth=1, label=label)
    axes[0].set(xlabel="minutes, everything included", ylabel="masked-LM loss on the validation text, bits")
    axes[1].set(xlabel="1,000 updates")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    panels.tight_layout()
    panels.savefig(path, dpi=110)
