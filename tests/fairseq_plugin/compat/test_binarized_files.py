"""Damaged splits are refused before fairseq maps them; whole ones are not."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.fairseq_plugin.compat import binarized_files
from mlsm_plugin.fairseq_plugin.compat.binarized_files import HEADER, MAGIC, StreamingMMapBuilder, check_splits

SYMBOLS = 50
START = len(MAGIC) + HEADER.size


def write(prefix: Path, sentences: list[list[int]]) -> None:
    builder = StreamingMMapBuilder(f"{prefix}.bin", SYMBOLS)
    for ids in sentences:
        builder.add_sentences(np.array(ids), np.array([len(ids)]))
    builder.finalize(f"{prefix}.idx")


@settings(max_examples=30, deadline=None)
@given(
    sentences=st.lists(st.lists(st.integers(0, SYMBOLS - 1), min_size=1, max_size=9), min_size=1, max_size=20),
    at_a_time=st.integers(1, 8),
    data=st.data(),
)
def test_whole_files_pass_and_every_cut_is_seen(tmp_path_factory, sentences, at_a_time, data):
    prefix = tmp_path_factory.mktemp("split") / "train"
    write(prefix, sentences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binarized_files, "AT_A_TIME", at_a_time)
        check_splits(prefix, SYMBOLS)
        largest = max(map(max, sentences))
        if largest:
            with pytest.raises(ValueError, match=rf"train\.bin holds the symbol {largest}, and the dictionary has"):
                check_splits(prefix, largest)
        for ending in (".idx", ".bin"):
            path = prefix.with_suffix(ending)
            content = path.read_bytes()
            path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
            with pytest.raises(ValueError, match=r"train\..*; write it again with `mlsm binarize`"):
                check_splits(prefix, SYMBOLS)
            path.write_bytes(content)


def test_only_splits_that_exist_are_checked(tmp_path):
    check_splits(tmp_path / "train", SYMBOLS, combine=True)
    for name in ("train", "train1", "train2"):
        write(tmp_path / name, [[4, 5, 2]])
    check_splits(tmp_path / "train", SYMBOLS, combine=True)
    (tmp_path / "train2.bin").unlink()
    check_splits(tmp_path / "train", SYMBOLS)
    with pytest.raises(ValueError, match=r"train2\.bin does not exist"):
        check_splits(tmp_path / "train", SYMBOLS, combine=True)


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (0, b"X", "is not an index of a binarized split"),
        (len(MAGIC), struct.pack("<Q", 2), "is of another version"),
        (len(MAGIC) + 8, b"\x06", "or its data are not whole numbers"),
        (len(MAGIC) + 8, b"\x63", "or its data are not whole numbers"),
        (len(MAGIC) + 9, struct.pack("<Q", 1 << 60), "does not fit its 1152921504606846976 sentences"),
        (len(MAGIC) + 9, struct.pack("<Q", 0), "does not fit its 0 sentences"),
        (START, struct.pack("<i", -5), "has a sentence of -5 tokens"),
        (START, struct.pack("<I", 1 << 31), "has a sentence of -2147483648 tokens"),
        (START, struct.pack("<i", 2), "places that do not follow each other"),
        (START + 8, struct.pack("<q", 10**12), "places that do not follow each other"),
        (START + 4, struct.pack("<i", 9), "and its index needs"),
    ],
)
def test_a_wrong_index_is_named(tmp_path, place, value, problem):
    write(tmp_path / "train", [[4, 5, 2], [6, 2]])
    content = bytearray((tmp_path / "train.idx").read_bytes())
    content[place : place + len(value)] = value
    (tmp_path / "train.idx").write_bytes(content)
    with pytest.raises(ValueError, match=rf"train\.\w+ .*{problem}.*write it again"):
        check_splits(tmp_path / "train", SYMBOLS)


def test_the_old_format_is_left_to_fairseq(tmp_path):
    (tmp_path / "train.idx").write_bytes(binarized_files.OLD_MAGIC + b"more")
    check_splits(tmp_path / "train", SYMBOLS)
