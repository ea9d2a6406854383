from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import traceback

import numpy as np
import pytest
import torch
from fairseq.data import ListDataset, TokenBlockDataset, token_block_dataset
from fairseq.data.iterators import EpochBatchIterator
from torch.multiprocessing import ProcessRaisedException

from mlsm_plugin.fairseq_plugin.compat import version_shims
from tests.conftest import PLUGIN, REPOSITORY, TINY_TRAINING, fairseq_train


def test_own_user_dir_is_recognized_however_it_is_spelled(tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(PLUGIN)
    (tmp_path / "parent").symlink_to(REPOSITORY)
    for spelling in [PLUGIN, f"{PLUGIN}/", f"{PLUGIN}/../mlsm_plugin", link, tmp_path / "parent" / "mlsm_plugin"]:
        assert version_shims._is_this_package(str(spelling)), spelling
    monkeypatch.chdir(REPOSITORY)
    for spelling in ["mlsm_plugin", "./mlsm_plugin/", "tests/../mlsm_plugin"]:
        assert version_shims._is_this_package(spelling), spelling
    monkeypatch.chdir(tmp_path)
    for spelling in ["mlsm_plugin", "mlsm_plugin/", "./link"]:  # a bare name: installed, so fairseq finds it
        assert version_shims._is_this_package(spelling), spelling


def test_another_user_dir_is_not_taken_for_this_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "mlsm_plugin"
    other.mkdir()
    for spelling in [
        "mlsm_plugin",
        str(other),
        str(REPOSITORY),
        "some/where/mlsm_plugin",
        "other",
        str(PLUGIN / "data"),
    ]:
        assert not version_shims._is_this_package(spelling), spelling


def test_a_folder_that_has_only_the_name_of_the_package_is_said_not_to_be_it(tmp_path, monkeypatch, caplog):
    from fairseq import utils

    (tmp_path / "mlsm_plugin").mkdir()  # as in the folder that a clone is in
    monkeypatch.chdir(tmp_path)
    for _ in range(3):  # as fairseq does
        utils.import_user_module(argparse.Namespace(user_dir="mlsm_plugin"))
    (line,) = [record.getMessage() for record in caplog.records if "--user-dir" in record.getMessage()]
    assert line == f"--user-dir {tmp_path}/mlsm_plugin is not the package; the installed one is used: {PLUGIN}"
    (tmp_path / "mlsm_plugin" / "__init__.py").touch()
    with pytest.raises(ImportError, match="not globally unique"):  # another package of this name
        utils.import_user_module(argparse.Namespace(user_dir="mlsm_plugin"))


def start(*words, cwd):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, *words, "--task", "masked_latent_semantic", "--help"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment
    )  # fmt: skip


IMPORTED_BEFORE = "import mlsm_plugin, fairseq_cli.train; fairseq_cli.train.cli_main()"


@pytest.mark.slow
def test_fairseq_train_accepts_every_spelling_of_the_user_dir(tmp_path):
    link = tmp_path / "linked" / "mlsm_plugin"  # a package goes by one name only
    link.parent.mkdir()
    link.symlink_to(PLUGIN)
    train = ("-m", "fairseq_cli.train", "--user-dir")
    runs = [
        [(*train, "mlsm_plugin"), REPOSITORY],
        [(*train, f"{PLUGIN}/"), tmp_path],
        [(*train, str(link)), tmp_path],
        [("-c", IMPORTED_BEFORE, "--user-dir", str(link)), tmp_path],
    ]
    for pair in (runs[:2], runs[2:]):
        for process in [start(*words, cwd=cwd) for words, cwd in pair]:
            output, errors = process.communicate(timeout=120)
            assert process.returncode == 0, (process.args, errors[-2000:])
            assert re.search(r"--criterion \{[^}]*\blatent_semantic_kl\b", output)


def test_applying_the_shims_again_changes_nothing(monkeypatch):
    from fairseq import utils

    before = utils.import_user_module, token_block_dataset.np, sys.excepthook
    version_shims.apply()
    assert (utils.import_user_module, token_block_dataset.np, sys.excepthook) == before
    assert utils.import_user_module.accepts_own_user_dir


def test_blocks_of_sentences_work_on_this_numpy():
    sentences = [torch.tensor([5, 6, 2]), torch.tensor([2]), torch.tensor([7, 2])]
    blocks = TokenBlockDataset(ListDataset(sentences, [3, 1, 2]), [3, 1, 2], None, pad=1, eos=2, break_mode="eos")
    assert [block.tolist() for block in blocks] == [[5, 6, 2], [2], [7, 2]]
    assert blocks.sizes.tolist() == [3, 1, 2]
    assert hasattr(token_block_dataset.np, "compat")
    assert token_block_dataset.np.int64 is np.int64


@pytest.mark.parametrize("buffer_size", [10, 0])
@pytest.mark.parametrize("skips_remainder", [False, True])
def test_the_worker_of_a_loader_ends_with_the_last_batch(buffer_size, skips_remainder):
    sentences = ListDataset([torch.tensor([5, 6, 2])] * 4, [3] * 4)
    before = set(multiprocessing.active_children())
    loader = EpochBatchIterator(
        sentences,
        torch.stack,
        [[0, 1], [2, 3]],
        num_workers=1,
        buffer_size=buffer_size,
        skip_remainder_batch=skips_remainder,
    )
    batches = loader.next_epoch_itr(shuffle=False)
    assert len(list(batches)) == (1 if skips_remainder else 2)
    deadline = time.monotonic() + 60
    while set(multiprocessing.active_children()) - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def own_data(pipeline, tmp_path):
    """A copy of the data to spoil."""
    return shutil.copytree(pipeline.data_bin, tmp_path / "data-bin")


def error_line(result):
    """The one line of a run that failed without traceback."""
    assert result.returncode == 1, result.stderr[-3000:]
    output = result.stdout + result.stderr
    assert "Traceback" not in output
    lines = [line for line in result.stderr.splitlines() if re.match(r"[\w.-]+: error: ", line)]
    assert lines == [result.stderr.splitlines()[-1]]
    return lines[0].split(": error: ", maxsplit=1)[1]


@pytest.mark.slow
def test_data_without_codes_is_one_line(own_data, tmp_path):
    for split in ("train", "valid"):
        shutil.rmtree(own_data / f"{split}.codes")
    result = fairseq_train(own_data, tmp_path / "save", "--max-update", 1, check=False)
    assert error_line(result) == f"{own_data} has no codes (train.codes, valid.codes); write them with `mlsm encode`"


@pytest.mark.slow
def test_codes_of_another_dataset_are_one_line(own_data, tmp_path):
    content = bytearray((own_data / "valid.bin").read_bytes())
    content[:2], content[2:4] = content[2:4], content[:2]
    content[0] ^= 1
    (own_data / "valid.bin").write_bytes(content)
    result = fairseq_train(own_data, tmp_path / "save", "--max-update", 1, check=False)
    line = error_line(result)
    assert line.startswith(f"the codes in {own_data}/valid.codes were made from another dataset (SHA-256 ")
    assert line.endswith("; run `mlsm encode` again")
    assert f"{own_data}/valid.bin" in line


@pytest.mark.slow
def test_a_folder_without_data_is_one_line(tmp_path):
    result = fairseq_train(tmp_path, tmp_path / "save", "--max-update", 1, check=False)
    expected = f"{tmp_path} is not a binarized dataset: dict.txt is missing (write one: `mlsm binarize`)"
    assert error_line(result) == expected


def raised_by(function):
    try:
        function()
    except Exception as error:
        return type(error), error, error.__traceback__
    raise AssertionError("nothing was raised")


def test_only_errors_of_this_package_for_the_user_lose_their_traceback(monkeypatch, capsys, tmp_path):
    from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary

    passed_on = []
    monkeypatch.setattr(sys, "argv", ["/usr/bin/fairseq-train"])
    monkeypatch.setattr(sys, "excepthook", lambda *error: passed_on.append(error[0]))
    version_shims._report_user_errors_in_one_line()
    sys.excepthook(*raised_by(lambda: load_dictionary(tmp_path)))
    assert passed_on == []
    assert capsys.readouterr().err.startswith(f"fairseq-train: error: {tmp_path} is not a binarized dataset")
    sys.excepthook(*raised_by(tmp_path.read_bytes))  # raised elsewhere, but about a file
    assert capsys.readouterr().err == f"fairseq-train: error: {tmp_path}: Is a directory\n"
    sys.excepthook(*raised_by(lambda: int("x")))  # raised elsewhere
    sys.excepthook(*raised_by(lambda: version_shims._is_this_package(None)))  # a bug, not a user's error
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert passed_on == [ValueError, TypeError, KeyboardInterrupt]
    assert capsys.readouterr().err == ""


def printed_by_a_rank(function):
    """What torch's parent process raises for a process that failed."""
    try:
        function()
    except Exception:
        text = f"\n\n-- Process 1 terminated with the following error:\n{traceback.format_exc()}"
        return ProcessRaisedException(text, 1, 1234)
    raise AssertionError("nothing was raised")


def test_errors_of_processes_that_torch_starts_are_one_line_too(tmp_path):
    from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary

    def replaced_by_fairseq():
        try:
            load_dictionary(tmp_path)
        except Exception:
            raise RuntimeError("please ensure that the architectures match")  # noqa: B904

    own = printed_by_a_rank(lambda: load_dictionary(tmp_path))
    expected = f"{tmp_path} is not a binarized dataset: dict.txt is missing (write one: `mlsm binarize`)"
    assert version_shims._text_for_user(own) == expected
    assert version_shims._text_for_user(printed_by_a_rank(replaced_by_fairseq)) == expected
    for other in (lambda: int("x"), lambda: version_shims._is_this_package(None)):
        assert version_shims._text_for_user(printed_by_a_rank(other)) is None


TWO_GPUS = (
    "import sys, torch; torch.cuda.device_count = lambda: 2; sys.argv[0] = 'fairseq-train'; "
    "from fairseq_cli.train import cli_main; cli_main()"
)


@pytest.mark.slow
def test_an_error_in_ranks_that_fairseq_spawns_is_one_line(tiny, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [tiny.data_bin, "--user-dir", PLUGIN, "--save-dir", tmp_path / "save", "--task", "masked_latent_semantic"]
    words += ["--arch", "mlsm_roberta_tiny", "--num-atoms", 8, *TINY_TRAINING, "--distributed-world-size", 2]
    words += ["--distributed-backend", "gloo", "--distributed-port", port]  # and no --criterion
    words += ["--distributed-init-method", f"tcp://127.0.0.1:{port}"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TWO_GPUS, *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert error_line(result).startswith(
        "--criterion cross_entropy does not compute the loss of --task masked_latent_se"
    )


def test_programs_other_than_fairseq_keep_their_tracebacks(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/my-notebook"])
    hook = sys.excepthook
    version_shims._report_user_errors_in_one_line()
    assert sys.excepthook is hook


def test_importing_leaves_numpy_itself_alone():
    assert hasattr(np, "compat") == (int(np.__version__.split(".")[0]) < 2)
