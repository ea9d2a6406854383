"""Texts whose spans are drawn anew in every epoch: for span denoising, and in groups for NPM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from fairseq.data import BaseWrapperDataset

from mlsm_plugin.data.span_corruption import SpanNoise, collate_spans, write_sentinels
from mlsm_plugin.data.span_groups import SpanMasking, collate_groups, consecutive_groups, draw_spans
from mlsm_plugin.fairseq_seams.batches import WholeEpochsDataset
from mlsm_plugin.tokenization.word_boundaries import PieceClasses, word_boundaries

# factor by which the density rises if a source is too long because its noise is whole words, or no unknown tokens
DENSER = 1.1


@dataclass(frozen=True)
class Corruption:
    """How blocks become sources and targets.

    Attributes:
        noise: how much becomes noise.
        sentinels: ids of the sentinels.
        eos, pad: ids of EOS and padding.
        source_length: maximum number of tokens of a source.
        seed: decides the spans of a block, together with the epoch and the number of the block.
        pieces: the classes of all ids if whole words become noise; else None.
        target_length: maximum number of tokens of a target; None: any. Where whole words are noise and one is so long
            that a source or a target has too many tokens, any tokens become noise.
        unk: id of unknown tokens, which never become noise. A block with so many of them that its source does not fit
            is cut.
    """

    noise: SpanNoise
    sentinels: np.ndarray
    eos: int
    pad: int
    source_length: int
    seed: int
    pieces: PieceClasses | None = None
    target_length: int | None = None
    unk: int | None = None

    def apply(self, tokens: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The source and the target of a block of two or more tokens."""
        ways: list[np.ndarray | None] = [None]
        if self.pieces is not None:
            begins = word_boundaries(tokens, np.zeros(len(tokens), np.int64), self.pieces)[0]
            ways = [begins, None] if begins[1:].any() else [None]
        for begins_of_words in ways:
            density = self.noise.noise_density
            while density < 1:
                pair = self._written(tokens, density, begins_of_words, rng)
                if len(pair[0]) <= self.source_length:
                    if self.target_length is None or len(pair[1]) <= self.target_length:
                        return pair
                    break  # with a higher density, targets are longer
                density *= DENSER  # the words that were drawn are short, or unknown tokens were among them
        return self._written(tokens[: self.source_length - 1], self.noise.noise_density, None, rng)

    def _written(
        self, tokens: np.ndarray, density: float, word_begins: np.ndarray | None, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        noise = replace(self.noise, noise_density=density)
        how: dict[str, Any] = {"sentinels": self.sentinels, "eos": self.eos, "rng": rng, "unk": self.unk}
        return write_sentinels(tokens, noise, word_begins=word_begins, **how)


class WithoutEos(BaseWrapperDataset):
    """Sentences without the EOS that ends each in a binarized dataset.

    A document boundary would become an empty sentence, around which fairseq's blocks lose text. Boundaries are
    therefore left out, or get a length that no sentence has.

    Args:
        dataset: sentences, each ending in EOS.
        eos: id of EOS.
        keep_boundaries: keep document boundaries, with the length :attr:`boundary_size`.

    Raises:
        ValueError: a sentence does not end in EOS.
    """

    def __init__(self, dataset: Any, eos: int, *, keep_boundaries: bool = False) -> None:
        super().__init__(dataset)
        if int(dataset[0][-1]) != eos:
            raise ValueError("the sentences of the binarized dataset do not end in </s>; write it with `mlsm binarize`")
        sizes = np.asarray(dataset.sizes).astype(np.int64) - 1
        self.boundary_size = int(sizes.max()) + 1
        self._numbers = None
        if keep_boundaries:
            sizes[sizes == 0] = self.boundary_size
        elif (sizes == 0).any():
            self._numbers = np.flatnonzero(sizes)
            sizes = sizes[self._numbers]
        self._sizes = sizes

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index if self._numbers is None else int(self._numbers[index])][:-1]

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def sizes(self) -> np.ndarray:
        return self._sizes

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document; the boundaries must have been kept."""
        boundaries = self._sizes == self.boundary_size
        documents = np.bincount(boundaries.cumsum(), weights=np.where(boundaries, 0, self._sizes))
        return int(documents.max())


class ChosenBlocks(BaseWrapperDataset):
    """A selection of blocks, by their numbers."""

    def __init__(self, blocks: Any, numbers: np.ndarray) -> None:
        super().__init__(blocks)
        self.numbers = numbers
        self._sizes = np.asarray(blocks.sizes)[numbers]

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.numbers[index])]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def sizes(self) -> np.ndarray:
        return self._sizes


class SpanDenoisingDataset(WholeEpochsDataset):
    """Blocks of text whose spans are corrupted anew in every epoch, in batches of similar length.

    Args:
        blocks: dataset of the ids of each block, without EOS; ``blocks.sizes`` has their lengths, 2 or more.
        corruption: how blocks become sources and targets.
        shuffle: draw the order of blocks of equal length anew in every epoch.
    """

    def __init__(self, blocks: Any, corruption: Corruption, *, shuffle: bool) -> None:
        lengths, inverse = np.unique(np.asarray(blocks.sizes), return_inverse=True)
        of_length = [corruption.noise.lengths(int(length), len(corruption.sentinels)) for length in lengths]
        # (n, 2): maximum lengths of sources and targets
        self.sizes = np.array(of_length, dtype=np.int64).reshape(-1, 2)[inverse]
        self.blocks, self.corruption, self.shuffle, self.epoch = blocks, corruption, shuffle, 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng([self.corruption.seed, self.epoch, int(index)])
        source, target = self.corruption.apply(self.blocks[index].numpy().astype(np.int64), rng)
        return {"id": index, "source": source, "target": target}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the spans."""
        super().set_epoch(epoch)
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sizes)

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch for an encoder-decoder.

        Returns:
            ``net_input`` with ``src_tokens`` (B, S), ``src_lengths`` (B,) and ``prev_output_tokens`` (B, T); ``target``
            (B, T); ``id`` (B,); ``nsentences``; ``ntokens``, the number of target tokens, over which fairseq's
            criterions take the mean.
        """
        if not samples:
            return {}
        pairs = [(sample["source"], sample["target"]) for sample in samples]
        batch = collate_spans(pairs, pad=self.corruption.pad, eos=self.corruption.eos)
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": sum(len(sample["target"]) for sample in samples),
            "net_input": {
                "src_tokens": batch["source"],
                "src_lengths": torch.tensor([len(sample["source"]) for sample in samples]),
                "prev_output_tokens": batch["decoder_input"],
            },
            "target": batch["target"],
        }

    def num_tokens(self, index: int) -> int:
        """The length of the longer of source and target, which ``--max-tokens`` limits."""
        return int(self.sizes[index].max())

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """:meth:`num_tokens` for several pairs: ``(n,)``."""
        longest: np.ndarray = self.sizes[indices].max(axis=1)
        return longest

    def size(self, index: int) -> tuple[int, int]:
        """The lengths of source and target, which the model's positions limit."""
        return int(self.sizes[index, 0]), int(self.sizes[index, 1])

    def filter_indices_by_size(self, indices: np.ndarray, max_sizes: Any) -> tuple[np.ndarray, list[int]]:
        """The indices of pairs that fit, and the other indices."""
        fits = (self.sizes[indices] <= np.asarray(max_sizes)).all(axis=1)
        return indices[fits], indices[~fits].tolist()

    def ordered_indices(self) -> np.ndarray:
        """Indices ordered by length, so that batches have little padding; equal lengths in random order.

        fairseq seeds numpy before the call.
        """
        indices = np.random.permutation(len(self)) if self.shuffle else np.arange(len(self))
        indices = indices[np.argsort(self.sizes[indices, 1], kind="stable")]
        ordered: np.ndarray = indices[np.argsort(self.sizes[indices, 0], kind="stable")]
        return ordered

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return False  # fairseq seeds the order by the epoch, so a resumed run must not keep that of the first

    @property
    def supports_prefetch(self) -> bool:
        return False


__all__ = ["SpanGroupsDataset", "SpanMasking", "consecutive_groups"]


class SpanGroupsDataset(WholeEpochsDataset):
    """Groups of blocks; an item is a group with its masked spans, drawn anew in every epoch.

    Args:
        blocks: dataset of the ids of each block; ``blocks.sizes`` has their lengths.
        groups: numbers of the blocks of each group.
        masking: how spans are drawn and written.
        shuffle: draw the order of the groups anew in every epoch.
    """

    def __init__(self, blocks: Any, groups: list[np.ndarray], masking: SpanMasking, *, shuffle: bool) -> None:
        self.blocks = blocks
        self.groups = groups
        self.masking = masking
        self.shuffle = shuffle
        self.epoch = 1
        sizes = np.asarray(blocks.sizes)
        self.sizes = np.array([int(sizes[group].sum()) for group in groups])
        self._longest = np.array([int(sizes[group].max()) for group in groups])

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sequences = [self.blocks[int(block)].numpy() for block in self.groups[index]]
        return draw_spans(sequences, self.masking, epoch=self.epoch, index=index)

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch of groups, see :func:`collate_groups`."""
        return collate_groups(samples, self.masking) if samples else {}

    def num_tokens(self, index: int) -> int:
        """The number of tokens of a group."""
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """The numbers of tokens of several groups: ``(n,)``."""
        return self.sizes[indices]

    def size(self, index: int) -> int:
        """The length of the longest sequence of a group, which the model's positions limit."""
        return int(self._longest[index])

    def ordered_indices(self) -> np.ndarray:
        """All indices, in random order (fairseq seeds numpy before the call) or in the given order."""
        return np.random.permutation(len(self)) if self.shuffle else np.arange(len(self))

    def filter_indices_by_size(self, indices: np.ndarray, max_sizes: Any) -> tuple[np.ndarray, list[int]]:
        """Indices of the groups whose sequences all have at most ``max_sizes`` tokens, and the other indices."""
        limit = max_sizes if isinstance(max_sizes, (int, float)) else min(max_sizes)
        fits = self._longest[indices] <= limit
        return indices[fits], indices[~fits].tolist()

    @property
    def supports_prefetch(self) -> bool:
        return False

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return False  # fairseq seeds the order by the epoch, so a resumed run must not keep that of the first

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the spans."""
        super().set_epoch(epoch)
        self.epoch = epoch
