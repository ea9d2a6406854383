"""``mlsm encode``: from text to a store, resumed and shared; and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from tests.cli.coding_runs import kill_once_there, start_mlsm
from tests.conftest import failing_mlsm, mlsm
from tests.huggingface.coded_model import LAYER, CodedModel, coded_model, files_of
from tests.tiny_hf_models import make_model, make_tokenizer

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> CodedModel:
    return coded_model(tmp_path_factory, english_text[0])


def test_splits_of_one_folder_are_coded_beside_it(made: CodedModel, tmp_path: Path, capsys: Capture) -> None:
    for split in ("train", "valid"):
        shutil.copytree(made.tokens, tmp_path / "data" / split)
    mlsm(*made.words(tmp_path / "codes", tokens=tmp_path / "data"))
    stores = [CodeStore(tmp_path / "codes" / f"{split}.codes") for split in ("train", "valid")]
    assert stores[0].meta["fingerprints"] == stores[1].meta["fingerprints"]
    words = [word for word in made.words(tmp_path, tokens=tmp_path / "data") if word not in ("--output", tmp_path)]
    mlsm(*words, "--splits", "valid")
    assert files_of(tmp_path / "data" / "valid.codes") == files_of(tmp_path / "codes" / "valid.codes")
    assert not (tmp_path / "data" / "train.codes").exists()
    words[words.index(tmp_path / "data")] = made.tokens
    assert "--output is required for" in failing_mlsm(capsys, *words)


def test_codes_are_stored_and_found_complete(made: CodedModel, tmp_path: Path, capsys: Capture) -> None:
    mlsm(*made.words(tmp_path / "store"))
    printed = capsys.readouterr().out
    store = CodeStore(tmp_path / "store")
    coded = store.meta["coded_tokens"]
    assert re.match(rf"sequences: {coded} tokens coded in [\d.]+ s \(\d+ a second\)", printed)
    assert f"{tmp_path / 'store'}: {coded} tokens, {store.meta['nnz']} non-zeros" in printed
    assert (store.meta["layer"], store.meta["coverage"]) == (LAYER, 1.0)
    before = files_of(tmp_path / "store")
    mlsm(*made.words(tmp_path / "store", "--layer", LAYER))
    assert "nothing to do" in capsys.readouterr().out
    assert files_of(tmp_path / "store") == before


def test_sequences_are_already_cut(made: CodedModel, tmp_path: Path, capsys: Capture) -> None:
    line = failing_mlsm(capsys, *made.words(tmp_path / "store", "--tokens-per-sample", 64))
    assert "--tokens-per-sample: sequences are already cut" in line
    assert not (tmp_path / "store").exists()


def test_shares_of_the_work_and_options(made: CodedModel, tmp_path: Path, capsys: Capture) -> None:
    more = ("--coverage", 0.4, "--seed", 3, "--latent-top", 3)
    mlsm(*made.words(tmp_path / "one", *more))
    mlsm(*made.words(tmp_path / "two", *more, "--process-index", 1, "--num-processes", 2))
    assert "process 1 of 2 is done" in capsys.readouterr().out
    mlsm(*made.words(tmp_path / "two", *more, "--process-index", 0, "--num-processes", 2))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    meta = CodeStore(tmp_path / "one").meta
    assert (meta["coverage"], meta["coverage_seed"], meta["latent_top"]) == (0.4, 3, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_killed_run_resumes_to_the_same_bytes(made: CodedModel, tmp_path: Path) -> None:
    mlsm(*made.words(tmp_path / "whole"))
    process = start_mlsm(*made.words(tmp_path / "killed"), start_new_session=True)
    kill_once_there(process, tmp_path / "killed" / "shard-00000.indptr.npy")
    mlsm(*made.words(tmp_path / "killed"))
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_torchrun_shares_the_work(made: CodedModel, tmp_path: Path) -> None:
    mlsm(*made.words(tmp_path / "one"))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start_mlsm(*made.words(tmp_path / "two"), launcher=launcher)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "tokens coded" in printed
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


def test_what_does_not_belong_together_is_one_line(made: CodedModel, tmp_path: Path, capsys: Capture) -> None:
    def refused(*more: object, tokens: Path | None = None, model: Path | None = None) -> str:
        words = list(made.words(tmp_path / "store", *more, tokens=tokens))
        words[3] = f"hf:{model}" if model else words[3]
        line = failing_mlsm(capsys, *words)
        assert not (tmp_path / "store").exists()
        return line

    def changed(name: str, **values: object) -> Path:
        folder = shutil.copytree(made.model, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))
        return folder

    unbound = shutil.copytree(made.dictionary, tmp_path / "unbound")
    meta = json.loads((unbound / "meta.json").read_text())
    for name in ("auxiliary_fingerprint", "layer"):
        meta.pop(name)
    (unbound / "meta.json").write_text(json.dumps(meta))
    free = ("--dictionary", unbound)

    assert "--layer 4 is out of range" in refused(*free, "--layer", 4)
    assert "does not say its layer; pass --layer" in refused(*free)
    assert "learned from layer 2, not from --layer 1" in refused("--layer", 1)
    assert "of type gpt2; supported types" in refused(*free, "--layer", 2, model=changed("gpt2", model_type="gpt2"))
    larger = changed("larger", vocab_size=2000)
    assert "the tokenizer's ids need 600 embeddings, the model has 2000" in refused(*free, "--layer", 2, model=larger)
    shorter = changed("shorter", max_position_embeddings=30)
    assert "but the model takes at most 30; cut" in refused(*free, "--layer", 2, model=shorter)
    assert "is not a folder of a Hugging Face model" in refused(model=tmp_path / "absent")
    make_tokenizer("byte_level", made.text, tmp_path / "other")
    assert "made with a tokenizer of another vocabulary" in refused("--tokenizer", tmp_path / "other")
    np.save(tmp_path / "ids.npy", np.full((3, 5), 600))
    assert "sequence 0 has the id 600, but the model has the ids 0 to 599" in refused(tokens=tmp_path / "ids.npy")
    np.save(tmp_path / "ids.npy", np.full((3, 5), 0.5))
    assert "sequence 0 does not consist of token ids" in refused(tokens=tmp_path / "ids.npy")
    np.save(tmp_path / "ids.npy", np.full((3, 5), 3))  # nothing but [SEP]
    mlsm(*made.words(tmp_path / "special", tokens=tmp_path / "ids.npy"))
    assert CodeStore(tmp_path / "special").meta["coded_tokens"] == 0
    assert "are empty, since" in refused("--lambda", 1e6)
    narrow = make_model("bert", made.text, tmp_path / "narrow", hidden_size=16)
    assert "the dictionary is 32 wide, the hidden states of the auxiliary model are 16 wide" in refused(
        *(*free, "--layer", 2, "--tokenizer", made.model), model=narrow
    )


def test_another_dataset_is_refused_and_the_store_stays(made: CodedModel, tmp_path: Path, capsys: Capture) -> None:
    mlsm(*made.words(tmp_path / "store"))
    before = files_of(tmp_path / "store")
    other = ("--tokenizer", f"hf:{made.model}", "--output", tmp_path / "other", "--max-length", 30)
    mlsm("binarize", "--format", "sequences", "--train", made.text, *other)
    line = failing_mlsm(capsys, *made.words(tmp_path / "store", tokens=tmp_path / "other" / "train"))
    assert "was begun with other settings" in line
    assert "fingerprints.split" in line
    assert files_of(tmp_path / "store") == before
