"""``mlsm tokenizer``: train a tokenizer; writes ``sentencepiece.bpe.model`` and ``dict.txt``."""

import argparse

from mlsm_plugin.cli.coding_options import add_output
from mlsm_plugin.cli.settings_flags import add_settings, settings_of
from mlsm_plugin.fairseq_plugin.text.sentencepiece_training import TokenizerSettings, train_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "UTF-8 text, plain or .gz, .bz2, .xz, one sentence a line"
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help=text)
    add_output(parser, "folder to write")
    add_settings(parser, TokenizerSettings)
    parser.add_argument("--verbose", action="store_true", help="show SentencePiece's own log")


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Train the tokenizer and print its figures."""
    figures = train_tokenizer(args.input, args.output, settings_of(TokenizerSettings, args), verbose=args.verbose)
    print(
        f"{figures.output}: {figures.model_type} model with {figures.pieces:,} pieces "
        f"from {figures.sampled_sentences:,} of {figures.sentences:,} sentences; "
        f"fairseq dictionary of {figures.dictionary_symbols:,} symbols"
    )
    return 0
