"""Our builder writes the same bytes as fairseq's builder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fairseq.data import data_utils
from fairseq.data.indexed_dataset import make_builder

from mlsm_plugin.fairseq_plugin.compat import binarized_files
from mlsm_plugin.fairseq_plugin.compat.binarized_files import StreamingMMapBuilder


@pytest.mark.parametrize("vocab_size", [8000, 65_499, 65_500, 250_000])
def test_files_equal_those_of_fairseq(tmp_path, vocab_size, monkeypatch):
    monkeypatch.setattr(binarized_files, "POINTERS_AT_A_TIME", 7)
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 40, size=100)
    ids = generator.integers(0, vocab_size, size=lengths.sum())
    sentences = np.split(ids, np.cumsum(lengths)[:-1])
    theirs = make_builder(str(tmp_path / "theirs.bin"), "mmap", vocab_size=vocab_size)
    ours = StreamingMMapBuilder(str(tmp_path / "ours.bin"), vocab_size)
    for sentence in sentences:
        theirs.add_item(torch.from_numpy(sentence))
    ours.add_sentences(ids[: lengths[:60].sum()], lengths[:60])
    for sentence in sentences[60:]:
        ours.add_sentences(sentence, np.array([len(sentence)]))
    theirs.finalize(str(tmp_path / "theirs.idx"))
    ours.finalize(str(tmp_path / "ours.idx"))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()
    dataset = data_utils.load_indexed_dataset(str(tmp_path / "ours"), None)
    assert dataset[99].tolist() == sentences[99].tolist()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".bin", ".idx", ".idx"]
