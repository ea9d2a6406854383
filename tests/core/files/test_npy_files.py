from __future__ import annotations

import io
import os
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mlsm_plugin.core.files.npy_files import map_npy, npy_header, read_npy

ARRAYS = arrays.arrays(
    st.sampled_from([np.uint16, np.float16, np.int64, np.bool_]),
    arrays.array_shapes(min_dims=0, max_side=4, min_side=0),
)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@settings(deadline=None)
@given(array=ARRAYS, data=st.data())
def test_header_tells_a_whole_file_from_every_shorter_or_longer_one(tmp_path_factory, array, data):
    path = tmp_path_factory.mktemp("npy") / "array.npy"
    content = npy(array)
    path.write_bytes(content)
    header = npy_header(path)
    assert header is not None
    assert (header.dtype, header.shape) == (array.dtype, array.shape)
    assert header.offset == len(content) - array.nbytes
    mapped = map_npy(path)
    assert mapped.dtype == array.dtype
    np.testing.assert_array_equal(mapped, array)
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    assert npy_header(path) is None
    path.write_bytes(content + b"x")
    assert npy_header(path) is None


@settings(deadline=None, max_examples=300)
@given(place=st.integers(0, 127), byte=st.integers(0, 255))
@example(place=10, byte=ord("("))
@example(place=20, byte=ord('"'))
def test_damaged_header_is_no_error(tmp_path_factory, place, byte):
    path = tmp_path_factory.mktemp("npy") / "array.npy"
    content = bytearray(npy(np.arange(6, dtype=np.int32)))
    content[place] = byte
    path.write_bytes(content)
    header = npy_header(path)
    assert header is None or header.offset + np.prod(header.shape) * header.dtype.itemsize == len(content)


def test_what_cannot_be_mapped_is_no_header(tmp_path):
    assert npy_header(tmp_path / "absent.npy") is None
    np.save(tmp_path / "fortran.npy", np.asfortranarray(np.ones((2, 3))))
    assert npy_header(tmp_path / "fortran.npy") is None
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    assert npy_header(tmp_path / "objects.npy") is None
    with pytest.raises(
        ValueError, match=re.escape(f"{tmp_path / 'absent.npy'} is missing or damaged; run the command")
    ):
        map_npy(tmp_path / "absent.npy")


def test_mapping_keeps_no_descriptor_and_does_not_reach_the_file(tmp_path):
    path = tmp_path / "array.npy"
    np.save(path, np.arange(5))
    before = len(os.listdir("/proc/self/fd"))
    maps = [map_npy(path) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    maps[0][0] = 9
    assert np.load(path).tolist() == maps[1].tolist() == [0, 1, 2, 3, 4]


def test_arrays_of_either_order_are_read(tmp_path):
    for order in "CF":
        array = np.arange(6.0).reshape(2, 3).copy(order=order)
        np.save(tmp_path / "array.npy", array)
        np.testing.assert_array_equal(read_npy(tmp_path / "array.npy"), array)
        np.testing.assert_array_equal(map_npy(tmp_path / "array.npy", ndim=2), array)
    with pytest.raises(ValueError, match=r"array\.npy has an array of shape \(2, 3\), and 1 dimensions are needed"):
        map_npy(tmp_path / "array.npy", ndim=1)


def test_what_is_not_a_whole_array_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "array.npy"
    with pytest.raises(ValueError, match=r"array\.npy does not exist"):
        read_npy(path)
    np.savez(tmp_path / "archive.npz", a=np.ones(3))
    header = io.BytesIO()
    huge = {"descr": "<f8", "fortran_order": False, "shape": (1 << 40, 1 << 10)}
    np.lib.format.write_array_header_1_0(header, huge)
    negative = header.getvalue().replace(b"(1099511627776, 1024)", b"(-1, -1)             ")
    contents = ((tmp_path / "archive.npz").read_bytes(), header.getvalue(), negative, b"", b"garbage")
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"array\.npy is not a readable npy file"):
            read_npy(path)
