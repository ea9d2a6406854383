"""Read npy files; nothing is allocated or mapped unless the header fits the length of the file."""

import math
import os
import tokenize
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mlsm_plugin.core.files.atomic_files import PathLike

READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True)
class NpyHeader:
    """The type and shape of the array in an npy file; its values begin after ``offset`` bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    fortran_order: bool = False

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def npy_header(path: Path, *, fortran_order: bool = False) -> NpyHeader | None:
    """The header of a complete npy file; else None. Fortran order counts as complete only with ``fortran_order``."""
    try:
        with open(path, "rb") as file:
            shape, in_fortran_order, dtype = READ_HEADER[np.lib.format.read_magic(file)](file)
            header = NpyHeader(dtype, shape, file.tell(), in_fortran_order)
            size = os.fstat(file.fileno()).st_size
    except (OSError, ValueError, EOFError, KeyError, TypeError, SyntaxError, RecursionError, tokenize.TokenError):
        return None
    whole = not dtype.hasobject and min(shape, default=0) >= 0 and size == header.file_size
    return header if whole and (fortran_order or not in_fortran_order) else None


def map_npy(path: Path, ndim: int | None = None) -> np.ndarray:
    """Map the array of an npy file without keeping the file open; writing to the array does not change the file.

    np.memmap keeps a file descriptor, and a process has only about 1,000 of them; a corpus of 10^9 tokens has more
    shard files. torch closes the file after mapping it. ValueError names a file that is missing or damaged, or whose
    array does not have ``ndim`` dimensions.
    """
    header = npy_header(path, fortran_order=True)
    if header is None:
        raise ValueError(f"{path} is missing or damaged; run the command that wrote it again")
    if ndim not in (None, len(header.shape)):
        raise ValueError(f"{path} has an array of shape {header.shape}, and {ndim} dimensions are needed")
    if math.prod(header.shape) == 0:
        return np.zeros(header.shape, header.dtype)
    whole = torch.from_file(str(path), shared=False, size=header.file_size, dtype=torch.uint8).numpy()
    values = whole[header.offset :].view(header.dtype)
    return values.reshape(header.shape, order="F" if header.fortran_order else "C")


def read_npy(path: PathLike) -> np.ndarray:
    """Read the array of an npy file; ValueError names a file that is missing or not a complete npy file of numbers."""
    if not os.path.isfile(path):
        raise ValueError(f"{path} does not exist")
    if npy_header(Path(path), fortran_order=True) is None:
        raise ValueError(f"{path} is not a readable npy file: it is damaged, cut off, or of another kind")
    array: np.ndarray = np.load(path, allow_pickle=False)
    return array
