"""``mlsm dictionary``: learn the latent properties, as a dictionary or as a sparse autoencoder."""

import argparse
from pathlib import Path

from mlsm_plugin.cli.coding_options import add_auxiliary, add_block_options, add_data, add_output, block_settings
from mlsm_plugin.cli.next_commands import encode_command, print_next
from mlsm_plugin.cli.settings_flags import add_settings, settings_of
from mlsm_plugin.core.coding.coder_learning import LASSO, LearningSettings
from mlsm_plugin.core.files.metric_log import MetricLog


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data(parser, "binarized dataset; its train split is sampled")
    add_auxiliary(parser)
    add_output(parser, "folder for the weights and meta.json")
    add_settings(parser, LearningSettings)
    add_settings(parser, MetricLog)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing dictionary")
    add_block_options(parser)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Learn the dictionary or SAE, measure its health, and write it."""
    from mlsm_plugin.fairseq_plugin.coding.corpus_coding import learn_from_split

    output = Path(args.output)
    blocks = block_settings(args, args.auxiliary)
    settings = settings_of(LearningSettings, args, log=settings_of(MetricLog, args))
    if not learn_from_split(args.data_bin, args.auxiliary, output, settings, blocks, overwrite=args.overwrite):
        print(f"nothing to do, {output} is complete")
        return 0
    print(f"dictionary: {output / 'dictionary.npy' if args.coder == LASSO else output}")
    print_next("Code the dataset with", encode_command(args.data_bin, args.auxiliary, output, args.user_dir))
    return 0
