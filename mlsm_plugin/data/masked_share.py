"""Whether as much of a text is masked as was asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

ENOUGH_TOKENS = 10_000
MOST_SAMPLES = 1000
FEWEST_MASKS = 200  # expected ones; with fewer, chance alone may leave too little


def samples_to_look_at(number: int) -> list[int]:
    """Numbers of samples from all parts of a dataset of ``number`` samples, in mixed order."""
    places = np.unique(np.linspace(0, max(number - 1, 0), min(number, MOST_SAMPLES)).astype(int))
    return np.random.default_rng(0).permutation(places).tolist()


def check_masked_share(name: str, counts: Iterable[tuple[Any, Any]], asked: float, *, remedy: str) -> None:
    """Check that a text is masked about as much as asked for; warn below half of that.

    A text of which fewer than 200 tokens were to be masked is not judged.

    Args:
        name: of the text.
        counts: of samples, the number of masked tokens and that of all tokens but special ones; as many are read as it
            takes to judge.
        asked: the share of these tokens that should be masked.
        remedy: what to do about it.

    Raises:
        ValueError: less than a tenth of what was asked for is masked.
    """
    masked = content = 0
    for masked_of_sample, content_of_sample in counts:
        masked, content = masked + int(masked_of_sample), content + int(content_of_sample)
        if content >= max(ENOUGH_TOKENS, FEWEST_MASKS / asked):
            break
    if asked * content < FEWEST_MASKS or masked >= asked * content / 2:
        return
    message = f"{masked / content:.2g} of the tokens of {name} are masked, and {asked:g} were asked for; {remedy}"
    if masked < asked * content / 10:
        raise ValueError(f"only {message}")
    logger.warning("only %s", message)
