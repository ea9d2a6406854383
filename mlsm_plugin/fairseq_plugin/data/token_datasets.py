"""Datasets of values for the tokens of each sample: positions, masks, codes; and whether a batch has padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from fairseq.data import BaseWrapperDataset, Dictionary, FairseqDataset
from torch import Tensor

from mlsm_plugin.core.masking.chosen_tokens import chosen_sizes
from mlsm_plugin.core.masking.masked_share import MaskReplacement
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.stored_codes import NO_POSITION as NO_POSITION
from mlsm_plugin.core.sparse_coding.stored_codes import covered_positions, strongest_of_padded
from mlsm_plugin.fairseq_plugin.compat.batches import WordBeginnings
from mlsm_plugin.fairseq_plugin.data.token_blocks import SizedDataset, is_known
from mlsm_plugin.fairseq_plugin.text.symbol_files import own_special_symbols, special_symbols


class TokenPositionsDataset(SizedDataset):
    """Item ``i`` holds the flat positions of the tokens of sentence ``i`` of a binarized split.

    Wrapped in the same datasets as the split (blocks, prepended BOS), it gives every token's row in the code store. The
    ``sizes`` (n_sentences,) are copied. Keep a reference to the split during the call:
    ``TokenPositionsDataset(load_split(...).sizes)`` would read unmapped memory.
    """

    def __init__(self, sizes: np.ndarray) -> None:
        super().__init__()
        # copied, since fairseq unmaps the sizes of a memory-mapped split when the split is garbage-collected
        self.sizes = np.array(sizes)
        self.starts = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(int(self.starts[index]), int(self.starts[index + 1]))


@dataclass(frozen=True)
class SplitCoverage:
    """The number of positions of a split, and the share of them that is coded, see :func:`covered_positions`."""

    num_tokens: int
    coverage: float = 1.0
    seed: int = 0


def masking_probabilities(positions: np.ndarray, splits: Sequence[SplitCoverage], mask_prob: float) -> np.ndarray:
    """The masking probability of each token of a sample, ``(T,)`` float64.

    It is ``mask_prob / coverage`` at covered positions and 0 elsewhere. On average, the share ``mask_prob`` of the
    positions is masked for every coverage, which must be at least ``mask_prob``. ``positions`` ``(T,)`` are flat
    positions in the concatenated text of all ``splits``; negative for a token that is in no split.
    """
    assert all(mask_prob <= split.coverage for split in splits)
    starts = np.concatenate([[0], np.cumsum([split.num_tokens for split in splits], dtype=np.int64)])
    numbers = np.searchsorted(starts, positions, side="right") - 1  # -1 for no position
    probabilities = np.zeros(len(positions))
    for number in np.unique(numbers[numbers >= 0]):
        split = splits[number]
        tokens = numbers == number
        covered = covered_positions(positions[tokens] - starts[number], coverage=split.coverage, seed=split.seed)
        probabilities[tokens] = covered * (mask_prob / split.coverage)
    return probabilities


class CoveredMaskTokensDataset(BaseWrapperDataset):
    """fairseq's ``MaskTokensDataset``, with masks only at covered positions.

    Each content token is masked independently with its probability (:func:`masking_probabilities`); BOS, EOS, padding
    and unknown tokens are never masked. The masks depend only on the seed, the epoch and the index of the sample. Use
    :meth:`apply_mask`.

    Args:
        tokens: dataset of the ids of each sample ``(T,)``.
        positions: dataset of the flat positions of the same tokens ``(T,)``.
        splits, mask_prob: as for :func:`masking_probabilities`.
        vocab: the symbols, including ``<mask>``.
        return_masked_tokens: yield targets (the original id of masked tokens, padding elsewhere) instead of inputs.
        seed: seed of the masks, not negative.
        replacement: what replaces masked tokens.
        freq_weighted_replacement: draw random symbols in proportion to their counts in ``vocab``.
    """

    def __init__(
        self,
        tokens: FairseqDataset,
        positions: FairseqDataset,
        splits: Sequence[SplitCoverage],
        mask_prob: float,
        vocab: Dictionary,
        *,
        return_masked_tokens: bool,
        seed: int = 1,
        replacement: MaskReplacement = MaskReplacement(),  # noqa: B008
        freq_weighted_replacement: bool = False,
    ) -> None:
        super().__init__(tokens)
        self.positions = positions
        self.splits = splits
        self.mask_prob = mask_prob
        self.vocab = vocab
        self.return_masked_tokens = return_masked_tokens
        self.seed = seed
        self.replacement = replacement
        weights = np.array(vocab.count if freq_weighted_replacement else np.ones(len(vocab)), dtype=np.float64)
        weights[special_symbols(vocab)] = 0
        self._cumulative = np.cumsum(weights) / weights.sum()
        self.epoch = 0
        # a batch reads an input three times (ids, length, count) and a target twice
        self._latest: tuple[tuple[int, int], torch.Tensor] | None = None

    @classmethod
    def apply_mask(
        cls,
        tokens: FairseqDataset,
        positions: FairseqDataset,
        splits: Sequence[SplitCoverage],
        mask_prob: float,
        vocab: Dictionary,
        *,
        seed: int = 1,
        replacement: MaskReplacement = MaskReplacement(),  # noqa: B008
        freq_weighted_replacement: bool = False,
    ) -> "tuple[CoveredMaskTokensDataset, CoveredMaskTokensDataset]":
        """The dataset of inputs and the dataset of targets, with the same masks."""

        def masked(return_masked_tokens: bool) -> CoveredMaskTokensDataset:
            return cls(
                tokens,
                positions,
                splits,
                mask_prob,
                vocab,
                return_masked_tokens=return_masked_tokens,
                seed=seed,
                replacement=replacement,
                freq_weighted_replacement=freq_weighted_replacement,
            )

        return masked(False), masked(True)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.positions.set_epoch(epoch)
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        key = (self.epoch, int(index))
        latest = self._latest
        if latest is None or latest[0] != key:
            latest = self._latest = (key, self._masked(*key))
        return latest[1]

    def _masked(self, epoch: int, index: int) -> torch.Tensor:
        tokens = self.dataset[index]
        probabilities = masking_probabilities(self.positions[index].numpy(), self.splits, self.mask_prob)
        rng = np.random.default_rng([self.seed, epoch, index])
        masked = rng.random(len(tokens)) < probabilities * is_known(tokens, self.vocab).numpy()
        ids = tokens.numpy()
        assert not (ids == self.vocab.index("<mask>")).any(), f"sample {index} already holds <mask>"
        if self.return_masked_tokens:
            return torch.from_numpy(np.where(masked, ids, self.vocab.pad()))
        mask = self.vocab.index("<mask>")
        return torch.from_numpy(self.replacement.written(ids, masked, rng, mask=mask, cumulative=self._cumulative))


class MaskedCodesDataset(BaseWrapperDataset):
    """Looks up the codes of the masked tokens by their positions, and keeps the ``top`` strongest atoms (None: all).

    Only the rows of masked tokens are read. The rows of a batch are in the order in which ``target.ne(pad)`` selects
    the masked tokens from the right-padded batch. ``positions`` and ``targets`` have the flat positions and the targets
    of each sample's tokens ``(T,)``; a target is ``pad`` for tokens that are not masked.
    """

    def __init__(
        self, positions: FairseqDataset, targets: FairseqDataset, store: CodeStore, pad: int, top: int | None = None
    ) -> None:
        super().__init__(positions)
        self.targets = targets
        self.store = store
        self.pad = pad
        self.top = top

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.dataset[index][self.targets[index] != self.pad]

    def collater(self, samples: list[torch.Tensor]) -> dict[str, torch.Tensor | int]:
        """``atoms`` (n_masked, m) int32, padded with -1; ``weights`` (n_masked, m) float16, padded with 0; and
        ``number``, the number of rows that have an atom.

        Weights stay float16 as in the store; fairseq's fp16 and bf16 modes do not convert them.
        """
        atoms, weights = self.store.lookup(torch.cat(samples).numpy())
        if self.top is not None:
            atoms, weights = strongest_of_padded(atoms, weights, self.top)
        number = int((weights > 0).any(axis=1).sum())
        return {"atoms": torch.from_numpy(atoms), "weights": torch.from_numpy(weights), "number": number}

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.targets.set_epoch(epoch)


class KnownTargetsDataset(BaseWrapperDataset):
    """Inputs or targets without the masks of special and unknown tokens; all other masks stay. Use :meth:`of`.

    Special tokens are BOS, EOS, and the special tokens without a role that a tokenizer lists. ``values`` are the inputs
    or targets of each sample ``(T,)``. If the target is in ``unmasked``, the value becomes ``instead``, or, if that is
    None, the target, which is the original token.
    """

    def __init__(
        self, values: FairseqDataset, targets: FairseqDataset, *, unmasked: Tensor, instead: int | None
    ) -> None:
        super().__init__(values)
        self.targets = targets
        self.unmasked = unmasked
        self.instead = instead

    @classmethod
    def of(
        cls, inputs: FairseqDataset, targets: FairseqDataset, vocab: Dictionary
    ) -> "tuple[KnownTargetsDataset, KnownTargetsDataset]":
        """The dataset of inputs and the dataset of targets."""
        unmasked = torch.tensor([vocab.bos(), vocab.eos(), vocab.unk(), *own_special_symbols(vocab)])
        kept_inputs = cls(inputs, targets, unmasked=unmasked, instead=None)
        return kept_inputs, cls(targets, targets, unmasked=unmasked, instead=vocab.pad())

    def __getitem__(self, index: int) -> Tensor:
        values = self.dataset[index]
        targets = self.targets[index]
        original = targets if self.instead is None else torch.full_like(targets, self.instead)
        return torch.where(torch.isin(targets, self.unmasked), original, values)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.targets.set_epoch(epoch)


class MaskRanksDataset(BaseWrapperDataset):
    """A random number below ``END`` for each token of a sample, ``(T,)`` int32: the order in which masks are removed.

    With ``words``, which looks up where words begin in tokens ``(T,)``, the tokens of a word share a number. The
    numbers only depend on the seed, the epoch and the index.
    """

    END = 2**31 - 1

    def __init__(self, samples: FairseqDataset, *, seed: int, words: WordBeginnings | None = None) -> None:
        super().__init__(samples)
        self.seed = seed
        self.words = words
        self.epoch = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        rng = np.random.default_rng([self.seed, self.epoch, index, 1])
        ranks = rng.integers(self.END, size=int(self.dataset.size(index)))
        if self.words is not None:
            begins = self.words.gather(0, self.dataset[index]).numpy()
            ranks = ranks[np.cumsum(begins, dtype=np.int64) - 1]  # BOS begins a word
        return torch.from_numpy(ranks.astype(np.int32))

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch = epoch


class BatchPaddingDataset(SizedDataset):
    """Lengths of samples, which collate to whether any sample of the batch is shorter than the longest (bool)."""

    def __init__(self, sizes: np.ndarray) -> None:
        super().__init__()
        self.sizes = sizes

    def __getitem__(self, index: int) -> int:
        return int(self.sizes[index])

    def collater(self, samples: list[int]) -> bool:
        """Whether a batch of samples of these lengths has padding."""
        return len(set(samples)) > 1


class MaskedSizesDataset(BaseWrapperDataset):
    """Numbers of masked tokens and lengths of samples, which collate to :func:`chosen_sizes`.

    ``targets`` are ``(T,)`` of each sample, ``pad`` for tokens that are not masked. ``share`` is an argument of
    :func:`chosen_sizes`.
    """

    def __init__(self, targets: FairseqDataset, pad: int, share: float | None) -> None:
        super().__init__(targets)
        self.pad = pad
        self.share = share

    def __getitem__(self, index: int) -> tuple[int, int]:
        targets = self.dataset[index]
        return int((targets != self.pad).sum()), len(targets)

    def collater(self, samples: list[tuple[int, int]]) -> tuple[int, int, int]:
        """The sizes of a batch."""
        counts = [count for count, _ in samples]
        lengths = [length for _, length in samples]
        return chosen_sizes(counts, lengths, self.share)
