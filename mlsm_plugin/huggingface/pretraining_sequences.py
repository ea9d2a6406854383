"""The datasets of the library's Trainer: sequences with their number, the epoch and, for MLSM, their codes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from mlsm_plugin.huggingface.token_sequences import TokenSequences
from mlsm_plugin.sparse_coding.code_store import CodeStore
from mlsm_plugin.sparse_coding.stored_codes import covered_positions


@dataclass(frozen=True)
class SequenceCodes:
    """The codes of a corpus, and which of its positions have one.

    Attributes:
        store: the codes.
        coverage: share of the positions that are coded.
        seed: seed of that share.
    """

    store: CodeStore
    coverage: float
    seed: int

    def covered(self, positions: np.ndarray) -> np.ndarray:
        """Which positions ``(T,)`` are coded, bool."""
        return covered_positions(positions, coverage=self.coverage, seed=self.seed)


@dataclass(frozen=True)
class PretrainingSequence:
    """A sequence before it is masked. It is not a dict, so that the Trainer removes nothing from it.

    Attributes:
        input_ids: ``(T,)`` int64, special tokens included.
        index: number of the sequence.
        epoch: decides the masks, together with the index.
        first: position of the first token in the corpus.
        codes: the codes of the corpus; None without MLSM.
    """

    input_ids: np.ndarray
    index: int
    epoch: int
    first: int
    codes: SequenceCodes | None


class PretrainingSequences(Dataset):
    """Sequences of ids for the collators of this package.

    In the Trainer, :class:`~mlsm_plugin.huggingface.trainer_callback.PretrainingCallback` sets the epoch; all worker
    processes see it. Where nothing sets it, as in evaluation, the masks are always the same.

    Args:
        input_ids: as of :class:`~mlsm_plugin.huggingface.token_sequences.TokenSequences`, or one of these.
        codes: folder of the codes of exactly these sequences, which :func:`encode_sequences` wrote; for MLSM.

    Raises:
        ValueError: the codes belong to other sequences or another order, or are unfinished or damaged.
    """

    def __init__(self, input_ids: Any, codes: str | os.PathLike[str] | None = None) -> None:
        self.sequences = input_ids if isinstance(input_ids, TokenSequences) else TokenSequences(input_ids)
        self.codes = None if codes is None else _open_codes(codes, self.sequences)
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def num_atoms(self) -> int:
        """Atoms of the codes.

        Raises:
            ValueError: there are no codes.
        """
        if self.codes is None:
            raise ValueError("these sequences have no codes; pass the folder of their codes")
        return self.codes.store.num_atoms

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the masks."""
        self._epoch[0] = epoch

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> PretrainingSequence:
        return PretrainingSequence(
            input_ids=self.sequences[index],
            index=int(index),
            epoch=int(self._epoch[0]),
            first=int(self.sequences.starts[index]),
            codes=self.codes,
        )


def _open_codes(directory: str | os.PathLike[str], sequences: TokenSequences) -> SequenceCodes:
    store = CodeStore(directory)
    recorded = store.meta.get("fingerprints", {}).get("split")
    if recorded != sequences.fingerprint or len(store) != sequences.num_tokens:
        raise ValueError(
            f"the codes in {directory} were made from another text, or from these sequences in another order; "
            "code these sequences, or pass those that were coded"
        )
    coverage = float(store.meta.get("coverage", 1.0))
    seed = store.meta.get("coverage_seed")
    if coverage < 1 and seed is None:
        raise ValueError(f"{directory}/meta.json gives the coverage {coverage} but no coverage_seed; encode again")
    return SequenceCodes(store, coverage, int(seed or 0))
