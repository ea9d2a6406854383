#!/usr/bin/env python3
"""Measure the cost of TACO's contrastive loss: the time of a step, compared with ``masked_lm``, and its memory.

    python scripts/bench/taco_step.py [--size small] [--device cpu]

Three measurements:

1. Step time. Three trainings run side by side in one process, with encoders of the same size and parameters, on the
   same batches with the same masks; every step goes through fairseq's own ``Trainer``:

   - ``masked_lm``: fairseq's task and criterion;
   - ``taco``: task ``taco``, criterion ``token_contrastive``;
   - ``straightforward``: the same, but with the obvious formulation of the loss: the semantics are normalized, the keys
     of all anchors are gathered into one (anchors, 1 + K, d) tensor without gradient, and its products with the anchors
     go into a cross entropy with class 0. The pairs are those of ``taco``.

   A step is timed from the collation of its batch, without worker processes, to the end of the Adam update. In every
   round each training takes one step, in a rotating order. A ratio is the median over the rounds of the ratios within
   a round, so that a noisy machine affects both sides alike. The table also has the ratio of processor times, which on
   the CPU depends less on other processes. Both ratios mislead if torch has more threads than free cores: OpenMP's
   threads then busy-wait for each other in every operation. ``taco`` suffers most, since it has many small operations.
   Give ``--threads`` no more than the free cores, or set OMP_WAIT_POLICY=PASSIVE. Target: ``taco`` at most 1.10 times
   ``masked_lm``.

2. Peak extra memory of the loss alone, forward and backward, if all tokens of a batch are anchors. Each formulation
   runs in its own process. The inputs (semantics and indices) do not count; the gradient does. On CUDA, the figure is
   the peak of ``torch.cuda.max_memory_allocated``. On the CPU, it is the peak of the resident set, which Linux keeps as
   VmHWM and resets on request; elsewhere it is the growth of ``ru_maxrss``. Each tensor is mapped from the system
   separately (MALLOC_MMAP_THRESHOLD_), so that none reuses freed memory, and a small call first loads the libraries.
   Target: at most a tenth of ``straightforward``.

3. Agreement of both formulations on the same semantics and pairs: the difference of the losses, relative to the loss,
   and the norm of the difference of the gradients, relative to the norm of the gradient. The exit status is 1 if one
   of them is above 1e-5.

The targets are for the default sizes. Text and semantics are synthetic: Zipf-distributed pieces, and random vectors
with a common part for each sequence.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from paired_steps import (  # in this folder
    STOCK_FLAGS,
    Training,
    add_general_options,
    build_training,
    check_general_options,
    machine_state,
    run_rounds,
    set_up_process,
    table,
    verdict,
    versions,
    write_text,
)
from torch import Tensor

from mlsm_plugin.core.losses.token_contrastive import ContrastiveTerms, contrastive_terms, sample_pairs
from mlsm_plugin.fairseq_plugin.criterions import token_contrastive
from mlsm_plugin.fairseq_plugin.criterions.token_contrastive import TokenContrastiveConfig, TokenContrastiveCriterion

TACO_FLAGS = ("--task", "taco", "--criterion", "token_contrastive")
TINY_FLAGS = (
    *("--encoder-layers", "2", "--encoder-embed-dim", "64"),
    *("--encoder-ffn-embed-dim", "128", "--encoder-attention-heads", "2"),
)
SIZES = {"tiny": ("taco_small", TINY_FLAGS), "small": ("taco_small", ()), "base": ("taco_base", ())}

STEP_TARGET = 1.10
MEMORY_TARGET = 0.10
AGREEMENT = 1e-5
WINDOW = 5
TEMPERATURE = 0.07  # the defaults of the task


def straightforward_terms(
    semantics: Tensor,
    anchors: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    temperature: float,
    keys: Tensor | None = None,
) -> ContrastiveTerms:
    """Compute the same as :func:`contrastive_terms`, with all keys of all anchors in memory at once."""
    unit = F.normalize(semantics.flatten(0, 1).float(), dim=1)
    chosen = (anchors & (positive >= 0) & (negative[:, :, 0] >= 0)).flatten()
    candidates = torch.cat([positive.flatten()[chosen, None], negative.flatten(0, 1)[chosen]], dim=1)
    gathered = (unit.detach() if keys is None else keys)[candidates]  # (a, 1 + K, d)
    cosine = torch.einsum("ad,akd->ak", unit[chosen], gathered)
    labels = candidates.new_zeros(len(candidates))
    losses = F.cross_entropy(cosine / temperature, labels, reduction="none")
    total = losses.sum()
    with torch.no_grad():
        return ContrastiveTerms(
            total,
            losses.detach(),
            correct=cosine[:, 0] > cosine[:, 1:].amax(dim=1),
            positive_cosine=cosine[:, 0],
            negative_cosine=cosine[:, 1:].mean(dim=1),
        )


class StraightforwardCriterion(TokenContrastiveCriterion):
    """``token_contrastive`` with the obvious formulation of its loss."""

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, Any, dict[str, Any]]:
        """Loss summed over tokens, sample size, logging output."""
        with mock.patch.object(token_contrastive, "contrastive_terms", straightforward_terms):
            return super().forward(model, sample, reduce)


FORMULATIONS = {"taco": contrastive_terms, "straightforward": straightforward_terms}


def build_trainings(data_bin: Path, args: argparse.Namespace) -> list[Training]:
    """The three trainings; the first is the baseline."""
    arch, size_flags = SIZES[args.size]
    options = ("--negatives", str(args.negatives), "--positive-window", str(WINDOW), "--temperature", str(TEMPERATURE))
    stock = (*STOCK_FLAGS, *size_flags)
    taco = (*TACO_FLAGS, *options, *size_flags)
    straightforward = partial(StraightforwardCriterion, TokenContrastiveConfig(seed=args.seed))
    return [
        build_training("masked_lm", data_bin, args, arch, stock),
        build_training("taco", data_bin, args, arch, taco, target=STEP_TARGET),
        build_training("straightforward", data_bin, args, arch, taco, make_criterion=straightforward),
    ]


class LossInputs(NamedTuple):
    """The inputs of the loss of one batch."""

    semantics: Tensor
    anchors: Tensor
    positive: Tensor
    negative: Tensor


def loss_inputs(shape: tuple[int, int, int], num_negatives: int, seed: int, device: str) -> LossInputs:
    """Random semantics ``(B, T, d)``, related within a sequence, and pairs; all tokens are anchors."""
    generator = torch.Generator(device).manual_seed(seed)
    semantics = torch.randn(shape, generator=generator, device=device)
    semantics += 0.5 * torch.randn((shape[0], 1, shape[2]), generator=generator, device=device)
    valid = torch.ones(shape[:2], dtype=torch.bool, device=device)
    pairs = sample_pairs(valid, window=WINDOW, num_negatives=num_negatives, generator=generator)
    return LossInputs(semantics.requires_grad_(), valid, *pairs)


def loss_and_gradient(formulation: str, inputs: LossInputs) -> tuple[float, Tensor]:
    """The summed loss, and its gradient with respect to the semantics."""
    inputs.semantics.grad = None
    loss = FORMULATIONS[formulation](*inputs, temperature=TEMPERATURE).loss
    loss.backward()
    gradient = inputs.semantics.grad
    assert gradient is not None
    return float(loss.detach()), gradient


def peak_resident() -> int:
    """Peak resident set in bytes; since :func:`reset_peak_resident`, if the system can reset it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_resident() -> None:
    """Reset the peak to the current resident set."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak_extra_memory(
    formulation: str, shape: tuple[int, int, int], num_negatives: int, seed: int, device: str, threads: int
) -> int:
    """Peak bytes of the loss and its gradient in addition to their inputs; call this in its own process."""
    torch.set_num_threads(threads)
    inputs = loss_inputs(shape, num_negatives, seed, device)
    loss_and_gradient(formulation, loss_inputs((2, 8, shape[2]), num_negatives, seed, device))
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        reading: Callable[[], int] = torch.cuda.max_memory_allocated
    else:
        reset_peak_resident()
        reading = peak_resident
    before = reading()
    loss_and_gradient(formulation, inputs)
    return reading() - before


def memory_report(shape: tuple[int, int, int], args: argparse.Namespace) -> str:
    """Peak extra memory of each formulation, and their ratio."""
    peaks = []
    context = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": "65536"}):
        for formulation in FORMULATIONS:
            with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
                measured = pool.submit(
                    peak_extra_memory,
                    *(formulation, shape, args.negatives, args.seed, args.device, torch.get_num_threads()),
                )
                peaks.append(measured.result())
    ratio = peaks[0] / max(peaks[1], 1)  # the peak is 0 if the tensors are too small to raise it
    size = " x ".join(map(str, shape))
    each = ", ".join(f"{name} {peak / 1e6:.1f} MB" for name, peak in zip(FORMULATIONS, peaks, strict=True))
    return (
        f"peak extra memory of the loss, forward and backward, {size}, K = {args.negatives}: {each}; "
        f"ratio {ratio:.3f}  {verdict(ratio, MEMORY_TARGET)}"
    )


def agreement_report(shape: tuple[int, int, int], args: argparse.Namespace) -> tuple[str, bool]:
    """How far the formulations differ on the same semantics and pairs, and whether they agree well enough."""
    inputs = loss_inputs(shape, args.negatives, args.seed, args.device)
    (ours, our_gradient), (obvious, obvious_gradient) = (loss_and_gradient(name, inputs) for name in FORMULATIONS)
    num_anchors = int(inputs.anchors.sum())
    loss_difference = abs(ours - obvious) / abs(obvious)
    gradient_difference = float((our_gradient - obvious_gradient).norm() / obvious_gradient.norm())
    agree = max(loss_difference, gradient_difference) <= AGREEMENT
    return (
        f"agreement on the same pairs: loss {ours / num_anchors:.6f} and {obvious / num_anchors:.6f} nats an anchor, "
        f"relative difference {loss_difference:.1e}, of the gradients {gradient_difference:.1e}  "
        f"<= {AGREEMENT:.0e} {'met' if agree else 'missed'}"
    ), agree


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", choices=SIZES, default="small", help="taco_SIZE is trained; tiny: 2 layers, 64 wide (default: small)"
    )
    parser.add_argument("--negatives", type=int, default=50, help="K: negatives of an anchor (default: 50)")
    add_general_options(parser, block=256)
    args = parser.parse_args()
    check_general_options(parser, args, "negatives")
    if args.batch_size < 2:
        parser.error("--batch-size must be at least 2: negatives come from other sequences")
    return args


def main() -> int:
    args = parse_args()
    set_up_process(args)
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory(prefix="taco_step.") as folder:
        prefix = Path(folder) / "train"
        write_text(prefix, args, rng)
        trainings = build_trainings(prefix.parent, args)
        run_rounds(trainings, args, rng)
    print(f"taco_{args.size}, {args.batch_size} x {args.block} tokens a step, {args.vocab} pieces, ", end="")
    print(f"K = {args.negatives}, {args.rounds} rounds after {args.warmup}; {versions(args)}")
    print(table(trainings))
    print(machine_state(), flush=True)
    encoder = trainings[0].trainer.get_model().encoder.sentence_encoder
    shape = (args.batch_size, args.block, encoder.embed_tokens.embedding_dim)
    print(memory_report(shape, args), flush=True)
    agreement, agree = agreement_report(shape, args)
    print(agreement)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
