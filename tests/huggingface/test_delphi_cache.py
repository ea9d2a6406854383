"""The cache for Delphi: every code of the text is in it, and Delphi's own loader reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.sparse import coo_matrix

from mlsm_plugin.core.sparse_coding.code_store import CodeStore, is_code_store
from mlsm_plugin.huggingface import delphi_cache
from mlsm_plugin.huggingface.delphi_cache import CONTEXT, write_delphi_cache
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from tests.conftest import REPOSITORY, failing_mlsm, mlsm
from tests.hub.test_other_versions import install_version
from tests.huggingface.coded_model import LAYER, CodedModel
from tests.tiny_hf_models import make_model

Capture = pytest.CaptureFixture[str]
DELPHI = (
    "eai-delphi==0.1.3",
    "eai-sparsify",
    "sentence-transformers",
    "asyncer",
    "sniffio",
    "jaxtyping",
    "wadler-lindig",
)
OF_DELPHI = ("simple-parsing", "docstring-parser", "orjson", "blobfile", "pycryptodomex")
READER = """
import sys, json, torch
from delphi.config import ConstructorConfig, SamplerConfig
from delphi.latents import LatentDataset

folder, length = sys.argv[1], int(sys.argv[2])
dataset = LatentDataset(
    folder,
    SamplerConfig(n_examples_train=4, n_examples_test=4, n_quantiles=1, train_type="top", test_type="quantiles"),
    ConstructorConfig(example_ctx_len=32, min_examples=1, n_non_activating=2),
    latents={"layer.2": torch.arange(24)} if sys.argv[3] == "some" else None,
    modules=["layer.2"],
)
result = {"tokens": dataset.tokens.tolist(), "latents": {}, "records": []}
for buffer in dataset.buffers:
    for latent in buffer:
        data = latent.activation_data
        result["latents"][latent.latent.latent_index] = [data.locations.tolist(), data.activations.tolist()]
for record in dataset:
    strongest = record.train[0]
    result["records"].append([str(record.latent), strongest.activations.max().item(), "".join(strongest.str_tokens)])
print(json.dumps(result))
"""


def entries_in(folder: Path) -> coo_matrix:
    """The codes in a cache, ``(n_tokens, n_atoms)``."""
    parts = []
    for path in folder.glob("*.safetensors"):
        first, last = map(int, path.stem.split("_"))
        content = load_file(path)
        locations = content["locations"].astype(np.int64)
        assert content["activations"].dtype == np.float16
        assert len(locations) == 0 or locations[:, 2].max() <= last - first
        rows = locations[:, 0] * CONTEXT + locations[:, 1]
        parts.append((content["activations"].astype(np.float32), rows, locations[:, 2] + first))
        tokens = content["tokens"].size
    values, rows, columns = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return coo_matrix((values, (rows, columns)), shape=(tokens, 24))


@pytest.mark.parametrize("nonzeros_of_file", [100, delphi_cache.NONZEROS_OF_FILE])
def test_every_code_is_in_the_cache(
    coded: CodedModel, codes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nonzeros_of_file: int
) -> None:
    monkeypatch.setattr(delphi_cache, "NONZEROS_OF_FILE", nonzeros_of_file)
    monkeypatch.setattr(delphi_cache, "POSITIONS_AT_ONCE", 300)
    cache = write_delphi_cache(codes, coded.tokens, f"hf:{coded.model}", tmp_path)
    assert cache.folder == tmp_path / f"layer.{LAYER}"
    text = TokenSequences(coded.tokens)
    assert 0 < cache.tokens == text.num_tokens // CONTEXT * CONTEXT
    expected = CodeStore(codes).rows(0, cache.tokens)
    assert (entries_in(cache.folder) != expected).nnz == 0
    assert cache.nonzeros == expected.nnz
    files = list(cache.folder.glob("*.safetensors"))
    assert len(files) == (24 if nonzeros_of_file == 100 else 5)
    flat = np.concatenate([text[index] for index in range(len(text))])
    np.testing.assert_array_equal(load_file(files[0])["tokens"].ravel(), flat[: cache.tokens])
    config = json.loads((cache.folder / "config.json").read_text())
    assert (config["model_name"], config["ctx_len"]) == (str(coded.model), CONTEXT)


def test_the_command_needs_no_fairseq_and_replaces_on_demand(
    coded: CodedModel, codes: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert is_code_store(codes)
    assert not is_code_store(coded.dictionary)
    words = ("convert", codes, tmp_path, "--sequences", coded.tokens, "--auxiliary", f"hf:{coded.model}")
    mlsm(*words)
    assert f"{tmp_path / 'layer.2'}: " in capsys.readouterr().out
    assert "exists already; name another output, or pass --overwrite" in failing_mlsm(capsys, *words)
    layer = tmp_path / "layer.2"
    names = {path.name for path in layer.iterdir()}
    for name in ("0_8191.safetensors", "notes.safetensors"):  # of a cache with more latents, and of a user
        (layer / name).write_bytes(b"old")
    mlsm(*words, "--overwrite")
    assert {path.name for path in layer.iterdir()} == {*names, "notes.safetensors"}


def test_what_does_not_belong_together_is_one_line(
    coded: CodedModel, codes: Path, tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "delphi"
    words = ("convert", codes, output)
    assert "--sequences and --auxiliary are required" in failing_mlsm(capsys, *words)
    other = make_model("bert", coded.text, tmp_path / "other", num_hidden_layers=2)
    sequences = ("--sequences", coded.tokens)
    line = failing_mlsm(capsys, *words, *sequences, "--auxiliary", f"hf:{other}")
    assert "the codes are of another model" in line
    TokenSequences.write(tmp_path / "text", [[1, 2, 3], [1, 4, 3]])
    line = failing_mlsm(capsys, *words, "--sequences", tmp_path / "text", "--auxiliary", f"hf:{coded.model}")
    assert "were made from another text" in line
    assert "--layer is not for codes of this package" in failing_mlsm(capsys, *words, *sequences, "--layer", 2)
    assert not output.exists()


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["all", "some"])
def test_delphi_reads_the_cache(
    coded: CodedModel, codes: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, chosen: str
) -> None:
    library = install_version(None, tmp_path_factory, more=(*DELPHI, *OF_DELPHI))
    cache = write_delphi_cache(codes, coded.tokens, coded.model, tmp_path)
    environment = {**os.environ, "PYTHONPATH": f"{library}{os.pathsep}{REPOSITORY}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", READER, str(tmp_path), str(CONTEXT), chosen]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    read = json.loads(done.stdout.splitlines()[-1])
    expected = CodeStore(codes).rows(0, cache.tokens).tocsc()
    assert np.array(read["tokens"]).shape == (cache.tokens // CONTEXT, CONTEXT)
    assert {int(latent) for latent in read["latents"]} == set(np.flatnonzero(np.diff(expected.indptr)).tolist())
    for latent, (locations, activations) in read["latents"].items():
        column = expected[:, [int(latent)]].tocoo()
        places = np.array(locations)
        np.testing.assert_array_equal(places[:, 0] * CONTEXT + places[:, 1], column.row)
        np.testing.assert_allclose(activations, column.data)
    assert read["records"]
    for name, highest, text in read["records"]:
        assert name.startswith("layer.2_latent")
        column = expected[:, [int(name.rpartition("latent")[2])]]
        assert highest == pytest.approx(column.max(), rel=1e-3)
        assert text.strip()
