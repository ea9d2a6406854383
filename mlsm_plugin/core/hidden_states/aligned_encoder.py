"""Hidden states of a Hugging Face encoder for a dataset of another vocabulary, whose ids it reads as text."""

import logging
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import hf_folder
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder, HuggingFaceSource
from mlsm_plugin.core.losses.sentence_vectors import pooled_vectors
from mlsm_plugin.core.masking.span_corruption import padded
from mlsm_plugin.core.text.aligned_rows import RowAligner
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.symbol_bytes import SymbolBytes

logger = logging.getLogger(__name__)


class AlignedEncoder(HuggingFaceSource):
    """A :class:`HuggingFaceSource` for a dataset of any tokenizer that lies beside its ``dict.txt``.

    Each id takes the hidden state of the model's token to which it belongs, see :class:`RowAligner`; that of an id
    without one is zero. The model reads a row that is longer than its positions in several parts. ValueError if the
    dataset has no tokenizer, and as for :class:`HuggingFaceEncoder`; :meth:`hidden_states` raises it if more than a
    tenth of the ids have no hidden state.
    """

    def _set_dataset(self, data_bin: Path, tokenizer: HuggingFaceTokenizer) -> None:
        self._aligner = RowAligner(SymbolBytes.of_dataset(data_bin), tokenizer)
        self._has_warned = False

    def to(self, device: str | torch.device) -> None:
        HuggingFaceEncoder.to(self, device)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        rows = self._aligner.read(tokens.cpu().numpy())
        parts = [part for ids in rows.ids for part in self._parts(ids)]
        if not parts:
            return torch.zeros(*tokens.shape, self.dim, device=self.device)
        sizes = np.array([len(ids) for ids, _ in parts])
        ids = np.full((len(parts), sizes.max()), self.pad)
        for row, (part, _) in zip(ids, parts, strict=True):
            row[: len(part)] = part
        columns = np.arange(sizes.max())
        attended = columns < sizes[:, None]
        in_text = attended & (columns >= np.array([added for _, added in parts])[:, None])
        hidden = self._hidden_states(
            torch.from_numpy(ids).to(self.device), torch.from_numpy(attended).to(self.device)
        ).flatten(0, 1)
        places = torch.from_numpy(rows.places)
        flat_places = torch.from_numpy(np.flatnonzero(in_text))[places.clamp(min=0)]
        states = hidden[flat_places.to(self.device)]
        return states.masked_fill_(places.lt(0).to(self.device)[..., None], 0.0)

    def text_vectors(self, tokens: Tensor, attended: Tensor) -> Tensor:
        """See :meth:`HiddenStateEncoder.text_vectors`; a row that is too long for the model is cut, with a warning."""
        rows = self._aligner.read(tokens.cpu().numpy()).ids
        ids = padded([self._cut(row) for row in rows], self.pad).to(self.device)
        is_token = ids.ne(self.pad)  # of the model's own tokens; ``attended`` is about those of the dataset
        return pooled_vectors(self._hidden_states(ids, is_token), is_token, self.pooling)

    def _cut(self, ids: np.ndarray) -> np.ndarray:
        """The beginning of a row that is too long for the model, and its last token, which ends a text."""
        if len(ids) <= self.max_tokens:
            return ids
        if not self._has_warned:
            self._has_warned = True
            logger.warning("texts that are longer than the auxiliary model's %d positions are cut", self.max_tokens)
        return np.append(ids[: self.max_tokens - 1], ids[-1])

    def _parts(self, ids: np.ndarray) -> list[tuple[np.ndarray, int]]:
        """A row in parts that the model can take, and how many tokens are added before each: all begin as a text."""
        begin = np.array([self.tokenizer.begin_id])
        room = self.max_tokens - 1
        further = [
            (np.concatenate([begin, ids[start : start + room]]), 1) for start in range(self.max_tokens, len(ids), room)
        ]
        return [(ids[: self.max_tokens], 0), *further] if len(ids) else []


def alignment_fingerprint(name: PathLike, data_bin: PathLike) -> str | None:
    """SHA-256 of what aligns a dataset with a Hugging Face model; None if its ``dict.txt`` is that of the model.

    ValueError if the dataset or the model has no tokenizer.
    """
    tokenizer = HuggingFaceTokenizer(hf_folder(name))
    if tokenizer.has_dictionary(Path(data_bin)):
        return None
    return RowAligner(SymbolBytes.of_dataset(data_bin), tokenizer).fingerprint
