"""The loss of distillation, compared with the formula in float64."""

from __future__ import annotations

import math

import pytest
import torch

from mlsm_plugin.core.losses.cross_entropy import distillation_kl


def slow(student: list[float], teacher: list[float], temperature: float) -> float:
    """T^2 times the sum over tokens of p log(p / q)."""

    def softmax(logits: list[float]) -> list[float]:
        weights = [math.exp(value / temperature) for value in logits]
        return [weight / sum(weights) for weight in weights]

    pairs = zip(softmax(teacher), softmax(student), strict=True)
    return temperature**2 * sum(p * math.log(p / q) for p, q in pairs)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_formula(temperature: float, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(4, 9, generator=random).mul(2).to(dtype) for _ in range(2))
    expected = [slow(*rows, temperature) for rows in zip(student.tolist(), teacher.tolist(), strict=True)]
    found = distillation_kl(student, teacher, temperature)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=1e-4)
    assert min(expected) > 0.01


def test_gradient_is_the_difference_of_the_distributions_and_only_the_students() -> None:
    random = torch.Generator().manual_seed(2)
    student, teacher = (torch.randn(3, 7, generator=random).requires_grad_() for _ in range(2))
    distillation_kl(student, teacher, 2.0).sum().backward()
    expected = 2.0 * ((student / 2).softmax(1) - (teacher / 2).softmax(1))
    torch.testing.assert_close(student.grad, expected.detach())
    assert teacher.grad is None


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        distillation_kl(torch.zeros(1, 2), torch.zeros(1, 2), 0)
    with pytest.raises(ValueError, match=r"the student's logits are \(1, 2\), the teacher's \(1, 3\)"):
        distillation_kl(torch.zeros(1, 2), torch.zeros(1, 3))
