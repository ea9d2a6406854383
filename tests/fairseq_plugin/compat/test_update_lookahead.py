"""The batches of each update, as fairseq's own iterators fetch them."""

from __future__ import annotations

import pytest
import torch
from fairseq.data.iterators import EpochBatchIterator, GroupedIterator

from mlsm_plugin.fairseq_plugin.compat.batches import UpdateLookahead


class Numbers(torch.utils.data.Dataset[int]):
    """A dataset of ten samples, each its own index, in batches of one."""

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 10

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def watched(lookahead: UpdateLookahead, *, shards: int = 1, shard: int = 0, workers: int = 0) -> EpochBatchIterator:
    iterator = EpochBatchIterator(
        dataset=Numbers(),
        collate_fn=list,
        batch_sampler=[[index] for index in range(10)],
        num_shards=shards,
        shard_id=shard,
        num_workers=workers,
        buffer_size=5,
    )
    return lookahead.watch(iterator)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("update_freq", [1, 3, 4])
def test_what_is_taken_at_an_update_are_its_batches(update_freq: int, workers: int) -> None:
    lookahead = UpdateLookahead()
    iterator = watched(lookahead, workers=workers)
    for _ in range(2):  # epochs
        seen = []
        for update in GroupedIterator(iterator.next_epoch_itr(shuffle=True), update_freq):
            assert lookahead.take() == update
            assert lookahead.take() == []
            seen.extend(update)
        assert sorted(seen) == [[index] for index in range(10)]
        assert iterator.end_of_epoch()


def test_validation_before_and_between_updates_is_not_taken_for_a_part_of_them() -> None:
    lookahead = UpdateLookahead()
    training, validation = watched(lookahead), watched(lookahead)
    list(validation.next_epoch_itr(shuffle=False, set_dataset_epoch=False))
    for update in GroupedIterator(training.next_epoch_itr(), 4):
        assert lookahead.take() == update
        # one that is cut short (--max-valid-steps), once as fairseq asks for it and once as another trainer might
        next(validation.next_epoch_itr(shuffle=False, set_dataset_epoch=False))
        next(validation.next_epoch_itr(shuffle=False))


def test_a_run_that_goes_on_in_the_middle_of_an_epoch_sees_the_rest() -> None:
    first = watched(UpdateLookahead())
    updates = GroupedIterator(first.next_epoch_itr(), 2)
    whole = [next(updates) for _ in range(3)]
    state = first.state_dict()

    lookahead = UpdateLookahead()
    second = watched(lookahead)
    second.load_state_dict(state)
    rest = GroupedIterator(second.next_epoch_itr(), 2)
    assert rest.n == 3
    for update in rest:
        assert lookahead.take() == update
        whole.append(update)
    assert sorted(batch for update in whole for batch in update) == [[index] for index in range(10)]
    assert second.end_of_epoch()


def test_remainder_of_an_epoch_is_skipped_or_filled_up_as_fairseq_does() -> None:
    lookahead = UpdateLookahead()
    iterator = watched(lookahead)
    grouped = GroupedIterator(iterator.next_epoch_itr(), 4, skip_remainder_batch=True)
    assert [len(update) for update in grouped] == [4, 4]
    assert iterator.end_of_epoch()

    lookahead = UpdateLookahead()
    last_of_three = watched(lookahead, shards=3, shard=2)
    taken = [lookahead.take() for _ in GroupedIterator(last_of_three.next_epoch_itr(), 2)]
    assert [len(update) for update in taken] == [2, 2]
    assert taken[-1][-1] == []  # 10 batches over 3 ranks


def test_an_iterator_is_watched_once() -> None:
    lookahead = UpdateLookahead()
    iterator = watched(lookahead)
    assert lookahead.watch(iterator) is iterator
    (update,) = GroupedIterator(iterator.next_epoch_itr(), 10)
    assert lookahead.take() == update
