#!/usr/bin/env python3
"""Does a masked LM copy tokens that are visible elsewhere in their block?

    python research/copying.py comparison/data-bin comparison/runs/*/checkpoint_last.pt [--split valid]

Measures the loss in bits of masked rarer tokens that are visible elsewhere in their block: (1) as they are, (2) with
these copies also masked, and (3) as a control, with as many other rarer tokens masked instead. The second minus the
third is the worth of copies to a model. Rarer tokens are all except the most frequent types that make up half of the
text.
"""

from __future__ import annotations

import argparse
import sys
from math import log
from pathlib import Path

import numpy as np
import torch
from comparison.masked_lm_loss import frequent_types
from torch import Tensor

from mlsm_plugin.cli.actions import HelpFormatter
from mlsm_plugin.evaluation.masked_batches import MaskedBatch, masked_batches, shown_chunks
from mlsm_plugin.evaluation.masked_lms import MaskedLm, open_masked_lm
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings

BATCH_TOKENS = 8192


def hide_copies(batch: MaskedBatch, frequent: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Find the repeated masked tokens, and the tokens to mask in addition.

    Args:
        batch: masked blocks.
        frequent: the types that are not counted, ``(V,)`` bool.
        generator: draws the other tokens.

    Returns:
        ``(n_masked,)`` bool, the rarer masked tokens that are visible elsewhere in their block; ``(B, T)`` bool, their
        visible copies; ``(B, T)`` bool, as many other rarer tokens of the same block, or all if there are fewer.
    """
    samples, places = batch.masked.nonzero(as_tuple=True)
    types = batch.targets[samples, places]
    same = (batch.inputs[samples] == types[:, None]) & ~frequent[types][:, None]
    copies = torch.zeros_like(batch.inputs).index_add_(0, samples, same.to(batch.inputs.dtype)) > 0
    candidates = batch.content & ~batch.masked & ~copies & ~frequent[batch.targets]
    drawn = torch.rand(candidates.shape, generator=generator).masked_fill(~candidates, 2)
    ranks = drawn.argsort(dim=1).argsort(dim=1)
    return same.any(dim=1), copies, candidates & (ranks < copies.sum(dim=1, keepdim=True))


def losses_of_repeated(model: MaskedLm, reader: BlockReader, *, seed: int) -> tuple[int, list[float]]:
    """The number of repeated masked tokens, and their mean loss in bits: as is, copies masked, others masked.

    Raises:
        ValueError: no masked token is repeated.
    """
    frequent = frequent_types(reader.dictionary)
    mask = reader.dictionary.index("<mask>")
    generator = torch.Generator().manual_seed(seed)
    sums = np.zeros(3)
    count = 0
    chunks = shown_chunks(reader, np.arange(len(reader)), batch_tokens=BATCH_TOKENS, what="copying")
    for batch in masked_batches(reader, chunks, seed=seed, batch_tokens=BATCH_TOKENS):
        repeated, copies, others = hide_copies(batch, frequent, generator)
        if repeated.any():
            for kind, hidden in enumerate((torch.zeros_like(copies), copies, others)):
                losses = model.losses(batch.inputs.masked_fill(hidden, mask), batch.masked, batch.targets)
                sums[kind] += losses[repeated].sum().item()
            count += int(repeated.sum())
    if count == 0:
        raise ValueError("no masked token of the split is visible elsewhere in its block")
    return count, list(sums / count / log(2))


def main() -> int:
    """Measure the models, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=HelpFormatter)
    parser.add_argument("data_bin", metavar="DATA_BIN", help="dataset")
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="masked LMs with its dictionary")
    parser.add_argument("--split", default="valid", help="split of the dataset")
    parser.add_argument("--tokens-per-sample", type=int, default=128, help="tokens that a model sees at once")
    parser.add_argument("--seed", type=int, default=1, help="decides which tokens are masked")
    parser.add_argument("--device", help="for instance cpu; default: the GPU if there is one")
    parser.add_argument(
        "--fp16", action="store_true", help="run the models in half precision: float16, on a CPU bfloat16"
    )
    args = parser.parse_args()
    header = ("model", "tokens", "loss", "copies masked", "others masked", "worth of copies")
    rows = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    try:
        reader = BlockReader(args.data_bin, args.split, BlockSettings(args.tokens_per_sample, "none"))
        for checkpoint in args.checkpoints:
            model = open_masked_lm(checkpoint, args.data_bin, device=args.device, fp16=args.fp16)
            count, losses = losses_of_repeated(model, reader, seed=args.seed)
            figures = " | ".join(f"{value:.2f}" for value in (*losses, losses[1] - losses[2]))
            rows.append(f"| {Path(checkpoint).parent.name or checkpoint} | {count:,} | {figures} |")
    except IndexError:  # the model has too few learned positions
        raise SystemExit(f"error: {checkpoint} takes fewer than {args.tokens_per_sample} tokens at once") from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
