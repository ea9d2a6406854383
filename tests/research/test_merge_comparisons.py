"""Results of several folders in one table; and the published tables are those of the figures beside them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from mlsm_plugin.core.files.atomic_files import read_json
from tests.conftest import REPOSITORY
from tests.documented import bash_blocks
from tests.script_module import load_script, runner_of

merge_comparisons = load_script("research/merge_comparisons.py")
from comparison.report import cost_table, loss_table, rates_table, seeds_table, use_table  # noqa: E402

DOCS = REPOSITORY / "docs"
RESULTS = DOCS / "research"
PAGE = (RESULTS / "comparison.md").read_text(encoding="utf-8")
PUBLISHED = RESULTS / "comparison_25m.json"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    return runner_of(merge_comparisons, monkeypatch)


def result(*runs: tuple[str, int, float], **settings: object) -> dict[str, Any]:
    """Figures as compare_objectives.py writes them."""
    names = list(dict.fromkeys(row for row, _, _ in runs))
    cost = {"updates": 10, "seconds_per_update": 1.0, "extra_seconds": 0.0, "seconds": 10.0, "operations": 1e12}
    return {
        "settings": {"updates": 10, "width": 64, "share": 20, "seeds": [1], **settings},
        "texts": "0" * 64,
        "rows": names,
        "tasks": [],
        "pair_sets": [],
        "costs": {name: {**cost, "learning_rate": 1e-3} for name in names},
        "baseline": None,
        "runs": [
            {
                **{"row": row, "seed": seed, "valid_bits": bits + 1, "test_bits": bits},
                "curve": [{"update": at, "seconds": float(at), "bits": bits + 10 - at} for at in (4, 8, 10)],
            }
            for row, seed, bits in runs
        ],
    }


def write(path: Path, figures: dict[str, Any]) -> Path:
    path.write_text(json.dumps(figures), encoding="utf-8")
    return path


def test_seeds_and_rows_of_several_folders_are_put_together(run: Callable[..., int], tmp_path: Path) -> None:
    one = write(tmp_path / "one.json", result(("mlm", 1, 5.0), ("self", 1, 4.5)))
    two = write(tmp_path / "two.json", result(("mlm", 2, 5.5), ("mlm", 1, 7.0), ("self", 2, 5.0), seeds=[2]))
    other = write(tmp_path / "other.json", result(("mlm", 1, 5.0), ("self", 1, 6.0), share=50))
    output = tmp_path / "merged"
    assert run("--add", one, "--add", two, "--add", other, "self=self, late", "--output", output) == 0
    merged = read_json(output / "comparison.json")
    found = {(own["row"], own["seed"]): own["test_bits"] for own in merged["runs"]}
    assert found == {("mlm", 1): 5.0, ("self", 1): 4.5, ("mlm", 2): 5.5, ("self", 2): 5.0, ("self, late", 1): 6.0}
    assert merged["rows"] == ["mlm", "self", "self, late"]
    assert merged["other_settings"] == {"self, late": {"share": 50}}
    page = (output / "comparison.md").read_text()
    assert "| self, late | 10 |" in page
    assert "self, late: share 50." in page
    assert "| self | 2 | 5.750 ± 0.354 | 4.750 ± 0.354 |" in page
    assert (output / "comparison.png").stat().st_size > 10_000
    again = tmp_path / "again"  # what is merged can be merged once more
    assert run("--add", output / "comparison.json", "--output", again) == 0
    assert (again / "comparison.md").read_text() == page


def test_other_budgets_are_merged_if_they_cost_as_much(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Updates of another kind of masked LM, which take twice as long, and half as many."""
    first = write(tmp_path / "first.json", result(("mlm", 1, 5.0)))
    other = result(("mlm", 1, 4.0), updates=5)
    other["costs"]["mlm"] |= {"updates": 5, "seconds_per_update": 2.0}
    second = write(tmp_path / "b.json", other)
    words = ("--add", first, "--add", second, "mlm=mlm, slow", "--output", tmp_path / "merged")
    assert run(*words) == 0
    assert read_json(tmp_path / "merged" / "comparison.json")["other_settings"] == {"mlm, slow": {"updates": 5}}
    other["costs"]["mlm"]["seconds"] = 11.0
    write(second, other)
    with pytest.raises(SystemExit, match="2"):
        run(*words)
    assert "b.json has a budget of 5 updates, 11 s; the first result has 10, 10 s; they" in capsys.readouterr().err


@pytest.mark.parametrize("tasks_first", [False, True])
def test_results_may_be_measured_on_different_things(
    run: Callable[..., int], tmp_path: Path, tasks_first: bool
) -> None:
    accuracy = {"finetuned": {"sst2": {"mean": 0.75, "deviation": 0.01}}, "probe": {"sst2": 0.5}}
    tasks, pairs = result(("mlm", 1, 5.0)), result(("mlm", 2, 5.5))
    tasks |= {"tasks": ["sst2"], "baseline": {"finetuned": {"sst2": {"mean": 0.6, "deviation": 0.0}}, "probe": {}}}
    tasks["runs"][0] |= {**accuracy, "pairs": {}}
    nothing: dict[str, Any] = {"finetuned": {}, "probe": {}}
    pairs |= {"pair_sets": ["agreement"], "baseline": nothing}
    pairs["runs"][0] |= {**nothing, "pairs": {"agreement": 0.9}}
    files = [write(tmp_path / f"{name}.json", own) for name, own in (("tasks", tasks), ("pairs", pairs))]
    first, second = files if tasks_first else reversed(files)
    assert run("--add", first, "--add", second, "--output", tmp_path / "merged") == 0
    rows = use_table(read_json(tmp_path / "merged" / "comparison.json")).splitlines()
    assert rows[2:] == ["| random weights |  | 60.0 ± 0.0 |  |  |", "| mlm | 2 | 75.0 ± 1.0 | 50.0 | 90.0 |"]


def test_results_from_before_there_was_a_share_of_masked_tokens_have_15_percent(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path / "first.json", result(("mlm", 1, 5.0)))
    same = write(tmp_path / "same.json", result(("mlm", 2, 5.0), mask_prob=0.15))
    other = write(tmp_path / "other.json", result(("mlm", 3, 5.0), mask_prob=0.3))
    assert run("--add", first, "--add", same, "--output", tmp_path / "merged") == 0
    with pytest.raises(SystemExit, match="2"):
        run("--add", first, "--add", other, "--output", tmp_path / "merged")
    assert "{'mask_prob': 0.3}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "names", "message"),
    [
        ({"texts": "1" * 64}, (), "has other texts than the first result"),
        ({"settings": {"updates": 10, "width": 32}}, (), "has width 32, the first result 64"),
        ({"rows": ["mlm"], "costs": {"mlm": {"updates": 20, "seconds": 10.0}}}, (), "mlm has 20 updates in"),
        ({}, ("taco=other",), "has no row taco; it has mlm"),
        ({}, ("mlm",), "mlm: write OLD=NEW"),
        (None, (), "is not a comparison.json of research/compare_objectives.py"),
    ],
)
def test_what_cannot_be_compared_is_not_merged(
    run: Callable[..., int], tmp_path: Path, change: dict[str, Any] | None, names: tuple[str, ...], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    figures = result(("mlm", 1, 5.0))
    first = write(tmp_path / "first.json", figures)
    other = {"runs": []} if change is None else {**deepcopy(figures), **change}
    with pytest.raises(SystemExit, match="2"):
        run("--add", first, "--add", write(tmp_path / "b.json", other), *names, "--output", tmp_path / "merged")
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "merged").exists()


def test_a_row_is_not_merged_with_one_of_other_settings_and_the_same_name(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path / "first.json", result(("mlm", 1, 5.0), ("self", 1, 4.5), latent_weight=1.0))
    other = write(tmp_path / "b.json", result(("mlm", 2, 5.0), ("self", 2, 4.5), latent_weight=0.1))
    output = tmp_path / "merged"
    with pytest.raises(SystemExit, match="2"):
        run("--add", first, "--add", other, "--output", output)
    error = capsys.readouterr().err
    assert "self has other settings" in error
    assert "{'latent_weight': 0.1}" in error
    assert run("--add", first, "--add", other, "self=self, 0.1", "--output", output) == 0  # mlm has no codes
    assert read_json(output / "comparison.json")["other_settings"] == {"self, 0.1": {"latent_weight": 0.1}}


def test_plain_masked_lm_cannot_be_missing(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "one.json", result(("mlm", 1, 5.0)))
    with pytest.raises(SystemExit, match="2"):
        run("--add", file, "mlm=mlm, width", "--output", tmp_path / "merged")
    assert "no result has the row mlm, with which the others are compared" in capsys.readouterr().err


def test_published_tables_are_those_of_the_published_figures() -> None:
    figures = read_json(PUBLISHED)
    for table in (cost_table, rates_table, loss_table, seeds_table, use_table):
        assert table(figures) in PAGE, f"docs/research/comparison.md should have\n{table(figures)}"


def test_documented_commands_run(run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [shlex.split(block.replace("\\\n", " ")) for block in bash_blocks(PAGE)]
    commands = [words for words in commands if words[1] == "research/merge_comparisons.py"]
    assert len(commands) == 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(DOCS)
    for seed, folder in enumerate(("comparison", "machine-2", "store"), 1):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "comparison.json", result(("mlm", seed, 5.0), ("mlsm+mlm", seed, 5.0)))
    for words in commands:
        assert run(*words[2:]) == 0
        output = Path(words[words.index("--output") + 1])
        assert {path.name for path in output.iterdir()} == {f"comparison.{kind}" for kind in ("json", "md", "png")}
