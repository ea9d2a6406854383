"""``mlsm inspect``: write an HTML report of what the latent properties mean."""

import argparse
from pathlib import Path

from mlsm_plugin.cli.coding_options import check_positive
from mlsm_plugin.core.files.output_files import check_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = (
        "binarized dataset with codes, --output of `mlsm preprocess` or `mlsm adapt`, or --save-dir of a training run"
    )
    parser.add_argument("folder", metavar="RUN_OR_DATA_BIN", help=text)
    parser.add_argument(
        "--output", default="report.html", metavar="HTML", help="page to write; it opens without a network"
    )
    parser.add_argument("--split", default="train", help="split whose codes are shown")
    parser.add_argument(
        "--codes", metavar="DIR", help="folder of the codes (default: that of the run, or the binarized dataset)"
    )
    parser.add_argument("--max-tokens", type=int, default=2_000_000, metavar="N", help="number of tokens to read")
    parser.add_argument(
        "--dictionary",
        metavar="DIR",
        help="dictionary of the codes, to show the nearest atoms of each (default: one beside the data or codes)",
    )
    parser.add_argument(
        "--quality", metavar="JSON", help="also show the figures that `mlsm evaluate dictionary --output` wrote"
    )
    parser.add_argument(
        "--names", metavar="PATH", help="names of atoms: JSON of atom to text, of Neuronpedia, or Delphi's folder"
    )


def needs_fairseq(args: argparse.Namespace) -> bool:
    """False only for the output of `mlsm adapt`."""
    from mlsm_plugin.reports.adapted_texts import is_adaptation

    return not is_adaptation(Path(args.folder))


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Summarize every atom and write the page."""
    from mlsm_plugin.reports.inspection import inspect

    check_positive(args, "max_tokens")
    check_output(
        args.output,
        [path for path in (args.folder, args.codes, args.quality, args.dictionary, args.names) if path is not None],
    )
    summaries = inspect(
        args.folder,
        args.output,
        split=args.split,
        codes=args.codes,
        max_tokens=args.max_tokens,
        quality=args.quality,
        dictionary=args.dictionary,
        names=args.names,
    )
    dead = sum(summary.frequency == 0 for summary in summaries)
    print(f"{len(summaries)} atoms, {dead} of them dead here: {args.output}")
    return 0
