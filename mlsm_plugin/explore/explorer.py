"""The data behind the page: the properties of a text's tokens, the predictions for its masks, and search results."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp
import torch

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import hf_folder
from mlsm_plugin.core.machine.devices import Device
from mlsm_plugin.core.sparse_coding.atom_names import read_names
from mlsm_plugin.core.text.hf_tokenizer import Offsets
from mlsm_plugin.core.text.text_files import check_text
from mlsm_plugin.explore.masked_tokens import MaskedTokens
from mlsm_plugin.explore.phrases import Phrases
from mlsm_plugin.explore.property_names import labels_of_adaptation, labels_of_text
from mlsm_plugin.huggingface.adaptation_folder import MODEL
from mlsm_plugin.reports.adapted_texts import check_finished, is_adaptation
from mlsm_plugin.search.index import Hit, SearchIndex
from mlsm_plugin.search.text_codes import PredictedCodes, TextCoder, open_text_coder

if TYPE_CHECKING:
    from mlsm_plugin.retrieval.phrase_filling import PhraseCandidate

MASK = "<mask>"
MOST_CHARACTERS = 5000  # in a text
MOST_STRENGTH = 2  # of steering, up or down
SHOWN_MATCHES = 5  # properties that share a part of their names


@dataclass(frozen=True)
class Property:
    """A latent property of a token, or a property predicted for a mask."""

    atom: int
    name: str
    share: float  # of the sum of the token's activations


@dataclass(frozen=True)
class ReadToken:
    """A token of a text with its strongest properties; the properties of a mask are predicted."""

    text: str
    properties: tuple[Property, ...]
    is_mask: bool
    predicted: tuple[tuple[str, float], ...] = ()  # for a mask: tokens with their probabilities


@dataclass(frozen=True)
class SteeredPredictions:
    """What is predicted for the masks of a text while a property is raised or lowered."""

    atom: int
    name: str
    of_masks: tuple[tuple[tuple[str, float], ...], ...]  # for each mask: tokens with their probabilities


class Explorer:
    """A model with its codes, and optionally a masked-LM head, an index of documents, and a datastore of phrases.

    Args:
        coder: codes the tokens of a text.
        masked_tokens: predicts tokens for masks; None: no tokens are predicted.
        names: names of atoms; an atom without a name is called by its number.
        index: documents to search, indexed with the same ``coder``; None: there is no search.
        phrases: retrieves phrases for masks; None: no phrases are retrieved.
    """

    def __init__(
        self,
        coder: TextCoder,
        *,
        masked_tokens: MaskedTokens | None = None,
        names: Mapping[int, str] | None = None,
        index: SearchIndex | None = None,
        phrases: Phrases | None = None,
    ) -> None:
        self.coder = coder
        self.index = index
        self.phrases = phrases
        self._masked_tokens = masked_tokens
        self._names = dict(names or {})

    @property
    def has_mask(self) -> bool:
        """Whether masks in a text are read: the model predicts tokens or properties for them."""
        predicts = self._masked_tokens is not None or isinstance(self.coder, PredictedCodes)
        return predicts and self.coder.tokenizer.mask_id is not None

    @property
    def predicts_tokens(self) -> bool:
        """Whether tokens are predicted for masks."""
        return self._masked_tokens is not None

    @property
    def can_steer(self) -> bool:
        """Whether tokens are predicted for masks, and the properties are directions in the hidden states of a layer."""
        return self._masked_tokens is not None and self.coder.directions is not None

    def name_of(self, atom: int) -> str:
        """The name of a property."""
        return self._names.get(atom) or f"property {atom}"

    def atom_of(self, query: str) -> int:
        """The property with this number, name or part of a name; ValueError unless there is exactly one."""
        check_text(query, "the property")
        query = query.strip().casefold()
        if not query:
            raise ValueError("no property was named; write its number, or a part of its name")
        atoms = range(self.coder.num_atoms)
        number = query.removeprefix("property ")  # as a property without a name is shown
        if number in map(str, atoms):
            return int(number)
        names = [self.name_of(atom).casefold() for atom in atoms]
        matches = [atom for atom in atoms if names[atom] == query] or [atom for atom in atoms if query in names[atom]]
        if not matches:
            raise ValueError(f'no property has "{query}" in its name; the numbers are 0 to {len(atoms) - 1}')
        if len(matches) > 1:
            some = "; ".join(f"{atom} ({self.name_of(atom)})" for atom in matches[:SHOWN_MATCHES])
            more = ", ..." if len(matches) > SHOWN_MATCHES else ""
            raise ValueError(f'{len(matches):,} properties have "{query}" in their names; write a number: {some}{more}')
        return matches[0]

    def read(self, text: str, *, properties: int = 5, predictions: int = 8) -> list[ReadToken]:
        """The tokens of a text; in it, ``<mask>`` or the tokenizer's own mask stands for a masked token.

        ValueError if the text is empty, too long or not text, or the tokenizer finds no token in it.
        """
        text = self._checked(text)
        ids, offsets = self._encoded(text)
        codes = self.coder.codes_of_ids(ids)
        tokens = [
            ReadToken(text[start:stop].strip(), self._strongest(codes[row], properties), self._is_mask(ids[row]))
            for row, (start, stop) in enumerate(offsets)
        ]
        if self._masked_tokens is None:
            return tokens
        predicted = iter(self._masked_tokens.predicted(ids, predictions))
        return [
            dataclasses.replace(token, predicted=tuple(next(predicted))) if token.is_mask else token for token in tokens
        ]

    def steered(self, text: str, query: str, strength: float, *, predictions: int = 8) -> SteeredPredictions:
        """The predictions for the masks of a text while a property is raised, or lowered with a negative ``strength``.

        The direction of the property is added to the hidden state of each token of the text, masks too, in the layer of
        the dictionary. What is added is ``strength`` times as long as the hidden state.

        ``query`` is as for :meth:`atom_of`. ValueError as there and for :meth:`read`, or if the model cannot be
        steered, or the strength is not from -2 to 2.
        """
        if self._masked_tokens is None or self.coder.directions is None or self.coder.layer is None:
            raise ValueError("steering needs a dictionary with directions, and a model with a masked-LM head")
        if not abs(strength) <= MOST_STRENGTH:  # also if it is not a number
            raise ValueError(f"the strength must be from -{MOST_STRENGTH} to {MOST_STRENGTH}, got {strength}")
        atom = self.atom_of(query)
        ids, _ = self._encoded(self._checked(text))
        self.coder.check_fits(ids)
        direction = torch.nn.functional.normalize(torch.tensor(self.coder.directions[atom]), dim=0)
        of_masks = self._masked_tokens.steered(
            ids, predictions, layer=self.coder.layer, direction=direction, strength=strength
        )
        return SteeredPredictions(atom, self.name_of(atom), tuple(map(tuple, of_masks)))

    def search(self, text: str, *, mode: str = "both", count: int = 5) -> list[Hit]:
        """The best documents for a text without its masks; the reasons use the names of this explorer.

        ValueError as for :meth:`.SearchIndex.search`, if there is no index, or if the text has only masks.
        """
        if self.index is None:
            raise ValueError("there is no index to search")
        query = self._checked(text)
        if self.has_mask or self.phrases is not None:  # otherwise, <mask> is ordinary text
            query = self._with_plain_masks(query).replace(MASK, " ")
        if not query.strip():
            raise ValueError("the text has only masks; add words to search for")
        hits = self.index.search(query, count=count, mode=mode)
        return [self._with_names(hit) for hit in hits]

    def phrases_of(self, text: str) -> "list[list[PhraseCandidate]]":
        """The phrases for each mask of a text; ValueError if there is no datastore, or as for :class:`Phrases`."""
        if self.phrases is None:
            raise ValueError("there is no datastore of phrases")
        return self.phrases.of_masks(self._with_plain_masks(self._checked(text)))

    def has_masks_in(self, text: str) -> bool:
        """Whether ``<mask>`` or the tokenizer's own mask stands in a text."""
        return MASK in self._with_plain_masks(text)

    def _encoded(self, text: str) -> tuple[list[int], Offsets]:
        """The ids of a checked text and their character spans; ValueError if there are none."""
        tokenizer = self.coder.tokenizer
        ids, offsets = tokenizer.encoded_with_masks(text, MASK) if self.has_mask else tokenizer.encoded_text(text)
        if not ids:
            raise ValueError("the tokenizer of the model finds no token in the text")
        return ids, offsets

    def _is_mask(self, number: int) -> bool:
        return self.has_mask and number == self.coder.tokenizer.mask_id

    def _checked(self, text: str) -> str:
        if not text.strip():
            raise ValueError("the text is empty")
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"the text has {len(text):,} characters; {MOST_CHARACTERS:,} can be shown")
        check_text(text)
        return self._with_plain_masks(text) if self.has_mask else text

    def _with_plain_masks(self, text: str) -> str:
        """A text with ``<mask>`` in place of the tokenizer's own mask."""
        mask_id = self.coder.tokenizer.mask_id
        return text if mask_id is None else text.replace(self.coder.tokenizer.tokens_by_id()[mask_id], MASK)

    def _strongest(self, code: sp.csr_matrix, count: int) -> tuple[Property, ...]:
        total = max(float(code.data.sum()), 1e-12)
        best = np.argsort(-code.data, kind="stable")[:count]
        return tuple(
            Property(int(code.indices[place]), self.name_of(int(code.indices[place])), float(code.data[place] / total))
            for place in best
        )

    def _with_names(self, hit: Hit) -> Hit:
        reasons = tuple(dataclasses.replace(reason, label=self.name_of(reason.atom)) for reason in hit.reasons)
        return dataclasses.replace(hit, reasons=reasons)


def open_explorer(
    model: PathLike,
    *,
    dictionary: PathLike | None = None,
    index: PathLike | None = None,
    names: PathLike | None = None,
    text: PathLike | None = None,
    datastore: PathLike | None = None,
    npm_checkpoint: PathLike | None = None,
    device: Device = None,
) -> Explorer:
    """Open a model for the page.

    Args:
        model: Hugging Face folder or hub name, or output folder of ``mlsm adapt``.
        dictionary: dictionary of a layer of the model; None: the latent head of the model predicts the codes.
        index: index that ``mlsm search index`` wrote with the same model and dictionary.
        names: file or folder for :func:`.read_names`.
        text: text file whose most telling tokens label the properties without a name; None: the labels come from the
            index, or from the text of the adaptation.
        datastore: datastore that ``mlsm npm datastore`` made with ``npm_checkpoint``; it has the phrases for masks.
        npm_checkpoint: run or checkpoint of fairseq.
        device: device of the models; None: the GPU if there is one.

    Raises:
        ValueError: the model cannot be read, has neither a latent head nor a dictionary, or does not fit the other
            files.
        OSError: a file does not exist.
    """
    if (datastore is None) is not (npm_checkpoint is None):
        raise ValueError("phrases need both --datastore and --npm-checkpoint, with which it was made")
    adaptation = Path(model) if is_adaptation(Path(model)) else None
    if adaptation is not None:
        check_finished(adaptation)
        model = adaptation / MODEL
    coder = open_text_coder(model, dictionary, device=device)
    opened_index = None if index is None else SearchIndex(index, coder)
    labels: list[str] = []
    if text is not None:
        labels = labels_of_text(text, coder)
    elif opened_index is not None:
        labels = opened_index.labels
    elif adaptation is not None and dictionary is None:
        labels = labels_of_adaptation(adaptation, coder.tokenizer)
    all_names = {atom: label for atom, label in enumerate(labels) if label}
    if names is not None:
        all_names |= read_names(names, coder.num_atoms)
    phrases = None
    if datastore is not None and npm_checkpoint is not None:
        phrases = Phrases(npm_checkpoint, datastore, device=device)
    return Explorer(
        coder, masked_tokens=_masked_tokens(model, coder), names=all_names, index=opened_index, phrases=phrases
    )


def _masked_tokens(model: PathLike, coder: TextCoder) -> MaskedTokens | None:
    """The masked LM of a model; None if it has no trained head (an encoder alone) or no mask."""
    if coder.tokenizer.mask_id is None:
        return None
    try:
        return MaskedTokens(hf_folder(model, weights=True), coder.tokenizer, coder.device)
    except ValueError:
        return None
