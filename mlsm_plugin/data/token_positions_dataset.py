"""The place of every token in its binarized split, in the shape of the split itself."""

from __future__ import annotations

import numpy as np
import torch
from fairseq.data import FairseqDataset

# Position of a token that is in no split: a prepended BOS.
NO_POSITION = -1


class TokenPositionsDataset(FairseqDataset):
    """Item ``i`` holds the flat positions of the tokens of sentence ``i`` of a binarized split.

    Sent through the very same wrappers as the split (blocks, prepended BOS), it says for every
    token of every sample which row of the code store belongs to it.

    Args:
        sizes: tokens of each sentence, ``(n_sentences,)``; copied. The split they come from must
            still be referenced: ``TokenPositionsDataset(load_split(...).sizes)`` reads unmapped memory.
    """

    def __init__(self, sizes: np.ndarray) -> None:
        super().__init__()
        # a copy: fairseq unmaps the sizes of a memory-mapped split when the split is collected
        self.sizes = np.array(sizes)
        self.starts = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(int(self.starts[index]), int(self.starts[index + 1]))

    def __len__(self) -> int:
        return len(self.sizes)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return True
