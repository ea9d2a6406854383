"""Count how much of a text a tokenizer does not know. Nothing is learned from unknown tokens, or about them."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mlsm_plugin.core.files.settings import check, option
from mlsm_plugin.core.masking.word_boundaries import SENTENCEPIECE_BEGIN
from mlsm_plugin.core.text.text_files import check_text

DEFAULT_MAX_UNK_RATE = 0.01  # share of the tokens and characters of a corpus, and of the texts of a file
MAX_UNK_RATE_OF_A_TEXT = 0.1  # share of a single text; one token can be 5 % of it
ANOTHER_TOKENIZER = "use a tokenizer that knows such text, or raise --max-unk-rate"
ANOTHER_MODEL = "use a model that knows such text; in Python, its max_unk_rate can be raised"
NAMED_CHARACTERS = 10
logger = logging.getLogger(__name__)

GAP = re.compile(r"<mask>|<extra_id_\d+>")  # stands for missing text


class TextEncoder(Protocol):
    """The interface of a BPE in fairseq."""

    def encode(self, x: str) -> str:
        """The pieces of a text, separated by spaces."""


class SymbolIndex(Protocol):
    """The part of fairseq's dictionary that is used here."""

    def index(self, sym: str) -> int:
        """The id of a symbol."""

    def unk(self) -> int:
        """The id of the unknown symbol."""


@dataclass(frozen=True, kw_only=True)
class KnownText:
    """The limit for text that a tokenizer does not know."""

    max_unk_rate: float = option(
        DEFAULT_MAX_UNK_RATE,
        least=0,
        most=1,
        metavar="SHARE",
        help="largest share of its tokens or characters, or of the texts of a file, that may be unknown",
        decides=False,
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass
class UnknownTokens:
    """How much of a text a tokenizer does not know, counted in tokens, in characters and, for a file, in texts.

    Tokens that begin, separate and end a text do not count, and neither does whitespace. An unknown token can stand for
    one character or for a whole line, so a single share does not tell how much is lost.
    """

    tokens: int = 0
    unknown: int = 0
    characters: Counter[str] = field(default_factory=Counter)  # how often each is part of an unknown token
    all_characters: int = 0  # characters of the text; 0 if only its ids are known
    texts: int = 0  # texts added by add_text()
    unknown_texts: int = 0  # texts with more than the share MAX_UNK_RATE_OF_A_TEXT unknown

    @property
    def shares(self) -> dict[str, float]:
        """The shares of the tokens, characters and texts that are unknown."""
        pairs = {
            "tokens": (self.unknown, self.tokens),
            "characters": (self.characters.total(), self.all_characters),
            f"texts (each of them more than {MAX_UNK_RATE_OF_A_TEXT:.0%})": (self.unknown_texts, self.texts),
        }
        # normalization can turn one character into several
        return {name: min(1.0, unknown / total) if total else 0.0 for name, (unknown, total) in pairs.items()}

    @property
    def rate(self) -> float:
        """The largest of the shares."""
        return max(self.shares.values())

    def __iadd__(self, other: "UnknownTokens") -> "UnknownTokens":
        self.tokens += other.tokens
        self.unknown += other.unknown
        self.characters += other.characters
        self.all_characters += other.all_characters
        self.texts += other.texts
        self.unknown_texts += other.unknown_texts
        return self

    def add(self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], unknown_id: int) -> None:
        """Count the tokens of a text; ``offsets`` are the places of their characters."""
        self.count_characters(text)
        self.tokens += len(ids)
        if unknown_id in ids:
            for token, (start, stop) in zip(ids, offsets, strict=True):
                if token == unknown_id:
                    self.add_unknown(text[start:stop])

    def count_characters(self, text: str) -> None:
        """Count the characters of a text; :meth:`add_unknown` counts the unknown characters."""
        self.all_characters += len("".join(text.split()))

    def add_unknown(self, surface: str) -> None:
        """Count an unknown token that stands for the text ``surface``."""
        self.unknown += 1
        self.characters.update("".join(surface.split()))

    def add_text(self, text: "UnknownTokens") -> None:
        """Add the counts of one text of a file."""
        self.texts += 1
        self.unknown_texts += text.rate > MAX_UNK_RATE_OF_A_TEXT
        self += text

    def describe(self, where: str) -> str:
        """A phrase with the largest share and the most frequent unknown characters."""
        named = name_characters(self.characters)
        kind, share = max(self.shares.items(), key=lambda item: item[1])
        return f"{share:.2%} of the {kind} of {where} are unknown" + (
            f"; most frequent unknown characters: {named}" if named else ""
        )

    def check(self, where: str, limit: float, *, remedy: str = ANOTHER_TOKENIZER) -> None:
        """Raise ValueError if more than the share ``limit`` of the text ``where`` is unknown; it ends in ``remedy``."""
        if self.rate > limit:
            share, *characters = self.describe(where).split("; ")
            raise ValueError("; ".join([f"{share}, above the limit of {limit:.2%}", *characters, remedy]))

    def warn(self, where: str) -> None:
        """Warn if there are unknown tokens in the text ``where``."""
        if self.unknown:
            logger.warning(self.describe(where))


def name_characters(counts: Mapping[str, int]) -> str:
    """The most frequent characters of ``counts`` with how often they occur, and how many more there are."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{character!r} U+{ord(character):04X} ({count:,} times)" for character, count in ranked]
    more = [f"and {len(named) - NAMED_CHARACTERS:,} more"] if len(named) > NAMED_CHARACTERS else []
    return ", ".join(named[:NAMED_CHARACTERS] + more)


def warn_of_unknown_ids(where: str, unknown: int, tokens: int) -> None:
    """Warn if more than 1 % of ids are unknown; another program may have made them.

    ``where`` names the ids; ``tokens`` is their number without tokens that begin, separate and end a text.
    """
    share = unknown / max(1, tokens)
    if share > DEFAULT_MAX_UNK_RATE:
        shares = f"{share:.2%} of the tokens of {where} are unknown, more than {DEFAULT_MAX_UNK_RATE:.2%}"
        remedy = "use a tokenizer that knows such text"
        logger.warning("%s: nothing is learned from them, nor about them; %s", shares, remedy)


def unknown_tokens_of(text: str, bpe: TextEncoder, dictionary: SymbolIndex) -> UnknownTokens:
    """The unknown tokens of a text: pieces of ``bpe.encode(text)``, separated by spaces, that ``dictionary`` lacks.

    Masks and sentinels do not count. The text of an unknown piece comes from ``bpe.surfaces(text)`` if there is such a
    method; otherwise it is the piece itself, as for SentencePiece. ValueError as for :func:`.check_text`.
    """
    check_text(text)
    text = GAP.sub(" ", text)
    pieces = bpe.encode(text).split()
    counted = UnknownTokens(tokens=len(pieces))
    counted.count_characters(text)
    places = [place for place, piece in enumerate(pieces) if dictionary.index(piece) == dictionary.unk()]
    if places:
        surfaces = bpe.surfaces(text) if hasattr(bpe, "surfaces") else pieces
        for place in places:
            counted.add_unknown(surfaces[place].replace(SENTENCEPIECE_BEGIN, ""))
    return counted


def unknown_tokens_in(texts: Iterable[str], bpe: TextEncoder, dictionary: SymbolIndex) -> UnknownTokens:
    """The unknown tokens of the texts of a file, each counted by :func:`unknown_tokens_of`."""
    counted = UnknownTokens()
    for text in texts:
        counted.add_text(unknown_tokens_of(text, bpe, dictionary))
    return counted


def check_known(texts: Iterable[str], bpe: TextEncoder, dictionary: SymbolIndex, max_unk_rate: float) -> None:
    """Warn of unknown tokens in the input texts of a model.

    ValueError if more than the share ``max_unk_rate`` of a text is unknown.
    """
    counted = UnknownTokens()
    for number, text in enumerate(texts, 1):
        of_text = unknown_tokens_of(text, bpe, dictionary)
        of_text.check("the text" if number == 1 else f"text {number}", max_unk_rate, remedy=ANOTHER_MODEL)
        counted += of_text
    counted.warn("the text")
