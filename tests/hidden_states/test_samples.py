"""Samples of hidden states: drawn from the whole split, without replacement, with the same ones for a seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mlsm_plugin.hidden_states.block_reader import BlockReader, BlockSettings, hidden_states_of
from mlsm_plugin.hidden_states.fairseq_encoder import FairseqEncoder
from mlsm_plugin.hidden_states.samples import sample_hidden_states, type_counts
from tests.tiny_models import TinyData


@pytest.fixture(scope="module")
def reader(tiny: TinyData) -> BlockReader:
    return BlockReader(tiny.data_bin, "train", BlockSettings(24))


@pytest.fixture(scope="module")
def encoder(tiny: TinyData) -> FairseqEncoder:
    return FairseqEncoder(tiny.model, tiny.data_bin, layer=0, device="cpu")


def sampled(reader: BlockReader, encoder: FairseqEncoder, number: int, **options: object) -> np.ndarray:
    return sample_hidden_states(reader, encoder, num_tokens=number, max_batch_tokens=4000, **options)  # type: ignore[arg-type]


def test_types_are_counted_over_the_whole_split(reader: BlockReader) -> None:
    text = reader.flat_tokens(0, reader.num_tokens)
    assert type_counts(reader).tolist() == np.bincount(text, minlength=len(reader.dictionary)).tolist()


def test_whole_split_is_sampled_once(reader: BlockReader, encoder: FairseqEncoder) -> None:
    found = sampled(reader, encoder, 10**9)
    blocks = [block for index in range(len(reader)) for block in reader.block(index)]
    _, hidden = hidden_states_of(blocks, reader, encoder, max_tokens=4000)
    expected = torch.nn.functional.normalize(hidden).numpy()
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    order = [np.lexsort(np.round(rows, 4).T) for rows in (found, expected)]
    np.testing.assert_allclose(found[order[0]], expected[order[1]], atol=2e-4)


def test_seed_decides_which_are_drawn(reader: BlockReader, encoder: FairseqEncoder) -> None:
    first, again, other = (sampled(reader, encoder, 300, seed=seed) for seed in (3, 3, 4))
    assert first.shape == (300, 32)
    np.testing.assert_allclose(np.linalg.norm(first, axis=1), 1, rtol=1e-5)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(sampled(reader, encoder, 100, seed=3), first[:100])


def test_pruning_keeps_rare_words(reader: BlockReader, encoder: FairseqEncoder) -> None:
    counts = type_counts(reader)
    threshold = 2e-3
    rare = counts[(counts / counts.sum() < threshold)]
    expected = int(rare[rare > 0].sum())
    assert 20 < expected < 0.5 * reader.num_tokens
    found = sampled(reader, encoder, 10**9, frequency_pruning="drop", pruning_threshold=threshold)
    assert len(found) == expected
    thinned = sampled(reader, encoder, 10**9, frequency_pruning="subsample", pruning_threshold=threshold)
    assert expected < len(thinned) < reader.num_tokens


def test_pruning_that_leaves_nothing_is_refused(reader: BlockReader, encoder: FairseqEncoder) -> None:
    with pytest.raises(ValueError, match="no token is left to learn a dictionary from") as e:
        sampled(reader, encoder, 100, frequency_pruning="drop", pruning_threshold=1e-9)
    assert "higher --pruning-threshold" in str(e.value)
