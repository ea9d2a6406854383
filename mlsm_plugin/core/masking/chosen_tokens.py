"""The tokens of a batch that a step computes, in tensors whose shapes are known before the batch is looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

ROUNDED_TO = 64  # the sizes of a compiled step


class ChosenTokens(NamedTuple):
    """Tokens of a batch ``(B, T)``. Where there is more room than chosen tokens, others follow them."""

    flat: Tensor  # (N,) places in the flattened batch, in order
    places: Tensor  # (B, M) positions of the chosen tokens of each sample, in order
    slots: Tensor  # (N,) where each token is in the flattened ``places``

    @classmethod
    def of(cls, chosen: Tensor, sizes: Sequence[int] | None = None) -> ChosenTokens:
        """From ``(B, T)`` bool and what :func:`chosen_sizes` gives.

        Without sizes there is no further room, and on a GPU this waits for the numbers of tokens.
        """
        if sizes is None:
            counts = chosen.sum(dim=1).tolist()
            sizes = sum(counts), max(counts, default=0), sum(counts)
        _, most, total = sizes
        first_chosen = chosen.byte().argsort(dim=1, descending=True, stable=True)
        flat = chosen.flatten().byte().argsort(descending=True, stable=True)[:total]
        place_of = (chosen.cumsum(dim=1) - 1).clamp(min=0, max=max(most - 1, 0)).flatten()
        return cls(flat, first_chosen[:, :most], flat // max(chosen.size(1), 1) * most + place_of[flat])


def chosen_sizes(counts: Sequence[int], lengths: Sequence[int], share: float | None = None) -> tuple[int, int, int]:
    """How many tokens of a batch are chosen, and the sizes M and N for them, which are at least 1.

    ``counts`` are the numbers of chosen tokens of the samples, and ``lengths`` those of all tokens. With the ``share``
    of the tokens that is chosen on average, nearly all batches of one shape get the same sizes, so that a compiled step
    need not be compiled again: there is room for five standard deviations more.
    """
    chosen = sum(counts)
    most = max([1, *counts])
    if share is None:
        return chosen, most, max(1, chosen)
    longest = max([1, *lengths])
    return chosen, _room(share, longest, most), _room(share, longest * len(lengths), chosen)


def _room(share: float, tokens: int, needed: int) -> int:
    """Room for the ``needed`` tokens, or for those that may be expected if more, rounded up; at most ``tokens``."""
    expected = share * tokens
    return min(tokens, ROUNDED_TO * math.ceil(max(expected + 5 * math.sqrt(expected), needed) / ROUNDED_TO))
