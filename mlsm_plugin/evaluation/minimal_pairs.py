"""Accuracy on minimal pairs (Warstadt et al., BLiMP, 2020) by pseudo-log-likelihood (Salazar et al., ACL 2020)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlsm_plugin.files.json_text import parse_json
from mlsm_plugin.files.progress import Progress
from mlsm_plugin.hidden_states.masked_lms import why_untrained
from mlsm_plugin.tokenization.text_files import numbered_lines

SHOWN_CHARACTERS = 80  # of a sentence in an error message


@dataclass(frozen=True)
class MinimalPair:
    """A minimal pair: one line of a file.

    Attributes:
        good, bad: an acceptable sentence, and one that is not.
        where: file and line, for error messages.
    """

    good: str
    bad: str
    where: str


def read_pairs(path: str | os.PathLike[str]) -> list[MinimalPair]:
    """Read JSON lines with ``sentence_good`` and ``sentence_bad``, as in BLiMP; blank lines are skipped.

    Raises:
        ValueError: a line is not a JSON object or lacks a sentence (the message names the line), or there is no pair.
    """
    pairs = []
    for number, line in numbered_lines(path):
        where = f"{path}, line {number}"
        try:
            item = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        item = item if isinstance(item, dict) else {}
        good, bad = item.get("sentence_good"), item.get("sentence_bad")
        if not (isinstance(good, str) and isinstance(bad, str) and good.strip() and bad.strip()):
            raise ValueError(f"{where} needs the texts sentence_good and sentence_bad")
        pairs.append(MinimalPair(good, bad, where))
    if not pairs:
        raise ValueError(f"{path} holds no pair")
    return pairs


def check_head_was_trained(interface: Any) -> None:
    """Raise ValueError if the model's masked-LM head was not trained."""
    why = why_untrained(interface.cfg)
    if why is not None:
        raise ValueError(f"{why}: sentences cannot be scored")


@torch.no_grad()
def pseudo_log_likelihoods(
    interface: Any, sentences: Sequence[str], *, batch_tokens: int = 8192, progress: bool = False
) -> list[float]:
    """For each sentence the sum over its tokens of ``log p(token | all others)``, in nats.

    Args:
        interface: a loaded masked LM, see :func:`mlsm_plugin.hub.from_pretrained`.
        sentences: texts.
        batch_tokens: tokens in a forward pass; a sentence of n tokens takes n rows.
        progress: show a bar.

    Raises:
        ValueError: a sentence has more tokens than the model has positions.
    """
    limit = int(interface.model.max_positions())
    encoded = [interface.encode(sentence) for sentence in sentences]
    for text, tokens in zip(sentences, encoded, strict=True):
        if len(tokens) > limit:
            shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
            raise ValueError(
                f"a sentence has {len(tokens)} tokens, more than the {limit} positions of the model: {shown!r}"
            )
    scores = [0.0] * len(encoded)
    mask, pad = interface.task.mask_idx, interface.task.source_dictionary.pad()
    total = sum(max(0, len(tokens) - 2) for tokens in encoded)
    with Progress(total=total, unit="token", unit_scale=True, disable=not progress) as bar:
        for rows in _batches(encoded, batch_tokens):
            width = max(len(encoded[sentence]) for sentence, _ in rows)
            batch = torch.full((len(rows), width), pad)
            targets = torch.zeros(len(rows), dtype=torch.long)
            places = torch.zeros_like(batch, dtype=torch.bool)
            for row, (sentence, place) in enumerate(rows):
                tokens = encoded[sentence]
                batch[row, : len(tokens)] = tokens
                targets[row], batch[row, place], places[row, place] = tokens[place], mask, True
            logits = interface.model(batch.to(interface.device), masked_tokens=places.to(interface.device))[0]
            found = _log_probabilities(logits.float().cpu(), targets)
            for (sentence, _), score in zip(rows, found.tolist(), strict=True):
                scores[sentence] += score
            bar.update(len(rows))
    return scores


def _log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities ``(n,)`` float64 of the targets ``(n,)``, given logits ``(n, V)``."""
    return logits.log_softmax(dim=-1).gather(1, targets[:, None]).squeeze(1).double()


def _batches(encoded: list[Tensor], batch_tokens: int) -> Iterator[list[tuple[int, int]]]:
    """Batches of (sentence, place of its mask) for all tokens but BOS and EOS, similar lengths together."""
    rows: list[tuple[int, int]] = []
    for sentence in sorted(range(len(encoded)), key=lambda i: len(encoded[i])):
        length = len(encoded[sentence])
        for place in range(1, length - 1):
            if rows and (len(rows) + 1) * length > batch_tokens:
                yield rows
                rows = []
            rows.append((sentence, place))
    if rows:
        yield rows


def accuracy_of_pairs(interface: Any, pairs: Sequence[MinimalPair], **how: Any) -> float:
    """Share of the pairs whose good sentence is more likely; equally likely ones do not count as right.

    Args:
        interface: a loaded masked LM.
        pairs: the pairs of a file.
        how: keyword arguments of :func:`pseudo_log_likelihoods`.
    """
    scores = pseudo_log_likelihoods(interface, [text for pair in pairs for text in (pair.good, pair.bad)], **how)
    return sum(good > bad for good, bad in zip(scores[::2], scores[1::2], strict=True)) / len(pairs)
