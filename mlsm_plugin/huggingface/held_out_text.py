"""The lines of the held-out sequences at the end of a text."""

import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.text_files import read_text
from mlsm_plugin.huggingface.text_sequences import ids_of_lines
from mlsm_plugin.huggingface.token_sequences import TokenSequences

MOST_LINES = 20_000
END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def held_out_lines(
    texts: Sequence[PathLike], sequences: TokenSequences, tokenizer: HuggingFaceTokenizer, *, apart: bool
) -> list[str]:
    """The last lines of text files that lie completely in the ``sequences`` at their end, at most :data:`MOST_LINES`.

    They include blank lines between documents. ``apart``: each sequence is one line.
    """
    lines = last_lines(texts)
    if apart:
        sizes = [int(bool(line)) for line in lines]
        room = len(sequences)
    else:
        sizes = [len(ids or []) for ids in ids_of_lines(lines, tokenizer)]
        room = int(sequences.num_tokens) - len(sequences) * len(tokenizer.surrounded([]))
    first = len(lines)
    while first and sizes[first - 1] <= room:
        first -= 1
        room -= sizes[first]
    return lines[first:]


def last_lines(texts: Sequence[PathLike]) -> list[str]:
    """The last :data:`MOST_LINES` lines of text files."""
    return list(deque(read_text(texts), MOST_LINES))


def write_held_out(lines: Sequence[str], output: Path) -> None:
    """Write lines to a file; if each document is a single line, split it into one sentence per line."""
    pairs = zip(lines, [*lines[1:], ""], strict=True)
    if not any(line and after for line, after in pairs):
        lines = [part for line in lines for part in (END_OF_SENTENCE.split(line) if line else [""])]
    with atomic_open(output, "w") as file:
        file.writelines(f"{line}\n" for line in lines)
