"""A split to its code store: shards of whole blocks, shared by processes, resumed, and refused where empty."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from mlsm_plugin.core.coding.block_coding import TOKENS_TO_JUDGE_EMPTINESS, shard_boundaries
from mlsm_plugin.core.coding.split_coder import CodingSettings, SplitCoder
from mlsm_plugin.core.files.process_rank import ProcessRank
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.coder import SparseCodes
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings
from mlsm_plugin.fairseq_plugin.coding.corpus_coding import encode_split
from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import FairseqEncoder
from tests.core.coding.toy_coder import ToyCoder
from tests.tiny_models import TinyData

BLOCKS = BlockSettings(16)


@pytest.fixture
def data(tiny: TinyData, tmp_path: Path) -> Path:
    return tiny.copy(tmp_path / "data-bin")


def encode(tiny: TinyData, data: Path, coder: ToyCoder, process: ProcessRank | None = None, **settings: Any) -> Any:
    chosen = CodingSettings(layer=0, blocks=BLOCKS, **{"shard_tokens": 1000, **settings})
    return encode_split(
        data, "valid", auxiliary=tiny.model, coder=coder, settings=chosen, process=process or ProcessRank(0, 1)
    )


@pytest.mark.parametrize("shard_tokens", [1, 100, 1000, 10**9])
def test_shards_begin_with_blocks(tiny: TinyData, shard_tokens: int) -> None:
    reader = BlockReader(tiny.data_bin, "valid", BLOCKS)
    boundaries = shard_boundaries(reader, shard_tokens)
    assert (boundaries[0], boundaries[-1]) == (0, reader.num_tokens)
    assert set(boundaries[:-1]) <= set(reader.starts.tolist())
    sizes = np.diff(boundaries)
    assert (sizes[:-1] >= shard_tokens).all()
    assert (sizes < shard_tokens + reader.sizes.max()).all()
    assert (len(sizes) == 1) == (shard_tokens == 10**9)


def test_store_holds_the_codes_and_where_they_come_from(tiny: TinyData, data: Path) -> None:
    coder = ToyCoder(health={"unused_atoms": 3})
    figures = encode(tiny, data, coder, coverage_seed=5)
    assert (figures.already_complete, figures.missing_shards, figures.inexact_tokens) == (False, 0, 0)
    reader = BlockReader(data, "valid", BLOCKS)
    encoder = FairseqEncoder(tiny.model, data, layer=0, device="cpu")
    coding = SplitCoder(
        "valid", reader, encoder, ToyCoder(), CodingSettings(layer=0, blocks=BLOCKS, batch_tokens=1 << 20)
    )
    (chunk,) = coding.coded_chunks(range(len(reader)))
    expected = np.zeros((reader.num_tokens, 32))
    expected[chunk.positions] = chunk.coded.codes.toarray()
    expected /= np.maximum(expected.sum(axis=1, keepdims=True), 1e-9)
    store = CodeStore(figures.directory)
    np.testing.assert_allclose(store.rows(0, len(store)).toarray(), expected, atol=1e-3)
    assert figures.coded_tokens == len(chunk.positions) == store.meta["coded_tokens"]
    wanted = {"layer": 0, "coder": "toy", "coverage": 1.0, "coverage_seed": 0, "fp16": False}
    wanted |= {"blocks": {"tokens_per_sample": 16, "sample_break_mode": "complete"}}
    wanted |= {"dictionary_health": {"unused_atoms": 3}, "n_atoms": 32}
    assert {name: store.meta[name] for name in wanted} == wanted
    assert store.meta["fingerprints"]["auxiliary"] == FairseqEncoder.fingerprint_of(tiny.model)
    assert store.meta["fingerprints"]["dictionary"] == coder.fingerprint
    again = encode(tiny, data, coder, coverage_seed=6)
    assert (again.already_complete, again.coded_tokens, again.meta) == (True, 0, figures.meta)


def test_processes_write_their_own_shards_and_the_last_one_seals(
    tiny: TinyData, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [encode(tiny, data, ToyCoder(), ProcessRank(rank, 3)) for rank in (2, 0, 1)]
    assert [part.meta is None for part in parts] == [True, True, False]
    assert [part.missing_shards > 0 for part in parts] == [True, True, False]
    alone = encode(tiny, tiny.copy(tmp_path / "alone"), ToyCoder())
    assert sum(part.coded_tokens for part in parts) == alone.coded_tokens
    contents = [{path.name: path.read_bytes() for path in one.directory.iterdir()} for one in (parts[2], alone)]
    assert contents[0] == contents[1]
    assert not caplog.records
    few = tiny.copy(tmp_path / "few")
    for rank in (1, 0):
        encode(tiny, few, ToyCoder(), ProcessRank(rank, 4), shard_tokens=10**9)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith("valid: 4 processes share 1 shards, so some have nothing to do; use a smaller")


def test_empty_codes_are_counted(tiny: TinyData, data: Path) -> None:
    class Silent(ToyCoder):
        """Where the first entry of a hidden state is negative."""

        def encode(self, hidden: Any, *, threads: int | None = None) -> SparseCodes:
            coded = super().encode(hidden, threads=threads)
            kept = (np.asarray(hidden)[:, :1] >= 0).astype(np.float32)
            return SparseCodes(sp.csr_matrix(coded.codes.toarray() * kept), coded.gap)

    figures = encode(tiny, data, Silent())
    lengths = np.diff(CodeStore(figures.directory).rows(0, CodeStore(figures.directory).num_tokens).indptr)
    special = BlockReader(data, "valid", BLOCKS).flat_tokens(0, len(lengths)) <= 2
    assert 0 < figures.empty_tokens == int((lengths[~special] == 0).sum()) < figures.coded_tokens


def test_empty_codes_are_refused_with_the_coders_reason(tiny: TinyData, data: Path) -> None:
    text = BlockReader(data, "valid", BLOCKS)
    content = int((text.flat_tokens(0, text.num_tokens) > 2).sum())
    with pytest.raises(ValueError, match=rf"valid: the codes of all {content} coded tokens from 0 to .*toy is silent"):
        encode(tiny, data, ToyCoder(silent=True), shard_tokens=10**9)
    assert not (data / "valid.codes").exists()
    with pytest.raises(ValueError, match="since the toy is silent"):
        encode(tiny, data, ToyCoder(silent=True), shard_tokens=2 * TOKENS_TO_JUDGE_EMPTINESS)


def test_another_plan_for_the_same_store_is_refused(tiny: TinyData, data: Path) -> None:
    encode(tiny, data, ToyCoder(), ProcessRank(0, 2))
    with pytest.raises(ValueError, match="coverage"):
        encode(tiny, data, ToyCoder(), ProcessRank(1, 2), coverage=0.5)
    assert encode(tiny, data, ToyCoder(), ProcessRank(1, 2)).meta is not None


def test_model_is_not_opened_where_nothing_is_to_be_done(
    tiny: TinyData, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(tiny, data, ToyCoder())

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the model was opened")

    monkeypatch.setattr(FairseqEncoder, "__init__", refuse)
    assert encode(tiny, data, ToyCoder()).already_complete
