"""Span denoising (Raffel et al., 2020) for encoder-decoders of Hugging Face, in the library's Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mlsm_plugin.data.span_corruption import SpanCorruptionCollator
from mlsm_plugin.huggingface.collators import IGNORED


class SpanDenoisingCollator(SpanCorruptionCollator):
    """Turns texts into batches of a stock encoder-decoder that makes its decoder's input from labels, such as T5.

    Arguments, and what the spans depend on: as of :class:`~mlsm_plugin.data.span_corruption.SpanCorruptionCollator`.
    """

    def __call__(self, texts: Sequence[Any]) -> dict[str, Tensor]:
        """Make a batch of B ``texts``, each ids ``(n_i,)`` without EOS.

        Returns:
            ``input_ids`` and ``attention_mask`` (B, S), and ``labels`` (B, T): the target, then -100; int64.

        Raises:
            ValueError: a text has less than two ids, or contains a sentinel.
        """
        pairs = self.pairs(texts)
        sources, targets = ([torch.from_numpy(one) for one in side] for side in zip(*pairs, strict=True))
        attended = [torch.ones_like(source) for source in sources]
        return {
            "input_ids": pad_sequence(sources, batch_first=True, padding_value=self.pad),
            "attention_mask": pad_sequence(attended, batch_first=True),
            "labels": pad_sequence(targets, batch_first=True, padding_value=IGNORED),
        }
