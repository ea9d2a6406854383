"""Words as GNU ``wc -w`` counts them in a UTF-8 locale, and text from which a tokenizer gets exactly these words."""

from collections.abc import Callable, Iterator
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open
from mlsm_plugin.core.masking.word_boundaries import SENTENCEPIECE_BEGIN
from mlsm_plugin.core.text.text_files import read_lines

# separators of words in wc: printable characters for which C's isspace is true, and non-breaking spaces
SEPARATORS = "\t\n\v\f\r \xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u2060"
SEPARATORS += "\u3000"
# characters that wc ignores: not printable, they neither separate words nor form one
CONTROLS = [*map(chr, (*range(0x20), *range(0x7F, 0xA0))), "\u2028", "\u2029"]
# SentencePiece writes a space as its mark of a word, which must not be in the text itself
TABLE = str.maketrans(dict.fromkeys(CONTROLS) | dict.fromkeys(SEPARATORS, " ") | {SENTENCEPIECE_BEGIN: "_"})


def words_in_line(line: str) -> list[str]:
    """The words of a line, without control characters."""
    return line.translate(TABLE).split()


def word_lines(path: PathLike, report: Callable[[int], object] | None = None) -> Iterator[str]:
    """The words of each line of a text file, joined by spaces; arguments and errors as for :func:`read_lines`."""
    for line in read_lines(path, report):
        yield " ".join(words_in_line(line))


def count_words(path: PathLike, report: Callable[[int], object] | None = None) -> int:
    """The number of words of a text file; arguments and errors as for :func:`read_lines`."""
    return sum(len(words_in_line(line)) for line in read_lines(path, report))


def write_words(source: PathLike, target: Path) -> None:
    """Write the words of each line of a text file, separated by single spaces; atomically."""
    with atomic_open(target) as file:
        for line in word_lines(source):
            file.write(f"{line}\n".encode())
