"""The tutorial, copied from its page and followed in a clean folder; only its numbers are made smaller."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.fairseq_plugin.pipelines.training_recipe import TrainingPlan, training_words
from tests.conftest import REPOSITORY
from tests.docs.pages import USER_PAGES, read
from tests.script_module import load_script

notebook_script = load_script("scripts/make_notebook.py")
PAGE = read("docs/tutorial.md")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, flags=re.M | re.S)
SMALLER = {
    "--max-megabytes 2": "--max-megabytes 0.3",
    "--vocab-size 4000": "--vocab-size 500",
    "--arch mlsm_modern_small --encoder-embed-dim 256": (
        "--arch mlsm_modern_tiny --encoder-layers 3 --encoder-embed-dim 32 --encoder-attention-heads 2 --cpu"
    ),
    "--max-update 1000": "--max-update 20",
    "--max-update 400": "--max-update 6",
    "--max-update 200": "--max-update 2",
    "--validate-interval-updates 50": "--validate-interval-updates 3",
    "--log-interval 10": "--log-interval 1",
    "--atoms 512": "--atoms 24",
    "--tokens 100000 --iterations 200": "--tokens 3000 --iterations 10",
}
MOST_BYTES_OF_A_PICTURE = 60_000


def shape_of(line: str) -> str:
    """How a line begins: numbers may differ, and what follows the probability of a prediction."""
    if re.match(r"0\.\d+ ", line):
        return r"0\.\d+ .+"
    return re.sub(r"\d[\\\d.,e-]*", r"[-\\d.,e]+", re.escape(" ".join(line.split())))


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_the_tutorial_prints_what_it_says_as_a_notebook(tmp_path: Path) -> None:
    page = PAGE
    for large, small in SMALLER.items():
        page = page.replace(large, small)
    notebook = notebook_script.run(notebook_script.cells_of(page), tmp_path)
    outputs = [notebook_script.printed(cell) for cell in notebook.cells[1:] if cell.cell_type == "code"][1:]
    printed, compared, number = "", 0, 0
    for language, block in BLOCKS:
        if language == "text":
            lines = [" ".join(line.split()) for line in printed.splitlines()]
            for shown in block.splitlines():
                assert any(re.match(shape_of(shown), line) for line in lines), f"{shown}\nis not in\n{printed}"
                compared += 1
        elif language in ("bash", "python"):
            printed = outputs[number]
            number += 1
    assert number == len(outputs)
    assert compared >= 10
    sources = re.findall(r"^ {12}.*\[\[.+\]\].*$", printed, flags=re.M)
    assert len(sources) > 4
    text = " ".join((tmp_path / "corpus" / "train.txt").read_text(encoding="utf-8").split())
    assert any(" ".join(source.replace("[[", "").replace("]]", "").split()[-4:]) in text for source in sources)
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("report.html", "curves.png"))
    assert (tmp_path / "model-hf" / "model.safetensors").exists()


def test_the_training_command_is_the_one_that_is_printed() -> None:
    (shown,) = [block for _, block in BLOCKS if "--task masked_latent_semantic" in block]
    model = ("--arch", "mlsm_modern_small", "--encoder-embed-dim", "256", "--attention-window", "0")
    plan = TrainingPlan(455_697, BlockSettings(128, "none"), model=model, start="aux/checkpoint_last.pt", coverage=0.4)
    printed = training_words("data-bin", "model", plan, user_dir="mlsm_plugin")
    curves = ["--validate-interval-updates", "50", "--log-file", "train.log"]
    assert shlex.split(shown.replace("\\\n", " ").splitlines()[0]) == [*printed, *curves]


def test_every_number_that_is_made_smaller_is_on_the_page() -> None:
    for large in SMALLER:
        assert any(large in block for language, block in BLOCKS if language == "bash"), large


def test_pictures_are_small() -> None:
    pictures = list((REPOSITORY / "docs" / "images").iterdir())
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size <= MOST_BYTES_OF_A_PICTURE, picture.name
        assert any(f"](images/{picture.name})" in page.read_text(encoding="utf-8") for page in USER_PAGES), picture.name
