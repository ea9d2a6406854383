"""Fine-tuning with the command that users type, on a learnable toy problem: is a sentence long or short?"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score

from mlsm_plugin import hub
from mlsm_plugin.evaluation.finetuning import Finetuning, summarized
from mlsm_plugin.evaluation.settings import FinetuneSettings
from tests.conftest import Pipeline, failing_mlsm, mlsm
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]
FAST = ("--max-epoch", 2, "--batch-size", 16, "--lr", "2e-3", "--cpu", "--num-workers", 0)


@pytest.fixture(scope="module")
def folder(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``train.tsv``, ``valid.tsv`` and ``test.tsv``, and the same as pairs and with numbers."""
    root = tmp_path_factory.mktemp("labelled")
    lines = [line for line in pipeline.train_text.read_text(encoding="utf-8").splitlines() if 20 < len(line) < 150]
    chosen = [line for line in lines if len(line) < 45 or len(line) > 90]
    parts = {"train": chosen[:160], "valid": chosen[160:200], "test": chosen[200:240]}
    for split, texts in parts.items():
        labels = ["long one" if len(text) > 60 else "short" for text in texts]
        rows = [f"{label}\t{text}" for label, text in zip(labels, texts, strict=True)]
        (root / f"{split}.tsv").write_text("\n".join(rows) + "\n\n", encoding="utf-8")
        named = {"long one": "<pad>", "short": "</s>"}  # labels may be called like fairseq's special symbols
        pairs = [f"{named[label]}\tWhat is it\t{text}" for label, text in zip(labels, texts, strict=True)]
        (root / f"{split}.pairs.tsv").write_text("label\n" + "\n".join(pairs) + "\n", encoding="utf-8")
        numbers = [f"{len(text) / 100}\t{text}" for text in texts]
        (root / f"{split}.numbers.tsv").write_text("\n".join(numbers) + "\n", encoding="utf-8")
    return root


def files(folder: Path, kind: str = "") -> tuple[object, ...]:
    return tuple(word for split in ("train", "valid", "test") for word in (f"--{split}", folder / f"{split}{kind}.tsv"))


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_seeds_are_trained_measured_and_the_best_is_kept(
    pipeline: Pipeline, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    words = ("finetune", "--checkpoint", pipeline.auxiliary, *files(folder), "--output", tmp_path / "out", *FAST)
    mlsm(*words, "--seeds", 3, 4)
    printed = capsys.readouterr().out
    assert "seed 3: training" in printed
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [result["seed"] for result in results["seeds"]] == [3, 4]
    assert min(result["valid_accuracy"] for result in results["seeds"]) > 0.8
    for result in results["seeds"]:
        run = tmp_path / "out" / f"seed-{result['seed']}"
        logs = re.findall(r"\| valid \|.* accuracy ([\d.]+)", (run / "train.log").read_text())
        assert max(float(value) for value in logs) == pytest.approx(100 * result["valid_accuracy"], abs=0.06)
        rows = [line.split("\t") for line in (run / "test.predictions.tsv").read_text("utf-8").splitlines()]
        assert result["test_accuracy"] == pytest.approx(sum(row[0] == row[1] for row in rows) / len(rows))
        assert all(0.5 <= float(row[2]) <= 1 for row in rows)
    labels = tmp_path / "out" / "label" / "dict.txt"
    right = labels.read_text(encoding="utf-8")
    labels.write_text("".join(reversed(right.splitlines(keepends=True))), encoding="utf-8")
    with pytest.raises(ValueError, match="was trained with another list of labels"):
        hub.from_pretrained(tmp_path / "out")
    labels.write_text(right, encoding="utf-8")
    row = re.search(r"^ +mean +([\d.]+) +([\d.]+)$", printed, flags=re.M)
    assert row is not None
    assert float(row.group(1)) == pytest.approx(results["mean"]["valid_accuracy"], abs=1e-4)

    moved = shutil.copytree(tmp_path / "out", tmp_path / "moved", ignore=shutil.ignore_patterns("seed-*", "data"))
    model = hub.from_pretrained(moved)
    best = tmp_path / "out" / f"seed-{results['best_seed']}"
    texts = [line.split("\t") for line in (best / "valid.predictions.tsv").read_text("utf-8").splitlines()]
    assert [model.predict_label(row[3]) for row in texts[:5]] == [row[1] for row in texts[:5]]

    of_seeds = (tmp_path / "out" / f"seed-{seed}" / "checkpoint_best.pt" for seed in (3, 4))
    (tmp_path / "mean").mkdir()
    mlsm("convert", *of_seeds, tmp_path / "mean" / "model.pt")
    assert hub.from_pretrained(tmp_path / "mean").predict_label(texts[0][3]) in {row[1] for row in texts}
    capsys.readouterr()

    before = (best / "checkpoint_best.pt").stat().st_mtime_ns
    mlsm(*words, "--seeds", 3, 4, 5)
    assert (best / "checkpoint_best.pt").stat().st_mtime_ns == before
    assert "seed 3: training" not in (again := capsys.readouterr().out)
    assert "seed 5: training" in again
    assert "settings.patience is 3 there and 9 now" in failing_mlsm(capsys, *words, "--patience", 9)

    sealed = best / "result.json"
    for damaged in ("[1]", '{"seed": 3, "score": "high"}', '{"seed": 3, "score": 0.5}', "{"):
        sealed.write_text(damaged)
        assert f"{sealed} is not " in failing_mlsm(capsys, *words, "--seeds", results["best_seed"])


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_pairs_and_numbers_and_random_weights(
    pipeline: Pipeline, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    words = ("finetune", "--checkpoint", pipeline.auxiliary, *FAST)
    mlsm(
        *words, *files(folder, ".pairs"), "--output", tmp_path / "pairs", "--from-scratch", "--max-epoch", 1, "--header"
    )
    model = hub.from_pretrained(tmp_path / "pairs")
    assert model.predict_label("The name is bound.", "A name.") in ("<pad>", "</s>")
    rows = (tmp_path / "pairs" / "seed-1" / "valid.predictions.tsv").read_text("utf-8").splitlines()
    assert [row.split("\t")[0] for row in rows] == [
        line.split("\t")[0] for line in (folder / "valid.pairs.tsv").read_text("utf-8").splitlines()[1:]
    ]
    assert "finetune-from-model" not in " ".join(
        re.findall(r"'finetune_from_model': '[^']+'", (tmp_path / "pairs" / "seed-1" / "train.log").read_text())
    )
    mlsm(*words, *files(folder, ".numbers"), "--output", tmp_path / "numbers", "--regression")
    results = json.loads((tmp_path / "numbers" / "results.json").read_text())
    assert results["mean"]["test_pearson"] > 0.5
    number = hub.from_pretrained(tmp_path / "numbers").predict_label("A short one.")
    assert isinstance(number, float)
    assert math.isfinite(number)
    assert "valid pearson" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_the_best_epoch_of_a_task_of_glue_is_that_of_f1(pipeline: Pipeline, folder: Path, tmp_path: Path) -> None:
    files_of_task: list[object] = []
    for split in ("train", "valid"):
        rows = [line.split("\t") for line in (folder / f"{split}.tsv").read_text("utf-8").splitlines() if line]
        lines = [{"sentence1": text, "sentence2": "A name.", "label": int(label == "short")} for label, text in rows]
        (tmp_path / f"mrpc.{split}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        files_of_task += [f"--{split}", tmp_path / f"mrpc.{split}.jsonl"]
    words = ("finetune", "--checkpoint", pipeline.auxiliary, *files_of_task, *FAST, "--max-epoch", 3)
    mlsm(*words, "--output", tmp_path / "out", "--metric", "f1")
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())["seeds"]
    run = tmp_path / "out" / "seed-1"
    found = [line.split("\t") for line in (run / "valid.predictions.tsv").read_text("utf-8").splitlines()]
    own, predicted = [int(row[0]) for row in found], [int(row[1]) for row in found]
    assert result["valid_f1"] == pytest.approx(f1_score(own, predicted)) == result["score"]
    assert result["valid_accuracy"] == pytest.approx(accuracy_score(own, predicted))
    logged = re.findall(r"\| valid \|.* f1 ([\d.]+)", (run / "train.log").read_text())
    assert len(logged) == 3
    assert max(map(float, logged)) == pytest.approx(100 * result["valid_f1"], abs=0.06)
    assert {row[4] for row in found} == {"A name."}


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_texts_longer_than_the_positions_are_cut_and_counted(
    pipeline: Pipeline, folder: Path, tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    long_text = "the value of the name " * 40
    for split in ("train", "valid"):
        text = (folder / f"{split}.tsv").read_text("utf-8")
        (tmp_path / f"{split}.tsv").write_text(f"short\t{long_text}\n{text}", encoding="utf-8")
    mlsm(
        *("finetune", "--checkpoint", pipeline.auxiliary, "--output", tmp_path / "out", *FAST, "--max-epoch", 1),
        *("--train", tmp_path / "train.tsv", "--valid", tmp_path / "valid.tsv"),
    )
    assert re.search(
        r"train: [1-9] texts are longer than the model's 64 positions; they are cut", capsys.readouterr().out
    )
    caplog.clear()
    assert hub.from_pretrained(tmp_path / "out").predict_label(long_text) in ("long one", "short")
    assert "1 of 1 texts are longer than the model's positions and are cut" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_batches_do_not_change_predictions(pipeline: Pipeline, folder: Path, tmp_path: Path) -> None:
    mlsm(
        *("finetune", "--checkpoint", pipeline.auxiliary, *files(folder), "--output", tmp_path / "out", *FAST),
        *("--max-epoch", 1),
    )
    model = hub.from_pretrained(tmp_path / "out")
    texts = [(line.split("\t")[1],) for line in (folder / "test.tsv").read_text("utf-8").splitlines() if line]
    alone = [model.predict_labels([own])[0] for own in texts]
    together = model.predict_labels(texts, batch_size=7)
    assert [label for label, _ in together] == [label for label, _ in alone]
    scores = [torch.tensor([score for _, score in found]) for found in (alone, together)]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-5)


def test_plans_of_earlier_versions_are_the_same(tiny: TinyData, tmp_path: Path) -> None:
    lines = "label\ttext\na\tA name.\nb\tA value.\na\tA list.\nb\tA tuple.\n"
    (tmp_path / "file.tsv").write_text(lines, encoding="utf-8")
    inputs = dict.fromkeys(("train", "valid"), tmp_path / "file.tsv")

    def settings_of(**settings: Any) -> dict[str, Any]:
        made = Finetuning(tiny.model, inputs, tmp_path / "out", FinetuneSettings(**settings))
        return {name: value for name, value in made._folder().plan["settings"].items() if value is not None}

    earlier = {"max_epoch", "patience", "lr", "batch_size", "regression", "from_scratch", "extra"}
    assert settings_of(allow_single_labels=True).keys() == earlier
    assert settings_of(header=True).keys() == {*earlier, "header"}
    assert settings_of(allow_single_labels=True, metric="accuracy").keys() == earlier


def test_summary_is_mean_and_sample_deviation() -> None:
    found = summarized([{"seed": 1, "score": 0.0, "x": 1.0}, {"seed": 2, "score": 0.0, "x": 2.0}])
    assert found == {"mean": {"x": 1.5}, "deviation": {"x": pytest.approx(math.sqrt(0.5))}}
    assert summarized([{"seed": 1, "score": 0.0, "x": 1.0}])["deviation"] == {"x": 0.0}
