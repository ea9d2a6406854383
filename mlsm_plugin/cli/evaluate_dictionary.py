"""``mlsm evaluate-dictionary``: judge a dictionary or sparse autoencoder on a split."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlsm_plugin.cli.coder_flags import add_coder_flags, given_coder_options
from mlsm_plugin.cli.coding_options import (
    AUXILIARY_HELP,
    add_block_options,
    add_model_options,
    block_settings,
    check_positive,
)

if TYPE_CHECKING:
    from mlsm_plugin.evaluation.dictionary_quality import EvaluationSettings
    from mlsm_plugin.sparse_coding.coder import SparseCoder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.epilog = "docs/dictionaries.md explains the figures."
    parser.add_argument("dictionary", metavar="DICT_DIR", help="folder of the dictionary or sparse autoencoder")
    parser.add_argument("data_bin", metavar="DATA_BIN", help="binarized dataset")
    parser.add_argument("--auxiliary", required=True, metavar="CHECKPOINT", help=AUXILIARY_HELP)
    parser.add_argument("--split", default="valid", help="split to evaluate on; it should not be the one learned from")
    parser.add_argument(
        "--max-tokens", type=int, default=100_000, metavar="N", help="tokens to evaluate, in whole blocks"
    )
    parser.add_argument(
        "--layer", type=int, metavar="L", help="hidden state (default: the one that the dictionary was learned from)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="random seed of the blocks and of the masked tokens"
    )
    parser.add_argument("--output", metavar="JSON", help="file for the same figures as JSON")
    add_coder_flags(parser)
    learned = "what the dictionary was learned with"
    add_block_options(parser, default=learned, break_mode=f"{learned}, or else complete")
    add_model_options(parser)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Judge the reconstructions, then the loss of the masked LM, and print and write the figures."""
    from mlsm_plugin.auxiliary.coder_fit import fitting_encoder, fitting_fingerprint
    from mlsm_plugin.data.token_blocks import split_fingerprint
    from mlsm_plugin.evaluation.dictionary_quality import evaluate_reconstruction
    from mlsm_plugin.files.atomic_files import check_output_file, write_json
    from mlsm_plugin.hidden_states.block_reader import BlockReader
    from mlsm_plugin.sparse_coding.coder import load_coder

    check_positive(args, "max_tokens", "threads", "batch_tokens")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2^63, got {args.seed}")
    if args.output:
        check_output_file(args.output)
    coder = load_coder(args.dictionary, **given_coder_options(args))
    settings = _settings(args, coder)
    reader = BlockReader(args.data_bin, args.split, settings.blocks)
    fingerprint = fitting_fingerprint(args.auxiliary, coder, settings.layer)
    encoder = fitting_encoder(
        args.auxiliary,
        args.data_bin,
        coder,
        layer=settings.layer,
        tokens_per_sample=settings.blocks.tokens_per_sample,
        device=args.device,
        fp16=args.fp16,
    )
    quality, inexact = evaluate_reconstruction(reader, encoder, coder, settings)
    del encoder
    loss, why_no_loss = _loss(args, reader, coder, settings)
    record = {
        "dictionary": {"fingerprint": coder.fingerprint, "n_atoms": coder.num_atoms, **coder.settings()},
        "auxiliary_fingerprint": fingerprint,
        "layer": settings.layer,
        "fp16": args.fp16,
        "blocks": asdict(settings.blocks),
        "split": args.split,
        "split_fingerprint": split_fingerprint(f"{args.data_bin}/{args.split}"),
        "seed": args.seed,
        "inexact_codes": inexact,
        "reconstruction": quality,
        "loss": loss,
        "why_no_loss": why_no_loss,
    }
    _print(record)
    if inexact:
        print(f"mlsm: warning: {inexact} codes do not reach --tolerance; the figures are theirs", file=sys.stderr)
    if args.output:
        write_json(args.output, record)
        print(f"figures: {args.output}")
    return 0


def _settings(args: argparse.Namespace, coder: SparseCoder) -> EvaluationSettings:
    from mlsm_plugin.auxiliary.coder_fit import fitting_layer
    from mlsm_plugin.evaluation.dictionary_quality import EvaluationSettings

    return EvaluationSettings(
        layer=fitting_layer(coder, args.layer, folder=args.dictionary, option="--layer"),
        blocks=block_settings(args, args.auxiliary, coder.meta.get("blocks")),
        max_tokens=args.max_tokens,
        seed=args.seed,
        threads=args.threads,
        batch_tokens=args.batch_tokens,
    )


def _loss(
    args: argparse.Namespace, reader: Any, coder: SparseCoder, settings: EvaluationSettings
) -> tuple[dict[str, Any] | None, str | None]:
    """The figures of the loss, or None and why there are none."""
    from mlsm_plugin.evaluation.dictionary_quality import evaluate_loss
    from mlsm_plugin.evaluation.masked_batches import MASKED_SHARE
    from mlsm_plugin.hidden_states.masked_lms import NoMaskedLmError, open_masked_lm

    try:
        model = open_masked_lm(args.auxiliary, args.data_bin, device=args.device, fp16=args.fp16)
    except NoMaskedLmError as error:
        return None, str(error)
    figures = evaluate_loss(reader, model, coder, settings)
    return {**figures, "masked_share": MASKED_SHARE, "ablation": "zero"}, None


def _print(record: dict[str, Any]) -> None:
    dictionary, figures = record["dictionary"], {**record["reconstruction"], **(record["loss"] or {})}
    print(f"{dictionary['n_atoms']} atoms, layer {record['layer']}, split {record['split']}, seed {record['seed']}")
    width = max(map(len, figures))
    for name, value in figures.items():
        shown = "not defined" if value is None else f"{value:,}" if isinstance(value, int) else value
        print(f"{name:{width}}  {shown:.4f}" if isinstance(shown, float) else f"{name:{width}}  {shown}")
    if record["loss"] is None:
        print(f"no masked-LM loss: {record['why_no_loss']}")
