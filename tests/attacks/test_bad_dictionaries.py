"""``mlsm convert`` on files that somebody else made or damaged, killed, and on a full disk."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.sparse_coding.formats.saelens import read_saelens
from tests.attacks import bad_inputs
from tests.attacks.bad_inputs import DELETED, Damage, check_one_line, json_with, replaced
from tests.attacks.conftest import Place
from tests.attacks.faults import run_command
from tests.attacks.test_faults import faults
from tests.conftest import mlsm
from tests.core.sparse_coding.formats.foreign_saes import (
    hidden_states,
    saelens_arrays,
    saelens_config,
    write_dictionary_learning,
    write_saelens,
    write_sparsify,
)

Capture = pytest.CaptureFixture[str]
Words = tuple[object, ...]
COMMAND = "convert"


def make_all(root: Path) -> None:
    """One of each format, and a dictionary of this package of each kind."""
    write_saelens(root / "saelens", saelens_config("topk"))
    write_saelens(root / "batchtopk", saelens_config("batchtopk"))
    write_sparsify(root / "sparsify")
    write_dictionary_learning(root / "dictionary_learning", "AutoEncoderTopK")
    np.save(root / "atoms.npy", np.eye(8, 32, dtype=np.float32))
    mlsm(COMMAND, root / "batchtopk", root / "own")
    mlsm(COMMAND, root / "atoms.npy", root / "lasso")


@dataclass(frozen=True)
class Evil:
    marker: Path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


CONFIG: dict[str, Damage] = {
    **bad_inputs.JSON_FILE,
    "unknown key": json_with(negative_slope=0.1),
    "k of minus four": json_with(k=-4),
    "k of 2^60": json_with(k=1 << 60),
    "k that is text": json_with(k="many"),
    "k that is true": json_with(k=True),
    "k that is infinite": replaced('{"architecture": "topk", "k": Infinity}'),
    "k above all latents": json_with(k=4000),
    "no k": json_with(k=DELETED),
    "no width": json_with(d_in=DELETED),
    "width of 2^60": json_with(d_in=1 << 60),
    "another width": json_with(d_in=17),
}
SAELENS: dict[str, Damage] = {
    **CONFIG,
    "architecture that is a number": json_with(architecture=3),
    "architecture with a long name": json_with(architecture="x" * 100_000),
    "key with a long name": json_with(**{"x" * 100_000: 1}),
    "many keys": json_with(**{f"key {number}": 1 for number in range(10_000)}),
    "metadata that is text": json_with(metadata="gpt2"),
    "version that is a list": json_with(metadata={"sae_lens_version": [1]}),
    "another normalization": json_with(normalize_activations={"none": 1}),
}
TRAINER: dict[str, Damage] = {
    **bad_inputs.JSON_FILE,
    "no trainer": json_with(trainer=DELETED),
    "trainer that is a list": json_with(trainer=[1]),
    "class that is a path": json_with(trainer={"dict_class": "../evil.Evil"}),
    "class of another kind": json_with(trainer={"dict_class": "IdentityDict"}),
    "other keys": json_with(evil=1),
}
WEIGHTS: dict[str, Damage] = {
    **bad_inputs.SAFETENSORS,
    "a byte too many": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "pickle": lambda path: path.write_bytes(pickle.dumps(Evil(path.parent / "evil"))),
    "of another format": lambda path: torch.save({"a": torch.zeros(2)}, path),
}
AE: dict[str, Damage] = {
    **bad_inputs.ANY_FILE,
    "half": bad_inputs.cut(0.5),
    "pickle": lambda path: path.write_bytes(pickle.dumps(Evil(path.parent / "evil"))),
    "pickle in an archive": lambda path: torch.save({"b_dec": Evil(path.parent / "evil")}, path),
    "old format": lambda path: torch.save({"b_dec": torch.zeros(6)}, path, _use_new_zipfile_serialization=False),
    "a value 2^42 times": lambda path: torch.save({"b_dec": torch.zeros(1).expand(1 << 21, 1 << 21)}, path),
    "a list": lambda path: torch.save([torch.zeros(6)], path),
    "one tensor": lambda path: torch.save({"b_dec": torch.zeros(6)}, path),
    "NaN": lambda path: torch.save({**torch.load(path), "b_dec": torch.full((6,), float("nan"))}, path),
}
OWN: dict[str, Damage] = {
    **bad_inputs.JSON_FILE,
    "of a plugin": json_with(kind="mystery"),
    "of a lasso": json_with(kind="lasso"),
    "SAE that is a list": json_with(sae=[]),
}
ATOMS = {name: damage for name, damage in bad_inputs.ATOMS.items() if name != "another width"}
ATOMS["rows of other norms"] = replaced(bad_inputs.npy(np.full((8, 32), 3, np.float32)))
# what is converted, a file of it, and its ways to be wrong
TABLE: list[tuple[str, str, dict[str, Damage]]] = [
    ("saelens", "cfg.json", SAELENS),
    ("saelens", "sae_weights.safetensors", WEIGHTS),
    ("sparsify", "cfg.json", CONFIG),
    ("sparsify", "sae.safetensors", WEIGHTS),
    ("dictionary_learning", "config.json", TRAINER),
    ("dictionary_learning", "ae.pt", AE),
    ("atoms.npy", "", ATOMS),
    ("own", "meta.json", OWN),
    ("own", "encoder.npy", bad_inputs.NPY),
]


@dataclass(frozen=True)
class Case:
    """The words behind the command, and what is wrong."""

    words: Words
    change: Callable[[Path], object] = lambda root: None


def cases() -> Iterator[tuple[str, Case]]:
    for source, file, damages in TABLE:
        for name, damage in damages.items():
            change: Callable[[Path], object] = lambda root, d=damage, f=Path(source, file): d(root / f)  # noqa: E731
            yield f"{source}: {file}: {name}", Case((source, "output"), change)
    for flag, value in (("--lambda", 0), ("--lambda", "nan"), ("--layer", -1), ("--layer", "x")):
        yield f"{flag} {value}", Case(("atoms.npy", "output", flag, value))
    for source in ("saelens", "atoms.npy"):
        into_a_file: Callable[[Path], object] = lambda root: (root / "output").write_text("mine")  # noqa: E731
        yield f"{source}: into a file", Case((source, "output"), into_a_file)
        yield f"{source}: below a file", Case((source, "atoms.npy/below"))
        yield f"{source}: for another model", Case((source, "output", "--auxiliary", "absent.pt"))
        yield f"{source}: on another dictionary", Case((source, "own"))
    yield "nothing to read", Case(("absent", "output"))
    yield "a folder of other files", Case((".", "output"))
    yield "onto itself", Case(("saelens", "saelens"))
    yield "export of a lasso", Case(("lasso", "output"))
    yield "export onto another program's", Case(("own", "saelens"))


CASES = dict(cases())


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dictionaries")
    make_all(root)
    return root


@pytest.mark.parametrize("name", CASES)
def test_every_bad_input_is_one_line(name: str, everything: Path, tmp_path: Path, capsys: Capture) -> None:
    root = shutil.copytree(everything, tmp_path / "root")
    case = CASES[name]
    case.change(root)
    check_one_line((COMMAND, *case.words), root, capsys)


def test_there_are_at_least_100() -> None:
    assert len(CASES) >= 100


# ---- kills and full disks ----

RUNS: dict[str, Words] = {
    "import": ("saelens", "output"),
    "import over another": ("batchtopk", "other", "--overwrite"),
    "import of a matrix": ("atoms.npy", "output"),
    "export": ("own", "output"),
    "export over another": ("own", "saelens-2", "--overwrite"),
}


def place_of(run: str, tmp_path: Path) -> Place:
    make_all(tmp_path / "begin")
    mlsm(COMMAND, tmp_path / "begin" / "saelens", tmp_path / "begin" / "other")
    write_saelens(tmp_path / "begin" / "saelens-2", saelens_config("topk"), saelens_arrays("topk", seed=2))
    root = tmp_path / "root"
    source, output, *more = RUNS[run]
    return Place((COMMAND, root / str(source), root / str(output), *more), root, tmp_path / "begin", tmp_path / "log")


def coder_in(place: Place) -> bytes | None:
    """What the coder in the output makes of some hidden states; None if it cannot be loaded."""
    source, output = (Path(str(word)) for word in place.words[1:3])
    matrix = source.suffix == ".npy"
    with suppress(ValueError, OSError):
        options = {"lambda_": 0.1} if matrix else {}
        coder = read_saelens(output) if source.name == "own" else load_coder(output, **options)
        codes = coder.encode(np.eye(3, 32, dtype=np.float32) if matrix else hidden_states()).codes
        return bytes(codes.toarray().tobytes())
    return None


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_no_fault_leaves_a_half_or_a_trace(
    run: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """What is left is the old coder, the new one or none; the same command then ends as if nothing had happened."""
    place = place_of(run, tmp_path)
    place.reset()
    old = coder_in(place)
    clean = run_command(place.words, place.root, place.log)
    assert clean.status == 0, clean.printed
    wanted, new = place.contents(), coder_in(place)
    assert old != new is not None
    share, left = float(os.environ.get("MLSM_FAULTS", "1")), []
    for fault in faults(clean, [100], share):
        place.reset()
        failed = run_command(place.words, place.root, place.log, fault)
        assert "Traceback" not in failed.printed, (fault, failed.printed)
        assert fault.kind == "kill" or failed.printed.count("mlsm: error: ") == failed.status, (fault, failed.printed)
        left.append(coder_in(place))
        assert left[-1] in (None, old, new), fault
        again = run_command(place.words, place.root, place.log)
        assert again.status == 0, (fault, again.printed)
        assert place.contents() == wanted, fault
    record_property("faults", len(left))
    print(f"{run}: {len(left)} faults, {left.count(None)} left no coder")
