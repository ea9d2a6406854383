"""Zero-shot classification: which label's words fit a mask best?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.losses.span_contrastive import similarities, temperature_of
from mlsm_plugin.core.text.labels import warn_of_similar_labels
from mlsm_plugin.core.text.text_files import numbered_lines
from mlsm_plugin.core.text.unknown_tokens import DEFAULT_MAX_UNK_RATE, check_known, unknown_tokens_in
from mlsm_plugin.fairseq_plugin.compat.training_options import why_untrained
from mlsm_plugin.fairseq_plugin.text.masked_text import MASK, cut_around_masks, encode_masked_text
from mlsm_plugin.retrieval.phrase_datastore import PhraseDatastore
from mlsm_plugin.retrieval.phrase_filling import PhraseFiller
from mlsm_plugin.retrieval.settings import MOST_OCCURRENCES

if TYPE_CHECKING:
    from mlsm_plugin.fairseq_plugin.compat.model_parts import RobertaHub

CHUNK_TOKENS = 1 << 22  # number of tokens of the text that are compared with a word at once


@dataclass(frozen=True)
class LabelledText:
    """A line of the input: the text, its label, if any, and its file and line number."""

    text: str
    label: str | None
    where: str


def read_verbalizer(path: PathLike) -> dict[str, list[str]]:
    """Read the words of each label from lines ``label TAB word, word, ...``.

    A line that begins with ``#`` and has no tab is a comment. ValueError if a line has another form, a label has two
    lines, or there are fewer than two labels. Warns of labels that look alike.
    """
    words_of_label: dict[str, list[str]] = {}
    for number, line in numbered_lines(path):
        label, tab, words = line.partition("\t")
        if line.startswith("#") and not tab:
            continue
        if line.startswith("# "):
            raise ValueError(f"{path}, line {number}: a comment has no tab, and a label does not begin with '# '")
        if label.strip() in words_of_label:
            raise ValueError(f"{path}, line {number}: {label.strip()!r} has words already; give each label one line")
        words_of_label[label.strip()] = [word.strip() for word in words.split(",") if word.strip()]
        if not tab or not words_of_label[label.strip()]:
            raise ValueError(f"{path}, line {number}: expected a label, a tab, and words with commas between them")
    if len(words_of_label) < 2:
        raise ValueError(f"{path} has {len(words_of_label)} labels; at least 2 are needed")
    warn_of_similar_labels(words_of_label, str(path))
    return words_of_label


def read_texts(path: PathLike, labels: list[str], *, header: bool = False) -> list[LabelledText]:
    """Read lines ``label TAB text``, or ``text`` alone; ``header`` skips the first line.

    ValueError if there is no text, a text has a tab, a label is not in ``labels``, or only some lines have a label.
    """
    items: list[LabelledText] = []
    for number, line in islice(numbered_lines(path), int(header), None):
        where = f"{path}, line {number}"
        label, tab, text = line.partition("\t")
        text_label = label.strip() if tab else None
        if not tab:
            text = line
        if not text.strip():
            raise ValueError(f"{where} has no text")
        if "\t" in text.strip():
            raise ValueError(f"{where} has more than one tab; expected label and text, or text alone")
        if text_label is not None and text_label not in labels:
            hint = "" if items or header else "; if it names the columns, pass --header"
            raise ValueError(f"{where}: label {text_label!r} is not in the verbalizer ({', '.join(labels)}){hint}")
        items.append(LabelledText(text.strip(), text_label, where))
    if not items:
        raise ValueError(f"{path} holds no text")
    if len({item.label is None for item in items}) > 1:
        raise ValueError(f"{path}: only some lines have a label; give all lines one, or none")
    return items


class RetrievalClassifier:
    """Scores labels by the probability that their words, anywhere in the corpus, are retrieved for a mask.

    The score of a word is the sum over its occurrences of exp(start score) and exp(end score), each divided by the sum
    over the occurrences of all words of all labels (a closed set). At most ``max_occurrences`` of a word are used,
    evenly spread over the corpus. ValueError as for :func:`label_ids`, or if no word of a label is in the corpus.
    """

    def __init__(
        self, filler: PhraseFiller, verbalizer: dict[str, list[str]], *, max_occurrences: int = MOST_OCCURRENCES
    ) -> None:
        self.filler = filler
        self.labels = list(verbalizer)
        self.was_cut = filler.was_cut
        self.temperature = temperature_of(filler.interface.cfg, filler.datastore.dim, closed_set=True)
        rows: list[np.ndarray] = []
        for label, words in label_ids(filler.interface, verbalizer).items():
            rows.append(np.concatenate([self._occurrences(ids, max_occurrences) for ids in words]))
            if len(rows[-1]) == 0:
                raise ValueError(f"no word of the label {label!r} is in the corpus: {', '.join(verbalizer[label])}")
        self.owners = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(label_rows) for label_rows in rows]))
        keys_of_ends = (filler.datastore.keys_of(column) for column in np.concatenate(rows).T)
        # keys of the first and of the last tokens of the words
        self.keys = [torch.from_numpy(keys).to(filler.interface.device) for keys in keys_of_ends]

    def _occurrences(self, ids: Sequence[int], limit: int) -> np.ndarray:
        """Rows of the keys of the first and the last token of a word: ``(n, 2)``."""
        store = self.filler.datastore
        places = np.concatenate([np.zeros(0, np.int64), *_places(store, ids)])
        rows = np.stack([store.rows_of(places), store.rows_of(places + len(ids) - 1)], axis=1)
        rows = rows[(rows >= 0).all(axis=1)]
        return rows[np.unique(np.linspace(0, len(rows) - 1, min(limit, len(rows))).astype(np.int64))]

    def probabilities(self, text: str) -> np.ndarray:
        """The probability of each label ``(num_labels,)`` for a text with one mask."""
        filler = self.filler
        total = torch.zeros(len(self.labels), dtype=torch.float64)
        for keys, queries in zip(self.keys, filler.queries(text), strict=True):
            scores = similarities(queries[:1], keys, filler.similarity)[0] / self.temperature
            total.index_add_(0, self.owners, scores.double().softmax(dim=0).cpu())
        return (total / total.sum()).numpy()


class ParametricClassifier:
    """Scores labels by the masked-LM head: the sum over their words of the geometric mean probability of the pieces."""

    def __init__(self, interface: "RobertaHub", verbalizer: dict[str, list[str]]) -> None:
        self.interface = interface
        self.labels = list(verbalizer)
        self.dictionary = interface.task.source_dictionary
        self.words = list(label_ids(interface, verbalizer).values())

    @torch.no_grad()
    def probabilities(self, text: str) -> np.ndarray:
        """The probability of each label ``(num_labels,)`` for a text with one mask."""
        check_known([text], self.interface.bpe, self.dictionary, self.interface.max_unk_rate)
        by_length = {len(ids): self._log_probabilities(text, len(ids)) for words in self.words for ids in words}
        scores = []
        for words in self.words:
            of_words = [float(by_length[len(ids)][torch.arange(len(ids)), torch.tensor(ids)].mean()) for ids in words]
            scores.append(np.logaddexp.reduce(of_words))
        shares = np.exp(np.array(scores) - np.logaddexp.reduce(scores))
        return shares / shares.sum()

    def was_cut(self, text: str) -> bool:
        """Whether the model only sees a part of a text with one mask."""
        longest = max(len(ids) for words in self.words for ids in words)
        return len(self._encoded(text, longest)[0]) > int(self.interface.model.max_positions())

    def _encoded(self, text: str, num_masks: int) -> tuple[list[int], list[int]]:
        """The ids of a text with ``num_masks`` masks in place of the mask, and the position where these begin."""
        masks = [self.interface.task.mask_idx] * num_masks
        return encode_masked_text(text, self.interface.bpe, self.dictionary, masks=masks)

    def _log_probabilities(self, text: str, num_masks: int) -> Tensor:
        """Log-probabilities ``(num_masks, V)`` of all symbols at ``num_masks`` masks in place of the mask."""
        limit = int(self.interface.model.max_positions())
        ids, (first,) = cut_around_masks(*self._encoded(text, num_masks), length=num_masks, limit=limit)
        tokens = torch.tensor([ids], device=self.interface.device)
        places = torch.zeros_like(tokens, dtype=torch.bool)
        places[0, first : first + num_masks] = True
        logits = self.interface.model(tokens, masked_tokens=places)[0]  # (num_masks, V)
        return logits.float().log_softmax(dim=-1).cpu()


def word_ids(interface: "RobertaHub", word: str) -> list[int]:
    """Ids of a word of a verbalizer; ValueError if the vocabulary cannot write it."""
    dictionary = interface.task.source_dictionary
    ids = dictionary.encode_line(interface.bpe.encode(f" {word}"), append_eos=False, add_if_not_exist=False).tolist()
    if not ids or dictionary.unk() in ids:
        raise ValueError(f"the model's vocabulary cannot write the word {word!r} of the verbalizer; choose another")
    return ids


def label_ids(interface: "RobertaHub", verbalizer: dict[str, list[str]]) -> dict[str, list[tuple[int, ...]]]:
    """The distinct ids of the words of each label.

    ValueError if all words of a label are also words of another label, so that it can never have the larger score, or
    the vocabulary cannot write a word.
    """
    ids_of: dict[str, list[tuple[int, ...]]] = {}
    for label, words in verbalizer.items():
        ids_of[label] = list(dict.fromkeys(tuple(word_ids(interface, word)) for word in words))
    for smaller, larger in permutations(ids_of, 2):
        if set(ids_of[smaller]) == set(ids_of[larger]):
            raise ValueError(f"the labels {smaller!r} and {larger!r} have the same words; give each of them its own")
        if set(ids_of[smaller]) < set(ids_of[larger]):
            raise ValueError(
                f"all words of the label {smaller!r} are words of {larger!r}, too, so it is never predicted; give it "
                "its own word, or remove its words from the other"
            )
    return ids_of


def _places(store: PhraseDatastore, ids: Sequence[int]) -> Iterator[np.ndarray]:
    """Positions of an n-gram in the text, within blocks, a part of the text at a time."""
    for start in range(0, len(store.tokens), CHUNK_TOKENS):
        part = np.asarray(store.tokens[start : start + CHUNK_TOKENS + len(ids) - 1])
        size = max(0, min(CHUNK_TOKENS, len(part) - len(ids) + 1))
        match = np.ones(size, bool)
        for offset, token in enumerate(ids):
            match &= part[offset : offset + size] == token
        places = np.flatnonzero(match) + start
        yield places[store.block_of(places) == store.block_of(places + len(ids) - 1)]


def classify(
    interface: "RobertaHub",
    items: Sequence[LabelledText],
    verbalizer: dict[str, list[str]],
    template: str,
    *,
    store: PhraseDatastore | None = None,
    max_occurrences: int = MOST_OCCURRENCES,
    max_unk_rate: float = DEFAULT_MAX_UNK_RATE,
    where: str = "the texts",
) -> list[tuple[str, float, bool]]:
    """For each text of :func:`read_texts`: its label, the label's probability, and whether the model only sees a part.

    ``verbalizer`` comes from :func:`read_verbalizer`; ``template`` is a sentence with ``{}`` for the text and one
    ``<mask>``. ``store`` was made with this model; None: the masked-LM head decides. ``max_unk_rate`` is the largest
    share of all texts that may be unknown; errors call the texts ``where``. ValueError if a text has no token, more is
    unknown, or the head was not trained.
    """
    for item in items:
        if not interface.bpe.encode(item.text).split():
            raise ValueError(f"{item.where}: the text {item.text!r} has no tokens after normalization")
    unknown = unknown_tokens_in((item.text for item in items), interface.bpe, interface.task.source_dictionary)
    unknown.check(where, max_unk_rate)
    unknown.warn(where)
    interface.max_unk_rate = 1
    classifier: ParametricClassifier | RetrievalClassifier
    if store is not None:
        classifier = RetrievalClassifier(PhraseFiller(interface, store), verbalizer, max_occurrences=max_occurrences)
    elif (why := why_untrained(interface.cfg)) is not None:
        raise ValueError(f"{why}: --parametric needs a masked LM; pass --datastore instead")
    else:
        classifier = ParametricClassifier(interface, verbalizer)
    predictions = []
    for item in Progress(items, unit="text"):
        text = template.replace("{}", item.text.replace(MASK, " "))
        shares = classifier.probabilities(text)
        predictions.append((classifier.labels[int(shares.argmax())], float(shares.max()), classifier.was_cut(text)))
    return predictions
