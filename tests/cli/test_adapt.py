"""``mlsm adapt``: from a stock model and a text to an adapted stock model, killed and resumed; and what it refuses."""

from __future__ import annotations

import gzip
import json
import random
import shlex
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, TrainingArguments

from mlsm_plugin.cli.adapt import _print_quality
from mlsm_plugin.cli.main import main
from mlsm_plugin.core.files import atomic_files
from mlsm_plugin.core.files.atomic_files import read_json, sha256_of_files
from mlsm_plugin.core.files.sentence_modules import modules_of, write_modules
from mlsm_plugin.core.files.step_record import StepRecord
from mlsm_plugin.core.hidden_states import hf_encoder
from mlsm_plugin.core.hidden_states.hf_encoder import load_library_model
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.masked_reading import masked_lines
from mlsm_plugin.evaluation.sentence_encoders import open_sentence_encoder
from mlsm_plugin.huggingface import LatentSemanticModel, adaptation
from mlsm_plugin.huggingface.adaptation_setup import AdaptationSetup
from mlsm_plugin.huggingface.adaptation_text import AdaptationText
from mlsm_plugin.huggingface.model_card import QUALITY_HEADING
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from mlsm_plugin.huggingface.trainer_callback import ProgressBars
from mlsm_plugin.huggingface.training import TrainingSettings
from tests.cli.coding_runs import start_mlsm
from tests.conftest import failing_mlsm, made_once, mlsm
from tests.hub_server import REPO, hub_server, mlsm_with_hub
from tests.tensorboard_files import scalars
from tests.tiny_hf_models import make_model, make_tokenizer

Capture = pytest.CaptureFixture[str]
LINES, LENGTH = 200, 32
CODES = ("--atoms", 20, "--k", 3, "--tokens", 800)
TRAINING = ("--updates", 6, "--evaluate-every", 3, "--batch-size", 4, "--learning-rate", 1e-3, "--bf16", "off", "--cpu")
THREADS = ("--threads", 1)


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> Path:
    """A folder with ``text.txt``, ``valid.txt`` and a BERT with random weights in ``model``."""

    def make(root: Path) -> None:
        lines = english_text[0].read_text(encoding="utf-8").splitlines(keepends=True)[:LINES]
        (root / "text.txt").write_text("".join(lines), encoding="utf-8")
        (root / "valid.txt").write_text("".join(lines[:20]), encoding="utf-8")
        make_model("bert", root / "text.txt", root / "model", kind=AutoModelForMaskedLM)

    return made_once(tmp_path_factory, "adapt", make)


def figures_in(output: Path) -> dict[str, dict[str, float]]:
    record = StepRecord(output / "steps.json")
    return {"before": record.figures_of("before"), "after": record.figures_of("training")}


def words(start: Path, output: Path, *more: object, objective: str = "mlsm+mlm") -> tuple[object, ...]:
    common = ("--text", start / "text.txt", "--output", output, "--objective", objective, "--max-length", LENGTH)
    return ("adapt", start / "model", *common, *(CODES if "mlsm" in objective else ()), *TRAINING, *THREADS, *more)


def test_a_stock_model_becomes_an_adapted_stock_model(start: Path, tmp_path: Path, capsys: Capture) -> None:
    # enough updates that the losses of trained text fall whatever the tokenizer, which is not trained twice the same
    training = ("--updates", 60, "--evaluate-every", 30, "--learning-rate", 4e-3)
    command = words(start, tmp_path / "out", *training, "--valid", start / "valid.txt")
    mlsm(*command)
    printed = capsys.readouterr().out
    figures = figures_in(tmp_path / "out")
    for name in ("kl", "mlm_loss"):
        before, after = (figures[when][name] for when in ("before", "after"))
        assert after < before
        assert f"held-out {name}: {before:.4f} before, {after:.4f} after" in printed
    learning = StepRecord(tmp_path / "out" / "steps.json").settings_of("dictionary")
    # --batch-size and --learning-rate are those of the training
    assert (learning["atoms"], learning["batch_size"], learning["learning_rate"]) == (20, 256, 3e-3)
    model, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "out" / "model", output_loading_info=True)
    assert (set(info["missing_keys"]), set(info["unexpected_keys"])) == (set(), set())
    card = (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: fill-mask" in card
    assert (
        f"An adaptation of `{start.name}/model` to a text. It was trained for 60 updates with masked latent semantic"
        in card
    )
    assert f"| mlm_loss | nats | {figures['before']['mlm_loss']:.4f} | {figures['after']['mlm_loss']:.4f} |" in card
    assert f"| text.txt | `{sha256_of_files(start / 'text.txt')}` |" in card
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    assert bool(model(**tokenizer("a film", return_tensors="pt")).logits.isfinite().all())
    assert LatentSemanticModel.from_pretrained(tmp_path / "out" / "model").latent_head.out_features == 20
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    mlsm(*command)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()} == made


def test_the_models_before_and_after_are_compared(
    start: Path, english_text: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "out"
    command = words(start, output, "--updates", 2, "--valid", english_text[1], objective="mlm")
    mlsm(*command)
    printed = capsys.readouterr().out
    quality = read_json(output / "quality.json")
    figures = {name: model["measures"] for name, model in quality["models"].items()}
    assert list(figures) == ["before", "after"]
    assert all(set(measures) == {"nDCG@10", "bits/token", "bits/word"} for measures in figures.values())
    lines = [line.split() for line in printed.splitlines() if " M " in line]  # of parameters
    gains = [f"{figures[name]['nDCG@10']['figure']:.3f}" for name in ("before", "after")]
    assert [[line[0], line[3]] for line in lines] == [["before", gains[0]], ["after", gains[1]]]
    card = output / "model" / "README.md"
    assert f"| before | {gains[0]} |" in card.read_text(encoding="utf-8")
    assert f"held-out text: {quality['sentences']} sentences, {quality['passages']} passages" in printed
    # another labelled file repeats the comparison alone, also in a folder that lost what made the model
    card.write_text(card.read_text(encoding="utf-8") + "edited\n", encoding="utf-8")
    for name in ("checkpoints", "tokens", "valid"):
        shutil.rmtree(output / name)
    labelled = tmp_path / "train.tsv"
    labelled.write_text("".join(f"{label}\tthe name of {label}\n" for label in "ab" * 3), encoding="utf-8")
    mlsm(*command, "--labelled", labelled, labelled)
    printed = capsys.readouterr().out
    assert "quality:" in printed
    assert "training:" not in printed
    assert list(read_json(output / "quality.json")["models"]["after"]["measures"])[-1] == tmp_path.name
    assert "edited" in card.read_text(encoding="utf-8")
    assert not (output / "tokens").exists()


def test_without_passages_the_table_is_of_the_labelled_files(capsys: Capture) -> None:
    models = {"before": {"parameters": 1, "measures": {"sst2": {"figure": 0.5, "difference_from_first": None}}}}
    _print_quality({"models": models, "sentences": 0, "passages": 0, "notes": ["left out"]})
    printed = capsys.readouterr().out
    assert printed.startswith("\nlabelled files:\nmodel")
    assert "0 sentences" not in printed
    _print_quality({"models": models, "sentences": 0, "passages": 0, "lines": 31, "notes": []})
    assert capsys.readouterr().out.startswith("\nheld-out text: 31 lines\nmodel")


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["mlm", "mlsm+mlm"])
def test_another_valid_text_repeats_the_evaluation_alone(
    objective: str, start: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    other = tmp_path / "other.txt"
    other.write_text("".join((start / "text.txt").read_text(encoding="utf-8").splitlines(True)[30:70]), "utf-8")
    command = words(start, output, objective=objective)
    mlsm(*command, "--valid", start / "valid.txt")
    weights = sha256_of_files(output / "model" / "model.safetensors")
    first = figures_in(output)
    steps: list[str] = []
    monkeypatch.setattr(ProgressBars, "on_step_end", lambda self, args, state, *_, **__: steps.append("update"))
    capsys.readouterr()
    mlsm(*command, "--valid", other)
    assert steps == []
    assert "dictionary:" not in capsys.readouterr().out
    second = figures_in(output)
    assert all(first[when]["mlm_loss"] != second[when]["mlm_loss"] for when in ("before", "after"))
    assert sha256_of_files(output / "model" / "model.safetensors") == weights
    card = (output / "model" / "README.md").read_text(encoding="utf-8")
    assert f"| mlm_loss | nats | {second['before']['mlm_loss']:.4f} | {second['after']['mlm_loss']:.4f} |" in card
    assert (output / "held_out.txt").read_text(encoding="utf-8") == other.read_text(encoding="utf-8")
    fresh = tmp_path / "fresh"
    mlsm(*words(start, fresh, objective=objective), "--valid", other)
    assert len(steps) == 6
    assert figures_in(fresh) == second


@pytest.mark.slow
def test_the_card_has_its_figures_after_an_evaluation_on_another_text_was_stopped(start: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("".join((start / "text.txt").read_text(encoding="utf-8").splitlines(True)[30:70]), "utf-8")
    command = words(start, tmp_path / "out", "--updates", 1, objective="mlm")
    mlsm(*command, "--valid", start / "valid.txt")
    card = tmp_path / "out" / "model" / "README.md"
    before = card.read_text(encoding="utf-8")
    assert QUALITY_HEADING in before

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptation, "write_card", interrupt)
        assert main([str(word) for word in (*command, "--valid", other)]) == 130
    assert not card.exists()
    mlsm(*command, "--valid", start / "valid.txt")
    assert card.read_text(encoding="utf-8") == before


@pytest.mark.slow
def test_a_valid_text_in_place_of_the_end_of_the_text_trains_again(
    start: Path, tmp_path: Path, capsys: Capture
) -> None:
    command = words(start, tmp_path / "out", "--updates", 1, objective="mlm")
    mlsm(*command)
    mlsm(*command, "--valid", start / "valid.txt")
    assert (tmp_path / "out" / "checkpoints.old").exists()  # of less text


def test_a_folder_of_an_earlier_version_keeps_its_model(start: Path, tmp_path: Path, capsys: Capture) -> None:
    """It recorded the text of --valid with what decides the model."""
    output = tmp_path / "out"
    command = words(start, output, "--updates", 1, "--valid", start / "valid.txt", objective="mlm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdaptationText, "evaluated_files", [])
        mlsm(*command)
    assert "holds_out" not in StepRecord(output / "steps.json").settings_of("text")
    capsys.readouterr()
    mlsm(*command)
    assert "training:" not in capsys.readouterr().out
    assert not list(output.glob("*.old"))


def test_a_folder_of_before_the_comparison_goes_on(start: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out"
    command = words(start, output, "--updates", 1, objective="mlm")
    mlsm(*command)
    steps = read_json(output / "steps.json")
    del steps["quality"]
    (output / "steps.json").write_text(json.dumps(steps), encoding="utf-8")
    for name in ("quality.json", "held_out.txt"):
        (output / name).unlink()
    capsys.readouterr()
    mlsm(*command)
    printed = capsys.readouterr().out
    assert "training:" not in printed
    assert "retrieval is left out: the text has" in printed
    assert (output / "quality.json").exists()


def test_a_training_goes_on_with_the_batches_that_it_began_with(start: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out"
    command = words(start, output, "--updates", 1, objective="mlm")
    mlsm(*command, "--batch-size", 2, "--accumulate", 3)
    capsys.readouterr()
    size = command.index("--batch-size")
    mlsm(*command[:size], *command[size + 2 :])
    assert "training:" not in capsys.readouterr().out
    recipe = read_json(output / "steps.json")["training"]["signature"]["settings"]["training"]
    assert (recipe["batch_size"], recipe["accumulate"]) == (2, 3)


@pytest.mark.slow
def test_a_training_of_an_earlier_version_keeps_the_attention_dropout_of_its_model(
    start: Path, tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "out"
    command = words(start, output, "--updates", 1, objective="mlm")
    with pytest.MonkeyPatch.context() as patch:
        sized = AdaptationSetup._sized

        def sized_earlier(self: AdaptationSetup, training: TrainingSettings) -> TrainingSettings:
            return replace(sized(self, training), attention_dropout=None)

        patch.setattr(AdaptationSetup, "_sized", sized_earlier)
        mlsm(*command)
    assert "attention_dropout" not in StepRecord(output / "steps.json").settings_of("training")["training"]
    capsys.readouterr()
    mlsm(*command)
    assert "training:" not in capsys.readouterr().out
    mlsm(*command, "--attention-dropout", 0)
    assert "training:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("step", "settings", "objective"),
    [("before", {"objective": "taco"}, "taco"), ("dictionary", {"layer": 2}, "mlsm+mlm")],
)
def test_a_folder_of_another_objective_needs_it_named(
    start: Path, tmp_path: Path, capsys: Capture, step: str, settings: dict[str, Any], objective: str
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    record = {step: {"signature": {"settings": settings}, "done": True}}
    (output / "steps.json").write_text(json.dumps(record), encoding="utf-8")
    command = words(start, output, objective="mlm")
    place = command.index("--objective")
    line = failing_mlsm(capsys, *command[:place], *command[place + 2 :])
    assert f"was begun with --objective {objective}, and the default is mlm: pass --objective {objective} to" in line
    assert read_json(output / "steps.json") == record


@pytest.mark.slow
def test_a_new_model_is_compared_with_its_teacher(
    start: Path, english_text: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    mlsm(
        *words(
            start, tmp_path / "out", "--student", "1x64", "--updates", 1, "--valid", english_text[1], objective="mlm"
        )
    )
    quality = read_json(tmp_path / "out" / "quality.json")
    assert list(quality["models"]) == ["teacher", "student"]
    assert quality["notes"] == []
    assert "| teacher | " in (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")


def test_cpu_is_for_learning_and_coding_too(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def spied(function: Any) -> Any:
        def spy(*args: Any, **options: Any) -> Any:
            found.append(options["settings"].device)
            return function(*args, **options)

        return spy

    for name in ("learn_from_sequences", "encode_sequences"):
        monkeypatch.setattr(adaptation, name, spied(getattr(adaptation, name)))
    mlsm(*words(start, tmp_path / "out", "--updates", 1))
    assert found == ["cpu"] * 3


@pytest.mark.parametrize(
    "objective", ["mlm", pytest.param("mlsm", marks=pytest.mark.slow), pytest.param("taco", marks=pytest.mark.slow)]
)
def test_a_model_without_a_head_gets_a_new_one(
    start: Path, tmp_path: Path, objective: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("bert", start / "text.txt", tmp_path / "headless")
    folders = [tmp_path / "one", tmp_path / "two"]
    for output in folders:
        _, _, *options = words(start, output, "--updates", 2, objective=objective)
        caplog.clear()
        mlsm("adapt", model, *options)
        said = [record.message for record in caplog.records if "has no masked-LM head" in record.message]
        line = f"{model} has no masked-LM head; a new one is initialized at random, which this training trains"
        assert said == ([] if objective == "mlsm" else [line])
    weights = [load_file(output / "model" / "model.safetensors") for output in folders]
    assert any(name.startswith("cls.") for name in weights[0]) == (objective != "mlsm")
    assert all(torch.equal(values, weights[1][name]) for name, values in weights[0].items())


@pytest.mark.parametrize("vocabulary", [pytest.param((), marks=pytest.mark.slow), ("--vocab-size", 300)])
def test_a_student_has_a_size_and_maybe_a_vocabulary_of_its_own(
    start: Path, tmp_path: Path, vocabulary: tuple[object, ...]
) -> None:
    teacher = make_model("bert", start / "text.txt", tmp_path / "headless")
    write_modules(teacher, width=32, max_length=20, normalized=True)
    # a small rate of Muon, so that the losses fall whatever codes the random teacher gives
    rates = ("--updates", 120, "--evaluate-every", 60, "--learning-rate", 4e-3, "--muon-learning-rate", 0.002)
    _, _, *options = words(start, tmp_path / "out", *rates, "--valid", start / "valid.txt")
    objective = options.index("--objective")
    del options[objective : objective + 2]  # what is left is the default
    mlsm("adapt", teacher, "--student", "1x64", *vocabulary, *options)
    folder = tmp_path / "out" / "model"
    model, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert (set(info["missing_keys"]), set(info["unexpected_keys"])) == (set(), set())
    assert (model.config.model_type, model.config.hidden_size) == ("modernbert", 64)
    assert [module["type"].split(".")[-1] for module in modules_of(folder)] == ["Transformer", "Pooling", "Normalize"]
    assert read_json(folder / "1_Pooling" / "config.json")["word_embedding_dimension"] == 64
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = 300 if vocabulary else len(AutoTokenizer.from_pretrained(teacher))
    assert model.config.vocab_size == len(tokenizer) == size
    figures = figures_in(tmp_path / "out")
    for name in ("kl", "mlm_loss"):
        assert figures["after"][name] < figures["before"][name]
    training = StepRecord(tmp_path / "out" / "steps.json").settings_of("training")
    assert training["training"]["optimizer"] == "muon"
    assert (training["masking"]["mask_prob"], training["masking"]["mask_prob_end"]) == (0.3, 0.15)


@pytest.mark.slow
def test_the_vectors_of_a_model_that_is_used_for_them_are_kept(start: Path, tmp_path: Path, capsys: Capture) -> None:
    model = tmp_path / "model"
    shutil.copytree(start / "model", model)
    write_modules(model, width=32, max_length=20)
    lines = (start / "text.txt").read_text(encoding="utf-8").splitlines()[:40]
    before = open_sentence_encoder(model).vectors(lines)
    changes = {}
    for name, more in (("kept", ()), ("changed", ("--keep-vectors", 0))):
        output = tmp_path / name
        rates = ("--updates", 40, "--evaluate-every", 20, "--learning-rate", 4e-3)
        _, _, *options = words(start, output, *rates, *more, objective="mlm")
        mlsm("adapt", model, *options)
        assert ("are kept, with a weight of 3;" in capsys.readouterr().out) is (name == "kept")
        changes[name] = float(np.square(open_sentence_encoder(output / "model").vectors(lines) - before).sum())
        training = StepRecord(output / "steps.json").settings_of("training")
        assert training["keep_weight"] == (3.0 if name == "kept" else 0.0)
        card = (output / "model" / "README.md").read_text(encoding="utf-8")
        assert ("keeps the hidden states of unmasked tokens" in card) is (name == "kept")
        figures = figures_in(output)
        assert figures["after"]["mlm_loss"] < figures["before"]["mlm_loss"]
    assert changes["kept"] < 0.5 * changes["changed"]
    for option in (("--objective", "taco"), ("--student", "1x64", "--objective", "mlm")):
        assert "keep" in failing_mlsm(capsys, "adapt", model, *options, *option, "--keep-vectors", 2)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--student", "1x64", "--vocab-size", 300)])
def test_hidden_states_are_learned_without_a_dictionary(
    start: Path, tmp_path: Path, capsys: Capture, more: tuple[object, ...]
) -> None:
    output = tmp_path / "out"
    rates = ("--updates", 60, "--evaluate-every", 30, "--learning-rate", 4e-3, "--mask-prob", 0.3)
    command = words(start, output, *more, *rates, "--layer", 1, objective="regression+mlm")
    mlsm(*command)
    figures = figures_in(output)
    for name in ("state_loss", "mlm_loss"):
        assert figures["after"][name] < figures["before"][name]
    assert 0.7 < figures["before"]["state_loss"] < 1.6
    _, info = AutoModelForMaskedLM.from_pretrained(output / "model", output_loading_info=True)
    assert (set(info["missing_keys"]), set(info["unexpected_keys"])) == (set(), set())
    assert not list(output.glob("*.codes"))
    assert "regression of another model's hidden states" in (output / "model" / "README.md").read_text("utf-8")
    first = (output / "model" / "model.safetensors").read_bytes()
    capsys.readouterr()
    mlsm(*command)
    assert "training:" not in capsys.readouterr().out
    mlsm(*command, "--layer", 2)  # another layer, another training, with the same text
    assert (output / "model" / "model.safetensors").read_bytes() != first
    assert not list(output.glob("tokens.old"))


@pytest.mark.slow
def test_codes_computed_online_are_those_of_the_store(start: Path, tmp_path: Path, capsys: Capture) -> None:
    for source in ("store", "online"):
        mlsm(*words(start, tmp_path / source, "--latent-top", 2, "--latent-source", source))
    stored, online = (figures_in(tmp_path / source) for source in ("store", "online"))
    for when in ("before", "after"):
        assert online[when] == pytest.approx(stored[when], rel=2e-3)
    assert not list((tmp_path / "online").glob("*.codes"))
    capsys.readouterr()
    mlsm(*words(start, tmp_path / "online", "--latent-top", 3, "--latent-source", "online"))
    printed = capsys.readouterr().out
    assert "training:" in printed  # other codes
    assert "dictionary:" not in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--vocab-size", 300), "--vocab-size needs --student"),
        (("--student", "big"), "--student is LAYERSxWIDTH, such as 4x256"),
        (("--student", "1x64", "--max-length", 600), "--max-length 600 is more than the 70 positions of "),
        (("--student", "1x64", "--vocab-size", 20), "--vocab-size must be at least 100, got 20"),
    ],
)
def test_a_student_that_cannot_be_is_one_line(
    start: Path, tmp_path: Path, capsys: Capture, more: tuple[object, ...], message: str
) -> None:
    assert message in failing_mlsm(capsys, *words(start, tmp_path / "out", *more))
    assert not (tmp_path / "out" / "tokens").exists()


def test_a_student_has_no_other_auxiliary_model(start: Path, tmp_path: Path, capsys: Capture) -> None:
    more = ("--student", "1x64", "--auxiliary", start / "model")
    line = failing_mlsm(capsys, *words(start, tmp_path / "out", *more))
    assert "with --student, MODEL itself is the auxiliary model; leave --auxiliary out" in line


@pytest.mark.parametrize("option", ["--text", "--valid"])
def test_a_table_without_its_column_is_refused(start: Path, tmp_path: Path, capsys: Capture, option: str) -> None:
    table = tmp_path / "table.CSV.gz"
    table.write_bytes(gzip.compress(b"text,label\nthe name,1\n"))
    line = failing_mlsm(capsys, *words(start, tmp_path / "out"), option, table)
    assert "table.CSV.gz is a table, whose header and other columns would be read as text" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_text_may_be_a_column_or_a_dataset(start: Path, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "train.jsonl"
    lines = (start / "text.txt").read_text(encoding="utf-8").split("\n\n")
    file.write_text("".join(f"{json.dumps({'text': text, 'n': 1})}\n" for text in lines), encoding="utf-8")
    _, model, _, _, *options = words(start, tmp_path / "out", "--updates", 1, objective="mlm")
    mlsm("adapt", model, "--text", file, "--column", "text", *options)
    documents = (tmp_path / "out" / "documents.txt").read_text(encoding="utf-8")
    assert documents.split() == (start / "text.txt").read_text(encoding="utf-8").split()
    options[1] = tmp_path / "second"
    mlsm("adapt", model, "--dataset", tmp_path / "data", *options)
    assert (tmp_path / "second" / "documents.txt").read_text(encoding="utf-8") == documents
    with file.open("a", encoding="utf-8") as data:
        data.write('{"text": "a new document", "n": 2}\n')
    mlsm("adapt", model, "--dataset", tmp_path / "data", *options)
    changed = (tmp_path / "second" / "documents.txt").read_text(encoding="utf-8")
    assert changed == f"{documents}a new document\n\n"
    for text in ((), ("--dataset", tmp_path / "data", "--text", file)):
        assert "pass either files with --text, or --dataset" in failing_mlsm(capsys, "adapt", model, *text, *options)


@pytest.mark.parametrize("objective", ["mlsm", "npm", "distill-vectors"])
def test_a_head_that_was_not_trained_is_not_written(
    start: Path, tmp_path: Path, capsys: Capture, objective: str
) -> None:
    teacher = ("--teacher", start / "model") if objective == "distill-vectors" else ()
    command = words(start, tmp_path / "out", "--updates", 2, *teacher, objective=objective)
    mlsm(*command)
    folder, pairs = tmp_path / "out" / "model", tmp_path / "pairs.jsonl"
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"] == ["BertModel"]
    assert not [name for name in load_file(folder / "model.safetensors") if name.startswith("cls.")]
    pairs.write_text('{"sentence_good": "a name", "sentence_bad": "name a"}\n', encoding="utf-8")
    line = failing_mlsm(capsys, "evaluate", "pairs", "--checkpoint", folder, "--input", pairs)
    assert "was saved without a masked-LM head" in line


def test_a_folder_with_another_model_is_refused_first(start: Path, tmp_path: Path, capsys: Capture) -> None:
    there = shutil.copytree(start / "model", tmp_path / "out" / "model")
    before = {path.name: path.read_bytes() for path in there.iterdir()}
    line = failing_mlsm(capsys, *words(start, tmp_path / "out", objective="mlm"))
    assert f"{there} holds another model already (config.json); choose another --output" in line
    assert {path.name: path.read_bytes() for path in there.iterdir()} == before
    assert not (tmp_path / "out" / "steps.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "deberta-v2"])
def test_text_beside_masks_is_read_as_it_was_trained_on(
    start: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(kind, start / "text.txt", tmp_path / "model", kind=AutoModelForMaskedLM)
    _, _, *options = words(start, tmp_path / "out", "--updates", 1, objective="mlm")
    mlsm("adapt", model, *options)
    own, written = HuggingFaceTokenizer(model), AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    for line in (start / "text.txt").read_text(encoding="utf-8").splitlines():
        for variant in masked_lines(line, written.mask_token):
            assert written(variant, add_special_tokens=False)["input_ids"] == own.ids_with_masks(
                variant, written.mask_token
            )
    _, _, *again = words(start, tmp_path / "again", "--updates", 1, objective="mlm")
    mlsm("adapt", tmp_path / "out" / "model", *again)
    assert "with other ids beside the mask" not in caplog.text


@pytest.mark.slow
def test_deberta_of_version_1_is_trained_in_float32(start: Path, tmp_path: Path, capsys: Capture) -> None:
    model = make_model("deberta", start / "text.txt", tmp_path / "model", kind=AutoModelForMaskedLM)
    _, _, *options = words(start, tmp_path / "out", "--updates", 1, objective="mlsm+mlm")
    line = failing_mlsm(capsys, "adapt", model, *options, "--bf16", "on")
    assert "a model of type deberta overflows in bfloat16; pass --bf16 off" in line
    mlsm("adapt", model, *options, "--bf16", "auto")
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("objective", "more", "message"),
    [
        ("taco", ("--temperature", 1), "--temperature is only allowed with --objective distill"),
        ("taco", ("--auxiliary", "other"), "--auxiliary is only allowed with --objective mlsm or mlsm+mlm or"),
        ("mlm", ("--latent-top", 3), "--latent-top is only allowed with --objective mlsm or mlsm+mlm"),
        ("mlm", ("--atoms", 9, "--lambda", 0.1), "--atoms, --lambda: only --objective mlsm and mlsm+mlm take"),
        ("mlm", ("--layer", 1), "--layer: only --objective mlsm, mlsm+mlm and regression+mlm read a layer"),
        ("regression+mlm", ("--atoms", 9), "--atoms: only --objective mlsm and mlsm+mlm take options for making codes"),
        ("regression+mlm", ("--latent-top", 3), "--latent-top is only allowed with --objective mlsm or mlsm+mlm"),
        ("regression+mlm", ("--layer", 9), "--layer 9 is out of range"),
        ("mlm", ("--muon-learning-rate", 1), "--muon-learning-rate needs --optimizer muon"),
        ("npm", ("--whole-words",), "of the options for masks, --objective npm only takes --mask-prob"),
        ("distill-vectors", ("--mask-prob", 0.3, "--teacher", "other"), "takes no options for masks"),
    ],
)
def test_an_option_of_another_objective_is_refused(
    start: Path, tmp_path: Path, capsys: Capture, objective: str, more: tuple[object, ...], message: str
) -> None:
    assert message in failing_mlsm(capsys, *words(start, tmp_path / "out", *more, objective=objective))
    assert not (tmp_path / "out").exists()


def test_several_gpus_need_several_processes(
    start: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(TrainingArguments, "n_gpu", 2)
        line = failing_mlsm(capsys, *words(start, tmp_path / "out", objective="mlm"))
    assert "this process sees 2 GPUs; start one for each with torchrun --nproc-per-node 2, or make only one" in line
    assert not (tmp_path / "out" / "steps.json").exists()


@pytest.mark.slow
def test_a_corrected_command_is_not_refused(start: Path, tmp_path: Path, capsys: Capture) -> None:
    for wrong in (("--layer", 9), ("--atoms", 100_000)):
        failing_mlsm(capsys, *words(start, tmp_path / "out", *wrong))
    empty = tmp_path / "empty.txt"
    empty.write_text("one line", encoding="utf-8")
    failing_mlsm(capsys, *words(start, tmp_path / "out", "--text", empty))
    mlsm(*words(start, tmp_path / "out"))
    assert figures_in(tmp_path / "out")["after"]


def test_the_last_line_can_be_pasted(start: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / 'the writer\'s "own" $HOME'
    mlsm(*words(start, output, "--updates", 1, objective="mlm"))
    python, flag, code = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert (python, flag) == ("python", "-c")
    exec(code, {})
    guesses = capsys.readouterr().out.splitlines()
    assert len(guesses) == 5
    assert not any("[MASK]" in guess for guess in guesses)


def test_a_model_without_masked_lm_is_used_for_vectors(start: Path, tmp_path: Path, capsys: Capture) -> None:
    mlsm(*words(start, tmp_path / "out", "--updates", 1, "--valid", start / "valid.txt", objective="npm"))
    _, _, code = shlex.split(capsys.readouterr().out.splitlines()[-1])
    exec(code, {})
    cosine = float(capsys.readouterr().out.removeprefix("tensor(").rstrip(")\n"))
    assert -1 <= cosine <= 1


@pytest.mark.slow
def test_npm_holds_out_two_sequences_of_a_short_text(start: Path, tmp_path: Path, capsys: Capture) -> None:
    short, one = tmp_path / "short.txt", tmp_path / "one.txt"
    lines = (start / "text.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    short.write_text("".join(lines[:20]), encoding="utf-8")
    one.write_text("one line\n", encoding="utf-8")
    command = words(start, tmp_path / "out", "--updates", 1, "--text", short, objective="npm")
    line = failing_mlsm(capsys, *command, "--valid", one)
    assert "the text of --valid is only 1 sequence, and npm finds spans in other sequences" in line
    mlsm(*command)
    assert (tmp_path / "out" / "model").exists()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("objective", "figure"),
    [
        ("mlm", "mlm_loss"),
        pytest.param("taco", "contrastive_loss", marks=SLOW),
        pytest.param("mlsm", "kl", marks=SLOW),
        pytest.param("npm", "start_loss", marks=SLOW),
    ],
)
def test_every_objective_lowers_its_loss(start: Path, tmp_path: Path, objective: str, figure: str) -> None:
    mlsm(*words(start, tmp_path / "out", "--valid", start / "valid.txt", objective=objective))
    figures = figures_in(tmp_path / "out")
    assert figures["after"][figure] < figures["before"][figure]
    assert (tmp_path / "out" / "dictionary").exists() == (objective == "mlsm")


@pytest.mark.slow
def test_muon_trains_too(start: Path, tmp_path: Path) -> None:
    command = words(start, tmp_path / "out", "--valid", start / "valid.txt", objective="mlm")
    mlsm(*command, "--optimizer", "muon")
    figures = figures_in(tmp_path / "out")
    assert figures["after"]["mlm_loss"] < figures["before"]["mlm_loss"]
    assert StepRecord(tmp_path / "out" / "steps.json").settings_of("training")["training"]["optimizer"] == "muon"


def test_a_dry_run_says_what_would_be_pushed(start: Path, tmp_path: Path, capsys: Capture) -> None:
    command = words(start, tmp_path / "out", "--updates", 1, objective="mlm")
    assert "--dry-run and --private need --push-to-hub" in failing_mlsm(capsys, *command, "--dry-run")
    line = failing_mlsm(capsys, *command, "--push-to-hub", "small", "--dry-run")
    assert "small is no name of a repository: OWNER/NAME" in line
    assert not (tmp_path / "out").exists()
    mlsm(*command, "--push-to-hub", "someone/small", "--dry-run")
    number = len(list((tmp_path / "out" / "model").iterdir()))
    assert f"main: {number} files, 0." in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_the_model_is_pushed_once(start: Path, tmp_path: Path) -> None:
    command = words(start, tmp_path / "out", "--updates", 1, "--push-to-hub", REPO, objective="mlm")
    with hub_server() as (endpoint, there):
        assert mlsm_with_hub(endpoint, *command)[-1] == "main: pushed"
        files = {file.name: file.read_bytes() for file in (tmp_path / "out" / "model").iterdir()}
        assert there.branches["main"] == files
        assert mlsm_with_hub(endpoint, *command)[-1] == "main: up to date"
        there.branches["main"].pop("config.json")
        assert mlsm_with_hub(endpoint, *command)[-1] == "main: pushed"
        stale = {"latent_head.safetensors": b"", "modules.json": b"", "1_Pooling/config.json": b""}
        beside = dict.fromkeys(
            (".gitattributes", "figures/curves.png", "original/tokenizer.model", "2024_Results/plot.png", "vocab.md"),
            b"",
        )
        there.branches["main"] |= stale | beside  # of another model, and of the repository
        deleted = "1_Pooling/config.json, latent_head.safetensors, modules.json"
        assert mlsm_with_hub(endpoint, *command)[-1] == f"main: pushed; deleted: {deleted}"
        assert there.branches["main"] == files | beside
        assert mlsm_with_hub(endpoint, *command)[-1] == "main: up to date"


@pytest.mark.slow
def test_low_rank_updates_are_merged(start: Path, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("peft")
    output = tmp_path / "out"
    command = words(start, output, "--valid", start / "valid.txt", "--lora", 4, objective="mlm")
    mlsm(*command)
    figures = figures_in(output)
    assert figures["after"]["mlm_loss"] < figures["before"]["mlm_loss"]
    stock = load_file(start / "model" / "model.safetensors")
    adapted = load_file(output / "model" / "model.safetensors")
    assert stock.keys() <= adapted.keys() <= stock.keys() | {"cls.predictions.decoder.bias"}
    changed = {name for name, values in stock.items() if not torch.equal(values, adapted[name])}
    assert "bert.encoder.layer.0.attention.self.query.weight" in changed
    assert "bert.embeddings.word_embeddings.weight" not in changed
    assert "LoRA: rank 4, merged" in (output / "model" / "README.md").read_text(encoding="utf-8")
    weights = (output / "model" / "model.safetensors").read_bytes()
    (output / "model" / "model.safetensors").unlink()  # resumes from the last checkpoint
    mlsm(*command)
    assert (output / "model" / "model.safetensors").read_bytes() == weights
    for more, message in (
        (("--optimizer", "muon"), "--lora is trained with --optimizer adamw"),
        (("--student", "1x64"), "--lora keeps what a model knows"),
    ):
        other = ("--optimizer", "adamw") if "--student" in more else ()
        assert message in failing_mlsm(capsys, *command, *more, *other)


REGRESSION = ("--objective", "regression+mlm", "--student", "1x64")


@pytest.mark.parametrize(
    ("layer", "message"), [(9, "--layer 9 is out of range"), (-1, "--layer must be at least 0, got -1")]
)
def test_a_layer_that_is_not_there_is_refused_before_a_tokenizer_is_learned(
    start: Path, tmp_path: Path, capsys: Capture, layer: int, message: str
) -> None:
    student = ("--student", "1x64", "--vocab-size", 300, "--layer", layer)
    assert message in failing_mlsm(capsys, *words(start, tmp_path / "out", *student, objective="regression+mlm"))
    assert not (tmp_path / "out" / "tokens").exists()


@pytest.mark.slow
@pytest.mark.parametrize("more", [("--optimizer", "muon"), ("--student", "1x64"), REGRESSION])
@pytest.mark.usefixtures("warm_python")
def test_killed_runs_resume_to_the_same_weights(start: Path, tmp_path: Path, more: tuple[object, ...]) -> None:
    objective = "regression+mlm" if more is REGRESSION else "mlsm+mlm"
    mlsm(*words(start, tmp_path / "whole", *more, objective=objective))
    wanted = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    rng = random.Random(3)
    for number in range(2):
        output = tmp_path / f"killed{number}"
        for _ in range(2):
            process = start_mlsm(*words(start, output, *more, objective=objective), start_new_session=True)
            time.sleep(rng.uniform(0.5, 6))
            process.kill()
            process.communicate()
        mlsm(*words(start, output, *more, objective=objective))
        found = load_file(output / "model" / "model.safetensors")
        assert max(float((values - wanted[name]).abs().max()) for name, values in found.items()) < 1e-5
        assert not list(output.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["mlm", "mlsm+mlm", "regression+mlm"])
@pytest.mark.usefixtures("warm_python")
def test_ranks_of_torchrun_code_and_train_together(start: Path, tmp_path: Path, objective: str) -> None:
    mlsm(*words(start, tmp_path / "one", objective=objective))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start_mlsm(*words(start, tmp_path / "two", "--batch-size", 2, objective=objective), launcher=launcher)
    printed, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert printed.count("held-out mlm_loss: ") == printed.count("model: ") == 1
    one, two = (figures_in(tmp_path / name) for name in ("one", "two"))
    # dropout differs; so does the autoencoder, whose training amplifies the rounding of a thread each
    for when in ("before", "after"):
        assert two[when] == pytest.approx(one[when], rel=0.05)


@pytest.mark.slow
def test_another_learning_rate_trains_again_on_the_same_codes(start: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out"
    mlsm(*words(start, output, "--updates", 2))
    first = (output / "model" / "model.safetensors").read_bytes()
    codes = {path: path.stat().st_mtime_ns for path in (output / "train.codes").iterdir()}
    capsys.readouterr()
    mlsm(*words(start, output, "--updates", 2, "--learning-rate", 1e-4))
    printed = capsys.readouterr().out
    assert f"{output / 'model'} was made with other settings or inputs, or was changed; it is now" in printed
    assert {path: path.stat().st_mtime_ns for path in (output / "train.codes").iterdir()} == codes
    assert (output / "model.old" / "model.safetensors").read_bytes() == first
    assert (output / "model" / "model.safetensors").read_bytes() != first


@pytest.mark.slow
def test_a_dictionary_is_learned_from_five_passes_at_most(start: Path, tmp_path: Path) -> None:
    mlsm(*words(start, tmp_path / "out", "--updates", 1, "--tokens", 10**6))
    text = TokenSequences(tmp_path / "out" / "tokens")
    learned_from = read_json(tmp_path / "out" / "dictionary" / "meta.json")["tokens"]
    assert 4 * text.num_tokens < learned_from <= 5 * text.num_tokens


@pytest.mark.slow
def test_what_only_decides_speed_changes_nothing(start: Path, tmp_path: Path, capsys: Capture) -> None:
    mlsm(*words(start, tmp_path / "out", "--updates", 1))
    capsys.readouterr()
    mlsm(*words(start, tmp_path / "out", "--updates", 1, "--threads", 2, "--workers", 1, "--max-unk-rate", 0.5))
    assert "training:" not in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("*.old"))


@pytest.mark.slow
def test_a_finished_folder_may_lose_what_made_the_model(start: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    mlsm(*words(start, output, "--updates", 1))
    for name in ("checkpoints", "tokens", "train.codes", "valid.codes"):
        shutil.rmtree(output / name)
    mlsm(*words(start, output, "--updates", 1))
    assert not (output / "tokens").exists()
    (output / "model" / "config.json").unlink()  # the model must be whole
    mlsm(*words(start, output, "--updates", 1))
    assert (output / "tokens").exists()
    assert (output / "model" / "config.json").exists()


def test_a_folder_of_an_earlier_version_is_one_line(start: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "plan.json").write_text("{}", encoding="utf-8")
    line = failing_mlsm(capsys, *words(start, tmp_path / "out", objective="mlm"))
    assert "was begun by an earlier version, which recorded its steps in plan.json; choose another --output" in line


@pytest.mark.slow
def test_models_are_opened_and_read_once(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: Counter[str] = Counter()
    hashed: Counter[Path] = Counter()

    def load(folder: Path, *args: Any, kind: str = "AutoModel", **options: Any) -> Any:
        loads[kind] += 1
        return load_library_model(folder, *args, kind=kind, **options)

    def digest_of(paths: Any) -> str:
        hashed.update(Path(path) for path in paths)
        return sha256_of(paths)

    sha256_of = atomic_files._sha256_of
    monkeypatch.setattr(hf_encoder, "load_library_model", load)
    monkeypatch.setattr(atomic_files, "_sha256_of", digest_of)
    monkeypatch.setattr(atomic_files, "STABLE_NS", 0)
    monkeypatch.setattr(atomic_files, "_digests", {})
    mlsm(*words(start, tmp_path / "out", "--updates", 1))
    assert loads == {"AutoModel": 1, "AutoModelForMaskedLM": 3}  # two of them to compare the models
    assert hashed[start / "model" / "model.safetensors"] == 1
    assert hashed[start / "text.txt"] == 1


def test_another_number_of_processes_is_refused(
    start: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = words(start, tmp_path / "out", "--updates", 1, objective="mlm")
    mlsm(*command)
    record = tmp_path / "out" / "steps.json"
    assert StepRecord(record).settings_of("training")["processes"] == 1
    with monkeypatch.context() as environment:
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
            environment.setenv(name, value)
        mlsm(*command)  # it is finished
        steps = json.loads(record.read_text(encoding="utf-8"))
        steps["training"]["done"] = False
        record.write_text(json.dumps(steps), encoding="utf-8")
        line = failing_mlsm(capsys, *command)
    assert f"the number of processes is 1 in {tmp_path / 'out'} and 2 now; start 1 (several: with torchrun" in line


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--layer", 9), "--layer 9 is out of range"),
        (("--max-length", 200), "--max-length 200 is more than the 70 positions of "),
        (("--mask-prob", 0), "--mask-prob must be above 0 and at most 1, got 0"),
        (("--epochs", 1), "pass --epochs or --updates, not both"),
        (("--updates", 0), "--updates must be positive"),
        (("--learning-rate", 0), "--learning-rate must be positive"),
        (("--text", "no-such-file"), "no-such-file"),
        (("--lambda", 0.1), "--lambda cannot be used with coder topk"),
        (("--k", 21), "k"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_made(
    start: Path, tmp_path: Path, capsys: Capture, more: tuple[object, ...], message: str
) -> None:
    line = failing_mlsm(capsys, *words(start, tmp_path / "out", *more))
    assert message in line
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.slow
def test_taco_without_pairs_is_one_line_and_the_corrected_command_runs(
    start: Path, tmp_path: Path, capsys: Capture
) -> None:
    command = words(start, tmp_path / "out", "--updates", 1, objective="taco")
    for more in (("--max-length", 3), ("--batch-size", 1)):
        line = failing_mlsm(capsys, *command, *more)
        assert "only 0 of the anchors of train_dataset have a positive and negatives; an anchor needs" in line
        assert not figures_in(tmp_path / "out")["before"]
    mlsm(*command)
    figures = figures_in(tmp_path / "out")
    assert figures["after"]["contrastive_loss"] > 0


def test_models_that_do_not_belong_together_are_one_line(start: Path, tmp_path: Path, capsys: Capture) -> None:
    other = make_model("roberta", start / "text.txt", tmp_path / "other", kind=AutoModelForMaskedLM)
    line = failing_mlsm(capsys, *words(start, tmp_path / "out", "--auxiliary", other))
    assert "has another vocabulary than" in line
    make_tokenizer("byte_level", start / "text.txt", tmp_path / "mixed")
    model = make_model("bert", start / "text.txt", tmp_path / "mixed-model", kind=AutoModelForMaskedLM, vocab_size=2000)
    line = failing_mlsm(capsys, "adapt", model, "--text", start / "text.txt", "--output", tmp_path / "out")
    assert "embeddings" in line
    empty = tmp_path / "empty.txt"
    empty.write_text("\n", encoding="utf-8")
    line = failing_mlsm(capsys, "adapt", start / "model", "--text", empty, "--output", tmp_path / "out")
    assert "no text, only blank lines" in line
    short = tmp_path / "short.txt"
    short.write_text("one line\n", encoding="utf-8")
    line = failing_mlsm(capsys, "adapt", start / "model", "--text", short, "--output", tmp_path / "out")
    assert "too few to hold some out" in line


@pytest.mark.slow
def test_a_student_comes_closer_to_its_teacher(start: Path, tmp_path: Path, capsys: Capture) -> None:
    teacher = make_model("bert", start / "text.txt", tmp_path / "teacher", kind=AutoModelForMaskedLM)
    for path in (start / "model").glob("*token*"):  # the library does not train a tokenizer twice the same
        shutil.copy(path, teacher)
    model = AutoModelForMaskedLM.from_pretrained(teacher)
    torch.manual_seed(3)
    for name, values in model.named_parameters():
        if values.dim() > 1 and "position" not in name:
            torch.nn.init.normal_(values, std=0.2)
    model.save_pretrained(teacher)
    long = ("--updates", 30, "--evaluate-every", 15, "--learning-rate", 4e-3)
    command = words(start, tmp_path / "out", *long, "--teacher", teacher, objective="distill")
    mlsm(*command)
    figures = figures_in(tmp_path / "out")
    assert figures["after"]["teacher_kl"] < 0.9 * figures["before"]["teacher_kl"]
    assert "held-out teacher_kl: " in capsys.readouterr().out
    _, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "out" / "model", output_loading_info=True)
    assert (set(info["missing_keys"]), set(info["unexpected_keys"])) == (set(), set())


def test_a_teacher_belongs_to_distillation(start: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out"
    for objective, more in (("distill", ()), ("mlm", ("--teacher", start / "model"))):
        line = failing_mlsm(capsys, *words(start, output, *more, objective=objective))
        assert "--objective distill and distill-vectors need --teacher, and no other objective takes one" in line
    (tmp_path / "other.txt").write_text("Quite another text, from which other pieces come. " * 50)
    other = make_model("bert", tmp_path / "other.txt", tmp_path / "other", kind=AutoModelForMaskedLM)
    line = failing_mlsm(capsys, *words(start, output, "--teacher", other, objective="distill"))
    assert f"the teacher {other} has another vocabulary than" in line
    headless = make_model("bert", start / "text.txt", tmp_path / "headless")
    for path in (start / "model").glob("*token*"):
        shutil.copy(path, headless)
    line = failing_mlsm(capsys, *words(start, output, "--teacher", headless, objective="distill"))
    assert "was saved without a masked-LM head" in line
    assert not output.exists()


@pytest.mark.slow
@pytest.mark.parametrize("valid", [False, True])
def test_a_student_learns_sentence_vectors(valid: bool, start: Path, tmp_path: Path, capsys: Capture) -> None:
    teacher = make_model("roberta", start / "text.txt", tmp_path / "teacher")
    texts = ("--valid", start / "valid.txt") if valid else ()
    long = ("--updates", 30, "--evaluate-every", 15, "--learning-rate", 4e-3, "--teacher", teacher, *texts)
    command = words(start, tmp_path / "out", *long, objective="distill-vectors")
    mlsm(*command)
    figures = figures_in(tmp_path / "out")
    assert figures["after"]["vector_loss"] < 0.7 * figures["before"]["vector_loss"]
    printed = capsys.readouterr().out
    assert "held-out vector_loss: " in printed
    assert "feature-extraction" in printed
    _, info = AutoModel.from_pretrained(tmp_path / "out" / "model", add_pooling_layer=False, output_loading_info=True)
    assert (set(info["missing_keys"]), set(info["unexpected_keys"])) == (set(), set())
    narrow = make_model("bert", start / "text.txt", tmp_path / "narrow", hidden_size=16)
    line = failing_mlsm(capsys, *words(start, tmp_path / "new", "--teacher", narrow, objective="distill-vectors"))
    assert f"the model is 32 wide, and the vectors of the teacher {narrow} are only 16 wide" in line
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("valid", [False, True])
def test_a_narrow_student_learns_the_vectors_of_the_model(
    valid: bool, start: Path, tmp_path: Path, capsys: Capture
) -> None:
    teacher = make_model("roberta", start / "text.txt", tmp_path / "teacher", hidden_size=96)
    output = tmp_path / "out"
    texts = ("--valid", start / "valid.txt") if valid else ()
    options = ("--objective", "distill-vectors", "--text", start / "text.txt", *texts, "--output", output)
    command = ("adapt", teacher, "--student", "1x64", "--vocab-size", 300, *options, "--updates", 30)
    mlsm(*command)
    figures = figures_in(output)
    assert figures["after"]["vector_loss"] < 0.9 * figures["before"]["vector_loss"]
    assert "it learns 64 of 96 directions" in capsys.readouterr().out
    directions = np.load(output / "directions.npy")
    np.testing.assert_allclose(directions.T @ directions, np.eye(64), atol=1e-5)
    vectors = open_sentence_encoder(teacher).vectors(start.joinpath("text.txt").read_text().split("\n")[:5])
    reduced = vectors @ directions @ directions.T
    assert np.square(reduced - vectors).sum() < 0.2 * np.square(vectors).sum()
    card = (output / "model" / "README.md").read_text(encoding="utf-8")
    assert "- teacher: `teacher`" in card
    assert "- directions of the teacher's vectors: 64, those" in card
    weights = (output / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(output / "model")
    (output / "quality.json").unlink()
    before = (output / "directions.npy").stat().st_mtime_ns
    mlsm(*command)
    assert (output / "model" / "model.safetensors").read_bytes() == weights
    assert (output / "directions.npy").stat().st_mtime_ns == before


@pytest.mark.slow
def test_the_trainer_and_the_autoencoder_log_for_tensorboard(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mlsm(*words(start, tmp_path / "out", "--updates", 60, "--evaluate-every", 30, "--report-to", "tensorboard"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    runs = tmp_path / "out" / "logs"
    assert {"explained_variance", "dead", "l0"} < set(scalars(runs / "dictionary"))
    assert len(list((runs / "training").iterdir())) == 1  # a second file of the same second would replace it
    logged = scalars(runs / "training")
    assert set(logged["eval/kl"]) == {0, 30, 60}
    assert {f"eval/{name}" for name in ("kl", "mlm_loss", "masked_share")} < set(logged)
    assert {f"train/{name}" for name in ("loss", "kl", "mlm_loss", "masked_share")} < set(logged)
    mlsm(*words(start, tmp_path / "out", "--updates", 60, "--evaluate-every", 30))  # complete: a log decides nothing


@pytest.mark.parametrize(
    ("name", "message"), [("tensorbord", "tensorbord is not supported"), ("comet_ml", "not installed")]
)
def test_a_log_that_is_impossible_is_refused_first(
    name: str, message: str, start: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert message in failing_mlsm(capsys, *words(start, tmp_path / "out", "--report-to", name))
    assert not (tmp_path / "out" / "tokens").exists()
