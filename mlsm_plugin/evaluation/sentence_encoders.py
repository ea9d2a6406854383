"""Encoders for sentence vectors and masked words: Hugging Face folders and fairseq checkpoints."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import is_hf
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.files.sentence_modules import pooling_of
from mlsm_plugin.core.hidden_states.hf_encoder import (
    load_library_model,
    load_masked_lm,
    model_and_tokenizer,
    positions_of,
)
from mlsm_plugin.core.losses.sentence_vectors import pooled_vectors
from mlsm_plugin.core.machine.devices import Device, default_device
from mlsm_plugin.huggingface.pretraining_model import head_of

logger = logging.getLogger(__name__)

BATCH_TOKENS = 8192
NOT_FINITE = "is damaged, or its training has diverged; not finite are its"
NO_WORD = -1  # the word number of a token that belongs to no word


class SentenceEncoder(ABC):
    """An encoder in eval mode, in float32.

    Attributes:
        name: the name with which it was opened.
        pad: id of the padding token.
        mask: id of the mask token; None: the model predicts no masked tokens, and ``why_no_head`` says why.
        positions: longest text in tokens; longer texts are cut before the tokens that close them.
        closing_tokens: number of these tokens, such as [SEP].
        pooling: the vector of a text: ``mean``: the mean of its last hidden states; ``cls``: the last hidden state of
            its first token.
        parameters: number of parameters of the encoder without its head.
    """

    name: str
    pad: int
    mask: int | None
    why_no_head: str
    positions: int
    closing_tokens: int
    device: torch.device
    pooling: str = "mean"
    parameters: int

    @abstractmethod
    def encoded(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of a text, including special tokens at its ends, and the number of each token's word.

        Words are counted in ``text.split()``. ``NO_WORD`` for tokens outside words. Both lists have the same length.
        """

    @abstractmethod
    def hidden_states(self, tokens: Tensor) -> Tensor:
        """The last hidden states ``(B, T, dim)`` of right-padded ids ``(B, T)``."""

    @abstractmethod
    def logits(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """Logits ``(n_masked, V)`` at the masked places (bool ``(B, T)``) of right-padded ids ``(B, T)``."""

    @torch.no_grad()
    def vectors(self, texts: Sequence[str], *, batch_tokens: int = BATCH_TOKENS, what: str = "encoding") -> np.ndarray:
        """The vectors of texts, ``(n, dim)`` float32; ``what`` names the progress bar.

        ValueError if a vector is not finite.
        """
        rows = [self.encoded(text)[0] for text in texts]
        if too_long := sum(len(row) > self.positions for row in rows):
            logger.warning("%d of %d texts are longer than the model's positions and are cut", too_long, len(rows))
        vectors: list[Tensor | None] = [None] * len(rows)
        for chosen, tokens in self._batches([self._cut(row) for row in rows], batch_tokens, what):
            pooled = pooled_vectors(self.hidden_states(tokens).float(), tokens.ne(self.pad), self.pooling)
            for index, vector in zip(chosen, pooled.cpu(), strict=True):
                vectors[index] = vector
        stacked = torch.stack([vector for vector in vectors if vector is not None])
        if not stacked.isfinite().all():
            raise ValueError(f"{self.name} {NOT_FINITE} vectors of texts")
        return stacked.numpy()

    @torch.no_grad()
    def masked_word_losses(
        self,
        texts: Sequence[str],
        words: Sequence[Sequence[int]],
        *,
        batch_tokens: int = BATCH_TOKENS,
        what: str = "masked words",
    ) -> list[tuple[float, int, int]]:
        """Cross entropy of the masked ``words`` of each text; all their tokens are masked at once.

        ValueError if a loss is not finite.

        Args:
            texts: the texts.
            words: for each text, the numbers of its masked words in ``text.split()``.
            batch_tokens: tokens in one forward pass, including padding.
            what: name of the progress bar.

        Returns:
            for each text, the sum of the losses in nats, the number of masked words, and the number of their tokens;
            words with a token beyond the positions of the model are not counted.
        """
        assert self.mask is not None, self.why_no_head
        rows: list[list[int]] = []
        chosen_tokens: list[Tensor] = []
        counts: list[tuple[int, int]] = []
        for text, chosen in zip(texts, words, strict=True):
            ids, word_numbers = self.encoded(text)
            rows.append(self._cut(ids))
            word_of_token = np.array(self._cut(word_numbers))
            whole_words = set(chosen)
            if len(ids) > self.positions:
                whole_words -= set(word_numbers[self.positions - self.closing_tokens :])
            is_chosen = np.isin(word_of_token, list(whole_words))
            chosen_tokens.append(torch.from_numpy(is_chosen))
            counts.append((len(set(word_of_token[is_chosen])), int(is_chosen.sum())))
        sums = [0.0] * len(rows)
        for indices, tokens in self._batches(rows, batch_tokens, what):
            masked = pad_sequence([chosen_tokens[index] for index in indices], batch_first=True).to(self.device)
            if not masked.any():
                continue
            inputs = tokens.masked_fill(masked, self.mask)
            logits = self.logits(inputs, masked).double()
            losses = torch.nn.functional.cross_entropy(logits, tokens[masked], reduction="none")
            if not losses.isfinite().all():
                raise ValueError(f"{self.name} {NOT_FINITE} losses of masked words")
            places = masked.nonzero()[:, 0]
            for row, loss in zip(places.tolist(), losses.tolist(), strict=True):
                sums[indices[row]] += loss
        return [(total, *count) for total, count in zip(sums, counts, strict=True)]

    def _cut(self, row: list[int]) -> list[int]:
        """What the model can take of the entries of a text's tokens: its beginning, and the tokens that close it."""
        if len(row) <= self.positions:
            return row
        last = len(row) - self.closing_tokens
        return [*row[: self.positions - self.closing_tokens], *row[last:]]

    def _batches(self, rows: Sequence[list[int]], batch_tokens: int, what: str) -> Iterator[tuple[list[int], Tensor]]:
        """The numbers of rows of similar length, and their right-padded ids; the longest rows come first."""
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        with Progress(total=len(rows), desc=what, unit="text") as progress:
            while order:
                number = max(1, batch_tokens // max(1, len(rows[order[0]])))
                indices = order[:number]
                order = order[number:]
                tokens = pad_sequence(
                    [torch.tensor(rows[index]) for index in indices], batch_first=True, padding_value=self.pad
                )
                yield indices, tokens.to(self.device)
                progress.update(len(indices))


class HuggingFaceSentences(SentenceEncoder):
    """A Hugging Face model, with its masked-LM head if it has one.

    A sentence-transformers folder sets the pooling; otherwise it is the mean. ValueError if the model or its tokenizer
    cannot be read, they do not fit together, or the folder has a pooling other than ``mean`` and ``cls``.
    """

    def __init__(self, name: PathLike, device: Device = None) -> None:
        folder, config, self._tokenizer = model_and_tokenizer(name, weights=True)
        self.name = str(name)
        self.pad = self._tokenizer.pad_id
        self.mask = self._tokenizer.mask_id
        self.why_no_head = "its tokenizer has no mask token"
        self.positions = positions_of(config)
        self.closing_tokens = len(self._tokenizer.after)
        self.pooling = pooling_of(folder)
        self.device = default_device(device)
        try:
            model = load_masked_lm(folder)
            self._head = head_of(model)
            self._encoder = model.base_model
        except ValueError as error:
            self.mask = None
            self.why_no_head = str(error)
            model = load_library_model(folder).float()
            self._encoder = model
        self._model = model.eval().to(self.device)
        self.parameters = sum(parameter.numel() for parameter in self._encoder.parameters())

    def encoded(self, text: str) -> tuple[list[int], list[int]]:
        ids, offsets = self._tokenizer.encoded_text(text)
        words = [
            *([NO_WORD] * len(self._tokenizer.before)),
            *words_of_offsets(text, offsets),
            *([NO_WORD] * len(self._tokenizer.after)),
        ]
        return self._tokenizer.surrounded(ids), words

    def hidden_states(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self._encoder(input_ids=tokens, attention_mask=tokens.ne(self.pad).long())[0]
        return hidden

    def logits(self, tokens: Tensor, masked: Tensor) -> Tensor:
        logits: Tensor = self._head.project(self._head.transform(self.hidden_states(tokens)[masked]))
        return logits


class FairseqSentences(SentenceEncoder):
    """A RoBERTa-like fairseq checkpoint; ValueError or FileNotFoundError as in ``hub.from_pretrained``."""

    def __init__(self, name: PathLike, device: Device = None) -> None:
        from mlsm_plugin.fairseq_plugin.compat.model_parts import sentence_encoder
        from mlsm_plugin.fairseq_plugin.compat.training_options import why_untrained
        from mlsm_plugin.hub import MlsmHubInterface, from_pretrained

        interface = from_pretrained(name)
        if not isinstance(interface, MlsmHubInterface):
            raise ValueError(f"{name} is an encoder-decoder; only encoders can be evaluated")
        self.name = str(name)
        self._interface = interface.to(default_device(device))
        self._dictionary = interface.task.source_dictionary
        self.pad = int(self._dictionary.pad())
        untrained = why_untrained(interface.cfg)
        self.mask = None if untrained else int(interface.task.mask_idx)
        self.why_no_head = untrained or ""
        self.positions = int(interface.model.max_positions())
        self.closing_tokens = 1
        self.device = interface.device
        encoder = sentence_encoder(interface.model)
        self.parameters = sum(parameter.numel() for parameter in encoder.parameters())

    def encoded(self, text: str) -> tuple[list[int], list[int]]:
        ids = self._interface.encode(text).tolist()
        library = getattr(self._interface.bpe, "tokenizer", None)  # of HuggingFaceBPE
        if library is not None:
            return ids, [NO_WORD, *words_of_offsets(text, library.encoded_text(text)[1]), NO_WORD]
        symbols = [self._dictionary[number] for number in ids[1:-1]]
        return ids, [NO_WORD, *words_of_pieces(text, symbols), NO_WORD]

    def hidden_states(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self._interface.extract_features(tokens)
        return hidden

    def logits(self, tokens: Tensor, masked: Tensor) -> Tensor:
        logits: Tensor = self._interface.model(tokens, masked_tokens=masked)[0]
        return logits


def is_hugging_face_encoder(name: PathLike) -> bool:
    """Whether this is the name of a Hugging Face folder or a hub name."""
    return is_hf(name) or Path(name, "config.json").is_file()


def check_encoder_names(names: Iterable[PathLike]) -> None:
    """Raise FileNotFoundError for the first name that is neither a hub name nor an existing file or folder."""
    for name in names:
        if not is_hugging_face_encoder(name) and not Path(name).exists():
            raise FileNotFoundError(f"{name} does not exist; a model on the hub is hf:{name}")


def open_sentence_encoder(name: PathLike, device: Device = None) -> SentenceEncoder:
    """Open an encoder: a Hugging Face folder or hub name (``hf:NAME``), a fairseq checkpoint, or the folder of a run.

    ValueError or FileNotFoundError if there is no model, or it cannot be read.
    """
    if is_hugging_face_encoder(name):
        return HuggingFaceSentences(name, device)
    check_encoder_names([name])
    return FairseqSentences(name, device)


def words_of_offsets(text: str, offsets: Sequence[tuple[int, int]]) -> list[int]:
    """For each token, the number of the word of ``text.split()`` in which it ends.

    A whitespace token, such as SentencePiece's ``▁``, is part of the next word. ``NO_WORD`` for an empty token.
    """
    word_at = np.full(len(text), NO_WORD)
    number_of_words = len(text.split())
    word = number_of_words
    for place in range(len(text) - 1, -1, -1):
        ends_word = place + 1 == len(text) or text[place + 1].isspace()
        if ends_word and not text[place].isspace():
            word -= 1
        if word < number_of_words:
            word_at[place] = word
    return [int(word_at[stop - 1]) if stop > start else NO_WORD for start, stop in offsets]


def words_of_pieces(text: str, pieces: Sequence[str]) -> list[int]:
    """The word number of each SentencePiece piece; a piece with ``▁`` begins a word.

    ``NO_WORD`` for all pieces if they have another number of words than ``text.split()``.
    """
    words: list[int] = []
    number = -1
    for piece in pieces:
        number += piece.startswith("▁")
        words.append(number)
    return words if number + 1 == len(text.split()) else [NO_WORD] * len(pieces)
