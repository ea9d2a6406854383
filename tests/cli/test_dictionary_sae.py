"""``mlsm dictionary --coder topk|batchtopk``, and what is done with such a coder afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mlsm_plugin.cli.main import build_parser
from mlsm_plugin.cli.settings_flags import settings_of
from mlsm_plugin.core.coding import coder_learning
from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sae_training import SaeTrainer
from mlsm_plugin.hub import from_pretrained
from tests.cli.coding_runs import contents, meta_of
from tests.conftest import failing_mlsm, fairseq_train, logged, mlsm
from tests.tensorboard_files import scalars
from tests.tiny_models import TRAINED_TOKENS, TinyData

FEW = ("--atoms", 24, "--tokens", 3000, "--batch-size", 100, "--k", 4, "--threads", 1)


def words(tiny: TinyData, output: Path, *options: object, data: Path | None = None) -> tuple[object, ...]:
    return (
        *("dictionary", data or tiny.data_bin, "--auxiliary", tiny.model, "--layer", 1, "--output", output),
        *("--device", "cpu", *options),
    )


def learn(tiny: TinyData, output: Path, *options: object) -> SaeCoder:
    mlsm(*words(tiny, output, "--coder", "topk", *FEW, *options))
    coder = load_coder(output)
    assert isinstance(coder, SaeCoder)
    return coder


@pytest.mark.parametrize("coder", ["topk", "batchtopk"])
def test_sae_is_learned_and_says_how(coder: str, tiny: TinyData, tmp_path: Path) -> None:
    sae = learn(tiny, tmp_path / "made", "--coder", coder, "--matryoshka", 8, "--seed", 5)
    chosen = {
        **{"layer": 1, "n_atoms": 24, "dim": 32, "tokens": 3000, "batch_size": 100, "seed": 5, "k": 4},
        **{"method": coder, "matryoshka": [8], "learning_rate": 3e-3, "fp16": False, "kind": "sae"},
        "blocks": {"tokens_per_sample": TRAINED_TOKENS, "sample_break_mode": "complete"},
    }
    meta = meta_of(tmp_path / "made")
    assert {name: meta[name] for name in chosen} == chosen
    assert meta["sae"]["activation"] == {"topk": "topk", "batchtopk": "jumprelu"}[coder]
    assert meta["sae"]["input_norm"] == "constant_norm"
    assert "lambda" not in meta
    assert 0 < meta["health"]["reconstruction_error"] < 1
    assert meta["health"]["mean_nonzeros"] == pytest.approx(4, rel=0.3)
    norms = torch.linalg.vector_norm(sae.sae.weights.decoder, dim=1)
    torch.testing.assert_close(norms, torch.ones(24))
    assert not [path for path in (tmp_path / "made").iterdir() if path.suffix not in (".npy", ".json")]


def test_seed_decides_and_a_complete_folder_stays(
    tiny: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        learn(tiny, tmp_path / name, "--seed", seed)
    first, again, other = (contents(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    assert first["encoder.npy"] != other["encoder.npy"]
    capsys.readouterr()
    learn(tiny, tmp_path / "first")
    assert "nothing to do" in capsys.readouterr().out
    changed = ("--coder", "batchtopk", *FEW)
    assert "--overwrite" in failing_mlsm(capsys, *words(tiny, tmp_path / "first", *changed))
    assert "--overwrite" in failing_mlsm(capsys, *words(tiny, tmp_path / "first", "--atoms", 24))
    assert contents(tmp_path / "first") == first
    learn(tiny, tmp_path / "first", "--seed", 2, "--overwrite")
    assert contents(tmp_path / "first") == other


def test_stopped_training_is_resumed_to_the_same_bytes(
    tiny: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learn(tiny, tmp_path / "whole")
    monkeypatch.setattr(coder_learning, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    update, done = SaeTrainer.update, []

    def stop_after_13(trainer: SaeTrainer, rows: torch.Tensor) -> object:
        done.append(len(rows))
        if len(done) == 14:
            raise KeyboardInterrupt
        return update(trainer, rows)

    made = words(tiny, tmp_path / "made", "--coder", "topk", *FEW)
    with monkeypatch.context() as patch:
        patch.setattr(SaeTrainer, "update", stop_after_13)
        with pytest.raises((KeyboardInterrupt, AssertionError, SystemExit)):
            mlsm(*made)
    checkpoint = tmp_path / "made" / coder_learning.CHECKPOINT_FILE
    assert [path.name for path in (tmp_path / "made").iterdir()] == [checkpoint.name]
    assert "seed is 1 there and 3 now" in failing_mlsm(capsys, *made, "--seed", 3)
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: len(whole) // 2])
    assert f"{checkpoint} is not a checkpoint" in failing_mlsm(capsys, *made)
    checkpoint.write_bytes(whole)
    mlsm(*made)
    assert "resuming after 13 of 30 updates" in capsys.readouterr().out
    assert contents(tmp_path / "made") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--coder", "topk", "--lambda", 0.1), "--lambda cannot be used with coder topk"),
        (("--coder", "batchtopk", "--lambda", 0.1), "--lambda cannot be used with coder batchtopk"),
        (("--coder", "topk", "--iterations", 3), "--iterations cannot be used with"),
        (("--coder", "topk", "--backend", "torch"), "--backend cannot be used with"),
        (("--k", 3), "--k cannot be used with coder lasso; leave it out, or choose topk or batchtopk"),
        (("--matryoshka", 3), "--matryoshka cannot be used with coder lasso"),
        (("--learning-rate", 0.1), "--learning-rate cannot be used with coder lasso"),
        (("--coder", "topk", "--k", 0), "--k must be positive"),
        (("--coder", "topk", "--k", 25, "--atoms", 24), "k must be from 1 to the number of atoms, 24, got 25"),
        (("--coder", "topk", "--atoms", 24, "--k", 2, "--matryoshka", 24), "Matryoshka prefixes must be ascending"),
        (("--coder", "topk", "--learning-rate", -1), "--learning-rate must be positive"),
    ],
)
def test_options_that_do_not_go_together(
    options: tuple[object, ...], problem: str, tiny: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert problem in failing_mlsm(capsys, *words(tiny, tmp_path / "made", *options))
    assert not (tmp_path / "made").exists()


def test_each_kind_has_its_defaults() -> None:
    given = ["dictionary", "data", "--auxiliary", "a", "--layer", "1", "--output", "o"]
    for coder, wanted in (
        ("lasso", {"lambda_": 0.05, "iterations": 1000, "batch_size": 400, "backend": "torch", "k": None}),
        ("topk", {"lambda_": None, "iterations": None, "batch_size": 256, "k": 32, "matryoshka": []}),
    ):
        args = build_parser("dictionary").parse_args([*given, "--coder", coder])
        settings = settings_of(LearningSettings, args)
        assert {name: getattr(settings, name) for name in wanted} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("coder", ["topk", "batchtopk"])
def test_from_the_sae_to_latent_properties(coder: str, tiny: TinyData, tmp_path: Path) -> None:
    data, dictionary = tiny.copy(tmp_path / "data-bin"), tmp_path / "made"
    mlsm(*words(tiny, dictionary, "--coder", coder, *FEW, data=data))
    model = ("--auxiliary", tiny.model, "--device", "cpu")
    mlsm("encode", data, *model, "--dictionary", dictionary)
    store = CodeStore(str(data / "train.codes"))
    assert (store.meta["coder"], store.num_atoms) == ("sae", 24)
    assert "gap_mean" not in store.meta
    assert np.diff(store.rows(0, len(store)).indptr).max() >= 4
    mlsm("inspect", data, "--output", tmp_path / "page.html")
    assert "sae" in (tmp_path / "page.html").read_text(encoding="utf-8")
    few = ("--max-update", 3, "--tokens-per-sample", TRAINED_TOKENS, "--seed", 7)
    stored = fairseq_train(data, tmp_path / "stored", *few)
    online = fairseq_train(
        *(tiny.data_bin, tmp_path / "online", *few, "--latent-source", "online"),
        *("--auxiliary-checkpoint", tiny.model, "--latent-dictionary", dictionary),
    )
    losses = [[float(value) for value in logged(run, "loss")] for run in (stored, online)]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=0.01)
    for run in ("stored", "online"):
        found = from_pretrained(tmp_path / run).latent_properties("The name of the class", topk=3)
        assert all(len(entry.atoms) == 3 for entry in found)


def test_the_training_is_logged_for_tensorboard(tiny: TinyData, tmp_path: Path) -> None:
    plain, board = learn(tiny, tmp_path / "plain"), tmp_path / "board"
    sae = learn(tiny, tmp_path / "made", "--tensorboard-logdir", board)
    assert sae.fingerprint == plain.fingerprint
    assert meta_of(tmp_path / "made") == meta_of(tmp_path / "plain")
    figures = scalars(board)
    assert set(figures) == {"loss", "explained_variance", "l0", "dead"}
    assert all(list(values) == list(range(1, 31)) for values in figures.values())  # 3,000 tokens in batches of 100
    assert figures["l0"][30] == pytest.approx(4, abs=0.01)
    assert figures["explained_variance"][30] > figures["explained_variance"][1]


def test_a_dictionary_has_no_training_to_log(
    tiny: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = failing_mlsm(capsys, *words(tiny, tmp_path / "made", "--tensorboard-logdir", tmp_path / "board"))
    assert "a log of the training needs coder topk or batchtopk" in line
    assert not (tmp_path / "board").exists()
