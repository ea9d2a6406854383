from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.losses.latent_semantic import latent_semantic_kl, strongest_atom_cross_entropy

LOSSES = [latent_semantic_kl, strongest_atom_cross_entropy]


def dense_targets(n_atoms, atoms, weights):
    """Normalized targets (n, n_atoms) in float64, zero where a row has none."""
    targets = np.zeros((len(atoms), n_atoms))
    for row in range(len(atoms)):
        for atom, weight in zip(atoms[row], weights[row], strict=True):
            if atom >= 0:
                targets[row, atom] += weight
        total = targets[row].sum()
        if total > 0:
            targets[row] /= total
    return targets


def log_softmax(logits):
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def dense_kl(logits, targets):
    """Sum of KL(target || softmax(logits)) and its gradient, the slow way."""
    log_probabilities = log_softmax(logits.astype(np.float64))
    loss, gradient = 0.0, np.zeros_like(targets)
    for row, target in enumerate(targets):
        if target.sum() > 0:
            gradient[row] = np.exp(log_probabilities[row]) - target
            for atom in np.flatnonzero(target):
                loss += target[atom] * (math.log(target[atom]) - log_probabilities[row, atom])
    return loss, gradient


def make_problem(seed, n, n_atoms, m, scale):
    """Random logits and codes; padding anywhere in a row, with garbage weights beside it."""
    rng = np.random.default_rng(seed)
    logits = (scale * rng.standard_normal((n, n_atoms))).astype(np.float32)
    atoms = np.full((n, m), -1, dtype=np.int32)
    weights = rng.uniform(0.5, 2.0, (n, m)).astype(np.float32)
    for row in range(n):
        filled = rng.permutation(m)[: rng.integers(0, min(m, n_atoms) + 1)]
        atoms[row, filled] = rng.permutation(n_atoms)[: len(filled)]
        weights[row, filled] *= rng.choice([0.0, 1e-3, 1.0, 10.0], len(filled))
    return logits, atoms, weights


problems = st.builds(
    make_problem,
    st.integers(0, 2**32 - 1),
    st.integers(0, 6),
    st.integers(1, 12),
    st.integers(0, 15),
    st.sampled_from([0.1, 1.0, 10.0]),
)


def loss_and_gradient(function, logits, atoms, weights):
    logits = torch.tensor(logits, requires_grad=True)
    loss = function(logits, torch.tensor(atoms), torch.tensor(weights)).sum()
    loss.backward()
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    return loss.item(), logits.grad.numpy()


@settings(max_examples=200, deadline=None)
@given(problem=problems)
def test_kl_and_gradient_are_those_of_the_dense_formula(problem):
    logits, atoms, weights = problem
    expected, expected_gradient = dense_kl(logits, dense_targets(logits.shape[1], atoms, weights))
    loss, gradient = loss_and_gradient(latent_semantic_kl, *problem)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(gradient, expected_gradient, atol=2e-6)
    assert loss >= -1e-5 * max(1, np.abs(logits).max(initial=0))


@settings(max_examples=100, deadline=None)
@given(problem=problems)
def test_cross_entropy_and_gradient_are_those_of_the_strongest_atom(problem):
    logits, atoms, weights = problem
    targets = dense_targets(logits.shape[1], atoms, weights)
    one_hot = np.zeros_like(targets)
    for row, target in enumerate(targets):
        if target.sum() > 0:
            # of equal weights, the first in the row counts
            kept = [(-weight, place) for place, weight in enumerate(weights[row]) if atoms[row, place] >= 0]
            one_hot[row, atoms[row, min(kept)[1]]] = 1
    expected, expected_gradient = dense_kl(logits, one_hot)
    loss, gradient = loss_and_gradient(strongest_atom_cross_entropy, *problem)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(gradient, expected_gradient, atol=2e-6)


def test_kl_on_numbers_worked_out_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))
    atoms = torch.tensor([[0, -1, 2], [1, -1, -1]])
    weights = torch.tensor([[3.0, 9.0, 1.0], [0.5, 0.0, 0.0]])
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.25) - math.log(0.2)
    assert latent_semantic_kl(logits, atoms, weights).sum().item() == pytest.approx(expected, abs=1e-6)
    expected = -math.log(0.5) - math.log(0.2)
    assert strongest_atom_cross_entropy(logits, atoms, weights).sum().item() == pytest.approx(expected, abs=1e-6)


def test_kl_is_zero_when_the_prediction_is_the_target():
    probabilities = torch.tensor([[0.5, 0.3, 0.2]])
    assert abs(latent_semantic_kl(probabilities.log(), torch.tensor([[0, 1, 2]]), probabilities).item()) < 1e-6


def test_kl_does_not_depend_on_the_sum_of_the_weights():
    logits, atoms = torch.tensor([[0.3, -0.2, 1.0]]), torch.tensor([[2, 0]])
    once = latent_semantic_kl(logits, atoms, torch.tensor([[0.25, 0.75]]))
    assert torch.equal(once, latent_semantic_kl(logits, atoms, torch.tensor([[1.0, 3.0]])))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("n", "m"), [(0, 0), (0, 3), (4, 0), (4, 3), (1, 0)])
def test_no_codes_give_zero_and_a_zero_gradient(loss, n, m):
    logits = torch.randn(n, 5)
    for atoms, weights in [
        (torch.full((n, m), -1), torch.ones(n, m)),  # all padding
        (torch.arange(m).expand(n, m), torch.zeros(n, m)),  # all weights zero
    ]:
        value, gradient = loss_and_gradient(loss, logits.numpy(), atoms.numpy(), weights.numpy())
        assert value == 0
        assert gradient.shape == (n, 5)
        assert not gradient.any()


def test_of_tied_atoms_the_first_in_the_row_counts():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    tied = strongest_atom_cross_entropy(logits, torch.tensor([[-1, 2, 0]]), torch.tensor([[9.0, 0.5, 0.5]]))
    assert tied.item() == pytest.approx(-math.log(math.exp(3) / (math.exp(1) + math.exp(2) + math.exp(3))), abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_summed_in_float32(loss, dtype):
    logits, atoms, weights = make_problem(3, 500, 40, 6, 3.0)
    rounded = torch.tensor(logits).to(dtype)
    codes = torch.tensor(atoms), torch.tensor(weights).half()
    value = loss(rounded, *codes).sum()
    assert value.dtype == torch.float32
    assert torch.equal(value, loss(rounded.float(), *codes).sum())
    assert value.item() > 500  # so that a sum in half precision would be rounded visibly


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_huge_logits_stay_finite(loss, dtype):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, 1e4]], dtype=dtype, requires_grad=True)
    codes = torch.tensor([[1, -1], [0, 2], [-1, -1]]), torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]])
    value = loss(logits, *codes).sum()
    value.backward()
    first, second = logits[0].float(), math.log(3) if loss is strongest_atom_cross_entropy else math.log(1.5)
    assert value.item() == pytest.approx((first[0] - first[1]).item() + second, rel=1e-5)
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[2].any()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("logits", "atoms", "weights"),
    [((3,), (3, 2), (3, 2)), ((3, 5), (3,), (3,)), ((3, 5), (3, 2), (3, 1)), ((3, 5), (2, 2), (2, 2))],
)
def test_shapes_that_do_not_belong_together_are_named(loss, logits, atoms, weights):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole text is compared)
        loss(torch.zeros(logits), torch.zeros(atoms, dtype=torch.int32), torch.zeros(weights))
    assert str(error.value) == (
        f"expected logits (n, n_atoms), atoms (n, m) and weights (n, m); got {logits}, {atoms} and {weights}"
    )


# The criterion on a real, tiny model
