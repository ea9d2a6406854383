"""The parts of the compiled loop, each against plain numpy."""

from __future__ import annotations

import numpy as np
import spams
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.sparse_coding import active_set_kernel as kernel
from mlsm_plugin.core.sparse_coding.active_set_torch import relative_gap_of_parts


def unit_rows(rng: np.random.Generator, rows: int, dim: int) -> np.ndarray:
    atoms = rng.standard_normal((rows, dim))
    return atoms / np.linalg.norm(atoms, axis=1, keepdims=True)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_atoms=st.integers(1, 300),
    limit=st.integers(1, 300),
    held=st.integers(0, 10),
    floor=st.sampled_from([0.0, 0.3, 5.0]),
    power=st.sampled_from([1, 9]),
)
def test_the_strongest_atoms_join_the_working_set(
    seed: int, num_atoms: int, limit: int, held: int, floor: float, power: int
) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(num_atoms) ** power).astype(np.float32)
    first = rng.permutation(num_atoms)[:held]
    chosen = np.full(min(num_atoms, len(first) + limit), -1, np.int64)
    chosen[: len(first)] = first
    places = np.full(num_atoms, -1, np.int64)
    places[first] = np.arange(len(first))
    count = kernel.add_strongest(values, limit, floor, chosen, places, len(first))
    assert chosen[: len(first)].tolist() == first.tolist()
    assert len(set(chosen[:count].tolist())) == count <= len(chosen)
    assert np.flatnonzero(places >= 0).tolist() == sorted(chosen[:count].tolist())
    assert (places[chosen[:count]] == np.arange(count)).all()
    new = chosen[len(first) : count]
    left_out = np.setdiff1d(np.flatnonzero(values > floor), chosen[:count])
    assert (values[new] > floor).all()
    if (values > floor).sum() <= limit:
        assert len(left_out) == 0
    elif count < len(chosen):
        # none that is left out is stronger than one that joins, and they are about as many as were asked for
        assert values[left_out].max(initial=-np.inf) <= values[new].min(initial=np.inf)
        bins = (values[values > floor] - floor) / (values.max() - floor) * kernel.BINS
        fullest = np.bincount(np.minimum(bins.astype(int), kernel.BINS - 1)).max()
        assert (values > floor).sum() - len(left_out) >= limit - 2 * fullest


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), dim=st.integers(1, 8), data=st.data())
def test_factor_follows_the_atoms_that_join_and_leave(seed: int, dim: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    atoms = unit_rows(rng, 9, dim)
    local_gram = (atoms @ atoms.T).astype(np.float32)
    factor, support, size = np.zeros((dim + 1, dim + 1)), np.empty(dim + 1, np.int64), 0
    inside: list[int] = []
    for _ in range(15):
        if inside and data.draw(st.booleans()):
            member = data.draw(st.integers(0, size - 1))
            kernel.leave(factor, support, size, member)
            del inside[member]
            size -= 1
        else:
            place = int(rng.choice([place for place in range(9) if place not in inside]))
            # the squared distance of the atom from the span of the others
            span = atoms[inside].T
            rest = atoms[place] - span @ np.linalg.lstsq(span, atoms[place], rcond=None)[0] if inside else atoms[place]
            joined = kernel.join(factor, support, size, local_gram, place)
            assert joined or len(inside) == dim or rest @ rest < 1e-5
            assert not joined or rest @ rest > 1e-8
            if joined:
                inside.append(place)
                size += 1
        assert support[:size].tolist() == inside
        lower = np.tril(factor[:size, :size])
        np.testing.assert_allclose(lower @ lower.T, local_gram[np.ix_(inside, inside)], atol=1e-6)


def test_atoms_that_depend_on_the_support_do_not_join() -> None:
    atoms = np.array([[1.0, 0, 0], [0, 1.0, 0], [0.6, 0.8, 0], [1.0, 0, 0], [0, 0, 1.0]])
    local_gram = (atoms @ atoms.T).astype(np.float32)
    factor, support = np.zeros((4, 4)), np.empty(4, np.int64)
    joined = []
    for place in range(5):
        if kernel.join(factor, support, len(joined), local_gram, place):
            joined.append(place)
    assert joined == [0, 1, 4]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(0, 8))
def test_systems_are_solved_with_the_factor(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    gram = (rows := rng.standard_normal((size, size + 3))) @ rows.T
    factor = np.full((10, 10), np.nan)  # nothing outside of the lower triangle may be read
    factor[:size, :size] = np.where(np.tri(size, dtype=bool), np.linalg.cholesky(gram), np.nan)
    b = rng.standard_normal(10)
    expected = np.append(np.linalg.solve(gram, b[:size]), b[size:])
    kernel.solve_with_factor(factor, size, b)
    np.testing.assert_allclose(b, expected, rtol=1e-6, atol=1e-8)


def test_rows_of_the_gram_matrix_are_copied_or_computed() -> None:
    atoms = unit_rows(np.random.default_rng(0), 20, 6).astype(np.float32)
    chosen = np.array([7, 3, 19, 0, 5], np.int64)
    for gram in (atoms @ atoms.T, np.zeros((0, 0), np.float32)):
        local_gram = np.zeros((5, 5), np.float32)
        kernel.fill_gram_row(gram, atoms, chosen, 4, 2, local_gram)
        np.testing.assert_allclose(local_gram[2, :4], atoms[chosen[:4]] @ atoms[19], atol=1e-6)
        assert not local_gram[[0, 1, 3, 4]].any()
        assert local_gram[2, 4] == 0  # beyond the working set


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), size=st.integers(0, 7), lambda_=st.sampled_from([0.01, 0.2, 0.8, 3.0]),
)  # fmt: skip
def test_minimizer_over_the_support_has_no_negative_weight(seed: int, size: int, lambda_: float) -> None:
    rng = np.random.default_rng(seed)
    atoms, x = unit_rows(rng, 7, 12), rng.standard_normal(12)
    local_gram = (atoms @ atoms.T).astype(np.float32)
    factor, support, step = np.zeros((13, 13)), np.empty(13, np.int64), np.empty(13)
    for place in range(size):
        assert kernel.join(factor, support, place, local_gram, place)
    codes = np.where(np.arange(7) < size, rng.random(7), 0)
    gradient = (x - codes @ atoms) @ atoms.T
    left = kernel.minimize_on_support(lambda_, factor, support, size, codes, gradient, 7, local_gram, step)
    inside = support[:left]
    outside = np.setdiff1d(np.arange(7), inside)
    assert (codes[inside] > 0).all()
    assert (codes[outside] == 0).all()
    np.testing.assert_allclose(gradient, (x - codes @ atoms) @ atoms.T, atol=1e-4)
    np.testing.assert_allclose(gradient[inside], lambda_, atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.0, 0.05, 0.5]), lambda_=st.sampled_from([0.02, 0.3, 2.0])
)
def test_certificate_is_a_duality_gap(seed: int, scale: float, lambda_: float) -> None:
    rng = np.random.default_rng(seed)
    atoms, x = unit_rows(rng, 15, 6), unit_rows(rng, 1, 6)[0]
    code = scale * rng.exponential(size=15) * (rng.random(15) < 0.3)
    residual = x - code @ atoms
    correlation = (atoms.astype(np.float32) @ residual.astype(np.float32)).copy()
    rounding = (6 + 3) * 2.0**-24
    gap, optimal = kernel.certify(x, lambda_, lambda_ * code.sum(), atoms, correlation, residual, rounding)
    expected = relative_gap_of_parts(x, residual, (atoms @ residual).max(), lambda_ * code.sum(), lambda_)
    assert abs(gap - expected) <= 1e-4
    value = 0.5 * residual @ residual + lambda_ * code.sum()
    columns = np.asfortranarray(x[:, None]), np.asfortranarray(atoms.T)
    best = spams.lasso(columns[0], D=columns[1], lambda1=lambda_, mode=2, pos=True, numThreads=1).toarray()[:, 0]
    assert value * (1 - gap) <= 0.5 * ((x - best @ atoms) ** 2).sum() + lambda_ * best.sum() + 1e-9
    assert optimal == ((atoms @ residual).max() <= lambda_ * (1 + kernel.SLACK))


def test_inner_products_are_of_both_arguments() -> None:
    a, b = np.array([1.0, 2.0, -3.0]), np.array([0.5, 4.0, 2.0])
    assert kernel.inner(a, b) == 2.5
    assert kernel.inner(a[:0], b[:0]) == 0
