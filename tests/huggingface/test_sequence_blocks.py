"""Sequences as blocks: positions, content, and sequences that a model cannot take."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.core.hidden_states.blocks import batches_of
from mlsm_plugin.huggingface.coding import SequenceBlocks, blocks_for_model
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from tests.huggingface.coded_model import CodedModel, coded_model
from tests.tiny_hf_models import make_tokenizer

SPECIAL = {0, 2, 3, 4}


def blocks_of(rows: list[list[int]], *, max_tokens: int = 8, num_symbols: int = 10) -> SequenceBlocks:
    limits = {"num_symbols": num_symbols, "max_tokens": max_tokens}
    return SequenceBlocks(TokenSequences(rows), pad=0, special_ids=SPECIAL, **limits)


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> CodedModel:
    return coded_model(tmp_path_factory, english_text[0])


@given(st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=9).filter(any))
def test_every_token_is_in_one_block_at_its_position(rows: list[list[int]]) -> None:
    blocks = blocks_of(rows)
    flat = [token for row in rows for token in row]
    found = {}
    for index in range(len(blocks)):
        (block,) = blocks.block(index)
        assert int(block.positions[0]) == blocks.starts[index]
        assert len(block.tokens) == blocks.sizes[index] > 0
        found.update(zip(block.positions.tolist(), block.tokens.tolist(), strict=True))
    assert found == dict(enumerate(flat))
    assert blocks.num_tokens == len(flat)
    assert (np.diff(blocks.starts) > 0).all()
    tokens = torch.tensor(flat)
    assert blocks.content_mask(tokens).tolist() == [token not in SPECIAL for token in flat]
    batches = batches_of([blocks.block(index)[0] for index in range(len(blocks))], pad=blocks.pad, max_tokens=16)
    in_batches = {}
    for ids, positions in batches:
        assert ids[positions < 0].eq(0).all()
        in_batches.update(zip(positions[positions >= 0].tolist(), ids[positions >= 0].tolist(), strict=True))
    assert in_batches == found


def test_sequences_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 9 tokens, but the model takes at most 8; cut the sequences"):
        blocks_of([[1] * 8, [1] * 9, [1] * 8])
    with pytest.raises(ValueError, match="sequence 2 has the id 11, but the model has the ids 0 to 9 only"):
        blocks_of([[1], [], [5, 11], [10]])


def test_unknown_tokens_are_content_and_the_mask_is_not(made: CodedModel) -> None:
    ids = [[2, 1, 9, 4, 3, 0], *[[2, 9, 9, 9, 9, 3]] * 30]  # [CLS] [UNK] word [MASK] [SEP] [PAD], then words
    blocks, tokenizer = blocks_for_model(TokenSequences(ids), made.model)
    assert blocks.content_mask(torch.tensor(ids))[0].tolist() == [False, True, True, False, False, False]
    assert (blocks.pad, blocks.num_symbols, tokenizer.begin_id, tokenizer.end_id) == (0, 600, 2, 3)


def test_tokenizer_must_be_that_of_the_model_and_of_the_sequences(made: CodedModel, tmp_path: Path) -> None:
    sequences = TokenSequences(made.tokens)
    shutil.copytree(made.model, tmp_path / "weights-only", ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    with pytest.raises(ValueError, match="tokenizer"):
        blocks_for_model(sequences, tmp_path / "weights-only")
    assert len(blocks_for_model(sequences, tmp_path / "weights-only", made.model)[0]) == len(sequences)
    make_tokenizer("byte_level", made.text, tmp_path / "other")
    with pytest.raises(
        ValueError,
        match=r"made with a tokenizer of another vocabulary than that of .*other: the same ids mean .*; make them",
    ):
        blocks_for_model(sequences, made.model, tmp_path / "other")
