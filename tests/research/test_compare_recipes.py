"""The comparison of recipes of adaptation runs at toy size, and does not repeat what is done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.script_module import load_script
from tests.tiny_hf_models import make_model

compare = load_script("research/compare_recipes.py")
# one of each kind
ROWS = (compare.START, compare.STOCK, "head-first", "muon", "lower-rates-below", "causal-first", "kept", compare.CODES)


def run(words: list[object]) -> str:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout


def read_figures(path: Path) -> dict[str, object]:
    figures: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return figures


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_all_rows_are_trained_once_and_measured(english_text: tuple[Path, Path], tmp_path: Path) -> None:
    lines = english_text[0].read_text(encoding="utf-8").splitlines(keepends=True)
    text = tmp_path / "text.txt"
    valid = tmp_path / "valid.txt"
    text.write_text("".join(lines[:300]), encoding="utf-8")
    valid.write_text("".join(lines[300:600]), encoding="utf-8")
    model = make_model("bert", english_text[0], tmp_path / "model")
    labelled = tmp_path / "task" / "train.tsv"
    labelled.parent.mkdir()
    labelled.write_text("good\ta fine name\nbad\tno value at all\n" * 10, encoding="utf-8")
    output = tmp_path / "out"
    command = ["research/compare_recipes.py", model, "--text", text, "--valid", valid, "--output", output]
    command += ["--labelled", labelled, labelled, "--lines", 12, "--minutes", 0.01, "--max-length", 32]
    command += ["--atoms", 40, "--tokens", 4000, "--rows", *ROWS]
    table = run(command)
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert rows == ["row", "---", *ROWS]
    assert (output / "recipes-0.01.md").read_text(encoding="utf-8").strip() == table[table.index("| row") :].strip()
    trained = {name: read_figures(output / f"{name}-0.01.json") for name in ROWS if name != compare.START}
    assert all(figures["updates"] for figures in trained.values())
    assert all("bits/token" in figures["measures"] for figures in trained.values())  # type: ignore[operator]
    times = {path: path.stat().st_mtime_ns for path in output.glob("*.json")}
    assert run(command).endswith(table[table.index("| row") :])
    assert {path: path.stat().st_mtime_ns for path in output.glob("*.json")} == times
    of_the_clock = run([*command[: -len(ROWS)], compare.START, "--wall"])
    assert (output / "recipes-0.01-wall.md").read_text(encoding="utf-8").strip() in of_the_clock
    assert (output / "recipes-0.01.md").read_text(encoding="utf-8") in table


def test_causal_attention_sees_earlier_tokens_only(english_text: tuple[Path, Path], tmp_path: Path) -> None:
    folder = make_model("bert", english_text[0], tmp_path / "model")
    model = compare.MaskedLmModel.of(compare.MaskedLmModel.opened(folder)).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
    changed = ids.clone()
    changed[:, 3] = 10

    def same_places() -> list[bool]:
        with torch.no_grad():
            states = [model.base_model(input_ids=tokens)[0] for tokens in (ids, changed)]
        return (states[0] == states[1]).all(dim=2).all(dim=0).tolist()

    compare.set_causal(model, causal=True)
    assert same_places() == [True, True, True, False, False]
    compare.set_causal(model, causal=False)
    assert same_places() == [False] * 5


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["distilbert", "modernbert", "mpnet", "deberta", "deberta-v2"])
def test_models_without_causal_attention_are_refused(
    english_text: tuple[Path, Path], tmp_path: Path, model_type: str
) -> None:
    folder = make_model(model_type, english_text[0], tmp_path / "model")
    model = compare.MaskedLmModel.of(compare.MaskedLmModel.opened(folder))
    with pytest.raises(ValueError, match=f"^a model of type {model_type} has no causal attention; leave causal-first"):
        compare.set_causal(model, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta", "camembert", "electra"])
def test_relatives_of_bert_take_causal_attention(
    english_text: tuple[Path, Path], tmp_path: Path, model_type: str
) -> None:
    folder = make_model(model_type, english_text[0], tmp_path / "model")
    model = compare.MaskedLmModel.of(compare.MaskedLmModel.opened(folder))
    assert compare.sees_later_tokens(model)
    compare.set_causal(model, causal=True)
    assert not compare.sees_later_tokens(model)


def test_labels_are_the_next_tokens(english_text: tuple[Path, Path], tmp_path: Path) -> None:
    folder = make_model("bert", english_text[0], tmp_path / "model")
    tokenizer = compare.load_fast_tokenizer(folder)
    sequences = compare.write_text_sequences([english_text[0]], folder, tmp_path / "tokens", max_length=16)[0]
    dataset = compare.PretrainingSequences(sequences)
    samples = [dataset[0], dataset[1], dataset[2]]
    batch = compare.NextTokenCollator(tokenizer)(samples)
    for sample, ids, labels in zip(samples, batch["input_ids"], batch["labels"], strict=True):
        length = len(sample.input_ids)
        assert ids[:length].tolist() == sample.input_ids.tolist()
        assert labels[: length - 1].tolist() == sample.input_ids[1:].tolist()
        assert set(labels[length - 1 :].tolist()) == {-100}


def test_rates_fall_from_the_head_to_the_embeddings(english_text: tuple[Path, Path], tmp_path: Path) -> None:
    folder = make_model("bert", english_text[0], tmp_path / "model")
    model = compare.MaskedLmModel.of(compare.MaskedLmModel.opened(folder))
    optimizer = compare.adamw_by_layers(model, compare.TrainingSettings(learning_rate=1.0), 0.5)
    rates = {id(group["params"][0]): group["lr"] for group in optimizer.param_groups}
    layers = model.base_model.encoder.layer
    assert {rates[id(weight)] for weight in model.head_parameters()} == {1.0}
    for below, layer in enumerate(reversed(layers), start=1):
        assert {rates[id(weight)] for weight in layer.parameters()} == {0.5**below}
    assert {rates[id(weight)] for weight in model.base_model.embeddings.parameters()} == {0.5 ** (len(layers) + 1)}
