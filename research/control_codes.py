#!/usr/bin/env python3
"""Make control codes for MLSM, which lack the property that is claimed to help.

    python research/control_codes.py DATA_BIN --codes DIR --output DIR --kind exchanged [--splits train valid]
    python research/control_codes.py --dictionary DIR --output DIR --kind random-dictionary

Kinds:

- ``exchanged``: the codes are exchanged at random among all coded tokens of a split. This only keeps how often each
  atom occurs.
- ``exchanged-within-types``: the codes are exchanged among tokens of the same type (piece of the vocabulary). This
  keeps the information about the type, and removes the context.
- ``type-mean``: every token has the mean code of its type in the split ``train``, cut to its strongest atoms.
- ``random-dictionary``: a dictionary or sparse autoencoder of the same size, with random directions as atoms. ``mlsm
  encode`` codes the same hidden states with it. This only keeps the information that any directions give.

To train with the stores, use ``--latent-codes DIR``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.code_store_writer import CodeStoreWriter
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.sparse_coding.encode import normalize_rows
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SparseAutoencoder
from mlsm_plugin.core.sparse_coding.stored_codes import covered_positions
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings
from mlsm_plugin.fairseq_plugin.data.token_blocks import (
    check_codes_belong_to,
    check_is_coded,
    is_content,
    load_dictionary,
)

KINDS = ("exchanged", "exchanged-within-types", "type-mean")
RANDOM_DICTIONARY = "random-dictionary"
DEFAULT_TOP = 64
ROWS = 1 << 14  # tokens at once
# entries of a store's plan that also hold for the control
PLANNED = ("n_atoms", "lambda", "layer", "coverage", "coverage_seed", "fp16", "blocks", "fingerprints")


def types_of(data_bin: Path, split: str, store: CodeStore) -> np.ndarray:
    """The type of each token of a split, ``(n_tokens,)`` int32; -1 for special symbols and uncovered positions."""
    reader = BlockReader(data_bin, split, BlockSettings(**store.meta["blocks"]))
    types = np.full(reader.num_tokens, -1, np.int32)
    for number in Progress(range(len(reader)), desc=f"reading {split}", unit="block"):
        for block in reader.block(number):
            content = is_content(block.tokens, reader.dictionary).numpy()
            types[block.positions.numpy()[content]] = block.tokens.numpy()[content]
    coverage = store.meta.get("coverage", 1.0)
    seed = store.meta.get("coverage_seed", 0)
    types[~covered_positions(np.arange(len(types)), coverage=coverage, seed=seed)] = -1
    return types


def exchanged_sources(types: np.ndarray, rng: np.random.Generator, *, within_types: bool) -> np.ndarray:
    """For each token, the token whose code it gets: ``(n_tokens,)`` int64; -1 for tokens without a type."""
    coded = np.flatnonzero(types >= 0)
    sources = np.full(len(types), -1, np.int64)
    if within_types:
        kinds = types[coded]
        sources[coded[np.argsort(kinds, kind="stable")]] = coded[np.lexsort((rng.random(len(coded)), kinds))]
    else:
        sources[coded] = rng.permutation(coded)
    return sources


def means_of_types(store: CodeStore, types: np.ndarray, num_types: int, top: int) -> sp.csr_matrix:
    """The mean code of each type, cut to its strongest atoms: ``(num_types, n_atoms)``."""
    sums = np.zeros((num_types, store.num_atoms), np.float32)
    for start in Progress(range(0, len(types), ROWS), desc="means of types", unit="chunk"):
        chunk_types = types[start : start + ROWS]
        rows = np.flatnonzero(chunk_types >= 0)
        codes = store.rows(start, start + len(chunk_types))[rows]
        by_type = sp.csr_matrix((np.ones(len(rows)), (chunk_types[rows], np.arange(len(rows)))), (num_types, len(rows)))
        added = (by_type @ codes).tocoo()
        sums[added.row, added.col] += added.data
    if top < store.num_atoms:
        weakest = np.argpartition(sums, store.num_atoms - top, axis=1)[:, : store.num_atoms - top]
        np.put_along_axis(sums, weakest, 0, axis=1)
    return sp.csr_matrix(sums)


def rewrite(
    store: CodeStore,
    output: Path,
    changes: dict[str, Any],
    sources: np.ndarray,
    codes_at: Callable[[np.ndarray], sp.csr_matrix],
) -> None:
    """Write a code store with the plan of ``store`` and other codes; it can be resumed.

    Args:
        store: the original store.
        output: folder of the new store.
        changes: additional entries of the new plan.
        sources: a number for each token.
        codes_at: returns the codes for some of these numbers.
    """
    plan = {name: store.meta[name] for name in PLANNED if name in store.meta}
    shards = store.meta["shards"]
    writer = CodeStoreWriter(output, {**plan, **changes}, [0, *(shard["stop"] for shard in shards)])
    for index, start, stop in Progress(writer.missing_shards(), desc=str(output), unit="shard"):
        parts = [codes_at(sources[first : min(first + ROWS, stop)]) for first in range(start, stop, ROWS)]
        writer.write_shard(index, sp.vstack(parts, format="csr"))
    writer.finish()


def looked_up(store: CodeStore, positions: np.ndarray) -> sp.csr_matrix:
    """The codes at some positions, in their order; -1 gives an empty code."""
    atoms, weights = store.lookup(positions)
    filled = atoms >= 0
    ends = np.append(0, filled.sum(axis=1).cumsum())
    return sp.csr_matrix((weights[filled].astype(np.float32), atoms[filled], ends), (len(positions), store.num_atoms))


def write_controls(args: argparse.Namespace) -> None:
    """Write the stores of a control, one for each split."""
    means = train_means(args) if args.kind == "type-mean" else None
    for split in args.splits:
        codes = args.codes / f"{split}.codes"
        check_is_coded(args.data_bin / split, codes)
        store = CodeStore(codes)
        check_codes_belong_to(args.data_bin / split, store.meta, codes)
        types = types_of(args.data_bin, split, store)
        if means is None:
            rng = np.random.default_rng([args.seed, len(types)])
            sources = exchanged_sources(types, rng, within_types=args.kind != "exchanged")
            codes_at = partial(looked_up, store)
        else:
            sources = types
            codes_at = partial(of_types, means)
        changes: dict[str, Any] = {"control": args.kind, "control_seed": args.seed}
        if means is not None and args.top != DEFAULT_TOP:  # older stores have no such entry
            changes["control_top"] = args.top
        rewrite(store, args.output / f"{split}.codes", changes, sources, codes_at)
        print(f"{args.output / split}.codes: {args.kind}")


def of_types(means: sp.csr_matrix, types: np.ndarray) -> sp.csr_matrix:
    """The rows of ``means`` for some types; an empty row for -1."""
    empty = sp.csr_matrix((1, means.shape[1]), dtype=means.dtype)
    return sp.vstack([means, empty], format="csr")[np.where(types < 0, means.shape[0], types)]


def train_means(args: argparse.Namespace) -> sp.csr_matrix:
    """The mean codes of the types in the split ``train``."""
    store = CodeStore(args.codes / "train.codes")
    types = types_of(args.data_bin, "train", store)
    return means_of_types(store, types, len(load_dictionary(args.data_bin)), args.top)


def write_random_dictionary(args: argparse.Namespace) -> None:
    """Write a coder of the same kind and size, with random directions."""
    coder = load_coder(args.dictionary)
    rng = np.random.default_rng(args.seed)
    atoms = normalize_rows(rng.standard_normal((coder.num_atoms, coder.dim)).astype(np.float32))
    meta = {**coder.meta, "control": RANDOM_DICTIONARY, "health": None}
    if isinstance(coder, SaeCoder):
        rows = torch.from_numpy(np.ascontiguousarray(atoms))
        weights = coder.sae.weights._replace(
            encoder=rows, decoder=rows, encoder_bias=torch.zeros_like(coder.sae.weights.encoder_bias)
        )
        SaeCoder(SparseAutoencoder(coder.sae.config, weights), meta).save(args.output)
    elif isinstance(coder, LassoCoder):
        LassoCoder(AtomDictionary(atoms, meta)).save(args.output)
    else:
        raise ValueError(f"{args.dictionary} is a coder of the kind {coder.kind}, for which there is no random one")
    print(f"{args.output}: {coder.num_atoms} random directions")


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_bin", nargs="?", type=Path, metavar="DATA_BIN", help="binarized dataset")
    parser.add_argument("--kind", required=True, choices=[*KINDS, RANDOM_DICTIONARY])
    parser.add_argument("--codes", type=Path, metavar="DIR", help="folder of the codes (default: DATA_BIN)")
    parser.add_argument("--dictionary", type=Path, metavar="DIR", help="of random-dictionary: the one to imitate")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to write to")
    parser.add_argument("--splits", nargs="+", default=["train", "valid"], metavar="SPLIT")
    parser.add_argument(
        "--top",
        type=int,
        default=DEFAULT_TOP,
        metavar="N",
        help=f"of type-mean: atoms of a code (default: {DEFAULT_TOP})",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="random seed (default: 1)")
    args = parser.parse_args()
    if args.kind == RANDOM_DICTIONARY:
        if args.dictionary is None:
            parser.error("--kind random-dictionary needs --dictionary")
    elif args.data_bin is None:
        parser.error(f"--kind {args.kind} needs DATA_BIN")
    args.codes = args.codes or args.data_bin
    return args


def main() -> int:
    """Write the control."""
    args = parse_arguments()
    os.makedirs(args.output, exist_ok=True)
    try:
        if args.kind == RANDOM_DICTIONARY:
            write_random_dictionary(args)
        else:
            write_controls(args)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
