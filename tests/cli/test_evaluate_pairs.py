"""``mlsm evaluate pairs``: accuracies of files and over all, and files of another form."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mlsm_plugin import hub
from mlsm_plugin.evaluation.minimal_pairs import pseudo_log_likelihoods
from tests.conftest import failing_mlsm, mlsm
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
    assert f"% of the tokens of {pairs} are unknown, above the limit of 1.00%" in error
    assert "'\u4e0c' U+4E0C (1 times), '\u4e30' U+4E30 (1 times)" in error
    mlsm(*words, "--max-unk-rate", 1)
    assert "2 pairs" in capsys.readouterr().out
