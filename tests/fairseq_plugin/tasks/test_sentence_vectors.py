"""The task of learning vectors of texts, and whole runs of it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import tasks
from fairseq.data.indexed_dataset import make_builder

from mlsm_plugin import hub
from mlsm_plugin.core.files.sentence_modules import modules_of
from mlsm_plugin.core.hidden_states.sources import open_encoder
from mlsm_plugin.evaluation.sentence_encoders import open_sentence_encoder
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import read_contents
from mlsm_plugin.fairseq_plugin.tasks.sentence_vectors import DIRECTIONS, POOLING
from tests.conftest import Pipeline, fairseq_train, logged, mlsm
from tests.runs.training_runs import assert_same_updates, text_of, train_on_two_ranks, updates_in
from tests.tiny_run import batches, seeded_model, training_config

TASK = "sentence_vectors"
NAMES = {"task": TASK, "criterion": TASK}
NARROW = ("--encoder-embed-dim", 16)
BOS, PAD, EOS = 0, 1, 2


def configuration(pipeline: Pipeline, *flags: object) -> Any:
    more = ("--auxiliary-checkpoint", pipeline.auxiliary, "--sample-break-mode", "eos", *flags)
    return training_config(pipeline.data_bin, *more, **NAMES)


def begun(cfg: Any, task: Any = None) -> Any:
    """The task of a run that begins."""
    task = task or tasks.setup_task(cfg.task)
    seeded_model(cfg, task)
    task.load_dataset("train")
    trainer = SimpleNamespace(get_num_updates=lambda: 0, device=torch.device("cpu"))
    task.begin_run(trainer, {})
    return task


def test_each_line_has_the_mean_of_the_hidden_states_of_the_auxiliary_model(pipeline: Pipeline) -> None:
    cfg = configuration(pipeline)
    task = begun(cfg)
    assert DIRECTIONS not in task.state_dict()
    encoder = open_encoder(pipeline.auxiliary, pipeline.data_bin, layer=2, device="cpu", fp16=None)
    found = batches(cfg, "valid", task=task)
    for batch in found:
        tokens = batch["net_input"]["src_tokens"]
        vectors = task.prepare_batch(batch, None, 0)["vectors"]
        for row, vector in zip(tokens, vectors, strict=True):
            text = row[row != PAD]
            assert int(text[0]) == BOS
            assert EOS not in text[1:-1]  # a line, or a piece of a long one
            expected = encoder.hidden_states(text[None])[0].double().mean(dim=0)
            torch.testing.assert_close(vector.double(), expected, rtol=1e-2, atol=1e-2)
    lines = [line for line in pipeline.valid_text.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(lines) * 0.9 < sum(len(batch["net_input"]["src_tokens"]) for batch in found) < len(lines) * 1.5


def test_a_narrow_model_learns_projections_on_the_leading_directions(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = configuration(pipeline, *NARROW)
    with caplog.at_level(logging.INFO):
        task = begun(cfg)
    assert "it learns 16 of 32 directions, those of" in caplog.text
    assert "of the squared lengths of the vectors of further texts" in caplog.text
    directions = task.state_dict()[DIRECTIONS]
    assert directions.shape == (32, 16)
    torch.testing.assert_close(directions.T @ directions, torch.eye(16), atol=1e-5, rtol=0)
    found = batches(cfg, task=task)
    vectors = torch.cat([task.auxiliary.text_vectors(batch["net_input"]["src_tokens"]) for batch in found]).double()
    lengths = np.linalg.svd(vectors.numpy(), compute_uv=False)
    best = np.square(lengths[:16]).sum() / np.square(lengths).sum()  # of all texts; the directions are of a sample
    kept = float((vectors @ directions.double()).square().sum() / vectors.square().sum())
    assert best - 0.01 < kept <= best + 1e-6
    batch = task.prepare_batch(found[0], None, 0)
    projected = vectors[: len(batch["vectors"])] @ directions.double()
    torch.testing.assert_close(batch["vectors"].double(), projected, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_keeps_its_directions(pipeline: Pipeline, tmp_path: Path) -> None:
    cfg = configuration(pipeline, *NARROW)
    saved = {**begun(cfg).state_dict(), DIRECTIONS: torch.eye(32)[:, :16]}
    task = tasks.setup_task(cfg.task)
    task.check_starts_from(tmp_path / "other.pt", saved)
    assert torch.equal(begun(cfg, task).state_dict()[DIRECTIONS], saved[DIRECTIONS])
    for changes in ({"vectors_of": "0" * 64}, {POOLING: "cls"}):
        other = tasks.setup_task(cfg.task)
        other.check_starts_from(tmp_path / "other.pt", {**saved, **changes})
        assert not torch.equal(begun(cfg, other).state_dict()[DIRECTIONS], saved[DIRECTIONS])


def test_errors(pipeline: Pipeline) -> None:
    cfg = training_config(pipeline.data_bin, **NAMES)
    with pytest.raises(ValueError, match="--task sentence_vectors needs --auxiliary-checkpoint"):
        tasks.setup_task(cfg.task).load_dataset("train")
    with pytest.raises(ValueError, match=r"the model is 64 wide, .* pass --encoder-embed-dim 32 or less"):
        begun(configuration(pipeline, "--encoder-embed-dim", 64))
    task = begun(configuration(pipeline))
    saved = task.state_dict()
    task.check_resumes(saved)
    with pytest.raises(ValueError, match="pools by mean, and the run began with cls; pass another --save-dir"):
        task.check_resumes({**saved, POOLING: "cls"})
    with pytest.raises(ValueError, match="--auxiliary-checkpoint is another model than that of the run"):
        task.check_resumes({**saved, "vectors_of": "0" * 64})
    with pytest.raises(ValueError, match="did not begin with --task sentence_vectors and an auxiliary model"):
        task.check_resumes({"states_of": saved["vectors_of"], "states_layer": 2})


def test_text_of_blank_lines_alone_is_refused(pipeline: Pipeline, tmp_path: Path) -> None:
    """fairseq-preprocess writes such data."""
    data = shutil.copytree(pipeline.data_bin, tmp_path / "data")
    builder = make_builder(str(data / "valid.bin"), "mmap", vocab_size=800)
    for _ in range(3):
        builder.add_item(torch.tensor([EOS]))
    builder.finalize(str(data / "valid.idx"))
    cfg = training_config(data, "--auxiliary-checkpoint", pipeline.auxiliary, "--sample-break-mode", "eos", **NAMES)
    with pytest.raises(ValueError, match="valid has only blank lines; check the text that was binarized"):
        tasks.setup_task(cfg.task).load_dataset("valid")


@pytest.mark.slow
def test_runs_learn_resume_start_from_masked_lm_and_are_exported(
    pipeline: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(name: str, updates: int, *flags: object, task: str = TASK) -> Any:
        auxiliary = ("--auxiliary-checkpoint", pipeline.auxiliary) if task == TASK else ()
        more = ("--max-update", updates, "--sample-break-mode", "eos", *NARROW, *flags)
        return fairseq_train(pipeline.data_bin, tmp_path / name, *auxiliary, *more, task=task)

    losses = [float(loss) for loss in logged(train("whole", 12, "--lr", "1e-2"), "loss")]
    assert losses[-1] < losses[0]
    train("stopped", 6, "--lr", "1e-2")
    train("stopped", 12, "--lr", "1e-2")
    states = [read_contents(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "stopped")]
    first, second = (state["model"] for state in states)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(*(state["task_state"][DIRECTIONS] for state in states))
    train("mlm", 2, task="plain_masked_lm")
    train("warm", 2, "--finetune-from-model", tmp_path / "mlm" / "checkpoint_last.pt")
    mlsm("convert", tmp_path / "whole", tmp_path / "exported", "--text", pipeline.valid_text, "--lines", 3)
    assert "sentence-transformers opens it, too" in capsys.readouterr().out
    assert [module["type"].rpartition(".")[2] for module in modules_of(tmp_path / "exported")] == [
        "Transformer",
        "Pooling",
    ]
    lines = ["The value of an expression.", "A name is bound."]
    both = [open_sentence_encoder(tmp_path / name, "cpu").vectors(lines) for name in ("whole", "exported")]
    np.testing.assert_allclose(*both, atol=1e-5)
    with pytest.raises(ValueError, match=r"not trained \(--task sentence_vectors has no loss on it\)"):
        hub.from_pretrained(tmp_path / "whole").fill_mask("It is <mask>.")


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_two_ranks_compute_what_one_rank_computes_from_both_their_batches(pipeline: Pipeline, tmp_path: Path) -> None:
    flags = ("--task", TASK, "--criterion", TASK, "--auxiliary-checkpoint", pipeline.auxiliary, "--dropout", 0, *NARROW)
    flags = (*flags, "--attention-dropout", 0, "--max-update", 4, "--no-save", "--disable-validation")
    ranks = train_on_two_ranks(pipeline.data_bin, tmp_path, *flags, "--ddp-backend", "legacy_ddp")
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stdout[-3000:]
    alone = fairseq_train(pipeline.data_bin, tmp_path, *flags, "--update-freq", 2, task=TASK)
    assert_same_updates(updates_in(ranks[0].stdout), updates_in(text_of(alone)), 4)
