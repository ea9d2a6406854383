"""Texts with gaps, written as sentinels such as ``<extra_id_0>``, and the fillers of these gaps."""

import math
import re
from dataclasses import dataclass


def sentinel_symbols(number: int) -> list[str]:
    """``<extra_id_0>``, ``<extra_id_1>``, ...: the symbols for the first, second, ... span of a text."""
    return [f"<extra_id_{i}>" for i in range(number)]


def sentinels_in(text: str, number: int) -> list[str]:
    """The sentinels in a text, in order; ValueError if one is not among the first ``number``, or occurs twice."""
    sentinels = re.findall(r"<extra_id_\d+>", text)
    known = {*sentinel_symbols(number)}
    for place, sentinel in enumerate(sentinels):
        if sentinel not in known:
            raise ValueError(
                f"{sentinel} is not one of the {number} sentinels; use <extra_id_0> to <extra_id_{number - 1}>"
            )
        if sentinel in sentinels[:place]:
            raise ValueError(f"{sentinel} occurs twice; give each gap its own sentinel")
    return sentinels


def check_has_gap(gaps: list[str], text: str) -> None:
    """Raise ValueError if there are no ``gaps`` in the text."""
    if not gaps:
        raise ValueError(f"the text has no gap: write <extra_id_0> where words are missing, in {text!r}")


def check_search(beam: int, max_length: int | None) -> None:
    """Raise ValueError unless the number of hypotheses is positive, and so is the maximum target length, if any."""
    for name, value in (("beam", beam), ("max_length", max_length)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class Filler:
    """The text that the model puts in place of a sentinel, such as ``<extra_id_0>``.

    The score is the mean log-probability (nats) of the sentinel and the filler's tokens; -inf if the model did not
    write the sentinel.
    """

    sentinel: str
    text: str
    score: float

    @property
    def is_missing(self) -> bool:
        """Whether the model did not write the sentinel."""
        return self.score == -math.inf


@dataclass(frozen=True)
class Infilling:
    """A text with its gaps filled."""

    text: str
    fillers: tuple[Filler, ...]  # in the order of the text
    target: str  # the output of the model, as text with sentinels
