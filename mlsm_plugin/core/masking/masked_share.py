"""What becomes of masked tokens, and whether as much of a text is masked as was asked for."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

ENOUGH_TOKENS = 10_000
MOST_SAMPLES = 1000
FEWEST_MASKS = 200  # expected ones; with fewer, chance alone may leave too little


@dataclass(frozen=True, kw_only=True)
class MaskFates:
    """BERT's: a masked token stays as it is, becomes a random one, or else ``<mask>``.

    ValueError if the two shares of the masked tokens are negative, or together above 1.
    """

    leave_unmasked_prob: float = 0.1
    random_token_prob: float = 0.1

    def __post_init__(self) -> None:
        shares = self.leave_unmasked_prob, self.random_token_prob
        if min(shares) < 0 or sum(shares) > 1:
            raise ValueError(
                f"leave_unmasked_prob and random_token_prob must not be negative, or together above 1; got {shares}"
            )

    def written(
        self, ids: np.ndarray, masked: np.ndarray, rng: np.random.Generator, *, mask: int, cumulative: np.ndarray
    ) -> np.ndarray:
        """``ids`` (T,) with the ``masked`` ones (T,) changed; ``cumulative`` (V,) is the distribution of random ids."""
        fate = rng.random(len(ids))
        replaced = masked & (fate < self.random_token_prob)
        hidden = masked & (fate >= self.random_token_prob + self.leave_unmasked_prob)
        result = np.where(hidden, mask, ids)
        result[replaced] = np.searchsorted(cumulative, rng.random(int(replaced.sum())), side="right")
        return result


def samples_to_look_at(number: int) -> list[int]:
    """Numbers of samples from all parts of a dataset of ``number`` samples, in mixed order."""
    places = np.unique(np.linspace(0, max(number - 1, 0), min(number, MOST_SAMPLES)).astype(int))
    return np.random.default_rng(0).permutation(places).tolist()


def check_masked_share(name: str, counts: Iterable[tuple[Any, Any]], asked: float, *, remedy: str) -> None:
    """Check that a text is masked about as much as asked for; warn below half of that, ValueError below a tenth.

    ``counts`` are, of samples, the number of masked tokens and that of all tokens but special ones, of which the share
    ``asked`` should be masked. As many are read as it takes to judge; a text of which fewer than 200 tokens were to be
    masked is not judged.
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
