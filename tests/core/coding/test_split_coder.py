"""Blocks to codes: which tokens, how many at once, and hidden states or codes that are refused."""

from __future__ import annotations

import itertools
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlsm_plugin.core.coding.split_coder import CodingSettings, SplitCoder
from mlsm_plugin.core.sparse_coding.coder import SparseCodes
from mlsm_plugin.core.sparse_coding.stored_codes import covered_positions, strongest
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings, hidden_states_of
from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import FairseqEncoder
from mlsm_plugin.fairseq_plugin.compat.model_parts import token_embeddings
from tests.core.coding.toy_coder import ToyCoder
from tests.tiny_models import TinyData

BLOCKS = BlockSettings(16)


@pytest.fixture(scope="module")
def reader(tiny: TinyData) -> BlockReader:
    return BlockReader(tiny.data_bin, "valid", BLOCKS)


@pytest.fixture(scope="module")
def encoder(tiny: TinyData) -> FairseqEncoder:
    return FairseqEncoder(tiny.model, tiny.data_bin, layer=0, device="cpu")


def chunks(reader: BlockReader, encoder: FairseqEncoder, coder: ToyCoder, **settings: Any) -> list[Any]:
    coding = SplitCoder("valid", reader, encoder, coder, CodingSettings(layer=0, blocks=BLOCKS, **settings))
    return list(coding.coded_chunks(range(len(reader))))


def test_every_content_token_is_coded_once(reader: BlockReader, encoder: FairseqEncoder) -> None:
    found = chunks(reader, encoder, ToyCoder(), batch_tokens=500)
    text = reader.flat_tokens(0, reader.num_tokens)
    positions = np.concatenate([chunk.positions for chunk in found])
    assert positions.tolist() == np.flatnonzero(text > 2).tolist()
    blocks = [block for index in range(len(reader)) for block in reader.block(index)]
    _, hidden = hidden_states_of(blocks, reader, encoder, max_tokens=4000)
    expected = ToyCoder().encode(hidden).codes.toarray()
    np.testing.assert_allclose(np.concatenate([chunk.coded.codes.toarray() for chunk in found]), expected, rtol=1e-5)
    assert {(chunk.inexact, chunk.why_empty) for chunk in found} == {(0, None)}


@pytest.mark.parametrize(("threads", "at_once", "share"), [(1, 1, 1), (2, 2, 1), (6, 3, 2), (7, 1, 7), (8, 4, 2)])
def test_chunks_are_coded_side_by_side_with_the_threads_that_were_asked_for(
    reader: BlockReader,
    encoder: FairseqEncoder,
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    at_once: int,
    share: int,
) -> None:
    meeting, calls = threading.Barrier(at_once), itertools.count()
    seen: set[tuple[int, int | None, int]] = set()
    of_model, hidden_states = set(), FairseqEncoder.hidden_states_of

    def watched(encoder: FairseqEncoder, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        of_model.add(torch.get_num_threads())
        return hidden_states(encoder, tokens, chosen)

    class Meeting(ToyCoder):
        def encode(self, hidden: Any, *, threads: int | None = None) -> SparseCodes:
            if next(calls) < at_once:
                meeting.wait(timeout=20)  # fails unless so many chunks are at work at the same time
            seen.add((threading.get_ident(), threads, torch.get_num_threads()))
            return super().encode(hidden, threads=threads)

    before = torch.get_num_threads()
    expected = chunks(reader, encoder, ToyCoder(), batch_tokens=150, threads=1)
    monkeypatch.setattr(FairseqEncoder, "hidden_states_of", watched)
    found = chunks(reader, encoder, Meeting(), batch_tokens=150, threads=threads)
    assert len(found) > 3 * at_once
    assert len(seen) == at_once
    assert {(given, of_torch) for _, given, of_torch in seen} == {(share, threads)}
    assert of_model == {share}
    assert torch.get_num_threads() == before
    for chunk, other in zip(found, expected, strict=True):
        assert chunk.positions.tolist() == other.positions.tolist()
        assert (chunk.coded.codes != other.coded.codes).nnz == 0


def test_error_ends_the_chunks_that_follow(reader: BlockReader, encoder: FairseqEncoder) -> None:
    coder, before = ToyCoder(tolerance=-1), torch.get_num_threads()
    with pytest.raises(ValueError, match="miss the toy's tolerance"):
        chunks(reader, encoder, coder, batch_tokens=20, threads=2)
    assert len(coder.sizes) <= 4 < len(reader)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("batch_tokens", [5, 100])
def test_coder_never_gets_more_than_a_batch_however_long_a_sentence_is(
    reader: BlockReader, encoder: FairseqEncoder, batch_tokens: int
) -> None:
    coder = ToyCoder()
    sizes = [len(chunk.positions) for chunk in chunks(reader, encoder, coder, batch_tokens=batch_tokens, threads=1)]
    assert int(reader.sizes.max()) > 32  # a sentence of several pieces
    assert max(sizes) <= max(batch_tokens, BLOCKS.tokens_per_sample - 1)
    assert coder.sizes == sizes


def test_only_covered_tokens_are_coded_and_blocks_without_one_not_read(
    reader: BlockReader, encoder: FairseqEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, hidden_states = [], FairseqEncoder.hidden_states_of

    def counting(encoder: FairseqEncoder, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        seen.append(len(tokens))
        return hidden_states(encoder, tokens, chosen)

    monkeypatch.setattr(FairseqEncoder, "hidden_states_of", counting)
    found = chunks(reader, encoder, ToyCoder(), coverage=0.002, coverage_seed=3)
    positions = np.concatenate([chunk.positions for chunk in found])
    text = reader.flat_tokens(0, reader.num_tokens)
    covered = covered_positions(np.arange(len(text)), coverage=0.002, seed=3)
    assert positions.tolist() == np.flatnonzero(covered & (text > 2)).tolist()
    assert 1 <= sum(seen) <= len(positions) < len(reader) / 4


def test_codes_with_negative_weights_are_empty(reader: BlockReader, encoder: FairseqEncoder) -> None:
    class Signed(ToyCoder):
        def encode(self, hidden: Any, *, threads: int | None = None) -> SparseCodes:
            coded = super().encode(hidden, threads=threads)
            coded.codes.data[coded.codes.indptr[3]] *= -1  # of the fourth token of each call
            return coded

    (whole,), (found,) = (chunks(reader, encoder, own, batch_tokens=10**6) for own in (ToyCoder(), Signed()))
    counts = np.diff(found.coded.codes.indptr)
    assert counts[3] == 0
    assert np.array_equal(np.delete(counts, 3), np.delete(np.diff(whole.coded.codes.indptr), 3))


def test_the_strongest_atoms_are_kept(reader: BlockReader, encoder: FairseqEncoder) -> None:
    all_atoms, found = (chunks(reader, encoder, ToyCoder(), **own) for own in ({}, {"latent_top": 1}))
    for whole, chunk in zip(all_atoms, found, strict=True):
        assert (chunk.coded.codes != strongest(whole.coded.codes, 1)).nnz == 0
    assert max(np.diff(chunk.coded.codes.indptr).max() for chunk in found) == 1
    assert max(np.diff(chunk.coded.codes.indptr).max() for chunk in all_atoms) == 2


def test_inexact_codes_are_refused_with_their_place_or_counted(reader: BlockReader, encoder: FairseqEncoder) -> None:
    whole = chunks(reader, encoder, ToyCoder(), batch_tokens=10**6)
    gaps, positions = whole[0].coded.gap, whole[0].positions
    tolerance = float(np.unique(gaps)[-2])  # the same token in the same context has the same gap
    bad = positions[gaps > tolerance]
    assert 1 <= len(bad) < len(positions)
    pattern = re.escape(
        f"valid: {len(bad)} of the {len(positions)} codes of tokens {positions[0]} to {positions[-1]}, the first at "
        f"position {bad[0]}, miss the toy's tolerance; use a larger one, or --allow-inexact"
    )
    with pytest.raises(ValueError, match=pattern):
        chunks(reader, encoder, ToyCoder(tolerance=tolerance), batch_tokens=10**6)
    allowed = chunks(reader, encoder, ToyCoder(tolerance=tolerance), batch_tokens=100, allow_inexact=True)
    assert sum(chunk.inexact for chunk in allowed) == len(bad)


def test_coder_says_why_all_codes_are_empty(reader: BlockReader, encoder: FairseqEncoder) -> None:
    assert {chunk.why_empty for chunk in chunks(reader, encoder, ToyCoder(silent=True))} == {"the toy is silent"}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("fp16", [False, True])
def test_hidden_state_that_is_not_finite_is_named(
    tiny: TinyData, reader: BlockReader, tmp_path: Path, value: float, fp16: bool
) -> None:
    text = reader.flat_tokens(0, reader.num_tokens)
    bad = int(text[text > 2][-2])
    poisoned = FairseqEncoder(tiny.model, tiny.data_bin, layer=0, device="cpu")
    with torch.no_grad():  # in memory: a file with such weights is not loaded
        token_embeddings(poisoned._encoder).weight[bad, 5] = value
    place = int(np.flatnonzero(text == bad)[0])
    cause = "try it in float32, without --fp16" if fp16 else "the auxiliary model is broken"
    message = f"valid: the hidden state of the token at position {place} in layer 0 holds NaN or infinity; {cause}"
    with pytest.raises(ValueError, match=re.escape(message)):
        chunks(reader, poisoned, ToyCoder(), fp16=fp16)
