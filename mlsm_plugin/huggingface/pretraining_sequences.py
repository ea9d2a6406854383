"""Datasets for the Trainer of ``transformers``: sequences or groups, with index, epoch and optionally codes."""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.masking.span_groups import consecutive_groups
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.stored_codes import covered_positions, recorded_coverage
from mlsm_plugin.huggingface.aligned_sequences import AlignedSequences
from mlsm_plugin.huggingface.token_sequences import InputIds, TokenSequences

SEQUENCES_OF_GROUP = 16  # of NPM


def order_of_epoch(number: int, seed: int, epoch: int) -> torch.Tensor:
    """A random order ``(number,)`` of samples that depends only on seed and epoch, as in ``accelerate`` 1.15."""
    return torch.randperm(number, generator=torch.Generator().manual_seed(seed + epoch))


class SequenceCodes(CodeStore):
    """The codes of exactly these sequences; they cover a share ``coverage`` of the positions.

    ValueError if the codes belong to other sequences or another order, or are incomplete or damaged.
    """

    def __init__(self, directory: PathLike, sequences: TokenSequences) -> None:
        super().__init__(directory)
        recorded_split = self.meta.get("fingerprints", {}).get("split")
        if recorded_split != sequences.fingerprint or len(self) != sequences.num_tokens:
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
    """A sequence before it is masked; not a dict, since the Trainer would remove entries from a dict."""

    input_ids: np.ndarray  # (T,) int64, special tokens included
    index: int  # of the sequence; the masks depend on it and on the epoch
    epoch: int
    positions: np.ndarray  # (T,) int64, in the coded corpus; -1: the token has no code
    codes: SequenceCodes | None  # of the coded corpus
    progress: float = 1.0  # share of the training before this sequence; 1 in evaluations
    aligned: AlignedSequences | None = None  # the text in the tokens of another model, if its vocabulary differs


@dataclass(frozen=True)
class SpanGroup:
    """Consecutive sequences, ``(T_i,)`` each; their spans depend on the epoch and the index."""

    sequences: list[np.ndarray]
    index: int
    epoch: int


class Samples(Dataset):
    """Samples of a corpus, and the epoch, on which masks and spans depend; worker processes share the epoch."""

    def __init__(self, input_ids: InputIds) -> None:
        self.sequences = TokenSequences.of(input_ids)
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._epoch_is_fixed = False
        self._training: tuple[int, int] | None = None  # seed of the order, samples of all updates
        self._places: tuple[int, torch.Tensor] | None = None  # an epoch, and the place of each sample in its order

    def set_training(self, seed: int, samples: int) -> None:
        """Set a training over this many ``samples``, which takes them in the orders of :func:`order_of_epoch`."""
        self._training = (seed, samples)

    def progress_of(self, index: int) -> float:
        """The share of the training before a sample in this epoch; 1 if no training was set."""
        if self._training is None:
            return 1.0
        seed, samples = self._training
        epoch = int(self._epoch[0])
        if self._places is None or self._places[0] != epoch:
            order = order_of_epoch(len(self), seed, epoch)
            self._places = (epoch, torch.empty_like(order).scatter_(0, order, torch.arange(len(order))))
        return min(1.0, (epoch * len(self) + int(self._places[1][index])) / samples)

    def __len__(self) -> int:
        return len(self.sequences)

    def set_epoch(self, epoch: int) -> None:
        """Draw the masks of this epoch, unless :meth:`fix_epoch` was called."""
        if not self._epoch_is_fixed:
            self._epoch[0] = epoch

    def fix_epoch(self, epoch: int) -> None:
        """Draw the masks of this epoch, and ignore :meth:`set_epoch` from now on.

        ``accelerate`` calls :meth:`set_epoch` at the start of each pass: with 0 after a resume and in each evaluation.
        """
        self._epoch[0] = epoch
        self._epoch_is_fixed = True

    def __deepcopy__(self, memo: dict[int, object]) -> "Samples":
        """The same sequences with a separate epoch, and outside any training."""
        duplicate = copy.copy(self)
        duplicate.separate_epoch()
        return duplicate

    def separate_epoch(self) -> None:
        """Stop sharing the epoch with other datasets, and leave the training."""
        self._training = None
        self._epoch = self._epoch.clone().share_memory_()


class PretrainingSequences(Samples):
    """Sequences of ids for the collators of this package.

    ``input_ids`` is a :class:`TokenSequences`, or its argument. ``codes``, for MLSM, is a folder written by
    :func:`~mlsm_plugin.huggingface.coding.encode_sequences`, with the codes of exactly these sequences, or of the
    sequences that are ``aligned`` with them; ValueError as in :class:`SequenceCodes`. In the Trainer,
    :class:`~mlsm_plugin.huggingface.trainer_callback.PretrainingCallback` sets the epoch. If nothing sets it, as in
    evaluation, the masks are always the same. ValueError if the ``aligned`` text belongs to other sequences.
    """

    def __init__(
        self, input_ids: InputIds, codes: PathLike | None = None, *, aligned: AlignedSequences | None = None
    ) -> None:
        super().__init__(input_ids)
        if aligned is not None:
            aligned.check_aligned_with(self.sequences)
        self.aligned = aligned
        self.codes: SequenceCodes | None = None
        if codes is not None:
            self.codes = SequenceCodes(codes, self.sequences if aligned is None else aligned.sequences)

    @property
    def num_atoms(self) -> int:
        """Number of atoms of the codes; ValueError if the sequences have no codes."""
        if self.codes is None:
            raise ValueError("these sequences have no codes; pass the folder of their codes")
        return self.codes.num_atoms

    def __getitem__(self, index: int) -> PretrainingSequence:
        ids = self.sequences[index]
        positions = self.sequences.starts[index] + np.arange(len(ids))
        if self.aligned is not None:
            positions = self.aligned.positions_of(index)
        progress = self.progress_of(index)
        return PretrainingSequence(ids, int(index), int(self._epoch[0]), positions, self.codes, progress, self.aligned)


class SpanGroups(Samples):
    """Groups of consecutive sequences of the corpus; the Trainer's batch size counts groups.

    ``input_ids`` is a :class:`TokenSequences`, or its argument. ValueError if a group would have fewer than 2
    sequences.
    """

    def __init__(self, input_ids: InputIds, group_size: int = SEQUENCES_OF_GROUP) -> None:
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
