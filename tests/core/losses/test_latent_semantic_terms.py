"""The weighted sum of KL and MLM, compared with means in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mlsm_plugin.core.losses.latent_semantic import check_weights, latent_semantic_terms


def masked_tokens(*, empty: int = 0) -> dict[str, Any]:
    """Logits, targets and codes of 9 masked tokens, of which the first ``empty`` have no code."""
    torch.manual_seed(0)
    weights = torch.rand(9, 3)
    weights[:empty] = 0
    return {
        "targets": torch.randint(20, (9,)),
        "token_logits": torch.randn(9, 20, requires_grad=True),
        "atom_logits": torch.randn(9, 6, requires_grad=True),
        "codes": {"atoms": torch.stack([torch.randperm(6)[:3] for _ in range(9)]), "weights": weights},
    }


@pytest.mark.parametrize(("latent", "mlm"), [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, 2.0)])
@pytest.mark.parametrize("empty", [0, 4, 9])
def test_both_losses_are_means_over_their_own_tokens(latent: float, mlm: float, empty: int) -> None:
    batch = masked_tokens(empty=empty)
    terms = latent_semantic_terms(**batch, latent_weight=latent, mlm_weight=mlm)
    kl = 0.0
    for row in range(empty, 9):
        target = batch["codes"]["weights"][row].double() / batch["codes"]["weights"][row].double().sum()
        found = batch["atom_logits"][row].detach().double().log_softmax(0)[batch["codes"]["atoms"][row]]
        kl += float((target * (target.log() - found)).sum())
    cross_entropy = float(F.cross_entropy(batch["token_logits"].detach().double(), batch["targets"]))
    coded = 9 - empty
    assert int(terms.sample_size) == (coded if latent else 9)
    if terms.sample_size:
        expected = latent * (kl / coded if coded else 0) + mlm * cross_entropy
        assert float(terms.loss) / int(terms.sample_size) == pytest.approx(expected, rel=1e-5)
    else:
        assert float(terms.loss) == 0
    assert (terms.latent is None, terms.mlm is None) == (latent == 0, mlm == 0)
    terms.loss.backward()
    gradients = [batch[name].grad for name in ("token_logits", "atom_logits")]
    assert all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients)


def test_parts_that_have_no_weight_are_not_needed() -> None:
    batch = masked_tokens()
    only_mlm = {**batch, "atom_logits": None, "codes": None}
    assert latent_semantic_terms(**only_mlm, latent_weight=0, mlm_weight=1).nonzeros is None
    only_kl = {**batch, "token_logits": None}
    assert latent_semantic_terms(**only_kl, latent_weight=1, mlm_weight=0).mlm is None
    zero = torch.zeros((), requires_grad=True)
    latent_semantic_terms(**only_kl, latent_weight=1, mlm_weight=0, zero=zero).loss.backward()
    assert zero.grad is not None


def test_weights_that_cannot_be_are_one_line() -> None:
    for wrong in ((-1.0, 1.0), (1.0, -1.0), (0.0, 0.0)):
        with pytest.raises(ValueError, match="must not be negative, and not both 0"):
            check_weights(*wrong)
