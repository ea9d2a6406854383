import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.core.sparse_coding.stored_codes import covered_positions

POSITIONS = np.arange(200_000)


@pytest.mark.parametrize("coverage", [0.01, 0.15, 0.5, 0.99])
def test_share_is_the_coverage(coverage):
    covered = covered_positions(POSITIONS, coverage=coverage, seed=3)
    deviation = np.sqrt(coverage * (1 - coverage) / len(POSITIONS))
    assert abs(covered.mean() - coverage) < 4.5 * deviation
    # neighbours are drawn independently of each other
    both = (covered[1:] & covered[:-1]).mean()
    assert abs(both - coverage**2) < 6 * deviation


@given(seed=st.integers(0, 2**63 - 1), cut=st.integers(0, 1000), coverage=st.floats(0.001, 1))
def test_a_position_is_covered_or_not_whatever_is_asked_beside_it(seed, cut, coverage):
    whole = covered_positions(np.arange(1000), coverage=coverage, seed=seed)
    parts = [covered_positions(part, coverage=coverage, seed=seed) for part in np.split(np.arange(1000), [cut])]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    less = covered_positions(np.arange(1000), coverage=coverage / 2, seed=seed)
    assert not (less & ~whole).any()


def test_seeds_choose_different_positions():
    first, second = (covered_positions(POSITIONS, coverage=0.3, seed=seed) for seed in (1, 2))
    assert abs((first & second).mean() - 0.09) < 0.005


def test_full_coverage_and_no_position():
    np.testing.assert_array_equal(covered_positions(np.array([-1, 0, 5]), coverage=1, seed=0), [False, True, True])
    assert not covered_positions(np.full(1000, -1), coverage=0.999, seed=0).any()


@pytest.mark.parametrize("coverage", [0, -0.1, 1.01, float("nan")])
def test_coverage_out_of_range(coverage):
    with pytest.raises(ValueError, match="coverage must be in"):
        covered_positions(POSITIONS, coverage=coverage, seed=0)


def test_seed_out_of_range():
    with pytest.raises(ValueError, match="seed must be in"):
        covered_positions(POSITIONS, coverage=0.5, seed=-1)
