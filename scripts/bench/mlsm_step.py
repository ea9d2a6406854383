#!/usr/bin/env python3
"""What a training step of MLSM costs beside one of fairseq's ``masked_lm``, and beside the published recipe's.

Four trainings run side by side in one process, on the same batches with the same masks and with encoders of the same
size; every step goes through fairseq's own ``Trainer``:

- ``masked_lm``: fairseq's task and criterion;
- ``mlsm``: task ``masked_latent_semantic``, criterion ``latent_semantic_kl``, codes from a code store;
- ``mlsm + mlm``: the same with ``--mlm-weight 1``;
- ``recipe``: no stored codes. At every update an auxiliary model reads the unmasked text, and 100 FISTA steps code the
  hidden states of the masked tokens (Berend, ACL Findings 2023).

A step is timed from the collation of its batch, without worker processes, to the end of the Adam update. In every
round each training takes one step (the slow recipe in every fourth), and the order rotates; a ratio is the median over
the rounds of ratios within a round, so that a noisy machine disturbs both sides alike. Beside the ratio of wall times
stands that of processor times, which on the CPU depends less on what else runs there.

Text and codes are synthetic: Zipf-distributed pieces, and codes whose mean length is that measured on real text. The
recipe's auxiliary model and dictionary are random, as neither changes the cost of a fixed number of FISTA steps.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import resource
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from fairseq import options
from fairseq.criterions import FairseqCriterion
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks import setup_task
from fairseq.trainer import Trainer
from torch import Tensor

import mlsm_plugin  # noqa: F401  (registers tasks, criterions and models)
from mlsm_plugin.atomic_files import sha256_of_files
from mlsm_plugin.criterions.latent_semantic_kl import LatentSemanticKlCriterion
from mlsm_plugin.sparse_coding.code_store import CodeStoreWriter
from mlsm_plugin.tokenization.mmap_builder import StreamingMMapBuilder

SIZES = ("tiny", "small", "medium", "base", "large")
EOS = 2  # as in every fairseq dictionary
SPECIAL_SYMBOLS = 4
TOKENS_PER_SHARD = 1 << 17
ATOM_SHIFTS = 8  # the codes of a piece differ between its occurrences
LAMBDA = 0.05  # of the published recipe

MLSM_FLAGS = ("--task", "masked_latent_semantic", "--criterion", "latent_semantic_kl")
STOCK_FLAGS = ("--task", "masked_lm", "--criterion", "masked_lm")


def write_text(prefix: Path, args: argparse.Namespace, rng: np.random.Generator) -> np.ndarray:
    """Write ``dict.txt`` and a binarized split of sentences of Zipf-distributed pieces; returns its ids."""
    pieces = "".join(f"piece{rank} 1\n" for rank in range(args.vocab))
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


def write_codes(prefix: Path, ids: np.ndarray, args: argparse.Namespace, rng: np.random.Generator) -> None:
    """Write the code store of a split: codes that depend on the piece, and an empty one for end of sentence."""
    first_atom = rng.integers(args.atoms, size=SPECIAL_SYMBOLS + args.vocab)
    scattered = rng.permutation(args.atoms)
    boundaries = [*range(0, len(ids), TOKENS_PER_SHARD), len(ids)]
    fingerprints = {"split": sha256_of_files(f"{prefix}.idx", f"{prefix}.bin"), "dictionary": "synthetic"}
    meta = {"n_atoms": args.atoms, "fingerprints": fingerprints}
    writer = CodeStoreWriter(f"{prefix}.codes", meta, boundaries)
    for shard, start, stop in writer.missing_shards():
        pieces = ids[start:stop]
        lengths = rng.gamma(8.0, args.nonzeros / 8.0, size=len(pieces)).round().clip(1, args.atoms).astype(np.int64)
        lengths[pieces == EOS] = 0
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        places = np.arange(indptr[-1]) - np.repeat(indptr[:-1], lengths)  # of each non-zero in its row
        first = first_atom[pieces] + rng.integers(ATOM_SHIFTS, size=len(pieces))
        atoms = scattered[(np.repeat(first, lengths) + places) % args.atoms]
        weights = rng.random(len(places), dtype=np.float32) + 0.01
        writer.write_shard(shard, sp.csr_matrix((weights, atoms, indptr), shape=(len(pieces), args.atoms)))
    writer.finish()


@torch.no_grad()
def fista(x: Tensor, dictionary: Tensor, *, lipschitz: Tensor, steps: int) -> Tensor:
    """``argmin over a >= 0 of 0.5 * ||x - a D||^2 + LAMBDA * sum(a)``, approximately: a fixed number of steps.

    Args:
        x: ``(n, dim)``.
        dictionary: ``(n_atoms, dim)``.
        lipschitz: largest eigenvalue of ``D D^T``.
        steps: of FISTA (Beck and Teboulle, 2009).

    Returns:
        ``(n, n_atoms)``.
    """
    a = x.new_zeros(len(x), len(dictionary))
    y, t = a, 1.0
    for _ in range(steps):
        gradient = (y @ dictionary - x) @ dictionary.T
        following = (y - (gradient + LAMBDA) / lipschitz).clamp_(min=0.0)
        t_following = (1.0 + (1.0 + 4.0 * t * t) ** 0.5) / 2.0
        y = following + (t - 1.0) / t_following * (following - a)
        a, t = following, t_following
    return a


class OnlineCodes:
    """Codes of the masked tokens of a batch, computed on the spot.

    Args:
        auxiliary: a RoBERTa-like model.
        dictionary: ``(n_atoms, dim)``, unit rows.
        steps: of FISTA.
    """

    def __init__(self, auxiliary: Any, dictionary: Tensor, steps: int) -> None:
        self.auxiliary = auxiliary.eval()
        self.dictionary = dictionary
        self.steps = steps
        self.lipschitz = torch.linalg.eigvalsh(dictionary.T @ dictionary)[-1]

    @torch.no_grad()
    def __call__(self, unmasked: Tensor, masked: Tensor) -> Tensor:
        """``(n_masked, n_atoms)`` from ids ``(B, T)`` and the mask ``(B, T)``."""
        hidden = self.auxiliary(unmasked, features_only=True)[0][masked]
        x = F.normalize(hidden.float(), dim=1)
        return fista(x, self.dictionary, lipschitz=self.lipschitz, steps=self.steps)


class PublishedRecipeCriterion(FairseqCriterion):
    """KL divergence from codes that are computed at every update."""

    def __init__(self, task: Any, online_codes: OnlineCodes) -> None:
        super().__init__(task)
        self.online_codes = online_codes

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, Any, dict[str, Any]]:
        """Loss summed over tokens, sample size, logging output."""
        target, net_input = sample["target"], sample["net_input"]
        masked = target.ne(self.padding_idx)
        codes = self.online_codes(torch.where(masked, target, net_input["src_tokens"]), masked)
        total = codes.sum(dim=1, keepdim=True)
        coded = total.squeeze(1) > 0
        _, extra = model(**net_input, masked_tokens=masked, project_tokens=False, project_atoms=True)
        log_probabilities = F.log_softmax(extra["atom_logits"].float(), dim=1)
        loss = F.kl_div(log_probabilities[coded], (codes / total)[coded], reduction="sum")
        sample_size = coded.sum()
        logging_output = {
            "loss": loss.detach(),
            "latent_loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": sample_size,
            "num_masked": masked.sum(),
            "num_coded": sample_size,
            "num_nonzeros": codes.gt(0).sum(),
        }
        return loss + extra["unused_parameters"], sample_size, logging_output

    reduce_metrics = staticmethod(LatentSemanticKlCriterion.reduce_metrics)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


@dataclass
class Training:
    """One training and what was measured of it."""

    name: str
    trainer: Trainer
    dataset: Any
    target: float | None = None
    """Highest ratio of its step to that of ``masked_lm``."""
    every: int = 1
    """It takes part in each so-manieth round."""
    rounds: list[int] = field(default_factory=list)
    """Numbers of the counted rounds that it took part in."""
    losses: list[float] = field(default_factory=list)
    """Of all steps, in bits."""
    data: list[float] = field(default_factory=list)
    """Seconds of the collation, look-up of codes included, in the counted steps."""
    update: list[float] = field(default_factory=list)
    """Seconds of the rest of the counted steps: forward, backward, Adam."""
    cpu: list[float] = field(default_factory=list)
    """Processor seconds of the counted steps, over all threads."""

    def step(self, batch: np.ndarray, counted_round: int) -> None:
        """Take one step on the samples ``batch``; a negative round is not counted."""
        _synchronize()
        cpu_begin, begin = time.process_time(), time.perf_counter()
        sample = self.dataset.collater([self.dataset[index] for index in batch])
        collated = time.perf_counter()
        log = self.trainer.train_step([sample])
        _synchronize()
        end, cpu_end = time.perf_counter(), time.process_time()
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
        """Of each counted step."""
        return np.add(self.data, self.update)

    def ratios(self, stock: Training) -> tuple[np.ndarray, np.ndarray]:
        """Wall time and processor time of each counted step, relative to that of ``stock`` in the same round."""
        return self.seconds / stock.seconds[self.rounds], np.array(self.cpu) / np.take(stock.cpu, self.rounds)


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def configuration(data_bin: Path, args: argparse.Namespace, flags: tuple[str, ...], size: str) -> Any:
    """What ``fairseq-train`` makes of a command line."""
    command = [
        *(str(data_bin), "--arch", f"mlsm_roberta_{size}", *flags),
        *("--sample-break-mode", "none", "--tokens-per-sample", str(args.block), "--batch-size", str(args.batch_size)),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--adam-eps", "1e-6", "--weight-decay", "0.01"),
        *("--lr", "5e-4", "--clip-norm", "1.0", "--dropout", "0.1", "--attention-dropout", "0.1"),
        *("--seed", str(args.seed), "--no-save", "--save-dir", str(data_bin)),
        *(("--cpu",) if args.device == "cpu" else ()),
    ]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), command))


def build_training(
    name: str,
    data_bin: Path,
    args: argparse.Namespace,
    flags: tuple[str, ...],
    *,
    target: float | None = None,
    every: int = 1,
    online: bool = False,
) -> Training:
    """Task, data, model, criterion and trainer, as ``fairseq-train`` builds them."""
    cfg = configuration(data_bin, args, flags, args.size)
    task = setup_task(cfg.task)
    task.load_dataset("train")
    torch.manual_seed(args.seed)
    model = task.build_model(cfg.model)
    criterion = task.build_criterion(cfg.criterion)
    if online:
        auxiliary = task.build_model(configuration(data_bin, args, STOCK_FLAGS, args.auxiliary_size).model)
        dim = auxiliary.encoder.sentence_encoder.embed_tokens.embedding_dim
        dictionary = F.normalize(torch.randn(args.atoms, dim), dim=1)
        codes = OnlineCodes(auxiliary.to(args.device), dictionary.to(args.device), args.fista_steps)
        criterion = PublishedRecipeCriterion(task, codes)
    dataset = task.dataset("train")
    dataset.set_epoch(1)
    return Training(name, Trainer(cfg, task, model, criterion), dataset, target, every)


def build_trainings(data_bin: Path, args: argparse.Namespace) -> list[Training]:
    """The four trainings; the first is what the others are compared with."""
    latent_head = ("--num-atoms", str(args.atoms))
    return [
        build_training("masked_lm", data_bin, args, STOCK_FLAGS),
        build_training("mlsm", data_bin, args, MLSM_FLAGS, target=1.0),
        build_training("mlsm + mlm", data_bin, args, (*MLSM_FLAGS, "--mlm-weight", "1"), target=1.12),
        build_training("recipe", data_bin, args, (*STOCK_FLAGS, *latent_head), every=args.recipe_every, online=True),
    ]


def run_rounds(trainings: list[Training], args: argparse.Namespace, rng: np.random.Generator) -> None:
    """Let the trainings take one step a round, on the same batch."""
    samples = rng.permutation(len(trainings[0].dataset))
    for round_ in range(-args.warmup, args.rounds):
        batch = np.take(samples, np.arange(args.batch_size) + round_ * args.batch_size, mode="wrap")
        first = round_ % len(trainings)
        for training in trainings[first:] + trainings[:first]:
            if round_ % training.every == 0 or round_ == -1:
                training.step(batch, counted_round=round_)


def table(trainings: list[Training]) -> str:
    """Medians in milliseconds, ratios to the first training with their quartiles, and losses."""
    stock = trainings[0]
    lines = [
        f"{'':<12}{'step':>9}{'data':>8}{'update':>9}{'ratio to':>11}{'quartiles':>14}{'CPU':>8}"
        f"  {'target':<15}loss (bits)",
        f"{'':<12}{'ms':>9}{'ms':>8}{'ms':>9}{'masked_lm':>11}{'':>14}{'ratio':>8}  {'':<15}first -> last",
    ]
    for training in trainings:
        ratios, cpu_ratios = training.ratios(stock)
        low, ratio, high = np.percentile(ratios, [25, 50, 75])
        step, data, update = (1e3 * np.median(x) for x in (training.seconds, training.data, training.update))
        verdict = ""
        if training.target is not None:
            verdict = f"<= {training.target:.2f} {'met' if ratio <= training.target else 'missed'}"
        lines.append(
            f"{training.name:<12}{step:>9.1f}{data:>8.1f}{update:>9.1f}{ratio:>11.3f}{f'{low:.3f}-{high:.3f}':>14}"
            f"{np.median(cpu_ratios):>8.3f}  {verdict:<15}{training.losses[0]:.3f} -> {training.losses[-1]:.3f}"
        )
    return "\n".join(lines)


def peak_memory() -> str:
    """Of the whole process, all trainings together."""
    unit = 1 if sys.platform == "darwin" else 1024
    text = f"peak resident memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.2f} GB"
    if torch.cuda.is_initialized():
        text += f", CUDA memory reserved {torch.cuda.memory_reserved() / 1e9:.2f} GB"
    return f"{text} (all trainings together)"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small", help="mlsm_roberta_SIZE is trained (default: small)")
    parser.add_argument("--auxiliary-size", choices=SIZES, help="size of the recipe's auxiliary model (default: SIZE)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (default: cpu)")
    parser.add_argument("--rounds", type=int, default=12, help="counted steps of each training (default: 12)")
    parser.add_argument("--recipe-every", type=int, default=4, help="the recipe steps each N-th round (default: 4)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default: 2)")
    parser.add_argument("--batch-size", type=int, default=16, help="blocks a batch (default: 16)")
    parser.add_argument("--block", type=int, default=128, help="tokens a block (default: 128)")
    parser.add_argument("--vocab", type=int, default=30000, help="pieces of the vocabulary (default: 30000)")
    parser.add_argument("--atoms", type=int, default=3000, help="atoms of the dictionary (default: 3000)")
    parser.add_argument("--nonzeros", type=float, default=42.0, help="mean non-zeros of a code (default: 42)")
    parser.add_argument("--tokens", type=int, default=500_000, help="tokens of the data set (default: 500000)")
    parser.add_argument("--fista-steps", type=int, default=100, help="of the recipe, per update (default: 100)")
    parser.add_argument("--threads", type=int, help="CPU threads of torch (default: all cores)")
    parser.add_argument("--seed", type=int, default=1, help="of data, masks and parameters (default: 1)")
    args = parser.parse_args()
    args.auxiliary_size = args.auxiliary_size or args.size
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    for name in ("rounds", "recipe_every", "batch_size", "vocab", "atoms", "nonzeros", "fista_steps"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    if args.block < 2 or args.tokens < args.block or args.warmup < 0:
        parser.error("--block must be at least 2, --tokens at least --block, and --warmup not negative")
    return args


def main() -> int:
    args = parse_args()
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")  # of fairseq's and hydra's use of their own libraries
    if args.threads:
        torch.set_num_threads(args.threads)
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory(prefix="mlsm_step.") as folder:
        prefix = Path(folder) / "train"
        write_codes(prefix, write_text(prefix, args, rng), args, rng)
        trainings = build_trainings(prefix.parent, args)
        run_rounds(trainings, args, rng)
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"mlsm_roberta_{args.size}, {args.batch_size} x {args.block} tokens a step, {args.vocab} pieces, ", end="")
    print(f"{args.atoms} atoms, {args.rounds} rounds after {args.warmup}; torch {torch.__version__}, {device}")
    print(f"recipe: auxiliary model mlsm_roberta_{args.auxiliary_size}, {args.fista_steps} FISTA steps an update")
    print(table(trainings))
    print(f"{peak_memory()}; load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
