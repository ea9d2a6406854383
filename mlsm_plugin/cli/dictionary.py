"""``mlsm dictionary``: learn the latent properties as a dictionary or an SAE, or import a published dictionary."""

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

    from mlsm_plugin.hidden_states.block_reader import BlockReader, BlockSettings
    from mlsm_plugin.hidden_states.encoder import HiddenStateEncoder
    from mlsm_plugin.sparse_coding.lasso import LassoCoder
    from mlsm_plugin.sparse_coding.sae_coder import SaeCoder
    from mlsm_plugin.sparse_coding.sae_training import SaeSettings

# number of tokens on which the health of the dictionary is measured
HEALTH_TOKENS = 20_000
LASSO = "lasso"
CODERS = (LASSO, "topk", "batchtopk")
# options that only one kind of coder has, and the defaults of each kind
LASSO_DEFAULTS: dict[str, Any] = {"lambda_": 0.05, "iterations": 1000, "backend": "spams", "published": None}
SAE_DEFAULTS: dict[str, Any] = {"k": 32, "matryoshka": [], "learning_rate": 3e-3}
BATCH_SIZES = {LASSO: 400, "topk": 256, "batchtopk": 256}
OPTION_NAMES = {"lambda_": "--lambda", "published": "--import", "learning_rate": "--learning-rate"}


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
    parser.add_argument("--output", required=True, metavar="DICT_DIR", help="folder for the weights and meta.json")
    parser.add_argument(
        "--coder",
        default=LASSO,
        choices=CODERS,
        help="lasso: a dictionary for exact sparse codes; topk, batchtopk: a sparse autoencoder (docs/dictionaries.md)",
    )
    parser.add_argument("--atoms", type=int, default=3000, metavar="N", help="number of latent properties to learn")
    parser.add_argument(
        "--tokens",
        type=int,
        default=1_000_000,
        metavar="N",
        help="number of hidden states to learn from; those of an SAE are not kept, and may be read several times",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help=f"hidden states in a mini-batch (default: {BATCH_SIZES[LASSO]}; of an SAE: {BATCH_SIZES['topk']})",
    )
    lasso = parser.add_argument_group("options of --coder lasso")
    lasso.add_argument("--lambda", dest="lambda_", type=float, help="weight of the L1 penalty (default: 0.05)")
    lasso.add_argument("--iterations", type=int, metavar="N", help="number of mini-batches (default: 1000)")
    lasso.add_argument(
        "--backend",
        choices=["spams", "torch"],
        help="spams (default): spams.trainDL, on the CPU; torch: online learning with the active-set solver, on "
        "--device",
    )
    lasso.add_argument(
        "--import",
        dest="published",
        metavar="NPY",
        help="import a published dictionary of shape (dim, n_atoms) instead of learning one",
    )
    sae = parser.add_argument_group("options of --coder topk and batchtopk")
    add_sae_options(sae)
    sae.add_argument("--learning-rate", type=float, metavar="F", help="largest learning rate of Adam (default: 0.003)")
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
    parser.add_argument("--overwrite", action="store_true", help="replace a dictionary that is already there")
    add_block_options(parser)
    add_model_options(parser)


def add_sae_options(group: Any) -> None:
    """Add the options of an SAE that `mlsm preprocess` has, too."""
    group.add_argument(
        "--k", type=int, metavar="K", help="active latents of a token, on average with batchtopk (default: 32)"
    )
    group.add_argument(
        "--matryoshka",
        type=int,
        nargs="+",
        metavar="M",
        help="sizes of prefixes, ascending; the first M latents of each also have to reconstruct alone",
    )


def choose_defaults(args: argparse.Namespace) -> None:
    """Set the options that were not given to the defaults of the kind of coder.

    Raises:
        ValueError: an option belongs to the other kind.
    """
    own, other = (LASSO_DEFAULTS, SAE_DEFAULTS) if args.coder == LASSO else (SAE_DEFAULTS, LASSO_DEFAULTS)
    for name in other:
        if getattr(args, name, None) is not None:
            owner = " or ".join(coder for coder in CODERS if (coder == LASSO) != (args.coder == LASSO))
            option = OPTION_NAMES.get(name, f"--{name}")
            raise ValueError(f"{option} does not go with --coder {args.coder}; leave it out, or pass --coder {owner}")
    for name, default in {**own, "batch_size": BATCH_SIZES[args.coder]}.items():
        if getattr(args, name, None) is None:
            setattr(args, name, default)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Learn or import the dictionary or SAE, measure its health, and write it."""
    from mlsm_plugin.files.output_lock import only_writer
    from mlsm_plugin.hidden_states.block_reader import BlockReader

    check_positive(args, "atoms", "lambda_", "tokens", "iterations", "batch_size", "threads", "pruning_threshold")
    check_positive(args, "batch_tokens", "k", "learning_rate")
    choose_defaults(args)
    if args.coder != LASSO:
        sae_settings(args)  # raises if a value is out of range
    if args.seed < 0:
        raise ValueError(f"--seed must not be negative, got {args.seed}")
    output, blocks = Path(args.output), block_settings(args, args.auxiliary)
    reader = BlockReader(args.data_bin, "train", blocks)
    plan = _planned(args, blocks)
    with only_writer(output):
        if not args.overwrite and _is_complete(output, plan):
            print(f"nothing to do, {output} is complete")
            return 0
        _write(args, plan, reader)
    print(f"dictionary: {output / 'dictionary.npy' if args.coder == LASSO else output}")
    print_next("Code the dataset with", encode_command(args.data_bin, args.auxiliary, output, args.user_dir))
    return 0


def _write(args: argparse.Namespace, plan: dict[str, Any], reader: BlockReader) -> None:
    """Learn or import the coder, judge it, and write it with its health."""
    from mlsm_plugin.auxiliary.coder_fit import check_positions
    from mlsm_plugin.auxiliary.sae_learning import CHECKPOINT_FILE
    from mlsm_plugin.hidden_states.sources import open_encoder
    from mlsm_plugin.sparse_coding.dictionary import coder_health

    encoder = open_encoder(args.auxiliary, args.data_bin, layer=args.layer, device=args.device, fp16=args.fp16)
    check_positions(encoder, reader.settings.tokens_per_sample)
    learn = _lasso if args.coder == LASSO else _sae
    coder, judged = learn(args, plan, reader, encoder)
    health = coder_health(judged, coder, threads=args.threads)
    if health.unused_atoms == coder.num_atoms:
        raise ValueError(f"no hidden state uses any atom, so nothing is written: {coder.why_empty(judged)}")
    coder.meta["health"] = health.as_dict()
    coder.save(args.output)
    (Path(args.output) / CHECKPOINT_FILE).unlink(missing_ok=True)
    print(health)


def _lasso(
    args: argparse.Namespace, plan: dict[str, Any], reader: BlockReader, encoder: HiddenStateEncoder
) -> tuple[LassoCoder, np.ndarray]:
    """The learned or imported dictionary, and hidden states to judge it on."""
    from mlsm_plugin.hidden_states.samples import sample_hidden_states
    from mlsm_plugin.sparse_coding.dictionary import Dictionary, import_published, learn_dictionary
    from mlsm_plugin.sparse_coding.lasso import LassoCoder
    from mlsm_plugin.version import __version__

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
    return LassoCoder(Dictionary(atoms, meta)), _judged(sample)


def sae_settings(args: argparse.Namespace) -> SaeSettings:
    """What the options of an SAE ask for.

    Raises:
        ValueError: a value is out of range.
    """
    from mlsm_plugin.sparse_coding.sae_training import SaeSettings

    return SaeSettings(
        num_atoms=args.atoms,
        k=args.k,
        updates=max(1, args.tokens // args.batch_size),
        method=args.coder,
        prefixes=tuple(args.matryoshka),
        rate=args.learning_rate,
        seed=args.seed,
    )


def _sae(
    args: argparse.Namespace, plan: dict[str, Any], reader: BlockReader, encoder: HiddenStateEncoder
) -> tuple[SaeCoder, np.ndarray]:
    """A trained SAE, whose training may have been resumed, and hidden states to judge it on."""
    from mlsm_plugin.auxiliary.sae_learning import learn_sae
    from mlsm_plugin.hidden_states.stream import HiddenStateStream
    from mlsm_plugin.sparse_coding.encode import normalize_rows
    from mlsm_plugin.sparse_coding.sae_coder import SaeCoder, torch_threads
    from mlsm_plugin.version import __version__

    stream = HiddenStateStream(
        reader,
        encoder,
        batch_size=args.batch_size,
        max_batch_tokens=args.batch_tokens,
        frequency_pruning=args.frequency_pruning,
        pruning_threshold=args.pruning_threshold,
        seed=args.seed,
    )
    print(f"learning {args.atoms} latents from {args.tokens} hidden states", flush=True)
    start = time.perf_counter()
    with torch_threads(args.threads):
        sae = learn_sae(stream, sae_settings(args), output=Path(args.output), plan=plan, overwrite=args.overwrite)
        print(f"learned in {time.perf_counter() - start:.1f} s")
        judged = normalize_rows(stream.sample(HEALTH_TOKENS).cpu().numpy())
    meta = {**plan, "threads": args.threads or os.cpu_count(), "mlsm_plugin": __version__}
    return SaeCoder(sae.to("cpu"), meta), judged


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
        **({"lambda": args.lambda_} if args.coder == LASSO else {}),
        "auxiliary_fingerprint": source_of(args.auxiliary).recorded_fingerprint(args.auxiliary, recorded),
        "blocks": asdict(blocks),
        "fp16": args.fp16,
    }
    if args.coder == LASSO and args.published:
        return {**plan, "imported_fingerprint": sha256_of_files(args.published)}
    names = ["batch_size", "frequency_pruning", "pruning_threshold", "seed", "batch_tokens"]
    if args.coder == LASSO:
        names = ["iterations", *names]
        method = {"spams": "spams.trainDL", "torch": "online"}[args.backend]
    else:
        names = ["k", "matryoshka", "learning_rate", "tokens", *names]
        method = args.coder
    plan |= {"n_atoms": args.atoms, "method": method}
    plan |= {name: getattr(args, name) for name in names}
    plan |= {"threads": args.threads} if args.threads else {}
    return {**plan, "split_fingerprint": split_fingerprint(Path(args.data_bin) / "train")}


def _is_complete(output: Path, plan: dict[str, Any]) -> bool:
    """Whether ``output`` holds this very dictionary; ValueError where it holds another one."""
    from mlsm_plugin.files.planned_folder import PlannedFolder, Standing
    from mlsm_plugin.sparse_coding.coder import load_coder

    advice = "Pass --overwrite to replace it, or choose another --output"
    folder = PlannedFolder(output, plan, plan_file=None, advice=advice)
    if folder.standing() is not Standing.COMPLETE:
        folder.check()
        return False
    load_coder(output)
    return True
