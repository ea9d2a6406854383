"""A text whose words tokenizers like to change, and what ``wc -w`` says of it."""

from __future__ import annotations

import random
from pathlib import Path

ODD = (
    "naïve",
    "„Haus“",
    "don't",
    "\u2581x",
    "你好",
    "…",
    "ﬁne",
    "½",
    "a\x85b",
    "\u00b4",
    "<mask>",
    "\uff1cs\uff1e",
    "a\u200bb",
)
SPACES = (" ", "  ", "\t", "\u00a0", "\u3000")


def write_odd_text(folder: Path, *, lines: int = 300, files: int = 2, seed: int = 1) -> list[Path]:
    """Files ``a.train.txt``, ... of short lines, some of them blank."""
    rng = random.Random(seed)
    words = [*(f"w{number}" for number in range(200)), *ODD]
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.train.txt" for name in "abcdef"[:files]]
    for path in paths:
        text = [rng.choice(SPACES).join(rng.choices(words, k=rng.choice((0, 3, 9, 25)))) for _ in range(lines)]
        path.write_text("\n".join(text) + "\n", encoding="utf-8", newline="\n")
    return paths
