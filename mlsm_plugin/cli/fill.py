"""``mlsm fill``: fill masks with phrases of a corpus."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mlsm_plugin.cli.coding_options import check_positive


def add_retrieval_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the model and the datastore."""
    parser.add_argument("--checkpoint", required=True, metavar="PT", help="checkpoint of the model, or its folder")
    parser.add_argument(
        "--datastore", metavar="DIR", help="datastore that `mlsm datastore build` made with this checkpoint"
    )
    parser.add_argument("--device", help="torch device (default: the GPU if there is one)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="texts with <mask>, each in quotes")
    add_retrieval_options(parser)
    parser.add_argument("--topk", type=int, default=5, metavar="N", help="phrases to print for each mask")
    parser.add_argument("--k", type=int, default=256, metavar="N", help="number of starts, and of ends, to retrieve")
    parser.add_argument("--max-length", type=int, default=10, metavar="N", help="longest phrase in tokens")
    parser.add_argument(
        "--length-alpha",
        type=float,
        default=0.0,
        metavar="A",
        help="multiply the scores by the length of the phrase to this power",
    )
    parser.add_argument(
        "--any-pieces", action="store_true", help="allow phrases that begin or end in the middle of a word"
    )
    parser.add_argument(
        "--context-tokens",
        type=int,
        default=15,
        metavar="N",
        help="tokens of a source to print on each side of a phrase",
    )
    parser.add_argument("--contexts", type=int, default=2, metavar="N", help="sources to print for each phrase")
    parser.add_argument(
        "--continue",
        dest="steps",
        type=int,
        default=0,
        metavar="N",
        help="append N phrases to each text, one after the other, instead of filling its masks",
    )


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Print the phrases of each mask with their sources."""
    from mlsm_plugin.retrieval.phrase_filling import FillingSettings, PhraseFiller

    check_positive(args, "topk", "k", "max_length")
    for option, value in (("--contexts", args.contexts), ("--continue", args.steps)):
        if value is not None and value < 0:
            raise ValueError(f"{option} must not be negative, got {value}")
    if args.datastore is None:
        raise ValueError("--datastore is required; make one with `mlsm datastore build`")
    interface, store = open_model_and_datastore(args)
    if args.k > len(store):
        raise ValueError(f"--k {args.k} is more than the {len(store)} keys of {args.datastore}; use a smaller one")
    settings = FillingSettings(
        k=args.k,
        max_length=args.max_length,
        length_alpha=args.length_alpha,
        whole_words=not args.any_pieces,
        context_tokens=args.context_tokens,
        max_contexts=args.contexts,
    )
    filler = PhraseFiller(interface, store, settings)
    if args.steps:
        texts = []
        for text in args.texts:
            texts.append(filler.continue_text(text, steps=args.steps))
            print(texts[-1])
        warn_of_cuts(sum(map(filler.was_cut, texts)), len(texts))
        return 0
    warn_of_cuts(sum(map(filler.was_cut, args.texts)), len(args.texts))
    for text in args.texts:
        print(text)
        for number, found in enumerate(filler.fill(text, topk=args.topk), start=1):
            print(f"  mask {number}" + ("" if found else ": no phrase was found; try a larger --k, or --any-pieces"))
            for candidate in found:
                print(f"    {candidate.score:.4f}  {candidate.phrase}")
                for context in candidate.contexts:
                    print(f"            {context}")
    return 0


def warn_of_cuts(number: int, of: int) -> None:
    """Say on standard error how many texts the model does not see as a whole."""
    if number:
        print(
            f"mlsm: warning: {number} of {of} texts are longer than the model's positions and are cut around the mask",
            file=sys.stderr,
        )


def open_model_and_datastore(args: argparse.Namespace) -> tuple[Any, Any]:
    """The loaded model, on its device, and the datastore, or None if the command line names none.

    Raises:
        ValueError: the datastore was built with another checkpoint.
    """
    from mlsm_plugin.hidden_states.devices import default_device
    from mlsm_plugin.hub import checkpoint_of, from_pretrained
    from mlsm_plugin.retrieval.phrase_datastore import PhraseDatastore

    checkpoint = checkpoint_of(args.checkpoint)
    store = None
    if args.datastore is not None:
        store = PhraseDatastore(args.datastore)
        store.check_belongs_to(checkpoint)
    interface = from_pretrained(checkpoint)
    interface.to(default_device(args.device))
    return interface, store
