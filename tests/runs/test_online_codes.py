"""Training without a code store: each step computes its targets from the unmasked text."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import tasks

from mlsm_plugin import hub
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.evaluation.latent_kl import evaluate_latent_kl
from mlsm_plugin.fairseq_plugin.coding import fairseq_encoder
from mlsm_plugin.fairseq_plugin.coding.online_codes import OnlineCodes
from tests.changed_dictionary import changed_dictionary
from tests.conftest import Pipeline, fairseq_train, logged
from tests.runs.training_runs import train_on_two_ranks, updates_in
from tests.tiny_run import batches, each_batch, seeded_model, training_config

pytestmark = pytest.mark.slow


def online_flags(pipeline: Pipeline) -> tuple[object, ...]:
    return (
        *("--latent-source", "online", "--auxiliary-checkpoint", pipeline.auxiliary),
        *("--latent-dictionary", pipeline.dictionary),
    )


@pytest.fixture(scope="module")
def bare_data(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared data-bin without codes."""
    folder = tmp_path_factory.mktemp("bare") / "data-bin"
    return shutil.copytree(pipeline.data_bin, folder, ignore=shutil.ignore_patterns("*.codes"))


class OneStep:
    """An optimizer that only keeps the gradients."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def test_task_gives_the_criterion_codes_where_it_reads_them(
    pipeline: Pipeline, bare_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = training_config(bare_data, *online_flags(pipeline), "--dropout", 0, "--attention-dropout", 0)
    task = tasks.setup_task(cfg.task)
    model = seeded_model(cfg, task)
    names = {name for name, _ in model.named_parameters()}
    sample = next(each_batch(cfg, "valid", task=task))
    assert "codes" not in sample
    (stored,) = [
        batch
        for batch in batches(training_config(pipeline.data_bin), "valid")
        if torch.equal(batch["id"], sample["id"])
    ]
    criterion = task.build_criterion(cfg.criterion)
    state = torch.get_rng_state()
    loss, size, _ = task.train_step(sample, model, criterion, OneStep(), 0)
    expected, expected_size, _ = criterion(model, stored)
    assert size == expected_size > 10
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-3)
    assert torch.equal(torch.get_rng_state(), state)
    assert "codes" not in sample  # a dummy batch is used again
    ignored, _, _ = task.train_step(sample, model, criterion, OneStep(), 0, True)
    assert float(ignored) == 0
    validated, _, _ = task.valid_step(sample, model, criterion)
    assert float(validated) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert {name for name, _ in model.named_parameters()} == names

    def refuse(*_: object) -> None:
        raise AssertionError("codes were computed that nothing reads")

    monkeypatch.setattr(OnlineCodes, "codes_of_masked", refuse)
    with pytest.raises(AssertionError, match="nothing reads"):
        task.valid_step(sample, model, criterion)
    without = training_config(bare_data, *online_flags(pipeline), "--latent-weight", 0, "--mlm-weight", 1)
    _, size, _ = task.valid_step(sample, model, task.build_criterion(without.criterion))
    assert size == len(stored["codes"]["atoms"])
    falling = training_config(bare_data, *online_flags(pipeline), "--latent-updates", 5, "--mlm-weight", 1)
    criterion = task.build_criterion(falling.criterion)
    task.train_step(sample, model, criterion, OneStep(), 5)
    with pytest.raises(AssertionError, match="nothing reads"):
        task.train_step(sample, model, criterion, OneStep(), 4)


def test_model_is_loaded_once_leaves_random_numbers_alone_and_is_not_pickled(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    original = fairseq_encoder.load_roberta
    monkeypatch.setattr(fairseq_encoder, "load_roberta", lambda *words: (loads.append(1), original(*words))[1])
    cfg = training_config(pipeline.data_bin, *online_flags(pipeline))
    task = tasks.setup_task(cfg.task)
    state = torch.get_rng_state()
    task.load_dataset("valid")
    assert torch.equal(torch.get_rng_state(), state)
    task.load_dataset("train")
    assert len(loads) == 1
    stored = tasks.setup_task(training_config(pipeline.data_bin).task)
    stored.load_dataset("valid")
    assert task.state_dict() == stored.state_dict()
    tokens, target = torch.tensor([[0, 5, 6, 2]]), torch.tensor([[1, 5, 1, 1]])
    expected = task._online_codes().codes_of_masked(tokens, target)
    whole = pickle.dumps(task._online_codes())
    assert len(whole) < 20_000  # 48 atoms of 32 numbers; the model has 60,000
    copy = pickle.loads(whole)
    assert len(loads) == 1
    found = copy.codes_of_masked(tokens, target)
    assert len(loads) == 2
    assert torch.equal(found["weights"], expected["weights"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auxiliary_checkpoint": None}, "--latent-source online needs --auxiliary-checkpoint"),
        ({"latent_dictionary": None}, "--latent-source online needs --latent-dictionary"),
        ({"auxiliary_checkpoint": "absent.pt"}, "auxiliary checkpoint absent.pt does not exist"),
        ({"latent_dictionary": "absent"}, "absent holds no meta.json"),
        ({"latent_layer": 1}, "the dictionary was learned from layer 2, not from"),
        ({"auxiliary_fingerprint": "0" * 64}, "learned from another auxiliary checkpoint"),
        ({"dim": 16}, "the dictionary is 16 wide, the hidden states of the auxiliary model are 32 wide"),
        ({"tokens_per_sample": 128}, "--tokens-per-sample 128 is more than the 64 positions of the auxiliary model"),
    ],
)
def test_what_does_not_fit_is_said_when_the_data_is_loaded(
    pipeline: Pipeline, bare_data: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    cfg = training_config(bare_data, *online_flags(pipeline)).task
    if "dim" in changes or "auxiliary_fingerprint" in changes:
        cfg.latent_dictionary = str(changed_dictionary(pipeline, tmp_path / "dictionary", **changes))
    else:
        for name, value in changes.items():
            setattr(cfg, name, value)
    task = tasks.setup_task(cfg)  # as a checkpoint is loaded: nothing is opened
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        task.load_dataset("valid")


def test_a_run_does_not_resume_with_another_dictionary(pipeline: Pipeline, bare_data: Path, tmp_path: Path) -> None:
    words = [*online_flags(pipeline), "--max-update"]
    fairseq_train(bare_data, tmp_path / "model", *words, 2)
    last = tmp_path / "model" / "checkpoint_last.pt"
    before = last.read_bytes()
    loaded = AtomDictionary.load(pipeline.dictionary)
    AtomDictionary(np.roll(loaded.atoms, 1, axis=0), loaded.meta).save(tmp_path / "other")
    words[words.index(pipeline.dictionary)] = tmp_path / "other"
    refused = fairseq_train(bare_data, tmp_path / "model", *words, 4, check=False)
    assert refused.returncode != 0
    assert "error: the codes are over another dictionary" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert last.read_bytes() == before


@pytest.fixture(scope="module")
def trained(pipeline: Pipeline, bare_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs with and without a store, the same otherwise, and where they were saved."""
    root = tmp_path_factory.mktemp("online")
    flags = ("--mlm-weight", 1, "--update-freq", 2, "--max-update", 4, "--dropout", 0, "--attention-dropout", 0)
    flags += ("--save-interval-updates", 2)
    moved = shutil.copy(pipeline.auxiliary, root / "moved.pt")  # dict.txt is not next to this one
    online = ("--latent-source", "online", "--auxiliary-checkpoint", moved, "--latent-dictionary", pipeline.dictionary)
    return {
        "folder": root,
        "flags": (*flags, *online),
        "stored": fairseq_train(pipeline.data_bin, root / "stored", *flags),
        "online": fairseq_train(bare_data, root / "online", *flags, *online),
    }


def test_online_run_trains_as_one_with_a_store(trained: dict[str, Any]) -> None:
    for where, count in (("train_inner", 4), ("valid", 2)):
        for name in ("loss", "kl", "mlm_loss"):
            stored, online = (logged(trained[run], name, where=where) for run in ("stored", "online"))
            assert len(stored) == count
            assert [float(value) for value in online] == pytest.approx([float(value) for value in stored], rel=1e-2)


def test_checkpoint_holds_the_trained_model_only(trained: dict[str, Any]) -> None:
    stored, online = (torch.load(trained["folder"] / run / "checkpoint_last.pt") for run in ("stored", "online"))
    assert {name: weight.shape for name, weight in online["model"].items()} == {
        name: weight.shape for name, weight in stored["model"].items()
    }
    sizes = []
    for checkpoint in (stored, online):
        state = checkpoint["last_optimizer_state"]["state"].values()
        sizes.append(sum(value.numel() for values in state for value in values.values() if torch.is_tensor(value)))
    assert sizes[0] == sizes[1] > 0


def test_resumed_run_equals_one_without_a_break_and_its_model_needs_no_auxiliary(
    trained: dict[str, Any], pipeline: Pipeline, bare_data: Path
) -> None:
    whole, folder = trained["online"], trained["folder"]
    (folder / "resumed").mkdir()
    shutil.copy(folder / "online" / "checkpoint_1_2.pt", folder / "resumed" / "checkpoint_last.pt")
    rest = fairseq_train(bare_data, folder / "resumed", *trained["flags"])
    expected, found = updates_in(whole.stdout + whole.stderr), updates_in(rest.stdout + rest.stderr)
    assert list(found) == [3, 4]
    assert found == {update: expected[update] for update in (3, 4)}

    (folder / "moved.pt").unlink()
    model = hub.from_pretrained(folder / "resumed")
    assert model.num_atoms == 48
    assert str(model.task.cfg.latent_source) == "online"
    evaluated = evaluate_latent_kl(folder / "online", pipeline.data_bin)  # on the store of another folder
    assert evaluated.num_tokens > 0
    failed = fairseq_train(bare_data, folder / "none", *trained["flags"], check=False)
    errors = [line for line in failed.stderr.splitlines() if "error: " in line]
    assert failed.returncode != 0
    assert errors == [
        f"train.py: error: auxiliary checkpoint {folder / 'moved.pt'} does not exist (--auxiliary-checkpoint)"
    ]
    assert "Traceback" not in failed.stderr


@pytest.mark.usefixtures("warm_python")
def test_two_ranks_compute_what_one_computes_from_both_their_batches(
    trained: dict[str, Any], pipeline: Pipeline, bare_data: Path, tmp_path: Path
) -> None:
    flags = (*trained["flags"], *online_flags(pipeline), "--update-freq", 1, "--max-update", 2, "--disable-validation")
    ranks = train_on_two_ranks(bare_data, tmp_path / "two", "--ddp-backend", "legacy_ddp", *flags, "--no-save")
    for rank in ranks:
        assert rank.returncode == 0, rank.stdout[-4000:]
    alone = trained["online"]
    together, expected = updates_in(ranks[0].stdout), updates_in(alone.stdout + alone.stderr)
    assert list(together) == [1, 2]
    for update, values in together.items():
        assert values.keys() == expected[update].keys() >= {"loss", "kl", "gnorm"}
        for name, value in values.items():
            assert float(value) == pytest.approx(float(expected[update][name]), abs=2e-3), (update, name)
