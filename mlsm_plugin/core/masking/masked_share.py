"""The replacement of masked tokens, and a check that as much of a text is masked as requested."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsInt

import numpy as np

logger = logging.getLogger(__name__)

ENOUGH_TOKENS = 10_000
MOST_SAMPLES = 1000
FEWEST_MASKS = 200  # expected masks; with fewer, chance alone may leave too few
# shares of what should be masked or usable
ENOUGH = 0.5  # less is a warning
LEAST = 0.1  # less is an error


@dataclass(frozen=True, kw_only=True)
class MaskReplacement:
    """BERT's replacement: a masked token stays as it is, becomes a random token, or else ``<mask>``.

    ValueError if one of the two shares is negative, or their sum is above 1.
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
        """``ids`` (T,), replaced where ``masked`` (T,) bool; ``cumulative`` (V,) is the distribution of random ids."""
        fate = rng.random(len(ids))
        replaced = masked & (fate < self.random_token_prob)
        hidden = masked & (fate >= self.random_token_prob + self.leave_unmasked_prob)
        result = np.where(hidden, mask, ids)
        result[replaced] = np.searchsorted(cumulative, rng.random(int(replaced.sum())), side="right")
        return result


def samples_to_look_at(number: int, *, most: int = MOST_SAMPLES) -> list[int]:
    """Indices of at most ``most`` samples from all parts of a dataset of ``number`` samples, in random order."""
    places = np.unique(np.linspace(0, max(number - 1, 0), min(number, most)).astype(int))
    return np.random.default_rng(0).permutation(places).tolist()


def check_masked_share(
    name: str, counts: Iterable[tuple[SupportsInt, SupportsInt]], asked: float, *, remedy: str
) -> None:
    """Check that a text is masked about as much as requested; warn below half of that, ValueError below a tenth.

    ``counts`` yields for each sample the numbers of masked tokens and of all tokens that are not special. The share
    ``asked`` of the latter should be masked. Reading stops when the counts suffice. A text is not judged if fewer than
    200 of its tokens should be masked.
    """
    masked = content = 0
    for masked_of_sample, content_of_sample in counts:
        masked = masked + int(masked_of_sample)
        content = content + int(content_of_sample)
        if content >= max(ENOUGH_TOKENS, FEWEST_MASKS / asked):
            break
    if asked * content >= FEWEST_MASKS:
        shares = f"{masked / content:.2g} of the tokens of {name} are masked, and {asked:g} were asked for"
        _judge(masked / (asked * content), f"only {shares}; {remedy}")


def check_usable_share(needed: str, counts: Iterable[tuple[SupportsInt, SupportsInt]], *, remedy: str) -> None:
    """Check that an objective can use most items of a text; warn below half, ValueError below a tenth.

    ``counts`` yields for each sample or batch the numbers of usable and of all items; reading stops when they suffice.
    ``needed`` describes usable items in the message: ``tokens of train have a code``.
    """
    usable = total = 0
    for usable_of_sample, total_of_sample in counts:
        usable = usable + int(usable_of_sample)
        total = total + int(total_of_sample)
        if total >= ENOUGH_TOKENS:
            break
    if total:
        _judge(usable / total, f"only {usable / total:.2g} of the {needed}; {remedy}")


def _judge(share: float, message: str) -> None:
    """Warn if ``share`` is less than a half; raise ValueError if it is less than a tenth."""
    if share < LEAST:
        raise ValueError(message)
    if share < ENOUGH:
        logger.warning("%s", message)
