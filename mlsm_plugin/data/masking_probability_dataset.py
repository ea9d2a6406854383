"""Masking probabilities of tokens when only a seeded share of the positions has a code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fairseq.data import BaseWrapperDataset

from mlsm_plugin.sparse_coding.stored_codes import covered_positions


@dataclass(frozen=True)
class SplitCoverage:
    """The share of a split's positions that is coded.

    Attributes:
        num_tokens: number of positions of the split.
        coverage, seed: see :func:`~mlsm_plugin.sparse_coding.stored_codes.covered_positions`.
    """

    num_tokens: int
    coverage: float = 1.0
    seed: int = 0


class MaskingProbabilityDataset(BaseWrapperDataset):
    """The masking probability of each token of a sample, ``(T,)`` float64.

    It is ``mask_prob / coverage`` at covered positions and 0 elsewhere, so that on average the share ``mask_prob`` of
    the positions is masked, whatever the coverage. The ids of the tokens have no influence.

    Args:
        positions: dataset of the flat positions of each sample's tokens; negative for a token that is not in a split.
        splits: the coverage of each split in which positions lie, in order.
        mask_prob: share of the positions to mask.

    Raises:
        ValueError: ``mask_prob`` is above the coverage of a split.
    """

    def __init__(self, positions: Any, splits: Sequence[SplitCoverage], mask_prob: float) -> None:
        super().__init__(positions)
        self.splits = list(splits)
        self.mask_prob = mask_prob
        self.starts = np.concatenate([[0], np.cumsum([split.num_tokens for split in splits], dtype=np.int64)])
        for split in self.splits:
            if mask_prob > split.coverage:
                raise ValueError(
                    f"mask_prob {mask_prob} is more than the covered share {split.coverage}; use a smaller mask_prob"
                )

    def __getitem__(self, index: int) -> torch.Tensor:
        positions = self.dataset[index].numpy()
        probabilities = np.zeros(len(positions))
        numbers = np.searchsorted(self.starts, positions, side="right") - 1  # -1 for no position
        for number in np.unique(numbers[numbers >= 0]):
            split, tokens = self.splits[number], numbers == number
            covered = covered_positions(
                positions[tokens] - self.starts[number], coverage=split.coverage, seed=split.seed
            )
            probabilities[tokens] = covered * (self.mask_prob / split.coverage)
        return torch.from_numpy(probabilities)
