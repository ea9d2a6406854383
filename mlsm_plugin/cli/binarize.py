"""``mlsm binarize``: turn raw text into a dataset of ids, for fairseq's tasks or for Hugging Face's Trainer."""

import argparse
import shlex
from pathlib import Path

from mlsm_plugin.cli.coding_options import add_output, add_texts, add_workers
from mlsm_plugin.cli.next_commands import masked_lm_command, print_next
from mlsm_plugin.cli.settings_flags import add_settings, settings_of
from mlsm_plugin.core.files.hf_files import HF_PREFIX
from mlsm_plugin.core.files.output_lock import only_writer
from mlsm_plugin.core.text.unknown_tokens import KnownText

FAIRSEQ = "fairseq"
SEQUENCES = "sequences"
SPLITS = ("train", "valid", "test")
SAVE_DIR = "masked-lm"  # of the printed training; `mlsm encode` prints another, which must not continue this model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folder that `mlsm tokenizer` wrote, or hf:PATH, a Hugging Face folder or hub name"
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help=text)
    add_texts(parser)
    add_output(parser, "folder to write")
    text = (
        "fairseq: a dataset of fairseq's tasks; sequences: a folder of token sequences for each split, for "
        "Hugging Face's Trainer, with whole lines where they fit and special tokens around each (needs hf:PATH)"
    )
    parser.add_argument("--format", default=FAIRSEQ, choices=(FAIRSEQ, SEQUENCES), help=text)
    text = "for sequences: length of the longest in ids (default: what the model can take, at most 512)"
    parser.add_argument("--max-length", type=int, metavar="N", help=text)
    add_workers(parser)
    add_settings(parser, KnownText)
    parser.add_argument("--overwrite", action="store_true", help="replace existing sequences that differ")


def needs_fairseq(args: argparse.Namespace) -> bool:
    """Whether the dataset is for fairseq."""
    return bool(args.format == FAIRSEQ)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Binarize the splits and print their statistics."""
    settings_of(KnownText, args)  # raises ValueError if --max-unk-rate is not a share
    if args.format == SEQUENCES:
        with only_writer(args.output):
            return _write_sequences(args)
    from mlsm_plugin.fairseq_plugin.text.binarize import binarize

    if args.max_length is not None:
        raise ValueError("--max-length is only for --format sequences; fairseq-train has --tokens-per-sample")
    if args.overwrite:
        raise ValueError("--overwrite is only for --format sequences; delete the dataset to make it anew")
    if not args.valid:
        raise ValueError("--valid is required: fairseq-train validates on it")
    figures = binarize(
        tokenizer=args.tokenizer,
        train=args.train,
        valid=args.valid,
        test=args.test,
        output=args.output,
        workers=args.workers,
        max_unk_rate=args.max_unk_rate,
    )
    print(figures.table())
    print(f"{figures.output}: dictionary of {figures.dictionary_symbols:,} symbols")
    print_next("Train masked LM with", masked_lm_command(args.output, SAVE_DIR, figures.splits["train"].tokens))
    return 0


def _write_sequences(args: argparse.Namespace) -> int:
    from mlsm_plugin.core.text.shared_text import warn_of_shared_files
    from mlsm_plugin.huggingface.text_sequences import write_text_sequences

    warn_of_shared_files(args.train, args.valid or [], args.test or [])
    for split in SPLITS:
        if not (texts := getattr(args, split)):
            continue
        output = Path(args.output) / split
        sequences, is_new = write_text_sequences(
            texts,
            args.tokenizer,
            output,
            max_length=args.max_length,
            max_unk_rate=args.max_unk_rate,
            overwrite=args.overwrite,
        )
        if not is_new:
            print(f"nothing to do, {output} is complete")
        print(f"{output}: {len(sequences):,} sequences, {sequences.num_tokens:,} tokens")
    model = HF_PREFIX + args.tokenizer.removeprefix(HF_PREFIX)
    print_next(
        "Code them with", shlex.join(["mlsm", "encode", args.output, "--auxiliary", model, "--dictionary", "DICT_DIR"])
    )
    return 0
