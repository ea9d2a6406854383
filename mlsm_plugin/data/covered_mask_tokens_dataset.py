"""Masked-LM inputs and targets with masks only on tokens that have a code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fairseq.data import BaseWrapperDataset, Dictionary

from mlsm_plugin.data.masked_share import MaskFates
from mlsm_plugin.data.token_blocks import is_known


class CoveredMaskTokensDataset(BaseWrapperDataset):
    """fairseq's ``MaskTokensDataset`` with a separate masking probability for every token.

    Each content token is masked independently with its probability; BOS, EOS, padding and unknown tokens are never
    masked. The masks depend only on the seed, the epoch and the index of the sample. Use :meth:`apply_mask`.

    Args:
        tokens: dataset of the ids of each sample ``(T,)``.
        probabilities: dataset of the masking probabilities of the same tokens ``(T,)``.
        vocab: the symbols, including ``<mask>``.
        return_masked_tokens: yield targets (the original id of masked tokens, padding elsewhere) instead of inputs.
        seed: seed of the masks, not negative.
        leave_unmasked_prob, random_token_prob: see :class:`MaskFates`.
        freq_weighted_replacement: draw random symbols in proportion to their counts in ``vocab``.
    """

    def __init__(
        self,
        tokens: Any,
        probabilities: Any,
        vocab: Dictionary,
        *,
        return_masked_tokens: bool,
        seed: int = 1,
        leave_unmasked_prob: float = 0.1,
        random_token_prob: float = 0.1,
        freq_weighted_replacement: bool = False,
    ) -> None:
        super().__init__(tokens)
        self.fates = MaskFates(leave_unmasked_prob, random_token_prob)
        self.probabilities = probabilities
        self.vocab = vocab
        self.return_masked_tokens = return_masked_tokens
        self.seed = seed
        weights = np.array(vocab.count if freq_weighted_replacement else np.ones(len(vocab)), dtype=np.float64)
        weights[: vocab.nspecial] = 0
        self._cumulative = np.cumsum(weights) / weights.sum()
        self.epoch = 0
        # a batch reads an input three times (ids, length, count) and a target twice
        self._latest: tuple[tuple[int, int], torch.Tensor] | None = None

    @classmethod
    def apply_mask(
        cls, tokens: Any, probabilities: Any, vocab: Dictionary, **settings: Any
    ) -> tuple[CoveredMaskTokensDataset, CoveredMaskTokensDataset]:
        """The dataset of inputs and the dataset of targets, with the same masks."""
        return (
            cls(tokens, probabilities, vocab, return_masked_tokens=False, **settings),
            cls(tokens, probabilities, vocab, return_masked_tokens=True, **settings),
        )

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """True, since an epoch changes masks but not sizes."""
        return True

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.probabilities.set_epoch(epoch)
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        key, latest = (self.epoch, int(index)), self._latest
        if latest is None or latest[0] != key:
            latest = self._latest = (key, self._masked(*key))
        return latest[1]

    def _masked(self, epoch: int, index: int) -> torch.Tensor:
        tokens = self.dataset[index]
        probabilities = self.probabilities[index].numpy() * is_known(tokens, self.vocab).numpy()
        rng = np.random.default_rng([self.seed, epoch, index])
        masked = rng.random(len(tokens)) < probabilities
        ids = tokens.numpy()
        assert not (ids == self.vocab.index("<mask>")).any(), f"sample {index} already holds <mask>"
        if self.return_masked_tokens:
            return torch.from_numpy(np.where(masked, ids, self.vocab.pad()))
        mask = self.vocab.index("<mask>")
        return torch.from_numpy(self.fates.written(ids, masked, rng, mask=mask, cumulative=self._cumulative))
