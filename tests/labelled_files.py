"""Small labelled files that a classifier can learn: which of two words does a text have?"""

from __future__ import annotations

from pathlib import Path

OBJECTS = ("is bound", "of the class", "in a list", "and its type", "for an object", "or none")
WORDS = {"name first": "name", "value": "value"}


def rows(number: int, begin: int = 0) -> list[tuple[str, str]]:
    """Labels and texts, half of them of each label."""
    labels = list(WORDS)
    made = []
    for place in range(begin, begin + number):
        label = labels[place % 2]
        ending = OBJECTS[place // 2 % len(OBJECTS)]
        further = OBJECTS[place // 12 % len(OBJECTS)]
        made.append((label, f"{WORDS[label]} {WORDS[label]} {ending} {WORDS[label]} {further} {WORDS[label]}"))
    return made


def write_labelled(folder: Path, *, splits: tuple[str, ...] = ("train", "valid", "test")) -> tuple[object, ...]:
    """Write ``SPLIT.tsv`` for each split; returns the options of ``mlsm finetune`` that name them."""
    options: list[object] = []
    for place, split in enumerate(splits):
        lines = [f"{label}\t{text}\n" for label, text in rows(96 if split == "train" else 24, 100 * place)]
        (folder / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
        options += [f"--{split}", folder / f"{split}.tsv"]
    return tuple(options)
