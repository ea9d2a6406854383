"""The interface of a loaded model: fairseq's RoBERTa interface, plus latent properties, labels and phrases."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.data import data_utils
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.masking.word_boundaries import SENTENCEPIECE_BEGIN
from mlsm_plugin.core.sparse_coding.atom_names import read_names
from mlsm_plugin.core.text.unknown_tokens import MAX_UNK_RATE_OF_A_TEXT, check_known
from mlsm_plugin.fairseq_plugin.compat.model_parts import RobertaHub, lm_head
from mlsm_plugin.fairseq_plugin.compat.training_options import why_untrained
from mlsm_plugin.fairseq_plugin.text.masked_text import MASK, cut_around_masks, encode_masked_text
from mlsm_plugin.fairseq_plugin.text.symbol_files import special_symbols
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import HuggingFaceBPE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenProperties:
    """The strongest latent semantic properties of a token."""

    token: str  # the piece, as the tokenizer writes it
    atoms: list[tuple[int, float]]  # atoms and their probabilities, strongest first
    names: list[str] = field(default_factory=list, repr=False)  # of these atoms, if names were passed; "" for none


class MlsmHubInterface(RobertaHub):
    """fairseq's ``RobertaHubInterface`` (encode, decode, extract_features, fill_mask, ...) plus latent properties.

    Only ``extract_features_aligned_to_words`` is not supported.

    ``max_unk_rate`` is the largest share of a text that may be unknown. Methods that take a text raise ValueError above
    it, and warn of unknown tokens below it; :meth:`encode` and methods that take tokens do neither.
    """

    max_unk_rate = MAX_UNK_RATE_OF_A_TEXT
    checkpoint: Path | None = None  # the file of the model, if it was opened by ``from_pretrained``

    def extract_features_aligned_to_words(self, sentence: str, return_all_hiddens: bool = False) -> Tensor:
        """Always raise ValueError: fairseq's method needs spaCy 2, and fails if the tokenizer changes characters."""
        raise ValueError(
            "extract_features_aligned_to_words is not offered: fairseq's needs spaCy 2, and fails where the tokenizer "
            "changes characters; extract_features(encode(text)) has a vector for each token"
        )

    @property
    def num_atoms(self) -> int:
        """Number of atoms of the latent head; 0 if the model has no trained latent head."""
        projection = getattr(lm_head(self.model), "atom_projection", None)
        untrained = getattr(self.cfg.criterion, "latent_weight", None) == 0
        return 0 if projection is None or untrained else int(projection.out_features)

    @torch.no_grad()
    def latent_distribution(self, tokens: Tensor) -> Tensor:
        """Predicted distribution over the latent properties of each token, ``(B, T, n_atoms)`` float32.

        ``tokens`` are ``(T,)`` or ``(B, T)`` ids from :meth:`encode`. ValueError if the model has no latent head, or
        there are too many tokens.
        """
        if self.num_atoms == 0:
            raise ValueError("this model has no latent properties: it was not trained with masked_latent_semantic")
        tokens = tokens.unsqueeze(0) if tokens.dim() == 1 else tokens
        if tokens.size(1) > self.model.max_positions():
            limit = self.model.max_positions()
            raise ValueError(f"the text has {tokens.size(1)} tokens, the model takes at most {limit}")
        with utils.model_eval(self.model):
            _, extra = self.model(tokens.to(self.device), project_tokens=False, project_atoms=True)
        return extra["atom_logits"].float().softmax(dim=-1)

    def latent_properties(self, text: str, topk: int = 5, names: PathLike | None = None) -> list[TokenProperties]:
        """The ``topk`` strongest atoms of each token of ``text``; ``<mask>`` stands for a masked token.

        ``names`` is a file or folder of :func:`~mlsm_plugin.core.sparse_coding.atom_names.read_names`, from which the
        atoms also get their names.

        Example::

            >>> model.latent_properties("the <mask> barked", topk=1)[1].atoms
            [(17, 0.21)]

        ValueError if ``topk`` is not positive, the names are of other atoms, or as of :meth:`latent_distribution`.
        """
        _check_topk(topk)
        name_of = {} if names is None else read_names(names, self.num_atoms)
        tokens = torch.tensor(self._encode_with_masks(text)[0])
        probabilities = self.latent_distribution(tokens)[0]
        values, atoms = probabilities.topk(min(topk, probabilities.size(-1)), dim=-1)
        dictionary = self.task.source_dictionary
        special = {dictionary.bos(), dictionary.eos(), dictionary.pad()}
        return [
            TokenProperties(
                dictionary[token],
                list(zip(row_atoms, row_values, strict=True)),
                [] if names is None else [name_of.get(atom, "") for atom in row_atoms],
            )
            for token, row_atoms, row_values in zip(tokens.tolist(), atoms.tolist(), values.tolist(), strict=True)
            if token not in special
        ]

    @torch.no_grad()
    def fill_mask(self, masked_input: str, topk: int = 5) -> list[tuple[str, float, str]]:
        """The most likely tokens for the only ``<mask>`` of a text, each as (filled text, probability, token).

        Special symbols are left out. A SentencePiece token that begins a word begins with a space, as in fairseq. If a
        text is longer than the model's positions, the model sees the part around the mask.

        Raises:
            ValueError: the text has no mask, or several; ``topk`` is below 1, or above the number of symbols that are
                not special; the masked-LM head was not trained; or too many tokens of the text are unknown.
        """
        if (why := why_untrained(self.cfg)) is not None:
            raise ValueError(f"{why}: it cannot fill masks")
        if (masks := masked_input.count(MASK)) != 1:
            raise ValueError(f"{masked_input!r} has {masks} times {MASK}, but needs it once")
        dictionary = self.task.source_dictionary
        special = sorted({*special_symbols(dictionary), self.task.mask_idx})
        _check_topk(topk, len(dictionary) - len(special))
        ids, places = self._encode_with_masks(masked_input)
        ids, (place,) = cut_around_masks(ids, places, length=1, limit=int(self.model.max_positions()))
        with utils.model_eval(self.model):
            logits = self.model(torch.tensor([ids], device=self.device))[0][0, place].float()
        probabilities = logits.softmax(dim=0)
        probabilities[special] = -1  # never among the topk
        before, after = masked_input.split(MASK)
        filled = []
        best, indices = probabilities.topk(topk)
        for probability, index in zip(best.tolist(), indices.tolist(), strict=True):
            symbol = dictionary[index]
            if isinstance(self.bpe, HuggingFaceBPE):
                start, token = self.bpe.tokenizer.continued(before, symbol)
            else:
                token = " " * symbol.startswith(SENTENCEPIECE_BEGIN) + self.bpe.decode(symbol)
                start = before.rstrip() + token
            filled.append((start + after, probability, token))
        return filled

    def fill_phrase(self, text: str, datastore: Any, topk: int = 5, **settings: Any) -> list[Any]:
        """Phrases of a datastore for the masks of ``text``, best first.

        ValueError if there is no mask, or the datastore was made with another model.

        Args:
            text: text with one or more ``<mask>``.
            datastore: a :class:`mlsm_plugin.retrieval.PhraseDatastore` made with this model, or its folder.
            topk: number of phrases for each mask.
            settings: fields of :class:`mlsm_plugin.retrieval.phrase_filling.FillingSettings`.

        Returns:
            a list of :class:`~mlsm_plugin.retrieval.phrase_filling.PhraseCandidate` for the mask; a list of such lists
            if there are several masks.
        """
        from mlsm_plugin.retrieval.phrase_datastore import PhraseDatastore
        from mlsm_plugin.retrieval.phrase_filling import FillingSettings, PhraseFiller

        store = datastore if isinstance(datastore, PhraseDatastore) else PhraseDatastore(datastore)
        if self.checkpoint is not None:
            store.check_belongs_to(self.checkpoint)
        settings = {"k": min(FillingSettings.k, len(store)), **settings}
        phrases = PhraseFiller(self, store, FillingSettings(**settings)).fill(text, topk=topk)
        return phrases[0] if len(phrases) == 1 else phrases

    @torch.no_grad()
    def predict_labels(
        self, texts: Sequence[Sequence[str]], *, batch_size: int = 32, head: str = "sentence_classification_head"
    ) -> list[tuple[Any, float]]:
        """The predictions of a fine-tuned model for texts; ValueError if it was not fine-tuned.

        Args:
            texts: one text each, or two for pairs. Texts longer than the model's positions are cut, with a warning.
            batch_size: number of texts at once; texts of similar length are batched together.
            head: name of the classification head.

        Returns:
            (label, its probability) for each; for regression, the predicted number twice.
        """
        if not self.has_classification_head(head):
            raise ValueError(
                "this model has no classification head: fine-tune it with `mlsm finetune`, and open the result with "
                "transformers"
            )
        check_known(
            (text for parts in texts for text in parts), self.bpe, self.task.source_dictionary, self.max_unk_rate
        )
        limit = int(self.model.max_positions())
        encoded = [self.encode(*parts) for parts in texts]
        if too_long := sum(len(tokens) > limit for tokens in encoded):
            logger.warning("%d of %d texts are longer than the model's positions and are cut", too_long, len(encoded))
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
        predictions: list[tuple[Any, float]] = [("", 0.0)] * len(encoded)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            rows = [_cut(encoded[i], limit) for i in chosen]
            batch = data_utils.collate_tokens(rows, self.task.source_dictionary.pad())
            with utils.model_eval(self.model):
                logits = self.model(batch.to(self.device), features_only=True, classification_head_name=head)[0].float()
            for i, row in zip(chosen, logits.cpu(), strict=True):
                predictions[i] = self._label_of(row)
        return predictions

    def _label_of(self, logits: Tensor) -> tuple[Any, float]:
        if self.is_regression:
            return float(logits[0]), float(logits[0])
        probability = logits.softmax(dim=0)
        best = int(probability.argmax())
        return self.label(best), float(probability[best])

    def predict_label(self, text: str, second: str | None = None) -> Any:
        """The label of a text, or of a pair; a number for regression. See :meth:`predict_labels`."""
        return self.predict_labels([(text,) if second is None else (text, second)])[0][0]

    def _encode_with_masks(self, text: str) -> tuple[list[int], list[int]]:
        """``<s> ... </s>`` ids with the mask symbol for each ``<mask>``, and the positions of the masks."""
        check_known([text], self.bpe, self.task.source_dictionary, self.max_unk_rate)
        return encode_masked_text(text, self.bpe, self.task.source_dictionary, masks=[self.task.mask_idx])


def _check_topk(topk: int, most: int | None = None) -> None:
    """Raise ValueError unless ``topk`` is from 1 to ``most`` (None: no limit)."""
    if topk < 1 or (most is not None and topk > most):
        limit = "" if most is None else f", and at most {most:,}, the symbols that are not special"
        raise ValueError(f"topk is {topk}; it must be at least 1{limit}")


def _cut(tokens: Tensor, limit: int) -> Tensor:
    """At most ``limit`` tokens of a text, with the last one, which closes it."""
    return tokens if len(tokens) <= limit else torch.cat([tokens[: limit - 1], tokens[-1:]])
