"""A split as the auxiliary model reads it: every token once, in its place, whatever the batches."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from mlsm_plugin.fairseq_plugin.coding.block_reader import (
    Block,
    BlockReader,
    BlockSettings,
    batches_of,
    hidden_states_of,
)
from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import FairseqEncoder
from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary, load_split
from tests.tiny_models import TinyData

BREAK_MODES = ["none", "complete", "complete_doc", "eos"]


@pytest.fixture(scope="module")
def tokens(tiny: TinyData) -> np.ndarray:
    """All tokens of the split."""
    split = load_split(str(tiny.data_bin / "train"), load_dictionary(tiny.data_bin))
    return np.concatenate([split[index].numpy() for index in range(len(split))])


@pytest.fixture(scope="module")
def encoder(tiny: TinyData) -> FairseqEncoder:
    return FairseqEncoder(tiny.model, tiny.data_bin, layer=1, device="cpu")


def reader_of(tiny: TinyData, tokens_per_sample: int = 16, mode: str = "complete") -> BlockReader:
    return BlockReader(tiny.data_bin, "train", BlockSettings(tokens_per_sample, mode))


@pytest.mark.parametrize("tokens_per_sample", [8, 32])
@pytest.mark.parametrize("mode", BREAK_MODES)
def test_blocks_hold_the_tokens_of_their_positions(
    tiny: TinyData, tokens: np.ndarray, mode: str, tokens_per_sample: int
) -> None:
    reader = reader_of(tiny, tokens_per_sample, mode)
    places = []
    for index in range(len(reader)):
        pieces = reader.block(index)
        assert sum(len(piece.tokens) - 1 for piece in pieces) == reader.sizes[index]
        assert int(pieces[0].positions[1]) == reader.starts[index]
        for piece in pieces:
            assert (int(piece.tokens[0]), int(piece.positions[0])) == (reader.dictionary.bos(), -1)
            assert 2 <= len(piece.tokens) <= tokens_per_sample
            assert piece.tokens[1:].tolist() == tokens[piece.positions[1:].numpy()].tolist()
            places += piece.positions[1:].tolist()
    assert reader.num_tokens == len(tokens)
    if mode != "complete_doc":  # which leaves out the boundaries of documents
        assert places == list(range(len(tokens)))
    assert places == sorted(set(places))


def test_flat_tokens_cross_sentences(tiny: TinyData, tokens: np.ndarray) -> None:
    reader = reader_of(tiny)
    for first, last in ((0, 1), (0, len(tokens)), (3, 200), (len(tokens) - 1, len(tokens)), (50, 50)):
        assert reader.flat_tokens(first, last).tolist() == tokens[first:last].tolist()


def test_content_is_neither_special_nor_padding(tiny: TinyData) -> None:
    ids = torch.tensor([[0, 1, 2, 3], [4, 5, 1, 199]])  # the unknown symbol, 3, is a word
    assert reader_of(tiny).content_mask(ids).tolist() == [[False, False, False, True], [True, True, False, True]]


def test_block_of_one_token_is_refused() -> None:
    assert BlockSettings(2).tokens_per_sample == 2
    with pytest.raises(ValueError, match=re.escape("tokens_per_sample must be at least 2, got 1")):
        BlockSettings(1)


def test_batches_are_full_but_not_too_full() -> None:
    lengths = [3, 9, 4, 4, 2, 9, 1]
    blocks = [Block(torch.full((n,), 10 + n), torch.arange(n) + 100 * i) for i, n in enumerate(lengths)]
    batches = list(batches_of(blocks, pad=1, max_tokens=12))
    assert [tuple(tokens.shape) for tokens, _ in batches] == [(1, 9), (1, 9), (3, 4), (2, 2)]
    seen = torch.cat([positions[positions >= 0] for _, positions in batches])
    assert sorted(seen.tolist()) == sorted(torch.cat([block.positions for block in blocks]).tolist())
    for tokens, positions in batches:
        assert torch.equal(tokens == 1, positions == -1)
        assert (tokens.numel() <= 12) or len(tokens) == 1


@pytest.mark.parametrize("max_tokens", [1, 40, 100_000])
def test_hidden_states_are_in_the_order_of_the_text(
    tiny: TinyData, encoder: FairseqEncoder, tokens: np.ndarray, max_tokens: int
) -> None:
    reader = reader_of(tiny)
    blocks = [block for index in (7, 2, 30) for block in reader.block(index)]
    positions, hidden = hidden_states_of(blocks, reader, encoder, max_tokens=max_tokens)
    expected = {}
    for block in blocks:
        for position, row in zip(block.positions.tolist(), encoder.hidden_states(block.tokens[None])[0], strict=True):
            expected[position] = row
    content = [place for place in sorted(expected) if place >= 0 and tokens[place] > 2]
    assert positions.tolist() == content
    torch.testing.assert_close(hidden, torch.stack([expected[place] for place in content]), rtol=1e-4, atol=1e-5)


def test_only_wanted_hidden_states_are_kept(tiny: TinyData, encoder: FairseqEncoder) -> None:
    reader = reader_of(tiny)
    blocks = reader.block(0) + reader.block(1)
    whole, hidden = hidden_states_of(blocks, reader, encoder, max_tokens=100)
    even, found = hidden_states_of(
        blocks, reader, encoder, max_tokens=100, keep=lambda ids, places: reader.content_mask(ids) & (places % 2 == 0)
    )
    assert even.tolist() == [place for place in whole.tolist() if place % 2 == 0]
    assert torch.equal(found, hidden[torch.from_numpy(whole % 2 == 0)])
    nothing, empty = hidden_states_of([], reader, encoder, max_tokens=100)
    assert (nothing.shape, empty.shape) == ((0,), (0, 32))
