"""Whole training runs, started as users start them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from fairseq import tasks

from mlsm_plugin import hub
from tests.conftest import PLUGIN, REPOSITORY, TINY_MODEL, TINY_TRAINING, Pipeline, fairseq_train, logged
from tests.tiny_run import batches, seeded_model, training_config

NO_DROPOUT = ("--dropout", 0, "--attention-dropout", 0)
Run = subprocess.CompletedProcess[str]


@pytest.fixture(autouse=True)
def _one_thread_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models are no faster with several, and two runs at a time then do not get in each other's way."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def at_the_same_time(*runs: Callable[[], Run]) -> list[Run]:
    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(run) for run in runs]]


def command_of(data: object, save_dir: object, *flags: object) -> list[str]:
    """The command of :func:`fairseq_train`, for runs that a test stops or starts itself."""
    words = [
        *(sys.executable, "-u", "-m", "fairseq_cli.train", data, "--user-dir", PLUGIN, "--save-dir", save_dir),
        *("--task", "masked_latent_semantic", "--criterion", "latent_semantic_kl", *TINY_MODEL, *TINY_TRAINING),
        *("--no-epoch-checkpoints", *flags),
    ]
    return [str(word) for word in words]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def updates_in(output: str) -> dict[int, dict[str, str]]:
    """Loss, gradient norm and learning rate of each update, as printed."""
    found = {}
    for line in output.splitlines():
        if "| train_inner |" in line:
            values = dict(re.findall(r"\b(num_updates|loss|kl|mlm_loss|gnorm|lr)[= ]([-+.\de]+)", line))
            found[int(values.pop("num_updates"))] = values
    return found


@pytest.mark.parametrize("flags", [(), ("--update-freq", 2, "--dropout", 0.2, "--attention-dropout", 0.2)])
def test_training_without_latent_loss_equals_masked_lm_update_for_update(
    pipeline: Pipeline, tmp_path: Path, flags: tuple[object, ...]
) -> None:
    common = ("--max-update", 8, "--validate-interval-updates", 3, "--no-save", *flags)
    ours, stock = at_the_same_time(
        partial(fairseq_train, pipeline.data_bin, tmp_path, "--latent-weight", 0, "--mlm-weight", 1, *common),
        partial(fairseq_train, pipeline.data_bin, tmp_path, *common, task="masked_lm"),
    )

    assert len(logged(stock, "loss")) == 8
    assert logged(ours, "loss") == logged(stock, "loss")
    assert logged(ours, "gnorm") == logged(stock, "gnorm")
    assert len(logged(stock, "loss", where="valid")) == 3
    assert logged(ours, "loss", where="valid") == logged(stock, "loss", where="valid")
    assert logged(ours, "mlm_ppl", where="valid") == logged(stock, "ppl", where="valid")


@pytest.mark.slow
def test_run_that_is_killed_and_restarted_equals_one_without_a_break(pipeline: Pipeline, tmp_path: Path) -> None:
    flags = ("--mlm-weight", 1, "--batch-size", 128, "--max-epoch", 2, "--save-interval-updates", 2)
    whole = fairseq_train(pipeline.data_bin, tmp_path / "whole", *flags)
    expected = updates_in(whole.stdout + whole.stderr)
    per_epoch = len(expected) // 2
    assert per_epoch > 10

    found: dict[int, dict[str, str]] = {}
    for stop_after in (per_epoch // 2, per_epoch + per_epoch // 2, None):  # once in each epoch, then to the end
        part = train_until_killed(command_of(pipeline.data_bin, tmp_path / "stopped", *flags), stop_after)
        assert part, "a restarted run printed no update"
        assert stop_after is None or max(part) < len(expected)
        assert min(part) <= max(found, default=0) + 1
        for update, values in part.items():
            assert found.setdefault(update, values) == values
    assert found == expected


def train_until_killed(command: list[str], stop_after: int | None) -> dict[int, dict[str, str]]:
    """Run; once update ``stop_after`` is printed, SIGKILL the run's process group. Returns the printed updates."""
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), start_new_session=True
    )
    assert run.stdout is not None
    lines = []
    try:
        for line in run.stdout:
            lines.append(line)
            if stop_after is not None and stop_after in updates_in(line):
                break
    finally:
        if stop_after is not None:
            os.killpg(run.pid, signal.SIGKILL)
        lines.append(run.stdout.read())  # what was in the pipe
        run.wait()
    assert run.returncode == (0 if stop_after is None else -signal.SIGKILL), "".join(lines)[-3000:]
    return updates_in("".join(lines))


def train_on_two_ranks(data: object, save_dir: Path, *flags: object) -> list[Run]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in (0, 1):
        command = command_of(data, save_dir, *flags)
        command += ["--distributed-init-method", f"tcp://127.0.0.1:{port}", "--distributed-world-size", "2"]
        command += ["--distributed-rank", str(rank), "--distributed-no-spawn", "--distributed-backend", "gloo"]
        ranks.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
        )
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, output, "")
        for process, output in zip(ranks, outputs, strict=True)
    ]


def test_two_ranks_compute_what_one_rank_computes_from_both_their_batches(pipeline: Pipeline, tmp_path: Path) -> None:
    flags = (*NO_DROPOUT, "--mlm-weight", 1, "--max-update", 3, "--clip-norm", 1.0)
    ranks = train_on_two_ranks(pipeline.data_bin, tmp_path / "two", "--ddp-backend", "legacy_ddp", *flags)
    alone = fairseq_train(pipeline.data_bin, tmp_path / "one", "--update-freq", 2, *flags, "--no-save")

    for rank in ranks:
        assert rank.returncode == 0, rank.stdout[-4000:]
    together, expected = updates_in(ranks[0].stdout), updates_in(alone.stdout + alone.stderr)
    assert list(together) == list(expected) == [1, 2, 3]
    for update, values in expected.items():
        for name, value in values.items():
            assert float(together[update][name]) == pytest.approx(float(value), abs=2e-3), (update, name)
    kept = {path.name for path in (tmp_path / "two").iterdir()}
    assert {"checkpoint_last.pt", "dict.txt", "sentencepiece.bpe.model"} <= kept


def test_number_of_loader_processes_does_not_change_training(pipeline: Pipeline, tmp_path: Path) -> None:
    flags = ("--mlm-weight", 1, "--max-update", 6, "--no-save")
    alone, helped = at_the_same_time(
        partial(fairseq_train, pipeline.data_bin, tmp_path, *flags, "--num-workers", 0),
        partial(fairseq_train, pipeline.data_bin, tmp_path, *flags, "--num-workers", 2),
    )
    assert len(updates_in(alone.stdout + alone.stderr)) == 6
    assert updates_in(helped.stdout + helped.stderr) == updates_in(alone.stdout + alone.stderr)
    assert logged(helped, "loss", where="valid") == logged(alone, "loss", where="valid")


@pytest.mark.parametrize(("latent_weight", "mlm_weight"), [(1, 0), (0, 1), (1, 1)])
def test_every_parameter_takes_part_in_every_step_as_torch_ddp_demands(
    pipeline: Pipeline, tmp_path: Path, latent_weight: int, mlm_weight: int
) -> None:
    # fairseq's --ddp-backend pytorch_ddp passes device_ids, which torch refuses on the CPU: so its wrapper, by hand
    cfg = training_config(pipeline.data_bin, "--latent-weight", latent_weight, "--mlm-weight", mlm_weight)
    task = tasks.setup_task(cfg.task)
    model = seeded_model(cfg, task)
    criterion = task.build_criterion(cfg.criterion)
    samples = batches(cfg, "valid", task=task)[:3]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)
        for sample in samples:  # the second forward pass raises where the first left a parameter out
            loss, _, _ = criterion(wrapped, sample)
            loss.backward()
    finally:
        torch.distributed.destroy_process_group()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_half_precision_run_starts_as_float32_does(pipeline: Pipeline, tmp_path: Path) -> None:
    # --fp16 needs CUDA and --bf16 without CUDA means a TPU to fairseq; bf16 runs in test_hydra.py
    flags = ("--mlm-weight", 1, "--max-update", 3, "--no-save", *NO_DROPOUT)
    exact, rounded = at_the_same_time(
        partial(fairseq_train, pipeline.data_bin, tmp_path, *flags),
        partial(fairseq_train, pipeline.data_bin, tmp_path, *flags, "--memory-efficient-fp16"),
    )
    for name in ("kl", "mlm_loss"):
        for where in ("train_inner", "valid"):
            found, expected = (float(logged(run, name, where=where)[0]) for run in (rounded, exact))
            assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("latent_target", ["distribution", "argmax"])
def test_logged_metrics_are_there_and_agree_with_each_other(
    pipeline: Pipeline, tmp_path: Path, latent_target: str
) -> None:
    run = fairseq_train(
        *(pipeline.data_bin, tmp_path, "--latent-target", latent_target, "--latent-weight", 0.5, "--mlm-weight", 2),
        *("--max-update", 3, "--no-save"),
    )
    for where in ("train_inner", "train", "valid"):
        values = {
            name: float(logged(run, name, where=where)[0])
            for name in ("loss", "kl", "nonzeros", "coded", "latent_ppl", "mlm_loss", "mlm_ppl")
        }
        assert values["latent_ppl"] == pytest.approx(2 ** values["kl"], rel=3e-3, abs=0.006)
        assert values["mlm_ppl"] == pytest.approx(2 ** values["mlm_loss"], rel=3e-3)
        assert values["loss"] == pytest.approx(0.5 * values["kl"] + 2 * values["mlm_loss"], rel=3e-3)
        assert 0.5 < values["coded"] <= 1  # end-of-sentence is masked too, and has no code
        assert 1 <= values["nonzeros"] <= 48


def test_data_folders_joined_by_a_colon_are_used_in_turn(pipeline: Pipeline, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    for name in ("dict.txt", "sentencepiece.bpe.model"):
        shutil.copy(pipeline.data_bin / name, second)
    for suffix in ("idx", "bin"):
        shutil.copy(pipeline.data_bin / f"valid.{suffix}", second / f"train.{suffix}")
    shutil.copytree(pipeline.data_bin / "valid.codes", second / "train.codes")

    run = fairseq_train(
        *(f"{pipeline.data_bin}:{second}", tmp_path / "model", "--max-epoch", 3, "--batch-size", 200),
        "--no-save",
    )
    updates = [int(number) for number in logged(run, "num_updates", where="train")]
    first_epoch, second_epoch, third_epoch = (
        after - before for before, after in zip([0, *updates], updates, strict=False)
    )
    assert second_epoch == 1  # 98 sentences
    assert first_epoch == third_epoch > 5
    assert len(logged(run, "kl", where="valid")) == 3


def test_masked_lm_checkpoint_warms_up_a_latent_semantic_model(pipeline: Pipeline, tmp_path: Path) -> None:
    flags = ("--mlm-weight", 1, "--max-update", 1, "--no-save")
    cold, warm = at_the_same_time(
        partial(fairseq_train, pipeline.data_bin, tmp_path / "cold", *flags),
        partial(
            fairseq_train, pipeline.data_bin, tmp_path / "warm", *flags, "--finetune-from-model", pipeline.auxiliary
        ),
    )
    assert (warm.stdout + warm.stderr).count("the checkpoint has no latent head: a new one starts from scratch") == 1
    assert "latent head" not in cold.stdout + cold.stderr
    assert float(logged(warm, "mlm_loss")[0]) < float(logged(cold, "mlm_loss")[0]) - 0.3


@pytest.fixture(scope="module")
def trained(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a trained model; its dataset, codes, dictionary and auxiliary model are gone."""
    root = tmp_path_factory.mktemp("trained")
    shutil.copytree(pipeline.data_bin, root / "data-bin")
    fairseq_train(root / "data-bin", root / "model", "--mlm-weight", 1, "--max-update", 4)
    shutil.rmtree(root / "data-bin")
    yield root / "model"


def test_loading_a_trained_model_needs_nothing_but_its_folder(trained: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(trained, tmp_path / "elsewhere")
    model = hub.from_pretrained(moved)
    assert model.num_atoms == 48
    distribution = model.latent_distribution(model.encode("The statement is executed."))
    assert distribution.shape[-1] == 48
    assert torch.allclose(distribution.sum(dim=-1), torch.ones(()), atol=1e-5)
    assert [len(token.atoms) for token in model.latent_properties("a <mask> here", topk=3)].count(3) >= 3


def classification_data(pipeline: Pipeline, root: Path) -> Path:
    """``input0`` and ``label`` of a toy problem, binarized by fairseq-preprocess: is a sentence long or short?"""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(pipeline.data_bin / "sentencepiece.bpe.model"))
    sentences = [line for line in pipeline.train_text.read_text(encoding="utf-8").splitlines() if 20 < len(line) < 80]
    raw, data = root / "raw", root / "classification"
    raw.mkdir()
    for split, chosen in (("train", sentences[:96]), ("valid", sentences[96:128])):
        encoded = [" ".join(pieces.encode(sentence, out_type=str)) for sentence in chosen]
        (raw / f"{split}.input0").write_text("\n".join(encoded) + "\n", encoding="utf-8")
        labels = ["long" if len(sentence) > 50 else "short" for sentence in chosen]
        (raw / f"{split}.label").write_text("\n".join(labels) + "\n", encoding="utf-8")
    for name, extra in (("input0", ["--srcdict", str(pipeline.data_bin / "dict.txt")]), ("label", [])):
        command = [sys.executable, "-m", "fairseq_cli.preprocess", "--only-source", "--workers", "1", *extra]
        command += ["--trainpref", str(raw / f"train.{name}"), "--validpref", str(raw / f"valid.{name}")]
        made = subprocess.run([*command, "--destdir", str(data / name)], capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr[-2000:]
        for file in (data / name).glob(f"*.{name}*"):  # train.input0-None.input0.bin -> train.bin
            file.rename(data / name / f"{file.name.split('.')[0]}.{file.name.split('.')[-1]}")
    return data


def test_trained_model_is_fine_tuned_by_stock_sentence_prediction_and_classifies_from_the_hub(
    trained: Path, pipeline: Pipeline, tmp_path: Path
) -> None:
    data = classification_data(pipeline, tmp_path)
    command = [
        *(sys.executable, "-m", "fairseq_cli.train", data, "--user-dir", PLUGIN, "--save-dir", tmp_path / "classifier"),
        *("--task", "sentence_prediction", "--criterion", "sentence_prediction", *TINY_MODEL),
        *("--restore-file", trained / "checkpoint_last.pt", "--reset-optimizer", "--reset-dataloader"),
        *("--reset-meters", "--reset-lr-scheduler", "--num-classes", 2, "--init-token", 0, "--separator-token", 2),
        *("--max-positions", 64, "--required-batch-size-multiple", 1, "--batch-size", 16, "--max-epoch", 1),
        *("--optimizer", "adam", "--lr", "1e-3", "--lr-scheduler", "fixed", "--num-workers", 0, "--cpu"),
        *("--log-format", "simple", "--best-checkpoint-metric", "accuracy", "--maximize-best-checkpoint-metric"),
        "--no-epoch-checkpoints",
    ]
    run = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment(), check=False
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-4000:]
    assert output.count("the checkpoint's latent head is not used by this task and is left out") == 1
    assert "lm_head.atom_projection" not in output
    assert len(re.findall(r"\| valid \|.*accuracy", output)) == 1

    classifier = hub.from_pretrained(
        tmp_path / "classifier",
        data_name_or_path=str(data),
        sentencepiece_model=str(pipeline.data_bin / "sentencepiece.bpe.model"),
    )
    with torch.no_grad():
        scores = classifier.predict("sentence_classification_head", classifier.encode("This is a test."))
    assert scores.shape == (1, 2)
    assert float(scores.exp().sum()) == pytest.approx(1, abs=1e-5)
    assert classifier.num_atoms == 0
