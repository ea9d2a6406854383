"""Streams of hidden states: passes over the whole split, in an order that the seed and the batch's number decide."""

from __future__ import annotations

import threading
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor

from mlsm_plugin.core.hidden_states.stream import HiddenStateStream
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings, hidden_states_of
from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import FairseqEncoder
from tests.tiny_models import TinyData


@pytest.fixture(scope="module")
def reader(tiny: TinyData) -> BlockReader:
    return BlockReader(tiny.data_bin, "train", BlockSettings(24))


@pytest.fixture(scope="module")
def encoder(tiny: TinyData) -> FairseqEncoder:
    return FairseqEncoder(tiny.model, tiny.data_bin, layer=0, device="cpu")


def stream(reader: BlockReader, encoder: FairseqEncoder, **options: object) -> HiddenStateStream:
    settings = {"batch_size": 100, "max_batch_tokens": 4000, "buffer_rows": 700, **options}
    return HiddenStateStream(reader, encoder, **settings)  # type: ignore[arg-type]


def everything(reader: BlockReader, encoder: FairseqEncoder) -> Tensor:
    blocks = [block for index in range(len(reader)) for block in reader.block(index)]
    return hidden_states_of(blocks, reader, encoder, max_tokens=4000)[1]


def distances(rows: Tensor, among: Tensor) -> Tensor:
    """From each row to the nearest of others."""
    return torch.cdist(rows.double(), among.double()).amin(1)


def test_a_pass_gives_each_hidden_state_at_most_once(reader: BlockReader, encoder: FairseqEncoder) -> None:
    source = stream(reader, encoder)
    rows = [number // 100 for _, number in source._buffers(0, source.buffer_rows)]
    assert len(rows) > 2
    whole = everything(reader, encoder)
    found = torch.cat(list(islice(source.batches(), sum(rows))))
    assert 0.8 * len(whole) < len(found) <= len(whole)
    assert float(distances(found, whole).max()) < 1e-3
    buffers = list(source._buffers(0, source.buffer_rows))
    blocks = [block for blocks, _ in buffers for block in blocks]
    assert len(set(blocks)) == len(blocks) <= len(reader)
    assert sum(number for _, number in buffers) <= len(whole)


def test_a_stream_begins_anywhere_and_the_seed_decides(reader: BlockReader, encoder: FairseqEncoder) -> None:
    first = list(islice(stream(reader, encoder).batches(), 90))  # several passes
    assert {batch.shape for batch in first} == {(100, 32)}
    assert not torch.equal(first[0], first[1])
    for skip in (1, 6, 7, 40, 71):
        assert torch.equal(next(stream(reader, encoder).batches(skip)), first[skip])
    assert not torch.equal(next(stream(reader, encoder, seed=2).batches()), first[0])


def test_batches_mix_the_blocks_of_a_buffer(reader: BlockReader, encoder: FairseqEncoder) -> None:
    source = stream(reader, encoder)
    sample = source._hidden_states(*next(source._buffers(0, source.buffer_rows)))
    assert len(sample) >= 700
    assert len(source.sample(10**9)) > 1.5 * len(sample)  # not only a buffer
    assert len(source.sample(50)) == 50
    order = distances(next(source.batches()), sample)
    assert float(order.max()) < 1e-4
    nearest = torch.cdist(next(source.batches()), sample).argmin(1)
    assert int(nearest.max() - nearest.min()) > len(sample) // 2


def test_a_split_smaller_than_a_batch_is_one_batch(reader: BlockReader, encoder: FairseqEncoder) -> None:
    whole = len(everything(reader, encoder))
    batches = list(islice(stream(reader, encoder, batch_size=10**6).batches(), 2))
    assert [len(batch) for batch in batches] == [whole, whole]
    assert not torch.equal(*batches)


def test_a_sample_is_drawn_from_the_whole_text_once(reader: BlockReader, encoder: FairseqEncoder) -> None:
    whole = everything(reader, encoder)
    found = stream(reader, encoder).sample(10**9)
    assert found.shape == whole.shape
    order = [np.lexsort(np.round(rows.numpy(), 4).T) for rows in (found, whole)]
    np.testing.assert_allclose(found[order[0]], whole[order[1]], atol=2e-4)
    first, again, other = (stream(reader, encoder, seed=seed).sample(300, device="cpu") for seed in (3, 3, 4))
    assert first.shape == (300, 32)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def threads_of_streams() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hidden states")]


def test_a_stream_ends_where_it_is_told_and_leaves_no_thread(reader: BlockReader, encoder: FairseqEncoder) -> None:
    first = list(islice(stream(reader, encoder).batches(), 20))
    for skip, stop in ((0, 20), (3, 4), (5, 17), (6, 6)):
        found = list(stream(reader, encoder).batches(skip, stop))
        assert len(found) == stop - skip
        assert all(torch.equal(batch, wanted) for batch, wanted in zip(found, first[skip:stop], strict=True))
    batches = stream(reader, encoder).batches()
    next(batches)
    assert threads_of_streams()
    batches.close()
    assert threads_of_streams() == []


def test_an_error_of_the_model_is_that_of_the_batch(
    reader: BlockReader, encoder: FairseqEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = stream(reader, encoder).batches()
    next(batches)

    def broken(*_: object) -> Tensor:
        raise ValueError("the model is broken")

    for name in ("hidden_states", "hidden_states_of"):
        monkeypatch.setattr(encoder, name, broken)
    with pytest.raises(ValueError, match="the model is broken"):
        list(islice(batches, 50))
    assert threads_of_streams() == []


class Forgetful(FairseqEncoder):
    """Knows nothing about each third id."""

    knows_nothing = False

    def hidden_states_of(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        known = (tokens[chosen] % 3 > 0) & (not self.knows_nothing)
        return super().hidden_states_of(tokens, chosen) * known[:, None]


def test_tokens_without_a_hidden_state_are_left_out(tiny: TinyData, reader: BlockReader) -> None:
    encoder = Forgetful(tiny.model, tiny.data_bin, layer=0, device="cpu")
    blocks = [block for index in range(len(reader)) for block in reader.block(index)]
    positions, hidden = hidden_states_of(blocks, reader, encoder, max_tokens=4000)
    kept = {int(place) for block in blocks for place in block.positions[block.tokens % 3 > 0] if place >= 0}
    content = {int(place) for block in blocks for place in block.positions[reader.content_mask(block.tokens)]}
    assert set(positions.tolist()) == kept & content < content
    assert bool(hidden.any(dim=1).all())
    for batch in islice(stream(reader, encoder).batches(), 30):
        assert batch.shape == (100, 32)
        assert bool(batch.any(dim=1).all())
    encoder.knows_nothing = True
    with pytest.raises(ValueError, match="the model knows none of the characters of the text"):
        stream(reader, encoder).sample(10)
