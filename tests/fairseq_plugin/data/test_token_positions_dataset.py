from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, ListDataset
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary, load_split, training_samples
from mlsm_plugin.fairseq_plugin.data.token_datasets import NO_POSITION, TokenPositionsDataset

BOS = 0
FIRST_TOKEN = 10
BREAK_MODES = ["none", "complete", "complete_doc", "eos"]
SHORTEN_METHODS = ["none", "truncate", "random_crop"]


def options(break_mode, shorten_method, tokens_per_sample, seed=1, splits=""):
    return SimpleNamespace(
        sample_break_mode=break_mode,
        shorten_method=shorten_method,
        tokens_per_sample=tokens_per_sample,
        shorten_data_split_list=splits,
        seed=seed,
    )


def tokens_and_positions(dataset, dictionary, cfg, split="train"):
    """The samples of a split and of its positions."""
    sizes = np.array(dataset.sizes)
    tokens = training_samples(dataset, split=split, cfg=cfg, dictionary=dictionary, bos=BOS)
    positions = training_samples(
        TokenPositionsDataset(sizes), split=split, cfg=cfg, dictionary=dictionary, bos=NO_POSITION
    )
    return tokens, positions


def numbered_sentences(lengths):
    """Sentences in which every token has an id of its own: its position plus FIRST_TOKEN."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    sentences = [torch.arange(starts[i], starts[i + 1]) + FIRST_TOKEN for i in range(len(lengths))]
    return ListDataset(sentences, np.array(lengths))


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.just(1), st.integers(1, 20)), min_size=1, max_size=25),
    break_mode=st.sampled_from(BREAK_MODES),
    shorten_method=st.sampled_from(SHORTEN_METHODS),
    tokens_per_sample=st.integers(2, 30),
    seed=st.integers(0, 100),
    epoch=st.integers(0, 3),
)
def test_every_token_has_its_own_position(lengths, break_mode, shorten_method, tokens_per_sample, seed, epoch):
    # fairseq cannot make blocks of documents without sentences
    assume(break_mode != "complete_doc" or max(lengths) > 1)
    cfg = options(break_mode, shorten_method, tokens_per_sample, seed)
    tokens, positions = tokens_and_positions(numbered_sentences(lengths), Dictionary(), cfg)
    for dataset in (tokens, positions):
        dataset.set_epoch(epoch)
    assert len(tokens) == len(positions)
    np.testing.assert_array_equal(tokens.sizes, positions.sizes)
    seen = []
    for index in range(len(tokens)):
        sample, places = tokens[index].tolist(), positions[index].tolist()
        assert len(places) == len(sample)
        assert (sample[0], places[0]) == (BOS, NO_POSITION)
        assert [place + FIRST_TOKEN for place in places[1:]] == sample[1:]
        seen.extend(places[1:])
    assert len(set(seen)) == len(seen)
    assert max(tokens.sizes) <= tokens_per_sample
    if shorten_method == "none" and break_mode in ("none", "complete", "eos"):
        assert seen == list(range(sum(lengths)))


@pytest.mark.parametrize(("splits", "split", "shortened"), [("train", "train", True), ("train", "valid", False)])
def test_only_the_named_splits_are_shortened_on_both_sides(splits, split, shortened):
    cfg = options("eos", "truncate", 4, splits=splits)
    tokens, positions = tokens_and_positions(numbered_sentences([6, 2]), Dictionary(), cfg, split)
    places = [positions[i][1:].tolist() for i in range(len(positions))]
    assert places == [[0, 1, 2], [3] if shortened else [3, 4, 5], [6, 7]]  # BOS leaves three places of four
    assert [(tokens[i][1:] - FIRST_TOKEN).tolist() for i in range(len(tokens))] == places


@pytest.mark.parametrize("break_mode", BREAK_MODES)
@pytest.mark.parametrize("shorten_method", SHORTEN_METHODS)
def test_positions_lead_back_to_the_tokens_of_a_real_split(pipeline, break_mode, shorten_method):
    dictionary = load_dictionary(pipeline.data_bin)
    split = load_split(str(pipeline.data_bin / "valid"), dictionary)
    flat = torch.cat([split[index] for index in range(len(split))])
    tokens, positions = tokens_and_positions(split, dictionary, options(break_mode, shorten_method, 24))
    assert len(tokens) == len(positions) > 20
    for index in range(len(tokens)):
        sample, places = tokens[index], positions[index]
        assert places[0] == NO_POSITION
        assert torch.equal(flat[places[1:]], sample[1:])


def test_sizes_outlive_the_memory_mapped_split(pipeline):
    dictionary = load_dictionary(pipeline.data_bin)
    split = load_split(str(pipeline.data_bin / "train"), dictionary)
    positions = TokenPositionsDataset(split.sizes)
    del split
    gc.collect()
    again = load_split(str(pipeline.data_bin / "train"), dictionary)
    np.testing.assert_array_equal(positions.sizes, again.sizes)
    assert not np.shares_memory(positions.sizes, again.sizes)
    assert len(positions) == len(again)
    assert positions.size(3) == positions.num_tokens(3) == again.sizes[3]
    last = len(again) - 1
    assert positions[last].tolist() == list(range(sum(again.sizes) - again.sizes[last], sum(again.sizes)))


def test_positions_do_not_overflow_for_corpora_of_billions_of_tokens():
    positions = TokenPositionsDataset(np.array([2**31 - 2, 2**31 - 2, 3], dtype=np.int32))
    assert positions[2].tolist() == [2**32 - 4, 2**32 - 3, 2**32 - 2]
    assert positions[2].dtype == torch.int64


def test_missing_and_empty_splits_are_named(pipeline, tmp_path):
    dictionary = load_dictionary(pipeline.data_bin)
    with pytest.raises(
        FileNotFoundError, match=r"no binarized split at .*/nothing\.bin; write one with `mlsm binarize`"
    ):
        load_split(str(tmp_path / "nothing"), dictionary)
    with pytest.raises(
        FileNotFoundError, match=r"is not a binarized dataset: dict\.txt is missing \(write one: `mlsm bin"
    ):
        load_dictionary(tmp_path)


def test_the_dictionary_has_the_mask_where_masked_lm_puts_it(pipeline):
    dictionary = load_dictionary(pipeline.data_bin)
    stock = Dictionary.load(str(pipeline.data_bin / "dict.txt"))
    assert dictionary.index("<mask>") == len(dictionary) - 1 == len(stock)
    assert dictionary.symbols[:-1] == stock.symbols
