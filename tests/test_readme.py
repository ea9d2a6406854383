"""The commands of the README, copied from it and run in a clean folder, with smaller numbers only."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlsm_plugin.cli.main import COMMANDS
from tests.conftest import REPOSITORY, TINY_MODEL, TINY_TRAINING

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
EXAMPLE = (REPOSITORY / "examples" / "mlsm" / "README.md").read_text(encoding="utf-8")
SMALLER = {
    "--vocab-size 30000": "--vocab-size 400",
    "--arch mlsm_roberta_base --max-update 100000": " ".join(
        [*TINY_MODEL, *TINY_TRAINING, "--max-update", "2", "--warmup-updates", "1"]
    ).replace("--lr-scheduler fixed", ""),
    "--layer 12": "--layer 2",
    "--output dict": "--output dict --atoms 16 --tokens 500 --iterations 3 --tokens-per-sample 64",
    "--dictionary dict": "--dictionary dict --tokens-per-sample 64",
    "--auxiliary-arch mlsm_roberta_base": " ".join(
        ["--auxiliary-arch", "mlsm_roberta_tiny", *TINY_MODEL[2:], "--auxiliary-updates", "2", "--cpu"]
    ),
    "--atoms 3000 --lambda 0.05": "--atoms 16 --lambda 0.05 --tokens 500 --iterations 3 --tokens-per-sample 64",
}
TINY_HYDRA = (
    "model._name=mlsm_roberta_tiny +model.encoder_embed_dim=32 +model.encoder_ffn_embed_dim=64 "
    "+model.encoder_attention_heads=2 optimization.max_update=2 lr_scheduler.warmup_updates=1 "
    "optimization.update_freq=[1] dataset.batch_size=8 dataset.num_workers=0 common.cpu=true"
)


def bash_blocks(text: str) -> list[str]:
    return [re.sub(r"^ +", "", block, flags=re.M) for block in re.findall(r"```bash\n(.*?)```", text, flags=re.S)]


def pipeline_commands() -> list[str]:
    """The third column's commands of the pipeline table, in order."""
    rows = [row.split("|")[2].strip() for row in README.splitlines() if row.startswith("| ") and row.count("|") == 5]
    return [row.strip("`") for row in rows if row.startswith("`")]


def smaller(command: str) -> str:
    for large, small in SMALLER.items():
        command = command.replace(large, small)
    tiny = " ".join([*TINY_MODEL, *TINY_TRAINING, "--max-update", "2", "--save-dir", "model"])
    return command.replace("latent_semantic_kl ...", f"latent_semantic_kl {tiny}")


def run_in(folder: Path, command: str, **environment: str) -> str:
    """Run ``command`` in bash as a user does; it must succeed. Returns its standard output."""
    variables = {
        **os.environ,
        **environment,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-1500:]}\n{result.stderr[-3000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> Path:
    """A clean folder with ``train.txt``, ``valid.txt`` and the examples, and no checkout around it."""
    root = tmp_path_factory.mktemp("readme")
    lines = english_text[0].read_text(encoding="utf-8").splitlines(keepends=True)
    (root / "train.txt").write_text("".join(lines[:800]), encoding="utf-8")
    (root / "valid.txt").write_text("".join(lines[800:860]), encoding="utf-8")
    shutil.copytree(REPOSITORY / "examples", root / "examples")
    (root / "mlsm_plugin").symlink_to(REPOSITORY / "mlsm_plugin")
    return root


def test_every_command_of_the_pipeline_table_runs_in_order(folder: Path) -> None:
    commands = pipeline_commands()
    assert [command.split()[0] for command in commands] == [*["mlsm"] * 5, "fairseq-train", "mlsm"]
    for command in commands:
        run_in(folder, smaller(command))
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "model" / "checkpoint_best.pt").exists()


def test_the_recipe_runs_through_both_phases(folder: Path) -> None:
    (recipe,) = [block for block in bash_blocks(README) if "pretrain.sh" in block]
    tiny = " ".join([*TINY_MODEL, "--cpu", "--num-workers", "0", "--log-interval", "1"])
    run_in(folder, smaller(recipe).replace("run/model", f"run/model {tiny}"), UPDATES="4", BATCH="8", MAX_SENTENCES="4")
    assert (folder / "run" / "model" / "phase1" / "finished").exists()
    assert (folder / "run" / "model" / "phase2" / "checkpoint_best.pt").exists()
    assert "preprocess" in recipe
    assert any("pretrain.sh run/data-bin run/model" in block for block in bash_blocks(EXAMPLE))


def test_the_hydra_command_runs(folder: Path) -> None:
    (command,) = [block for block in bash_blocks(README) if block.startswith("fairseq-hydra-train")]
    run_in(folder, f"{command.strip()} {TINY_HYDRA}")
    assert (folder / "run" / "model" / "checkpoint_best.pt").exists()


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


def test_the_denoising_example_trains_fills_gaps_and_learns_a_pair_by_heart(folder: Path) -> None:
    text = (REPOSITORY / "examples" / "denoising" / "README.md").read_text("utf-8")
    small, training, hydra, infill, pairs = bash_blocks(text)
    size = "--encoder-layers 1 --encoder-embed-dim 32 --encoder-attention-heads 2 --decoder-attention-heads 2"
    tiny = f"{size} --cpu --num-workers 0"
    printed = run_in(folder, f"{small.strip()} {tiny} --batch-size 4", UPDATES="3", VOCAB="400")
    assert len(re.findall(r"^  <extra_id_\d>  ", printed, flags=re.M)) == 3

    assert "--max-update 100000" in training
    run_in(folder, f"{training.strip()} {tiny} --tokens-per-sample 64 --max-update 2 --save-dir denoising-model")
    tiny_hydra = (
        "model._name=denoising_small +model.encoder_layers=1 +model.encoder_embed_dim=32 task.tokens_per_sample=64 "
        "optimization.max_update=2 dataset.num_workers=0 common.cpu=true optimization.update_freq=[1]"
    )
    run_in(folder, f"{hydra.strip()} {tiny_hydra} checkpoint.save_dir=denoising-hydra")
    for name in ("denoising-model", "denoising-hydra"):
        assert (folder / name / "checkpoint_best.pt").exists()

    assert "walks in" in run_in(folder, infill)
    layers = "--encoder-layers 3 --encoder-embed-dim 256 --encoder-attention-heads 4"
    assert layers in pairs
    learned = run_in(folder, pairs.replace(layers, tiny).replace("--lr 1e-3", "--lr 1e-2"))
    assert learned.splitlines()[-3] == "The cute dog walks in the green park."
    in_python, plain = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert "walks in" in run_in(folder, f"{sys.executable} - <<'END'\n{in_python}\nEND")
    shapes = run_in(folder, f"{sys.executable} - <<'END'\n{plain}\nEND")
    assert shapes.strip() == "{'source': (2, 46), 'target': (2, 12), 'decoder_input': (2, 12)}"


def test_checkpoints_are_used_as_documented(folder: Path) -> None:
    """Fine-tuning, minimal pairs, curves; needs the model of the pipeline table."""
    finetune, pairs, plot, export = (
        next(block for block in bash_blocks(README) if block.startswith(f"mlsm {command}"))
        for command in ("finetune", "evaluate-pairs", "plot", "export-hf")
    )
    rows = [f"{label}\t{text}" for label, text in (("good", "A fine name."), ("bad", "No value at all."))]
    for split in ("train", "valid"):
        (folder / f"{split}.tsv").write_text("\n".join(rows * 8) + "\n", encoding="utf-8")
    printed = run_in(folder, f"{finetune.strip()} --max-epoch 1 --cpu --num-workers 0")
    assert len(re.findall(r"^ +(?:mean|\d) +[\d.]+$|^deviation +[\d.]+$", printed, flags=re.M)) == 5
    assert f'"{finetune.split("--output ")[1].split()[0]}").predict_label("a text")' in README
    label = "from mlsm_plugin.hub import from_pretrained; print(from_pretrained('classifier').predict_label('a text'))"
    assert run_in(folder, f'{sys.executable} -c "{label}"').strip() in ("good", "bad")
    pair = {"sentence_good": "A name is bound.", "sentence_bad": "A name are bound."}
    (folder / "pairs.jsonl").write_text(json.dumps(pair) + "\n", encoding="utf-8")
    trained_head = pairs.replace("--checkpoint model", "--checkpoint aux")
    assert "all" in run_in(folder, trained_head)
    run_in(folder, plot)
    assert (folder / "curves.png").stat().st_size > 10_000
    assert "ids are the same on" in run_in(folder, export)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in (folder / export.split()[3]).iterdir()
    }


def test_the_documented_lines_load_a_model(folder: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    code = block.replace("demo/model", "model")
    output = run_in(folder, f"{sys.executable} - <<'END'\n{code}\nEND")
    assert output.startswith("[('Return the")
    assert len(re.findall(r"^TokenProperties\(token='.+', atoms=\[\(\d+, ", output, flags=re.M)) >= 6


def test_every_subcommand_explains_itself_and_is_in_the_readme() -> None:
    for command in COMMANDS:
        assert f"mlsm {command}" in README
        text = subprocess.run(
            [sys.executable, "-m", "mlsm_plugin.cli.main", command, "--help"],
            capture_output=True, text=True, check=True, cwd=REPOSITORY,
        ).stdout  # fmt: skip
        assert COMMANDS[command].split()[0].lower() in text.lower()


DOCS = REPOSITORY / "docs"
SMALLER_DOCS = {
    "--dictionary dict": "--dictionary dict --tokens-per-sample 64",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--threads 4": "--threads 1 --shard-tokens 2000",
    "--arch mlsm_roberta_tiny": " ".join([*TINY_MODEL, *TINY_TRAINING]),
    "--sample-break-mode complete --tokens-per-sample 512": "",
    "--skip-invalid-size-inputs-valid-test --optimizer adam --lr 1e-4 --batch-size 16 --max-update 1000": (
        "--max-update 2 --save-dir model-of-docs"
    ),
}


def doc_command(page: str, *words: str) -> str:
    """The one bash block of a page of ``docs`` that holds all ``words``, with smaller numbers."""
    (block,) = [
        block for block in bash_blocks((DOCS / page).read_text("utf-8")) if all(word in block for word in words)
    ]
    for large, small in SMALLER_DOCS.items():
        block = block.replace(large, small)
    return block


def test_the_commands_of_the_docs_run(folder: Path) -> None:
    """Those of one process each; tests/cli checks that the others parse. Needs the files of the pipeline table."""
    assert "2 processes" not in run_in(folder, doc_command("encoding.md", "--estimate"))
    for codes in ("train.codes", "valid.codes"):
        shutil.rmtree(folder / "data-bin" / codes)
    run_in(folder, doc_command("encoding.md", "torchrun"))
    whole = [(folder / "data-bin" / codes / "meta.json").stat().st_size for codes in ("train.codes", "valid.codes")]
    assert min(whole) > 0

    for codes in ("train.codes", "valid.codes"):
        shutil.rmtree(folder / "data-bin" / codes)
    block = doc_command("online_and_coverage.md", "--coverage 0.3")
    run_in(folder, block)
    meta = json.loads((folder / "data-bin" / "train.codes" / "meta.json").read_text())
    assert (meta["coverage"], meta["coverage_seed"]) == (0.3, 7)

    for codes in ("train.codes", "valid.codes"):
        shutil.rmtree(folder / "data-bin" / codes)
    shutil.rmtree(folder / "model-of-docs")
    run_in(folder, doc_command("online_and_coverage.md", "--latent-source online"))
    assert (folder / "model-of-docs" / "checkpoint_best.pt").exists()
