"""The commands of README and docs run in a clean folder; only their numbers are made smaller."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.cli.binarize import SAVE_DIR
from mlsm_plugin.cli.next_commands import BLOCKS
from mlsm_plugin.core.sparse_coding.encode import normalize_rows
from mlsm_plugin.fairseq_plugin.pipelines.training_recipe import PLAIN, TrainingPlan, shell_command, training_words
from tests.conftest import CRITERIONS, REPOSITORY, TINY_MODEL, TINY_TRAINING, WITH_AUXILIARY
from tests.docs.pages import block_with, read
from tests.documented import TINY_HYDRA, bash_blocks, clean_folder, run_in

pytestmark = pytest.mark.slow

README, COMMANDS = read("README.md"), read("docs/commands.md")
EXAMPLE = read("examples/mlsm/README.md")
SMALLER = {
    "--vocab-size 30000": "--vocab-size 400",
    "--vocab-size 4000": "--vocab-size 400",
    "--corpus my.txt": "--corpus train.txt",
    "--arch mlsm_modern_base --max-update 100000": " ".join(
        [*TINY_MODEL, *TINY_TRAINING, "--max-update", "2", "--warmup-updates", "1"]
    ).replace("--lr-scheduler fixed", ""),
    "--layer 12": "--layer 2",
    "--output dict": "--output dict --atoms 16 --tokens 500 --iterations 3 --tokens-per-sample 64",
    "--dictionary dict": "--dictionary dict --tokens-per-sample 64",
    "--auxiliary-arch mlsm_modern_base": " ".join(
        ["--auxiliary-arch", "mlsm_modern_tiny", *TINY_MODEL[2:], "--auxiliary-updates", "2", "--cpu"]
    ),
    "--atoms 3000 --lambda 0.05": "--atoms 16 --lambda 0.05 --tokens 500 --iterations 3 --tokens-per-sample 64",
}


def pipeline_commands() -> list[str]:
    """The commands of the table of steps, in order."""
    rows = [row.split("|")[2].strip() for row in COMMANDS.splitlines() if row.startswith("| ") and row.count("|") == 5]
    return [row.strip("`") for row in rows if row.startswith("`")]


def smaller(command: str) -> str:
    for large, small in SMALLER.items():
        command = command.replace(large, small)
    tiny = " ".join([*TINY_MODEL, *TINY_TRAINING, "--mlm-weight", "1", "--max-update", "2", "--save-dir", "model"])
    return command.replace("latent_semantic_kl ...", f"latent_semantic_kl {tiny}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> Path:
    return clean_folder(tmp_path_factory.mktemp("readme"), english_text[0])


@pytest.mark.usefixtures("warm_python")
def test_every_command_of_the_pipeline_table_runs_in_order(folder: Path) -> None:
    commands = pipeline_commands()
    assert [command.split()[0] for command in commands] == [*["mlsm"] * 5, "fairseq-train", "mlsm"]
    for command in commands:
        printed = run_in(folder, smaller(command))
        if command.startswith("fairseq-train"):
            for name in ("first.log", "second.log"):  # to be drawn below
                (folder / name).write_text(printed, encoding="utf-8")
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "model" / "checkpoint_best.pt").exists()


def test_the_training_command_is_the_one_that_is_printed() -> None:
    """By `mlsm binarize`, for a text of the size that the README names."""
    plan = TrainingPlan(tokens=450_000, blocks=BLOCKS, objective=PLAIN)
    command = shell_command(training_words("data-bin", SAVE_DIR, plan, user_dir="mlsm_plugin"))
    assert block_with("README.md", "fairseq-train").strip() == re.sub(r"\n +", "\n", command)


OBJECTIVES = [("plain_masked_lm", "masked_lm"), *re.findall(r"^\| \[.+?\| `(\w+)` \| `(\w+)` \|", README, flags=re.M)]


@pytest.fixture(scope="module")
def prepared_folder(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> Path:
    """A clean folder in which the README's first commands were run; the last of them prints the training command."""
    folder = clean_folder(tmp_path_factory.mktemp("three"), english_text[0])
    shutil.copyfile(english_text[0], folder / "train.txt")  # NPM needs groups of texts that share phrases
    (folder / "scripts").symlink_to(REPOSITORY / "scripts")
    printed = run_in(folder, smaller(block_with("README.md", "collect_corpus.py")))
    assert "\nTrain masked LM with:\n\nfairseq-train data-bin " in printed
    return folder


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(("task", "criterion"), OBJECTIVES, ids=[task for task, _ in OBJECTIVES])
def test_three_commands_train_a_model(folder: Path, prepared_folder: Path, task: str, criterion: str) -> None:
    """With each objective of the table; the codes of MLSM are those of the steps above."""
    folder = folder if task == "masked_latent_semantic" else prepared_folder
    assert set(CRITERIONS.items()) == set(OBJECTIVES)
    (row,) = [line for line in README.splitlines() if f"| `{task}` |" in line] or [""]
    masks = "without the two `--mask` options" not in row
    sizes = "--encoder-layers 2 --encoder-embed-dim 32 --encoder-attention-heads 2 --num-workers 0 --cpu"
    if task in WITH_AUXILIARY:
        assert "`--auxiliary-checkpoint hf:MODEL" in row
        if not (folder / "teacher").exists():
            train_model(folder, "plain_masked_lm", "masked_lm", "teacher", sizes)
        sizes += " --auxiliary-checkpoint teacher/checkpoint_best.pt"
    if task == "sentence_vectors":
        flags = " --sample-break-mode eos --batch-size 32"
        assert f"hf:MODEL{flags}`" in row
        sizes += flags
    if task == "span_denoising":
        assert "--arch denoising_small" in README
        sizes += " --arch denoising_small --decoder-layers 1 --decoder-attention-heads 2"
    train_model(folder, task, criterion, task, sizes, masks=masks)
    assert (folder / task / "checkpoint_best.pt").exists()


def train_model(folder: Path, task: str, criterion: str, save_dir: str, sizes: str, *, masks: bool = True) -> None:
    """Run the README's training with a task, for two updates."""
    training = block_with("README.md", "fairseq-train").replace("\\\n", "").strip()
    training = training.replace("plain_masked_lm --criterion masked_lm", f"{task} --criterion {criterion}")
    if not masks:
        training = re.sub(r"--mask-prob\S* \S+ ", "", training)
    run_in(folder, f"{training.replace(f'--save-dir {SAVE_DIR}', f'--save-dir {save_dir}')} {sizes} --max-update 2")


@pytest.mark.usefixtures("warm_python")
def test_the_recipe_runs_through_both_phases(folder: Path) -> None:
    preparation = block_with("docs/commands.md", "mlsm preprocess")
    (training,) = [block for block in bash_blocks(EXAMPLE) if "pretrain.sh run/data-bin run/model" in block]
    recipe = f"{preparation}{training}"
    tiny = " ".join([*TINY_MODEL, "--cpu", "--num-workers", "0", "--log-interval", "1"])
    run_in(folder, smaller(recipe).replace("run/model", f"run/model {tiny}"), UPDATES="4", BATCH="8", MAX_SENTENCES="4")
    assert (folder / "run" / "model" / "phase1" / "finished").exists()
    assert (folder / "run" / "model" / "phase2" / "checkpoint_best.pt").exists()


@pytest.mark.usefixtures("warm_python")
def test_the_hydra_command_runs(folder: Path) -> None:
    run_in(folder, f"{block_with('docs/differences.md', 'fairseq-hydra-train').strip()} {TINY_HYDRA}")
    assert (folder / "run" / "model" / "checkpoint_best.pt").exists()


@pytest.mark.usefixtures("warm_python")
def test_checkpoints_are_used_as_documented(folder: Path) -> None:
    """Fine-tuning, minimal pairs, curves; needs the model of the pipeline table."""
    page = "docs/using_models.md"
    finetune, pairs, plot, export, published = bash_blocks(read(page))
    rows = [f"{label}\t{text}" for label, text in (("good", "A fine name."), ("bad", "No value at all."))]
    for split in ("train", "valid"):
        (folder / f"{split}.tsv").write_text("\n".join(rows * 8) + "\n", encoding="utf-8")
    printed = run_in(folder, f"{finetune.strip()} --max-epoch 1 --cpu")
    assert len(re.findall(r"^ +(?:mean|\d) +[\d.]+$|^deviation +[\d.]+$", printed, flags=re.M)) == 5
    (call,) = re.findall(r"`(transformers\.pipeline\(.+\))` uses\s+it", read(page))
    assert re.search(r"'label': '(good|bad)'", run_python(folder, f"import transformers\nprint({call})"))
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
    printed = run_in(folder, published.replace("roberta-base model", f"{export.split()[3]} imported"))
    assert "ids are the same on" in printed
    assert (folder / "imported" / "dict.txt").is_file()


def python_block(page: str, word: str = "") -> str:
    """The one Python block of a page that holds ``word``."""
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", read(page), flags=re.S) if word in block]
    return block


def run_python(folder: Path, code: str) -> str:
    return run_in(folder, f"{sys.executable} - <<'END'\n{code}\nEND")


@pytest.mark.usefixtures("warm_python")
def test_the_documented_lines_load_a_model(folder: Path) -> None:
    code = python_block("README.md").replace("demo/model", "model")
    words, properties = run_python(folder, code).splitlines()
    assert re.fullmatch(r"0\.\d\d ?\S+(, 0\.\d\d ?\S+){2}", words)
    assert all(re.fullmatch(r"0\.\d\d .*", name) for name in properties.split(" | "))  # few tokens name few
    (loading,) = python_block("docs/using_models.md", "demo/model").replace("demo/model", "model").split("\n\n")[1:]
    assert loading.strip() in code


def test_the_documented_lines_code_hidden_states() -> None:
    random = np.random.default_rng(0)
    dictionary = normalize_rows(random.normal(size=(40, 16)).astype(np.float32))
    names = {"hidden": random.normal(size=(30, 16)).astype(np.float32), "dictionary": dictionary}
    exec(python_block("docs/dictionaries.md"), names)
    assert names["result"].codes.shape == (30, 40)
    assert max(names["result"].gap) < 1e-4


SMALLER_DOCS = {
    "--dictionary dict": "--dictionary dict --tokens-per-sample 64",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--threads 4": "--threads 1 --shard-tokens 2000",
    "--arch mlsm_roberta_tiny": " ".join([*TINY_MODEL, *TINY_TRAINING]),
    "--sample-break-mode complete --tokens-per-sample 512": "",
    "--optimizer adam --lr 1e-4 --batch-size 16 --max-update 1000": "--max-update 2 --save-dir model-of-docs",
}


def doc_command(page: str, *words: str) -> str:
    """The one bash block of a page of ``docs`` that holds all ``words``, with smaller numbers."""
    block = block_with(f"docs/{page}", *words)
    for large, small in SMALLER_DOCS.items():
        block = block.replace(large, small)
    return block


@pytest.mark.usefixtures("warm_python")
def test_the_commands_of_the_docs_run(folder: Path) -> None:
    """One of each kind; test_pages.py checks that all are understood. Needs the files of the pipeline table."""
    for codes in ("train.codes", "valid.codes"):
        shutil.rmtree(folder / "data-bin" / codes)
    run_in(folder, doc_command("encoding.md", "torchrun"))
    whole = [(folder / "data-bin" / codes / "meta.json").stat().st_size for codes in ("train.codes", "valid.codes")]
    assert min(whole) > 0

    for codes in ("train.codes", "valid.codes"):
        shutil.rmtree(folder / "data-bin" / codes)
    block = doc_command("encoding.md", "--coverage 0.3")
    run_in(folder, block)
    meta = json.loads((folder / "data-bin" / "train.codes" / "meta.json").read_text())
    assert (meta["coverage"], meta["coverage_seed"]) == (0.3, 7)

    for codes in ("train.codes", "valid.codes"):
        shutil.rmtree(folder / "data-bin" / codes)
    shutil.rmtree(folder / "model-of-docs")
    run_in(folder, doc_command("encoding.md", "--latent-source online"))
    assert (folder / "model-of-docs" / "checkpoint_best.pt").exists()


@pytest.mark.usefixtures("warm_python")
def test_a_hold_phase_is_brought_to_its_end(folder: Path) -> None:
    """The schedule of docs/speed.md: constant in the middle, and decayed by the same command with other numbers."""
    tiny = "--arch mlsm_modern_tiny --encoder-layers 2 --encoder-embed-dim 32 --encoder-attention-heads 2 --cpu"
    block = block_with("docs/speed.md", "tri_stage").replace("--arch mlsm_modern_small", tiny)
    steps = "--warmup-steps 1000 --hold-steps 89000 --decay-steps 10000 --max-update 100000"
    assert steps in block
    log = " --log-format simple --log-interval 1 --num-workers 0 --no-epoch-checkpoints"
    held = block.replace(steps, "--warmup-steps 1 --hold-steps 8 --decay-steps 3 --max-update 4").rstrip() + log
    decayed = block.replace(steps, "--warmup-steps 1 --hold-steps 4 --decay-steps 3 --max-update 8").rstrip() + log
    rates = [
        [float(rate) for rate in re.findall(r"train_inner .*? lr=([\d.e-]+)", run_in(folder, command))]
        for command in (held, decayed)
    ]
    assert rates[0][1:] == [1e-3] * 3
    assert len(rates[1]) == 4
    assert rates[1][-1] < rates[1][-2] < 1e-3
