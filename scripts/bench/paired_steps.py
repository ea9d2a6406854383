"""Run several trainings in turn in one process; the benches of training steps share this module.

Every training has fairseq's own ``Trainer``. In every round each training takes one step on the same samples with the
same masks, in a rotating order. A ratio is the median over the rounds of the ratios within a round, so that a noisy
machine affects both sides alike. A step is timed from the collation of its batch, without worker processes, to the end
of the Adam update. The table also has the ratio of processor times, which on the CPU depends less on other processes.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.criterions import FairseqCriterion
from fairseq.logging import metrics
from fairseq.tasks import setup_task
from fairseq.trainer import Trainer

import mlsm_plugin  # noqa: F401  (registers tasks, criterions and models)
from mlsm_plugin.fairseq_plugin.compat.binarized_files import StreamingMMapBuilder
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import configuration_of

EOS = 2  # as in every fairseq dictionary
SPECIAL_SYMBOLS = 4

STOCK_FLAGS = ("--task", "masked_lm", "--criterion", "masked_lm")


def write_text(prefix: Path, args: argparse.Namespace, rng: np.random.Generator) -> np.ndarray:
    """Write ``dict.txt`` and a binarized split of sentences of Zipf-distributed pieces; returns its ids."""
    pieces = "".join(f"▁piece{rank} 1\n" for rank in range(args.vocab))
    (prefix.parent / "dict.txt").write_text(pieces, encoding="utf-8")
    frequency = 1.0 / (np.arange(args.vocab) + 2.7)  # Zipf-Mandelbrot
    ids = SPECIAL_SYMBOLS + rng.choice(args.vocab, size=args.tokens, p=frequency / frequency.sum())
    ends = np.cumsum(rng.integers(5, 45, size=args.tokens // 5))
    ends = np.append(ends[ends < args.tokens], args.tokens)
    ids[ends - 1] = EOS
    builder = StreamingMMapBuilder(f"{prefix}.bin", SPECIAL_SYMBOLS + args.vocab)
    builder.add_sentences(ids, np.diff(ends, prepend=0))
    builder.finalize(f"{prefix}.idx")
    return ids


@dataclass
class Training:
    """One training and its measurements."""

    name: str
    trainer: Trainer
    dataset: Any
    target: float | None = None
    """Highest ratio of its step to that of ``masked_lm``."""
    every: int = 1
    """It takes part in every ``every``-th round."""
    rounds: list[int] = field(default_factory=list)
    """Numbers of the counted rounds that it took part in."""
    losses: list[float] = field(default_factory=list)
    """Losses of all steps, in bits."""
    data: list[float] = field(default_factory=list)
    """Seconds of the collation, look-up of codes included, in the counted steps."""
    update: list[float] = field(default_factory=list)
    """Seconds of the rest of the counted steps: forward, backward, Adam."""
    cpu: list[float] = field(default_factory=list)
    """Processor seconds of the counted steps, over all threads."""

    def step(self, batch: np.ndarray, counted_round: int) -> None:
        """Take one step on the samples ``batch``; a negative round does not count.

        If the criterion has ``begin_update``, the time of the step includes this call. In ``fairseq-train``, the task
        calls it for the batches of its data iterator, which is not used here.
        """
        metrics.reset()  # the trainings share fairseq's meters, and may use the same name for meters of different kinds
        _synchronize()
        cpu_begin = time.process_time()
        begin = time.perf_counter()
        sample = self.dataset.collater([self.dataset[index] for index in batch])
        collated = time.perf_counter()
        criterion = self.trainer.get_criterion()
        if hasattr(criterion, "begin_update"):
            criterion.begin_update([sample], self.trainer.get_num_updates(), device=self.trainer.device)
        log = self.trainer.train_step([sample])
        _synchronize()
        end = time.perf_counter()
        cpu_end = time.process_time()
        self.losses.append(float(log["loss"]))
        if not math.isfinite(self.losses[-1]):
            raise ValueError(f"the loss of {self.name} is {self.losses[-1]} in step {len(self.losses)}")
        if counted_round >= 0:
            self.rounds.append(counted_round)
            self.cpu.append(cpu_end - cpu_begin)
            self.data.append(collated - begin)
            self.update.append(end - collated)

    @property
    def seconds(self) -> np.ndarray:
        """Seconds of each counted step."""
        return np.add(self.data, self.update)

    def ratios(self, stock: Training) -> tuple[np.ndarray, np.ndarray]:
        """Wall time and processor time of each counted step, relative to ``stock`` in the same round."""
        return self.seconds / stock.seconds[self.rounds], np.array(self.cpu) / np.take(stock.cpu, self.rounds)


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def configuration(data_bin: Path, args: argparse.Namespace, arch: str, flags: tuple[str, ...]) -> Any:
    """The configuration that ``fairseq-train`` makes from a command line."""
    command = [
        *(str(data_bin), "--arch", arch),
        *("--sample-break-mode", "none", "--tokens-per-sample", str(args.block), "--batch-size", str(args.batch_size)),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--adam-eps", "1e-6", "--weight-decay", "0.01"),
        *("--lr", "5e-4", "--clip-norm", "1.0", "--dropout", "0.1", "--attention-dropout", "0.1"),
        *("--seed", str(args.seed), "--no-save", "--save-dir", str(data_bin)),
        *(("--cpu",) if args.device == "cpu" else ()),
        *flags,  # the last value of a flag counts
    ]
    return configuration_of(command)


def build_training(
    name: str,
    data_bin: Path,
    args: argparse.Namespace,
    arch: str,
    flags: tuple[str, ...],
    *,
    target: float | None = None,
    every: int = 1,
    make_criterion: Callable[[Any], FairseqCriterion] | None = None,
) -> Training:
    """Task, data, model, criterion and trainer, as ``fairseq-train`` builds them.

    Args:
        name: name in the table.
        data_bin: folder with ``dict.txt`` and the split ``train``.
        args: the general options.
        arch: architecture of the model.
        flags: flags of task, criterion and model, as on the command line.
        target: highest ratio of a step to a step of the first training.
        every: the training takes part in every ``every``-th round.
        make_criterion: makes the criterion from the task, instead of the criterion of ``flags``.
    """
    cfg = configuration(data_bin, args, arch, flags)
    task = setup_task(cfg.task)
    task.load_dataset("train")
    torch.manual_seed(args.seed)
    model = task.build_model(cfg.model)
    criterion = make_criterion(task) if make_criterion else task.build_criterion(cfg.criterion)
    dataset = task.dataset("train")
    dataset.set_epoch(1)
    return Training(name, Trainer(cfg, task, model, criterion), dataset, target, every)


def run_rounds(trainings: list[Training], args: argparse.Namespace, rng: np.random.Generator) -> None:
    """Let the trainings take one step in each round, on the same batch."""
    samples = rng.permutation(len(trainings[0].dataset))
    for round_ in range(-args.warmup, args.rounds):
        batch = np.take(samples, np.arange(args.batch_size) + round_ * args.batch_size, mode="wrap")
        first = round_ % len(trainings)
        for training in trainings[first:] + trainings[:first]:
            if round_ % training.every == 0 or round_ == -1:
                training.step(batch, counted_round=round_)


def verdict(ratio: float, target: float) -> str:
    """The target and whether a ratio meets it."""
    return f"<= {target:.2f} {'met' if ratio <= target else 'missed'}"


def table(trainings: list[Training]) -> str:
    """Medians in milliseconds, ratios to the first training with their quartiles, and losses."""
    stock = trainings[0]
    width = 2 + max(len(training.name) for training in trainings)
    lines = [
        f"{'':<{width}}{'step':>9}{'data':>8}{'update':>9}{'ratio to':>11}{'quartiles':>14}{'CPU':>8}"
        f"  {'target':<15}loss (bits)",
        f"{'':<{width}}{'ms':>9}{'ms':>8}{'ms':>9}{stock.name:>11}{'':>14}{'ratio':>8}  {'':<15}first -> last",
    ]
    for training in trainings:
        ratios, cpu_ratios = training.ratios(stock)
        low, ratio, high = np.percentile(ratios, [25, 50, 75])
        step, data, update = (1e3 * np.median(x) for x in (training.seconds, training.data, training.update))
        judged = "" if training.target is None else verdict(ratio, training.target)
        lines.append(
            f"{training.name:<{width}}{step:>9.1f}{data:>8.1f}{update:>9.1f}{ratio:>11.3f}{f'{low:.3f}-{high:.3f}':>14}"
            f"{np.median(cpu_ratios):>8.3f}  {judged:<15}{training.losses[0]:.3f} -> {training.losses[-1]:.3f}"
        )
    return "\n".join(lines)


def machine_state() -> str:
    """Peak memory of the whole process, all trainings together, and the load of the machine."""
    unit = 1 if sys.platform == "darwin" else 1024
    text = f"peak resident memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.2f} GB"
    if torch.cuda.is_initialized():
        text += f", CUDA memory reserved {torch.cuda.memory_reserved() / 1e9:.2f} GB"
    return f"{text} (all trainings together); load {os.getloadavg()[0]:.1f}"


def versions(args: argparse.Namespace) -> str:
    """The version of torch and its device."""
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, {device}"


def add_general_options(parser: argparse.ArgumentParser, *, block: int) -> None:
    """The options of every bench of training steps; ``block`` is the default of ``--block``."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (default: cpu)")
    parser.add_argument("--rounds", type=int, default=12, help="counted steps of each training (default: 12)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the counted ones (default: 2)")
    parser.add_argument("--batch-size", type=int, default=16, help="blocks in a batch (default: %(default)s)")
    parser.add_argument("--block", type=int, default=block, help=f"tokens in a block (default: {block})")
    parser.add_argument("--vocab", type=int, default=30000, help="pieces of the vocabulary (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=500_000, help="tokens of the data set (default: 500000)")
    parser.add_argument("--threads", type=int, help="CPU threads of torch (default: all cores)")
    parser.add_argument("--seed", type=int, default=1, help="random seed of data, masks and parameters (default: 1)")


def check_general_options(parser: argparse.ArgumentParser, args: argparse.Namespace, *positive: str) -> None:
    """Exit with a usage message if an option is out of range; ``positive``: more options that must be above 0."""
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    for name in ("rounds", "batch_size", "vocab", *positive):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    if args.block < 2 or args.tokens < args.block or args.warmup < 0:
        parser.error("--block must be at least 2, --tokens at least --block, and --warmup not negative")


def set_up_process(args: argparse.Namespace) -> None:
    """Silence logs and warnings, and set the number of threads."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")  # fairseq and hydra warn a lot
    if args.threads:
        torch.set_num_threads(args.threads)
