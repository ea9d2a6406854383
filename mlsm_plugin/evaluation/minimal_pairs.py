"""Accuracy on minimal pairs by pseudo-log-likelihood (Salazar et al., ACL 2020): BLiMP (Warstadt et al., 2020), its
supplement and EWoK (Ivanova et al., 2024), with the files and the means of the BabyLM evaluation pipeline.
"""

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.text.text_files import (
    COMPRESSED_ENDINGS,
    JSON_ENDINGS,
    check_text,
    is_json_lines,
    json_objects,
    name_without_endings,
)
from mlsm_plugin.core.text.unknown_tokens import DEFAULT_MAX_UNK_RATE
from mlsm_plugin.evaluation.pair_models import PairModel

if TYPE_CHECKING:
    from mlsm_plugin.hub.interface import MlsmHubInterface

# In nats; a smaller difference between the scores of a pair is a tie. The batch changes a score by rounding: by at most
# 7.4e-6 for 120 sentences of 19 tokens on average, in ten batches each.
TIE = 1e-3
logger = logging.getLogger(__name__)
LARGEST_TIES = 0.5  # share of the pairs; a larger share causes a warning
NAMED_FILES = 5  # in a warning
SHOWN_CHARACTERS = 80  # of a sentence in an error message
BLIMP = ("sentence_good", "sentence_bad")
EWOK = ("Target1", "Target1", "Context1", "Context2")
KEYS = "the texts sentence_good and sentence_bad (BLiMP), or Context1, Context2 and Target1 (EWoK)"


@dataclass(frozen=True)
class MinimalPair:
    """An acceptable and an unacceptable sentence; or the same sentence after a fitting context and after another."""

    good: str
    bad: str
    where: str  # file and line, for error messages
    contexts: Sequence[str] = ("", "")  # texts before the sentences, which are read, but not scored
    task: str = ""
    field: str | None = None  # the field of linguistics, in BLiMP


def pair_files(paths: Sequence[PathLike]) -> list[str]:
    """The files themselves, and the sorted ``*.jsonl`` files, plain or compressed, in folders and their subfolders.

    Warns of files in folders that are left out, and of files that may be copies of each other. FileNotFoundError if a
    folder has no such file.
    """
    by_location: dict[str, str] = {}
    for path in paths:
        for file in _files_in(Path(path)) if Path(path).is_dir() else [str(path)]:
            by_location.setdefault(os.path.realpath(file), file)
    files = list(by_location.values())
    names: dict[tuple[Path, str], list[str]] = {}
    for file in files:
        names.setdefault((Path(file).parent, name_without_endings(file)), []).append(file)
    for same_name in names.values():
        if len(same_name) > 1:
            logger.warning(f"{' and '.join(same_name)} are both read; if one is a copy, leave it out")
    return files


def _files_in(folder: Path) -> list[str]:
    """The files with pairs in a folder and its subfolders; hidden folders are ignored."""
    files: list[str] = []
    left_out: list[str] = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") for part in parts[:-1]) or (path.is_dir() and not path.is_symlink()):
            continue
        readable = path.is_file() and path.suffix.lower() in (*JSON_ENDINGS, *COMPRESSED_ENDINGS)
        pairs = readable and is_json_lines(path) and not path.name.startswith(".")
        (files if pairs else left_out).append(str(path))
    if not files:
        raise FileNotFoundError(f"{folder} has no *.jsonl; pass a folder of the pipeline, such as blimp_filtered")
    if left_out:
        more = f" and {len(left_out) - NAMED_FILES:,} more" if len(left_out) > NAMED_FILES else ""
        logger.warning(f"{folder}: not read: {', '.join(left_out[:NAMED_FILES])}{more}")
    return files


def read_pairs(path: PathLike) -> list[MinimalPair]:
    """Read JSON lines of BLiMP, its supplement or EWoK; blank lines and other keys are skipped.

    BLiMP has ``sentence_good`` and ``sentence_bad``, and may have ``field`` and the task, ``UID``. EWoK has
    ``Context1``, ``Context2`` and ``Target1``. ``Target1`` is scored after each context; the first is the right one.
    The task is the ``Domain``. Without ``UID`` or ``Domain``, a task has the name of its file.

    ValueError if a line is not a JSON object or lacks a text (the message names the line), or there is no pair.
    """
    pairs = []
    for number, item in json_objects(path):
        where = f"{path}, line {number}"
        texts: list[Any] = [item.get(key) for key in (EWOK if "Target1" in item else BLIMP)]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(f"{where} needs {KEYS}")
        names = {key: item[key] for key in ("UID", "Domain", "field") if isinstance(item.get(key), str)}
        task = names.get("UID", names.get("Domain", name_without_endings(path)))
        field = names.get("field")
        for text in (*texts, *names.values()):
            check_text(text, where)
        field = "syntax/semantics" if field == "syntax_semantics" else field  # the pipeline's name for it
        good, bad, *contexts = texts
        pairs.append(MinimalPair(good, bad, where, contexts or ("", ""), task, field))
    if not pairs:
        raise ValueError(f"{path} holds no pair")
    return pairs


def evaluate_pairs(
    model: PairModel,
    files: Mapping[str, Sequence[MinimalPair]],
    *,
    max_unk_rate: float = DEFAULT_MAX_UNK_RATE,
    batch_tokens: int = 8192,
) -> JsonObject:
    """How often a masked LM finds the good sentence of a pair more likely.

    ``files`` holds the pairs of :func:`read_pairs` by the path of their file. At most the share ``max_unk_rate`` of a
    file may be unknown. ValueError if more is unknown, or as in :func:`compare_pairs`.

    Returns:
        ``pairs``, ``accuracy`` and ``ties`` over all files, the same for each file under ``files`` and for each field
        under ``fields``; ``mean_of_files``, the mean accuracy of the files; under ``folders`` for each folder its
        number of ``tasks`` and their mean ``accuracy``, as in the pipeline; and ``mean``, the mean over the folders.
    """
    for path, pairs in files.items():
        texts = [text for pair in pairs for text in (pair.good, pair.bad, *pair.contexts)]
        unknown = model.unknown(text for text in texts if text)
        unknown.check(path, max_unk_rate)
        unknown.warn(path)
    all_pairs = [(path, pair) for path, pairs in files.items() for pair in pairs]
    verdicts = compare_pairs(model, [pair for _, pair in all_pairs], batch_tokens=batch_tokens)
    groups: dict[str, dict[Any, list[int]]] = {"files": {}, "fields": {}, "tasks": {}}
    for (path, pair), verdict in zip(all_pairs, verdicts, strict=True):
        names = (path, pair.field, (str(Path(path).parent), pair.task))
        for group, name in zip(groups.values(), names, strict=True):
            group.setdefault(name, []).append(verdict)
    groups["fields"].pop(None, None)
    ties = verdicts.count(0)
    if ties > LARGEST_TIES * len(verdicts):
        logger.warning(
            f"{ties:,} of {len(verdicts):,} pairs are ties, which do not count as right: the model does not tell the "
            "sentences apart, or they have the same ids"
        )
    figures = {group: {name: _figures(part) for name, part in parts.items()} for group, parts in groups.items()}
    folders: dict[str, list[float]] = {}
    for (folder, _), task in figures.pop("tasks").items():
        folders.setdefault(folder, []).append(task["accuracy"])
    means = {folder: {"tasks": len(tasks), "accuracy": fmean(tasks)} for folder, tasks in folders.items()}
    mean_of_files = fmean(file["accuracy"] for file in figures["files"].values())
    mean = fmean(folder_means["accuracy"] for folder_means in means.values())
    return {**figures, **_figures(verdicts), "mean_of_files": mean_of_files, "folders": means, "mean": mean}


def _figures(verdicts: list[int]) -> JsonObject:
    return {"pairs": len(verdicts), "accuracy": verdicts.count(1) / len(verdicts), "ties": verdicts.count(0)}


@torch.no_grad()
def pseudo_log_likelihoods(
    model: "PairModel | MlsmHubInterface",
    encoded: Sequence[Tensor],
    starts: Sequence[int] | None = None,
    *,
    batch_tokens: int = 8192,
    progress: bool = False,
) -> list[float]:
    """The sum of ``log p(token | all other tokens)`` over the scored tokens of each sentence, in nats.

    ``model`` is a :class:`PairModel`, or a masked LM loaded by :func:`mlsm_plugin.hub.from_pretrained`; ``encoded`` has
    the ids ``(T,)`` of each sentence, including special tokens at its ends; ``starts`` has the place of its first
    scored token (None: all tokens of the sentence are scored). A forward pass has at most ``batch_tokens`` tokens; n
    scored tokens take n rows. ValueError if a score is not finite.
    """
    model = _pair_model(model)
    scores = [0.0] * len(encoded)
    places = starts or [model.before] * len(encoded)
    ends = [len(tokens) - model.after for tokens in encoded]
    total = sum(end - start for start, end in zip(places, ends, strict=True))
    with Progress(total=total, unit="token", unit_scale=True, disable=not progress) as bar:
        for rows in _batches(encoded, places, ends, batch_tokens):
            width = max(len(encoded[sentence]) for sentence, _ in rows)
            batch = torch.full((len(rows), width), model.pad)
            targets = torch.zeros(len(rows), dtype=torch.long)
            masked = torch.zeros_like(batch, dtype=torch.bool)
            for row, (sentence, place) in enumerate(rows):
                tokens = encoded[sentence]
                batch[row, : len(tokens)] = tokens
                targets[row] = tokens[place]
                batch[row, place] = model.mask
                masked[row, place] = True
            logits = model.logits(batch.to(model.device), masked.to(model.device))
            log_probabilities = logits.float().cpu().log_softmax(dim=-1).gather(1, targets[:, None]).squeeze(1).double()
            for (sentence, _), score in zip(rows, log_probabilities.tolist(), strict=True):
                scores[sentence] += score
            bar.update(len(rows))
    if not all(map(math.isfinite, scores)):
        raise ValueError("the model's scores are not finite; its weights are damaged, or its training diverged")
    return scores


def compare_pairs(
    model: "PairModel | MlsmHubInterface", pairs: Sequence[MinimalPair], *, batch_tokens: int = 8192
) -> list[int]:
    """For each pair, 1 if the good sentence is more likely, -1 if the bad sentence is, and 0 for a tie.

    A tie means that the scores of :func:`pseudo_log_likelihoods` differ by less than ``TIE``. In a pair with contexts,
    only the tokens after the context are scored. The result does not depend on ``batch_tokens``: sentences with the
    same ids have the same score, and pairs close to a tie are scored again, each sentence in a separate batch.
    ValueError if a sentence has no token to score, has more tokens than the model has positions, or its context ends
    within a token (the message names file and line); or if a score is not finite.
    """
    model = _pair_model(model)
    encoded = [
        _encode(model, text, context, pair.where)
        for pair in pairs
        for text, context in zip((pair.good, pair.bad), pair.contexts, strict=True)
    ]
    keys = [(start, *tokens.tolist()) for tokens, start in encoded]
    unique = dict(zip(keys, encoded, strict=True))
    sentences = [tokens for tokens, _ in unique.values()]
    starts = [start for _, start in unique.values()]
    sentence_scores = pseudo_log_likelihoods(model, sentences, starts, batch_tokens=batch_tokens, progress=True)
    scores = dict(zip(unique, sentence_scores, strict=True))

    def difference(good: tuple[int, ...], bad: tuple[int, ...]) -> float:
        if good == bad or abs(scores[good] - scores[bad]) >= 2 * TIE:
            return scores[good] - scores[bad]
        alone = [pseudo_log_likelihoods(model, [unique[key][0]], [key[0]])[0] for key in (good, bad)]
        return alone[0] - alone[1]

    differences = [difference(good, bad) for good, bad in zip(keys[::2], keys[1::2], strict=True)]
    return [_verdict(value) for value in differences]


def _verdict(difference: float) -> int:
    """1 for a positive difference, -1 for a negative difference, and 0 for a tie."""
    if abs(difference) < TIE:
        return 0
    return 1 if difference > 0 else -1


def _pair_model(model: "PairModel | MlsmHubInterface") -> PairModel:
    return model if isinstance(model, PairModel) else PairModel(model)


def _encode(model: PairModel, text: str, context: str, where: str) -> tuple[Tensor, int]:
    """Ids ``(T,)`` of a context and a sentence, and the place of the sentence's first token; errors name ``where``."""
    text = f"{context} {text}" if context else text
    tokens = model.encode(text)
    before = tokens[: model.before]
    if context:
        context_ids = model.encode(context)
        before = context_ids[: len(context_ids) - model.after]
    shown = repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "...")
    if len(tokens) == len(before) + model.after:
        raise ValueError(f"{where}: a sentence has no token, so it cannot be scored: {shown}")
    if len(tokens) > model.positions:
        raise ValueError(
            f"{where}: a sentence has {len(tokens)} tokens, more than the {model.positions} positions of the model: "
            f"{shown}"
        )
    if not torch.equal(tokens[: len(before)], before):
        raise ValueError(f"{where}: the tokenizer has a token across the end of the context: {shown}")
    return tokens, len(before)


def _batches(
    encoded: Sequence[Tensor], starts: Sequence[int], ends: Sequence[int], batch_tokens: int
) -> Iterator[list[tuple[int, int]]]:
    """Batches of (sentence, place of its mask) for all scored tokens, sorted by length."""
    rows: list[tuple[int, int]] = []
    for sentence in sorted(range(len(encoded)), key=lambda i: len(encoded[i])):
        length = len(encoded[sentence])
        for place in range(starts[sentence], ends[sentence]):
            if rows and (len(rows) + 1) * length > batch_tokens:
                yield rows
                rows = []
            rows.append((sentence, place))
    if rows:
        yield rows
