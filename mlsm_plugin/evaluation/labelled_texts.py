"""Labelled texts in TSV files: ``label TAB text``, or ``label TAB text TAB text`` for pairs; and GLUE in the JSON lines
of the BabyLM evaluation pipeline.
"""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.text.labels import warn_of_similar_labels
from mlsm_plugin.core.text.shared_text import NamedText, warn_of_shared_text
from mlsm_plugin.core.text.text_files import check_text, is_json_lines, json_objects, numbered_lines

# the pipeline's tasks: the keys of the first text, its template, and the key of the second text
GLUE = {
    "boolq": (("question",), "{}", "passage"),
    "multirc": (("question", "answer"), "Question: {} Answer: {}", "paragraph"),
    "wsc": (("span2_text", "span1_text"), 'Does "{}" refer to "{}" in this passage?', "text"),
    "mrpc, rte": (("sentence1",), "{}", "sentence2"),
    "qqp": (("question1",), "{}", "question2"),
    "mnli": (("premise",), "{}", "hypothesis"),
}
FIRST_LINE = "; if the first line names the columns, pass --header"
logger = logging.getLogger(__name__)
NO_LABEL = "-1"  # stands for a missing label in GLUE's test files and in SNLI


@dataclass(frozen=True)
class LabelledTexts:
    """The labelled texts of a file, one per line."""

    path: Path
    labels: tuple[str, ...]  # as in the file
    texts: tuple[tuple[str, ...], ...]  # one or two per line
    lines: tuple[int, ...]  # line numbers in the file, from 1

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, index: int) -> str:
        """The file and line of a labelled text, for error messages."""
        return f"{self.path}, line {self.lines[index]}"

    @property
    def texts_per_line(self) -> int:
        """Number of texts per line: 1, or 2 for pairs."""
        return len(self.texts[0])

    def label_counts(self) -> str:
        """Each label with its number of texts, most frequent first: ``pos 120, neg 80``."""
        return ", ".join(f"{label} {count:,}" for label, count in Counter(self.labels).most_common())


def read_labelled_texts(path: PathLike, *, regression: bool = False, header: bool = False) -> LabelledTexts:
    """All lines of a UTF-8 file, except blank lines and, with ``header``, the first line, which names the columns.

    In a file called ``*.jsonl`` (or ``*.jsonl.gz``), each line has the ``label`` and the texts of a task of ``GLUE``.

    Raises:
        ValueError: a line has too few or too many columns, lacks a key, has an empty text or label, has a label that
            is not a number (with ``regression``) or is ``-1`` (without), or repeats the header (the message names the
            line); the file is empty; or its first line is not a header.
        OSError: the file cannot be read.
    """
    rows: list[tuple[str, tuple[str, ...], int]] = []
    is_json = is_json_lines(path)
    if is_json and header:
        raise ValueError(f"{path} holds JSON lines, which have no header; leave --header out")
    in_tsv = ((number, [column.strip() for column in line.split("\t")]) for number, line in numbered_lines(path))
    numbered_rows = _json_rows(path) if is_json else in_tsv
    columns = next(numbered_rows, (0, [""]))[1] if header else None
    for number, (label, *rest) in numbered_rows:
        where = f"{path}, line {number}"
        if [label, *rest] == columns:
            raise ValueError(f"{where} repeats the header; remove the line")
        if label == NO_LABEL and not regression:
            raise ValueError(
                f"{where}: the label {NO_LABEL} stands for an unknown label in the files of GLUE and SNLI; remove such "
                "lines, or give the class another name"
            )
        if len(rest) not in (1, 2):
            raise ValueError(f"{where} has {len(rest) + 1} columns; expected label, text and for pairs a second text")
        if not label or not all(rest):
            raise ValueError(f"{where} has an empty {'label' if not label else 'text'}")
        if "\r" in label:  # fairseq would end the line of its label dictionary there
            raise ValueError(f"{where}: the label {label!r} has a carriage return")
        if rows and len(rest) != len(rows[0][1]):
            raise ValueError(f"{where} has {len(rest)} texts, but the lines before have {len(rows[0][1])}")
        if regression and not _is_number(label):
            hint = "" if rows or header or is_json else FIRST_LINE
            raise ValueError(f"{where}: {label!r} is not a finite number, as scores are{hint}")
        rows.append((label, tuple(rest), number))
    if not rows:
        raise ValueError(f"{path} holds no labelled text")
    labels, texts, lines = zip(*rows, strict=True)
    if columns is not None and (columns[0] in labels or (regression and _is_number(columns[0]))):
        raise ValueError(
            f"{path}: the first line is not a header: {columns[0]!r} is a label; give each file one, or none"
        )
    return LabelledTexts(Path(path), labels, texts, lines)


def _json_rows(path: PathLike) -> Iterator[tuple[int, list[str]]]:
    """The number, label and two texts of each line; runs of whitespace become single spaces."""
    for number, item in json_objects(path):
        present = {key for key, value in item.items() if isinstance(value, str) and value.strip()}
        task = next((keys for keys in GLUE.values() if {*keys[0], keys[2]} <= present), None)
        label = item.get("label")
        if task is None or not isinstance(label, (str, int)):
            known = "; ".join(f"{name}: {', '.join([*first, last])}" for name, (first, _, last) in GLUE.items())
            raise ValueError(f"{path}, line {number} needs a label, text or a whole number, and texts: {known}")
        first, template, last = task
        for value in (label, *(item[key] for key in (*first, last))):
            check_text(str(value), f"{path}, line {number}")
        text = template.format(*(item[key] for key in first))
        label = label if isinstance(label, str) else int(label)
        yield number, [" ".join(str(value).split()) for value in (label, text, item[last])]


def _is_number(label: str) -> bool:
    try:
        return math.isfinite(float(label))
    except ValueError:
        return False


def check_same_kind(
    train: LabelledTexts, held_out: list[LabelledTexts], *, regression: bool, allow_single: bool = False
) -> None:
    """Raise ValueError if files have different kinds of texts or labels.

    This means that they have different numbers of texts per line; that ``train`` has fewer than two labels, or more
    labels than different texts, or lacks a label of the ``held_out`` files; that no file repeats a label, as if they
    were numbers of lines; or, unless ``allow_single``, that a label has only one text, such as the column name in a
    header. With ``regression``, labels are numbers, which may differ. Warns of labels that look alike, of a first line
    that may be a header, of texts with several labels, and of texts of ``held_out`` that are also in ``train``.
    """
    known = set(train.labels)
    if not regression and len(known) < 2:
        raise ValueError(f"{train.path} has only one label ({train.labels[0]}); at least two are needed")
    if not regression:
        _check_not_exchanged(train)
    for file in held_out:
        if file.texts_per_line != train.texts_per_line:
            raise ValueError(
                f"{file.path} has {file.texts_per_line} texts in a line, {train.path} has {train.texts_per_line}"
            )
        unseen = sorted(set(file.labels) - known)
        if unseen and not regression:
            _check_not_exchanged(file)
            hint = FIRST_LINE if file.labels[0] in unseen and not is_json_lines(file.path) else ""
            raise ValueError(f"{file.path} has labels that {train.path} lacks: {', '.join(unseen[:5])}{hint}")
    warn_of_shared_text([_named(train)], [_named(file) for file in held_out])
    if regression:
        return
    warn_of_similar_labels(train.labels, str(train.path))
    for file in (train, *held_out):
        _warn_of_several_labels(file)
    if not allow_single:
        _check_no_single_label(train, held_out)
    elif len(known) > 2 and all(len(set(file.labels)) == len(file) for file in (train, *held_out)):
        raise ValueError(f"{train.path}: no two texts have the same label; a line is the label, a tab and the text")
    else:
        _warn_of_header(train, held_out)


def _check_not_exchanged(file: LabelledTexts) -> None:
    """Raise ValueError if a TSV file has more labels than different texts, as one with exchanged columns has."""
    labels = len(set(file.labels))
    texts = len(set(file.texts))
    if labels > texts and not is_json_lines(file.path):
        raise ValueError(
            f"{file.path} has more labels ({labels:,}) than different texts ({texts:,}); a line is the label, a tab "
            "and the text"
        )


def _warn_of_header(train: LabelledTexts, held_out: list[LabelledTexts]) -> None:
    """Warn if the label of the first line of ``train`` is only in first lines."""
    first = train.labels[0]
    others = {*train.labels[1:], *(label for file in held_out for label in file.labels[1:])}
    if first not in others and train.lines[0] == 1 and not is_json_lines(train.path):
        logger.warning(f"{train.where(0)}: no other text has the label {first!r}{FIRST_LINE}")


def _named(texts: LabelledTexts) -> NamedText:
    """The texts of a file without their labels."""
    return NamedText(str(texts.path), map("\t".join, texts.texts))


def _warn_of_several_labels(texts: LabelledTexts) -> None:
    """Warn if the same text has different labels."""
    first: dict[tuple[str, ...], int] = {}
    contradictions = []
    for index, text in enumerate(texts.texts):
        original = first.setdefault(text, index)
        if texts.labels[index] != texts.labels[original]:
            contradictions.append((index, original))
    if contradictions:
        index, original = contradictions[0]
        logger.warning(
            f"{texts.where(index)} has the label {texts.labels[index]!r}, and line {texts.lines[original]}, the same "
            f"text, {texts.labels[original]!r}; {len(contradictions):,} of {len(texts):,} texts contradict another"
        )


def _check_no_single_label(train: LabelledTexts, held_out: list[LabelledTexts]) -> None:
    """Raise ValueError if a label has a single text; copies count once, since ``cat`` can repeat a header."""
    texts_of: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for label, texts in zip(train.labels, train.texts, strict=True):
        texts_of[label].append(texts)
    for file in held_out:
        for label, texts in zip(file.labels[1:], file.texts[1:], strict=True):  # a first line may be a header
            texts_of[label].append(texts)
    varied = any(len(set(rows)) > 1 for rows in texts_of.values())
    single = {label for label, rows in texts_of.items() if len(rows) == 1 or (varied and len(set(rows)) == 1)}
    for index, label in enumerate(train.labels):
        if label in single:
            hint = "" if index or is_json_lines(train.path) else FIRST_LINE
            raise ValueError(
                f"{train.where(index)}: no other text has the label {label!r}; correct or remove the line, or pass "
                f"--allow-single-labels{hint}"
            )
