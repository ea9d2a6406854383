"""Fill masks with phrases of a corpus (Min et al., 2022, section 3.3)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.core.losses.span_contrastive import similarities, similarity_of, temperature_of
from mlsm_plugin.core.masking.word_boundaries import PieceClasses, word_boundaries
from mlsm_plugin.core.text.unknown_tokens import check_known
from mlsm_plugin.fairseq_plugin.text.masked_text import MASK, cut_around_masks, encode_masked_text
from mlsm_plugin.fairseq_plugin.text.symbol_files import special_symbols
from mlsm_plugin.retrieval.phrase_datastore import PhraseDatastore
from mlsm_plugin.retrieval.settings import FillingSettings

if TYPE_CHECKING:
    from mlsm_plugin.fairseq_plugin.compat.model_parts import RobertaHub


@dataclass(frozen=True)
class Occurrence:
    """An occurrence of a phrase in the corpus."""

    position: int  # position of its first token in the datastore's text
    length: int  # in tokens
    score: float  # p(start) + p(end)


@dataclass(frozen=True)
class PhraseCandidate:
    """A phrase that may fill a mask."""

    phrase: str
    score: float  # sum over its occurrences of (p(start) + p(end)) length^alpha
    occurrences: tuple[Occurrence, ...]  # the best occurrences, best first
    contexts: tuple[str, ...]  # the text around each, with the phrase between [[ and ]]


class PhraseFiller:
    """Fills masks with phrases of a datastore; ``interface`` is the loaded model that the datastore was made with."""

    def __init__(
        self, interface: "RobertaHub", datastore: PhraseDatastore, settings: FillingSettings | None = None
    ) -> None:
        self.interface = interface
        self.datastore = datastore
        self.settings = settings or FillingSettings()
        task = interface.task
        self.dictionary = task.source_dictionary
        self.span_masks = tuple(getattr(task, "span_masks", (task.mask_idx, task.mask_idx)))
        self.single = str(getattr(task.cfg, "span_mode", "phrase")) == "single"
        self.similarity = similarity_of(interface.cfg)
        self.temperature = temperature_of(interface.cfg, datastore.dim)
        special = {*special_symbols(self.dictionary), task.mask_idx, *self.span_masks}
        self._special = np.array(sorted(special))
        self._pieces = PieceClasses.of_vocabulary(self.dictionary.symbols, special)

    def fill(self, text: str, *, topk: int = 5) -> list[list[PhraseCandidate]]:
        """The best phrases for each ``<mask>``, best first, while other masks stay.

        ValueError if ``topk`` is not positive, or as for :meth:`encode`.
        """
        starts, ends = self.queries(text)
        if topk < 1:
            raise ValueError(f"topk is {topk}; it must be at least 1")
        return [self.candidates(start, end)[:topk] for start, end in zip(starts, ends, strict=True)]

    def continue_text(self, text: str, *, steps: int) -> str:
        """Append the best phrase for a mask at the end of ``text``, ``steps`` times."""
        for _ in range(steps):
            phrases = self.fill(f"{text} {MASK}", topk=1)[-1]
            if not phrases:
                break
            text = f"{text} {phrases[0].phrase}"
        return text

    @torch.no_grad()
    def queries(self, text: str) -> tuple[Tensor, Tensor]:
        """Hidden states at the masks for the starts and for the ends of the spans: ``(num_masks, dim)`` each."""
        tokens, places = self.encode(text)
        hidden = self.interface.model(tokens[None].to(self.interface.device), features_only=True)[0][0].float()
        starts = torch.tensor(places)
        return hidden[starts], hidden[starts + (0 if self.single else 1)]

    def encode(self, text: str) -> tuple[Tensor, list[int]]:
        """Ids ``(T,)`` with the masks of spans, and the positions where these begin; long text is cut around them.

        ValueError if it has no mask, or too many unknown tokens, or the masks are too far apart for the model.
        """
        ids, places = self._encode_whole(text)
        if not places:
            raise ValueError(f"the text has no <mask>: {text!r}")
        check_known([text], self.interface.bpe, self.dictionary, self.interface.max_unk_rate)
        limit = int(self.interface.model.max_positions())
        ids, places = cut_around_masks(ids, places, length=1 if self.single else 2, limit=limit)
        return torch.tensor(ids), places

    def was_cut(self, text: str) -> bool:
        """Whether :meth:`encode` cuts ``text``, since it is longer than the model's positions."""
        return len(self._encode_whole(text)[0]) > int(self.interface.model.max_positions())

    def _encode_whole(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of the whole text, and the positions where the masks of spans begin; a single token has one mask."""
        masks = self.span_masks[:1] if self.single else self.span_masks
        return encode_masked_text(text, self.interface.bpe, self.dictionary, masks=masks)

    def candidates(self, start: Tensor, end: Tensor) -> list[PhraseCandidate]:
        """Phrases for one mask, best first; ``start`` and ``end`` are its queries ``(dim,)``.

        Probabilities are softmaxes over the retrieved keys. A phrase begins at a retrieved start or ends at a
        retrieved end; its other end is scored with its own key.
        """
        store = self.datastore
        k = min(self.settings.k, len(store))
        scores, rows = store.search(torch.stack([start, end]), k, similarity=self.similarity)
        log_totals = (scores / self.temperature).logsumexp(dim=1).tolist()
        positions = store.positions_of(rows.cpu().numpy())
        if self.single:
            spans = np.stack([positions[0], np.ones(k, np.int64)], axis=1)
        else:
            spans = self._spans_around(positions[0], positions[1])
        spans = self._allowed(spans)
        if len(spans) == 0:
            return []
        begins = spans[:, 0]
        probability = self._probabilities(begins, start, log_totals[0])
        if not self.single:
            probability = probability + self._probabilities(begins + spans[:, 1] - 1, end, log_totals[1])
        return self._merged(spans, probability)

    def _spans_around(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """(position, length) of the spans with a retrieved start or a retrieved end, each once: ``(n, 2)``."""
        lengths = np.arange(1, self.settings.max_length + 1)
        forward = np.stack(np.broadcast_arrays(starts[:, None], lengths), axis=-1).reshape(-1, 2)
        backward = np.stack(np.broadcast_arrays(ends[:, None] - lengths + 1, lengths), axis=-1).reshape(-1, 2)
        return np.unique(np.concatenate([forward, backward]), axis=0)

    def _allowed(self, spans: np.ndarray) -> np.ndarray:
        """The spans within one block, without special symbols and, unless ``any_pieces`` is set, of whole words."""
        store = self.datastore
        begins = spans[:, 0]
        ends = spans[:, 0] + spans[:, 1] - 1
        inside = (begins >= 0) & (ends < len(store.tokens))
        spans = spans[inside]
        begins = begins[inside]
        ends = ends[inside]
        same = store.block_of(begins) == store.block_of(ends)
        spans = spans[same]
        begins = begins[same]
        ends = ends[same]
        if len(spans) == 0:
            return spans
        positions = store.positions_of_blocks(np.unique(store.block_of(begins)))
        ids = np.asarray(store.tokens[positions], dtype=np.int64)
        specials = np.cumsum(np.isin(ids, self._special))
        start = np.searchsorted(positions, begins)
        stop = np.searchsorted(positions, ends)
        kept = (specials[stop] == specials[start]) & ~np.isin(ids[start], self._special)
        if not self.settings.any_pieces:
            first, last = word_boundaries(ids, store.block_of(positions), self._pieces)
            kept &= first[start] & last[stop]
        return spans[kept]

    def _probabilities(self, positions: np.ndarray, query: Tensor, log_total: float) -> np.ndarray:
        """exp(score - log_total) of the keys at ``positions``, 0 at positions without a key."""
        unique, inverse = np.unique(positions, return_inverse=True)
        rows = self.datastore.rows_of(unique)
        probability = np.zeros(len(unique))
        if (rows >= 0).any():
            keys = torch.from_numpy(self.datastore.keys_of(rows[rows >= 0])).to(query.device)
            scores = similarities(query[None].float(), keys, self.similarity)[0] / self.temperature
            probability[rows >= 0] = (scores - log_total).exp().cpu().numpy()
        return probability[inverse]

    def _merged(self, spans: np.ndarray, probability: np.ndarray) -> list[PhraseCandidate]:
        """One candidate for all occurrences of the same text, even if it is cut into different tokens."""
        by_phrase: dict[str, list[Occurrence]] = {}
        for (position, length), score in zip(spans.tolist(), probability.tolist(), strict=True):
            text = self._text(self.datastore.tokens[position : position + length])
            by_phrase.setdefault(text, []).append(Occurrence(position, length, score))
        alpha = self.settings.length_alpha
        scores = {
            text: sum(hit.score * hit.length**alpha for hit in occurrences) for text, occurrences in by_phrase.items()
        }
        candidates = []
        for text in sorted(scores, key=lambda text: (-scores[text], text))[: max(50, self.settings.k)]:
            best = sorted(by_phrase[text], key=lambda occurrence: -occurrence.score)[: self.settings.contexts]
            candidates.append(PhraseCandidate(text, scores[text], tuple(best), tuple(map(self.context, best))))
        return candidates

    def context(self, occurrence: Occurrence) -> str:
        """The text around an occurrence, within its block, with the phrase between ``[[`` and ``]]``."""
        store = self.datastore
        width = self.settings.context_tokens
        block = store.positions_of_blocks(store.block_of(np.array([occurrence.position])))
        begin = max(int(block[0]), occurrence.position - width)
        stop = occurrence.position + occurrence.length
        parts = (
            self._text(store.tokens[begin : occurrence.position]),
            f"[[{self._text(store.tokens[occurrence.position : stop])}]]",
            self._text(store.tokens[stop : min(int(block[-1]) + 1, stop + width)]),
        )
        return " ".join(part for part in parts if part)

    def _text(self, ids: Any) -> str:
        """The text of some ids, without the ends of sentences."""
        symbols = [self.dictionary[int(token)] for token in ids if int(token) != self.dictionary.eos()]
        return str(self.interface.bpe.decode(" ".join(symbols))).strip()
