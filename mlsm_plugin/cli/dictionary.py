"""``mlsm dictionary``: learn the latent properties as a dictionary or an SAE."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsm_plugin.auxiliary.coder_learning import (
    BATCH_SIZES,
    CODERS,
    LASSO,
    LearningSettings,
    choose_defaults,
    learn_into,
    learning_plan,
    sae_settings,
)
from mlsm_plugin.cli.coding_options import (
    AUXILIARY_HELP,
    add_block_options,
    add_model_options,
    block_settings,
)
from mlsm_plugin.cli.next_commands import encode_command, print_next
from mlsm_plugin.cli.output_folder import output_folder

if TYPE_CHECKING:
    from mlsm_plugin.hidden_states.encoder import HiddenStateEncoder

__all__ = ["CODERS", "LASSO", "add_arguments", "add_sae_options", "choose_defaults", "run", "sae_settings"]


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
    parser.add_argument(
        "--output", type=output_folder, required=True, metavar="DICT_DIR", help="folder for the weights and meta.json"
    )
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
    lasso.add_argument(
        "--lambda", dest="lambda_", type=float, metavar="X", help="weight of the L1 penalty (default: 0.05)"
    )
    lasso.add_argument("--iterations", type=int, metavar="N", help="number of mini-batches (default: 1000)")
    lasso.add_argument(
        "--backend",
        choices=["torch", "spams"],
        help="torch: online learning with the active-set solver, on --device; spams: spams.trainDL, on the CPU "
        "(default: torch)",
    )
    sae = parser.add_argument_group("options of --coder topk and batchtopk")
    add_sae_options(sae)
    sae.add_argument("--learning-rate", type=float, metavar="F", help="largest learning rate of Adam (default: 0.003)")
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


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Learn the dictionary or SAE, measure its health, and write it."""
    from mlsm_plugin.auxiliary.coder_fit import check_positions
    from mlsm_plugin.data.token_blocks import split_fingerprint
    from mlsm_plugin.files.planned_folder import recorded_in
    from mlsm_plugin.hidden_states.block_reader import BlockReader
    from mlsm_plugin.hidden_states.sources import open_encoder, source_of

    settings = LearningSettings(**{field.name: getattr(args, field.name) for field in fields(LearningSettings)})
    output, blocks = Path(args.output), block_settings(args, args.auxiliary)
    reader = BlockReader(args.data_bin, "train", blocks)
    recorded = None if args.overwrite else recorded_in(output, "auxiliary_fingerprint")
    plan = learning_plan(
        settings,
        auxiliary=source_of(args.auxiliary).recorded_fingerprint(args.auxiliary, recorded),
        split=split_fingerprint(Path(args.data_bin) / "train"),
        blocks=blocks,
    )

    def opened() -> HiddenStateEncoder:
        encoder = open_encoder(args.auxiliary, args.data_bin, layer=args.layer, device=args.device, fp16=args.fp16)
        check_positions(encoder, blocks.tokens_per_sample)
        return encoder

    if not learn_into(output, settings, plan, reader, opened, overwrite=args.overwrite):
        print(f"nothing to do, {output} is complete")
        return 0
    print(f"dictionary: {output / 'dictionary.npy' if args.coder == LASSO else output}")
    print_next("Code the dataset with", encode_command(args.data_bin, args.auxiliary, output, args.user_dir))
    return 0
