"""Read the curves of training runs from fairseq's logs (simple or JSON), and draw them."""

import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open, parse_json
from mlsm_plugin.reports.pair_accuracies import read_accuracies

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

# metrics of speed and progress, not of the objective
HOUSEKEEPING = frozenset(
    {
        "epoch",
        "update",
        "num_updates",
        "wps",
        "ups",
        "wpb",
        "bsz",
        "lr",
        "gnorm",
        "clip",
        "train_wall",
        "wall",
        "gb_free",
        "loss_scale",
        "cuda_gb_allocated",
        "cuda_gb_reserved",
    }
)
LAST_PANELS = {"lr": "learning rate", "gnorm": "gradient norm", "wps": "tokens per second"}
PROGRESS = re.compile(r"epoch (\d+): +\d+ / \d+ (.*=.*)")
SUMMARY = re.compile(r"epoch (\d+) \| (.*)")
VALIDATION = re.compile(r"\S+ on '([^']+)' subset \| (.*)")
NUMBER = r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf|nan)"


class NoProgressError(ValueError):
    """A log has no progress line of fairseq, or none yet."""


@dataclass
class TrainingLog:
    """The curves of a run.

    Attributes:
        train: the (update, value) pairs of each metric, in order.
        valid: the same for validation, without ``best_`` values. Of several subsets, ``valid`` or else the first.
        unit: unit of the x axis: updates, or words instead of updates.
    """

    train: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    valid: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    unit: str = "updates"

    @property
    def objective_metrics(self) -> list[str]:
        """Names of the metrics of the objective, ``loss`` first."""
        names = [name for name in dict.fromkeys([*self.train, *self.valid]) if name not in HOUSEKEEPING]
        return sorted(names, key=lambda name: name != "loss")


def read_training_log(path: PathLike) -> TrainingLog:
    """Read the log of a run, which may have been stopped and resumed; if an update is repeated, the later value wins.

    The JSON of ``mlsm evaluate pairs`` over checkpoints gives accuracies over words. ValueError if the log has no
    progress line of fairseq (:class:`NoProgressError`), or as for :func:`read_accuracies`.
    """
    if Path(path).suffix == ".json" and (accuracies := read_accuracies(path)) is not None:
        return TrainingLog(valid=accuracies, unit="words seen")
    log = TrainingLog()
    subsets: dict[str, dict[str, list[tuple[int, float]]]] = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for subset, values in _entries(file):
            curves = log.train if subset is None else subsets.setdefault(subset, {})
            if not math.isfinite(values.get("num_updates", math.nan)):
                continue
            update = int(values["num_updates"])
            for name, value in values.items():
                if name != "num_updates" and not name.startswith("best_"):
                    _append(curves.setdefault(name, []), update, value)
    log.valid = subsets.get("valid") or next(iter(subsets.values()), {})
    if not log.train and not log.valid:
        raise NoProgressError(f"{path} holds no progress of fairseq-train; log with --log-format simple or json")
    return log


def _append(curve: list[tuple[int, float]], update: int, value: float) -> None:
    while curve and curve[-1][0] >= update:
        curve.pop()
    curve.append((update, value))


def _entries(lines: Iterator[str]) -> Iterator[tuple[str | None, dict[str, float]]]:
    """Yield (validation subset or None, values by name) for each line with values, including ``num_updates``."""
    for line in lines:
        if not line.endswith("\n"):  # still being written, or cut off, perhaps within a number
            return
        message = re.sub(r"^\S+ \S+ \| INFO \| \S+ \| ", "", line.strip())
        if message.startswith("{"):
            yield from _json_entry(message)
        elif match := PROGRESS.fullmatch(message):
            yield None, _numbers(rf"([\w.]+)=({NUMBER})(?:,|$)", match.group(2))
        elif (match := SUMMARY.fullmatch(message)) and (validation := VALIDATION.fullmatch(match.group(2))):
            yield validation.group(1), _numbers(rf"(?:^|\| )([\w.]+) ({NUMBER})(?= \||$)", validation.group(2))


def _numbers(pattern: str, text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(pattern, text)}


def _json_entry(message: str) -> Iterator[tuple[str | None, dict[str, float]]]:
    try:
        entry = parse_json(message)
    except ValueError:
        return
    values: dict[str, float] = {}
    for name, value in entry.items():
        try:
            values[name] = float(value)
        except (TypeError, ValueError):
            continue
    if "num_updates" in values:
        yield None, values
        return
    for subset in (name.removesuffix("_num_updates") for name in values if name.endswith("_num_updates")):
        if subset != "train":  # train has the means of an epoch
            yield subset, {name.removeprefix(f"{subset}_"): value for name, value in values.items()}


def log_file_of(run: PathLike) -> Path:
    """The log of a run: the file ``run``, or, in the folder ``run``, ``train.log`` or else the only ``*.log``."""
    path = Path(run)
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{run} does not exist; pass the log of fairseq-train, or the folder that it is in")
    files = sorted(path.glob("*.log"))
    if (path / "train.log") in files:
        return path / "train.log"
    if not files:
        raise FileNotFoundError(f"{run} has no *.log; keep the output of fairseq-train: ... 2>&1 | tee {run}/train.log")
    if len(files) > 1:
        raise ValueError(f"{run} has several logs, pass one of them: {', '.join(file.name for file in files)}")
    return files[0]


def draw_curves(
    logs: Sequence[tuple[str, TrainingLog]], output: PathLike, *, metrics: Sequence[str] | None = None, dpi: int = 110
) -> int:
    """Draw the curves of named runs into the same panels of a PNG file; returns the number of panels.

    Each of the ``metrics`` (None: all metrics of the objective) has a panel; learning rate, gradient norm and speed
    follow. ValueError if no run has logged a metric, or matplotlib is missing.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing curves needs matplotlib: pip install 'mlsm_plugin[plot]'") from None
    panels = list(dict.fromkeys(metrics or [name for _, log in logs for name in log.objective_metrics]))
    unknown = [name for name in panels if not any(name in log.train or name in log.valid for _, log in logs)]
    if unknown:
        raise NoProgressError(f"no run has logged {', '.join(unknown)}")
    panels += [name for name in LAST_PANELS if name not in panels and any(name in log.train for _, log in logs)]
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"text.parse_math": False}):  # a dollar sign in a run's name does not start math
        figure = Figure(figsize=(5 * columns, 3.4 * rows + 0.5), layout="constrained")
        for axis, name in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=False):
            _draw_panel(axis, name, logs)
        for axis in figure.axes[len(panels) :]:
            axis.set_visible(False)
        curves: dict[str, Artist] = {}  # by label
        for axis in figure.axes:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                curves.setdefault(label, handle)
        columns_of_legend = min(4, max(1, len(curves)))
        figure.legend(list(curves.values()), list(curves), loc="outside lower center", ncols=columns_of_legend)
        with atomic_open(output) as file:
            figure.savefig(file, format="png", dpi=dpi)
    return len(panels)


def _draw_panel(axis: "Axes", name: str, logs: Sequence[tuple[str, TrainingLog]]) -> None:
    for number, (run, log) in enumerate(logs):
        color = f"C{number}"
        if name in log.train:
            axis.plot(*zip(*log.train[name], strict=True), color=color, label=f"{run}, training", linewidth=1.2)
        if name in log.valid and name not in LAST_PANELS:
            label = f"{run}, validation" if log.unit == "updates" else run
            updates, values = zip(*log.valid[name], strict=True)
            axis.plot(updates, values, color=color, linestyle="--", marker="o", markersize=4, label=label)
    axis.set_title(LAST_PANELS.get(name, name.replace("_", " ")))
    units = [log.unit for _, log in logs if name in log.train or name in log.valid]
    axis.set_xlabel(units[0])
    axis.grid(alpha=0.3)
