"""The position of every token in its binarized split, as a dataset of the same shape as the split."""

from __future__ import annotations

import numpy as np
import torch
from fairseq.data import FairseqDataset

from mlsm_plugin.sparse_coding.stored_codes import NO_POSITION as NO_POSITION


class TokenPositionsDataset(FairseqDataset):
    """Item ``i`` holds the flat positions of the tokens of sentence ``i`` of a binarized split.

    Wrapped in the same datasets as the split (blocks, prepended BOS), it gives the row in the code store of every token
    of every sample.

    Args:
        sizes: number of tokens of each sentence, ``(n_sentences,)``; copied. Keep a reference to the split during the
            call: ``TokenPositionsDataset(load_split(...).sizes)`` would read unmapped memory.
    """

    def __init__(self, sizes: np.ndarray) -> None:
        super().__init__()
        # copied, since fairseq unmaps the sizes of a memory-mapped split when the split is garbage-collected
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
