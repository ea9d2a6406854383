#!/usr/bin/env python3
"""Measure a training step of MLSM, compared with fairseq's ``masked_lm`` and with the published recipe.

Four trainings run side by side in one process, on the same batches with the same masks and with encoders of the same
size; every step goes through fairseq's own ``Trainer``:

- ``masked_lm``: fairseq's task and criterion;
- ``mlsm``: task ``masked_latent_semantic``, criterion ``latent_semantic_kl``, codes from a code store;
- ``mlsm + mlm``: the same with ``--mlm-weight 1``;
- ``recipe``: no code store. At every update an auxiliary model reads the unmasked text, and 100 FISTA steps code the
  hidden states of the masked tokens (Berend, ACL Findings 2023).

A step is timed from the collation of its batch, without worker processes, to the end of the Adam update. In every
round each training takes one step (the slow recipe in every fourth), in a rotating order. A ratio is the median over
the rounds of the ratios within a round, so that a noisy machine affects both sides alike. The table also has the ratio
of processor times, which on the CPU depends less on other processes.

Text and codes are synthetic: Zipf-distributed pieces, and codes with the mean length measured on real text. The
recipe's auxiliary model and dictionary are random, since they do not change the cost of a fixed number of FISTA steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import paired_steps  # in this folder
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion
from paired_steps import (
    EOS,
    SPECIAL_SYMBOLS,
    STOCK_FLAGS,
    Training,
    add_general_options,
    check_general_options,
    configuration,
    machine_state,
    run_rounds,
    set_up_process,
    table,
    versions,
    write_text,
)
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import sha256_of_files
from mlsm_plugin.core.sparse_coding.code_store_writer import CodeStoreWriter
from mlsm_plugin.fairseq_plugin.criterions.latent_semantic_kl import LatentSemanticKlCriterion

SIZES = ("tiny", "small", "medium", "base", "large")
TOKENS_PER_SHARD = 1 << 17
ATOM_SHIFTS = 8  # the codes of a piece differ between its occurrences
LAMBDA = 0.05  # in the published recipe

MLSM_FLAGS = ("--task", "masked_latent_semantic", "--criterion", "latent_semantic_kl")


def write_codes(prefix: Path, ids: np.ndarray, args: argparse.Namespace, rng: np.random.Generator) -> None:
    """Write the code store of a split: codes that depend on the piece, and an empty code for the end of a sentence."""
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
        places = np.arange(indptr[-1]) - np.repeat(indptr[:-1], lengths)  # place of each non-zero in its row
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
        steps: number of steps of FISTA (Beck and Teboulle, 2009).

    Returns:
        ``(n, n_atoms)``.
    """
    a = x.new_zeros(len(x), len(dictionary))
    y = a
    t = 1.0
    for _ in range(steps):
        gradient = (y @ dictionary - x) @ dictionary.T
        following = (y - (gradient + LAMBDA) / lipschitz).clamp_(min=0.0)
        t_following = (1.0 + (1.0 + 4.0 * t * t) ** 0.5) / 2.0
        y = following + (t - 1.0) / t_following * (following - a)
        a = following
        t = t_following
    return a


class OnlineCodes:
    """Codes of the masked tokens of a batch, computed when they are needed.

    Args:
        auxiliary: a RoBERTa-like model.
        dictionary: ``(n_atoms, dim)``, unit rows.
        steps: number of FISTA steps.
    """

    def __init__(self, auxiliary: Any, dictionary: Tensor, steps: int) -> None:
        self.auxiliary = auxiliary.eval()
        self.dictionary = dictionary
        self.steps = steps
        self.lipschitz = torch.linalg.eigvalsh(dictionary.T @ dictionary)[-1]

    @torch.no_grad()
    def __call__(self, unmasked: Tensor, masked: Tensor) -> Tensor:
        """Codes ``(n_masked, n_atoms)`` from ids ``(B, T)`` and the mask ``(B, T)``."""
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
        target = sample["target"]
        net_input = sample["net_input"]
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
        return loss + extra["zero_with_gradient"], sample_size, logging_output

    reduce_metrics = staticmethod(LatentSemanticKlCriterion.reduce_metrics)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


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
    """A training of ``mlsm_roberta_SIZE``; with ``online``, the published recipe."""

    def recipe(task: Any) -> PublishedRecipeCriterion:
        arch = f"mlsm_roberta_{args.auxiliary_size}"
        auxiliary = task.build_model(configuration(data_bin, args, arch, STOCK_FLAGS).model)
        dim = auxiliary.encoder.sentence_encoder.embed_tokens.embedding_dim
        dictionary = F.normalize(torch.randn(args.atoms, dim), dim=1)
        codes = OnlineCodes(auxiliary.to(args.device), dictionary.to(args.device), args.fista_steps)
        return PublishedRecipeCriterion(task, codes)

    arch = f"mlsm_roberta_{args.size}"
    make_criterion = recipe if online else None
    return paired_steps.build_training(
        name, data_bin, args, arch, flags, target=target, every=every, make_criterion=make_criterion
    )


def build_trainings(data_bin: Path, args: argparse.Namespace) -> list[Training]:
    """The four trainings; the first is the baseline."""
    latent_head = ("--num-atoms", str(args.atoms))
    return [
        build_training("masked_lm", data_bin, args, STOCK_FLAGS),
        build_training("mlsm", data_bin, args, MLSM_FLAGS, target=1.0),
        build_training("mlsm + mlm", data_bin, args, (*MLSM_FLAGS, "--mlm-weight", "1"), target=1.12),
        build_training("recipe", data_bin, args, (*STOCK_FLAGS, *latent_head), every=args.recipe_every, online=True),
    ]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small", help="mlsm_roberta_SIZE is trained (default: small)")
    parser.add_argument("--auxiliary-size", choices=SIZES, help="size of the recipe's auxiliary model (default: SIZE)")
    parser.add_argument("--recipe-every", type=int, default=4, help="the recipe steps each N-th round (default: 4)")
    parser.add_argument("--atoms", type=int, default=3000, help="atoms of the dictionary (default: 3000)")
    parser.add_argument("--nonzeros", type=float, default=42.0, help="mean non-zeros of a code (default: 42)")
    parser.add_argument(
        "--fista-steps", type=int, default=100, help="FISTA steps of the recipe in an update (default: 100)"
    )
    add_general_options(parser, block=128)
    args = parser.parse_args()
    args.auxiliary_size = args.auxiliary_size or args.size
    check_general_options(parser, args, "recipe_every", "atoms", "nonzeros", "fista_steps")
    return args


def main() -> int:
    args = parse_args()
    set_up_process(args)
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory(prefix="mlsm_step.") as folder:
        prefix = Path(folder) / "train"
        write_codes(prefix, write_text(prefix, args, rng), args, rng)
        trainings = build_trainings(prefix.parent, args)
        run_rounds(trainings, args, rng)
    print(f"mlsm_roberta_{args.size}, {args.batch_size} x {args.block} tokens a step, {args.vocab} pieces, ", end="")
    print(f"{args.atoms} atoms, {args.rounds} rounds after {args.warmup}; {versions(args)}")
    print(f"recipe: auxiliary model mlsm_roberta_{args.auxiliary_size}, {args.fista_steps} FISTA steps an update")
    print(table(trainings))
    print(machine_state())
    return 0


if __name__ == "__main__":
    sys.exit(main())
