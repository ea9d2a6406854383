#!/usr/bin/env python3
"""How often does a model find the word that was masked in a sentence: retrieved from a corpus, or predicted?

    python research/retrieval_accuracy.py text.txt --retrieve npm.pt DATASTORE --predict mlm.pt

Masks a random single-token word in each line of a text, so that a masked LM can predict it too. A model with a
datastore is right if its best phrase is this word. It may answer with phrases of several tokens, but only with phrases
from its corpus. Rarer words are all except the most frequent types that make up half of the training text.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comparison.masked_lm_loss import frequent_types

from mlsm_plugin import hub
from mlsm_plugin.cli.actions import HelpFormatter
from mlsm_plugin.core.files.atomic_files import write_json
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.evaluation.masked_lms import why_untrained
from mlsm_plugin.fairseq_plugin.text.masked_text import MASK
from mlsm_plugin.retrieval import PhraseDatastore
from mlsm_plugin.retrieval.phrase_filling import FillingSettings

FEWEST_WORDS = 5
TOP = 5


@dataclass(frozen=True)
class MaskedWord:
    """A sentence with a masked word: the text before it, the word, the text after it, and whether the word is rarer."""

    before: str
    word: str
    after: str
    rarer: bool

    def filled(self, word: str) -> str:
        """The sentence with ``word`` in the place of the mask."""
        return " ".join(part for part in (self.before, word, self.after) if part)


@dataclass(frozen=True)
class Accuracy:
    """How often the word is the best answer, or among the best five; ``rarer``: the best answer, for rarer words."""

    model: str
    best: float
    top: float
    rarer: float


def mask_words(lines: Sequence[str], model: Any, *, count: int, seed: int) -> list[MaskedWord]:
    """Mask a random word in each of ``count`` random lines; the word has only letters, and is one token of ``model``.

    Raises:
        ValueError: no line has such a word.
    """
    dictionary = model.task.source_dictionary
    drawn = random.Random(seed)
    frequent = frequent_types(dictionary)
    masked = []
    for line in drawn.sample(lines, len(lines)):
        words = line.split()
        tokens = [dictionary.index(model.bpe.encode(word)) if word.isalpha() else dictionary.unk() for word in words]
        places = [place for place, token in enumerate(tokens) if token != dictionary.unk()]
        if len(words) >= FEWEST_WORDS and places and MASK not in line:
            place = drawn.choice(places)
            parts = (" ".join(words[:place]), words[place], " ".join(words[place + 1 :]))
            masked.append(MaskedWord(*parts, rarer=not bool(frequent[tokens[place]])))
            if len(masked) == count:
                break
    if not masked:
        raise ValueError(f"no line has {FEWEST_WORDS} words, one of which is a single token")
    return masked


def accuracy_of(name: str, masked: Sequence[MaskedWord], answers: Callable[[str], list[str]]) -> Accuracy:
    """How often the original text is among the answers.

    Args:
        name: of the model.
        masked: the sentences.
        answers: fills the mask of a text; returns whole texts, the best first.
    """
    best = top = rarer = 0
    for sentence in Progress(masked, desc=name, unit="word"):
        texts = answers(sentence.filled(MASK))
        original = sentence.filled(sentence.word)
        right = texts[:1] == [original]
        best = best + right
        top = top + (original in texts)
        rarer = rarer + (right and sentence.rarer)
    rarer_words = sum(sentence.rarer for sentence in masked)
    return Accuracy(name, best / len(masked), top / len(masked), rarer / max(1, rarer_words))


def retrieving(model: Any, datastore: PhraseDatastore, *, max_length: int) -> Callable[[str], list[str]]:
    """A function that fills a mask with the best phrases of a datastore, of at most ``max_length`` tokens."""

    def answers(text: str) -> list[str]:
        before, after = text.split(MASK)
        candidates = model.fill_phrase(text, datastore, TOP, max_length=max_length)
        return [before + candidate.phrase + after for candidate in candidates]

    return answers


def predicting(model: Any) -> Callable[[str], list[str]]:
    """A function that fills a mask with the most likely tokens.

    Raises:
        ValueError: the masked-LM head of the model was not trained.
    """
    why = why_untrained(model.cfg)
    if why is not None:
        raise ValueError(f"{why}: --predict needs a masked LM")
    return lambda text: [filled.strip() for filled, _, _ in model.fill_mask(text, topk=TOP)]


def datastore_of(folder: str, checkpoint: str) -> PhraseDatastore:
    """Open a datastore that was made with ``checkpoint``.

    Raises:
        ValueError: it was made with another checkpoint.
    """
    datastore = PhraseDatastore(folder)
    datastore.check_belongs_to(hub.checkpoint_of(checkpoint))
    return datastore


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=HelpFormatter)
    parser.add_argument("text", metavar="FILE", help="UTF-8 text, one sentence a line")
    parser.add_argument(
        "--retrieve", nargs=2, action="append", default=[], metavar=("CHECKPOINT", "DATASTORE"),
        help="a model, and a datastore that `mlsm npm datastore` made with it; can be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--predict", action="append", default=[], metavar="CHECKPOINT", help="a masked LM; can be repeated"
    )
    parser.add_argument(
        "--max-length", type=int, default=FillingSettings.max_length, metavar="N", help="longest phrase in tokens"
    )
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="number of words to mask")
    parser.add_argument("--seed", type=int, default=1, help="decides which words are masked")
    parser.add_argument("--output", type=Path, metavar="JSON", help="also write the figures to this file")
    args = parser.parse_args()
    if not (args.retrieve or args.predict):
        parser.error("there is no model: give --retrieve or --predict")
    for name in ("count", "max_length"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    accuracies = []
    try:
        with open(args.text, encoding="utf-8") as file:
            lines = [line for line in file if line.strip()]
        stores = [datastore_of(folder, checkpoint) for checkpoint, folder in args.retrieve]
        first = args.retrieve[0][0] if args.retrieve else args.predict[0]
        masked = mask_words(lines, hub.from_pretrained(first), count=args.count, seed=args.seed)
        for (checkpoint, _), store in zip(args.retrieve, stores, strict=True):
            answers = retrieving(hub.from_pretrained(checkpoint), store, max_length=args.max_length)
            accuracies.append(accuracy_of(f"{checkpoint}, retrieved", masked, answers))
        for checkpoint in args.predict:
            answers = predicting(hub.from_pretrained(checkpoint))
            accuracies.append(accuracy_of(f"{checkpoint}, predicted", masked, answers))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    most = Counter(sentence.word for sentence in masked).most_common(1)[0][1] / len(masked)
    rarer = sum(sentence.rarer for sentence in masked)
    if args.output:
        models = [asdict(accuracy) for accuracy in accuracies]
        write_json(args.output, {"words": len(masked), "rarer": rarer, "most_frequent": most, "models": models})
    rows = ["| model | best, % | among the best five, % | best, rarer words, % |", "| --- | --- | --- | --- |"]
    for accuracy in accuracies:
        figures = " | ".join(f"{100 * share:.1f}" for share in (accuracy.best, accuracy.top, accuracy.rarer))
        rows.append(f"| {accuracy.model} | {figures} |")
    print("\n".join(rows))
    print(f"{len(masked):,} words, {rarer:,} of them rarer; always the most frequent one: {100 * most:.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
