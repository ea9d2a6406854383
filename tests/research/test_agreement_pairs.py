"""Minimal pairs made by rules."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mlsm_plugin.evaluation.minimal_pairs import read_pairs
from tests.script_module import load_script, runner_of

pairs = load_script("research/agreement_pairs.py")
COUNTED = ["A dog barks .", "These dogs bark .", "Every city has many cities .", "This bus and several buses ."]
NUMBERS = {"dog": 1, "dogs": 2, "city": 1, "cities": 2, "bus": 1, "buses": 2}


def test_numbers_of_nouns() -> None:
    assert pairs.noun_numbers(COUNTED) == NUMBERS
    assert "dogs" not in pairs.noun_numbers([*COUNTED, "A dogs life ."])


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("The dog is here .", ["The dog are here ."]),
        ("The dogs were here, and the city was far .", ["The dogs was here, and the city was far .",
                                                         "The dogs were here, and the city were far ."]),
        ("These dogs bark .", ["This dogs bark ."]),
        ("That bus of the dogs is red .", ["Those bus of the dogs is red ."]),
        ("The owner of the dogs is here .", []),
        ("He said that dogs bark .", []),
        ("The dog are here .", []),
        ("Their cities have walls .", ["Their cities has walls ."]),
        ("They were here, but it is far .", ["They was here, but it is far .", "They were here, but it are far ."]),
        ("If he were here ...", []),
    ],
)  # fmt: skip
def test_rules(good: str, bad: list[str]) -> None:
    assert [changed for _, changed in pairs.changed_number(good, NUMBERS)] == bad


def test_neighbouring_words_are_exchanged() -> None:
    assert pairs.exchanged("We saw two dogs.", random.Random(1)) in ("We two saw dogs.", "We saw dogs two.")
    assert pairs.exchanged("Well, yes.", random.Random(1)) is None


def test_files_are_minimal_pairs(
    english_text: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [*COUNTED, *english_text[0].read_text(encoding="utf-8").splitlines()]
    (tmp_path / "text.txt").write_text("\n".join(texts), encoding="utf-8")
    run, written = runner_of(pairs, monkeypatch), []
    for _ in range(2):
        assert run(tmp_path / "text.txt", "--output", tmp_path / "pairs", "--number", 40) == 0
        written.append((tmp_path / "pairs" / "agreement.jsonl").read_bytes())
    assert written[0] == written[1]
    for name in ("agreement", "exchanged"):
        found = read_pairs(tmp_path / "pairs" / f"{name}.jsonl")
        assert 20 <= len(found) <= 40
        assert len({pair.good for pair in found}) == len(found)
        assert {pair.good for pair in found} <= {text.strip() for text in texts}
        for line in (tmp_path / "pairs" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            pair = json.loads(line)
            one, other = (pairs.WORDS.findall(pair[key]) for key in ("sentence_good", "sentence_bad"))
            assert len(one) == len(other)
            assert sum(first != second for first, second in zip(one, other, strict=True)) == (
                1 if name[0] == "a" else 2
            )
