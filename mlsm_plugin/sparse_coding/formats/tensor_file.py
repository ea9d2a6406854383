"""The tensors in a file of another program, read as plain data.

Nothing larger than the file is allocated: the sizes that it claims are compared with its length first.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlsm_plugin.files.hf_files import first_line

NEEDS_SAFETENSORS = "files of SAELens and sparsify need safetensors: pip install 'mlsm_plugin[hf]'"


class TensorFile:
    """Tensors by name, each of which must be taken, since one that nobody asked for may change the codes.

    Args:
        path: the file, for errors.
        tensors: what it holds.
    """

    def __init__(self, path: str | os.PathLike[str], tensors: dict[str, Tensor]) -> None:
        self.path = Path(path)
        self._tensors = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, ndim: int = 1) -> Tensor:
        """A tensor of floating-point numbers as float32.

        Args:
            name: its name.
            ndim: number of its dimensions.

        Raises:
            ValueError: it is missing, or something else.
        """
        tensor = self._pop(name)
        if not tensor.is_floating_point() or tensor.is_quantized:
            raise ValueError(f"{self.path}: {name} holds {tensor.dtype}, not floating-point numbers")
        if tensor.dim() != ndim:
            raise ValueError(
                f"{self.path}: {name} has the shape {tuple(tensor.shape)}, but must have {ndim} dimensions"
            )
        return tensor.detach().float()

    def number(self, name: str) -> float:
        """The value of a tensor that holds a single number, such as a threshold or k."""
        tensor = self._pop(name)
        if tensor.numel() != 1 or tensor.is_complex() or tensor.is_quantized:
            raise ValueError(f"{self.path}: {name} has the shape {tuple(tensor.shape)}, but must be a single number")
        return float(tensor.item())

    def leave_out(self, *names: str) -> None:
        """Take no notice of tensors that do not matter, whether they are there or not."""
        for name in names:
            self._tensors.pop(name, None)

    def finish(self) -> None:
        """Check that no tensor is left.

        Raises:
            ValueError: a tensor is left (names it).
        """
        left = sorted(self._tensors)
        if left:
            named = ", ".join(name[:60] for name in left[:4]) + (", ..." if len(left) > 4 else "")
            raise ValueError(f"{self.path} has tensors that do not belong to this kind of SAE: {named}")

    def _pop(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ValueError(f"{self.path} lacks the tensor {name}")
        return self._tensors.pop(name)


def check_safetensors() -> None:
    """Raise ValueError if the package ``safetensors`` is not installed."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        raise ValueError(NEEDS_SAFETENSORS) from None


def read_safetensors(path: str | os.PathLike[str]) -> TensorFile:
    """Read a safetensors file, whose header the library compares with the length of the file.

    Raises:
        ValueError: the file is missing or damaged, or the package ``safetensors`` is.
    """
    check_safetensors()
    from safetensors import SafetensorError, safe_open

    _check_is_file(path)
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({first_line(error)})") from None
    return TensorFile(path, tensors)


def read_torch(path: str | os.PathLike[str]) -> TensorFile:
    """Read a dictionary of tensors that ``torch.save`` wrote; Python objects in it are not loaded.

    Raises:
        ValueError: the file is missing, damaged or of another format, or holds something else.
    """
    _check_is_file(path)
    _check_is_plain_zip(path)
    try:
        contents = torch.load(os.fspath(path), map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:  # torch's own message advises to load without its protection
        raise _unreadable(path, "it is damaged, or holds Python objects, which are not loaded") from None
    except Exception as error:  # reading another kind of file raises errors of no common type
        raise _unreadable(path, first_line(error)) from None
    if not isinstance(contents, dict) or not all(_is_named_tensor(*item) for item in contents.items()):
        raise _unreadable(path, "it is not a dictionary of tensors")
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in contents.values())
    if claimed > os.path.getsize(path):
        raise _unreadable(path, f"its tensors claim {claimed:,} bytes, which is more than it has")
    return TensorFile(path, contents)


def _check_is_file(path: str | os.PathLike[str]) -> None:
    if not os.path.isfile(path):
        raise ValueError(f"{path} does not exist, or is not a file")


def _check_is_plain_zip(path: str | os.PathLike[str]) -> None:
    """Refuse the format of torch < 1.6, which is one large pickle, and archives that grow when they are unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
        raise _unreadable(path, "it is damaged, or is a pickle, which is not loaded") from None
    stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    if not stored or sum(member.file_size for member in members) > os.path.getsize(path):
        raise _unreadable(path, "its contents are larger than it is")


def _is_named_tensor(name: Any, tensor: Any) -> bool:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        return False
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


def _unreadable(path: str | os.PathLike[str], reason: str) -> ValueError:
    return ValueError(f"{path} is not a readable file of weights: {reason}")
