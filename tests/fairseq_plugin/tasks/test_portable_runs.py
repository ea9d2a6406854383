"""A run keeps the vocabulary that it began with; checkpoints of another one are refused in one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fairseq import tasks

from mlsm_plugin.core.files.model_files import DICTIONARY_NAME, MODEL_NAME
from mlsm_plugin.core.text.vocabulary_record import TOKENIZER, VOCABULARY
from mlsm_plugin.hub import from_pretrained
from tests.conftest import CRITERIONS, WITH_AUXILIARY, Pipeline, fairseq_train, made_once, mlsm
from tests.core.text.test_vocabulary_record import exchange_pieces
from tests.tiny_run import training_config

TASKS = sorted(CRITERIONS)
DENOISING = ("--arch", "denoising_small", "--encoder-layers", 1, "--decoder-layers", 1, "--encoder-attention-heads", 2,
             "--decoder-attention-heads", 2, "--encoder-embed-dim", 32, "--encoder-ffn-embed-dim", 32,
             "--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 32)  # fmt: skip
FLAGS = {
    "masked_latent_semantic": (),
    "nonparametric_masked_lm": ("--group-size", 4, "--batch-size", 2),
    "plain_masked_lm": (),
    "span_denoising": DENOISING,
    "sentence_vectors": (),
    "state_regression": (),
    "taco": (),
}


@pytest.fixture(scope="session")
def others(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The data of the pipeline with two other tokenizers: ``same`` and ``smaller`` number of pieces."""

    def make(root: Path) -> None:
        text = pipeline.train_text.read_text(encoding="utf-8").splitlines(keepends=True)
        (root / "half.txt").write_text("".join(text[: len(text) // 2]), encoding="utf-8")
        for name, pieces in (("same", 800), ("smaller", 700)):
            mlsm("tokenizer", "--input", root / "half.txt", "--vocab-size", pieces, "--output", root / f"{name}-tok")
            texts = ("--train", pipeline.train_text, "--valid", pipeline.valid_text)
            mlsm("binarize", "--tokenizer", root / f"{name}-tok", *texts, "--output", root / name)
            if name == "same":  # the codes of a token do not depend on its name
                shutil.copytree(pipeline.data_bin, root / "renamed", ignore=shutil.ignore_patterns(DICTIONARY_NAME))
                shutil.copy(root / name / DICTIONARY_NAME, root / "renamed")

    root = made_once(tmp_path_factory, "other-vocabularies", make)
    return {name: root / name for name in ("same", "smaller", "renamed")}


def config_of(name: str, data: object, *flags: object) -> Any:
    arch = "denoising_small" if name == "span_denoising" else "mlsm_roberta_tiny"
    return training_config(data, *flags, task=name, criterion=CRITERIONS[name], arch=arch)


def task_of(name: str, data: object, *flags: object) -> Any:
    return tasks.setup_task(config_of(name, data, *flags).task)


def begun(task: Any) -> Any:
    """The task at the beginning of its first epoch."""
    task.begin_epoch(1, SimpleNamespace(set_epoch=lambda epoch: None))
    return task


FAST = ("plain_masked_lm", "span_denoising")
SOME_FAST = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in TASKS]


@pytest.mark.parametrize("no_save", [True, False])
@pytest.mark.parametrize("name", ["plain_masked_lm", "span_denoising"])
def test_tokenizer_is_copied_to_checkpoints_unless_nothing_is_saved(
    pipeline: Pipeline, tmp_path: Path, name: str, no_save: bool
) -> None:
    begun(task_of(name, pipeline.data_bin, "--save-dir", tmp_path, *(("--no-save",) if no_save else ())))
    expected = set() if no_save else {"dict.txt", "sentencepiece.bpe.model"}
    assert {path.name for path in tmp_path.iterdir()} == expected


@pytest.mark.parametrize("name", SOME_FAST)
def test_state_of_a_task_names_the_vocabulary(pipeline: Pipeline, others: dict[str, Path], name: str) -> None:
    state = begun(task_of(name, pipeline.data_bin, "--no-save")).state_dict()
    plain = begun(task_of("plain_masked_lm", pipeline.data_bin, "--no-save")).state_dict()
    assert plain.items() <= state.items()  # that of MLSM has its codes, too
    for folder in others.values():
        other = begun(task_of("plain_masked_lm", folder, "--no-save"))
        assert other.state_dict()[VOCABULARY] != state[VOCABULARY]
        with pytest.raises(ValueError, match="was trained with another vocabulary"):
            other.load_state_dict(state)
    same = task_of(name, pipeline.data_bin)
    same.load_state_dict({})  # a checkpoint of an earlier version
    same.load_state_dict(state)
    assert same.state_dict() == state


def test_vocabulary_does_not_depend_on_counts(pipeline: Pipeline, tmp_path: Path) -> None:
    lines = (pipeline.data_bin / DICTIONARY_NAME).read_text(encoding="utf-8").splitlines()
    recounted = "".join(f"{line.rpartition(' ')[0]} 5\n" for line in lines)
    (tmp_path / DICTIONARY_NAME).write_text(recounted, encoding="utf-8")
    folders = (pipeline.data_bin, tmp_path)
    first, second = (begun(task_of("plain_masked_lm", folder, "--no-save")).state_dict() for folder in folders)
    assert first[VOCABULARY] == second[VOCABULARY]
    assert {*first} - {*second} == {TOKENIZER}
    assert len(first[VOCABULARY]) == 64


def test_dictionary_beside_a_checkpoint_says_its_vocabulary_if_its_state_does_not(
    pipeline: Pipeline, others: dict[str, Path], tmp_path: Path
) -> None:
    task, checkpoint = task_of("taco", pipeline.data_bin, "--no-save"), tmp_path / "checkpoint_last.pt"
    task.check_starts_from(checkpoint, {})  # nothing says it
    shutil.copy(pipeline.data_bin / DICTIONARY_NAME, tmp_path)
    task.check_starts_from(checkpoint, {})
    shutil.copy(others["same"] / DICTIONARY_NAME, tmp_path)
    with pytest.raises(ValueError, match=f"{checkpoint} was trained with another vocabulary"):
        task.check_starts_from(checkpoint, {})
    task.check_starts_from(checkpoint, dict(begun(task).state_dict()))  # the state counts


def test_a_run_keeps_its_tokenizer(pipeline: Pipeline, tmp_path: Path) -> None:
    data = shutil.copytree(pipeline.data_bin, tmp_path / "data")
    saved = dict(begun(task_of("taco", data, "--no-save")).state_dict())
    task = task_of("taco", data, "--no-save")
    task.check_starts_from(tmp_path / "checkpoint_last.pt", saved)
    exchange_pieces(data)
    remedy = "make the data with the files beside the checkpoint, or pass another --save-dir to start anew"
    with pytest.raises(ValueError, match=f"last.pt was trained with another tokenizer .* of {data} .*; {remedy}"):
        task.check_starts_from(tmp_path / "checkpoint_last.pt", saved)
    task.check_starts_from(tmp_path / "checkpoint_last.pt", {VOCABULARY: saved[VOCABULARY]})  # of an earlier version
    shards = task_of("taco", f"{pipeline.data_bin}:{data}", "--no-save")
    with pytest.raises(ValueError, match=f"{data} was binarized with another tokenizer than {pipeline.data_bin}"):
        begun(shards)


@pytest.mark.parametrize("name", SOME_FAST)
@pytest.mark.slow
def test_shards_have_one_vocabulary(pipeline: Pipeline, others: dict[str, Path], name: str) -> None:
    for other in others:
        shards = f"{pipeline.data_bin}:{others[other]}"
        flags = ("--latent-codes", pipeline.data_bin) if name == "masked_latent_semantic" else ()
        if name in WITH_AUXILIARY:
            flags = ("--auxiliary-checkpoint", pipeline.auxiliary)
        task = task_of(name, shards, *FLAGS[name], *flags)
        if name == "masked_latent_semantic" and other != "renamed":
            continue  # its codes are of other files, which is refused first
        task.load_dataset("train", epoch=1)
        with pytest.raises(ValueError, match=r"has another vocabulary than the model or the first folder"):
            task.load_dataset("train", epoch=2)


def run(data: object, save_dir: Path, task: str, *flags: object, updates: int = 2, check: bool = True) -> Any:
    wanted = (*FLAGS[task], "--max-update", updates, *flags)
    return fairseq_train(data, save_dir, *wanted, task=task, check=check)


def error_of(result: Any) -> str:
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return str(result.stderr.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TASKS if name not in WITH_AUXILIARY])  # the auxiliary refuses first
def test_runs_with_another_vocabulary_are_refused_and_nothing_is_lost(
    pipeline: Pipeline, others: dict[str, Path], tmp_path: Path, name: str
) -> None:
    save_dir, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoint_last.pt"
    run(pipeline.data_bin, save_dir, name)
    before = {path.name: path.read_bytes() for path in save_dir.iterdir() if path.is_file()}
    assert {DICTIONARY_NAME, MODEL_NAME, checkpoint.name} <= set(before)
    for other in ("renamed", "smaller") if name in FAST else ("renamed",):
        ways = {
            "resume": (save_dir, ()),
            "finetune": (tmp_path / "new", ("--finetune-from-model", checkpoint)),
            "restore": (tmp_path / "new", ("--restore-file", checkpoint, "--reset-optimizer")),
        }
        for folder, flags in ways.values():
            error = error_of(run(others[other], folder, name, *flags, updates=4, check=False))
            assert f"{checkpoint} was trained with another vocabulary" in error
    assert before == {path.name: path.read_bytes() for path in save_dir.iterdir() if path.is_file()}
    started = run(pipeline.data_bin, save_dir, name, updates=3)  # the same one goes on
    assert "@ 2 updates" in started.stdout + started.stderr


@pytest.mark.slow
def test_new_run_in_the_folder_of_other_checkpoints_does_not_replace_their_tokenizer(
    pipeline: Pipeline, others: dict[str, Path], tmp_path: Path
) -> None:
    save_dir = tmp_path / "run"
    run(pipeline.data_bin, save_dir, "plain_masked_lm")
    (save_dir / "checkpoint_last.pt").rename(save_dir / "checkpoint_old.pt")
    before = (save_dir / DICTIONARY_NAME).read_bytes()
    error = error_of(run(others["same"], save_dir, "plain_masked_lm", check=False))
    assert f"{save_dir} has checkpoints of another vocabulary than {others['same']}" in error
    assert (save_dir / DICTIONARY_NAME).read_bytes() == before
    shutil.copy(others["same"] / DICTIONARY_NAME, save_dir)
    with pytest.raises(ValueError, match="was trained with another vocabulary"):
        from_pretrained(save_dir, "checkpoint_old.pt")
