#!/usr/bin/env python3
"""Hold out documents of a text.

    python research/hold_out.py abc.txt brown.txt.gz --output texts [--every 50]

Writes ``texts/train.txt`` and ``texts/held_out.txt``. Documents are separated by blank lines. Every N-th document of
each file is held out, the first one included, so that all sources are in both texts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from mlsm_plugin.cli.actions import HelpFormatter
from mlsm_plugin.core.files.atomic_files import atomic_open
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.text.text_files import numbered_lines

NAMES = ("train.txt", "held_out.txt")


def documents_of(file: Path) -> Iterator[str]:
    """The documents of a file, each with a blank line at its end."""
    lines: list[str] = []
    before = 0
    for number, line in numbered_lines(file):
        if number > before + 1 and lines:
            yield "".join([*lines, "\n"])
            lines = []
        lines.append(f"{line.rstrip()}\n")
        before = number
    if lines:
        yield "".join([*lines, "\n"])


def main() -> int:
    """Write both texts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=HelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, metavar="FILE", help="UTF-8 text, plain or compressed")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the two texts")
    parser.add_argument("--every", type=int, default=50, metavar="N", help="hold out one of N documents")
    args = parser.parse_args()
    if args.every < 2:
        parser.error(f"--every must be at least 2, got {args.every}")
    outputs = {(args.output / name).resolve() for name in NAMES}
    for file in args.texts:
        if file.resolve() in outputs:
            parser.error(f"{file} would be overwritten; choose another --output")
    args.output.mkdir(parents=True, exist_ok=True)
    counts = [0, 0]
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(atomic_open(args.output / name, "w")) for name in NAMES]
            for file in args.texts:
                for number, document in enumerate(Progress(documents_of(file), desc=file.name, unit="document")):
                    held_out = int(number % args.every == 0)
                    files[held_out].write(document)
                    counts[held_out] += 1
            if 0 in counts:
                raise ValueError("a text would be empty; there are too few documents")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    print("\n".join(f"{args.output / name}: {count:,} documents" for name, count in zip(NAMES, counts, strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
