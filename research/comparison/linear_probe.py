"""What a linear classifier reads from the frozen hidden states of a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

logger = logging.getLogger(__name__)

PENALTIES = (1e-4, 1e-3, 1e-2)  # L2, of which one is chosen
HELD_OUT = 10  # every tenth training row chooses it


@torch.no_grad()
def sentence_means(interface: Any, texts: Sequence[str], *, batch_size: int = 64) -> Tensor:
    """The mean of the last hidden states of each text; texts that are too long are cut, with a warning.

    Args:
        interface: a loaded model, see :func:`mlsm_plugin.hub.from_pretrained`.
        texts: the texts.
        batch_size: texts at once.

    Returns:
        ``(n, dim)`` float64, on the CPU.

    Raises:
        ValueError: a text has no token.
    """
    pad, limit = interface.task.source_dictionary.pad(), int(interface.model.max_positions())
    encoded = [interface.encode(text) for text in texts]
    for text, own in zip(texts, encoded, strict=True):
        if len(own) == 2:  # BOS and EOS
            raise ValueError(f"the text {text!r} has no tokens after normalization")
    if too_long := sum(len(own) > limit for own in encoded):
        logger.warning("%d of %d texts are longer than the model's positions and are cut", too_long, len(texts))
    found = []
    for first in range(0, len(texts), batch_size):
        rows = [own[:limit] for own in encoded[first : first + batch_size]]
        tokens = pad_sequence(rows, batch_first=True, padding_value=pad)
        hidden = interface.extract_features(tokens).double().cpu()
        kept = tokens.ne(pad)[:, :, None]
        found.append((hidden * kept).sum(dim=1) / kept.sum(dim=1))
    return torch.cat(found)


def probe_accuracy(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> float:
    """Share of the test rows that logistic regression on the training rows labels correctly.

    Each column is standardized as in the training rows. The L2 penalty is chosen on every tenth training row.

    Args:
        train, test: ``(n, dim)`` float64.
        train_labels, test_labels: ``(n,)`` int64, from 0.

    Raises:
        ValueError: there are fewer than two training rows.
    """
    if len(train) < 2:
        raise ValueError(f"a linear probe needs at least 2 training rows, got {len(train)}")
    mean, deviation = train.mean(dim=0), train.std(dim=0).clamp(min=1e-6)
    train, test = (train - mean) / deviation, (test - mean) / deviation
    held_out = torch.arange(len(train)) % HELD_OUT == 0
    classes = int(torch.cat([train_labels, test_labels]).max()) + 1

    def accuracy_with(penalty: float) -> float:
        weights = logistic_regression(train[~held_out], train_labels[~held_out], classes, penalty)
        return _accuracy(train[held_out], train_labels[held_out], weights)

    best = max(PENALTIES, key=accuracy_with)
    return _accuracy(test, test_labels, logistic_regression(train, train_labels, classes, best))


def logistic_regression(rows: Tensor, labels: Tensor, classes: int, penalty: float) -> Tensor:
    """Multinomial logistic regression by L-BFGS.

    The objective is the mean cross entropy plus ``penalty`` times the squared norm of all weights.

    Args:
        rows: ``(n, dim)`` float64.
        labels: ``(n,)`` int64.
        classes: number of classes.
        penalty: not negative.

    Returns:
        ``(dim + 1, classes)``; the last row holds the intercepts.
    """
    rows = F.pad(rows, (0, 1), value=1.0)
    weights = torch.zeros(rows.size(1), classes, dtype=rows.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(rows @ weights, labels) + penalty * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach()


def _accuracy(rows: Tensor, labels: Tensor, weights: Tensor) -> float:
    found = (F.pad(rows, (0, 1), value=1.0) @ weights).argmax(dim=1)
    return float((found == labels).double().mean())
