"""``mlsm evaluate-pairs``: measure how often a masked LM prefers the acceptable sentence of a minimal pair."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

from mlsm_plugin.cli.coding_options import add_max_unk_rate, check_positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.epilog = (
        "A pair is right if the good sentence has the higher pseudo-log-likelihood. Scores that differ by less than "
        "0.001 nats, which is more than float noise, are a tie. A tie does not count as right."
    )
    parser.add_argument("--checkpoint", required=True, metavar="PT", help="checkpoint of the model, or its folder")
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="JSONL",
        help="minimal pairs; each line has sentence_good and sentence_bad, as in BLiMP",
    )
    parser.add_argument("--output", metavar="JSON", help="file for the same figures as JSON")
    parser.add_argument("--batch-tokens", type=int, default=8192, metavar="N", help="tokens in one forward pass")
    add_max_unk_rate(parser, of="a file")
    parser.add_argument("--device", help="torch device (default: the GPU if there is one)")


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Score the pairs, and print the accuracy on each file and on all of them."""
    from mlsm_plugin.evaluation.minimal_pairs import check_head_was_trained, compare_pairs, read_pairs
    from mlsm_plugin.files.atomic_files import check_output_file, write_json
    from mlsm_plugin.hidden_states.devices import default_device
    from mlsm_plugin.hub import from_pretrained
    from mlsm_plugin.tokenization.unknown_tokens import ANOTHER_TOKENIZER, check_known, check_max_unk_rate

    check_positive(args, "batch_tokens")
    check_max_unk_rate(args.max_unk_rate)
    if args.output:
        check_output_file(args.output)
    files = {path: read_pairs(path) for path in args.input}
    model = from_pretrained(args.checkpoint)
    check_head_was_trained(model)
    model.to(default_device(args.device))
    for path, pairs in files.items():
        check_known(
            (text for pair in pairs for text in (pair.good, pair.bad)), model.bpe, model.task.source_dictionary,
            args.max_unk_rate, where=path, remedy=ANOTHER_TOKENIZER,
        )  # fmt: skip
    pairs = [pair for of_file in files.values() for pair in of_file]
    verdicts = compare_pairs(model, pairs, batch_tokens=args.batch_tokens, progress=True)
    of_files = iter(verdicts)
    figures = {path: _figures(list(islice(of_files, len(own)))) for path, own in files.items()}
    width = max(len(Path(path).name) for path in files)
    for path, own in figures.items():
        print(f"{Path(path).name.ljust(width)}  {_shown(own)}")
    overall = _figures(verdicts)
    mean = sum(own["accuracy"] for own in figures.values()) / len(figures)
    print(f"{'all'.ljust(width)}  {_shown(overall)}  (mean of the files {mean:.4f})")
    if args.output:
        write_json(args.output, {"files": figures, **overall, "mean_of_files": mean})
    return 0


def _figures(verdicts: list[int]) -> dict[str, Any]:
    """The figures of some pairs from what ``compare_pairs`` found."""
    return {"pairs": len(verdicts), "accuracy": verdicts.count(1) / len(verdicts), "ties": verdicts.count(0)}


def _shown(figures: dict[str, Any]) -> str:
    return f"{figures['pairs']:6,} pairs  accuracy {figures['accuracy']:.4f}  ties {figures['ties']:,}"
