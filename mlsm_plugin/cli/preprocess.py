"""``mlsm preprocess``: turn raw text into everything that MLSM training reads, in one folder."""

import argparse
import shlex
from functools import partial
from pathlib import Path

from mlsm_plugin.cli.coding_options import (
    OF_LEARNING,
    add_block_options,
    add_keep_at,
    add_output,
    add_texts,
    add_workers,
    block_settings,
    kept_percentages,
    user_dir_flags,
)
from mlsm_plugin.cli.encode import encode_and_report
from mlsm_plugin.cli.next_commands import training_command
from mlsm_plugin.cli.settings_flags import Depends, add_settings, refuse_changed, settings_of
from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.coding.settings import PreprocessSettings
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.process_rank import SINGLE_PROCESS
from mlsm_plugin.core.hidden_states.settings import BlockSettings, ModelRun
from mlsm_plugin.fairseq_plugin.text.sentencepiece_training import TokenizerSettings

TAKES_EXTRA_FLAGS = True
# options of the trained tokenizer and auxiliary model, with their defaults
OF_TOKENIZER = {"vocab_size": 30_000, "model_type": "unigram", "lowercase": False, "user_symbols": []}
OF_AUXILIARY = {"auxiliary_arch": None, "auxiliary_updates": PreprocessSettings().auxiliary_updates, "keep_at": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Steps whose outputs are up to date are skipped; run the same command again to resume after a stop. "
        "Every other flag is handed to fairseq-train, which trains the auxiliary model."
    )
    add_texts(parser, valid=True)
    add_output(parser, "folder for tokenizer, data-bin, auxiliary, dictionary")
    add_workers(parser)
    tokenizer = parser.add_argument_group("tokenizer")
    add_settings(tokenizer, PreprocessSettings, only=("tokenizer",))
    add_settings(tokenizer, TokenizerSettings, only=tuple(OF_TOKENIZER), defaults=OF_TOKENIZER)
    auxiliary = parser.add_argument_group("auxiliary model")
    add_settings(auxiliary, PreprocessSettings, without=("tokenizer",))
    add_keep_at(auxiliary)
    dictionary = parser.add_argument_group("dictionary and codes")
    add_settings(dictionary, LearningSettings, only=("layer", *OF_LEARNING), defaults={"layer": Depends("the last")})
    add_settings(dictionary, CodingSettings, only=("coverage",))
    add_settings(parser, ModelRun)
    add_block_options(parser)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Run the steps that are not up to date; print a table of all steps, and the training command."""
    from mlsm_plugin.fairseq_plugin.pipelines.preprocessing import preprocess

    if extra and args.auxiliary:
        raise ValueError(
            f"unrecognized arguments: {shlex.join(extra)} (with --auxiliary, no model is trained that could use them)"
        )
    for name, options in ((args.auxiliary, OF_AUXILIARY), (args.auxiliary or args.tokenizer, OF_TOKENIZER)):
        if name:
            refuse_changed(args, options, f"only used for training, but {name} is given; leave it out")
    block_defaults = {} if args.auxiliary else {"tokens_per_sample": BlockSettings().tokens_per_sample}
    blocks = block_settings(args, args.auxiliary or "", block_defaults)
    layer = getattr(args, "layer", None)
    output = Path(args.output)
    coding = settings_of(CodingSettings, args, layer=layer or 0, blocks=blocks)
    record = preprocess(
        {"train": args.train, "valid": args.valid, "test": args.test},
        output,
        settings_of(PreprocessSettings, args),
        settings_of(TokenizerSettings, args),
        settings_of(LearningSettings, args, layer=layer or 0),
        coding,
        layer=layer,
        keep_at=kept_percentages(args),
        flags=[*extra, *user_dir_flags(args)],
        workers=args.workers,
        coded=partial(encode_and_report, process=SINGLE_PROCESS),
    )
    auxiliary = args.auxiliary or str(output / "auxiliary" / "checkpoint_best.pt")
    command = training_command(output / "data-bin", output / "model", coding, auxiliary, args.user_dir)
    print(f"\n{record.table()}\n\nTrain with:\n\n{command}")
    return 0
