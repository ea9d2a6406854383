"""The commands and lines of docs/huggingface.md and of its example run in a clean folder."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM

from tests.docs.pages import read
from tests.documented import bash_blocks, clean_folder, run_in
from tests.tiny_hf_models import make_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_python_in_module")]

PAGE, EXAMPLE = "docs/huggingface.md", "examples/huggingface/README.md"
SMALL = "--max-length 32 --updates 2 --batch-size 4 --cpu"
CODES = "--atoms 40 --tokens 800"
SMALLER = {
    "--epochs 3": "",
    "--nproc-per-node 4": "--nproc-per-node 2",
    "adapted --objective mlsm+mlm": (
        "scripted --objective mlsm+mlm --atoms 40 --max-length 32 --updates 2 --batch-size 4"
    ),
    "--max-length 128": "--max-length 32",
    '"adapted", epochs=3': (
        '"in-python", max_length=32, epochs=0.02, training=TrainingSettings(batch_size=4, cpu=True)'
    ),
    "CodingSettings(layer=4)": "CodingSettings(layer=3)",
    "max_steps=20": "max_steps=2, use_cpu=True",
}


def smaller(command: str) -> str:
    for large, small in SMALLER.items():
        command = command.replace(large, small)
    if " adapt MODEL" not in command:
        return command
    return " ".join([command.strip(), SMALL, CODES if "mlsm+mlm" in command else ""])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> Path:
    root = clean_folder(tmp_path_factory.mktemp("huggingface"), english_text[0])
    make_model("bert", root / "train.txt", root / "MODEL", kind=AutoModelForMaskedLM)
    return root


def test_the_commands_adapt_a_model_alone_and_in_ranks(folder: Path) -> None:
    one, ranks = bash_blocks(read(PAGE))
    codes = bash_blocks(read(EXAMPLE))[-1]
    assert "mlsm adapt MODEL --text" in one
    assert "mlsm adapt MODEL --text" in read("README.md")
    assert "held-out mlm_loss" in run_in(folder, smaller(one))
    AutoModelForMaskedLM.from_pretrained(folder / "adapted" / "model")
    in_ranks = ranks.replace("--output adapted", "--objective mlsm+mlm --output in-ranks")
    run_in(folder, smaller(in_ranks))
    (folder / "dictionary").symlink_to(folder / "in-ranks" / "dictionary")
    assert "tokens coded" in run_in(folder, smaller(codes))
    assert (folder / "tokens" / "train.codes" / "meta.json").exists()


def test_a_small_encoder_comes_out_of_a_published_one(folder: Path) -> None:
    train, vectors, inspect, evaluate, *_ = bash_blocks(read("docs/small_encoder.md"))
    assert "--student 4x256 --vocab-size" in train
    assert "mlsm adapt MODEL --student 4x256 --vocab-size" in read("README.md")
    train, vectors = (
        command.replace("TEACHER", "MODEL").replace("8000", "300").replace("valid.txt", "train.txt").strip()
        for command in (train, vectors)
    )
    small = train.replace("4x256", "1x64")
    run_in(folder, f"{small} --atoms 40 --k 4 --tokens 500 --updates 2 --batch-size 4 --cpu")
    narrow = vectors.replace("4x256", "1x16")
    assert "it learns 16 of 32 directions" in run_in(folder, f"{narrow} --updates 2 --batch-size 4 --cpu")
    assert "40 atoms" in run_in(folder, inspect)
    for name in ("train.tsv", "test.tsv"):
        lines = [f"{label}\tthe {word} of a value" for label, word in (("0", "name"), ("1", "class"))] * 4
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    printed = run_in(folder, evaluate.replace("TEACHER", "MODEL").replace("held_out.txt", "train.txt"))
    assert "small/model" in printed


def test_a_student_of_fairseq_has_its_own_vocabulary(folder: Path) -> None:
    *_, commands, vectors = (block.replace("TEACHER", "MODEL") for block in bash_blocks(read("docs/small_encoder.md")))
    commands = commands.replace("4000", "300")
    commands = commands.replace("--atoms 500", "--atoms 40 --k 4").replace("--tokens 100000", "--tokens 500")
    commands = commands.replace("--layer 5", "--layer 3")
    commands = commands.replace(" --output dict", " --tokens-per-sample 32 --output dict")
    assert "--task masked_latent_semantic" in run_in(folder, commands)
    size = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-attention-heads 2 --tokens-per-sample 32 --cpu"
    vectors = vectors.replace("--save-dir", f"{size} --max-update 2 --num-workers 0 --save-dir")
    assert "sentence-transformers opens it, too" in run_in(folder, vectors)


def test_the_lines_of_python_run(folder: Path) -> None:
    (whole,) = re.findall(r"```python\n(.*?)```", read(PAGE), flags=re.S)
    (parts,) = re.findall(r"```python\n(.*?)```", read(EXAMPLE), flags=re.S)
    assert len(run_in(folder, f"{sys.executable} - <<'END'\n{smaller(whole)}\nEND").splitlines()[-1].split()) == 2
    if not (folder / "dictionary").exists():
        pytest.skip("the test above makes the dictionary")
    run_in(folder, f"{sys.executable} - <<'END'\n{smaller(parts)}\nEND")
    AutoModelForMaskedLM.from_pretrained(folder / "model")


def test_the_example_runs(folder: Path) -> None:
    command, script, _ = bash_blocks(read(EXAMPLE))
    run_in(folder, smaller(command).replace("--output adapted", "--output by-example"))
    script = smaller(script)
    further = (folder / "examples" / "huggingface" / "adapt.yaml").read_text(encoding="utf-8")
    (folder / "cpu.yaml").write_text(f"use_cpu: true\n{further}", encoding="utf-8")
    for objective, config in (("mlsm+mlm", ""), ("taco", "--config cpu.yaml")):
        words = script.replace("scripted --objective mlsm+mlm", f"{objective} --objective {objective}").strip()
        assert "after: {'eval_loss'" in run_in(folder, f"{words} {config}")
        AutoModelForMaskedLM.from_pretrained(folder / objective / "model")
    lines = (folder / "examples" / "huggingface" / "adapt.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 90
