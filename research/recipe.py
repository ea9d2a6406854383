#!/usr/bin/env python3
"""Find the recipe that learns masked LM fastest: a run of ``fairseq-train`` for each candidate and seed, in parallel.

    python research/recipe.py --data DATA_BIN --output DIR --jobs 12 --updates 1500 --seeds 1 2 --deadline 480

A candidate is a name and the flags that it changes. All have the size, text, blocks and validation masks of
``scripts/bench/learning_curves.py``. When a run ends, a line is printed and ``results.json`` is rewritten: bits on the
validation split after each eighth of the run, and updates a second (while other runs use the machine). After the
deadline no run starts, and 20 seconds later the remaining runs are stopped; their points are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

VALID = re.compile(r"\| valid on 'valid' subset \| loss ([\d.]+) .*\| num_updates (\d+)")
SPEED = re.compile(r"\bups=([\d.]+)")
POINTS = 8
GRACE = 20.0  # validations of a run; seconds after the deadline


@dataclass(frozen=True)
class Candidate:
    """The changes of a recipe to the base.

    ``batch`` multiplies the blocks of an update, and divides the number of updates. In the flags, ``{share:X}`` is
    the share X of the updates. ``first_half`` are flags of the first half of the updates only.
    """

    flags: str = ""
    batch: float = 1.0
    first_half: str = ""
    experimental: bool = False  # needs --experiments
    environment: dict[str, str] = field(default_factory=dict)


# what `mlsm auxiliary` chooses for trainings of at most 1,200 updates
TODAY = "--muon-lr 0.01 --muon-block-rows 64 --mask-prob 0.3 --mask-prob-end 0.15"
CANDIDATES = {
    "muon": Candidate(),
    "adamw": Candidate("--optimizer fused_adamw"),
    "muon-width": Candidate("--initialization width"),
    "adamw-width": Candidate("--optimizer fused_adamw --initialization width"),
    "muon-lr-0.01": Candidate("--muon-lr 0.01"),
    "muon-lr-0.03": Candidate("--muon-lr 0.03"),
    "muon-lr-0.04": Candidate("--muon-lr 0.04"),
    "lr-1e-3": Candidate("--lr 1e-3 --muon-lr 0.02"),
    "lr-4e-3": Candidate("--lr 4e-3 --muon-lr 0.02"),
    "mask-0.3": Candidate("--mask-prob 0.3"),
    "mask-0.4": Candidate("--mask-prob 0.4"),
    "wsd": Candidate("--lr-scheduler manual --update2lr {wsd}"),
    "batch-16": Candidate(batch=0.5),
    "batch-64": Candidate("--lr 2.8e-3", batch=2),
    "betas-0.95": Candidate("--adam-betas (0.9,0.95)"),
    "momentum-0.9": Candidate("--muon-momentum 0.9"),
    "muon-decay-0.1": Candidate("--muon-weight-decay 0.1"),
    "no-decay": Candidate("--weight-decay 0"),
    "warmup-1": Candidate("--warmup-updates {share:0.01}"),
    "warmup-10": Candidate("--warmup-updates {share:0.10}"),
    "clip-0.5": Candidate("--clip-norm 0.5"),
    "no-clip": Candidate("--clip-norm 0"),
    "mask-0.3-0.15": Candidate("--muon-lr 0.01 --mask-prob 0.3 --mask-prob-end 0.15"),
    "mask-0.4-0.15": Candidate("--muon-lr 0.01 --mask-prob 0.4 --mask-prob-end 0.15"),
    "today": Candidate(TODAY),
    "bell": Candidate(
        f"{TODAY} --mask-prob 0.6", experimental=True, environment={"MASK_BEGIN": "0.3", "MASK_SPREAD": "0.35"}
    ),
    "blocks-64-first": Candidate(TODAY, first_half="--tokens-per-sample 64 --batch-size 64"),
    "growing-batch": Candidate(f"{TODAY} --batch-size 48", first_half="--batch-size 16"),
    "small-batch": Candidate(TODAY, batch=0.5),
    "decay-0.1": Candidate(f"{TODAY} --weight-decay 0.1 --muon-weight-decay 0.1"),
    "constant": Candidate(f"{TODAY} --end-learning-rate 2e-3"),
    "mask-0.3-0.15-slow": Candidate("--muon-lr 0.005 --mask-prob 0.3 --mask-prob-end 0.15"),
}


class Share:
    """Formats as a share of the updates, at least 1."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def __format__(self, share: str) -> str:
        return str(max(1, round(self.updates * float(share))))


def warmup_hold_decay(updates: int, peak: float) -> str:
    """Rates by updates for the ``manual`` schedule: 6 % warm-up, then constant, linear to 0 over the last 40 %."""
    rates = {}
    for step in range(200):
        done = step / 200
        rates[str(int(done * updates))] = peak * min(1.0, (done + 0.005) / 0.06, (1 - done) / 0.4)
    return str(rates).replace(" ", "")


class Run:
    """A candidate with a seed: its process, and the results in its log."""

    def __init__(self, args: argparse.Namespace, name: str, seed: int) -> None:
        self.args = args
        self.name = name
        self.seed = seed
        self.candidate = CANDIDATES[name]
        self.folder = (args.output / f"{name}-{seed}").resolve()
        self.log = self.folder / "train.log"
        self.updates = max(POINTS, round(args.updates / self.candidate.batch))
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False

    def words(self, package: Path, more: str = "") -> list[str]:
        """The command as a list of words; ``more`` flags replace those of the candidate."""
        args = self.args
        updates = self.updates
        base = (
            f"--task plain_masked_lm --criterion masked_lm --arch mlsm_modern --encoder-layers {args.layers} "
            f"--encoder-embed-dim {args.width} --encoder-attention-heads {max(1, args.width // 64)} "
            f"--sample-break-mode none --tokens-per-sample {args.block} --required-batch-size-multiple 1 "
            f"--batch-size {max(1, round(args.batch_size * self.candidate.batch))} "
            f"--batch-size-valid {args.batch_size_valid} --valid-mask-prob 0.15 --autocast {args.autocast} "
            "--optimizer muon --lr 2e-3 --clip-norm 1.0 "
            f"--lr-scheduler polynomial_decay --warmup-updates {{share:0.06}} --total-num-update {updates} "
            f"--max-update {updates} --seed {self.seed} --num-workers {args.workers} "
            f"--no-epoch-checkpoints --save-interval-updates {max(1, updates // 2)} --keep-interval-updates 1 "
            f"--validate-interval-updates {max(1, updates // POINTS)} --validate-interval 1000000 "
            f"--log-format simple --log-interval {max(1, updates // 40)}"
        )
        flags = self.candidate.flags
        if "manual" in flags:  # has no options of the other schedule
            base = re.sub(r"--(warmup-updates|total-num-update) \S+", "", base)
        values = {"share": Share(updates), "wsd": warmup_hold_decay(updates, 2e-3)}
        words = f"{base} {flags} {more}".format(**values).split()
        return [sys.executable, "-m", "fairseq_cli.train", str(args.data.resolve()), "--user-dir", str(package),
                "--save-dir", str(self.folder / "checkpoints"), *words]  # fmt: skip

    def start(self) -> None:
        """Start the process, with one thread, in its own folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        package = (self.args.experiments if self.candidate.experimental else self.args.package).resolve()
        path = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environment = {**os.environ, **one_thread, "PYTHONPATH": path, **self.candidate.environment}
        log: IO[bytes]
        with open(self.log, "wb") as log:
            commands = [self.words(package)]
            if self.candidate.first_half:
                flags = f"{self.candidate.first_half} --max-update {self.updates // 2} --mask-updates {self.updates}"
                # the second half has other batches, so it begins an epoch in another order
                second_half = f"--reset-dataloader --seed {self.seed + 1000}"
                commands = [self.words(package, flags), self.words(package, second_half)]
            self.process = subprocess.Popen(
                ["sh", "-c", " && ".join(shlex.join(command) for command in commands)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Kill its processes."""
        assert self.process is not None
        if self.process.poll() is None:
            self.stopped = True
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def results(self) -> dict[str, Any]:
        """The results in the log so far; ``error`` has the end of the log if the run failed."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        bits = {int(update): float(loss) for loss, update in VALID.findall(text)}
        speeds = sorted(map(float, SPEED.findall(text)[1:]))
        status = self.process.poll() if self.process else None
        results: dict[str, Any] = {
            "bits": sorted(bits.items()),
            "updates": self.updates,
            "updates_per_second": speeds[len(speeds) // 2] if speeds else None,
            "status": "stopped" if self.stopped else "runs" if status is None else "failed" if status else "finished",
        }
        if results["status"] == "failed":
            results["error"] = text[-1500:]
        return results

    def line(self) -> str:
        log = self.results()
        bits = " ".join(f"{loss:.3f}" for _, loss in log["bits"])
        error = log.get("error", "").strip().splitlines()[-1:]
        return f"{self.name:16} {self.seed} {log['status']:8} {log['updates_per_second']} ups: {bits}{error or ''}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR",
        help="binarized dataset with the splits train and valid, or a folder with the data.tar.xz of one",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--results", type=Path, help="file of the results (default: results.json in --output)")
    parser.add_argument("--package", type=Path, default=Path("mlsm_plugin"), help="default: mlsm_plugin")
    parser.add_argument("--experiments", type=Path, help="a package with what only some candidates need")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time (default: 2)")
    parser.add_argument("--updates", type=int, default=600, help="default: 600")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="default: 1")
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, metavar="NAME", help="default: all")
    parser.add_argument("--deadline", type=float, default=1e9, metavar="SECONDS", help="default: none")
    parser.add_argument("--layers", type=int, default=4, help="default: 4")
    parser.add_argument("--width", type=int, default=256, help="default: 256")
    parser.add_argument("--batch-size", type=int, default=32, help="blocks in an update (default: 32)")
    parser.add_argument("--batch-size-valid", type=int, default=256, help="default: 256")
    parser.add_argument("--block", type=int, default=128, help="tokens in a block (default: 128)")
    parser.add_argument("--workers", type=int, default=0, help="loader processes of a run (default: 0)")
    gpu = torch.cuda.is_available()
    parser.add_argument("--autocast", default="bf16" if gpu else "auto", help="default: bf16 on a GPU, else auto")
    parser.add_argument("--list", action="store_true", help="print the names of the candidates and end")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    began = time.monotonic()
    names = args.only or [name for name, recipe in CANDIDATES.items() if args.experiments or not recipe.experimental]
    if args.list:
        print(*names)
        return 0
    if not args.experiments and any(CANDIDATES[name].experimental for name in names):
        print("recipe: error: some of the candidates need --experiments", file=sys.stderr)
        return 1
    args.output.mkdir(parents=True, exist_ok=True)
    if (packed := args.data / "data.tar.xz").is_file():
        args.data = args.output / "data"
        with tarfile.open(packed) as file:
            file.extractall(args.data, filter="data")
    results = args.results or args.output / "results.json"
    pending = [Run(args, name, seed) for seed in args.seeds for name in names]
    running: list[Run] = []
    begun: list[Run] = []

    def write() -> None:
        table: dict[str, dict[str, Any]] = {}
        for run in begun:
            table.setdefault(run.name, {})[str(run.seed)] = run.results()
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(seeds)}" for name, seeds in table.items())
        results.write_text(f'{{"seconds": {time.monotonic() - began:.0f}, "runs": {{\n{lines}\n}}}}\n')

    try:
        while running or (pending and time.monotonic() - began < args.deadline):
            while pending and len(running) < args.jobs and time.monotonic() - began < args.deadline:
                running.append(pending.pop(0))
                begun.append(running[-1])
                running[-1].start()
            time.sleep(0.2)
            if late := time.monotonic() - began > args.deadline + GRACE:
                for run in running:
                    run.stop()
            for run in [run for run in running if late or run.process.poll() is not None]:  # type: ignore[union-attr]
                running.remove(run)
                print(f"{time.monotonic() - began:5.0f} s {run.line()}", flush=True)
                write()
    finally:
        for run in running:
            run.stop()
    if pending:
        print("not begun:", *(f"{run.name}-{run.seed}" for run in pending))
    return int(any(run.results()["status"] == "failed" for run in begun))


if __name__ == "__main__":
    sys.exit(main())
