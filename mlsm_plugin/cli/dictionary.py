"""``mlsm dictionary``: learn the dictionary of latent properties, or import a published one."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsm_plugin.cli.coding_options import (
    AUXILIARY_HELP,
    add_block_options,
    add_model_options,
    block_settings,
    check_positive,
)
from mlsm_plugin.cli.next_commands import encode_command, print_next

if TYPE_CHECKING:
    import numpy as np

    from mlsm_plugin.hidden_states.block_reader import BlockSettings

# number of tokens on which the health of the dictionary is measured
HEALTH_TOKENS = 20_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("data_bin", metavar="DATA_BIN", help="binarized dataset; its train split is sampled")
    parser.add_argument("--auxiliary", required=True, metavar="CHECKPOINT", help=AUXILIARY_HELP)
    parser.add_argument(
        "--layer",
        type=int,
        required=True,
        metavar="L",
        help="hidden state: 0 is the embeddings, 1 the first layer, ...",
    )
    parser.add_argument("--output", required=True, metavar="DICT_DIR", help="folder for dictionary.npy and meta.json")
    parser.add_argument("--atoms", type=int, default=3000, metavar="N", help="number of latent properties to learn")
    parser.add_argument("--lambda", dest="lambda_", type=float, default=0.05, help="weight of the L1 penalty")
    parser.add_argument(
        "--tokens", type=int, default=1_000_000, metavar="N", help="number of hidden states to learn from"
    )
    parser.add_argument("--iterations", type=int, default=1000, metavar="N", help="number of mini-batches")
    parser.add_argument("--batch-size", type=int, default=400, metavar="N", help="hidden states in a mini-batch")
    parser.add_argument(
        "--backend",
        default="spams",
        choices=["spams", "torch"],
        help="spams: spams.trainDL, on the CPU; torch: online learning with the active-set solver, on --device",
    )
    parser.add_argument(
        "--frequency-pruning",
        default="none",
        choices=["none", "subsample", "drop"],
        help="subsample: keep an occurrence with word2vec's probability; drop: keep only words below the threshold",
    )
    parser.add_argument(
        "--pruning-threshold",
        type=float,
        default=1e-5,
        metavar="F",
        help="threshold of --frequency-pruning, a relative frequency",
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="random seed of the sample and the first atoms"
    )
    parser.add_argument(
        "--import",
        dest="published",
        metavar="NPY",
        help="import a published dictionary of shape (dim, n_atoms) instead of learning one",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a dictionary that is already there")
    add_block_options(parser)
    add_model_options(parser)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Learn or import the dictionary, measure its health, and write it."""
    from mlsm_plugin.auxiliary.coder_fit import check_positions
    from mlsm_plugin.files.output_lock import only_writer
    from mlsm_plugin.hidden_states.block_reader import BlockReader
    from mlsm_plugin.hidden_states.samples import sample_hidden_states
    from mlsm_plugin.hidden_states.sources import open_encoder
    from mlsm_plugin.sparse_coding.dictionary import Dictionary, dictionary_health, import_published, learn_dictionary
    from mlsm_plugin.sparse_coding.lasso import LassoCoder
    from mlsm_plugin.version import __version__

    check_positive(args, "atoms", "lambda_", "tokens", "iterations", "batch_size", "threads", "pruning_threshold")
    check_positive(args, "batch_tokens")
    if args.seed < 0:
        raise ValueError(f"--seed must not be negative, got {args.seed}")
    output, blocks = Path(args.output), block_settings(args, args.auxiliary)
    reader = BlockReader(args.data_bin, "train", blocks)
    plan = _planned(args, blocks)
    if not args.overwrite and _is_complete(output, plan):
        print(f"nothing to do, {output} is complete")
        return 0
    encoder = open_encoder(args.auxiliary, args.data_bin, layer=args.layer, device=args.device, fp16=args.fp16)
    check_positions(encoder, blocks.tokens_per_sample)
    published = import_published(args.published, encoder.dim) if args.published else None
    sample = sample_hidden_states(
        reader,
        encoder,
        num_tokens=HEALTH_TOKENS if published else args.tokens,
        max_batch_tokens=args.batch_tokens,
        frequency_pruning="none" if published else args.frequency_pruning,
        pruning_threshold=args.pruning_threshold,
        seed=args.seed,
    )
    if published is not None:
        atoms = published.atoms
        meta = {**plan, **published.meta}
    else:
        print(f"learning {args.atoms} atoms from {len(sample)} hidden states", flush=True)
        start = time.perf_counter()
        atoms = learn_dictionary(
            sample,
            num_atoms=args.atoms,
            lambda_=args.lambda_,
            iterations=args.iterations,
            batch_size=args.batch_size,
            threads=args.threads,
            seed=args.seed,
            backend=args.backend,
            device=encoder.device,
        )
        print(f"learned in {time.perf_counter() - start:.1f} s")
        # the order of the sums depends on the threads
        meta = {**plan, "tokens": len(sample), "threads": args.threads or os.cpu_count(), "mlsm_plugin": __version__}
    judged = _judged(sample)
    health = dictionary_health(judged, atoms, lambda_=args.lambda_, threads=args.threads)
    coder = LassoCoder(Dictionary(atoms, {**meta, "health": health.as_dict()}))
    if health.unused_atoms == len(atoms):
        raise ValueError(f"no hidden state uses any atom, so nothing is written: {coder.why_empty(judged)}")
    with only_writer(output):
        if not args.overwrite and _is_complete(output, plan):
            print(f"another process has made {output} meanwhile")
        else:
            coder.save(output)
    print(health)
    print(f"dictionary: {output / 'dictionary.npy'}")
    print_next("Code the dataset with", encode_command(args.data_bin, args.auxiliary, output, args.user_dir))
    return 0


def _judged(sample: np.ndarray) -> np.ndarray:
    """Rows that are spread evenly over the sample, at most about ``HEALTH_TOKENS``."""
    return sample[:: max(1, len(sample) // HEALTH_TOKENS)][:HEALTH_TOKENS]


def _planned(args: argparse.Namespace, blocks: BlockSettings) -> dict[str, Any]:
    """What decides the dictionary, as ``meta.json`` will have it."""
    from mlsm_plugin.data.token_blocks import split_fingerprint
    from mlsm_plugin.files.atomic_files import sha256_of_files
    from mlsm_plugin.files.planned_folder import recorded_in
    from mlsm_plugin.hidden_states.sources import source_of

    recorded = recorded_in(args.output, "auxiliary_fingerprint")
    plan: dict[str, Any] = {
        "layer": args.layer,
        "lambda": args.lambda_,
        "auxiliary_fingerprint": source_of(args.auxiliary).recorded_fingerprint(args.auxiliary, recorded),
        "blocks": asdict(blocks),
        "fp16": args.fp16,
    }
    if args.published:
        return {**plan, "imported_fingerprint": sha256_of_files(args.published)}
    names = ("iterations", "batch_size", "frequency_pruning", "pruning_threshold", "seed", "batch_tokens")
    plan |= {"n_atoms": args.atoms, "method": {"spams": "spams.trainDL", "torch": "online"}[args.backend]}
    plan |= {name: getattr(args, name) for name in names}
    plan |= {"threads": args.threads} if args.threads else {}
    return {**plan, "split_fingerprint": split_fingerprint(Path(args.data_bin) / "train")}


def _is_complete(output: Path, plan: dict[str, Any]) -> bool:
    """Whether ``output`` holds this very dictionary; ValueError where it holds another one."""
    from mlsm_plugin.files.planned_folder import PlannedFolder, Standing
    from mlsm_plugin.sparse_coding.dictionary import Dictionary

    advice = "Pass --overwrite to replace it, or choose another --output"
    folder = PlannedFolder(output, plan, plan_file=None, advice=advice)
    if folder.standing() is not Standing.COMPLETE:
        folder.check()
        return False
    Dictionary.load(output)
    return True
