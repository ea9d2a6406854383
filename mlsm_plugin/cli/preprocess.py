"""``mlsm preprocess``: turn raw text into everything that MLSM training reads, in one folder."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlsm_plugin.cli.coding_options import (
    add_block_options,
    add_model_options,
    block_flags,
    block_settings,
    check_coverage,
    check_positive,
    user_dir_flags,
)
from mlsm_plugin.cli.dictionary import CODERS, LASSO, add_sae_options, choose_defaults, sae_settings
from mlsm_plugin.cli.next_commands import chained, training_command
from mlsm_plugin.cli.output_folder import output_folder
from mlsm_plugin.files.output_lock import only_writer
from mlsm_plugin.files.step_record import Step, StepRecord

TAKES_EXTRA_FLAGS = True
SPLITS = ("train", "valid", "test")
# blocks of an auxiliary model that is trained here
DEFAULT_BLOCKS = {"tokens_per_sample": 512}

if TYPE_CHECKING:
    from mlsm_plugin.hidden_states.block_reader import BlockSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command; every other flag goes to the auxiliary model's fairseq-train."""
    parser.epilog = (
        "Steps whose outputs are up to date are skipped; run the same command again to resume after a stop. "
        "Every other flag is handed to fairseq-train, which trains the auxiliary model."
    )
    parser.add_argument("--train", nargs="+", required=True, metavar="FILE", help="training text, plain or compressed")
    parser.add_argument("--valid", nargs="+", required=True, metavar="FILE", help="validation text")
    parser.add_argument("--test", nargs="+", default=[], metavar="FILE", help="test text")
    parser.add_argument(
        "--output",
        type=output_folder,
        required=True,
        metavar="DIR",
        help="folder for tokenizer, data-bin, auxiliary, dictionary",
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="number of processes that binarize")
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument("--tokenizer", metavar="DIR", help="use this tokenizer (or hf:PATH) instead of training one")
    tokenizer.add_argument("--vocab-size", type=int, default=30_000, metavar="N", help="number of pieces")
    tokenizer.add_argument(
        "--model-type", default="unigram", choices=["unigram", "bpe"], help="type of the SentencePiece model"
    )
    tokenizer.add_argument("--lowercase", action="store_true", help="lower-case all text")
    tokenizer.add_argument(
        "--user-symbols",
        nargs="+",
        default=[],
        metavar="SYMBOL",
        help="pieces that are never cut, such as [url]",
    )
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
    auxiliary.add_argument("--layer", type=int, metavar="L", help="hidden state to code (default: the last)")
    dictionary = parser.add_argument_group("dictionary and codes")
    dictionary.add_argument("--atoms", type=int, default=3000, metavar="N", help="number of latent properties")
    dictionary.add_argument("--coder", default=LASSO, choices=CODERS, help="kind of coder, as in `mlsm dictionary`")
    dictionary.add_argument(
        "--lambda", dest="lambda_", type=float, metavar="X", help="lasso: weight of the L1 penalty (default: 0.05)"
    )
    dictionary.add_argument("--tokens", type=int, default=1_000_000, metavar="N", help="hidden states to learn from")
    dictionary.add_argument("--iterations", type=int, metavar="N", help="lasso: number of mini-batches (default: 1000)")
    add_sae_options(dictionary)
    dictionary.add_argument(
        "--coverage",
        type=float,
        default=1.0,
        metavar="C",
        help="share of the positions to code; training masks only coded positions (default: 1)",
    )
    dictionary.add_argument(
        "--seed", type=int, default=1, metavar="N", help="random seed of the auxiliary model and the dictionary"
    )
    add_block_options(parser)
    add_model_options(parser)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Run the steps that are not up to date; print a table of all steps and the training command."""
    if extra and args.auxiliary:
        raise ValueError(
            f"unrecognized arguments: {shlex.join(extra)} (with --auxiliary, no model is trained that could have them)"
        )
    if (args.tokenizer or args.auxiliary) and (args.user_symbols or args.lowercase):
        raise ValueError("--user-symbols and --lowercase need a tokenizer that is trained here, not one that is given")
    # check now, not hours later in the step that reads them
    check_positive(args, "auxiliary_updates", "atoms", "lambda_", "tokens", "iterations", "batch_tokens", "threads")
    check_positive(args, "k")
    check_coverage(args.coverage)
    choose_defaults(args)
    if args.coder != LASSO:
        sae_settings(args)  # raises if a value is out of range
    blocks = block_settings(args, args.auxiliary) if args.auxiliary else block_settings(args, "", {**DEFAULT_BLOCKS})
    with only_writer(args.output):
        return _run_steps(args, extra, blocks)


def _run_steps(args: argparse.Namespace, extra: list[str], blocks: BlockSettings) -> int:
    from mlsm_plugin.cli.main import main
    from mlsm_plugin.hidden_states.sources import source_of

    output = Path(args.output)
    record = StepRecord(output / "steps.json")

    def run_command(command: Sequence[str]) -> int:
        print(f"\n$ mlsm {shlex.join(command)}", flush=True)
        with chained():
            return main(list(command))

    for step in _steps_until_auxiliary(args, extra, output, blocks):
        if record.run(step, run_command) != 0:
            return 1
    checkpoint = _auxiliary_checkpoint(args, output)
    layer = args.layer if args.layer is not None else source_of(checkpoint).layers_of(checkpoint)
    for step in _coding_steps(args, output, checkpoint, layer, blocks):
        if record.run(step, run_command) != 0:
            return 1
    command = training_command(output / "data-bin", output / "model", blocks, args.user_dir)
    print(f"\n{record.table()}\n\nTrain with:\n\n{command}")
    return 0


def _texts(args: argparse.Namespace) -> list[Path]:
    return [Path(file) for split in SPLITS for file in getattr(args, split)]


def _auxiliary_checkpoint(args: argparse.Namespace, output: Path) -> str:
    return args.auxiliary or str(output / "auxiliary" / "checkpoint_best.pt")


def _steps_until_auxiliary(
    args: argparse.Namespace, extra: list[str], output: Path, blocks: BlockSettings
) -> list[Step]:
    from mlsm_plugin.hidden_states.sources import source_of
    from mlsm_plugin.tokenization.text_tokenizer import tokenizer_inputs

    steps = []
    if args.tokenizer or args.auxiliary:
        tokenizer = args.tokenizer or source_of(args.auxiliary).tokenizer_of(args.auxiliary)
    else:
        tokenizer = str(output / "tokenizer")
        options = ["--vocab-size", str(args.vocab_size), "--model-type", args.model_type]
        options += ["--lowercase"] if args.lowercase else []
        options += ["--user-symbols", *args.user_symbols] if args.user_symbols else []
        command = ["tokenizer", "--input", *args.train, *options, "--output", tokenizer]
        steps.append(Step("tokenizer", command, [Path(file) for file in args.train], [Path(tokenizer)]))
    data_bin = output / "data-bin"
    command = ["binarize", "--tokenizer", tokenizer, "--output", str(data_bin), "--workers", str(args.workers)]
    for split in SPLITS:
        command += [f"--{split}", *getattr(args, split)] if getattr(args, split) else []
    used = tokenizer_inputs(tokenizer) if args.tokenizer or args.auxiliary else []
    steps.append(Step("binarize", command, [*_texts(args), *used], [data_bin]))
    if not args.auxiliary:
        save_dir = output / "auxiliary"
        command = ["auxiliary", str(data_bin), "--save-dir", str(save_dir)]
        command += ["--arch", args.auxiliary_arch] if args.auxiliary_arch else []
        command += [
            "--max-update",
            str(args.auxiliary_updates),
            "--seed",
            str(args.seed),
            *block_flags(blocks),
            *extra,
            *user_dir_flags(args),
        ]
        checked = [Path(_auxiliary_checkpoint(args, output))]
        steps.append(Step("auxiliary", command, [], [save_dir], checked=checked))
    return steps


def _coding_steps(
    args: argparse.Namespace, output: Path, checkpoint: str, layer: int, blocks: BlockSettings
) -> list[Step]:
    from mlsm_plugin.hidden_states.sources import source_of

    data_bin, dictionary = output / "data-bin", output / "dictionary"
    model_flags = [
        "--auxiliary",
        checkpoint,
        *block_flags(blocks),
        *user_dir_flags(args),
        "--batch-tokens",
        str(args.batch_tokens),
    ]
    model_flags += ["--device", args.device] if args.device else []
    model_flags += ["--threads", str(args.threads)] if args.threads else []
    model_flags += ["--fp16"] if args.fp16 else []
    model_flags += user_dir_flags(args)
    learn = ["dictionary", str(data_bin), "--layer", str(layer), "--output", str(dictionary), *model_flags]
    if args.coder == LASSO:
        learn += ["--atoms", str(args.atoms), "--lambda", str(args.lambda_), "--tokens", str(args.tokens)]
        learn += ["--iterations", str(args.iterations), "--seed", str(args.seed)]
    else:
        learn += ["--coder", args.coder, "--atoms", str(args.atoms), "--k", str(args.k), "--tokens", str(args.tokens)]
        learn += ["--matryoshka", *map(str, args.matryoshka)] if args.matryoshka else []
        learn += ["--seed", str(args.seed)]
    splits = [split for split in SPLITS if getattr(args, split)]
    model_files = source_of(checkpoint).files_of(checkpoint)
    encode = ["encode", str(data_bin), "--dictionary", str(dictionary), *model_flags, "--splits", *splits]
    encode += ["--coverage", str(args.coverage)] if args.coverage < 1 else []
    return [
        Step("dictionary", learn, model_files, [dictionary]),
        Step("encode", encode, model_files, [data_bin / f"{split}.codes" for split in splits]),
    ]
