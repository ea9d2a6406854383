"""Opening and searching a datastore."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mlsm_plugin import hub
from mlsm_plugin.retrieval import PhraseDatastore, phrase_datastore
from tests.cli.coding_runs import split_tokens
from tests.retrieval.conftest import Retrieval


@pytest.fixture(scope="module")
def store(retrieval: Retrieval) -> PhraseDatastore:
    return PhraseDatastore(retrieval.store)


@pytest.fixture(scope="module")
def all_keys(store: PhraseDatastore) -> np.ndarray:
    return store.keys_of(np.arange(len(store)))


def is_content(tokens: np.ndarray) -> np.ndarray:
    return ~np.isin(tokens, (0, 1, 2))


def test_every_token_of_the_text_has_one_key_in_order(retrieval: Retrieval, store: PhraseDatastore) -> None:
    text = np.concatenate(split_tokens(retrieval.data_bin, "valid"))
    assert len(store.meta["shard_keys"]) > 3
    assert np.array_equal(store.tokens, text)
    positions = store.positions_of(np.arange(len(store)))
    assert np.array_equal(positions, np.flatnonzero(is_content(text)))
    assert np.array_equal(store.rows_of(positions), np.arange(len(store)))
    assert (store.rows_of(np.flatnonzero(~is_content(text))) == -1).all()
    assert store.rows_of(np.array([[-1, len(text)]])).tolist() == [[-1, -1]]


def test_keys_are_the_last_hidden_states(retrieval: Retrieval, store: PhraseDatastore) -> None:
    model = hub.from_pretrained(retrieval.checkpoint)
    for block in (0, 7, len(store.block_starts) - 1):
        first = int(store.block_starts[block])
        last = int(store.block_starts[block + 1]) if block + 1 < len(store.block_starts) else len(store.tokens)
        if last - first > 47:
            continue
        tokens = torch.tensor([0, *store.tokens[first:last].tolist()])
        hidden = model.extract_features(tokens)[0, 1:].detach().numpy()
        rows = store.rows_of(np.arange(first, last))
        assert np.allclose(store.keys_of(rows[rows >= 0]), hidden[rows >= 0], atol=3e-3)
        assert (store.block_of(np.arange(first, last)) == block).all()


@pytest.mark.parametrize("similarity", ["inner", "l2"])
@pytest.mark.parametrize("chunk_entries", [32 * 7, 1 << 24])
def test_search_is_exact(
    store: PhraseDatastore, all_keys: np.ndarray, similarity: str, chunk_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phrase_datastore, "CHUNK_ENTRIES", chunk_entries)
    monkeypatch.setattr(phrase_datastore, "SCORES_AT_ONCE", chunk_entries // 10)
    queries = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)) * 3
    keys = torch.from_numpy(all_keys).double()
    exact = queries.double() @ keys.T if similarity == "inner" else -torch.cdist(queries.double(), keys).square()
    for k in (1, 10, len(store)):
        scores, rows = store.search(queries, k, similarity=similarity)
        assert rows.shape == (3, k)
        expected = exact.sort(dim=1, descending=True).values[:, :k]
        torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(exact.gather(1, rows), expected, rtol=1e-4, atol=1e-3)
        assert all(len(set(row)) == k for row in rows.tolist())


def test_what_cannot_be_searched_is_refused(store: PhraseDatastore) -> None:
    for k in (0, len(store) + 1):
        with pytest.raises(ValueError, match=rf"k must be between 1 and the {len(store)} keys of .*, got {k}"):
            store.search(torch.zeros(1, 32), k)
    with pytest.raises(ValueError, match=r"queries are 8 wide, the keys of .* 32"):
        store.search(torch.zeros(1, 8), 1)


@pytest.mark.parametrize(
    "name", ["shard-00001.keys.npy", "shard-00001.positions.npy", "tokens.npy", "block_starts.npy"]
)
@pytest.mark.parametrize("damage", ["absent", "truncated", "longer"])
def test_damaged_file_is_named(retrieval: Retrieval, tmp_path: Path, name: str, damage: str) -> None:
    folder = shutil.copytree(retrieval.store, tmp_path / "store")
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    if damage != "absent":
        path.write_bytes(content[:-1] if damage == "truncated" else content + b"x")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} is missing or damaged; run the .* again$"):
        PhraseDatastore(folder)


def exchanged(folder: Path, name: str) -> None:
    """Exchange a file of a datastore for one of the same shape."""
    array = np.load(folder / name)
    np.save(folder / name, array[::-1].copy())


@pytest.mark.parametrize("name", ["shard-00001.keys.npy", "tokens.npy", "block_starts.npy"])
def test_a_file_of_another_datastore_is_named(retrieval: Retrieval, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(retrieval.store, tmp_path / "store")
    PhraseDatastore(folder)
    exchanged(folder, name)
    with pytest.raises(
        ValueError, match=rf"^{re.escape(str(folder / name))} is damaged, or belongs to another datastore; run"
    ):
        PhraseDatastore(folder)


def test_datastores_without_hashes_are_opened(retrieval: Retrieval, tmp_path: Path) -> None:
    folder = shutil.copytree(retrieval.store, tmp_path / "store")
    meta = json.loads((folder / "meta.json").read_text())
    del meta["sampled_sha256"]
    (folder / "meta.json").write_text(json.dumps(meta))
    PhraseDatastore(folder)
    exchanged(folder, "block_starts.npy")
    with pytest.raises(ValueError, match=r"block_starts\.npy does not hold the beginnings of blocks"):
        PhraseDatastore(folder)


def test_shard_of_other_keys_than_the_seal_says_is_refused(retrieval: Retrieval, tmp_path: Path) -> None:
    folder = shutil.copytree(retrieval.store, tmp_path / "store")
    keys = np.load(folder / "shard-00001.keys.npy")
    np.save(folder / "shard-00001.keys.npy", keys[:-1])
    message = rf"shard 1 has keys \({len(keys) - 1}, 32\), meta.json says \({len(keys)}, 32\)"
    with pytest.raises(ValueError, match=message):
        PhraseDatastore(folder)


def test_a_folder_that_is_not_a_datastore_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a datastore; make one with `mlsm npm datastore`"):
        PhraseDatastore(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match="has format 2, this version reads format 1"):
        PhraseDatastore(tmp_path)


SEARCH = """
import sys, torch
from mlsm_plugin.retrieval import PhraseDatastore

def anonymous_kilobytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

before = anonymous_kilobytes()
store = PhraseDatastore(sys.argv[1])
query = torch.ones(1, 256)
store.search(query, 3)
scores, rows = store.search(query, 3)
print(rows.tolist()[0], anonymous_kilobytes() - before)
"""


@pytest.mark.slow
def test_searching_needs_far_less_memory_than_the_store_has(tmp_path: Path) -> None:
    rows = 1_200_000
    keys = np.lib.format.open_memmap(tmp_path / "shard-00000.keys.npy", "w+", np.float16, (rows, 256))
    keys[[5, 700_000, rows - 1], :] = np.array([[3.0], [1.0], [2.0]])
    del keys
    np.save(tmp_path / "shard-00000.positions.npy", np.arange(rows))
    np.save(tmp_path / "tokens.npy", np.zeros(rows, np.int32))
    np.save(tmp_path / "block_starts.npy", np.array([0]))
    meta = {"format": 1, "num_keys": rows, "shard_keys": [rows], "dim": 256, "num_tokens": rows, "similarity": "inner"}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert rows * 512 > 600e6
    result = subprocess.run(
        [sys.executable, "-c", SEARCH, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.split("]")
    assert result[0] == f"[5, {rows - 1}, 700000"
    assert int(result[1]) * 1024 < rows * 512 / 4
