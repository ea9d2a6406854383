"""Searching a datastore with an index, compared with searching all keys."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from mlsm_plugin.retrieval import PhraseDatastore, key_index
from tests.conftest import failing_mlsm, mlsm
from tests.retrieval.conftest import Retrieval, build_words

Capture = pytest.CaptureFixture[str]
QUERIES = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))


def store_of(directory: Path, keys: np.ndarray, similarity: str = "inner") -> PhraseDatastore:
    """A datastore of given keys, in two shards."""
    directory.mkdir()
    half = len(keys) // 2
    for shard, (first, last) in enumerate(((0, half), (half, len(keys)))):
        np.save(directory / f"shard-0000{shard}.keys.npy", keys[first:last])
        np.save(directory / f"shard-0000{shard}.positions.npy", np.arange(first, last))
    np.save(directory / "tokens.npy", np.zeros(len(keys), np.int32))
    np.save(directory / "block_starts.npy", np.array([0]))
    sizes = {"num_keys": len(keys), "shard_keys": [half, len(keys) - half], "num_tokens": len(keys)}
    meta = {"format": 1, "dim": keys.shape[1], "similarity": similarity, **sizes}
    (directory / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return PhraseDatastore(directory)


def clustered_keys(number: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    centers = rng.normal(size=(40, 32))
    return (centers[rng.integers(40, size=number)] + 0.3 * rng.normal(size=(number, 32))).astype(np.float32)


@pytest.mark.parametrize("similarity", ["inner", "l2"])
def test_flat_index_finds_what_comparing_all_keys_finds(tmp_path: Path, similarity: str) -> None:
    store = store_of(tmp_path / "store", clustered_keys(3000), similarity)
    expected = {k: store.search(QUERIES, k, similarity=similarity) for k in (1, 50, 3000)}
    store.build_index("flat")
    for opened in (store, PhraseDatastore(tmp_path / "store")):
        assert opened.index is not None
        assert opened.index.kind == "flat"
        for k, (scores, rows) in expected.items():
            found_scores, found_rows = opened.search(QUERIES, k, similarity=similarity)
            torch.testing.assert_close(found_scores, scores, rtol=1e-4, atol=1e-4)
            agree = found_rows == rows  # but for keys that are equally near
            assert agree.float().mean() > 0.98
            assert torch.equal(found_rows[:, 0], rows[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize(("similarity", "width"), [("inner", 16), ("l2", 8)])
def test_approximate_index_finds_most_of_the_nearest_with_exact_scores(
    tmp_path: Path, similarity: str, width: int
) -> None:
    # the parts of narrow keys are soon trained
    keys, queries = clustered_keys(12_000)[:, :width].copy(), QUERIES[:, :width]
    store = store_of(tmp_path / "store", keys, similarity)
    exact, exact_rows = store.search(queries, 20, similarity=similarity)
    store.build_index("ivfpq")
    assert (store.directory / "index.faiss").stat().st_size < keys.nbytes / 2
    scores, rows = store.search(queries, 20, similarity=similarity)
    common = [len(set(a) & set(b)) for a, b in zip(rows.tolist(), exact_rows.tolist(), strict=True)]
    assert sum(common) >= 0.9 * 100
    products = queries @ torch.from_numpy(keys).T
    expected = products.gather(1, rows)
    if similarity == "l2":
        expected = -(queries[:, None] - torch.from_numpy(keys)[rows]).square().sum(dim=2)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    assert bool((scores[:, 0] <= exact[:, 0] + 1e-4).all())
    assert all(scores[:, i].ge(scores[:, i + 1]).all() for i in range(19))
    _, rows = store.search(queries, 12_000, similarity=similarity)  # more than the lists of a search hold
    assert torch.equal(rows.sort(dim=1).values, torch.arange(12_000).expand(5, -1))
    other = "l2" if similarity == "inner" else "inner"
    exact_scores, _ = PhraseDatastore(store.directory).search(queries, 3, similarity=other)  # not what the index is of
    best = products if other == "inner" else -torch.cdist(queries, torch.from_numpy(keys)).square()
    torch.testing.assert_close(exact_scores, best.topk(3, dim=1).values, rtol=1e-4, atol=1e-3)


def test_index_of_too_few_or_other_keys_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_of(tmp_path / "store", clustered_keys(500))
    with pytest.raises(ValueError, match="--index ivfpq needs at least 9,984 keys to be trained on, there are 500"):
        store.build_index("ivfpq")
    assert not list(store.directory.glob("*index*"))
    store.build_index("flat")
    other = store_of(tmp_path / "other", clustered_keys(400))
    for name in ("index.json", "index.faiss"):
        shutil.copy(store.directory / name, other.directory)
    with caplog.at_level(logging.WARNING):
        assert PhraseDatastore(other.directory).index is None
    assert "is for other keys: all keys are compared" in caplog.text


def test_killed_while_another_index_is_written_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``index.json`` says must never be said of another ``index.faiss``."""
    keys = clustered_keys(300)
    store = store_of(tmp_path / "store", keys)
    store.build_index("flat")
    inner = (store.directory / "index.faiss").read_bytes()
    real_replace = os.replace

    def killed(source: object, target: object) -> None:
        real_replace(source, target)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            key_index.KeyIndex.write(store.directory, "flat", "l2", keys, iter([keys]), len(keys))
    assert (store.directory / "index.faiss").read_bytes() != inner
    opened = PhraseDatastore(store.directory)
    assert opened.index is None
    opened.build_index("flat")
    assert (store.directory / "index.faiss").read_bytes() == inner
    assert opened.index is not None
    assert not list(store.directory.glob(".*.tmp"))


def test_without_faiss_all_keys_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_of(tmp_path / "store", clustered_keys(500))
    store.build_index("flat")
    expected = store.search(QUERIES, 7)
    monkeypatch.setattr(key_index, "faiss_or_none", lambda: None)
    with caplog.at_level(logging.WARNING):
        without = PhraseDatastore(store.directory)
    assert "faiss is not installed" in caplog.text
    assert without.index is None
    assert torch.equal(without.search(QUERIES, 7)[1], expected[1])
    with pytest.raises(ValueError, match=r"--index needs faiss: pip install 'mlsm_plugin\[retrieval\]'"):
        without.build_index("flat")


@pytest.mark.slow
def test_command_adds_an_index_to_a_complete_datastore(retrieval: Retrieval, tmp_path: Path, capsys: Capture) -> None:
    output = shutil.copytree(retrieval.store, tmp_path / "store")
    words = build_words(retrieval, output, "--shard-tokens", 500)
    keys = (output / "shard-00000.keys.npy").stat().st_mtime_ns
    mlsm(*words, "--index", "flat")
    assert "bytes a token" in capsys.readouterr().out
    assert (output / "shard-00000.keys.npy").stat().st_mtime_ns == keys
    mlsm(*words, "--index", "flat")
    assert "nothing to do" in capsys.readouterr().out
    where = ("--checkpoint", retrieval.checkpoint, "--datastore")
    printed = []
    for store in (output, retrieval.store):
        mlsm("npm", "fill", "The <mask> is bound.", *where, store)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "--index ivfpq needs at least 9,984 keys" in failing_mlsm(capsys, *words, "--index", "ivfpq")


def test_python_builds_and_opens(retrieval: Retrieval, tmp_path: Path) -> None:
    from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockSettings
    from mlsm_plugin.retrieval import DatastoreSettings

    settings = DatastoreSettings(splits=("valid",), blocks=BlockSettings(48), shard_tokens=500)
    store = PhraseDatastore.build(
        retrieval.data_bin, retrieval.checkpoint, tmp_path / "store", settings, batch_tokens=400, device="cpu"
    )
    assert store.meta == PhraseDatastore(retrieval.store).meta


def test_a_damaged_index_is_not_used_and_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_of(tmp_path / "store", clustered_keys(500))
    store.build_index("flat")
    path = store.directory / "index.faiss"
    for damage in (b"no index", None):
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage)
        with caplog.at_level(logging.WARNING):
            again = PhraseDatastore(store.directory)
        assert again.index is None
        assert "is missing or damaged: all keys are compared" in caplog.text
        again.build_index("flat")
        assert PhraseDatastore(store.directory).index is not None
