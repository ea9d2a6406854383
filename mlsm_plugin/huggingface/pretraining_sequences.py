"""Datasets for the Trainer of ``transformers``: sequences or groups of them, with number, epoch and maybe codes."""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.masking.span_groups import consecutive_groups
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.stored_codes import covered_positions, recorded_coverage
from mlsm_plugin.huggingface.token_sequences import InputIds, TokenSequences


class SequenceCodes(CodeStore):
    """The codes of exactly these sequences; they cover a share ``coverage`` of the positions.

    ValueError if the codes belong to other sequences or another order, or are unfinished or damaged.
    """

    def __init__(self, directory: PathLike, sequences: TokenSequences) -> None:
        super().__init__(directory)
        recorded = self.meta.get("fingerprints", {}).get("split")
        if recorded != sequences.fingerprint or len(self) != sequences.num_tokens:
            raise ValueError(
                f"the codes in {directory} were made from another text, or from these sequences in another order; "
                "code these sequences, or pass those that were coded"
            )
        self.coverage, self._seed = recorded_coverage(self.meta, directory)

    def covered(self, positions: np.ndarray) -> np.ndarray:
        """Which positions ``(T,)`` are coded, bool."""
        return covered_positions(positions, coverage=self.coverage, seed=self._seed)


@dataclass(frozen=True)
class PretrainingSequence:
    """A sequence before it is masked. It is not a dict, from which the Trainer would remove entries."""

    input_ids: np.ndarray  # (T,) int64, special tokens included
    index: int  # of the sequence; it decides the masks, together with the epoch
    epoch: int
    first: int  # position of the first token in the corpus
    codes: SequenceCodes | None  # of the corpus


@dataclass(frozen=True)
class SpanGroup:
    """Sequences that follow each other, ``(T_i,)`` each; the epoch and the index decide their spans."""

    sequences: list[np.ndarray]
    index: int
    epoch: int


class Samples(Dataset):
    """Samples of a corpus, and the epoch, which decides masks and spans; all worker processes see it."""

    def __init__(self, input_ids: InputIds) -> None:
        self.sequences = TokenSequences.of(input_ids)
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._epoch_is_fixed = False

    def set_epoch(self, epoch: int) -> None:
        """Draw the masks of this epoch, unless :meth:`fix_epoch` has fixed another."""
        if not self._epoch_is_fixed:
            self._epoch[0] = epoch

    def fix_epoch(self, epoch: int) -> None:
        """Draw the masks of this epoch, and ignore :meth:`set_epoch` from now on.

        ``accelerate`` calls :meth:`set_epoch` whenever a pass begins: with 0 after a resume, and in each evaluation.
        """
        self._epoch[0] = epoch
        self._epoch_is_fixed = True

    def __deepcopy__(self, memo: dict[int, object]) -> "Samples":
        """The same sequences with an epoch of their own."""
        copied = copy.copy(self)
        copied.separate_epoch()
        return copied

    def separate_epoch(self) -> None:
        """Share the epoch with no other dataset any more."""
        self._epoch = self._epoch.clone().share_memory_()


class PretrainingSequences(Samples):
    """Sequences of ids for the collators of this package.

    ``input_ids`` are as of :class:`TokenSequences`, or one of these. ``codes``, for MLSM, is the folder of the codes of
    exactly these sequences, which :func:`~mlsm_plugin.huggingface.coding.encode_sequences` wrote; ValueError as of
    :class:`SequenceCodes`. In the Trainer,
    :class:`~mlsm_plugin.huggingface.trainer_callback.PretrainingCallback` sets the epoch. If nothing sets it, as in
    evaluation, the masks are always the same.
    """

    def __init__(self, input_ids: InputIds, codes: PathLike | None = None) -> None:
        super().__init__(input_ids)
        self.codes = None if codes is None else SequenceCodes(codes, self.sequences)

    @property
    def num_atoms(self) -> int:
        """Atoms of the codes; raises ValueError if there are none."""
        if self.codes is None:
            raise ValueError("these sequences have no codes; pass the folder of their codes")
        return self.codes.num_atoms

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> PretrainingSequence:
        first = int(self.sequences.starts[index])
        return PretrainingSequence(self.sequences[index], int(index), int(self._epoch[0]), first, self.codes)


class SpanGroups(Samples):
    """Groups of sequences that follow each other in the corpus; the Trainer's batch size counts groups.

    ``input_ids`` are as of :class:`TokenSequences`, or one of these. ValueError if a group would have fewer than 2
    sequences.
    """

    def __init__(self, input_ids: InputIds, group_size: int = 16) -> None:
        super().__init__(input_ids)
        if group_size < 2:
            raise ValueError(f"group_size must be at least 2, got {group_size}: spans are found in other sequences")
        if len(self.sequences) < 2:
            raise ValueError("the text is only one sequence; spans are found in other sequences of a group")
        self.groups = consecutive_groups(len(self.sequences), group_size)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> SpanGroup:
        sequences = [self.sequences[int(number)] for number in self.groups[index]]
        return SpanGroup(sequences, int(index), int(self._epoch[0]))
