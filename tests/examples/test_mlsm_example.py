"""The commands of examples/mlsm/README.md for Hugging Face encoders, with a small encoder.

The tests of the README run its other commands.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, mlsm
from tests.documented import bash_blocks, clean_folder, run_in
from tests.tiny_hf_models import make_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_python_in_module")]

BLOCKS = bash_blocks((REPOSITORY / "examples" / "mlsm" / "README.md").read_text("utf-8"))
SMALLER = {
    "--layer 4": "--layer 2 --tokens-per-sample 64",
    "--atoms 1000 --k 16 --tokens 300000": "--atoms 64 --k 8 --tokens 500",
    "--dictionary hf-dict": "--dictionary hf-dict --tokens-per-sample 64",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> Path:
    root = clean_folder(tmp_path_factory.mktemp("readme"), english_text[0])
    make_model("bert", english_text[0], root / "encoder", max_position_embeddings=130)
    return root


def test_steps_with_a_hugging_face_encoder_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (steps,) = [block for block in BLOCKS if "hf:encoder" in block]
    monkeypatch.chdir(folder)
    for command in steps.splitlines():
        for large, small in SMALLER.items():
            command = command.replace(large, small)
        words = shlex.split(command)
        assert words[0] == "mlsm"
        mlsm(*words[1:])
    assert (folder / "properties.html").stat().st_size > 10_000


def test_recipe_runs_with_another_encoder(folder: Path) -> None:
    (recipe,) = [block for block in BLOCKS if "huggingface.sh" in block]
    # valid.txt has too few passages to compare encoders on
    command = f"{recipe.splitlines()[-1].replace('valid.txt', 'train.txt')} --updates 4 --batch-size 8 --cpu"
    settings = {"TEACHER": "encoder", "STUDENT": "1x64", "PIECES": "300", "ATOMS": "32", "TOKENS": "500"}
    printed = run_in(folder, command, **settings)
    assert re.search(r"held-out kl: \d\.\d+ before, \d\.\d+ after", printed)
    assert re.search(r"^small-run/model .*nDCG|nDCG@10", printed, flags=re.M)
    assert len(re.findall(r"^.*\[MASK\].*\d\.\d\d$", printed, flags=re.M)) == 2


def test_the_demo_runs_to_its_end_and_resumes(tmp_path: Path) -> None:
    def run(*words: object) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, words)], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout

    run(REPOSITORY / "scripts" / "collect_corpus.py", "--output", "text", "--max-megabytes", 0.5)
    demo = (REPOSITORY / "examples" / "mlsm" / "demo.py", "--corpus", "text/train.txt", "--output", "demo")
    printed = run(*demo, "--updates", 8, "--auxiliary-updates", 8)
    for sentence in ("validation KL on", "what the model fills in", "ten latent properties", "The demo took"):
        assert sentence in printed
    named = re.findall(r"^  ([A-Za-z]{3,}), ([A-Za-z]{3,}), ([A-Za-z]{3,}): (_.+)$", printed, flags=re.M)
    assert named
    assert all(f"_{word}" in tokens for *words, tokens in named for word in words[:1])
    assert len(re.findall(r"^    model: .* \d\.\d\d$", printed, flags=re.M)) == 3
    (page,) = re.findall(r"^  file://(.+)$", printed, flags=re.M)
    assert Path(page).is_file()
    (fill,) = re.findall(r"^  (\S+ -c .+)$", printed, flags=re.M)
    assert run_in(tmp_path, fill).startswith("[('Return the")
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("demo/**/*") if path.suffix in (".pt", ".npy")}
    assert len(files) > 5
    assert (
        run(*demo, "--updates", 8, "--auxiliary-updates", 8).partition("validation KL")[2].splitlines()[:3]
        == (printed.partition("validation KL")[2].splitlines()[:3])
    )
    assert {path: path.stat().st_mtime_ns for path in files} == files
