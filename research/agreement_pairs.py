#!/usr/bin/env python3
"""Make minimal pairs from a text by rules: agreement in number, and exchanged words.

    python research/agreement_pairs.py held_out.txt --output DIR [--number 1000] [--seed 1]

Writes JSON lines in BLiMP's format, for ``mlsm evaluate pairs``:

- ``agreement.jsonl``: in a sentence of the text, the number of a demonstrative or of a verb is changed.
  *Demonstrative*: ``this``/``these`` and ``that``/``those`` right before a noun. *Verb*: ``is``/``are``,
  ``was``/``were``, ``has``/``have`` and ``does``/``do`` right after a noun with a determiner before it (``the``, ``a``,
  ``his``, ...) that begins a clause: it is the first word, or follows a comma, a semicolon, a colon or a conjunction.
  The noun is then the subject, and not part of a phrase such as ``of the kings``. *Pronoun*: the same verbs right after
  ``he``, ``she``, ``it``, ``we`` or ``they`` that begins a clause.
- ``exchanged.jsonl``: two different neighbouring words inside a sentence are exchanged.

A word counts as a singular or plural noun if the texts have both forms. The plural ends in ``s``. Each form occurs
right after determiners of its number, and at most a fiftieth as often after determiners of the other number. Singular
determiners: ``a``, ``an``, ``this``, ``every``, ``each``; plural: ``these``, ``those``, ``many``, ``several``, ``few``,
``both``. ``--count`` names more texts in which these words are counted, but from which no pairs are made. Every pair
comes from a different sentence.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlsm_plugin.cli.actions import HelpFormatter
from mlsm_plugin.core.files.atomic_files import atomic_open

OF_ONE = ("a", "an", "this", "every", "each")
OF_MANY = ("these", "those", "many", "several", "few", "both")
DEMONSTRATIVES = {"this": "these", "these": "this", "that": "those", "those": "that"}
PRONOUNS = {"he": 1, "she": 1, "it": 1, "we": 2, "they": 2}
VERBS = {"is": "are", "was": "were", "has": "have", "does": "do"}
VERBS |= {plural: singular for singular, plural in VERBS.items()}
DETERMINERS = ("the", "a", "an", "this", "these", "those", "his", "her", "its", "their", "my", "our", "your", "some")
OPENERS = (",", ";", ":", "and", "but", "or", "that", "when", "if", "because", "while", "as", "although", "where")
WORDS = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
FEWEST_WORDS = 5
MOST_WORDS = 40
SELDOM = 50  # one exception in this many is allowed


def words_of(sentence: str) -> list[re.Match[str]]:
    """The words and punctuation marks of a sentence, with their positions."""
    return list(WORDS.finditer(sentence))


def noun_numbers(sentences: Sequence[str]) -> dict[str, int]:
    """The number of each noun: 1 for singular, 2 for plural; see the module's docstring."""
    after: dict[int, Counter[str]] = {1: Counter(), 2: Counter()}
    for sentence in sentences:
        words = [word.group().lower() for word in words_of(sentence)]
        for before, word in itertools.pairwise(words):
            number = 1 if before in OF_ONE else 2 if before in OF_MANY else None
            if number is not None and word.isalpha():
                after[number][word] += 1
    nouns: dict[str, int] = {}
    for plural in after[2]:
        for singular in singulars(plural):
            singles = after[1][singular]
            plurals = after[2][plural]
            if singles and SELDOM * after[2][singular] <= singles and SELDOM * after[1][plural] <= plurals:
                nouns |= {singular: 1, plural: 2}
    return nouns


def singulars(plural: str) -> list[str]:
    """The possible singular forms of ``plural``."""
    if len(plural) < 4 or not plural.endswith("s") or plural.endswith("ss"):
        return []
    candidates = [plural[:-1]]
    if plural.endswith("ies"):
        candidates.append(f"{plural[:-3]}y")
    elif plural.endswith("es"):
        candidates.append(plural[:-2])
    return candidates


def changed_number(sentence: str, numbers: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The kind of change and the changed sentence, for each place where the rules apply."""
    words = words_of(sentence)
    lower = [word.group().lower() for word in words]
    for place, word in enumerate(lower):
        following = numbers.get(lower[place + 1]) if place + 1 < len(words) else None
        if word in DEMONSTRATIVES and following == (2 if word in ("these", "those") else 1):
            yield "demonstrative", replaced(sentence, words[place], DEMONSTRATIVES[word])
        number = 2 if word in ("are", "were", "have", "do") else 1
        if word not in VERBS or place == 0:
            continue
        if PRONOUNS.get(lower[place - 1]) == number and (place == 1 or lower[place - 2] in OPENERS):
            yield "pronoun", replaced(sentence, words[place], VERBS[word])
            continue
        follows_noun = place >= 2 and lower[place - 2] in DETERMINERS and numbers.get(lower[place - 1]) == number
        if follows_noun and (place == 2 or lower[place - 3] in OPENERS):
            yield "verb", replaced(sentence, words[place], VERBS[word])


def replaced(sentence: str, word: re.Match[str], other: str) -> str:
    """The sentence with ``other`` in the place of ``word``, capitalized alike."""
    other = other.capitalize() if word.group()[0].isupper() else other
    return sentence[: word.start()] + other + sentence[word.end() :]


def exchanged(sentence: str, rng: random.Random) -> str | None:
    """The sentence with two neighbouring words exchanged, but not the first word; None if there are no such words."""
    words = words_of(sentence)
    places = [
        place
        for place in range(1, len(words) - 1)
        if words[place].group().isalpha() and words[place + 1].group().isalpha()
        and words[place].group().lower() != words[place + 1].group().lower()
    ]  # fmt: skip
    if not places:
        return None
    first, second = words[(place := rng.choice(places))], words[place + 1]
    between = sentence[first.end() : second.start()]
    return sentence[: first.start()] + second.group() + between + first.group() + sentence[second.end() :]


def make_pairs(
    sentences: Sequence[str], numbers: dict[str, int], number: int, seed: int
) -> dict[str, list[dict[str, str]]]:
    """The pairs of each file.

    Args:
        sentences: of the text.
        numbers: the number of each noun.
        number: the maximum number of pairs in a file.
        seed: for the choice of sentences and places.
    """
    rng = random.Random(seed)
    usable = [text for text in dict.fromkeys(sentences) if FEWEST_WORDS <= len(words_of(text)) <= MOST_WORDS]
    rng.shuffle(usable)
    agreement = []
    swaps = []
    for sentence in usable:
        changes = list(changed_number(sentence, numbers))
        if changes:
            kind, bad = rng.choice(changes)
            agreement.append({"sentence_good": sentence, "sentence_bad": bad, "UID": f"agreement_{kind}"})
        elif (bad_order := exchanged(sentence, rng)) is not None:
            swaps.append({"sentence_good": sentence, "sentence_bad": bad_order, "UID": "exchanged"})
    return {"agreement": agreement[:number], "exchanged": swaps[:number]}


def lines_of(files: Sequence[str]) -> list[str]:
    """The lines of some files."""
    return [line.strip() for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()]


def main() -> int:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=HelpFormatter)
    parser.add_argument("texts", nargs="+", metavar="FILE", help="UTF-8 text, one sentence a line")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the two files")
    parser.add_argument("--count", nargs="+", default=[], metavar="FILE", help="texts that only tell what is a noun")
    parser.add_argument("--number", type=int, default=1000, help="pairs in a file, at most")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of sentences and places")
    args = parser.parse_args()
    if args.number < 1:
        parser.error(f"--number must be at least 1, got {args.number}")
    try:
        sentences = lines_of(args.texts)
        others = lines_of(args.count)
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"a text cannot be read as UTF-8: {error}")
    pairs_of_files = make_pairs(sentences, noun_numbers([*sentences, *others]), args.number, args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, pairs in pairs_of_files.items():
        with atomic_open(args.output / f"{name}.jsonl", "w") as file:
            file.writelines(f"{json.dumps(pair, ensure_ascii=False)}\n" for pair in pairs)
        print(f"{args.output / name}.jsonl: {len(pairs)} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
