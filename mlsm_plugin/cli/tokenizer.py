"""``mlsm tokenizer``: train a tokenizer; writes ``sentencepiece.bpe.model`` and ``dict.txt``."""

from __future__ import annotations

import argparse

from mlsm_plugin.cli.output_folder import output_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``mlsm tokenizer``."""
    from mlsm_plugin.tokenization.sentencepiece_training import DEFAULT_MAX_SENTENCES, MODEL_TYPES

    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 text, plain or .gz, .bz2, .xz, one sentence a line",
    )
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="number of SentencePiece pieces")
    parser.add_argument(
        "--output", type=output_folder, required=True, metavar="DIR", help="folder for the model and dict.txt"
    )
    parser.add_argument("--model-type", choices=MODEL_TYPES, default="unigram", help="how the pieces are learned")
    parser.add_argument("--lowercase", action="store_true", help="lower-case all text")
    parser.add_argument(
        "--character-coverage",
        type=float,
        default=0.9995,
        metavar="SHARE",
        help="share of the text's characters that get a piece; the rest becomes <unk>",
    )
    parser.add_argument(
        "--max-sentences",
        type=int,
        default=DEFAULT_MAX_SENTENCES,
        metavar="N",
        help="learn from a uniform sample of this many sentences, which bounds the memory",
    )
    parser.add_argument(
        "--user-symbols",
        nargs="+",
        default=[],
        metavar="SYMBOL",
        help="pieces that are never cut, such as [url] or @user; text without spaces, other than <...>",
    )
    parser.add_argument("--verbose", action="store_true", help="show SentencePiece's own log")


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Train the tokenizer and print its figures."""
    from mlsm_plugin.tokenization.sentencepiece_training import train_tokenizer

    figures = train_tokenizer(
        inputs=args.input,
        vocab_size=args.vocab_size,
        output=args.output,
        model_type=args.model_type,
        lowercase=args.lowercase,
        character_coverage=args.character_coverage,
        max_sentences=args.max_sentences,
        user_symbols=args.user_symbols,
        verbose=args.verbose,
    )
    print(
        f"{figures.output}: {figures.model_type} model with {figures.pieces:,} pieces "
        f"from {figures.sampled_sentences:,} of {figures.sentences:,} sentences; "
        f"fairseq dictionary of {figures.dictionary_symbols:,} symbols"
    )
    return 0
