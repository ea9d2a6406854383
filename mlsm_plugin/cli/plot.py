"""``mlsm plot``: draw the curves of runs from their logs, as a picture."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from mlsm_plugin.core.files.output_files import check_no_input

DPI = (20, 1200)  # below, text has no pixels; above, a picture of many panels does not fit into the memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "log of fairseq-train (--log-format simple or json), its folder, or the JSON of `mlsm evaluate pairs`"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=text)
    parser.add_argument("--output", default="curves", metavar="NAME", help="name of the image to write, NAME.png")
    parser.add_argument(
        "--names", nargs="+", metavar="NAME", help="names of the runs (default: their folders or files)"
    )
    parser.add_argument("--metrics", nargs="+", metavar="METRIC", help="metrics to draw (default: all)")
    parser.add_argument("--dpi", type=int, default=110, help="resolution of the image")
    text = "follow the runs until ten minutes after all have ended: also write NAME.html, which reloads itself"
    parser.add_argument("--watch", action="store_true", help=text)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Read the logs and draw."""
    from mlsm_plugin.reports.live_page import watch
    from mlsm_plugin.reports.training_log import draw_curves, log_file_of, read_training_log

    if not DPI[0] <= args.dpi <= DPI[1]:
        raise ValueError(f"--dpi must be between {DPI[0]} and {DPI[1]}, got {args.dpi}")
    output = args.output.removesuffix(".png")
    if not os.path.basename(output):
        raise ValueError(f"--output {args.output!r} names no image; pass a name such as curves")
    files = [log_file_of(run) for run in args.runs]
    for suffix in (".png", ".html") if args.watch else (".png",):
        check_no_input(f"{output}{suffix}", files)
    names = args.names or run_names(args.runs, files)
    if len(names) != len(files):
        raise ValueError(f"--names has {len(names)} names for {len(files)} runs")

    def draw() -> None:
        logs = list(zip(names, map(read_training_log, files), strict=True))
        panels = draw_curves(logs, f"{output}.png", metrics=args.metrics, dpi=args.dpi)
        if not args.watch:
            print(f"{output}.png: {panels} panels of {len(logs)} runs")

    if args.watch:
        print(f"following {len(files)} runs; open {output}.html", flush=True)
        watch(files, f"{output}.png", f"{output}.html", draw)
    else:
        draw()
    return 0


def run_names(runs: Sequence[str], files: Sequence[Path]) -> list[str]:
    """The folders of the runs or the names of their logs; ``runs`` themselves where two would have one name."""
    names = [
        Path(run).resolve().name if Path(run).is_dir() else file.stem for run, file in zip(runs, files, strict=True)
    ]
    return names if len(set(names)) == len(names) else list(runs)
