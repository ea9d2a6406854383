"""Texts whose spans are redrawn in every epoch: for span denoising, and in groups for NPM."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from fairseq.data import FairseqDataset

from mlsm_plugin.core.masking.span_corruption import SpanNoise, collate_spans, corrupt_spans
from mlsm_plugin.core.masking.span_groups import SpanMasking, collate_groups, draw_spans
from mlsm_plugin.core.masking.word_boundaries import PieceClasses, word_boundaries
from mlsm_plugin.fairseq_plugin.compat.batches import Sample, WholeEpochsDataset
from mlsm_plugin.fairseq_plugin.data.token_blocks import SizedDataset

# factor by which the density grows while a source is too long, since words are short or unknown tokens are no noise
DENSER = 1.1


@dataclass(frozen=True)
class Corruption:
    """How blocks become sources and targets.

    If whole words are noise, and a long word makes the source or target too long, any tokens become noise. A block is
    cut if it has so many unknown tokens that its source does not fit.
    """

    noise: SpanNoise
    sentinels: np.ndarray
    eos: int
    pad: int
    source_length: int  # maximum number of tokens of a source
    seed: int  # with the epoch and the number of a block, decides its spans
    pieces: PieceClasses | None = None  # the classes of all ids, if whole words become noise
    target_length: int | None = None  # maximum number of tokens of a target; None: any
    unk: int | Sequence[int] | None = None  # ids of unknown and special tokens, which never become noise

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
                density *= DENSER  # the drawn words are short, or include unknown tokens
        return self._written(tokens[: self.source_length - 1], self.noise.noise_density, None, rng)

    def _written(
        self, tokens: np.ndarray, density: float, word_begins: np.ndarray | None, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        noise = replace(self.noise, noise_density=density)
        return corrupt_spans(
            tokens, noise, sentinels=self.sentinels, eos=self.eos, rng=rng, word_begins=word_begins, unk=self.unk
        )


class WithoutEos(SizedDataset):
    """Sentences of a binarized dataset without their final EOS.

    A document boundary would become an empty sentence, and fairseq's blocks lose text around empty sentences.
    Boundaries are therefore left out. With ``keep_boundaries``, they get the length :attr:`boundary_size`, which no
    sentence has. ValueError if a sentence does not end in EOS.
    """

    def __init__(self, dataset: FairseqDataset, eos: int, *, keep_boundaries: bool = False) -> None:
        super().__init__()
        if int(dataset[0][-1]) != eos:
            raise ValueError("the sentences of the binarized dataset do not end in </s>; write it with `mlsm binarize`")
        sizes = np.asarray(dataset.sizes).astype(np.int64) - 1
        self.dataset = dataset
        self.boundary_size = int(sizes.max()) + 1
        self._numbers = np.arange(len(sizes)) if keep_boundaries else np.flatnonzero(sizes)
        self.sizes = np.where(sizes == 0, self.boundary_size, sizes)[self._numbers]

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.dataset[int(self._numbers[index])][:-1]

    @property
    def longest_document(self) -> int:
        """Number of tokens of the longest document; needs ``keep_boundaries``."""
        boundaries = self.sizes == self.boundary_size
        documents = np.bincount(boundaries.cumsum(), weights=np.where(boundaries, 0, self.sizes))
        return int(documents.max())


class DrawnAnewDataset(WholeEpochsDataset):
    """Samples whose spans, and with ``shuffle`` whose order, are redrawn in every epoch.

    ``sizes`` ``(n,)`` are the numbers of tokens of the samples, which ``--max-tokens`` limits. ``lengths`` ``(n, k)``
    are those of their k texts, which the model's positions limit.
    """

    def __init__(self, sizes: np.ndarray, lengths: np.ndarray, *, shuffle: bool) -> None:
        self.sizes = sizes
        self.lengths = lengths
        self.shuffle = shuffle
        self.epoch = 1

    def __len__(self) -> int:
        return len(self.sizes)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch = epoch

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.sizes[indices]

    def size(self, index: int) -> int | tuple[int, ...]:
        lengths = tuple(map(int, self.lengths[index]))
        return lengths if len(lengths) > 1 else lengths[0]

    def filter_indices_by_size(
        self, indices: np.ndarray, max_sizes: int | tuple[int, ...]
    ) -> tuple[np.ndarray, list[int]]:
        """The indices of samples that fit, and the other indices."""
        fits = (self.lengths[indices] <= np.asarray(max_sizes)).all(axis=1)
        return indices[fits], indices[~fits].tolist()

    def ordered_indices(self) -> np.ndarray:
        """All indices, in random order (fairseq seeds numpy before the call) or ascending."""
        return np.random.permutation(len(self)) if self.shuffle else np.arange(len(self))

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return False  # fairseq seeds the order by the epoch; a resumed run must not keep that of the first epoch


class SpanDenoisingDataset(DrawnAnewDataset):
    """Blocks of text with new corrupted spans in every epoch, in batches of similar length.

    ``blocks`` holds the ids of each block, without EOS; ``blocks.sizes`` has their lengths, 2 or more. With ``shuffle``
    the order of blocks of equal length is redrawn in every epoch, too.
    """

    def __init__(self, blocks: FairseqDataset, corruption: Corruption, *, shuffle: bool) -> None:
        sizes, inverse = np.unique(np.asarray(blocks.sizes), return_inverse=True)
        of_size = [corruption.noise.lengths(int(size), len(corruption.sentinels)) for size in sizes]
        # (n, 2): maximum lengths of sources and targets
        lengths = np.array(of_size, dtype=np.int64).reshape(-1, 2)[inverse]
        super().__init__(lengths.max(axis=1), lengths, shuffle=shuffle)
        self.blocks = blocks
        self.corruption = corruption

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng([self.corruption.seed, self.epoch, int(index)])
        source, target = self.corruption.apply(self.blocks[index].numpy().astype(np.int64), rng)
        return {"id": index, "source": source, "target": target}

    def collater(self, samples: list[Sample]) -> Sample:
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

    def ordered_indices(self) -> np.ndarray:
        """Indices sorted by the length of the source, then of the target, which keeps padding small."""
        indices = super().ordered_indices()
        for side in (1, 0):
            indices = indices[np.argsort(self.lengths[indices, side], kind="stable")]
        return indices


class SpanGroupsDataset(DrawnAnewDataset):
    """Groups of blocks; an item is a group with its masked spans, which are redrawn in every epoch.

    ``blocks`` holds the ids of each block, and ``blocks.sizes`` their lengths; ``groups`` holds the block numbers of
    each group. With ``shuffle`` the order of the groups is redrawn in every epoch, too.
    """

    def __init__(
        self, blocks: FairseqDataset, groups: list[np.ndarray], masking: SpanMasking, *, shuffle: bool
    ) -> None:
        lengths_of_groups = [np.asarray(blocks.sizes)[group] for group in groups]
        sizes = np.array([int(np.sum(lengths)) for lengths in lengths_of_groups])
        longest = np.array([int(np.max(lengths)) for lengths in lengths_of_groups])
        super().__init__(sizes, longest[:, None], shuffle=shuffle)
        self.blocks = blocks
        self.groups = groups
        self.masking = masking

    def __getitem__(self, index: int) -> Sample:
        sequences = [self.blocks[int(block)].numpy() for block in self.groups[index]]
        return draw_spans(sequences, self.masking, epoch=self.epoch, index=index)

    def collater(self, samples: list[Sample]) -> Sample:
        """A batch of groups, see :func:`collate_groups`."""
        return collate_groups(samples, self.masking) if samples else {}
