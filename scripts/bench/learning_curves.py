#!/usr/bin/env python3
"""Measure how fast ``mlsm_modern`` and ``mlsm_roberta`` learn: validation loss of plain MLM over training time.

    python scripts/bench/learning_curves.py DATA_BIN --output DIR [--minutes 25] [--rates 5e-4 1e-3 2e-3]

Both encoders have the same size, text, batches, masks, optimizer and precision (``--autocast auto``). RoBERTa has its
dropout of 0.1. For each of them:

1. speed: a short run while nothing else runs; it determines how many updates fit into ``--minutes``;
2. rate: a run with the first seed for each learning rate; the rate with the lowest validation loss is used;
3. curves: a run for each seed, with validation every ``--valid-every`` updates.

Time is updates divided by the speed of step 1, so other work on the machine during the long runs does not count.
Writes ``learning.json``, ``learning.md`` and ``learning.png`` (with matplotlib). Run the same command again to resume:
a finished run is not repeated, and a stopped one resumes from its checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlsm_plugin.core.files.atomic_files import read_json, write_json
from mlsm_plugin.core.files.planned_folder import PlannedFolder
from mlsm_plugin.fairseq_plugin.compat.version_shims import PACKAGE_DIR
from mlsm_plugin.reports.training_log import TrainingLog, read_training_log

NAMES = ("roberta", "modern")
SPEED_UPDATES = 60


class Runs:
    """The runs of one comparison; each has a folder with its log and its checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def flags(self, name: str) -> list[Any]:
        """The flags of an encoder."""
        args = self.args
        flags = ["--arch", f"mlsm_{name}", "--encoder-layers", args.layers, "--encoder-embed-dim", args.width]
        flags += ["--encoder-attention-heads", args.width // 64]
        if name == "roberta":
            flags += ["--encoder-ffn-embed-dim", 4 * args.width, "--dropout", 0.1, "--attention-dropout", 0.1]
        return flags

    def train(self, name: str, rate: float, updates: int, seed: int, *more: Any) -> TrainingLog:
        """Train, unless the run is finished; returns its log."""
        args = self.args
        path = self.args.output / f"{name}-rate-{rate:g}-seed-{seed}-updates-{updates}"
        log = path / "train.log"
        words = [
            *(sys.executable, "-m", "fairseq_cli.train", args.data_bin, "--user-dir", PACKAGE_DIR, "--save-dir", path),
            *("--task", "plain_masked_lm", "--criterion", "masked_lm", "--autocast", args.autocast, *self.flags(name)),
            *("--sample-break-mode", "none", "--tokens-per-sample", args.block, "--batch-size", args.batch_size),
            *("--required-batch-size-multiple", 1, "--clip-norm", 1.0, "--optimizer", "fused_adamw"),
            *("--lr", rate, "--lr-scheduler", "polynomial_decay", "--warmup-updates", max(1, updates * 6 // 100)),
            *("--total-num-update", updates, "--max-update", updates, "--seed", seed, "--num-workers", 0),
            *("--no-epoch-checkpoints", "--save-interval-updates", 500, "--keep-interval-updates", 1),
            *("--validate-interval-updates", args.valid_every, "--log-format", "simple", "--log-interval", 10, *more),
        ]
        planned = PlannedFolder(path, {"flags": [str(word) for word in words[2:]]}, seal_file="finished.json")
        planned.begin()
        if not planned.is_sealed:
            print(path.name, flush=True)
            with open(log, "a", encoding="utf-8") as file:
                done = subprocess.run([str(word) for word in words], stdout=file, stderr=subprocess.STDOUT, check=False)
            if done.returncode != 0:
                raise ValueError(f"fairseq-train stopped with exit status {done.returncode}; its log is {log}")
            for checkpoint in path.glob("*.pt"):
                checkpoint.unlink()  # only the log is needed
            planned.seal({"updates": updates})
        return read_training_log(log)

    def tokens_per_second(self, name: str) -> float:
        """Speed of training, from the middle of a short run."""
        measured = dict(self.args.speed).get(name)
        if measured:
            return measured
        more = ("--disable-validation", "--no-save")
        log = self.train(name, self.args.rates[0], SPEED_UPDATES, 1, *more)
        return statistics.median(value for _, value in log.train["wps"][1:])

    def best_rate(self, name: str, updates: int) -> tuple[float, dict[str, float]]:
        """The best learning rate, and the validation loss of each."""
        losses = {}
        for rate in self.args.rates:
            log = self.train(name, rate, updates, self.args.seeds[0])
            losses[f"{rate:g}"] = log.valid["loss"][-1][1]
        return float(min(losses, key=losses.__getitem__)), losses

    def curves(self, name: str) -> dict[str, Any]:
        """Everything about an encoder: speed, rates, and (minutes, bits) of each seed."""
        args = self.args
        speed = self.tokens_per_second(name)
        updates = int(args.minutes * 60 * speed / (args.batch_size * args.block))
        rate, losses = self.best_rate(name, args.search_updates or updates)
        seconds = args.batch_size * args.block / speed
        seeds = {}
        for seed in args.seeds:
            log = self.train(name, rate, updates, seed)
            seeds[str(seed)] = [(round(update * seconds / 60, 3), bits) for update, bits in log.valid["loss"]]
        return {"tokens_per_second": speed, "updates": updates, "rate": rate, "rates": losses, "seeds": seeds}


def minutes_to_reach(curve: list[tuple[float, float]], bits: float) -> float | None:
    """The time at which a curve first reaches ``bits``, interpolated between points; None if it never does."""
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= bits:
            return after if high <= low else before + (after - before) * max(0.0, high - bits) / (high - low)
    return None


def report(results: dict[str, Any]) -> str:
    """The table, and when the modern encoder reaches the other's final loss."""
    lines = ["| encoder | tokens/s | updates | learning rate | bits at the end, mean of the seeds | deviation |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for name, result in results.items():
        ends = [curve[-1][1] for curve in result["seeds"].values()]
        deviation = statistics.stdev(ends) if len(ends) > 1 else 0.0
        lines.append(
            f"| `mlsm_{name}` | {result['tokens_per_second']:,.0f} | {result['updates']:,} | {result['rate']:g} | "
            f"{statistics.fmean(ends):.3f} | {deviation:.3f} |"
        )
    if set(NAMES) <= set(results):
        goal = statistics.fmean(curve[-1][1] for curve in results["roberta"]["seeds"].values())
        total = statistics.fmean(curve[-1][0] for curve in results["roberta"]["seeds"].values())
        for seed, curve in results["modern"]["seeds"].items():
            reached = minutes_to_reach(curve, goal)
            when = "never" if reached is None else f"after {reached:.1f} minutes, {reached / total:.0%} of the time"
            lines += ["", f"Seed {seed} of `mlsm_modern` is at the final loss of `mlsm_roberta` {when}."]
    return "\n".join(lines) + "\n"


def draw(results: dict[str, Any], path: Path) -> None:
    """All curves in one plot."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: pip install matplotlib")
        return
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for number, (name, result) in enumerate(results.items()):
        for seed, curve in result["seeds"].items():
            label = f"mlsm_{name}" if seed == next(iter(result["seeds"])) else None
            axis.plot(*zip(*curve, strict=True), color=f"C{number}", label=label, linewidth=1.2)
    axis.set_xlabel("minutes of training")
    axis.set_ylabel("validation MLM loss, bits")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=150)


def named_number(text: str) -> tuple[str, float]:
    """Parse ``NAME=NUMBER``, such as ``modern=19000``."""
    name, _, number = text.partition("=")
    if name not in NAMES or not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=TOKENS_PER_SECOND with a name of {', '.join(NAMES)}")
    return name, float(number)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_bin", metavar="DATA_BIN", help="binarized dataset with the splits train and valid")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for runs and results")
    parser.add_argument("--encoders", nargs="+", choices=NAMES, default=list(NAMES), help="default: both")
    parser.add_argument("--minutes", type=float, default=25.0, help="training time of each run (default: 25)")
    parser.add_argument("--rates", nargs="+", type=float, default=[5e-4, 1e-3, 2e-3], help="default: 5e-4 1e-3 2e-3")
    parser.add_argument("--search-updates", type=int, help="updates of the runs of step 2 (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--layers", type=int, default=4, help="default: 4")
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64 (default: 256)")
    parser.add_argument("--batch-size", type=int, default=32, help="blocks in an update (default: 32)")
    parser.add_argument("--block", type=int, default=128, help="tokens in a block (default: 128)")
    parser.add_argument("--valid-every", type=int, default=250, help="updates between validations (default: 250)")
    parser.add_argument("--autocast", choices=("auto", "bf16", "off"), default="auto", help="default: auto")
    parser.add_argument(
        "--speed", nargs="+", type=named_number, default=[], metavar="NAME=TOKENS",
        help="tokens a second that were measured on the idle machine, instead of step 1",
    )  # fmt: skip
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    runs = Runs(args)
    file = args.output / "learning.json"
    results: dict[str, Any] = read_json(file) if file.exists() else {}
    for name in args.encoders:
        try:
            results[name] = runs.curves(name)
        except ValueError as error:
            print(f"learning_curves: error: {error}", file=sys.stderr)
            return 1
        write_json(file, results)
    results = {name: results[name] for name in NAMES if name in results}
    text = report(results)
    (args.output / "learning.md").write_text(text, encoding="utf-8")
    draw(results, args.output / "learning.png")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
