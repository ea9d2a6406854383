"""The commands of examples/taco/README.md run in a clean folder; only their numbers are made smaller."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, TINY_MODEL
from tests.documented import TINY_HYDRA, bash_blocks, clean_folder, run_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_python_in_module")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> Path:
    return clean_folder(tmp_path_factory.mktemp("readme"), english_text[0])


def test_the_taco_example_runs_on_a_small_scale_as_published_and_with_hydra(folder: Path) -> None:
    small, published, hydra = bash_blocks((REPOSITORY / "examples" / "taco" / "README.md").read_text("utf-8"))
    tiny = " ".join([*TINY_MODEL[2:], "--cpu", "--num-workers", "0", "--batch-size", "8"])
    filled = run_in(folder, f"{small.strip()} {tiny}", UPDATES="4", VOCAB="400")
    assert len(re.findall(r"^.*<mask>.*\d\.\d\d$", filled, flags=re.M)) == 2

    numbers = ("--vocab-size 30000", "--batch-size 128", "--warmup-updates 10000", "--max-update 1000000")
    for number, fewer in zip(numbers, ("400", "8", "1", "2"), strict=True):
        assert number in published
        published = published.replace(number, f"{number.split()[0]} {fewer}")
    names = {"output tok": "output taco-tok", "tokenizer tok": "tokenizer taco-tok", "data-bin": "taco-data-bin"}
    for name, own in {**names, "--save-dir model": f"--save-dir taco-model {tiny}"}.items():
        published = published.replace(name, own)
    run_in(folder, published)
    assert (folder / "taco-model" / "checkpoint_best.pt").exists()

    tiny_hydra = TINY_HYDRA.replace("model._name=mlsm_roberta_tiny", "model._name=taco_small +model.encoder_layers=2")
    command = hydra.strip().replace("data-bin", "taco-data-bin")
    run_in(folder, f"{command} {tiny_hydra} checkpoint.save_dir=taco-hydra")
    assert (folder / "taco-hydra" / "checkpoint_best.pt").exists()
