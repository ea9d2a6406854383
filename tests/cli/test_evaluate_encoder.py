"""``mlsm evaluate encoder``: the table, the file, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mlsm_plugin.cli.evaluate_encoder import EPILOG
from mlsm_plugin.evaluation.quality_tables import RETRIEVAL, WORDS
from tests.conftest import failing_mlsm, mlsm
from tests.tiny_hf_models import make_model_with_own_tokens
from tests.tiny_models import TinyData


def test_two_models_in_one_table(tiny: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model_with_own_tokens("bert", tiny.text, tmp_path / "bert")
    words = tiny.text.read_text().split()
    rng = random.Random(1)
    text, output = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text("\n".join(" ".join(rng.choices(words, k=8)) for _ in range(120)))
    mlsm("evaluate", "encoder", tiny.model, model, "--text", text, "--queries", 20, "--output", output)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "20 sentences, 24 passages"
    assert lines[1].split() == ["model", "parameters", "nDCG@10", "bits/token", "bits/word"]
    assert [line.split()[0] for line in lines[2:5]] == [str(tiny.model), str(model), "BM25"]
    record = json.loads(output.read_text())
    assert list(record) == [str(tiny.model), str(model), "BM25"]
    low, high = record[str(model)]["measures"]["bits/word"]["difference_from_first"]
    figures = [record[str(name)]["measures"]["bits/word"]["figure"] for name in (tiny.model, model)]
    assert low <= figures[1] - figures[0] <= high


def test_the_help_explains_the_columns() -> None:
    assert all(f"{column}:" in EPILOG for column in (RETRIEVAL, WORDS))


def test_nothing_to_measure_is_one_line(tiny: TinyData, capsys: pytest.CaptureFixture[str]) -> None:
    assert "pass --text, --labelled or --sts" in failing_mlsm(capsys, "evaluate", "encoder", tiny.model)


def test_a_name_that_is_no_model_is_told_before_the_first_is_measured(
    tiny: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scored.tsv").write_text("0\ta\tb\n1\tb\tb\n")
    broken = tmp_path / "broken.pt"  # would be told first, if it were opened
    broken.write_text("")
    line = failing_mlsm(capsys, "evaluate", "encoder", broken, tmp_path / "none", "--sts", tmp_path / "scored.tsv")
    assert "none does not exist" in line
