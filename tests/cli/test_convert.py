"""``mlsm convert``: import, export, and what is already there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import FairseqEncoder
from tests.conftest import failing_mlsm, mlsm
from tests.core.sparse_coding.formats.foreign_saes import (
    SPARSIFY_CONFIG,
    hidden_states,
    random_arrays,
    saelens_arrays,
    saelens_config,
    write_dictionary_learning,
    write_saelens,
    write_sparsify,
)
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]
COMMAND = "convert"


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_there_and_back(tmp_path: Path, capsys: Capture) -> None:
    write_saelens(tmp_path / "in", saelens_config("jumprelu"))
    mlsm(COMMAND, tmp_path / "in", tmp_path / "own", "--layer", 3)
    assert "20 atoms for hidden states of width 6, sae (jumprelu)" in capsys.readouterr().out
    coder = load_coder(tmp_path / "own")
    assert isinstance(coder, SaeCoder)
    assert (coder.meta["layer"], coder.meta["imported_from"]["model_name"]) == (3, "gpt2")
    capsys.readouterr()
    mlsm(COMMAND, tmp_path / "own", tmp_path / "out")
    assert f"cfg.json has no dataset_path, which {tmp_path / 'own'} does not record" in capsys.readouterr().out
    mlsm(COMMAND, tmp_path / "out", tmp_path / "again")
    assert load_coder(tmp_path / "again").fingerprint == coder.fingerprint
    assert (
        load_coder(tmp_path / "again").encode(hidden_states()).codes != coder.encode(hidden_states()).codes
    ).nnz == 0


def test_what_is_already_there(tmp_path: Path, capsys: Capture) -> None:
    source, output = tmp_path / "in", tmp_path / "own"
    write_sparsify(source)
    mlsm(COMMAND, source, output, "--layer", 1)
    before = snapshot(output)
    for more in ((), ("--layer", 1)):
        capsys.readouterr()
        mlsm(COMMAND, source, output, *more)
        assert f"nothing to do, {output} is complete" in capsys.readouterr().out
    assert "layer is 1 there and 2 now. Pass --overwrite" in failing_mlsm(capsys, COMMAND, source, output, "--layer", 2)
    write_sparsify(source, {**SPARSIFY_CONFIG, "k": 5})
    assert f"{output} holds another dictionary; pass --overwrite" in failing_mlsm(capsys, COMMAND, source, output)
    assert snapshot(output) == before
    mlsm(COMMAND, source, output, "--overwrite")
    assert load_coder(output).meta["sae"]["k"] == 5


def test_another_kind_leaves_no_files_behind(tmp_path: Path, capsys: Capture) -> None:
    write_dictionary_learning(tmp_path / "in", "GatedAutoEncoder")
    mlsm(COMMAND, tmp_path / "in", tmp_path / "own")
    np.save(tmp_path / "atoms.npy", np.eye(4))
    words = (COMMAND, tmp_path / "atoms.npy", tmp_path / "own")
    assert "holds another dictionary" in failing_mlsm(capsys, *words)
    mlsm(*words, "--overwrite")
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"dictionary.npy", "meta.json"}
    mlsm(*words)
    assert "lambda is None there and 0.5 now" in failing_mlsm(capsys, *words, "--lambda", 0.5)
    mlsm(*words, "--lambda", 0.5, "--overwrite")
    assert AtomDictionary.load(tmp_path / "own").meta["lambda"] == 0.5
    mlsm(*words)


def test_what_a_killed_command_left_is_made_whole(tmp_path: Path, capsys: Capture) -> None:
    write_saelens(tmp_path / "in", saelens_config("gated"))
    mlsm(COMMAND, tmp_path / "in", tmp_path / "own")
    whole = {name: content for name, (content, _) in snapshot(tmp_path / "own").items()}
    (tmp_path / "own" / "meta.json").unlink()
    (tmp_path / "own" / "encoder.npy").write_bytes(b"half")
    mlsm(COMMAND, tmp_path / "in", tmp_path / "own")
    assert {name: content for name, (content, _) in snapshot(tmp_path / "own").items()} == whole
    (tmp_path / "own" / "encoder.npy").write_bytes(b"half")
    words = (COMMAND, tmp_path / "in", tmp_path / "own")
    assert "encoder.npy is not a readable npy file" in (line := failing_mlsm(capsys, *words))
    assert "pass --overwrite" in line
    mlsm(*words, "--overwrite")


def test_export_knows_what_is_there(tmp_path: Path, capsys: Capture) -> None:
    write_saelens(tmp_path / "in", saelens_config("topk"))
    mlsm(COMMAND, tmp_path / "in", tmp_path / "own")
    words = (COMMAND, tmp_path / "own", tmp_path / "out")
    mlsm(*words)
    before = snapshot(tmp_path / "out")
    mlsm(*words)
    assert "nothing to do" in capsys.readouterr().out
    assert snapshot(tmp_path / "out") == before
    write_saelens(tmp_path / "out", saelens_config("topk"), saelens_arrays("topk", seed=1))
    assert "holds another SAE; pass --overwrite" in failing_mlsm(capsys, *words)
    (tmp_path / "out" / "sae_weights.safetensors").write_bytes(b"x")
    assert "pass --overwrite" in failing_mlsm(capsys, *words)
    mlsm(*words, "--overwrite")
    assert {name: content for name, (content, _) in snapshot(tmp_path / "out").items()} == {
        name: content for name, (content, _) in before.items()
    }
    (tmp_path / "out" / "cfg.json").unlink()  # as after a kill
    mlsm(*words)


def test_export_of_what_is_no_sae(tmp_path: Path, capsys: Capture) -> None:
    np.save(tmp_path / "atoms.npy", np.eye(4))
    mlsm(COMMAND, tmp_path / "atoms.npy", tmp_path / "lasso")
    output = tmp_path / "out"
    assert "it has no encoder" in failing_mlsm(capsys, COMMAND, tmp_path / "lasso", output)
    values = [(name, value) for name, numbers in (("--layer", (2, 0)), ("--lambda", (1, 0))) for value in numbers]
    for flag in (("--normalize",), *values, ("--transpose",), ("--auxiliary", "a")):
        line = failing_mlsm(capsys, COMMAND, tmp_path / "lasso", output, *flag)
        assert f"{flag[0]} is not for a dictionary of this package" in line
    assert not output.exists()


def test_folders_that_cannot_be_written(tmp_path: Path, capsys: Capture) -> None:
    write_saelens(tmp_path / "in", saelens_config("topk"))
    (tmp_path / "file").write_text("mine")
    np.save(tmp_path / "dictionary.npy", np.eye(3))
    for source, output in (("in", "in"), ("dictionary.npy", "")):
        line = failing_mlsm(capsys, COMMAND, tmp_path / source, tmp_path / output)
        assert f"{tmp_path / source} would be read from and written to" in line
    assert "file exists and is not a folder" in failing_mlsm(capsys, COMMAND, tmp_path / "in", tmp_path / "file")
    assert "--layer must be at least 0, got -1" in failing_mlsm(
        capsys, COMMAND, tmp_path / "in", tmp_path / "out", "--layer", -1
    )
    assert not (tmp_path / "out").exists()


def test_the_model_that_it_is_for(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    write_saelens(tmp_path / "narrow", saelens_config("topk"))
    words = (COMMAND, tmp_path / "narrow", tmp_path / "own", "--auxiliary", tiny.model)
    assert "is 6 wide, but the hidden states of" in failing_mlsm(capsys, *words, "--layer", 1)
    shapes = {"W_enc": (32, 64), "W_dec": (64, 32), "b_enc": (64,), "b_dec": (32,)}
    write_saelens(tmp_path / "in", saelens_config("topk", d_in=32, d_sae=64), random_arrays(shapes))
    words = (COMMAND, tmp_path / "in", tmp_path / "own", "--auxiliary", tiny.model)
    assert "--layer 9 is out of range" in failing_mlsm(capsys, *words, "--layer", 9)
    assert "does not exist" in failing_mlsm(capsys, *words[:-1], tmp_path / "absent.pt")
    assert not (tmp_path / "own").exists()
    capsys.readouterr()
    mlsm(*words, "--layer", 1)
    assert f"mlsm encode DATA_BIN --auxiliary {tiny.model}" in capsys.readouterr().out
    meta = json.loads((tmp_path / "own" / "meta.json").read_text())
    assert (meta["layer"], meta["auxiliary_fingerprint"]) == (1, FairseqEncoder.fingerprint_of(tiny.model))
    assert meta["auxiliary"] == "/".join(tiny.model.parts[-2:])
    (tmp_path / "own" / "meta.json").write_bytes(b"{")
    assert "meta.json is not valid JSON" in failing_mlsm(capsys, *words, "--layer", 1)
    mlsm(*words, "--layer", 1, "--overwrite")
    assert json.loads((tmp_path / "own" / "meta.json").read_text()) == meta
    data = shutil.copytree(tiny.data_bin, tmp_path / "data-bin")
    mlsm("encode", data, "--auxiliary", tiny.model, "--dictionary", tmp_path / "own", "--tokens-per-sample", 24)
    store = CodeStore(data / "valid.codes")
    assert (store.num_atoms, store.meta["coder"]) == (64, "sae")
