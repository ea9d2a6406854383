"""The tokens of a batch that a step computes, in tensors whose shapes do not depend on the content of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

ROUNDED_TO = 64  # the sizes of a compiled step


class ChosenTokens(NamedTuple):
    """Chosen tokens of a batch ``(B, T)``. Spare room after them is filled with other tokens."""

    flat: Tensor  # (N,) places in the flattened batch, in order
    places: Tensor  # (B, M) positions of the chosen tokens of each sample, in order
    slots: Tensor  # (N,) where each token is in the flattened ``places``

    @classmethod
    def of(cls, chosen: Tensor, sizes: Sequence[int] | None = None) -> ChosenTokens:
        """From ``chosen``, ``(B, T)`` bool, and the result of :func:`chosen_sizes`.

        Without sizes there is no spare room, and on a GPU this waits for the numbers of tokens.
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
    """The number of chosen tokens of a batch, and the sizes M and N for them, at least 1 each.

    ``counts`` holds the number of chosen tokens of each sample, and ``lengths`` the number of all its tokens. ``share``
    is the mean share of tokens that are chosen. With it, the sizes have room for five standard deviations more, so
    nearly all batches of one shape get the same sizes, and a compiled step is not compiled again.
    """
    chosen = sum(counts)
    most = max([1, *counts])
    if share is None:
        return chosen, most, max(1, chosen)
    longest = max([1, *lengths])
    return chosen, _room(share, longest, most), _room(share, longest * len(lengths), chosen)


def _room(share: float, tokens: int, needed: int) -> int:
    """Room for the ``needed`` tokens, or for as many as can be expected if that is more; at most ``tokens``."""
    expected = share * tokens
    return min(tokens, ROUNDED_TO * math.ceil(max(expected + 5 * math.sqrt(expected), needed) / ROUNDED_TO))
