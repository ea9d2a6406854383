"""Distillation: a student learns the distributions of a teacher over the vocabulary (Hinton et al., 2015); in nats."""

import torch
import torch.nn.functional as F
from torch import Tensor


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless the temperature is positive."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def distillation_kl(logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 x KL(softmax(teacher / T) || softmax(student / T)) of each token, ``(n,)`` float32.

    With the factor T^2, the gradients hardly depend on the temperature T. Both logits are ``(n, V)``, any floating
    dtype; the teacher's get no gradient. ValueError if their shapes differ.
    """
    check_temperature(temperature)
    if logits.shape != teacher_logits.shape:
        raise ValueError(f"the student's logits are {tuple(logits.shape)}, the teacher's {tuple(teacher_logits.shape)}")
    with torch.autocast(logits.device.type, enabled=False):
        student = (logits.float() / temperature).log_softmax(dim=1)
        teacher = (teacher_logits.detach().float() / temperature).log_softmax(dim=1)
        return temperature**2 * F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1)
