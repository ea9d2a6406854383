"""Blocks cut into pieces hold every token once and in order, however the text is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, ListDataset, TokenBlockDataset
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlsm_plugin.fairseq_plugin.data.token_blocks import BlockPiecesDataset

BREAK_MODES = ["none", "complete", "complete_doc", "eos"]


def blocks_of(lengths: list[int], break_mode: str, block_size: int) -> TokenBlockDataset:
    """Blocks of sentences in which every token is its own position."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    sentences = [torch.arange(starts[i], starts[i + 1]) for i in range(len(lengths))]
    dictionary = Dictionary()
    return TokenBlockDataset(
        ListDataset(sentences, np.array(lengths)), np.array(lengths), block_size,
        pad=dictionary.pad(), eos=dictionary.eos(), break_mode=break_mode,
    )  # fmt: skip


def tokens_of(pieces: BlockPiecesDataset) -> list[list[int]]:
    return [pieces[index].tolist() for index in range(len(pieces))]


@settings(max_examples=400, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.just(1), st.integers(1, 12), st.integers(12, 60)), min_size=1, max_size=20),
    break_mode=st.sampled_from(BREAK_MODES),
    max_tokens=st.integers(1, 15),
    min_tokens=st.integers(1, 2),
)
def test_every_token_is_in_one_piece_in_order_but_those_of_short_blocks(
    lengths: list[int], break_mode: str, max_tokens: int, min_tokens: int
) -> None:
    assume(break_mode != "complete_doc" or max(lengths) > 1)  # fairseq cannot make blocks of boundaries alone
    assume(min_tokens <= max_tokens)
    blocks = blocks_of(lengths, break_mode, max_tokens)
    pieces = BlockPiecesDataset(blocks, max_tokens, min_tokens=min_tokens)
    found = tokens_of(pieces)
    whole = [blocks[index].tolist() for index in range(len(blocks))]
    flat = [token for piece in found for token in piece]
    assert flat == [token for block in whole for token in block if len(block) >= min_tokens]
    if len(flat) < sum(map(len, whole)):
        assert min_tokens > 1
    elif break_mode != "complete_doc":
        assert flat == list(range(sum(lengths)))
    else:  # all but what fairseq takes for document boundaries, and documents of one token
        starts = np.cumsum(lengths) - lengths
        assert set(flat) == {
            start + i for start, length in zip(starts, lengths, strict=True) if length > 1 for i in range(length)
        }
    assert [len(piece) for piece in found] == np.asarray(pieces.sizes).tolist()
    assert max(pieces.sizes, default=0) <= max_tokens
    for block, tokens in enumerate(whole):
        own = [found[index] for index in pieces.pieces_of(block)]
        if len(tokens) < min_tokens:
            assert own == []
            continue
        assert [token for piece in own for token in piece] == tokens
        assert len(own) == max(1, -(-len(tokens) // max_tokens))
        assert len(own[-1]) >= min_tokens
        assert all(len(piece) == max_tokens for piece in own[:-2])
        if min_tokens == 1:
            assert all(len(piece) == max_tokens for piece in own[:-1])
    assert [index for block in range(len(blocks)) for index in pieces.pieces_of(block)] == list(range(len(pieces)))


def test_last_piece_takes_from_the_one_before_it() -> None:
    blocks = blocks_of([3, 11, 2], "eos", 5)
    assert [len(piece) for piece in tokens_of(BlockPiecesDataset(blocks, 5))] == [3, 5, 5, 1, 2]
    assert [len(piece) for piece in tokens_of(BlockPiecesDataset(blocks, 5, min_tokens=2))] == [3, 5, 4, 2, 2]


@pytest.mark.parametrize("break_mode", ["complete", "eos"])
def test_sentence_of_more_tokens_than_16_bits_count(break_mode: str) -> None:
    blocks = blocks_of([4, 66_000, 3], break_mode, 500)
    assert int(np.asarray(blocks.sizes).max()) < 500  # what fairseq says of them
    pieces = BlockPiecesDataset(blocks, 500)
    assert len(pieces) == 134
    assert sum(np.asarray(pieces.sizes).tolist()) == 66_007
    assert pieces[132].tolist() == list(range(65_504, 66_004))
    assert pieces.block_sizes.tolist() == [4, 66_000, 3]


def test_text_without_long_sentences_keeps_its_blocks() -> None:
    blocks = blocks_of([4, 2, 5, 1, 5], "complete", 6)
    pieces = BlockPiecesDataset(blocks, 6)
    assert pieces.sizes is not None
    np.testing.assert_array_equal(pieces.sizes, blocks.sizes)
    assert tokens_of(pieces) == [blocks[index].tolist() for index in range(len(blocks))]
