"""Sequences for the Trainer: their codes, and the epoch that all worker processes see."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from mlsm_plugin.huggingface import PretrainingSequences, TokenSequences
from mlsm_plugin.huggingface.pretraining_sequences import order_of_epoch
from tests.huggingface.tiny_corpus import ATOMS, random_ids, write_codes


def test_items_know_their_place(tmp_path: Path) -> None:
    ids = random_ids(9)
    sequences = TokenSequences(ids)
    write_codes(sequences, tmp_path / "codes")
    dataset = PretrainingSequences(sequences, tmp_path / "codes")
    assert (len(dataset), dataset.num_atoms) == (9, ATOMS)
    assert dataset[4].positions[0] == sum(len(one) for one in ids[:4])
    np.testing.assert_array_equal(dataset[4].input_ids, ids[4])


def test_workers_that_live_on_see_the_next_epoch() -> None:
    dataset = PretrainingSequences(random_ids(4))
    loader = DataLoader(
        dataset,
        batch_size=2,
        num_workers=1,
        persistent_workers=True,
        collate_fn=lambda rows: [one.epoch for one in rows],
    )
    assert list(loader) == [[0, 0], [0, 0]]
    dataset.set_epoch(3)
    assert list(loader) == [[3, 3], [3, 3]]


def test_codes_of_other_sequences_or_another_order_are_refused(tmp_path: Path) -> None:
    ids = random_ids(9)
    write_codes(TokenSequences(ids), tmp_path / "codes")
    for other in (ids[::-1], ids[:-1], [*ids[:-1], ids[-1][:-1]]):
        with pytest.raises(ValueError, match="from another text, or from these sequences in another order"):
            PretrainingSequences(other, tmp_path / "codes")


def test_codes_that_do_not_say_which_positions_they_cover_are_refused(tmp_path: Path) -> None:
    sequences = TokenSequences(random_ids(9))
    write_codes(sequences, tmp_path / "codes", coverage=0.5)
    with pytest.raises(ValueError, match="no coverage_seed"):
        PretrainingSequences(sequences, tmp_path / "codes")


def test_there_is_no_number_of_atoms_without_codes() -> None:
    with pytest.raises(ValueError, match="have no codes"):
        _ = PretrainingSequences(random_ids(2)).num_atoms


def test_a_training_takes_each_sample_at_its_place_in_the_order() -> None:
    dataset = PretrainingSequences(random_ids(5))
    assert [dataset[index].progress for index in range(5)] == [1.0] * 5  # an evaluation
    dataset.set_training(seed=3, samples=10)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        order = order_of_epoch(5, 3, epoch).tolist()
        assert [dataset[index].progress for index in order] == [(5 * epoch + place) / 10 for place in range(5)]
    assert copy.deepcopy(dataset)[0].progress == 1.0
