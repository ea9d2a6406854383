"""``mlsm pretrain``: MLSM in stages from scratch, with the model's own codes."""

import argparse
from functools import partial

from mlsm_plugin.cli.coding_options import (
    OF_LEARNING,
    add_block_options,
    add_run,
    block_settings,
    check_positive,
    user_dir_flags,
)
from mlsm_plugin.cli.encode import encode_and_report
from mlsm_plugin.cli.settings_flags import Depends, add_settings, settings_of
from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.coding.settings import StageSettings
from mlsm_plugin.core.files.process_rank import SINGLE_PROCESS
from mlsm_plugin.core.hidden_states.settings import BlockSettings, ModelRun

TAKES_EXTRA_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The model first learns masked LM. Then a dictionary is learned from its own hidden states, and it predicts "
        "the codes of a frozen copy of itself, together with the masked tokens: MLSM without a second model. Every "
        "other flag is handed to fairseq-train, as in `mlsm auxiliary`. Run the same command again to resume a "
        "stopped run."
    )
    add_run(parser)
    add_settings(parser, StageSettings, without=("latent_top",))
    dictionary = parser.add_argument_group("dictionary and codes")
    defaults = {"coder": "topk", "layer": Depends("the last")}
    add_settings(dictionary, LearningSettings, only=("layer", *OF_LEARNING), defaults=defaults)
    add_settings(dictionary, StageSettings, only=("latent_top",))
    add_settings(parser, ModelRun)
    add_block_options(parser, default=str(BlockSettings().tokens_per_sample))


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Run the missing stages."""
    from mlsm_plugin.fairseq_plugin.pipelines.self_coded_pretraining import pretrain_in_stages

    check_positive(args, "max_update")
    layer = getattr(args, "layer", None)
    settings = settings_of(StageSettings, args)
    early_end = pretrain_in_stages(
        args.data_bin,
        args.save_dir,
        settings,
        settings_of(LearningSettings, args, layer=layer or 0),
        block_settings(args, "", {"tokens_per_sample": BlockSettings().tokens_per_sample}),
        layer=layer,
        arch=args.arch,
        max_update=args.max_update,
        flags=[*extra, *user_dir_flags(args)],
        coded=partial(encode_and_report, process=SINGLE_PROCESS),
    )
    print(early_end or f"all {len(settings.stages) + 1} stages are complete: {args.save_dir}/checkpoint_last.pt")
    return 0
