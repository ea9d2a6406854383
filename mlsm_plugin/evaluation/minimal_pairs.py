"""Accuracy on minimal pairs (Warstadt et al., BLiMP, 2020) by pseudo-log-likelihood (Salazar et al., ACL 2020)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike, parse_json
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.text.text_files import numbered_lines
from mlsm_plugin.core.text.unknown_tokens import ANOTHER_TOKENIZER, DEFAULT_MAX_UNK_RATE, check_known
from mlsm_plugin.fairseq_door.seams.training_options import why_untrained

# Nats; scores of a pair that differ by less are a tie. Batches change a score by float noise: by at most 7.4e-6 for 120
# sentences of 19 tokens on average, in ten batches each.
TIE = 1e-3
SHOWN_CHARACTERS = 80  # of a sentence in an error message


@dataclass(frozen=True)
class MinimalPair:
    """An acceptable sentence, and one that is not."""

    good: str
    bad: str
    where: str  # file and line, for error messages


def read_pairs(path: PathLike) -> list[MinimalPair]:
    """Read JSON lines with ``sentence_good`` and ``sentence_bad``, as in BLiMP; blank lines are skipped.

    ValueError if a line is not a JSON object or lacks a sentence (the message names the line), or there is no pair.
    """
    pairs = []
    for number, line in numbered_lines(path, json_lines=True):
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


def evaluate_pairs(
    interface: Any,
    files: Mapping[str, Sequence[MinimalPair]],
    *,
    max_unk_rate: float = DEFAULT_MAX_UNK_RATE,
    batch_tokens: int = 8192,
) -> dict[str, Any]:
    """How often a loaded masked LM finds the good sentence of a pair more likely.

    ``files`` holds the pairs of :func:`read_pairs` by the name of their file, of whose tokens the share
    ``max_unk_rate`` may be unknown. ValueError if the model's masked-LM head was not trained, too many tokens are
    unknown, or as of :func:`compare_pairs`.

    Returns:
        ``pairs``, ``accuracy`` and ``ties`` over all files, the same of each under ``files``, and ``mean_of_files``,
        the mean of their accuracies.
    """
    if (why := why_untrained(interface.cfg)) is not None:
        raise ValueError(f"{why}: sentences cannot be scored")
    for path, pairs in files.items():
        texts, dictionary = (text for pair in pairs for text in (pair.good, pair.bad)), interface.task.source_dictionary
        check_known(texts, interface.bpe, dictionary, max_unk_rate, where=path, remedy=ANOTHER_TOKENIZER)
    verdicts = compare_pairs(interface, [pair for own in files.values() for pair in own], batch_tokens=batch_tokens)
    of_files = iter(verdicts)
    figures = {path: _figures(list(islice(of_files, len(own)))) for path, own in files.items()}
    mean = sum(own["accuracy"] for own in figures.values()) / len(figures)
    return {"files": figures, **_figures(verdicts), "mean_of_files": mean}


def _figures(verdicts: list[int]) -> dict[str, Any]:
    return {"pairs": len(verdicts), "accuracy": verdicts.count(1) / len(verdicts), "ties": verdicts.count(0)}


@torch.no_grad()
def pseudo_log_likelihoods(
    interface: Any, encoded: Sequence[Tensor], *, batch_tokens: int = 8192, progress: bool = False
) -> list[float]:
    """For each sentence the sum over its tokens of ``log p(token | all others)``, in nats.

    ``interface`` is a loaded masked LM, see :func:`mlsm_plugin.hub.from_pretrained`; ``encoded`` has the ids of each
    sentence with BOS and EOS, ``(T,)``. A forward pass has ``batch_tokens``; a sentence of n tokens takes n rows.
    ValueError if a score is not finite.
    """
    scores = [0.0] * len(encoded)
    mask, pad = interface.task.mask_idx, interface.task.source_dictionary.pad()
    total = sum(len(tokens) - 2 for tokens in encoded)
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
            found = logits.float().cpu().log_softmax(dim=-1).gather(1, targets[:, None]).squeeze(1).double()
            for (sentence, _), score in zip(rows, found.tolist(), strict=True):
                scores[sentence] += score
            bar.update(len(rows))
    if not all(map(math.isfinite, scores)):
        raise ValueError("the model's scores are not finite; its weights are damaged, or its training diverged")
    return scores


def compare_pairs(interface: Any, pairs: Sequence[MinimalPair], *, batch_tokens: int = 8192) -> list[int]:
    """For each pair 1 if the good sentence is more likely, -1 if the bad one is, and 0 for a tie.

    It is a tie if the scores of :func:`pseudo_log_likelihoods` differ by less than ``TIE``. The result does not depend
    on ``batch_tokens``: sentences with the same ids have the same score, and pairs close to a tie are scored again,
    each sentence in a batch of its own. ValueError if a sentence has no token, or more than the model has positions
    (the message names file and line), or a score is not finite.
    """
    encoded = [_encode(interface, text, pair.where) for pair in pairs for text in (pair.good, pair.bad)]
    unique = {tuple(tokens.tolist()): tokens for tokens in encoded}
    found = pseudo_log_likelihoods(interface, list(unique.values()), batch_tokens=batch_tokens, progress=True)
    scores = dict(zip(unique, found, strict=True))

    def difference(good: tuple[int, ...], bad: tuple[int, ...]) -> float:
        if good == bad or abs(scores[good] - scores[bad]) >= 2 * TIE:
            return scores[good] - scores[bad]
        alone = [pseudo_log_likelihoods(interface, [unique[ids]])[0] for ids in (good, bad)]
        return alone[0] - alone[1]

    ids = [tuple(tokens.tolist()) for tokens in encoded]
    differences = [difference(good, bad) for good, bad in zip(ids[::2], ids[1::2], strict=True)]
    return [0 if abs(value) < TIE else 1 if value > 0 else -1 for value in differences]


def _encode(interface: Any, text: str, where: str) -> Tensor:
    """Ids ``(T,)`` of a sentence with BOS and EOS; ``where`` it stands, for error messages."""
    tokens: Tensor = interface.encode(text)
    limit = int(interface.model.max_positions())
    shown = repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "...")
    if len(tokens) == 2:
        raise ValueError(f"{where}: a sentence has no token, so that it cannot be scored: {shown}")
    if len(tokens) > limit:
        raise ValueError(
            f"{where}: a sentence has {len(tokens)} tokens, more than the {limit} positions of the model: {shown}"
        )
    return tokens


def _batches(encoded: Sequence[Tensor], batch_tokens: int) -> Iterator[list[tuple[int, int]]]:
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
