"""``mlsm encode`` for large corpora: coverage, certified gaps, several processes, bad input."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsm_plugin.core.files.process_rank import ProcessRank, process_rank
from mlsm_plugin.core.sparse_coding import lasso
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.sparse_coding.stored_codes import covered_positions
from tests.cli.coding_runs import (
    SHARDS,
    contents,
    copy_without_codes,
    encode_words,
    kill_once_there,
    meta_of,
    start_mlsm,
)
from tests.conftest import Pipeline, failing_mlsm, mlsm

Capture = pytest.CaptureFixture[str]


def rows_of(codes: Path) -> np.ndarray:
    store = CodeStore(codes)
    return store.rows(0, len(store)).toarray()


def own_dictionary(folder: Path, atoms: np.ndarray, *, layer: int = 2, lambda_: float = 0.05) -> Path:
    """A dictionary that names no auxiliary model."""
    AtomDictionary(atoms / np.linalg.norm(atoms, axis=1, keepdims=True), {"layer": layer, "lambda": lambda_}).save(
        folder
    )
    return folder


# ---- coverage ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_coverage_codes_the_seeded_share_of_the_positions(
    pipeline: Pipeline, data_bin: Path, valid_tokens: np.ndarray
) -> None:
    mlsm(*encode_words(pipeline, data_bin, "--coverage", 0.3, "--seed", 5))
    whole, found = rows_of(pipeline.data_bin / "valid.codes"), rows_of(data_bin / "valid.codes")
    covered = covered_positions(np.arange(len(valid_tokens)), coverage=0.3, seed=5)
    expected = np.where(covered[:, None], whole, 0)
    assert np.abs(found - expected).sum(axis=1).max() < 0.01
    meta = meta_of(data_bin / "valid.codes")
    assert (meta["coverage"], meta["coverage_seed"]) == (0.3, 5)
    assert meta["coded_tokens"] == (covered & (valid_tokens > 2)).sum()


@pytest.mark.slow
def test_seed_does_not_matter_where_all_is_coded(pipeline: Pipeline, data_bin: Path) -> None:
    mlsm(*encode_words(pipeline, data_bin, "--seed", 7))
    assert contents(data_bin / "valid.codes") == contents(pipeline.data_bin / "valid.codes")
    assert meta_of(data_bin / "valid.codes")["coverage_seed"] == 0


@pytest.mark.parametrize(
    ("option", "value"), [("--coverage", 0), ("--coverage", 1.5), ("--coverage", "nan"), ("--seed", -1)]
)
def test_coverage_out_of_range_is_refused_by_name(
    pipeline: Pipeline, data_bin: Path, capsys: Capture, option: str, value: object
) -> None:
    assert f"{option} must be" in failing_mlsm(capsys, *encode_words(pipeline, data_bin, option, value))
    assert not (data_bin / "valid.codes").exists()


# ---- certified gaps ----------------------------------------------------------------------------------------


class GapAt:
    """The solver, with a gap of 0.25 pretended for the fourth row of its ``call``-th call, and of 0 elsewhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
        self.call, self.calls, self.solve = call, 0, lasso.sparse_encode
        monkeypatch.setattr(lasso, "sparse_encode", self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        coded = self.solve(*args, **options)
        coded.gap[:] = 0
        self.calls += 1
        if self.calls == self.call:
            coded.gap[3] = 0.25
        return coded


@pytest.mark.slow
def test_inexact_codes_are_refused_with_their_place_and_leave_nothing(
    pipeline: Pipeline, data_bin: Path, valid_tokens: np.ndarray, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        GapAt(patch, call=1)
        line = failing_mlsm(capsys, *encode_words(pipeline, data_bin))
    place = np.flatnonzero(valid_tokens > 2)[3]
    assert re.search(
        rf"1 of the \d+ codes of tokens \d+ to \d+, the first at position {place}, miss .* is 0\.25\.", line
    )
    assert all(word in line for word in ("--solver auto", "larger --tolerance", "--allow-inexact"))
    assert not (data_bin / "valid.codes").exists()
    mlsm(*encode_words(pipeline, data_bin, "--tolerance", 1e-3))


@pytest.mark.slow
def test_inexact_codes_are_written_when_told_and_finished_shards_stay(
    pipeline: Pipeline, data_bin: Path, valid_tokens: np.ndarray, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        GapAt(patch, call=5)
        failing_mlsm(capsys, *encode_words(pipeline, data_bin, *SHARDS))
    codes = data_bin / "valid.codes"
    kept = {path.name: path.stat().st_mtime_ns for path in codes.glob("shard-*")}
    assert "shard-00000.indptr.npy" in kept
    assert "shard-00004.indptr.npy" not in kept
    assert not (codes / "meta.json").exists()

    with monkeypatch.context() as patch:
        GapAt(patch, call=1)
        mlsm(*encode_words(pipeline, data_bin, *SHARDS, "--allow-inexact"))
    output = capsys.readouterr()
    assert {name: (codes / name).stat().st_mtime_ns for name in kept} == kept
    assert "warning: valid: 1 of" in output.err
    meta, coded = meta_of(codes), int((valid_tokens > 2).sum())
    assert (meta["coded_tokens"], meta["gap_max"]) == (coded, 0.25)
    assert meta["gap_mean"] == pytest.approx(0.25 / coded)  # both runs report a gap of 0 for all other tokens
    assert f"{coded} tokens" in output.out
    assert "max 2.5e-01" in output.out
    mlsm(*encode_words(pipeline, data_bin, *SHARDS))  # says so for the whole store later as well
    assert "max 2.5e-01" in capsys.readouterr().out


# ---- several processes -------------------------------------------------------------------------------------


def succeed(*runs: Any) -> list[str]:
    """Wait for processes; their standard outputs."""
    outputs = [run.communicate() for run in runs]
    for run, (_, errors) in zip(runs, outputs, strict=True):
        assert run.returncode == 0, errors
    return [output for output, _ in outputs]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_two_processes_at_the_same_time_write_the_bytes_of_one(
    pipeline: Pipeline, data_bin: Path, uninterrupted: dict[str, bytes]
) -> None:
    words = encode_words(pipeline, data_bin, *SHARDS, "--num-processes", 2, "--process-index")
    outputs = succeed(start_mlsm(*words, 0), start_mlsm(*words, 1))
    assert contents(data_bin / "valid.codes") == uninterrupted
    assert all(int(re.search(r"(\d+) tokens coded", output).group(1)) > 1000 for output in outputs)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_torchrun_shares_the_work(pipeline: Pipeline, data_bin: Path, uninterrupted: dict[str, bytes]) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    (output,) = succeed(start_mlsm(*encode_words(pipeline, data_bin, *SHARDS), launcher=launcher))
    assert contents(data_bin / "valid.codes") == uninterrupted
    assert len(re.findall(r"(\d+) tokens coded", output)) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_killed_process_leaves_the_others_shards_and_a_rerun_completes(
    pipeline: Pipeline, data_bin: Path, uninterrupted: dict[str, bytes]
) -> None:
    codes = data_bin / "valid.codes"
    words = encode_words(pipeline, data_bin, *SHARDS)
    tasks = [{"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2"} for rank in (0, 1)]
    killed = start_mlsm(*words, variables=tasks[1], start_new_session=True)
    survivor = start_mlsm(*words, variables=tasks[0])
    kill_once_there(killed, codes / "shard-00001.indptr.npy")
    (output,) = succeed(survivor)
    assert re.search(r"process 0 of 2 is done; \d+ of \d+ shards are missing", output)
    assert not (codes / "meta.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in codes.glob("shard-*[02468].*")}
    assert len(kept) >= 4 * 4

    succeed(start_mlsm(*words, variables=tasks[1]))
    assert contents(codes) == uninterrupted
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.slow
def test_processes_one_after_the_other_in_any_order(pipeline: Pipeline, tmp_path: Path, capsys: Capture) -> None:
    stores = []
    for order in ((None,), (2, 0, 1)):
        data = copy_without_codes(pipeline.data_bin, tmp_path / f"data-{len(order)}")
        for rank in order:
            assert not (data / "valid.codes" / "meta.json").exists()
            flags = () if rank is None else ("--process-index", rank, "--num-processes", 3)
            mlsm(*encode_words(pipeline, data, *SHARDS, "--coverage", 0.2, *flags))
        stores.append(contents(data / "valid.codes"))
    assert stores[0] == stores[1]
    assert capsys.readouterr().out.count("are missing") == 2


SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ((None, None), {}, ProcessRank(0, 1)),
        ((None, None), SRUN, ProcessRank(3, 4, 1)),
        ((None, None), {**SRUN, **TORCHRUN}, ProcessRank(5, 8, 1)),
        ((1, 2), TORCHRUN, ProcessRank(1, 2, 1)),
        ((0, 1), {}, ProcessRank(0, 1)),
        ((None, None), {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, ProcessRank(0, 1)),
        ((None, None), {"RANK": "0", "WORLD_SIZE": "1", **SRUN}, ProcessRank(3, 4, 1)),
        ((None, None), {"RANK": "3"}, ProcessRank(0, 1)),
    ],
)
def test_share_of_the_work(
    flags: tuple[int | None, int | None], environment: dict[str, str], expected: ProcessRank
) -> None:
    process = process_rank(*flags, environment)
    assert process == expected
    every = [ProcessRank(index, process.world_size) for index in range(process.world_size)]
    assert all(sum(one.owns(piece) for one in every) == 1 for piece in range(20))


def test_gpu_of_a_process() -> None:
    assert ProcessRank(5, 8, local_rank=1).device(4) == "cuda:1"
    assert [ProcessRank(5, 8, local_rank=1).device(gpus) for gpus in (0, 1)] == [None, None]
    assert ProcessRank(1, 2).device(4) is None


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        (("--process-index", 0), {}, "--process-index and --num-processes belong together"),
        (("--num-processes", 2), {}, "--process-index and --num-processes belong together"),
        (("--process-index", 2, "--num-processes", 2), {}, "--process-index must be one of 0 to 1"),
        (("--process-index", -1, "--num-processes", 2), {}, "--process-index must be one of 0 to 1"),
        (("--process-index", 0, "--num-processes", 0), {}, "--num-processes must be at least 1, got 0"),
        ((), {"RANK": "x", "WORLD_SIZE": "2"}, "the environment variable RANK must be a number, got 'x'"),
    ],
)
def test_share_that_makes_no_sense_is_one_line(
    pipeline: Pipeline,
    data_bin: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[object, ...],
    variables: dict[str, str],
    message: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert message in failing_mlsm(capsys, *encode_words(pipeline, data_bin, *flags))
    assert not (data_bin / "valid.codes").exists()


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_penalty_that_empties_all_codes_is_refused_with_the_limit(
    pipeline: Pipeline, data_bin: Path, capsys: Capture
) -> None:
    line = failing_mlsm(capsys, *encode_words(pipeline, data_bin, "--lambda", 1.5))
    assert "lambda 1.5 is too large" in line
    limit = float(line.split("with an atom is ")[1].split()[0].rstrip(".,;"))
    assert not (data_bin / "valid.codes").exists()
    assert "too large" in failing_mlsm(capsys, *encode_words(pipeline, data_bin, "--lambda", limit * 1.001))
    mlsm(*encode_words(pipeline, data_bin, "--lambda", limit * 0.99))
    assert 1 <= meta_of(data_bin / "valid.codes")["nnz"] < 5000


def test_store_of_many_small_empty_shards_is_not_sealed(pipeline: Pipeline, data_bin: Path, capsys: Capture) -> None:
    words = encode_words(pipeline, data_bin, "--lambda", 1.5, "--coverage", 0.01, *SHARDS)
    line = failing_mlsm(capsys, *words)
    assert re.search(r"all \d+ codes of .*valid\.codes are empty; .* with other settings of the coder", line)
    assert not (data_bin / "valid.codes" / "meta.json").exists()


def test_identical_atoms_are_refused_by_number(
    pipeline: Pipeline, data_bin: Path, tmp_path: Path, capsys: Capture
) -> None:
    atoms = np.random.default_rng(0).normal(size=(40, 32))
    atoms[31] = atoms[7]
    dictionary = own_dictionary(tmp_path / "own", atoms)
    line = failing_mlsm(capsys, *encode_words(pipeline, data_bin, "--dictionary", dictionary))
    assert "atoms 7 and 31 of the dictionary are identical" in line
    assert not (data_bin / "valid.codes").exists()


def test_zero_atom_is_refused_by_number(pipeline: Pipeline, data_bin: Path, tmp_path: Path, capsys: Capture) -> None:
    dictionary = own_dictionary(tmp_path / "own", np.random.default_rng(0).normal(size=(40, 32)))
    atoms = np.load(dictionary / "dictionary.npy")
    atoms[7] = 0
    np.save(dictionary / "dictionary.npy", atoms)
    line = failing_mlsm(capsys, *encode_words(pipeline, data_bin, "--dictionary", dictionary))
    assert "atom 7 has the norm 0; every atom (row) must have the norm 1" in line
    assert not (data_bin / "valid.codes").exists()


@pytest.mark.slow
def test_more_atoms_than_two_bytes_can_number(pipeline: Pipeline, data_bin: Path, tmp_path: Path) -> None:
    learned = np.load(pipeline.dictionary / "dictionary.npy")
    count = 2**16 + len(learned)
    atoms = np.random.default_rng(0).normal(size=(count, 32))
    atoms[2**16 :] = learned  # so that they are used
    dictionary = own_dictionary(tmp_path / "wide", atoms, lambda_=0.5)
    options = ("--coverage", 0.004, "--seed", 3)
    mlsm(*encode_words(pipeline, data_bin, "--dictionary", dictionary, *options))
    stored = np.load(data_bin / "valid.codes" / "shard-00000.atoms.npy")
    assert stored.dtype == np.uint32
    assert (stored >= 2**16).sum() >= 3
    read, _ = CodeStore(data_bin / "valid.codes").lookup(np.arange(meta_of(data_bin / "valid.codes")["token_count"]))
    assert 2**16 <= read.max() == stored.max() < count
