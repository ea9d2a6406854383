"""How many CPU threads torch uses, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Let torch use so many CPU threads, and afterwards as many as before.

    Args:
        threads: None: as torch is set; what happens inside may change that.
    """
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
