"""Reading and plotting the logs of real runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from mlsm_plugin.reports.training_log import draw_curves, read_training_log
from tests.conftest import Pipeline, fairseq_train, logged
from tests.tensorboard_files import scalars


@pytest.fixture(scope="module")
def logs(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run logged in both formats, and one that is stopped and goes on."""
    root = tmp_path_factory.mktemp("logs")
    flags = ("--max-update", 4, "--validate-interval-updates", 2)
    found = {}
    for name in ("simple", "json"):
        run = fairseq_train(pipeline.data_bin, root / name, *flags, "--log-format", name, "--no-save")
        found[name] = root / f"{name}.log"
        found[name].write_text(run.stdout + run.stderr, encoding="utf-8")
    first = fairseq_train(pipeline.data_bin, root / "stopped", "--max-update", 2)
    again = fairseq_train(pipeline.data_bin, root / "stopped", *flags)
    (root / "stopped" / "train.log").write_text(
        "".join(run.stdout + run.stderr for run in (first, again)), encoding="utf-8"
    )
    found["stopped"] = root / "stopped"
    return found


@pytest.mark.slow
def test_both_formats_have_the_curves_that_were_logged(logs: dict[str, Path]) -> None:
    simple, json = (read_training_log(logs[name]) for name in ("simple", "json"))
    assert [update for update, _ in simple.train["loss"]] == [1, 2, 3, 4]
    assert [update for update, _ in simple.valid["kl"]] == [2, 4]
    assert simple.objective_metrics[0] == "loss"
    assert {"kl", "coded"} <= set(simple.objective_metrics)
    assert not any("best" in name for name in [*simple.valid, *json.valid])
    for name in ("loss", "kl", "lr", "gnorm"):
        assert simple.train[name] == json.train[name]
    assert simple.valid["loss"] == json.valid["loss"]
    text = logs["simple"].read_text("utf-8")
    values = re.findall(r"train_inner.*\bkl=([\d.]+)", text)
    assert [f"{value:g}" for _, value in simple.train["kl"]] == [f"{float(value):g}" for value in values]


@pytest.mark.slow
def test_run_that_went_on_has_one_curve(logs: dict[str, Path]) -> None:
    whole, stopped = read_training_log(logs["simple"]), read_training_log(logs["stopped"] / "train.log")
    assert stopped.train["loss"] == whole.train["loss"]
    assert stopped.valid["loss"] == whole.valid["loss"]


@pytest.mark.slow
def test_logged_values_of_the_helper_agree(logs: dict[str, Path]) -> None:
    import subprocess

    run = subprocess.CompletedProcess([], 0, logs["simple"].read_text("utf-8"), "")
    losses = [float(value) for value in logged(run, "loss")]
    assert [value for _, value in read_training_log(logs["simple"]).train["loss"]] == losses


@pytest.mark.slow
def test_tensorboard_has_what_the_log_has(logs: dict[str, Path], pipeline: Pipeline, tmp_path: Path) -> None:
    fairseq_train(
        *(pipeline.data_bin, tmp_path / "model", "--max-update", 4, "--no-save"),
        *("--tensorboard-logdir", tmp_path / "board"),
    )
    log = read_training_log(logs["simple"])
    board = scalars(tmp_path / "board" / "train_inner")
    for name in ("loss", "kl", "nonzeros", "coded"):
        assert board[name] == pytest.approx(dict(log.train[name]), abs=6e-4)  # the log is rounded
    assert scalars(tmp_path / "board" / "valid")["kl"][4] == pytest.approx(dict(log.valid["kl"])[4], abs=6e-4)


@pytest.mark.parametrize("subsets", [("valid", "test"), ("test", "valid"), ("dev", "test"), ("dev",)])
def test_validation_is_that_of_one_subset(tmp_path: Path, subsets: tuple[str, ...]) -> None:
    chosen = "valid" if "valid" in subsets else subsets[0]
    losses = {name: 5.0 if name == chosen else 9.0 for name in subsets}
    simple = [f"epoch 001 | valid on '{name}' subset | loss {loss} | num_updates 4" for name, loss in losses.items()]
    as_json = [
        json.dumps({"epoch": 1, f"{name}_loss": str(loss), f"{name}_num_updates": "4"}) for name, loss in losses.items()
    ]
    of_epoch = json.dumps({"epoch": 1, "train_loss": "7.0", "train_num_updates": "4"})
    for lines in (simple, [*as_json, of_epoch]):
        (tmp_path / "train.log").write_text("\n".join([*lines, ""]), encoding="utf-8")
        assert read_training_log(tmp_path / "train.log").valid["loss"] == [(4, 5.0)]


def test_lines_without_a_number_of_updates_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    lines = [json.dumps({"loss": "2", "num_updates": updates}) for updates in ("inf", "nan", "3")]
    path.write_text("\n".join([*lines, '{"a":' * 100_000]), encoding="utf-8")
    assert read_training_log(path).train["loss"] == [(3, 2.0)]


@pytest.mark.slow
def test_a_cut_line_changes_nothing(logs: dict[str, Path], tmp_path: Path) -> None:
    """A log that is being written, or was cut, may end anywhere."""
    text, log = logs["simple"].read_text(encoding="utf-8"), tmp_path / "train.log"
    whole = read_training_log(logs["simple"]).train["loss"]
    assert len(whole) > 3
    begin = max(i for i in range(len(text)) if text.startswith("train_inner", i))
    for end in range(begin, text.index("\n", begin)):
        log.write_text(text[:end], encoding="utf-8")
        assert read_training_log(log).train["loss"] == whole[:-1]
        log.write_text(f"{text[:end]}\n", encoding="utf-8")  # the run went on after it was cut
        assert read_training_log(log).train["loss"][: len(whole) - 2] == whole[:-2]


def test_every_run_is_in_the_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []

    def legend(figure: Figure, handles: list[object], names: list[str], **more: object) -> None:
        labels.extend(names)

    monkeypatch.setattr(Figure, "legend", legend)
    for name, metric in (("a", "latent_kl"), ("b", "mlm_loss")):
        lines = [json.dumps({metric: "2", "num_updates": updates}) for updates in (1, 2)]
        (tmp_path / f"{name}.log").write_text("\n".join([*lines, ""]), encoding="utf-8")
    logs = [(name, read_training_log(tmp_path / f"{name}.log")) for name in "ab"]
    draw_curves(logs, tmp_path / "curves.png")
    assert labels == ["a, training", "b, training"]
