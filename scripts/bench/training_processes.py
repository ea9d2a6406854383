"""Trainings in separate processes that take turns: each has the caches and the memory of a run alone."""

from __future__ import annotations

import argparse
import multiprocessing
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired_steps import Training, build_training, set_up_process  # in this folder

from mlsm_plugin.fairseq_plugin.models.mlsm_modern import ModernEncoder


@dataclass
class TrainingProcess:
    """A training in another process, and its measurements."""

    name: str
    connection: Connection
    blocks: int = 0
    """Blocks of the data set."""
    flops_of_token: float = 0.0
    """Operations of forward and backward pass for a token."""
    data: list[float] = field(default_factory=list)
    """Seconds of the collation of each counted step."""
    update: list[float] = field(default_factory=list)
    """Seconds of the rest of each counted step."""
    cpu: list[float] = field(default_factory=list)
    """Processor seconds of each counted step, over all threads."""

    def turn(self, batches: list[np.ndarray], *, counted: bool) -> None:
        """Take a step on each of ``batches``; the first does not count, since other trainings have used the caches."""
        steps = self.ask(batches)
        if counted:
            for measured, values in zip((self.data, self.update, self.cpu), zip(*steps[1:], strict=True), strict=True):
                measured.append(float(np.median(values)))

    def ask(self, what: Any) -> Any:
        """Send ``what`` to the process, and wait for its answer.

        Raises:
            RuntimeError: the process has ended.
        """
        try:
            self.connection.send(what)
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the process of {self.name} has ended; its error is above") from error

    @property
    def seconds(self) -> np.ndarray:
        """Seconds of each counted step."""
        return np.add(self.data, self.update)

    def peak_memory(self) -> float:
        """Peak memory in GB so far (Linux only); on a GPU, the peak memory of its tensors."""
        return float(self.ask("memory"))


def start(
    stack: ExitStack, name: str, data_bin: Path, args: argparse.Namespace, arch: str, flags: tuple[str, ...]
) -> TrainingProcess:
    """Start the process of a training, without waiting for it; it ends with ``stack``."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, name, data_bin, args, arch, flags), daemon=True)
    process.start()
    theirs.close()
    stack.callback(process.join)
    stack.callback(ours.close)  # ends the process
    return TrainingProcess(name, ours)


def wait_for_start(trainings: list[TrainingProcess]) -> None:
    """Wait until all trainings are ready; they start in parallel."""
    for training in trainings:
        training.blocks, training.flops_of_token = training.ask("size")


def run_rounds(trainings: list[TrainingProcess], args: argparse.Namespace, rng: np.random.Generator) -> None:
    """Let the trainings take turns in each round, on the same batches, in a rotating order."""
    samples = rng.permutation(trainings[0].blocks)
    steps = 3
    for round_ in range(-args.warmup, args.rounds):
        places = np.arange(steps * args.batch_size) + round_ * steps * args.batch_size
        batches = np.split(np.take(samples, places, mode="wrap"), steps)
        first = round_ % len(trainings)
        for training in trainings[first:] + trainings[:first]:
            training.turn(batches, counted=round_ >= 0)


def _serve(
    connection: Connection, name: str, data_bin: Path, args: argparse.Namespace, arch: str, flags: tuple[str, ...]
) -> None:
    set_up_process(args)
    training = build_training(name, data_bin, args, arch, flags)
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            return
        if isinstance(asked, str):
            connection.send(_size(training, args) if asked == "size" else _peak_memory(args))
            continue
        for batch in asked:
            training.step(batch, counted_round=0)
        connection.send(list(zip(training.data, training.update, training.cpu, strict=True))[-len(asked) :])


def _size(training: Training, args: argparse.Namespace) -> tuple[int, float]:
    """The number of blocks of the dataset, and the operations per token: 6 for each matrix weight, and attention.

    Only masked tokens pass through the head, so it counts with their share of 15 %. So does the last layer of
    ``mlsm_modern`` except for keys and values, unless the objective is TACO.
    """
    encoder = training.trainer.get_model().encoder
    matrices = sum(p.numel() for p in encoder.sentence_encoder.layers.parameters() if p.dim() == 2)
    layer = 6 * matrices / args.layers + 12 * args.width * args.block
    head = 6 * 0.15 * (encoder.sentence_encoder.embed_tokens.weight.numel() + args.width**2)
    of_masked = isinstance(encoder, ModernEncoder) and training.name != "taco"
    saved = 0.85 * (layer - 6 * 2 * args.width**2) if of_masked else 0.0
    return len(training.dataset), args.layers * layer - saved + head


def _peak_memory(args: argparse.Namespace) -> float:
    if args.device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024 / 1e9
