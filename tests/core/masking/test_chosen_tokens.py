from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.core.masking.chosen_tokens import ROUNDED_TO, ChosenTokens, chosen_sizes

FLAGS = st.integers(1, 9).flatmap(
    lambda length: st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=5)
)


@given(FLAGS, st.booleans(), st.integers(0, 5), st.integers(0, 9))
def test_the_chosen_tokens_come_first_and_in_order(
    flags: list[list[bool]], given_sizes: bool, wider: int, longer: int
) -> None:
    chosen = torch.tensor(flags)
    counts, length = chosen.sum(dim=1).tolist(), chosen.size(1)
    most, total = min(length, max(1, *counts, 0) + wider), min(chosen.numel(), max(1, sum(counts)) + longer)
    found = ChosenTokens.of(chosen, (sum(counts), most, total) if given_sizes else None)
    expected = [index for index, flag in enumerate(chosen.flatten().tolist()) if flag]
    assert found.flat.tolist()[: len(expected)] == expected
    assert len(found.flat) == len(found.slots) == (total if given_sizes else len(expected))
    assert not any(chosen.flatten()[found.flat][len(expected) :])
    assert len(set(found.flat.tolist())) == len(found.flat)
    for row, flags_of_row in enumerate(flags):
        places = [place for place, flag in enumerate(flags_of_row) if flag]
        assert found.places[row].tolist()[: len(places)] == places
    rows = torch.arange(len(chosen))[:, None].expand_as(found.places) * length + found.places
    assert rows.flatten()[found.slots].tolist()[: len(expected)] == expected


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=8), st.floats(0.01, 0.9))
def test_there_is_room_for_all_and_for_no_more_than_a_batch_has(samples: list[tuple[int, int]], share: float) -> None:
    counts = [min(pair) for pair in samples]
    lengths = [max(pair) for pair in samples]
    assert chosen_sizes(counts, lengths) == (sum(counts), max(1, *counts, 0), max(1, sum(counts)))
    number, most, total = chosen_sizes(counts, lengths, share)
    longest = max(1, *lengths, 0)
    assert number == sum(counts)
    assert max(1, *counts, 0) <= most <= longest
    assert max(1, number) <= total <= longest * len(lengths)


@pytest.mark.parametrize("share", [0.15, 0.4])
def test_batches_of_one_shape_get_the_same_sizes(share: float) -> None:
    torch.manual_seed(0)
    drawn = (torch.rand(500, 32, 512) < share).sum(dim=2)
    sizes = {chosen_sizes(counts.tolist(), [512] * 32, share)[1:] for counts in drawn}
    assert len(sizes) == 1
    ((most, total),) = sizes
    assert most % ROUNDED_TO == total % ROUNDED_TO == 0
    assert total < 1.2 * share * 32 * 512
