"""The comparison of adapted models runs at toy size, and does not repeat what is done."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM

from tests.conftest import REPOSITORY
from tests.script_module import load_script
from tests.tiny_hf_models import make_model

compare = load_script("research/compare_adaptation.py")


def test_the_table_has_means_and_deviations() -> None:
    run = {"mlm_bits": 5.0, "finetuned": 80.0, "probe": 70.0}
    rows = {"start": [run], "mlm": [run, {**run, "mlm_bits": 6.0}]}
    table = compare.table({"minutes": 10.0, "updates": {"mlm": 1234}, "rows": rows})
    assert "| start | 0 | 5.00 | 80.00 | 70.00 |" in table
    assert "| mlm | 1,234 | 5.50 ± 0.71 | 80.00 ± 0.00 | 70.00 ± 0.00 |" in table


@pytest.fixture
def words(english_text: tuple[Path, Path], tmp_path: Path) -> list[str]:
    """The words of a command of toy size."""
    lines = english_text[0].read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "text.txt").write_text("".join(lines[:150]), encoding="utf-8")
    (tmp_path / "valid.txt").write_text("".join(lines[150:190]), encoding="utf-8")
    model = make_model("bert", tmp_path / "text.txt", tmp_path / "model", kind=AutoModelForMaskedLM)
    rows = [f"{label}\t{text}" for label, text in (("good", "a fine name"), ("bad", "no value at all"))] * 10
    for name in ("train", "test"):
        (tmp_path / f"{name}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    words = [
        *("research/compare_adaptation.py", model, "--text", tmp_path / "text.txt"),
        *("--valid", tmp_path / "valid.txt", "--train", tmp_path / "train.tsv", "--test", tmp_path / "test.tsv"),
        *("--output", tmp_path / "out", "--minutes", 0.02, "--seeds", 1, "--max-length", 32, "--batch-size", 4),
        *(
            "--atoms",
            40,
            "--dictionary-tokens",
            4000,
            "--timing-updates",
            1,
            3,
            "--objectives",
            "mlm",
            "mlsm+mlm",
            "--quiet",
        ),
    ]
    return [*map(str, words)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--minutes", "0"), "--minutes must be positive, got 0.0"),
        (("--timing-updates", "3", "1"), "--timing-updates must be positive and ascending, got 3 1"),
        (("--seeds", "1", "1"), "--seeds has a number twice: 1 1"),
        (("--labelled", "1"), "train.tsv has only one label (good); at least two are needed"),
        (("--text", "nowhere.txt"), "No such file or directory: 'nowhere.txt'"),
        (("--test", str(REPOSITORY / "README.md")), "README.md, line 1 has 1 columns"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(
    words: list[str], more: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [*words, *more])
    with pytest.raises(SystemExit, match=re.escape(message)):
        compare.main()
    assert not (tmp_path / "out").exists()


def test_a_folder_keeps_the_settings_that_it_was_begun_with(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", words)
    compare.planned_folder(compare.parse_arguments()).begin()
    monkeypatch.setattr(sys, "argv", [*words, "--seeds", "1", "2"])
    compare.planned_folder(compare.parse_arguments()).check()
    monkeypatch.setattr(sys, "argv", [*words, "--minutes", "1"])
    with pytest.raises(
        SystemExit, match=re.escape("settings.minutes is 0.02 there and 1.0 now. Give another --output")
    ):
        compare.main()
    (tmp_path / "valid.txt").write_text("Another text.\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match=re.escape("begun with other settings: inputs.valid is")):
        compare.main()


def test_what_a_stopped_timing_left_is_timed_again(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", words)
    comparison = compare.Comparison(compare.parse_arguments())
    (tmp_path / "out" / "timing" / "mlm-1").mkdir(parents=True)

    def adapt(objective: str, seed: int, updates: int, folder: Path) -> tuple[float, float]:
        training = 0.0 if folder.exists() else 2.0 * updates
        return 10 + training, training

    monkeypatch.setattr(comparison, "adapt", adapt)
    assert all(times["update"] == 2 for times in comparison.speeds().values())


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_it_compares_and_resumes(words: list[str], tmp_path: Path) -> None:
    before: dict[Path, int] = {}
    for _ in range(2):
        done = subprocess.run([sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        table = re.findall(r"^\| (start|mlm|mlsm\+mlm|taco) \| .*[\d.]+( ± [\d.]+)? \|$", done.stdout, flags=re.M)
        assert [name for name, _ in table] == ["start", "mlm", "mlsm+mlm"]
        figures = json.loads((tmp_path / "out" / "adaptation.json").read_text(encoding="utf-8"))
        assert all(len(figures["rows"][name]) == 1 for name in ("mlm", "mlsm+mlm"))
        models = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("model.safetensors")}
        assert models == (before or models)
        before = models
