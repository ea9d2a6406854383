"""``mlsm plot``: draw the curves of runs from their logs, as a picture and an HTML page."""

from __future__ import annotations

import argparse
import html
import io
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsm_plugin.cli.coding_options import check_positive
from mlsm_plugin.files.atomic_files import atomic_open

if TYPE_CHECKING:
    from mlsm_plugin.reports.training_log import TrainingLog

# the page loads nothing and runs nothing
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
LAST_PANELS = {"lr": "learning rate", "gnorm": "gradient norm", "wps": "tokens per second"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="log of fairseq-train (--log-format simple or json), or its folder"
    )
    parser.add_argument(
        "--output", default="curves", metavar="NAME", help="name of the files to write, NAME.png and NAME.html"
    )
    parser.add_argument(
        "--names", nargs="+", metavar="NAME", help="names of the runs (default: their folders or files)"
    )
    parser.add_argument("--metrics", nargs="+", metavar="METRIC", help="metrics to draw (default: all)")
    parser.add_argument("--dpi", type=int, default=110, help="resolution of the picture")


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Read the logs and draw."""
    from mlsm_plugin.reports.training_log import log_file_of, read_training_log

    check_positive(args, "dpi")
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("mlsm plot needs matplotlib: pip install 'mlsm_plugin[plot]'") from None
    files = [log_file_of(run) for run in args.runs]
    names = args.names or [_name_of(run, file) for run, file in zip(args.runs, files, strict=True)]
    if len(names) != len(files):
        raise ValueError(f"--names has {len(names)} names for {len(files)} runs")
    logs = dict(zip(_distinct(names), map(read_training_log, files), strict=True))
    panels = args.metrics or list(dict.fromkeys(name for log in logs.values() for name in log.objective_metrics))
    unknown = [name for name in panels if not any(name in log.train or name in log.valid for log in logs.values())]
    if unknown:
        raise ValueError(f"no run has logged {', '.join(unknown)}")
    panels += [name for name in LAST_PANELS if name not in panels and any(name in log.train for log in logs.values())]
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    # a dollar in a run's name is a dollar; equal runs give equal files
    with rc_context({"text.parse_math": False, "svg.hashsalt": "mlsm"}):
        figure = Figure(figsize=(5 * columns, 3.4 * rows + 0.5), layout="constrained")
        for axis, name in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=False):
            _draw(axis, name, logs)
        for axis in figure.axes[len(panels) :]:
            axis.set_visible(False)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, max(1, len(labels))))
        with atomic_open(f"{args.output}.png") as file:
            figure.savefig(file, format="png", dpi=args.dpi)
        page = _page(figure, logs)
    with atomic_open(f"{args.output}.html", "w") as file:
        file.write(page)
    print(f"{args.output}.png and {args.output}.html: {len(panels)} panels of {len(logs)} runs")
    return 0


def _name_of(run: str, file: Path) -> str:
    return Path(run).resolve().name if Path(run).is_dir() else file.stem


def _distinct(names: list[str]) -> list[str]:
    """The names, with a number added where several are equal."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})" for i, name in enumerate(names)
    ]


def _draw(axis: Any, name: str, logs: dict[str, TrainingLog]) -> None:
    for number, (run, log) in enumerate(logs.items()):
        color = f"C{number}"
        if name in log.train:
            axis.plot(*zip(*log.train[name], strict=True), color=color, label=f"{run}, training", linewidth=1.2)
        if name in log.valid and name not in LAST_PANELS:
            style = {"color": color, "linestyle": "--", "marker": "o", "markersize": 4, "label": f"{run}, validation"}
            axis.plot(*zip(*log.valid[name], strict=True), **style)
    axis.set_title(LAST_PANELS.get(name, name.replace("_", " ")))
    axis.set_xlabel("updates")
    axis.grid(alpha=0.3)


def _page(figure: Any, logs: dict[str, TrainingLog]) -> str:
    """A self-contained HTML page: the curves as SVG, and the last values as a table."""
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    svg = drawing.getvalue()
    svg = svg[svg.index("<svg") :]
    rows = []
    for run, log in logs.items():
        for kind, curves in (("training", log.train), ("validation", log.valid)):
            for name, curve in curves.items():
                if curve and name not in ("epoch", "update"):
                    cells = (run, kind, name, f"{curve[-1][0]:,}", f"{curve[-1][1]:g}")
                    rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{title}</th>" for title in ("run", "part", "metric", "update", "last value"))
    style = (
        "body{font-family:sans-serif;margin:2em}svg{max-width:100%;height:auto}td,th{padding:2px 12px;text-align:left}"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Training curves</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<style>{style}</style></head>"
        f"<body>{svg}<table><tr>{header}</tr>{''.join(rows)}</table></body></html>\n"
    )
