"""The commands of examples/npm/README.md run in a clean folder; only their numbers are made smaller."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, TINY_MODEL
from tests.documented import TINY_HYDRA, bash_blocks, clean_folder, run_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_python_in_module")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> Path:
    return clean_folder(tmp_path_factory.mktemp("readme"), english_text[0])


def test_the_npm_example_trains_retrieves_and_classifies(folder: Path) -> None:
    text = (REPOSITORY / "examples" / "npm" / "README.md").read_text("utf-8")
    small, training, hydra, retrieval, index, classify = bash_blocks(text)
    tiny = " ".join([*TINY_MODEL[2:], "--encoder-layers", "1", "--cpu", "--num-workers", "0"])
    groups = "--group-size 4 --tokens-per-sample 48"
    (folder / "quick.sh").write_text(
        (folder / "examples" / "npm" / "quick.sh").read_text("utf-8").replace("--group-size 16", "--group-size 4")
    )
    small = small.replace("examples/npm/quick.sh", "quick.sh")
    printed = run_in(folder, f"{small.strip()} {tiny} --batch-size 4", MLM_UPDATES="3", UPDATES="3", VOCAB="400")
    assert len(re.findall(r"^  mask 1$", printed, flags=re.M)) == 2
    assert printed.count("[[") == 6

    run_in(folder, f"{training.strip()} {tiny} {groups} --max-update 2 --save-dir npm-model")
    tiny_hydra = TINY_HYDRA + " task.group_size=4 task.tokens_per_sample=48 dataset.batch_size=2"
    run_in(folder, f"{hydra.strip()} {tiny_hydra} checkpoint.save_dir=npm-hydra")
    for name in ("npm-model", "npm-hydra"):
        assert (folder / name / "checkpoint_last.pt").exists()

    found = run_in(folder, retrieval)
    assert "He lives in <mask> with his wife." in found
    assert re.search(r"^The president of \S+", found, flags=re.M)
    run_in(folder, index)
    assert (folder / "phrases" / "index.faiss").exists()
    (folder / "examples" / "npm" / "sentiment.tsv").write_text("0\tnot\n1\tthe, value\n", encoding="utf-8")
    (folder / "reviews.tsv").write_text("1\tA good value.\n0\tThis is not so.\n", encoding="utf-8")
    assert len(re.findall(r"^accuracy [\d.]+ \(\d of 2;", run_in(folder, classify), flags=re.M)) == 2
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len(run_in(folder, f"{sys.executable} - <<'END'\n{code}\nEND").splitlines()) == 3
