"""Fine-tuning with the command that users type: which of two words does a text have?"""

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
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.evaluation.finetuning import check_tokens, summarized
from mlsm_plugin.evaluation.labelled_texts import LabelledTexts
from mlsm_plugin.evaluation.training_epochs import Epochs
from tests.conftest import failing_mlsm, mlsm
from tests.labelled_files import rows, write_labelled
from tests.tiny_hf_models import make_model
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]
FAST = ("--max-epoch", 4, "--batch-size", 8, "--lr", "5e-3", "--cpu")


@pytest.fixture(scope="module")
def bert(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("bert", tiny.text, tmp_path_factory.mktemp("bert"))


def predictions(folder: Path, split: str = "valid") -> list[list[str]]:
    lines = (folder / f"{split}.predictions.tsv").read_text("utf-8").splitlines()
    return [line.split("\t") for line in lines]


@pytest.mark.parametrize("kind", ["fairseq", pytest.param("Hugging Face", marks=pytest.mark.slow)])
def test_seeds_are_trained_measured_and_the_best_is_kept(
    tiny: TinyData, bert: Path, tmp_path: Path, capsys: Capture, kind: str
) -> None:
    model = tiny.model if kind == "fairseq" else bert
    output = tmp_path / "out"
    words = ("finetune", "--model", model, *write_labelled(tmp_path), "--output", output, *FAST)
    mlsm(*words, "--seeds", 3, 4)
    printed = capsys.readouterr().out
    results = json.loads((output / "results.json").read_text())
    assert [result["seed"] for result in results["seeds"]] == [3, 4]
    assert min(result["valid_accuracy"] for result in results["seeds"]) > 0.8
    for result in results["seeds"]:
        run = output / f"seed-{result['seed']}"
        log = json.loads((run / "trainer_state.json").read_text())["log_history"]
        epochs = [figures["eval_accuracy"] for figures in log if "eval_accuracy" in figures]
        assert max(epochs) == result["valid_accuracy"] == result["score"]  # of the written model, and of the Trainer's
        of_test = predictions(run, "test")
        assert result["test_accuracy"] == accuracy_score([row[0] for row in of_test], [row[1] for row in of_test])
        assert all(0.5 <= float(row[2]) <= 1 for row in of_test)
        assert not (run / "checkpoints").exists()
    row = re.search(r"^ +mean +([\d.]+) +([\d.]+)$", printed, flags=re.M)
    assert row is not None
    assert float(row.group(1)) == pytest.approx(results["mean"]["valid_accuracy"], abs=1e-4)

    moved = shutil.copytree(output / "model", tmp_path / "moved")
    classify = pipeline("text-classification", str(moved), device="cpu")
    of_best = predictions(output / f"seed-{results['best_seed']}")
    for own, row_of_file in zip(classify([row[3] for row in of_best]), of_best, strict=True):
        assert own["label"] == row_of_file[1]
        assert own["score"] == pytest.approx(float(row_of_file[2]), abs=1e-3)

    before = (output / "seed-3" / "model" / "model.safetensors").stat().st_mtime_ns
    mlsm(*words, "--seeds", 3, 4, 5)
    assert (output / "seed-3" / "model" / "model.safetensors").stat().st_mtime_ns == before
    again = capsys.readouterr().out
    assert "seed 3: training" not in again
    assert "seed 5: training" in again
    assert "settings.patience is 3 there and 9 now" in failing_mlsm(capsys, *words, "--patience", 9)

    best = json.loads((output / "results.json").read_text())["best_seed"]
    for path in output.glob("seed-*/model"):
        if path.parent.name != f"seed-{best}":
            shutil.rmtree(path)
    mlsm(*words, "--seeds", 3, 4, 5)  # the others' models are not needed
    shutil.rmtree(output / f"seed-{best}" / "model")
    assert "settings.patience is 3 there and 9 now" in failing_mlsm(capsys, *words, "--patience", 9)
    missing = failing_mlsm(capsys, *words, "--seeds", 3, 4, 5)
    folder = output / f"seed-{best}"
    assert f"{folder / 'model'} is missing; delete {folder} to train this seed again" in missing

    sealed = output / "seed-3" / "result.json"
    for damaged in ("[1]", '{"seed": 3, "score": "high"}', '{"seed": 3, "score": 0.5}', "{"):
        sealed.write_text(damaged)
        assert f"{sealed} is not " in failing_mlsm(capsys, *words, "--seeds", 3)


@pytest.mark.slow
def test_pairs_with_a_header_from_random_weights(bert: Path, tmp_path: Path) -> None:
    for split in ("train", "valid"):
        lines = [f"{label}\tWhat is it\t{text}\n" for label, text in rows(32)]
        (tmp_path / f"{split}.tsv").write_text("label\ta\tb\n" + "".join(lines), encoding="utf-8")
    files = ("--train", tmp_path / "train.tsv", "--valid", tmp_path / "valid.tsv")
    words = ("finetune", "--model", bert, *files, *FAST, "--max-epoch", 1, "--header")
    mlsm(*words, "--output", tmp_path / "scratch", "--from-scratch", "--seeds", 7)
    mlsm(*words, "--output", tmp_path / "trained", "--lr", "1e-9")
    assert [row[0] for row in predictions(tmp_path / "scratch" / "seed-7")] == [label for label, _ in rows(32)]
    encoder = AutoModelForSequenceClassification.from_pretrained(bert).bert.state_dict()
    name = "encoder.layer.0.attention.self.query.weight"
    weights = {
        folder: AutoModelForSequenceClassification.from_pretrained(tmp_path / folder / "model").bert.state_dict()[name]
        for folder in ("scratch", "trained")
    }
    torch.testing.assert_close(weights["trained"], encoder[name], rtol=0, atol=1e-6)
    assert (weights["scratch"] - encoder[name]).abs().max() > 0.01
    classify = pipeline("text-classification", str(tmp_path / "trained" / "model"), device="cpu")
    row = predictions(tmp_path / "trained" / "seed-1")[0]
    answer = classify({"text": row[3], "text_pair": row[4]})
    assert answer["score"] == pytest.approx(float(row[2]), abs=1e-3)


@pytest.mark.slow
def test_numbers_are_predicted_and_correlated(bert: Path, tmp_path: Path, capsys: Capture) -> None:
    for split, begin in (("train", 0), ("valid", 100)):
        lines = [f"{len(label) / 10}\t{text}\n" for label, text in rows(64, begin)]
        (tmp_path / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
    files = ("--train", tmp_path / "train.tsv", "--valid", tmp_path / "valid.tsv")
    mlsm("finetune", "--model", bert, *files, "--output", tmp_path / "out", *FAST, "--regression")
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())["seeds"]
    assert result["valid_pearson"] > 0.8
    assert math.isfinite(result["valid_spearman"])
    assert "valid pearson" in capsys.readouterr().out
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model")
    row = predictions(tmp_path / "out" / "seed-1")[0]
    inputs = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")(row[3], return_tensors="pt")
    assert float(model(**inputs).logits[0, 0]) == pytest.approx(float(row[1]), abs=1e-3)


@pytest.mark.slow
def test_the_best_epoch_of_a_task_of_glue_is_that_of_f1(bert: Path, tmp_path: Path) -> None:
    files: list[object] = []
    for split in ("train", "valid"):
        labelled = [(int(label == "value"), text) for label, text in rows(48)]
        lines = [{"sentence1": text, "sentence2": "A name.", "label": label} for label, text in labelled]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        files += [f"--{split}", tmp_path / f"{split}.jsonl"]
    mlsm("finetune", "--model", bert, *files, *FAST, "--output", tmp_path / "out", "--metric", "f1")
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())["seeds"]
    of_valid = predictions(tmp_path / "out" / "seed-1")
    expected = [int(row[0]) for row in of_valid]
    predicted = [int(row[1]) for row in of_valid]
    assert result["valid_f1"] == pytest.approx(f1_score(expected, predicted)) == result["score"]
    assert result["valid_accuracy"] == pytest.approx(accuracy_score(expected, predicted))
    assert {row[4] for row in of_valid} == {"A name."}


class StoppedError(Exception):
    """In the place of a kill."""


@pytest.mark.slow
def test_a_stopped_training_resumes_to_the_same_bytes(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_labelled(tmp_path)
    words = ("finetune", "--model", bert, *files, "--max-epoch", 4, "--lr", "1e-3", "--cpu", "--seeds", 2)
    mlsm(*words, "--output", tmp_path / "whole")
    evaluate = Epochs.on_evaluate

    def stopping(self: Epochs, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        evaluate(self, args, state, control, **kwargs)
        if not (tmp_path / "moved").exists() and state.epoch == 3:
            raise StoppedError

    monkeypatch.setattr(Epochs, "on_evaluate", stopping)
    with pytest.raises(StoppedError):
        mlsm(*words, "--output", tmp_path / "stopped")
    shutil.move(tmp_path / "stopped", tmp_path / "moved")
    mlsm(*words, "--output", tmp_path / "moved")
    for name in ("results.json", "seed-2/valid.predictions.tsv", "seed-2/test.predictions.tsv"):
        assert (tmp_path / "moved" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("moved", "whole")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_an_adapted_model_and_a_classifier_are_encoders_too(tiny: TinyData, tmp_path: Path) -> None:
    """The head of a classifier of other labels is replaced."""
    bert = make_model("roberta", tiny.text, tmp_path / "model", kind=AutoModelForSequenceClassification, num_labels=5)
    files = write_labelled(tmp_path, splits=("train", "valid"))
    mlsm("finetune", "--checkpoint", bert, *files, "--output", tmp_path / "out", *FAST, "--max-epoch", 1)
    mlsm("finetune", "--model", tmp_path / "out" / "model", *files, "--output", tmp_path / "again", *FAST)
    assert json.loads((tmp_path / "again" / "model" / "config.json").read_text())["label2id"].keys() == {
        label for label, _ in rows(2)
    }


def test_long_texts_are_cut_and_counted(bert: Path, tmp_path: Path, capsys: Capture) -> None:
    long_text = "the value of the name " * 40
    for split in ("train", "valid"):
        lines = [f"{label}\t{text}\n" for label, text in rows(8)]
        (tmp_path / f"{split}.tsv").write_text(f"value\t{long_text}\n" + "".join(lines), encoding="utf-8")
    files = ("--train", tmp_path / "train.tsv", "--valid", tmp_path / "valid.tsv")
    mlsm("finetune", "--model", bert, *files, "--output", tmp_path / "out", *FAST, "--max-epoch", 1)
    assert "train: 1 texts are longer than the model's 70 positions; they are cut" in capsys.readouterr().out
    classify = pipeline("text-classification", str(tmp_path / "out" / "model"), device="cpu")
    row = predictions(tmp_path / "out" / "seed-1")[0]
    (answer,) = classify(long_text, truncation=True)
    assert answer["score"] == pytest.approx(float(row[2]), abs=1e-3)


def test_the_folder_of_an_older_version_is_refused(bert: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out"
    output.mkdir()
    plan = {"checkpoint": "abc", "tokenizer": "def", "files": {}, "settings": {"extra": []}}
    (output / "plan.json").write_text(json.dumps(plan))
    words = ("finetune", "--model", bert, *write_labelled(tmp_path), "--output", output)
    assert f"{output} holds runs of fairseq, which an older version" in failing_mlsm(capsys, *words)
    assert [path.name for path in output.iterdir()] == ["plan.json"]


def test_a_training_that_diverges_is_one_line(bert: Path, tmp_path: Path, capsys: Capture) -> None:
    files = write_labelled(tmp_path)
    words = ("finetune", "--model", bert, *files, "--output", tmp_path / "out", "--cpu", "--lr", "1e30")
    assert "the loss is not finite after epoch 1; train with a smaller --lr" in failing_mlsm(capsys, *words)


def test_texts_without_tokens_are_named(bert: Path) -> None:
    tokenizer = HuggingFaceTokenizer(bert)
    texts = LabelledTexts(Path("none"), ("a", "b"), (("the", "name"), ("a value", "\u200b")), (1, 2))
    with pytest.raises(ValueError, match=r"none, line 2: the text '\\u200b' has no tokens after normalization"):
        check_tokens(texts, tokenizer, 0.01)


def test_summary_is_mean_and_sample_deviation() -> None:
    summary = summarized([{"seed": 1, "score": 0.0, "x": 1.0}, {"seed": 2, "score": 0.0, "x": 2.0}])
    assert summary == {"mean": {"x": 1.5}, "deviation": {"x": pytest.approx(math.sqrt(0.5))}}
    assert summarized([{"seed": 1, "score": 0.0, "x": 1.0}])["deviation"] == {"x": 0.0}
