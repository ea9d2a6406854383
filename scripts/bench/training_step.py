#!/usr/bin/env python3
"""Measure how fast encoders train: tokens a second, compared with fairseq's ``masked_lm`` on its RoBERTa.

    python scripts/bench/training_step.py --layers 4 --width 256 [--batch-size 32 --block 128] [--device cpu]

All encoders have the same number of layers and the same width. The trainings run in separate processes and take turns
on the same batches with the same masks; every step goes through fairseq's own ``Trainer``:

- ``stock``: fairseq's task and criterion ``masked_lm``, its RoBERTa and its Adam, in float32 (on a GPU: ``--fp16``);
- ``roberta float32``, ``roberta bf16``: ``plain_masked_lm`` on ``mlsm_roberta``, ``fused_adamw``, ``--autocast``;
- ``modern float32``, ``modern bf16``: the same on ``mlsm_modern``;
- ``recipe``: the recipe of ``mlsm auxiliary``: Muon, and the mean of its shares of masks;
- ``recipe in blocks``: the same as in runs of at most 1,200 updates: Muon works on blocks of 64 rows;
- ``compiled``: ``modern bf16`` with ``--compile on``;
- ``deberta float32``, ``deberta bf16``, ``deberta recipe``: the same on ``mlsm_deberta``;
- ``mlsm``, ``mlsm + mlm``, ``taco``: the objectives on ``mlsm_modern`` in bf16, compared with ``modern bf16``;
- ``online``, ``online + mlm``: MLSM with ``--latent-source online``. The teacher is an ``mlsm_modern`` of the size
  ``--teacher``, and its coder a TopK SAE; both are random.

A step is timed from the collation of its batch, without worker processes, to the end of the optimizer's update. In
every round each training takes three steps, in a rotating order. The first of the three does not count, since another
training has used the processor's caches. A ratio is the median over the rounds of the ratios within a round, so that a
noisy machine affects all alike; with ``--threads 1``, the ratio of processor times (``CPU``) is the most exact. Text
and codes are synthetic: Zipf-distributed pieces.

``--memory`` also prints the peak memory of each training. ``--loaders`` also times data loading alone, in one process,
for MLSM, TACO, span denoising and NPM, in tokens a second relative to the fastest step.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.tasks import setup_task
from mlsm_step import MLSM_FLAGS, write_codes  # in this folder
from paired_steps import (
    STOCK_FLAGS,
    add_general_options,
    check_general_options,
    configuration,
    set_up_process,
    versions,
    write_text,
)
from training_processes import TrainingProcess, run_rounds, start, wait_for_start

from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig, SaeWeights, SparseAutoencoder
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import write_untrained

PLAIN_FLAGS = ("--task", "plain_masked_lm", "--criterion", "masked_lm")
TACO_FLAGS = ("--task", "taco", "--criterion", "token_contrastive")
NO_DROPOUT = ("--dropout", "0", "--attention-dropout", "0")
FUSED = ("--optimizer", "fused_adamw")
RECIPE = ("--optimizer", "muon", "--mask-prob", "0.225")  # the mean of 0.30 and 0.15
FLOAT32 = ("--autocast", "off")
BF16 = ("--autocast", "bf16")
AUTO = ("--autocast", "auto")  # as `mlsm auxiliary` trains
# ratio of tokens a second: data loading to the fastest step
LOADER_TARGETS = {"mlsm": 10.0, "taco": 10.0, "span_denoising": 10.0, "npm": 3.0}
LOADER_FLAGS = {
    "mlsm": MLSM_FLAGS,
    "taco": TACO_FLAGS,
    "span_denoising": ("--task", "span_denoising", "--criterion", "cross_entropy"),
    "npm": ("--task", "nonparametric_masked_lm", "--criterion", "span_contrastive"),
}


def write_teacher(data_bin: Path, args: argparse.Namespace) -> tuple[str, ...]:
    """Save a random teacher and a random TopK SAE of its last layer; returns the flags to code with them online."""
    layers, width = args.teacher
    size = ("--encoder-layers", str(layers), "--encoder-embed-dim", str(width))
    teacher = data_bin / "teacher.pt"
    folder = data_bin / "sae"
    cfg = configuration(data_bin, args, "mlsm_modern", (*PLAIN_FLAGS, *size))
    write_untrained(teacher, cfg, setup_task(cfg.task).build_model(cfg.model).state_dict())
    rows = F.normalize(torch.randn(args.atoms, width), dim=1)
    weights = SaeWeights(rows, torch.zeros(args.atoms), rows, torch.zeros(width))
    config = SaeConfig("topk", k=round(args.nonzeros), input_norm="constant_norm")
    SaeCoder(SparseAutoencoder(config, weights), {"layer": layers}).save(folder)
    online = ("--latent-source", "online", "--auxiliary-checkpoint", str(teacher))
    return (*online, "--latent-dictionary", str(folder))


def recipes(args: argparse.Namespace, online: tuple[str, ...]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Architecture and flags of each training; ``online`` are the flags of :func:`write_teacher`."""
    size = ("--encoder-layers", str(args.layers), "--encoder-embed-dim", str(args.width))
    size += ("--encoder-attention-heads", str(args.width // 64))
    old = (*size, "--encoder-ffn-embed-dim", str(4 * args.width))
    modern = (*size, *FUSED, *NO_DROPOUT)
    half = ("--fp16",) if args.device == "cuda" else ()
    settings = {
        "stock": ("roberta_base", (*STOCK_FLAGS, *old, *half)),
        "roberta float32": ("mlsm_roberta", (*PLAIN_FLAGS, *old, *FUSED, *FLOAT32)),
        "roberta bf16": ("mlsm_roberta", (*PLAIN_FLAGS, *old, *FUSED, *BF16)),
        "modern float32": ("mlsm_modern", (*PLAIN_FLAGS, *modern, *FLOAT32)),
        "modern bf16": ("mlsm_modern", (*PLAIN_FLAGS, *modern, *BF16)),
        "recipe": ("mlsm_modern", (*PLAIN_FLAGS, *modern, *AUTO, *RECIPE)),
        "recipe in blocks": ("mlsm_modern", (*PLAIN_FLAGS, *modern, *AUTO, *RECIPE, "--muon-block-rows", "64")),
        "compiled": ("mlsm_modern", (*PLAIN_FLAGS, *modern, *BF16, "--compile", "on")),
        "deberta float32": ("mlsm_deberta", (*PLAIN_FLAGS, *modern, *FLOAT32)),
        "deberta bf16": ("mlsm_deberta", (*PLAIN_FLAGS, *modern, *BF16)),
        "deberta recipe": ("mlsm_deberta", (*PLAIN_FLAGS, *modern, *AUTO, *RECIPE)),
        "mlsm": ("mlsm_modern", (*MLSM_FLAGS, *modern, *BF16)),
        "mlsm + mlm": ("mlsm_modern", (*MLSM_FLAGS, "--mlm-weight", "1", *modern, *BF16)),
        "online": ("mlsm_modern", (*MLSM_FLAGS, *online, *modern, *BF16)),
        "online + mlm": ("mlsm_modern", (*MLSM_FLAGS, *online, "--mlm-weight", "1", *modern, *BF16)),
        "taco": ("mlsm_modern", (*TACO_FLAGS, *modern, *BF16)),
    }
    return {name: recipe for name, recipe in settings.items() if name in ("stock", *args.only)}


def table(trainings: list[TrainingProcess], args: argparse.Namespace) -> str:
    """A table of the tokens a second of each training, and the ratios to ``stock`` and to ``modern bf16``."""
    tokens = args.batch_size * args.block
    by_name = {training.name: training for training in trainings}
    width = 2 + max(map(len, by_name))
    lines = [
        f"{'':<{width}}{'tokens/s':>10}{'step ms':>9}{'data ms':>9}{'to stock':>10}{'quartiles':>14}"
        f"{'step to modern bf16':>21}{'CPU':>7}"
    ]
    for training in trainings:
        speed = by_name["stock"].seconds / training.seconds
        low, ratio, high = np.percentile(speed, [25, 50, 75])
        step = np.median(training.seconds)
        data = np.median(training.data)
        line = f"{training.name:<{width}}{tokens / step:>10,.0f}{1e3 * step:>9.1f}{1e3 * data:>9.1f}{ratio:>10.2f}"
        line += f"{f'{low:.2f}-{high:.2f}':>14}"
        if "modern bf16" in by_name:
            plain = by_name["modern bf16"]
            line += f"{np.median(training.seconds / plain.seconds):>21.2f}"
            line += f"{np.median(np.divide(training.cpu, plain.cpu)):>7.2f}"
        if args.peak_tflops:
            line += f"  {training.flops_of_token * tokens / step / args.peak_tflops / 1e12:.1%} of the peak"
        lines.append(line)
    return "\n".join(lines)


def memory_report(trainings: list[TrainingProcess]) -> str:
    """Peak memory of each training."""
    peaks = {training.name: training.peak_memory() for training in trainings}
    shown = (f"{name} {peak:.2f} ({peak / peaks['stock']:.2f})" for name, peak in peaks.items())
    return f"peak memory in GB, and to stock: {', '.join(shown)}"


def loader_report(data_bin: Path, args: argparse.Namespace, fastest: float) -> str:
    """Tokens a second of data loading alone, relative to the step with ``fastest`` tokens a second."""
    lines = []
    for name, flags in LOADER_FLAGS.items():
        arch = "denoising_small" if name == "span_denoising" else "mlsm_modern_tiny"
        groups = ("--group-size", "16", "--batch-size", str(max(1, args.batch_size // 16))) if name == "npm" else ()
        cfg = configuration(data_bin, args, arch, (*flags, *groups))
        task = setup_task(cfg.task)
        task.load_dataset("train")
        batches = task.get_batch_iterator(
            task.dataset("train"), max_sentences=cfg.dataset.batch_size, max_positions=10**9, seed=args.seed
        ).next_epoch_itr(shuffle=True)
        tokens = 0
        begin = time.perf_counter()
        for number, sample in enumerate(batches):
            if number == 0:  # opens files, compiles
                begin = time.perf_counter()
                continue
            tokens += sample["net_input"]["src_tokens"].numel()
            if number >= 1 + args.rounds:
                break
        speed = tokens / (time.perf_counter() - begin)
        target = LOADER_TARGETS[name]
        met = "met" if speed >= target * fastest else "missed"
        lines.append(
            f"loading {name}: {speed:,.0f} tokens/s, {speed / fastest:.1f} times the step, >= {target:g} {met}"
        )
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="layers of all encoders (default: 4)")
    parser.add_argument("--width", type=int, default=256, help="width of all encoders, a multiple of 64 (default: 256)")
    parser.add_argument("--atoms", type=int, default=3000, help="atoms of the dictionary (default: 3000)")
    parser.add_argument("--nonzeros", type=float, default=42.0, help="mean non-zeros of a code (default: 42)")
    parser.add_argument("--memory", action="store_true", help="also measure the peak memory of each")
    parser.add_argument("--loaders", action="store_true", help="also measure the data loading alone")
    parser.add_argument("--peak-tflops", type=float, help="bf16 peak of the chip, to print the share of it")
    parser.add_argument(
        "--teacher", type=int, nargs=2, default=(6, 384), metavar=("LAYERS", "WIDTH"), help="(default: 6 384)"
    )
    names = ["roberta float32", "roberta bf16", "modern float32", "modern bf16", "deberta float32", "deberta bf16"]
    names += ["recipe", "recipe in blocks", "deberta recipe", "compiled"]
    names += ["mlsm", "mlsm + mlm", "online", "online + mlm", "taco"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="compare only these with stock")
    add_general_options(parser, block=128)
    parser.set_defaults(batch_size=32, vocab=8000)
    args = parser.parse_args()
    check_general_options(parser, args, "layers", "width", "atoms", "nonzeros")
    if args.width % 64:
        parser.error(f"--width must be a multiple of 64, got {args.width}")
    return args


def main() -> int:
    args = parse_args()
    set_up_process(args)
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory(prefix="training_step.") as folder, ExitStack() as stack:
        prefix = Path(folder) / "train"
        write_codes(prefix, write_text(prefix, args, rng), args, rng)
        every = recipes(args, write_teacher(prefix.parent, args)).items()
        trainings = [start(stack, name, prefix.parent, args, *recipe) for name, recipe in every]
        wait_for_start(trainings)
        run_rounds(trainings, args, rng)
        print(
            f"{args.layers} x {args.width}, {args.batch_size} x {args.block} tokens a step, {args.vocab} pieces, ",
            end="",
        )
        print(f"{args.rounds} rounds after {args.warmup}; {versions(args)}; load {os.getloadavg()[0]:.1f}")
        print(table(trainings, args), flush=True)
        if args.memory:
            print(memory_report(trainings), flush=True)
        if args.loaders:
            fastest = max(args.batch_size * args.block / float(np.median(training.seconds)) for training in trainings)
            print(loader_report(prefix.parent, args, fastest))
    return 0


if __name__ == "__main__":
    sys.exit(main())
