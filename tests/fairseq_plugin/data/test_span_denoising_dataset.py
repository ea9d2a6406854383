"""The datasets of span denoising on small texts: what is corrupted, how sizes are told, how batches look."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fairseq.data import FairseqDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.masking.span_corruption import SpanNoise, corrupt_spans
from mlsm_plugin.core.masking.word_boundaries import PieceClasses
from mlsm_plugin.fairseq_plugin.data.span_datasets import Corruption, SpanDenoisingDataset, WithoutEos
from tests.core.masking.slow_boundaries import slow_boundaries
from tests.restored_spans import restore_spans

PAD, EOS, FIRST = 1, 2, 900  # FIRST: of the sentinels
SENTINELS = np.arange(FIRST, FIRST + 30)


class Texts(FairseqDataset):
    """Ids in memory, as fairseq's indexed datasets give them."""

    def __init__(self, *texts: list[int]) -> None:
        self.texts = [torch.tensor(text, dtype=torch.int64) for text in texts]
        self.sizes = np.array([len(text) for text in texts], dtype=np.int32)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.texts[index]

    def __len__(self) -> int:
        return len(self.texts)


def corruption(**changes: Any) -> Corruption:
    values: dict[str, Any] = {"noise": SpanNoise(0.3, 2.0), "sentinels": SENTINELS, "eos": EOS, "pad": PAD}
    return Corruption(**{**values, "source_length": 60, "seed": 7, **changes})


def words_of(begins: np.ndarray) -> PieceClasses:
    """Ids from 10 on, of which some begin words."""
    nothing = np.zeros(10 + len(begins), bool)
    return PieceClasses(nothing, np.append(np.zeros(10, bool), begins), nothing, nothing, nothing)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), length=st.integers(2, 60), rotate=st.booleans())
def test_tokens_become_noise_where_words_are_not_asked_for(seed: int, length: int, rotate: bool) -> None:
    tokens, noise = np.arange(10, 10 + length), SpanNoise(0.3, 2.0, rotate)
    found = corruption(noise=noise).apply(tokens, np.random.default_rng(seed))
    rng = np.random.default_rng(seed)
    expected = corrupt_spans(tokens, noise, sentinels=SENTINELS, eos=EOS, rng=rng)
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(2, 60),
    density=st.sampled_from([0.1, 0.5, 0.9]),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    rotate=st.booleans(),
    room=st.sampled_from([0, 3, None]),
)
def test_whole_words_become_noise_and_sources_and_targets_fit(
    seed: int, length: int, density: float, share: float, rotate: bool, room: int | None
) -> None:
    rng = np.random.default_rng(seed)
    begins = rng.random(length) < share
    tokens, noise = np.arange(10, 10 + length), SpanNoise(density, 2.0, rotate)
    limit = noise.lengths(length, len(SENTINELS))[0]
    longest = None if room is None else noise.lengths(length, len(SENTINELS))[1] + room
    made = corruption(noise=noise, source_length=limit, pieces=words_of(begins), target_length=longest)
    source, target = made.apply(tokens, rng)
    assert len(source) <= limit
    assert longest is None or len(target) <= longest
    assert restore_spans(source, target, sentinels=SENTINELS, eos=EOS).tolist() == tokens.tolist()
    kept = np.isin(tokens, source)
    begins = np.array(slow_boundaries(tokens, words_of(begins))[0])  # the tokens of long words are words
    word = np.cumsum(begins)
    partly = [number for number in set(word.tolist()) if 0 < kept[word == number].mean() < 1]
    if begins[1:].any() and not partly:
        return
    # where no choice of words fits, any tokens do
    assert len(source) == limit - (rotate and len(source) < limit)
    assert (~kept).sum() == noise.counts(length, len(SENTINELS))[0]


def test_more_words_become_noise_where_those_drawn_are_too_short() -> None:
    begins = np.ones(40, bool)
    begins[1:10] = False  # one word of 10 tokens and 30 of one
    tokens, noise = np.arange(10, 50), SpanNoise(0.15, 3.0)
    limit = noise.lengths(40, len(SENTINELS))[0]
    for seed in range(30):
        made = corruption(noise=noise, source_length=limit, pieces=words_of(begins))
        source, _ = made.apply(tokens, np.random.default_rng(seed))
        assert len(source) <= limit
        assert np.isin(tokens[:10], source).all() or not np.isin(tokens[:10], source).any()


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(2, 80),
    share=st.sampled_from([0.02, 0.3, 0.8, 1.0]),
    words=st.sampled_from([None, 0.3, 1.0]),
    rotate=st.booleans(),
)
def test_sources_and_targets_fit_where_unknown_tokens_stay(
    seed: int, length: int, share: float, words: float | None, rotate: bool
) -> None:
    rng, noise = np.random.default_rng(seed), SpanNoise(0.15, 3.0, rotate)
    tokens = np.where(rng.random(length) < share, 3, np.arange(10, 10 + length))
    pieces = None if words is None else words_of(rng.random(length) < words)
    limit, longest = noise.lengths(length, len(SENTINELS))
    made = corruption(noise=noise, source_length=limit, target_length=2 * longest, pieces=pieces, unk=3)
    source, target = made.apply(tokens, rng)
    assert len(source) <= limit
    assert len(target) <= 2 * longest
    assert 3 not in target
    restored = restore_spans(source, target, sentinels=SENTINELS, eos=EOS)
    assert np.array_equal(restored, tokens[: len(restored)])
    if (tokens != 3).mean() > 0.9:
        assert len(restored) == length  # the text is only cut where hardly anything is known


def test_sentences_lose_their_eos_and_boundaries_their_place() -> None:
    sentences = Texts([5, 6, EOS], [EOS], [7, EOS], [EOS], [8, 9, 10, EOS])
    without = WithoutEos(sentences, EOS)
    assert [without[i].tolist() for i in range(len(without))] == [[5, 6], [7], [8, 9, 10]]
    assert without.sizes.tolist() == [2, 1, 3]
    kept = WithoutEos(sentences, EOS, keep_boundaries=True)
    assert [kept[i].tolist() for i in range(len(kept))] == [[5, 6], [], [7], [], [8, 9, 10]]
    assert kept.boundary_size == 4  # longer than any sentence
    assert kept.sizes.tolist() == [2, 4, 1, 4, 3]
    assert kept.longest_document == 3
    of_two = Texts([5, EOS], [6, EOS], [EOS], [7, EOS])
    assert WithoutEos(of_two, EOS, keep_boundaries=True).longest_document == 2
    without_boundaries = WithoutEos(Texts([5, EOS], [6, 7, EOS]), EOS)
    assert [without_boundaries[i].tolist() for i in range(2)] == [[5], [6, 7]]
    with pytest.raises(ValueError, match=r"do not end in </s>; write it with `mlsm binarize`"):
        WithoutEos(Texts([5, 6]), EOS)


def denoising(seed: int = 7, *, shuffle: bool = True, rotate: bool = False) -> SpanDenoisingDataset:
    rng = np.random.default_rng(0)
    blocks = Texts(*(rng.integers(10, 800, size=length).tolist() for length in [9, 30, 2, 30, 17, 9, 9]))
    made = corruption(noise=SpanNoise(0.3, 2.0, rotate), seed=seed)
    return SpanDenoisingDataset(blocks, made, shuffle=shuffle)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[side], other[side]) for side in ("source", "target"))


def test_seed_epoch_and_number_decide_the_spans() -> None:
    dataset, again, other = denoising(), denoising(), denoising(8)
    first = [dataset[i] for i in range(len(dataset))]
    assert all(same(again[i], item) for i, item in reversed(list(enumerate(first))))
    assert not same(other[1], first[1])
    dataset.set_epoch(2)
    assert not same(dataset[1], first[1])
    dataset.set_epoch(1)
    assert same(dataset[1], first[1])
    assert not dataset.can_reuse_epoch_itr_across_epochs
    assert not dataset.supports_prefetch
    ids = Texts([*range(10, 40)], [*range(10, 40)])
    twins = SpanDenoisingDataset(ids, corruption(), shuffle=False)
    assert not same(twins[0], twins[1])


@pytest.mark.parametrize("rotate", [False, True])
def test_sizes_are_told_before_texts_are_corrupted(rotate: bool) -> None:
    dataset = denoising(rotate=rotate)
    for epoch in range(1, 20):
        dataset.set_epoch(epoch)
        for index in range(len(dataset)):
            item = dataset[index]
            lengths = (len(item["source"]), len(item["target"]))
            assert all(found <= told for found, told in zip(lengths, dataset.size(index), strict=True))
            assert rotate or lengths == dataset.size(index)
            text = dataset.blocks[index].tolist()
            assert restore_spans(item["source"], item["target"], sentinels=SENTINELS, eos=EOS).tolist() == text
    numbers = np.arange(len(dataset))
    assert dataset.num_tokens_vec(numbers).tolist() == [max(dataset.size(i)) for i in numbers]
    assert [dataset.num_tokens(i) for i in numbers] == dataset.num_tokens_vec(numbers).tolist()


def test_a_batch_is_what_an_encoder_decoder_takes() -> None:
    dataset = denoising()
    samples = [dataset[i] for i in (4, 2, 1)]
    batch = dataset.collater(samples)
    assert batch["id"].tolist() == [4, 2, 1]
    assert batch["nsentences"] == 3
    assert batch["ntokens"] == sum(len(sample["target"]) for sample in samples)
    network = batch["net_input"]
    assert network["src_lengths"].tolist() == [len(sample["source"]) for sample in samples]
    for row, sample in enumerate(samples):
        for tokens, side in ((network["src_tokens"][row], "source"), (batch["target"][row], "target")):
            length = len(sample[side])
            assert tokens[:length].tolist() == sample[side].tolist()
            assert (tokens[length:] == PAD).all()
        before = network["prev_output_tokens"][row][: len(sample["target"])]
        assert before.tolist() == [EOS, *sample["target"][:-1]]
    assert dataset.collater([]) == {}


def test_order_is_by_length_and_new_among_equals() -> None:
    dataset = denoising()
    np.random.seed(3)
    orders = [dataset.ordered_indices().tolist() for _ in range(20)]
    for order in orders:
        assert sorted(order) == list(range(7))
        sizes = [dataset.size(i) for i in order]
        assert sizes == sorted(sizes)
    assert len({tuple(order) for order in orders}) > 3
    assert denoising(shuffle=False).ordered_indices().tolist() == [2, 0, 5, 6, 4, 1, 3]


def test_pairs_above_the_positions_of_the_model_are_told() -> None:
    dataset = denoising()
    source, target = dataset.size(4)  # of the middle length
    for limits, left_out in (((source, target), [1, 3]), ((source - 1, 99), [1, 3, 4]), ((99, target - 1), [1, 3, 4])):
        fits, others = dataset.filter_indices_by_size(np.arange(7), limits)
        assert others == left_out
        assert sorted([*fits.tolist(), *others]) == list(range(7))


def test_fewer_pairs_than_a_batch_are_one() -> None:
    dataset = denoising(shuffle=False)
    (batch,) = dataset.batch_by_size(dataset.ordered_indices(), max_sentences=16, required_batch_size_multiple=8)
    assert sorted(np.asarray(batch).tolist()) == list(range(7))
