"""Accuracies over checkpoints: their words, the columns of the table, and files that hold none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlsm_plugin.babylm.settings import name_of
from mlsm_plugin.reports.pair_accuracies import accuracies_of, read_accuracies, words_seen_by
from mlsm_plugin.reports.training_log import read_training_log


def figures(words: int | None, accuracy: float) -> dict[str, Any]:
    own = {"pairs": 4, "accuracy": accuracy, "ties": 0}
    folders = {"eval/blimp": {"tasks": 2, "accuracy": accuracy / 2}, "eval/ewok": {"tasks": 1, "accuracy": accuracy}}
    return {"words": words, **own, "fields": {"syntax": own}, "folders": folders, "mean": 0.75 * accuracy}


def test_names_say_the_words() -> None:
    words = {
        "chck_20M": 20_000_000,
        "a/chck_1000M/": 1_000_000_000,
        "chck_M": None,
        "chck_200K": 200_000,  # the names of small runs of `mlsm babylm train`
        "chck_30": 30,
        "chck_1k": None,
        "my_chck_1M": None,
    }
    assert {name: words_seen_by(name) for name in words} == words
    for number in (30, 200_000, 3_000_000, 1_000_000_000):
        assert words_seen_by(name_of(number)) == number


def test_columns_are_fields_folders_and_their_mean() -> None:
    assert accuracies_of(figures(None, 0.4)) == {"syntax": 0.4, "blimp": 0.2, "ewok": 0.4, "mean": pytest.approx(0.3)}
    same = figures(None, 0.4) | {
        "folders": {"a/syntax": {"accuracy": 0.1}, "b/syntax": {"accuracy": 0.2}, ".": {"accuracy": 0.3}}
    }
    assert list(accuracies_of(same)) == ["syntax", "a/syntax", "b/syntax", ".", "mean"]
    assert "mean" not in accuracies_of(same | {"folders": {".": {"accuracy": 0.3}}})


def test_curves_are_over_words(tmp_path: Path) -> None:
    models = {"chck_10M": figures(10_000_000, 0.6), "main": figures(None, 0.9), "chck_2M": figures(2_000_000, 0.5)}
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"models": models}), encoding="utf-8")
    log = read_training_log(path)
    assert (log.unit, log.train) == ("words seen", {})
    assert log.valid["syntax"] == [(2_000_000, 0.5), (10_000_000, 0.6)]
    assert log.valid["ewok"] == log.valid["syntax"]
    assert list(log.valid) == ["syntax", "blimp", "ewok", "mean"]


def test_files_without_such_curves(tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    for content in ("train_inner | {}", "[1]", '{"loss": 1}'):
        path.write_text(content, encoding="utf-8")
        assert read_accuracies(path) is None
    for models, message in (
        ({"main": figures(None, 0.5)}, "no model whose name says how many words it has seen, such as chck_10M"),
        (
            {"a/chck_1M": figures(10**6, 0.5), "b/chck_1M": figures(10**6, 0.6)},
            "two models that have seen the same number",
        ),
        ({"a": {"words": "many"}}, "words: 'many' is not a whole number"),
        ([1], r"\[1\] is not a dictionary"),
    ):
        path.write_text(json.dumps({"models": models}), encoding="utf-8")
        with pytest.raises(ValueError, match=rf"pairs.json .*{message}"):
            read_accuracies(path)
    path.write_text(json.dumps({**figures(None, 0.5), "files": {}}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"pairs.json is of one model"):
        read_accuracies(path)
