"""``mlsm preprocess``: turn raw text into everything that MLSM training reads, in one folder."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlsm_plugin.auxiliary.coder_learning import LearningSettings
from mlsm_plugin.auxiliary.split_coder import CodingSettings
from mlsm_plugin.cli.coding_options import (
    OF_LEARNING,
    add_block_options,
    add_keep_at,
    add_texts,
    add_workers,
    block_flags,
    block_settings,
    check_positive,
    kept_percentages,
    output_folder,
    user_dir_flags,
)
from mlsm_plugin.cli.encode import encode_and_report
from mlsm_plugin.cli.next_commands import training_command
from mlsm_plugin.cli.settings_flags import Depends, add_settings, settings_of
from mlsm_plugin.files.output_lock import only_writer
from mlsm_plugin.files.step_record import Step, StepRecord
from mlsm_plugin.files.work_share import ALL_OF_IT
from mlsm_plugin.hidden_states.settings import BlockSettings, ModelRun
from mlsm_plugin.tokenization.sentencepiece_training import TokenizerSettings

TAKES_EXTRA_FLAGS = True
SPLITS = ("train", "valid", "test")
NEUTRAL = {"device", "threads", "batch_tokens"}  # how a step computes, and not what


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command; every other flag goes to the auxiliary model's fairseq-train."""
    parser.epilog = (
        "Steps whose outputs are up to date are skipped; run the same command again to resume after a stop. "
        "Every other flag is handed to fairseq-train, which trains the auxiliary model."
    )
    add_texts(parser, valid=True)
    parser.add_argument(
        "--output",
        type=output_folder,
        required=True,
        metavar="DIR",
        help="folder for tokenizer, data-bin, auxiliary, dictionary",
    )
    add_workers(parser)
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument("--tokenizer", metavar="DIR", help="use this tokenizer (or hf:PATH) instead of training one")
    names = ("vocab_size", "model_type", "lowercase", "user_symbols")
    add_settings(tokenizer, TokenizerSettings, only=names, defaults={"vocab_size": 30_000})
    auxiliary = parser.add_argument_group("auxiliary model")
    auxiliary.add_argument(
        "--auxiliary",
        metavar="CHECKPOINT",
        help="use this model, with the tokenizer in its folder, instead of training one; hf:PATH is a Hugging Face "
        "folder or hub name",
    )
    auxiliary.add_argument(
        "--auxiliary-arch",
        metavar="ARCH",
        help="architecture of the auxiliary model (default: mlsm_modern_small, or that of a run that is there)",
    )
    auxiliary.add_argument(
        "--auxiliary-updates", type=int, default=100_000, metavar="N", help="updates of the auxiliary model"
    )
    add_keep_at(auxiliary)
    dictionary = parser.add_argument_group("dictionary and codes")
    add_settings(dictionary, LearningSettings, only=("layer", *OF_LEARNING), defaults={"layer": Depends("the last")})
    add_settings(dictionary, CodingSettings, only=("coverage",))
    add_settings(parser, ModelRun)
    add_block_options(parser)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Run the steps that are not up to date; print a table of all steps and the training command."""
    if extra and args.auxiliary:
        raise ValueError(
            f"unrecognized arguments: {shlex.join(extra)} (with --auxiliary, no model is trained that could have them)"
        )
    if (args.tokenizer or args.auxiliary) and (args.user_symbols or args.lowercase):
        raise ValueError("--user-symbols and --lowercase need a tokenizer that is trained here, not one that is given")
    # check now, not hours later in the step that reads them
    check_positive(args, "auxiliary_updates")
    chain = Chain(args, extra)
    with only_writer(args.output):
        record = StepRecord(Path(args.output) / "steps.json")
        for step in chain.steps():
            record.run(step)
    command = training_command(chain.data_bin, Path(args.output) / "model", chain.blocks, args.user_dir)
    print(f"\n{record.table()}\n\nTrain with:\n\n{command}")
    return 0


class Chain:
    """The steps from raw text to codes.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(self, args: argparse.Namespace, extra: list[str]) -> None:
        self.args, self.extra, self.output = args, extra, Path(args.output)
        self.data_bin, self.dictionary = self.output / "data-bin", self.output / "dictionary"
        known = {} if args.auxiliary else {"tokens_per_sample": BlockSettings().tokens_per_sample}
        self.blocks = block_settings(args, args.auxiliary or "", known)
        self.tokenizer_settings = settings_of(TokenizerSettings, args)
        self.keep_at = kept_percentages(args)
        self.learning = settings_of(LearningSettings, args, layer=getattr(args, "layer", 0))
        self.coding = settings_of(CodingSettings, args, layer=self.learning.layer, blocks=self.blocks)
        self.texts = [Path(file) for split in SPLITS for file in getattr(args, split)]
        self.checkpoint = args.auxiliary or str(self.output / "auxiliary" / "checkpoint_best.pt")

    def steps(self) -> Iterator[Step]:
        """The steps in order; each is made when those before it are done."""
        from mlsm_plugin.hidden_states.sources import source_of
        from mlsm_plugin.tokenization.text_tokenizer import tokenizer_inputs

        args, used = self.args, []
        if args.tokenizer or args.auxiliary:
            tokenizer = args.tokenizer or source_of(args.auxiliary).tokenizer_of(args.auxiliary)
            used = tokenizer_inputs(tokenizer)
        else:
            tokenizer = str(self.output / "tokenizer")
            texts = [Path(file) for file in args.train]
            yield Step("tokenizer", self._train_tokenizer, asdict(self.tokenizer_settings), texts, [Path(tokenizer)])
        splits = {split: getattr(args, split) for split in SPLITS}
        yield Step(
            *("binarize", self._binarize(tokenizer, splits), {"tokenizer": tokenizer, **splits}),
            [*self.texts, *used], [self.data_bin],
        )  # fmt: skip
        if not args.auxiliary:
            settings = {
                "keep_at": list(self.keep_at),
                "arch": args.auxiliary_arch,
                "max_update": args.auxiliary_updates,
                "flags": self._flags(),
            }
            yield Step(
                *("auxiliary", self._pretrain, settings, [], [self.output / "auxiliary"]),
                checked=[Path(self.checkpoint)],
            )
        if not hasattr(args, "layer"):
            last = source_of(self.checkpoint).layers_of(self.checkpoint)
            self.learning, self.coding = replace(self.learning, layer=last), replace(self.coding, layer=last)
        files = source_of(self.checkpoint).files_of(self.checkpoint)
        blocks = asdict(self.blocks)
        yield Step("dictionary", self._learn, {**_deciding(self.learning), "blocks": blocks}, files, [self.dictionary])
        coded = [split for split in SPLITS if getattr(args, split)]
        yield Step(
            *("encode", lambda: self._encode(coded), {**_deciding(self.coding), "splits": coded}, files),
            [self.data_bin / f"{split}.codes" for split in coded],
        )

    def _train_tokenizer(self) -> None:
        from mlsm_plugin.tokenization.sentencepiece_training import train_tokenizer

        train_tokenizer(self.args.train, self.output / "tokenizer", self.tokenizer_settings)

    def _binarize(self, tokenizer: str, splits: dict[str, Any]) -> Callable[[], None]:
        from mlsm_plugin.tokenization.binarize import binarize

        def run() -> None:
            made = binarize(tokenizer=tokenizer, **splits, output=self.data_bin, workers=self.args.workers)
            print(made.table())

        return run

    def _flags(self) -> list[str]:
        """The flags of fairseq-train that the user chose."""
        from mlsm_plugin.auxiliary.pretraining import separate_words

        own = ["--seed", str(self.args.seed), *block_flags(self.blocks)]
        return [*own, *separate_words(self.extra), *user_dir_flags(self.args)]

    def _pretrain(self) -> None:
        from mlsm_plugin.auxiliary.pretraining import pretrain

        pretrain(
            *(self.data_bin, self.output / "auxiliary"),
            arch=self.args.auxiliary_arch, max_update=self.args.auxiliary_updates, flags=self._flags(),
            keep_at=self.keep_at,
        )  # fmt: skip

    def _learn(self) -> None:
        from mlsm_plugin.auxiliary.corpus_coding import learn_from_split

        learn_from_split(self.data_bin, self.checkpoint, self.dictionary, self.learning, self.blocks)

    def _encode(self, splits: list[str]) -> None:
        from mlsm_plugin.auxiliary.corpus_coding import encode_split
        from mlsm_plugin.sparse_coding.coder import load_coder

        coder = load_coder(self.dictionary)
        for split in splits:
            encode_and_report(
                split,
                partial(
                    encode_split, self.data_bin, split, auxiliary=self.checkpoint, coder=coder, settings=self.coding
                ),
                ALL_OF_IT,
            )


def _deciding(settings: Any) -> dict[str, Any]:
    """What decides the result of a step, as values that JSON can hold."""
    return {name: value for name, value in asdict(settings).items() if name not in NEUTRAL}
