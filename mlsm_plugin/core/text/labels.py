"""Labels of texts, and a warning about labels that look the same."""

import logging
import math
import unicodedata
from collections import defaultdict
from collections.abc import Iterable

logger = logging.getLogger(__name__)


def canonical_label(label: str) -> str:
    """A label without differences that are easily overlooked: case, width, invisible characters, format of a number.

    ``Pos`` and ``pos``, ``1`` and ``1.0``, or ``1`` and a full-width ``1`` have the same canonical form.
    """
    visible = "".join(character for character in label if unicodedata.category(character) not in ("Cf", "Cc"))
    plain = " ".join(unicodedata.normalize("NFKC", visible).casefold().split())
    try:
        number = float(plain)
    except ValueError:
        return plain
    return str(number) if math.isfinite(number) else plain


def similar_labels(labels: Iterable[str]) -> list[list[str]]:
    """The groups of different labels with the same canonical form, each sorted."""
    groups: dict[str, set[str]] = defaultdict(set)
    for label in labels:
        groups[canonical_label(label)].add(label)
    return [sorted(group) for group in groups.values() if len(group) > 1]


def warn_of_similar_labels(labels: Iterable[str], where: str) -> None:
    """Log a warning for each group of labels that look alike; ``where`` names their file."""
    for group in similar_labels(labels):
        named = ", ".join(ascii(label) for label in group)
        logger.warning(f"{where}: the labels {named} look alike, but count as {len(group)} classes")
