"""What coding knows of any text, on a text of lists: batches, hidden states in order, samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mlsm_plugin.core.hidden_states.blocks import Block, TokenBlocks, batches_of, hidden_states_of
from mlsm_plugin.core.hidden_states.encoder import HiddenStateEncoder
from mlsm_plugin.core.hidden_states.stream import HiddenStateStream

PAD, BOS, SPECIAL = 0, 1, 3
Lists = st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=6), min_size=1, max_size=9)


class ListBlocks(TokenBlocks):
    """Lists of ids; with ``bos``, each begins with an id that has no position."""

    pad = PAD

    def __init__(self, rows: list[list[int]], *, bos: bool) -> None:
        self.rows, self.bos = rows, bos
        self.sizes = np.array([len(row) for row in rows])
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.num_tokens = int(self.sizes.sum())

    def __len__(self) -> int:
        return len(self.rows)

    def block(self, index: int) -> list[Block]:
        tokens, first = self.rows[index], int(self.starts[index])
        before = [BOS] if self.bos else []
        positions = [-1] * len(before) + list(range(first, first + len(tokens)))
        return [Block(torch.tensor(before + tokens), torch.tensor(positions))]

    def content_mask(self, tokens: Tensor) -> Tensor:
        return tokens.gt(SPECIAL)


class Squares(HiddenStateEncoder):
    """A model whose hidden state is the id and its square; padding may not change it."""

    device, dim = torch.device("cpu"), 2

    def hidden_states(self, tokens: Tensor) -> Tensor:
        return torch.stack([tokens, tokens**2], dim=2).float()


@given(Lists, st.booleans(), st.integers(1, 20))
def test_hidden_states_are_in_the_order_of_the_text(rows: list[list[int]], bos: bool, max_tokens: int) -> None:
    text = ListBlocks(rows, bos=bos)
    blocks = [piece for index in range(len(text)) for piece in text.block(index)]
    flat = [token for row in rows for token in row]
    content = [position for position, token in enumerate(flat) if token > SPECIAL]
    positions, hidden = hidden_states_of(blocks[::-1], text, Squares(), max_tokens=max_tokens)
    assert positions.tolist() == content
    assert hidden.tolist() == [[flat[position], flat[position] ** 2] for position in content]
    every, _ = hidden_states_of(blocks, text, Squares(), max_tokens=max_tokens, keep=lambda tokens, where: where >= 0)
    assert every.tolist() == list(range(len(flat)))
    for tokens, places in batches_of(blocks, pad=PAD, max_tokens=max_tokens):
        assert tokens.shape == places.shape
        assert len(tokens) == 1 or tokens.numel() <= max_tokens


@given(Lists.filter(lambda rows: any(token > SPECIAL for row in rows for token in row)), st.booleans())
def test_samples_and_streams_hold_content_only(rows: list[list[int]], bos: bool) -> None:
    text = ListBlocks(rows, bos=bos)
    wanted = sorted(token for row in rows for token in row if token > SPECIAL)
    stream = HiddenStateStream(text, Squares(), batch_size=len(wanted), max_batch_tokens=20)
    assert sorted(stream.sample(100)[:, 0].int().tolist()) == wanted
    batch = next(stream.batches())
    assert sorted(batch[:, 0].int().tolist()) == wanted


def test_nothing_is_learned_from_special_tokens() -> None:
    stream = HiddenStateStream(ListBlocks([[2, 3]], bos=True), Squares(), batch_size=1, max_batch_tokens=20)
    with pytest.raises(ValueError, match="the text has only special tokens"):
        stream.sample(5)
