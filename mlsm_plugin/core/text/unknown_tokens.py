"""How much of a text a tokenizer does not know. Nothing is learned from unknown tokens, nor about them."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlsm_plugin.core.files.settings import check, option

DEFAULT_MAX_UNK_RATE = 0.01  # of a corpus, or of a file of texts
MAX_UNK_RATE_OF_A_TEXT = 0.1  # of a single text, of which one token can be 5 %
ANOTHER_TOKENIZER = "use a tokenizer that knows such text, or raise --max-unk-rate"
NAMED_CHARACTERS = 10
logger = logging.getLogger(__name__)

GAP = re.compile(r"<mask>|<extra_id_\d+>")  # stands for missing text


@dataclass(frozen=True, kw_only=True)
class KnownText:
    """How well a tokenizer has to know a text."""

    max_unk_rate: float = option(
        DEFAULT_MAX_UNK_RATE, least=0, most=1, metavar="SHARE",
        help="largest share of unknown tokens that a text may have",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)


@dataclass
class UnknownTokens:
    """How many tokens of a text there are, without those that begin, separate and end it; how many of them are unknown;
    and how often each character is part of an unknown one.
    """

    tokens: int = 0
    unknown: int = 0
    characters: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Share of the tokens that is unknown."""
        return self.unknown / self.tokens if self.tokens else 0.0

    def __iadd__(self, other: "UnknownTokens") -> "UnknownTokens":
        self.tokens += other.tokens
        self.unknown += other.unknown
        self.characters += other.characters
        return self

    def add(self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], unknown_id: int) -> None:
        """Count the tokens of a text; ``offsets`` are the places of their characters."""
        self.tokens += len(ids)
        if unknown_id in ids:
            for token, (start, stop) in zip(ids, offsets, strict=True):
                if token == unknown_id:
                    self.unknown += 1
                    self.characters.update(text[start:stop])

    def describe(self, where: str) -> str:
        """A phrase: the share, and the most frequent characters."""
        ranked = sorted(self.characters.items(), key=lambda item: (-item[1], item[0]))[:NAMED_CHARACTERS]
        named = ", ".join(f"{character!r} U+{ord(character):04X} ({count:,} times)" for character, count in ranked)
        return f"{self.rate:.2%} of the tokens of {where} are unknown" + (
            f"; most frequent unknown characters: {named}" if named else ""
        )

    def check(self, where: str, limit: float, *, remedy: str = ANOTHER_TOKENIZER) -> None:
        """Raise ValueError if more than the share ``limit`` of the text ``where`` is unknown; ``remedy`` ends it."""
        if self.rate > limit:
            share, *characters = self.describe(where).split("; ")
            raise ValueError("; ".join([f"{share}, above the limit of {limit:.2%}", *characters, remedy]))


def unknown_tokens_of(texts: Iterable[str], bpe: Any, dictionary: Any) -> UnknownTokens:
    """The unknown tokens of texts: pieces of ``bpe.encode(text)``, separated by spaces, that ``dictionary`` lacks.

    Masks and sentinels do not count.
    """
    found, unknown = UnknownTokens(), dictionary.unk()

    def count(text: str) -> int:
        ids = [dictionary.index(piece) for piece in bpe.encode(text).split()]
        found.tokens += len(ids)
        return ids.count(unknown)

    for text in texts:
        text = GAP.sub(" ", text)
        number = count(text)
        found.unknown += number
        if number:  # no offsets are known: try each character
            tokens = found.tokens
            alone = [character for character in text if not character.isspace() and count(character)]
            found.characters.update(alone)
            found.tokens = tokens
    return found


def check_known(
    texts: Iterable[str], bpe: Any, dictionary: Any, max_unk_rate: float, *,
    where: str = "the text", remedy: str = "use a model that knows such text, or set its max_unk_rate",
) -> None:  # fmt: skip
    """Warn of unknown tokens, as of :func:`unknown_tokens_of`, in texts that a model is to read.

    ValueError, with ``where`` and the ``remedy``, if the share ``max_unk_rate`` is exceeded.
    """
    found = unknown_tokens_of(texts, bpe, dictionary)
    found.check(where, max_unk_rate, remedy=remedy)
    if found.unknown:
        logger.warning(found.describe(where))
