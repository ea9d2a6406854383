"""``mlsm evaluate-pairs``: measure how often a masked LM prefers the acceptable sentence of a minimal pair."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlsm_plugin.cli.coding_options import check_positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
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
    parser.add_argument("--device", help="torch device (default: the GPU if there is one)")


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Score the pairs, and print the accuracy on each file and on all of them."""
    from mlsm_plugin.evaluation.minimal_pairs import accuracy_of_pairs, check_head_was_trained, read_pairs
    from mlsm_plugin.files.atomic_files import check_output_file, write_json
    from mlsm_plugin.hidden_states.devices import default_device
    from mlsm_plugin.hub import from_pretrained

    check_positive(args, "batch_tokens")
    if args.output:
        check_output_file(args.output)
    files = {path: read_pairs(path) for path in args.input}
    model = from_pretrained(args.checkpoint)
    check_head_was_trained(model)
    model.to(default_device(args.device))
    figures = {
        path: accuracy_of_pairs(model, pairs, batch_tokens=args.batch_tokens, progress=True)
        for path, pairs in files.items()
    }
    number = sum(map(len, files.values()))
    overall = sum(figures[path] * len(pairs) for path, pairs in files.items()) / number
    width = max(len(Path(path).name) for path in files)
    for path, accuracy in figures.items():
        print(f"{Path(path).name.ljust(width)}  {len(files[path]):6,} pairs  accuracy {accuracy:.4f}")
    mean = sum(figures.values()) / len(figures)
    print(f"{'all'.ljust(width)}  {number:6,} pairs  accuracy {overall:.4f}  (mean of the files {mean:.4f})")
    if args.output:
        of_files = {path: {"pairs": len(files[path]), "accuracy": accuracy} for path, accuracy in figures.items()}
        write_json(args.output, {"files": of_files, "pairs": number, "accuracy": overall, "mean_of_files": mean})
    return 0
