"""``mlsm evaluate pairs``: accuracies of files and over all, and files of another form."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM

from mlsm_plugin import hub
from mlsm_plugin.evaluation.minimal_pairs import pseudo_log_likelihoods
from tests.conftest import failing_mlsm, mlsm
from tests.tiny_hf_models import make_model
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]

SENTENCES = ["The name is bound.", "If the target is an attribute, it is called.", "A", "Names are bound to objects."]


GOOD_PAIR = '{"sentence_good": "a", "sentence_bad": "b"}\n'
TOO_LONG = r"in.jsonl, line 2: a sentence has \d+ tokens, more than the 32 positions of the model: 'name name"


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> Path:
    lines = [json.dumps({"sentence_good": good, "sentence_bad": bad, "UID": "x"}) for good, bad in pairs]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path


def test_command_prints_and_writes_accuracies(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    model = hub.from_pretrained(tiny.model)
    scores = pseudo_log_likelihoods(model, [model.encode(text) for text in SENTENCES])
    ranked = [SENTENCES[index] for index in sorted(range(len(SENTENCES)), key=lambda index: -scores[index])]
    right = [(ranked[0], ranked[1]), (ranked[1], ranked[3]), (ranked[0], ranked[2])]
    first = write_pairs(tmp_path / "first.jsonl", [*right, (ranked[2], ranked[1])])
    second = write_pairs(tmp_path / "second.jsonl", [(ranked[3], ranked[0]), (ranked[0], ranked[0])])
    words = ("evaluate", "pairs", "--checkpoint", tiny.model, "--input", first, second)
    mlsm(*words, "--output", tmp_path / "out.json", "--batch-tokens", 100)
    printed = capsys.readouterr().out
    assert re.search(r"^first.jsonl +4 pairs  accuracy 0.7500  ties 0$", printed, flags=re.M)
    assert re.search(r"^second.jsonl +2 pairs  accuracy 0.0000  ties 1$", printed, flags=re.M)
    assert re.search(r"^all +6 pairs  accuracy 0.5000  ties 1  \(mean of the files 0.3750\)$", printed, flags=re.M)
    figures = json.loads((tmp_path / "out.json").read_text())
    assert (figures["accuracy"], figures["ties"]) == (pytest.approx(0.5), 1)
    assert figures["files"][str(first)] == {"pairs": 4, "accuracy": 0.75, "ties": 0}


def test_an_input_is_not_replaced_by_the_figures(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    pairs = write_pairs(tmp_path / "in.jsonl", [("a name", "name a")])
    model = shutil.copytree(tiny.model.parent, tmp_path / "model")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    words = ("evaluate", "pairs", "--checkpoint", model, "--input", pairs, "--output")
    assert "in.jsonl is the output and also an input" in failing_mlsm(capsys, *words, pairs)
    assert "is named like a part of" in failing_mlsm(capsys, *words, model / "dict.txt")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def pipeline_files(root: Path) -> Path:
    """Files as those of the BabyLM evaluation pipeline: BLiMP with two tasks of one field, its supplement, and EWoK."""
    good, bad = "The name is bound.", "The name bound is."
    pair = {"sentence_good": good, "sentence_bad": bad, "pairID": "0", "simple_LM_method": True}
    swapped = {**pair, "sentence_good": bad, "sentence_bad": good}
    named = [{**own, "field": "syntax_semantics", "linguistics_term": "binding"} for own in (pair, swapped)]
    same = {**pair, "sentence_bad": good}
    context = {"Context1": good, "Context2": "It is called.", "Target1": "A", "Target2": "B", "ContextDiff": "x"}
    ewok = [{**context, "Domain": "social"}, {**context, "Context2": good, "Domain": "spatial"}]
    files = {
        "blimp_filtered/first.jsonl": [{**named[0], "UID": "first"}],
        "blimp_filtered/second.jsonl": [{**own, "UID": "second"} for own in (*named, named[1], named[1])],
        "supplement_filtered/hypernym.jsonl": [same],
        "ewok_filtered/all.jsonl": [ewok[0], ewok[1], ewok[1]],
    }
    for name, lines in files.items():
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (root / "blimp_filtered" / "README.md").write_text("no pairs", encoding="utf-8")
    return root


def test_files_of_the_pipeline_are_read_as_they_are(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    root = pipeline_files(tmp_path / "full_eval")
    mlsm("evaluate", "pairs", "--checkpoint", tiny.model, "--input", root, "--output", tmp_path / "out.json")
    printed, found = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    first = found["files"][str(root / "blimp_filtered" / "first.jsonl")]["accuracy"]  # 1 or 0
    assert found["fields"] == {"syntax/semantics": {"pairs": 5, "accuracy": 0.4 if first else 0.6, "ties": 0}}
    second = 0.25 if first else 0.75
    folders = {Path(name).name: own for name, own in found["folders"].items()}
    assert folders["blimp_filtered"] == {"tasks": 2, "accuracy": pytest.approx((first + second) / 2)}
    assert folders["supplement_filtered"] == {"tasks": 1, "accuracy": 0}
    social = folders["ewok_filtered"]["accuracy"]
    assert (folders["ewok_filtered"]["tasks"], social in (0, 0.5)) == (2, True)  # the mean of the domains, not of pairs
    assert found["ties"] == 3
    assert found["mean"] == pytest.approx(((first + second) / 2 + social) / 3)
    assert re.search(r"^syntax/semantics +5 pairs", printed, flags=re.M)
    assert f"{root / 'ewok_filtered'}: mean of 2 tasks {social:.4f}\n" in printed
    assert f"mean of the folders {found['mean']:.4f}\n" in printed


@pytest.mark.slow
def test_checkpoints_of_a_run_are_one_table(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    root = pipeline_files(tmp_path / "full_eval")
    make_model("bert", tiny.text, tmp_path / "run" / "chck_2M", kind=AutoModelForMaskedLM)
    shutil.copytree(tmp_path / "run" / "chck_2M", tmp_path / "run" / "chck_10M")
    names = [tmp_path / "run" / "chck_10M", tmp_path / "run" / "chck_2M", tiny.model]  # the first two: a shell's order
    words = ("evaluate", "pairs", "--input", root, "--output", tmp_path / "out.json")
    mlsm(*words, "--checkpoint", *names, "--max-unk-rate", 1)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    header = ["model", "syntax/semantics", "blimp_filtered", "ewok_filtered", "supplement_filtered", "mean"]
    assert lines[0] == header
    assert [line[0] for line in lines[1:]] == [str(names[index]) for index in (1, 0, 2)]
    models = json.loads((tmp_path / "out.json").read_text())["models"]
    assert [own["words"] for own in models.values()] == [2_000_000, 10_000_000, None]
    for line, own in zip(lines[1:], models.values(), strict=True):
        assert float(line[-1]) == pytest.approx(own["mean"], abs=1e-4)
        assert float(line[1]) == pytest.approx(own["fields"]["syntax/semantics"]["accuracy"], abs=1e-4)
    alone = tmp_path / "alone.json"
    mlsm(*words[:4], "--checkpoint", tiny.model, "--output", alone)
    assert json.loads(alone.read_text()) == {key: value for key, value in own.items() if key != "words"}
    capsys.readouterr()
    mlsm("plot", tmp_path / "out.json", "--output", tmp_path / "curves")
    assert "curves.png: 5 panels of 1 runs" in capsys.readouterr().out


def test_a_missing_model_is_told_before_any_is_scored(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", [("the name", "name the")])
    words = ("evaluate", "pairs", "--input", pairs, "--output", tmp_path / "out.json")
    line = failing_mlsm(capsys, *words, "--checkpoint", tiny.model, tmp_path / "chck_1M")
    assert "chck_1M does not exist" in line
    assert not (tmp_path / "out.json").exists()


def test_a_file_of_neither_form_and_an_empty_folder_are_named(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    root = pipeline_files(tmp_path / "full_eval")
    words = ("evaluate", "pairs", "--checkpoint", tiny.model, "--input", root)
    (root / "comps").mkdir()
    assert "comps has no *.jsonl; pass a folder of the pipeline" in failing_mlsm(capsys, *words, root / "comps")
    (root / "comps" / "base.jsonl").write_text('{"prefix_acceptable": "A name"}\n', encoding="utf-8")
    line = failing_mlsm(capsys, *words)
    needed = "the texts sentence_good and sentence_bad (BLiMP), or Context1, Context2 and Target1 (EWoK)"
    assert f"{root / 'comps' / 'base.jsonl'}, line 1 needs {needed}" in line
    (root / "comps" / "base.jsonl").write_text('{"Target1": "A", "Context1": "B"}\n', encoding="utf-8")
    assert f"line 1 needs {needed}" in failing_mlsm(capsys, *words)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"sentence_good": "a", "sentence_bad": "b"}\nno\n', r"in.jsonl, line 2 is not JSON"),
        ('{"sentence_good": "a"}\n', r"in.jsonl, line 1 needs the texts sentence_good and sentence_bad"),
        ('["a", "b"]\n', r"in.jsonl, line 1 needs the texts"),
        ("\n", r"in.jsonl holds no pair"),
        (GOOD_PAIR + '{"sentence_good": "' + "name " * 80 + '", "sentence_bad": "b"}\n', TOO_LONG),
        (
            GOOD_PAIR + '\n{"sentence_good": "a", "sentence_bad": "\u200b"}\n',
            r"in.jsonl, line 3: a sentence has no token",
        ),
    ],
)
def test_files_of_another_form_are_refused(
    tiny: TinyData, tmp_path: Path, capsys: Capture, content: str, message: str
) -> None:
    (tmp_path / "in.jsonl").write_text(content, encoding="utf-8")
    words = ("evaluate", "pairs", "--checkpoint", tiny.model, "--input", tmp_path / "in.jsonl")
    assert re.search(message, failing_mlsm(capsys, *words, "--output", tmp_path / "out.json"))
    assert not (tmp_path / "out.json").exists()


def test_pairs_of_unknown_tokens_are_refused_unless_asked_for(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", [("the name \u4e30", "the name \u4e0c"), ("a name", "name a")])
    words = ("evaluate", "pairs", "--checkpoint", tiny.model, "--input", pairs)
    error = failing_mlsm(capsys, *words)
    assert f"% of the texts (each of them more than 10%) of {pairs} are unknown, above the limit of 1.00%" in error
    assert "'\u4e0c' U+4E0C (1 times), '\u4e30' U+4E30 (1 times)" in error
    mlsm(*words, "--max-unk-rate", 1)
    assert "2 pairs" in capsys.readouterr().out
