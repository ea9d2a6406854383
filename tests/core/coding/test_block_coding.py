"""Shards of any text: their boundaries, and what a store says of its codes.

``test_corpus_coding.py`` codes binarized splits with it, ``tests/huggingface/test_coding.py`` sequences of ids.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.core.coding.block_coding import shard_boundaries, store_meta
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 40))
def test_shards_are_whole_blocks_about_as_long_as_asked(sizes: list[int], shard_tokens: int) -> None:
    ends = np.cumsum(sizes)
    reader = cast(Any, SimpleNamespace(num_tokens=int(ends[-1]), starts=ends - sizes))
    boundaries = shard_boundaries(reader, shard_tokens)
    assert boundaries[0] == 0
    assert boundaries[-1] == ends[-1]
    assert set(boundaries[:-1]) <= set(reader.starts.tolist())
    lengths = np.diff(boundaries)
    assert (lengths > 0).all()
    assert (lengths[:-1] >= shard_tokens).all()
    assert (lengths < shard_tokens + 2 * max(sizes)).all()


def test_a_text_that_consists_of_blocks_says_nothing_of_cutting() -> None:
    coder = LassoCoder(AtomDictionary(np.eye(4, 8, dtype=np.float32), {"lambda": 0.1}))
    common = {"split": "a", "auxiliary": "b"}
    settings = CodingSettings(layer=2, coverage_seed=7)
    cut = store_meta(coder, settings, blocks=BlockSettings(9, "eos"), **common)
    uncut = store_meta(coder, settings, blocks=None, **common)
    assert cut.pop("blocks") == {"tokens_per_sample": 9, "sample_break_mode": "eos"}
    assert cut == uncut
    assert uncut["fingerprints"] == {"split": "a", "dictionary": coder.fingerprint, "auxiliary": "b"}
    assert (uncut["layer"], uncut["coverage_seed"]) == (2, 0)  # all is covered, whatever the seed
