"""Files of tensors that somebody else wrote: nothing is unpickled, and nothing larger than the file is allocated."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mlsm_plugin.core.sparse_coding.formats.foreign_files import TensorFile, read_safetensors, read_torch
from tests.conftest import REPOSITORY

MEMORY = 8 << 30  # what a process may map; torch alone needs a few GB of addresses


def header_only(shape: list[int], length: int) -> bytes:
    """A safetensors file that claims a tensor of this shape, and has ``length`` bytes of values."""
    size = 4
    for side in shape:
        size *= side
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(length)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 100,
        struct.pack("<Q", 1 << 60) + b"{}",
        header_only([1 << 20, 1 << 20], 16),
        header_only([4], 12),
        header_only([4], 20),
        pickle.dumps({"a": 1}),
    ],
    ids=["empty", "garbage", "header of 2^60", "terabytes", "too short", "too long", "pickle"],
)
def test_safetensors_whose_header_does_not_fit(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a readable safetensors file") as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_files(tmp_path: Path) -> None:
    made = {"a": torch.randn(3, 2), "b": torch.randn(4).bfloat16(), "k": torch.tensor(3), "c": torch.randn(2).double()}
    save_file(made, tmp_path / "a.safetensors")
    torch.save(made, tmp_path / "a.pt")
    for file in (read_safetensors(tmp_path / "a.safetensors"), read_torch(tmp_path / "a.pt")):
        assert "a" in file
        assert torch.equal(file.take("a", 2), made["a"])
        assert file.take("b").dtype == file.take("c").dtype == torch.float32
        assert file.number("k") == 3
        file.finish(known=("absent",))


def test_tensors_are_checked() -> None:
    made = {"a": torch.zeros(2), "i": torch.zeros(2, dtype=torch.int), "c": torch.zeros(1, dtype=torch.complex64)}
    file = TensorFile("a.pt", made)
    for use, problem in (
        (lambda: file.finish(), "tensors that do not belong to this kind of SAE: a, c, i"),
        (lambda: file.take("b"), "lacks the tensor b"),
        (lambda: file.take("i"), r"i holds torch\.int32"),
        (lambda: file.take("a", 2), r"a has the shape \(2,\), but must have 2 dimensions"),
        (lambda: file.number("c"), "c has the shape"),
        (lambda: file.number("b"), "lacks the tensor b"),
    ):
        with pytest.raises(ValueError, match=problem):
            use()


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def deflated(path: Path) -> None:
    """An archive that is small because its values are compressed."""
    torch.save({"a": torch.zeros(1 << 20)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "it is damaged, or is a pickle"),
    "garbage": (lambda path: path.write_bytes(bytes(range(256)) * 8), "it is damaged, or is a pickle"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(Evil(path.parent / "evil"))), "or is a pickle"),
    "pickle in an archive": (lambda path: torch.save({"a": Evil(path.parent / "evil")}, path), "holds Python objects"),
    "the format of torch 1.5": (
        lambda path: torch.save({"a": torch.zeros(2)}, path, _use_new_zipfile_serialization=False),
        "or is a pickle",
    ),
    "another archive": (lambda path: zipfile.ZipFile(path, "w").writestr("a.txt", "a"), "is not a readable file"),
    "half": (
        lambda path: (torch.save({"a": torch.zeros(999)}, path), path.write_bytes(path.read_bytes()[:2000])),
        "it is damaged",
    ),
    "a list": (lambda path: torch.save([torch.zeros(2)], path), "not a dictionary of tensors"),
    "nested": (lambda path: torch.save({"model": {"a": torch.zeros(2)}}, path), "not a dictionary of tensors"),
    "numbers": (lambda path: torch.save({"a": 3}, path), "not a dictionary of tensors"),
    "other keys": (lambda path: torch.save({3: torch.zeros(2)}, path), "not a dictionary of tensors"),
    "sparse": (lambda path: torch.save({"a": torch.eye(3).to_sparse()}, path), "not a dictionary of tensors"),
    "without values": (
        lambda path: torch.save({"a": torch.zeros(1 << 40, device="meta")}, path),
        "not a dictionary of tensors",
    ),
    "one value, 2^42 times": (
        lambda path: torch.save({"a": torch.zeros(1).expand(1 << 21, 1 << 21)}, path),
        "its tensors claim 17,592,186,044,416 bytes",
    ),
    "compressed": (deflated, "its contents are larger than the file"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_torch_could_read_or_not(name: str, tmp_path: Path) -> None:
    make, problem = HOSTILE[name]
    path = tmp_path / "ae.pt"
    make(path)
    with pytest.raises(ValueError, match=problem) as caught:
        read_torch(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "evil").exists()


def test_absent_files_and_folders(tmp_path: Path) -> None:
    for read in (read_torch, read_safetensors):
        for path in (tmp_path, tmp_path / "absent"):
            with pytest.raises(ValueError, match="does not exist, or is not a file"):
                read(path)


READ = """
import sys
from pathlib import Path
from mlsm_plugin.core.sparse_coding.formats.foreign_files import read_safetensors, read_torch
for read, path in ((read_safetensors, sys.argv[1]), (read_torch, sys.argv[2])):
    try:
        read(Path(path))
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_claims_allocate_nothing(tmp_path: Path) -> None:
    """In a process that could not have the memory that the files claim."""
    (tmp_path / "a.safetensors").write_bytes(header_only([1 << 20, 1 << 20], 16))
    HOSTILE["one value, 2^42 times"][0](tmp_path / "ae.pt")
    result = subprocess.run(
        [sys.executable, "-c", READ, tmp_path / "a.safetensors", tmp_path / "ae.pt"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2
    assert "MemoryError" not in result.stdout


def test_without_safetensors_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)  # what `import` finds where it is not installed
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ValueError, match=r"need safetensors: pip install 'mlsm_plugin\[hf\]'"):
        read_safetensors(tmp_path / "a.safetensors")
