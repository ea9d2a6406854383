"""T5's span corruption: sentinels replace spans of the text, and the target holds the spans.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020. This module
needs only numpy and torch: :class:`SpanCorruptionCollator` works in any PyTorch training loop.
"""

import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mlsm_plugin.core.masking.masked_share import check_usable_share
from mlsm_plugin.core.masking.token_ids import check_attention, checked_ids, checked_sentinels

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpanNoise:
    """How much of a text becomes noise, and where. ValueError if a number is out of range."""

    noise_density: float = 0.15  # share of the tokens that becomes noise
    mean_span_length: float = 3.0  # in tokens
    rotate: bool = False  # rotate the pattern by a random offset, so that noise may come first, and text last
    closing_sentinel: bool = False  # end every target in a sentinel; otherwise only if the text does not end in noise

    def __post_init__(self) -> None:
        if not 0 < self.noise_density < 1:
            raise ValueError(f"noise_density must be between 0 and 1, got {self.noise_density}")
        if not self.mean_span_length >= 1:
            raise ValueError(f"mean_span_length must be at least 1, got {self.mean_span_length}")

    @property
    def further_sentinels(self) -> int:
        """Sentinels that a target may need beyond one for each drawn span (rotation may cut a span in two)."""
        return int(self.rotate) + int(self.closing_sentinel)

    def counts(self, length: int, num_sentinels: int) -> tuple[int, int]:
        """The numbers of noise tokens and of spans in a text of ``length`` tokens (2 or more)."""
        noise = min(max(round(length * self.noise_density), 1), length - 1)
        return noise, self._spans(noise, noise, length - noise, num_sentinels)

    def _spans(self, expected_noise: float, noise: int, rest: int, num_sentinels: int) -> int:
        self.check_enough(num_sentinels)
        spans = max(round(expected_noise / self.mean_span_length), 1)
        return min(spans, noise, rest, num_sentinels - self.further_sentinels)

    def check_enough(self, num_sentinels: int) -> None:
        """Raise ValueError if there are not enough sentinels for one span."""
        if num_sentinels <= self.further_sentinels:
            raise ValueError(f"at least {self.further_sentinels + 1} sentinels are needed, got {num_sentinels}")

    def check_lengths(self, lengths: Sequence[int], num_sentinels: int, name: str) -> None:
        """Warn if texts of these ``lengths`` get less than half of their noise spans, since sentinels are too few.

        ValueError if they get less than a tenth. ``name`` describes the texts.
        """
        spans = (self.counts(length, num_sentinels)[1] for length in lengths)
        expected = (self.counts(length, length + self.further_sentinels)[1] for length in lengths)
        remedy = f"pass more than {num_sentinels} sentinels, or shorter texts: the spans get longer instead"
        check_usable_share(f"noise spans of {name} have a sentinel", zip(spans, expected, strict=True), remedy=remedy)

    def lengths(self, length: int, num_sentinels: int) -> tuple[int, int]:
        """The maximum lengths, with EOS, of source and target of a text of ``length`` tokens."""
        noise, spans = self.counts(length, num_sentinels)
        cut = int(self.rotate and noise > 1)
        return length - noise + spans + cut + 1, noise + spans + self.further_sentinels + 1

    def text_length(self, source_length: int, num_sentinels: int) -> int:
        """The longest text whose source has at most ``source_length`` tokens, with EOS; ValueError if less than 2."""
        too_long = max(2, int((source_length + 1) / (1 - self.noise_density)) + 1)
        longer = bisect_right(
            range(too_long), source_length, lo=2, key=lambda length: self.lengths(length, num_sentinels)[0]
        )
        if longer == 2:
            raise ValueError(f"sources of {source_length} tokens are too short for span corruption; allow longer ones")
        return longer - 1

    def spans(self, length: int, num_sentinels: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The starts and lengths of the noise spans of a text, in order: int64 ``(n,)`` each."""
        noise, spans = self.counts(length, num_sentinels)
        begins, lengths = _alternate(length, noise, spans, rng)
        return _rolled(begins, lengths, length, int(rng.integers(length))) if self.rotate else (begins, lengths)

    def whole_word_spans(
        self, word_begins: np.ndarray, num_sentinels: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """:meth:`spans` made of whole words; ``noise_density`` is the share of words that becomes noise.

        ``word_begins``, bool ``(length,)``, says which tokens begin words; the first one always does. There must be at
        least two words.
        """
        length = len(word_begins)
        words = np.append(0, np.flatnonzero(word_begins[1:]) + 1)  # the starts of words
        noise = min(max(round(len(words) * self.noise_density), 1), len(words) - 1)
        spans = self._spans(length * self.noise_density, noise, len(words) - noise, num_sentinels)
        begins, lengths = _alternate(len(words), noise, spans, rng)
        if self.rotate:
            begins, lengths = _rolled(begins, lengths, len(words), int(rng.integers(len(words))))
        limits = np.append(words, length)
        return limits[begins], limits[begins + lengths] - limits[begins]


USUAL_NOISE = SpanNoise()  # of T5


def _segments(number: int, segments: int, rng: np.random.Generator) -> np.ndarray:
    """Split ``number`` items into ``segments`` parts of at least 1, all ways equally likely; returns the lengths."""
    cuts = np.sort(rng.choice(number - 1, segments - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=number)


def _alternate(length: int, noise: int, spans: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The starts and lengths of noise spans that alternate with text; the text comes first."""
    noise_lengths = _segments(noise, spans, rng)
    text_lengths = _segments(length - noise, spans, rng)
    return np.cumsum(text_lengths + noise_lengths) - noise_lengths, noise_lengths


def _rolled(begins: np.ndarray, lengths: np.ndarray, length: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """The spans after a cyclic shift of the text by ``offset``; a span that crosses the end becomes two."""
    begins = (begins + offset) % length
    over = begins + lengths - length
    if over.max() > 0:
        last = int(over.argmax())
        begins = np.append(begins, 0)
        lengths = np.append(lengths, over[last])
        lengths[last] -= over[last]
    order = np.argsort(begins)
    return begins[order], lengths[order]


def _without(
    begins: np.ndarray, lengths: np.ndarray, known: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The spans without unknown tokens: the longest runs of known tokens in them, at most as many as there were spans.

    If they hold no known token, a random known token of the text becomes noise, if there is any.
    """
    noise = _covered(begins, lengths, len(known)) & known
    if not noise.any() and known.any():
        noise[rng.choice(np.flatnonzero(known))] = True
    edges = np.flatnonzero(np.diff(noise, prepend=False, append=False))
    starts = edges[::2]
    sizes = edges[1::2] - edges[::2]
    kept = np.sort(np.argsort(-sizes, kind="stable")[: len(begins)])
    return starts[kept], sizes[kept]


def _covered(begins: np.ndarray, lengths: np.ndarray, number: int) -> np.ndarray:
    """Whether each of ``number`` tokens is in a span, ``(number,)`` bool."""
    edges = np.zeros(number + 1, np.int8)
    edges[begins] += 1
    edges[begins + lengths] -= 1
    covered: np.ndarray = np.cumsum(edges[:-1]).astype(bool)
    return covered


def corrupt_spans(
    tokens: ArrayLike,
    noise: SpanNoise = USUAL_NOISE,
    *,
    sentinels: Sequence[int] | np.ndarray,
    eos: int,
    rng: np.random.Generator,
    word_begins: np.ndarray | None = None,
    unk: int | Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Corrupt a text: the source has sentinels in place of spans, and the target each sentinel followed by its span.

    Source and target are int64 ``(S,)`` and ``(T,)``, each ending in one EOS (Raffel et al., 2020).

    Of n tokens, round(n x noise_density) become noise (at least 1, at most n - 1), in round(noise / mean_span_length)
    spans (at least 1, at most the number of noise tokens, of other tokens, or of sentinels). Noise and text are each
    cut into this number of segments, all ways equally likely. The segments alternate, and text comes first. ValueError
    if the text is too short, is not ids, or contains a sentinel, or the sentinels are too few or not distinct.

    Args:
        tokens: ids ``(n,)``, without EOS; n is 2 or more.
        noise: how much becomes noise, and in spans of which length.
        sentinels: ids of the sentinels, used in order; the text must not contain them.
        word_begins: bool ``(n,)``, whether each token begins a word. Only whole words then become noise, and the
            density counts words. None: the density counts tokens.
        unk: id of unknown tokens, or ids of unknown and special tokens. They never become noise: spans are cut at them,
            and the longest parts are kept, as many as there were spans. None: there are none.
    """
    tokens = checked_ids(tokens, "the text")
    marks = checked_sentinels(sentinels, {"</s>": eos}, unlearned=unk)
    if len(tokens) < 2:
        raise ValueError(f"a text of {len(tokens)} tokens cannot be corrupted; it needs at least 2 tokens")
    if np.isin(tokens, marks).any():
        raise ValueError("the text contains a sentinel; corrupt plain text only")
    if word_begins is None:
        begins, lengths = noise.spans(len(tokens), len(marks), rng)
    elif not np.asarray(word_begins)[1:].any():
        raise ValueError("a text of one word cannot be corrupted; it needs at least 2 words")
    else:
        begins, lengths = noise.whole_word_spans(np.asarray(word_begins, bool), len(marks), rng)
    unlearned = np.zeros(len(tokens), bool) if unk is None else np.isin(tokens, unk)
    if unlearned.any():
        begins, lengths = _without(begins, lengths, ~unlearned, rng)
    return _written(tokens, begins, lengths, marks, eos, closing=noise.closing_sentinel)


def _written(
    tokens: np.ndarray, begins: np.ndarray, lengths: np.ndarray, marks: np.ndarray, eos: int, *, closing: bool
) -> tuple[np.ndarray, np.ndarray]:
    spans = len(begins)
    noise = _covered(begins, lengths, len(tokens))
    kept = ~noise
    kept[begins] = True
    marked = tokens.copy()
    marked[begins] = marks[:spans]
    source = np.append(marked[kept], eos)

    # a span that lost unknown tokens at the end of the text may need a closing sentinel when none is left
    closes = (closing or not noise[-1]) and spans < len(marks)
    target = np.empty(int(lengths.sum()) + spans + closes + 1, np.int64)
    is_mark = np.zeros(len(target), bool)
    is_mark[np.cumsum(lengths) - lengths + np.arange(spans)] = True
    if closes:
        is_mark[-2] = True
    target[is_mark] = marks[: spans + closes]
    is_mark[-1] = True
    target[~is_mark] = tokens[noise]
    target[-1] = eos
    return source, target


def filler_places(target: ArrayLike, *, sentinels: Sequence[int] | np.ndarray, eos: int) -> dict[int, range]:
    """The places in a target of the tokens after each sentinel, up to the next sentinel or EOS.

    If a sentinel occurs twice, its first place counts.
    """
    marks = set(np.asarray(sentinels).tolist())
    tokens = np.asarray(target).tolist()
    end = tokens.index(eos) if eos in tokens else len(tokens)
    places: dict[int, range] = {}
    for place in reversed([place for place in range(end) if tokens[place] in marks]):
        places[tokens[place]] = range(place + 1, end)
        end = place
    return places


def filled(
    source: Sequence[int], target: Sequence[int], scores: Sequence[float], *, sentinels: Sequence[int], eos: int
) -> tuple[list[int], list[tuple[int, list[int], float]]]:
    """The ids of a source, without EOS, with a target's fillers in place of the sentinels; and these fillers.

    A filler is its sentinel, its ids, and their mean score; ``scores`` are log-probabilities of the target's tokens, in
    nats. If its sentinel is not in the target, a filler is empty and its score is -inf.
    """
    places = filler_places(target, sentinels=sentinels, eos=eos)
    fillers = []
    whole = []
    for token in source:
        if token not in sentinels:
            whole += [token] if token != eos else []
            continue
        place = places.get(token, range(0))
        filler_scores = [scores[i] for i in (place.start - 1, *place)] if token in places else [-math.inf]
        fillers.append((token, [target[i] for i in place], sum(filler_scores) / len(filler_scores)))
        whole += fillers[-1][1]
    return whole, fillers


def collate_spans(pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, pad: int, eos: int) -> dict[str, Tensor]:
    """Make a right-padded batch of sources and targets of :func:`corrupt_spans`.

    It has ``source`` (B, S), ``target`` (B, T) and ``decoder_input`` (B, T), which is the target shifted by one place
    and begins with ``eos``; all int64.
    """
    return {
        "source": padded((source for source, _ in pairs), pad),
        "target": padded((target for _, target in pairs), pad),
        "decoder_input": padded((np.append(eos, target[:-1]) for _, target in pairs), pad),
    }


def padded(rows: Iterable[ArrayLike], pad: int) -> Tensor:
    """Rows of whole numbers ``(T_i,)`` as a right-padded tensor ``(B, T)`` int64, with at least one column."""
    tensors = [torch.from_numpy(np.asarray(row, np.int64)) for row in rows]
    result = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=pad)
    return result if result.size(1) else result.new_full((len(result), 1), pad)


class SpanCorruptionCollator:
    """A ``collate_fn`` for ``torch.utils.data.DataLoader`` that turns texts into a batch of :func:`collate_spans`.

    Every batch gets new spans, drawn from torch's random numbers. torch seeds them in each loader process, so
    ``torch.manual_seed`` makes them repeatable. ``sentinels``, ``eos`` and ``unk`` are as for :func:`corrupt_spans`.
    ValueError if two of these ids and ``pad`` are equal, or there are too few sentinels.
    """

    def __init__(
        self,
        sentinels: Sequence[int],
        *,
        eos: int,
        pad: int,
        unk: int | Sequence[int] | None = None,
        noise: SpanNoise = USUAL_NOISE,
    ) -> None:
        self.sentinels = checked_sentinels(sentinels, {"padding": pad, "</s>": eos}, unlearned=unk)
        self.eos = eos
        self.pad = pad
        self.unk = unk
        self.noise = noise
        self.noise.check_enough(len(self.sentinels))
        self._lengths_are_checked = False
        self._unknown_is_said = False

    def __call__(self, texts: Sequence[ArrayLike | Mapping[str, ArrayLike]]) -> dict[str, Tensor]:
        """Make a batch of ``texts``; see :meth:`pairs`."""
        return collate_spans(self.pairs(texts), pad=self.pad, eos=self.eos)

    def pairs(self, texts: Sequence[ArrayLike | Mapping[str, ArrayLike]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The source and the target of each text, with new spans; see :func:`corrupt_spans`.

        A text is its ids ``(n_i,)``, or a mapping with these as ``input_ids``. Padding around it and EOS at its end are
        removed. Warns once about a text without known tokens. ValueError if a text has padding inside, has fewer than 2
        other ids, or contains a sentinel, or the ``attention_mask`` of a mapping leaves out text.
        """
        rng = np.random.default_rng(int(torch.randint(2**63 - 1, ())))
        id_rows = [self._text(text) for text in texts]
        if not self._lengths_are_checked:
            self._lengths_are_checked = True
            self.noise.check_lengths([len(ids) for ids in id_rows if len(ids) > 1], len(self.sentinels), "the texts")
        self._warn_of_unknown(id_rows)
        return [
            corrupt_spans(ids, self.noise, sentinels=self.sentinels, eos=self.eos, rng=rng, unk=self.unk)
            for ids in id_rows
        ]

    def _warn_of_unknown(self, texts: Sequence[np.ndarray]) -> None:
        """Warn once about a text without a token that can become noise."""
        if self.unk is None or self._unknown_is_said:
            return
        for ids in texts:
            if np.isin(ids, self.unk).all():
                self._unknown_is_said = True
                logger.warning(
                    f"a text of {len(ids)} tokens has only unknown or special ones: nothing is learned from it; use a "
                    "model with a tokenizer for such text"
                )
                return

    def _text(self, text: ArrayLike | Mapping[str, ArrayLike]) -> np.ndarray:
        """The ids of a text without padding and EOS around it, ``(n,)``."""
        ids = np.asarray(text["input_ids"] if isinstance(text, Mapping) else text)
        if ids.ndim != 1:
            raise ValueError(f"expected the ids of a text, (n,), got the shape {ids.shape}")
        ids = checked_ids(ids, "a text")
        if isinstance(text, Mapping) and "attention_mask" in text:
            check_attention(ids, text["attention_mask"], "a text")
        inner = np.flatnonzero(ids != self.pad)
        ids = ids[inner[0] : inner[-1] + 1] if len(inner) else ids[:0]
        if (ids == self.pad).any():
            raise ValueError(f"a text has padding (the id {self.pad}) between other ids; pass texts without padding")
        inner = np.flatnonzero(ids != self.eos)
        return ids[: inner[-1] + 1] if len(inner) else ids[:0]
