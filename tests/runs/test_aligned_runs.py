"""A published encoder as the auxiliary model of data that has another vocabulary: dictionary, codes, training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import tasks

from mlsm_plugin.core.files.atomic_files import read_json
from mlsm_plugin.core.hidden_states.sources import alignment_of
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings
from mlsm_plugin.fairseq_plugin.coding.online_codes import OnlineCodes
from tests.conftest import Pipeline, failing_mlsm, fairseq_train, logged, mlsm
from tests.tiny_hf_models import make_model
from tests.tiny_run import training_config

pytestmark = pytest.mark.slow

BLOCKS = ("--tokens-per-sample", 48)


@pytest.fixture(scope="module")
def teacher(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"hf:{make_model('bert', pipeline.train_text, tmp_path_factory.mktemp('hf') / 'bert')}"


@pytest.fixture(scope="module")
def data_bin(pipeline: Pipeline, teacher: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared dataset of SentencePiece, with the teacher's codes; the dictionary is beside it."""
    folder = tmp_path_factory.mktemp("aligned") / "data-bin"
    shutil.copytree(pipeline.data_bin, folder, ignore=shutil.ignore_patterns("*.codes"))
    learning = ("--atoms", 40, "--coder", "topk", "--k", 4, "--tokens", 4000)
    mlsm(
        *("dictionary", folder, "--auxiliary", teacher, "--layer", 2, "--output", folder.parent / "dictionary"),
        *(*learning, *BLOCKS),
    )
    mlsm("encode", folder, "--auxiliary", teacher, "--dictionary", folder.parent / "dictionary")
    return folder


def online_flags(data_bin: Path, teacher: str) -> tuple[object, ...]:
    source = ("--latent-source", "online", "--auxiliary-checkpoint", teacher)
    return (*source, "--latent-dictionary", data_bin.parent / "dictionary")


def test_online_codes_are_the_stored_ones(data_bin: Path, teacher: str) -> None:
    online = OnlineCodes(
        data_bin, checkpoint=teacher, dictionary=data_bin.parent / "dictionary", fp16=False, tokens_per_sample=48
    )
    reader = BlockReader(data_bin, "valid", BlockSettings(48))
    store = CodeStore([str(data_bin / "valid.codes")])
    compared = 0
    for index in range(20):
        for block in reader.block(index):
            content = reader.content_mask(block.tokens)
            target = torch.where(content, block.tokens, reader.pad)
            found = online.codes_of_masked(block.tokens[None], target[None])
            stored = store.rows(0, reader.num_tokens)[block.positions[content].numpy()].toarray()
            ours = np.zeros((len(stored), 41))
            atoms = found["atoms"].long().numpy() % 41  # padding, -1, to the last column
            np.put_along_axis(ours, atoms, found["weights"].float().numpy(), 1)
            np.testing.assert_allclose(ours[:, :40], stored, atol=2e-3)
            compared += int((stored.sum(axis=1) > 0).sum())
    assert compared > 200


def test_what_decides_the_codes_is_recorded(data_bin: Path, teacher: str, capsys: pytest.CaptureFixture[str]) -> None:
    alignment = alignment_of(teacher, data_bin)
    assert alignment is not None
    assert read_json(data_bin / "train.codes" / "meta.json")["fingerprints"]["alignment"] == alignment
    assert read_json(data_bin.parent / "dictionary" / "meta.json")["alignment_fingerprint"] == alignment
    files = {path: path.read_bytes() for path in (data_bin / "train.codes").iterdir() if path.is_file()}
    mlsm("encode", data_bin, "--auxiliary", teacher, "--dictionary", data_bin.parent / "dictionary")
    assert {path: path.read_bytes() for path in files} == files
    capsys.readouterr()


def test_a_dictionary_of_the_teachers_own_vocabulary_codes_another(
    pipeline: Pipeline, data_bin: Path, teacher: str, tmp_path: Path
) -> None:
    texts = ("--train", pipeline.valid_text, "--valid", pipeline.valid_text)
    mlsm("binarize", "--tokenizer", teacher, *texts, "--output", tmp_path / "own", "--workers", 1)
    learning = ("--layer", 2, "--atoms", 40, "--coder", "topk", "--k", 4, "--tokens", 2000, *BLOCKS)
    mlsm("dictionary", tmp_path / "own", "--auxiliary", teacher, "--output", tmp_path / "dictionary", *learning)
    assert "alignment_fingerprint" not in read_json(tmp_path / "dictionary" / "meta.json")
    coding = ("--auxiliary", teacher, "--dictionary", tmp_path / "dictionary", "--splits", "valid")
    mlsm("encode", data_bin, *coding, "--output", tmp_path)
    assert CodeStore([str(tmp_path / "valid.codes")]).num_atoms == 40


def test_runs_with_store_online_regression_and_vectors(data_bin: Path, teacher: str, tmp_path: Path) -> None:
    flags = ("--max-update", 3, "--mlm-weight", 1, *BLOCKS)
    stored = fairseq_train(data_bin, tmp_path / "store", *flags)
    online = fairseq_train(data_bin, tmp_path / "online", *flags, *online_flags(data_bin, teacher))
    losses = [[float(value) for value in logged(run, "kl")] for run in (stored, online)]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=0.02)  # online, products are in bfloat16
    states = ("--auxiliary-checkpoint", teacher, "--auxiliary-layer", 2, *BLOCKS)
    regression = fairseq_train(data_bin, tmp_path / "regression", "--max-update", 3, *states, task="state_regression")
    assert len(logged(regression, "state_loss")) == 3
    fairseq_train(data_bin, tmp_path / "regression", "--max-update", 4, *states, task="state_regression")
    narrow = ("--auxiliary-checkpoint", teacher, "--encoder-embed-dim", 16, "--tokens-per-sample", 32)
    for updates in (3, 4):
        flags = ("--max-update", updates, "--sample-break-mode", "eos", *narrow)
        vectors = fairseq_train(data_bin, tmp_path / "vectors", *flags, task="sentence_vectors")
    assert len(logged(vectors, "loss")) == 1


def test_a_regression_does_not_go_on_with_another_tokenizer(data_bin: Path, teacher: str) -> None:
    names: Any = {"task": "state_regression", "criterion": "state_regression"}
    cfg = training_config(data_bin, "--auxiliary-checkpoint", teacher, *BLOCKS, **names)
    task = tasks.setup_task(cfg.task)
    task.load_dataset("valid")
    state = task.state_dict()
    task.check_resumes(state)
    with pytest.raises(ValueError, match="the tokenizer of --auxiliary-checkpoint is another one than that of the run"):
        task.check_resumes({**state, "states_alignment": "0" * 64})


def test_data_without_a_tokenizer_is_refused(
    data_bin: Path, teacher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = shutil.copytree(data_bin, tmp_path / "bare", ignore=shutil.ignore_patterns("*.codes", "*.model"))
    coding = ("--auxiliary", teacher, "--dictionary", data_bin.parent / "dictionary")
    assert "bare has no tokenizer (sentencepiece.bpe.model or hf_tokenizer)" in failing_mlsm(
        capsys, "encode", bare, *coding
    )
