"""A folder of results keeps the settings and the contents of the files that it was begun with."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pytest

from tests.script_module import load_script
from tests.tiny_hf_models import make_model

kept_results = load_script("research/kept_results.py")


def options(root: Path, *, rate: float = 1.0, rows: int = 2) -> argparse.Namespace:
    return argparse.Namespace(text=root / "text.txt", rate=rate, rows=rows, output=root / "out")


def test_a_result_is_computed_once(tmp_path: Path) -> None:
    results = kept_results.KeptResults(options(tmp_path))
    results.output.mkdir()
    assert results.once("figure", lambda: 1) == 1
    assert results.once("figure", lambda: 2) == 1
    assert results.once("other", lambda: {"loss": [2.5]}) == {"loss": [2.5]}


def test_other_settings_and_inputs_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one text\n", encoding="utf-8")

    def begin(args: argparse.Namespace) -> None:
        kept_results.planned_folder(args, {"text": [text]}, may_change=("rows", "output"), seal_file="table.md").begin()

    begin(options(tmp_path))
    begin(options(tmp_path, rows=3))
    with pytest.raises(ValueError, match=r"settings.rate is 1.0 there and 2.0 now. Give another --output"):
        begin(options(tmp_path, rate=2.0))
    text.write_text("another text\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"begun with other settings: inputs.text is"):
        begin(options(tmp_path))


@pytest.mark.parametrize(
    ("program", "more", "message"),
    [
        ("compare_recipes", ("--atoms", "50"), "settings.atoms is 3000 there and 50 now"),
        ("compare_teachers", ("--layer", "2"), "settings.layer is 5 there and 2 now"),
        ("compare_teachers", ("--epochs", "1"), "settings.epochs is 4 there and 1 now"),
    ],
)
def test_programs_refuse_them_before_anything_runs(
    program: str,
    more: tuple[str, ...],
    message: str,
    english_text: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare = load_script(f"research/{program}.py")
    model = make_model("bert", english_text[0], tmp_path / "model")
    labelled = tmp_path / "task.tsv"
    labelled.write_text("good\ta fine name\n", encoding="utf-8")
    words: list[object] = [
        program,
        model,
        "--text",
        english_text[0],
        "--valid",
        english_text[1],
        "--labelled",
        labelled,
        labelled,
    ]
    words += ["--output", tmp_path / "out"]
    twice = [*words, "--labelled", labelled, labelled]
    monkeypatch.setattr(sys, "argv", [*map(str, twice)])
    with pytest.raises(SystemExit, match="two files of --labelled are in a folder called"):
        compare.main()
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    compare.planned_folder(compare.parse_arguments()).begin()
    before = sorted((tmp_path / "out").iterdir())
    monkeypatch.setattr(sys, "argv", [*map(str, words), "--rows", "mlm", *more])
    with pytest.raises(SystemExit, match=re.escape(message)):
        compare.main()
    assert sorted((tmp_path / "out").iterdir()) == before
