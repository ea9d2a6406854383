"""Labelled texts in TSV files: ``label TAB text``, or ``label TAB text TAB text`` for pairs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from mlsm_plugin.tokenization.text_files import numbered_lines


@dataclass(frozen=True)
class LabelledTexts:
    """The labelled texts of a file.

    Attributes:
        path: the file.
        labels: the label of each line, as written.
        texts: the text or the two texts of each line.
    """

    path: Path
    labels: tuple[str, ...]
    texts: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def texts_per_line(self) -> int:
        """Number of texts in a line: 1, or 2 for pairs."""
        return len(self.texts[0])


def read_labelled_texts(path: str | os.PathLike[str], *, regression: bool = False) -> LabelledTexts:
    """All lines of a file; blank ones are skipped.

    Args:
        path: UTF-8 text.
        regression: labels must be numbers.

    Raises:
        ValueError: a line has too few or too many columns, an empty text, or a label that is not a number (the message
            names the line), or the file is empty.
        OSError: the file cannot be read.
    """
    labels: list[str] = []
    texts: list[tuple[str, ...]] = []
    for number, line in numbered_lines(path):
        label, *rest = (column.strip() for column in line.split("\t"))
        where = f"{path}, line {number}"
        if len(rest) not in (1, 2):
            raise ValueError(f"{where} has {len(rest) + 1} columns; expected label, text and for pairs a second text")
        if not label or not all(rest):
            raise ValueError(f"{where} has an empty {'label' if not label else 'text'}")
        if texts and len(rest) != len(texts[0]):
            raise ValueError(f"{where} has {len(rest)} texts, the lines before have {len(texts[0])}")
        if regression:
            _check_number(label, where)
        labels.append(label)
        texts.append(tuple(rest))
    if not labels:
        raise ValueError(f"{path} holds no labelled text")
    return LabelledTexts(Path(path), tuple(labels), tuple(texts))


def _check_number(label: str, where: str) -> None:
    try:
        finite = math.isfinite(float(label))
    except ValueError:
        finite = False
    if not finite:
        raise ValueError(f"{where}: {label!r} is not a finite number; --regression needs numbers as labels")


def check_same_kind(train: LabelledTexts, others: list[LabelledTexts], *, regression: bool) -> None:
    """Raise ValueError unless all files have the same number of texts in a line, and ``train`` has all labels."""
    known = set(train.labels)
    if not regression and len(known) < 2:
        raise ValueError(f"{train.path} has only one label ({train.labels[0]}); at least two are needed")
    for other in others:
        if other.texts_per_line != train.texts_per_line:
            raise ValueError(
                f"{other.path} has {other.texts_per_line} texts in a line, {train.path} has {train.texts_per_line}"
            )
        unseen = sorted(set(other.labels) - known)
        if unseen and not regression:
            raise ValueError(f"{other.path} has labels that {train.path} lacks: {', '.join(unseen[:5])}")
