"""Rows of a dataset's ids, read by another tokenizer, and the token of it to which each id belongs."""

import hashlib
import json
import threading
from dataclasses import dataclass

import numpy as np

from mlsm_plugin.core.text.hf_tokenizer import FAIRSEQ_PAD, SPECIAL_SYMBOLS, HuggingFaceTokenizer
from mlsm_plugin.core.text.symbol_bytes import SymbolBytes
from mlsm_plugin.core.text.token_places import MOST_WITHOUT_PLACE, code_points, places_of, visible_spans

TOKENS_TO_JUDGE = 1000  # the share of tokens without a place says little about fewer
UNKNOWN = SPECIAL_SYMBOLS - 1  # fairseq's id
FIRST_ESCAPE = 0xDC80  # Python's characters for bytes that are no part of a character
LAST_ESCAPE = 0xDCFF
REPLACEMENT = 0xFFFD  # what the other tokenizer reads instead
NONE = -1


@dataclass(frozen=True)
class AlignedRows:
    """What another tokenizer makes of rows ``(B, T)`` of ids.

    Attributes:
        ids: its ids of each row, with special tokens.
        places: ``(B, T)`` int64, the place of each id's token in the concatenated ``ids``; -1: none.
    """

    ids: list[np.ndarray]
    places: np.ndarray


class RowAligner:
    """Reads rows of fairseq's ids as text, and this text with another tokenizer.

    Special symbols cut a row into texts, and become the other tokenizer's tokens of the same roles. Other ids belong to
    the last token that shares a visible character with them. White space alone belongs to the token of the id after it
    in its text, or else before it. An id has no token if the tokenizer leaves out its characters or does not know them.
    """

    def __init__(self, symbols: SymbolBytes, tokenizer: HuggingFaceTokenizer) -> None:
        self.tokenizer = tokenizer
        self._symbols = symbols
        self._lengths = np.array([len(content) for content in symbols.table])
        mask = len(symbols.table) - 1
        roles = [*range(SPECIAL_SYMBOLS), mask]
        self._is_special = np.isin(np.arange(mask + 1), roles)
        self._is_gap = np.isin(np.arange(mask + 1), [UNKNOWN, mask])
        # tokens of the roles; a tokenizer that lacks one has its padding there, which is left out
        self._token_of_role = np.full(mask + 1, NONE)
        self._token_of_role[roles] = tokenizer.hf_ids[[*range(SPECIAL_SYMBOLS), -1]]
        self._token_of_role[self._token_of_role == tokenizer.pad_id] = NONE
        self._counted = 0
        self._without_token = 0
        self._counting = threading.Lock()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides how rows are read."""
        tokenizer = [self.tokenizer.vocabulary_fingerprint, self.tokenizer.segmentation_fingerprint]
        symbols = [content.hex() for content in self._symbols.table]
        return hashlib.sha256(json.dumps([*tokenizer, self._symbols.adds_space, symbols]).encode()).hexdigest()

    def read(self, rows: np.ndarray) -> AlignedRows:
        """Read right-padded rows ``(B, T)`` of ids.

        ValueError if more than a tenth of the ids so far have no token: the tokenizer is not for such text.
        """
        # a column of padding before the rows parts the text of a row from that of the next
        flat = np.pad(rows, ((0, 0), (1, 0)), constant_values=FAIRSEQ_PAD).ravel()
        is_special = self._is_special[flat]
        text, offsets = self._text_of(flat)
        # the parts of the rows: special symbols one by one, and the texts between them
        begins = np.flatnonzero(is_special | np.append(True, is_special[:-1]))
        ends = np.append(begins[1:], len(flat))
        part_ids, part_offsets = self._read_parts(flat, text, offsets, begins, ends)
        ids = np.concatenate(part_ids)
        places = places_of(offsets, np.concatenate(part_offsets), text)
        places = np.where(np.append(ids != self.tokenizer.unknown_id, False)[places], places, NONE)
        first_visible, after_visible = visible_spans(offsets, text)
        is_visible = first_visible < after_visible
        self._count(is_visible, is_visible & (places == NONE), offsets, text)
        places = _with_white_space(places, is_visible, np.repeat(np.arange(len(begins)), ends - begins))
        sizes = np.array([len(read) for read in part_ids])
        first_places = np.where(sizes > 0, np.cumsum(sizes) - sizes, NONE)
        places[is_special] = first_places[is_special[begins]]
        width = rows.shape[1] + 1
        of_rows = np.bincount(begins // width, weights=sizes, minlength=len(rows)).astype(np.int64)
        return AlignedRows(np.split(ids, np.cumsum(of_rows)[:-1]), places.reshape(-1, width)[:, 1:])

    def _read_parts(
        self, flat: np.ndarray, text: str, offsets: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The other tokenizer's ids ``(n,)`` of each part from ``begins`` to before ``ends``, and their offsets."""
        of_roles = self._token_of_role[flat[begins]]
        part_ids = [of_roles[number : number + 1] for number in range(len(begins))]
        for number in np.flatnonzero(of_roles == NONE).tolist():
            part_ids[number] = of_roles[:0]
        part_offsets = [np.zeros((len(ids), 2), np.int64) for ids in part_ids]
        texts = np.flatnonzero(~self._is_special[flat[begins]])
        spans = self._spans(flat, text, offsets, begins[texts], ends[texts])
        after_gap = self._is_gap[flat[begins[texts] - 1]]
        for is_after in (False, True):
            chosen = after_gap == is_after
            pieces = [text[begin:end] for begin, end in spans[chosen].tolist()]
            encoded = self.tokenizer.encoded(pieces, after_a_gap=is_after)
            for number, begin, (ids, places) in zip(texts[chosen], spans[chosen, 0], encoded, strict=True):
                part_ids[number] = np.array(ids, np.int64)
                part_offsets[number] = np.array(places, np.int64).reshape(-1, 2) + begin
        return part_ids, part_offsets

    def _text_of(self, ids: np.ndarray) -> tuple[str, np.ndarray]:
        """The text of ids ``(n,)``, and where each starts and ends in it, ``(n, 2)``; they can share a character."""
        content = b"".join([self._symbols.table[number] for number in ids.tolist()])
        points = code_points(content.decode("utf-8", "surrogateescape"))
        is_escape = (points >= FIRST_ESCAPE) & (points <= LAST_ESCAPE)
        sizes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
        character = np.repeat(np.arange(len(points)), np.where(is_escape, 1, sizes))  # of each byte
        after = np.cumsum(self._lengths[ids])
        first = after - self._lengths[ids]
        begins = np.append(character, len(points))[first]
        ends = np.where(after > first, character[after - 1] + 1, begins)
        readable = np.where(is_escape, REPLACEMENT, points).astype("<u4")
        return readable.tobytes().decode("utf-32-le"), np.stack([begins, ends], axis=1)

    def _spans(
        self, flat: np.ndarray, text: str, offsets: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        """What the other tokenizer reads of ids from ``begins`` to before ``ends``, as characters ``(n, 2)``.

        It reads neither the space that the dataset's tokenizer has added at the beginning, nor spaces before a gap.
        """
        spans = np.stack([offsets[begins, 0], offsets[ends - 1, 1]], axis=1)
        begins_line = ~self._is_gap[flat[begins - 1]] & self._symbols.adds_space
        before_gap = self._is_gap[np.append(flat, FAIRSEQ_PAD)[ends]]
        for number in np.flatnonzero(begins_line | before_gap).tolist():
            begin, end = spans[number].tolist()
            begin += bool(begins_line[number]) and text.startswith(" ", begin, end)
            if before_gap[number]:
                end = begin + len(text[begin:end].rstrip())
            spans[number] = begin, end
        return spans

    def _count(self, counted: np.ndarray, without_token: np.ndarray, offsets: np.ndarray, text: str) -> None:
        """Count ids; ValueError if too many of all so far have no token."""
        with self._counting:  # `mlsm encode` reads in several threads
            self._counted += int(counted.sum())
            self._without_token += int(without_token.sum())
            all_ids = self._counted
            number = self._without_token
        if all_ids >= TOKENS_TO_JUDGE and number > MOST_WITHOUT_PLACE * all_ids and without_token.any():
            begin = int(offsets[without_token.argmax(), 0])
            raise ValueError(
                f"{number:,} of {all_ids:,} tokens have characters that the auxiliary model does not know, such as in "
                f"{text[max(0, begin - 40) : begin + 40]!r}; use an auxiliary model for such text"
            )


def _with_white_space(places: np.ndarray, is_visible: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """``places`` ``(n,)``, also of ids of white space alone; ``parts`` has the number of each id's part of a row."""
    numbers = np.arange(len(places))
    following = np.minimum.accumulate(np.where(is_visible, numbers, len(places))[::-1])[::-1]
    before = np.maximum.accumulate(np.where(is_visible, numbers, NONE))
    part_at = np.append(parts, NONE)  # the last entry is for numbers out of range
    place_at = np.append(places, NONE)
    beside: np.ndarray = np.where(part_at[before] == parts, place_at[before], NONE)
    return np.where(part_at[following] == parts, place_at[following], beside)
