"""Controls: codes that keep what they should keep, and lose what they should lose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.sparse_coding.encode import normalize_rows
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig, SaeWeights, SparseAutoencoder
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings
from mlsm_plugin.fairseq_plugin.coding.corpus_coding import encode_split
from tests.core.coding.toy_coder import ToyCoder
from tests.script_module import load_script, runner_of
from tests.tiny_models import TinyData

controls = load_script("research/control_codes.py")
BLOCKS = BlockSettings(24)


@given(types=st.lists(st.integers(-1, 4), min_size=1, max_size=40), seed=st.integers(0, 99), within=st.booleans())
def test_every_coded_token_gives_its_code_to_one(types: list[int], seed: int, within: bool) -> None:
    own = np.array(types, np.int32)
    sources = controls.exchanged_sources(own, np.random.default_rng(seed), within_types=within)
    assert (sources[own < 0] == -1).all()
    assert sorted(sources[own >= 0]) == np.flatnonzero(own >= 0).tolist()
    if within:
        assert (own[sources[own >= 0]] == own[own >= 0]).all()


@pytest.fixture(scope="module")
def coded(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tiny.copy(tmp_path_factory.mktemp("controls") / "data-bin")
    settings = CodingSettings(layer=1, blocks=BLOCKS, shard_tokens=1000)
    for split in ("train", "valid"):
        encode_split(data, split, auxiliary=tiny.model, coder=ToyCoder(), settings=settings)
    return data


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    return runner_of(controls, monkeypatch)


def rows_of(folder: Path, split: str) -> np.ndarray:
    store = CodeStore(folder / f"{split}.codes")
    return store.rows(0, len(store)).toarray()


def types_of(data: Path, split: str) -> np.ndarray:
    """Ids of the tokens in the order of the corpus, by another way than the script's."""
    reader = BlockReader(data, split, BLOCKS)
    ids = np.concatenate([sentence.numpy() for sentence in reader._sentences])
    return np.where(np.isin(ids, [0, 1, 2]), -1, ids)


@pytest.mark.parametrize("kind", controls.KINDS)
@pytest.mark.slow
def test_stores_of_controls(coded: Path, tmp_path: Path, run: Callable[..., int], kind: str) -> None:
    for _ in range(2):
        assert run(coded, "--output", tmp_path / "codes", "--kind", kind, "--top", 5, "--seed", 3) == 0
    for split in ("train", "valid"):
        before, after, types = rows_of(coded, split), rows_of(tmp_path / "codes", split), types_of(coded, split)
        meta = CodeStore(tmp_path / "codes" / f"{split}.codes").meta
        assert (meta["control"], meta["control_seed"]) == (kind, 3)
        assert meta.get("control_top") == (5 if kind == "type-mean" else None)
        assert meta["fingerprints"] == CodeStore(coded / f"{split}.codes").meta["fingerprints"]
        assert (after[types < 0] == 0).all()
        assert (before != after).any()
        if kind == "type-mean":
            train, of_train = rows_of(coded, "train"), types_of(coded, "train")
            for number in np.unique(types[types >= 0])[:30]:
                expected = train[of_train == number].sum(axis=0)
                expected[np.argsort(expected)[:-5]] = 0
                wanted = expected / expected.sum() if expected.sum() else expected
                for row in after[types == number]:
                    np.testing.assert_allclose(row, wanted, atol=2e-3)
            continue
        groups = np.unique(types[types >= 0]) if "within" in kind else [None]
        for number in groups:
            chosen = types >= 0 if number is None else types == number
            assert sorted(map(tuple, before[chosen])) == sorted(map(tuple, after[chosen]))


@pytest.mark.parametrize("kind", controls.KINDS)
def test_tokens_that_coverage_leaves_out_stay_without_a_code(
    coded: Path, tiny: TinyData, tmp_path: Path, run: Callable[..., int], kind: str
) -> None:
    settings = CodingSettings(layer=1, blocks=BLOCKS, shard_tokens=1000, coverage=0.4)
    options = {"auxiliary": tiny.model, "coder": ToyCoder(), "settings": settings}
    encode_split(coded, "train", output=tmp_path / "own", **options)
    words = ("--codes", tmp_path / "own", "--splits", "train", "--kind", kind)
    assert run(coded, *words, "--output", tmp_path / "codes") == 0
    before, after = (rows_of(tmp_path / folder, "train").any(axis=1) for folder in ("own", "codes"))
    assert 0.3 < before.sum() / (types_of(coded, "train") >= 0).sum() < 0.5
    assert (before == after).all()


def test_means_with_other_atoms_need_another_folder(coded: Path, tmp_path: Path, run: Callable[..., int]) -> None:
    words = (coded, "--output", tmp_path / "codes", "--kind", "type-mean", "--top")
    assert run(*words, 5) == 0
    for other in (6, controls.DEFAULT_TOP):
        with pytest.raises(SystemExit, match="control_top is 5 there and "):
            run(*words, other)


@pytest.mark.parametrize("kind", ["lasso", "sae"])
def test_random_dictionaries_of_both_kinds(tmp_path: Path, run: Callable[..., int], kind: str) -> None:
    rng = np.random.default_rng(1)
    hidden, atoms = rng.standard_normal((50, 8)).astype(np.float32), normalize_rows(rng.standard_normal((20, 8)))
    if kind == "lasso":
        LassoCoder(AtomDictionary(atoms, {"lambda": 0.05})).save(tmp_path / "own")
    else:
        rows = torch.from_numpy(atoms).float()
        weights = SaeWeights(rows, torch.zeros(20), rows, torch.ones(8))
        SaeCoder(SparseAutoencoder(SaeConfig("topk", 3), weights)).save(tmp_path / "own")
    assert run("--kind", "random-dictionary", "--dictionary", tmp_path / "own", "--output", tmp_path / "random") == 0
    own, other = load_coder(tmp_path / "own"), load_coder(tmp_path / "random")
    assert (other.num_atoms, other.dim, other.kind) == (20, 8, own.kind)
    directions = [
        each.dictionary.atoms if isinstance(each, LassoCoder) else each.sae.weights.decoder.numpy()  # type: ignore[attr-defined]
        for each in (own, other)
    ]
    assert not np.allclose(*directions, atol=0.1)
    assert other.encode(hidden).codes.nnz > 50


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--kind", "exchanged"), "--kind exchanged needs DATA_BIN"),
        (("--kind", "random-dictionary"), "--kind random-dictionary needs --dictionary"),
        (("data", "--kind", "exchanged"), "holds no meta.json"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*words, "--output", tmp_path / "out")
    assert problem in f"{ended.value} {capsys.readouterr().err}"
