"""The codes of the tokens in a text, from a model and a dictionary, or predicted by a model's latent head."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mlsm_plugin.core.coding.coder_fit import check_width, fitting_fingerprint, fitting_layer
from mlsm_plugin.core.files.atomic_files import PathLike, sha256_of_files
from mlsm_plugin.core.files.hf_files import HF_PREFIX, hf_folder, is_hf
from mlsm_plugin.core.hidden_states.hf_encoder import (
    HuggingFaceEncoder,
    HuggingFaceSource,
    model_and_tokenizer,
    positions_of,
)
from mlsm_plugin.core.machine.devices import Device, default_device
from mlsm_plugin.core.sparse_coding.coder import SparseCoder, load_coder
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer, Offsets
from mlsm_plugin.huggingface.latent_semantic_model import LATENT_HEAD, LatentSemanticModel

BATCH_TOKENS = 8192
STRONGEST_PREDICTED = 16  # atoms of the predicted distribution to keep for each token


@dataclass(frozen=True)
class TextCodes:
    """The codes of the tokens of one text.

    ``codes`` is ``(n_tokens, n_atoms)`` float32, ``ids`` is ``(n_tokens,)``, and ``offsets`` has the character span of
    each token.
    """

    codes: sp.csr_matrix
    ids: np.ndarray
    offsets: Offsets

    def summed(self) -> sp.csr_matrix:
        """``(1, n_atoms)``: log(1 + activation) summed over the tokens, used in place of word counts."""
        return summed_codes([self])


def stacked_codes(texts: Sequence[TextCodes]) -> sp.csr_matrix:
    """The codes of the tokens of several texts, one below the other, ``(n_tokens, n_atoms)``."""
    return sp.csr_matrix(sp.vstack([text.codes for text in texts], format="csr"))


def summed_codes(texts: Sequence[TextCodes]) -> sp.csr_matrix:
    """:meth:`TextCodes.summed` of several texts, ``(n_texts, n_atoms)`` float32, with sorted indices."""
    logarithms = stacked_codes(texts)
    logarithms.data = np.log1p(logarithms.data)
    stops = np.cumsum([0, *(text.codes.shape[0] for text in texts)])
    tokens = np.arange(stops[-1])
    of_texts = sp.csr_matrix((np.ones(len(tokens), np.float32), tokens, stops), shape=(len(texts), len(tokens)))
    summed = sp.csr_matrix(of_texts @ logarithms, dtype=np.float32)
    summed.sort_indices()
    return summed


class TextCoder(ABC):
    """Codes texts; a text with more tokens than the model has positions is read in several parts.

    A token that the tokenizer does not know has an empty code: it says nothing of the characters it stands for.

    ``origin`` names the model and the dictionary of the codes; ``fingerprint`` is the SHA-256 of both and of the
    tokenizer. ``layer`` is the layer that is coded, and ``directions``, ``(n_atoms, dim)``, are those of the atoms in
    its hidden states; both are None if the model itself predicts the codes.
    """

    num_atoms: int
    tokenizer: HuggingFaceTokenizer
    positions: int
    device: torch.device
    origin: dict[str, str | int | None]
    fingerprint: str
    layer: int | None = None
    directions: np.ndarray | None = None

    @abstractmethod
    def _codes(self, tokens: Tensor, chosen: Tensor) -> sp.csr_matrix:
        """Codes ``(n_chosen, n_atoms)`` of the chosen tokens (bool ``(B, T)``) of right-padded ids ``(B, T)``."""

    def coded(self, texts: Sequence[str], *, batch_tokens: int = BATCH_TOKENS) -> list[TextCodes]:
        """The codes of each text."""
        room = self.positions - len(self.tokenizer.surrounded([]))
        encoded = self.tokenizer.encoded(texts)
        parts = [
            (number, first, ids[first : first + room])
            for number, (ids, _) in enumerate(encoded)
            for first in range(0, len(ids), room)
        ]
        parts.sort(key=lambda part: -len(part[2]))
        codes_of: list[dict[int, sp.csr_matrix]] = [{} for _ in texts]
        while parts:
            count = max(1, batch_tokens // len(self.tokenizer.surrounded(parts[0][2])))
            batch = parts[:count]
            parts = parts[count:]
            codes = self._codes_of_batch([ids for _, _, ids in batch])
            place = 0
            for number, first, ids in batch:
                codes_of[number][first] = codes[place : place + len(ids)]
                place += len(ids)
        empty = sp.csr_matrix((0, self.num_atoms), dtype=np.float32)
        texts_codes = []
        for codes, (ids, offsets) in zip(codes_of, encoded, strict=True):
            in_order = [codes[first] for first in sorted(codes)]
            stacked = sp.csr_matrix(sp.vstack([empty, *in_order], format="csr"))
            texts_codes.append(TextCodes(stacked, np.array(ids, dtype=np.int64), offsets))
        return texts_codes

    def codes_of_ids(self, ids: Sequence[int]) -> sp.csr_matrix:
        """Codes ``(n, n_atoms)`` of a text of n ids; ValueError if the model cannot read that many at once."""
        self.check_fits(ids)
        if not ids:
            return sp.csr_matrix((0, self.num_atoms), dtype=np.float32)
        return self._codes_of_batch([list(ids)])

    def check_fits(self, ids: Sequence[int]) -> None:
        """Raise ValueError if the model cannot read that many ids at once."""
        room = self.positions - len(self.tokenizer.surrounded([]))
        if len(ids) > room:
            raise ValueError(f"the text has {len(ids):,} tokens, and the model reads at most {room:,} at once")

    def _codes_of_batch(self, rows: Sequence[list[int]]) -> sp.csr_matrix:
        """The codes of all tokens of several rows of ids, concatenated."""
        before = len(self.tokenizer.before)
        after = len(self.tokenizer.after)
        surrounded = [torch.tensor(self.tokenizer.surrounded(ids)) for ids in rows]
        tokens = pad_sequence(surrounded, batch_first=True, padding_value=self.tokenizer.pad_id)
        chosen = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, ids in enumerate(surrounded):
            chosen[row, before : len(ids) - after] = True
        codes = self._codes(tokens.to(self.device), chosen.to(self.device))
        is_unknown = np.concatenate(rows) == self.tokenizer.unknown_id
        codes.data[np.repeat(is_unknown, np.diff(codes.indptr))] = 0
        codes.eliminate_zeros()
        return codes


class DictionaryCodes(TextCoder):
    """Codes of a layer of a Hugging Face encoder, over a dictionary or from a sparse autoencoder.

    ValueError if the model or the dictionary cannot be read, or the dictionary was learned from another model or layer.
    """

    def __init__(
        self, model: PathLike, dictionary: PathLike, *, layer: int | None = None, device: Device = None
    ) -> None:
        self._coder: SparseCoder = load_coder(dictionary)
        chosen_layer = fitting_layer(self._coder, layer, folder=dictionary, option="--layer")
        folder = hf_folder(model, weights=True)
        learned_from = self._coder.meta.get("auxiliary_fingerprint")
        if (folder / LATENT_HEAD).is_file() and learned_from not in (None, HuggingFaceSource.fingerprint_of(folder)):
            raise ValueError(
                f"{dictionary} was learned from another model than {model}, which has a latent head and predicts its "
                "properties itself: leave out --dictionary"
            )
        model_fingerprint = fitting_fingerprint(f"{HF_PREFIX}{folder}", self._coder, chosen_layer)
        self.encoder = HuggingFaceEncoder(folder, layer=chosen_layer, device=device)
        check_width(self.encoder, self._coder)
        self.tokenizer = self.encoder.tokenizer
        self.positions = self.encoder.max_tokens
        self.device = self.encoder.device
        self.num_atoms = self._coder.num_atoms
        self.layer = chosen_layer
        self.directions = self._coder.directions()
        self.origin = {"model": str(model), "dictionary": str(dictionary), "layer": chosen_layer}
        parts = (model_fingerprint, self._coder.fingerprint, str(chosen_layer), tokenizer_fingerprint(self.tokenizer))
        self.fingerprint = sha256_of_text("-".join(parts))

    def _codes(self, tokens: Tensor, chosen: Tensor) -> sp.csr_matrix:
        codes = self._coder.encode(self.encoder.hidden_states_of(tokens, chosen)).codes
        return codes.astype(np.float32)


class PredictedCodes(TextCoder):
    """The properties that an MLSM model itself predicts for each token, in one pass and without an auxiliary model.

    ``model`` is a folder that ``mlsm adapt`` or ``mlsm convert`` wrote. ValueError if it has no latent head.
    """

    def __init__(self, model: PathLike, *, device: Device = None) -> None:
        folder, config, self.tokenizer = model_and_tokenizer(model, weights=True)
        if not (folder / LATENT_HEAD).is_file():
            raise ValueError(f"{model} has no latent head, which would predict codes; pass --dictionary")
        self._model = LatentSemanticModel.from_pretrained(folder).eval()
        self.device = default_device(device)
        self._model.to(self.device)
        self.positions = positions_of(config)
        self.num_atoms = self._model.latent_head.out_features
        self.origin = {"model": str(model), "dictionary": None, "layer": None}
        files = [*HuggingFaceSource.files_of(folder), folder / LATENT_HEAD]
        self.fingerprint = sha256_of_text("-".join([sha256_of_files(*files), tokenizer_fingerprint(self.tokenizer)]))

    @torch.no_grad()
    def _codes(self, tokens: Tensor, chosen: Tensor) -> sp.csr_matrix:
        probabilities = self._model.latent_logits(tokens, tokens.ne(self.tokenizer.pad_id), chosen).softmax(dim=1)
        values, atoms = probabilities.topk(min(STRONGEST_PREDICTED, self.num_atoms), dim=1)
        rows = np.arange(0, atoms.numel() + 1, atoms.size(1))
        data = (values * atoms.size(1)).flatten().cpu().numpy()
        return sp.csr_matrix((data, atoms.flatten().cpu().numpy(), rows), shape=(len(atoms), self.num_atoms))


def tokenizer_fingerprint(tokenizer: HuggingFaceTokenizer) -> str:
    """SHA-256 of the full definition of a tokenizer."""
    return sha256_of_text(tokenizer.backend.to_str())


def sha256_of_text(text: str) -> str:
    """SHA-256 (hex) of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def open_text_coder(
    model: PathLike, dictionary: PathLike | None, *, layer: int | None = None, device: Device = None
) -> TextCoder:
    """Open a model with a ``dictionary`` for its codes; None: its own latent head predicts them.

    ValueError if the model is neither a Hugging Face folder nor a hub name, or from the two classes.
    """
    path = Path(model)
    if not is_hf(model) and path.exists() and not (path / "config.json").is_file():
        raise ValueError(f"{model} is not a Hugging Face folder; `mlsm convert` writes one from a fairseq checkpoint")
    if dictionary is None:
        return PredictedCodes(model, device=device)
    return DictionaryCodes(model, dictionary, layer=layer, device=device)
