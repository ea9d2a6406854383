"""Training of sparse autoencoders: gradients, planted features, seeds, resumed runs, dead latents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mlsm_plugin.core.sparse_coding import sae_training
from mlsm_plugin.core.sparse_coding.sae_training import (
    METHODS,
    Parameters,
    SaeSettings,
    SaeTrainer,
    constant_norm,
    schedule,
    train_sae,
)

DIM, FEATURES, ACTIVE = 32, 48, 3


pytestmark = pytest.mark.usefixtures("one_thread")


def planted() -> tuple[Tensor, Tensor]:
    """6,000 sums of three of 48 unit directions in 32 dimensions, and the directions."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.nn.functional.normalize(torch.randn(FEATURES, DIM, generator=generator), dim=1)
    chosen = torch.rand(6000, FEATURES, generator=generator).topk(ACTIVE, dim=1).indices
    weights = torch.rand(6000, ACTIVE, generator=generator) + 0.5
    return (weights[:, :, None] * truth[chosen]).sum(1), truth


def batches_of(rows: Tensor, size: int = 200) -> Any:
    def batches(skip: int) -> Iterator[Tensor]:
        while True:
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(skip))
            yield rows[order[:size]]
            skip += 1

    return batches


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
@pytest.mark.parametrize("prefixes", [(), (12, 24)])
def test_planted_features_are_found(method: str, prefixes: tuple[int, ...]) -> None:
    rows, truth = planted()
    settings = SaeSettings(num_atoms=64, k=4, updates=800, method=method, prefixes=prefixes, rate=1e-2)
    sae = train_sae(SaeTrainer.begin(settings, rows), batches_of(rows)(0))
    found = (truth @ sae.weights.decoder.T).amax(1)
    assert (found > 0.9).float().mean() > (0.6 if prefixes else 0.85)
    torch.testing.assert_close(torch.linalg.vector_norm(sae.weights.decoder, dim=1), torch.ones(64))
    latents = sae.latents(rows)
    assert float((latents > 0).sum(1).float().mean()) == pytest.approx(4, rel=0.15)
    error = (rows - sae.reconstructed(latents, rows)).square().sum() / (rows - rows.mean(0)).square().sum()
    assert float(error) < 0.15
    assert sae.config.activation == {"topk": "topk", "batchtopk": "jumprelu"}[method]
    if method == "batchtopk":
        assert sae.weights.threshold is not None
        assert sae.weights.threshold.unique().numel() == 1


def loss_of(trainer: SaeTrainer, weights: Parameters, x: Tensor, dead: Tensor) -> Tensor:
    """The loss with dense products that autograd differentiates; shares no product with the trainer."""
    settings = trainer.settings
    centred = x - weights.decoder_bias
    pre = centred @ weights.encoder.T + weights.encoder_bias
    if settings.method == "topk":
        kept = pre >= pre.topk(settings.k, dim=1).values[:, -1:]
    else:
        kept = pre >= pre.flatten().topk(settings.k * len(x)).values[-1]
    latents = pre.relu() * kept
    unit = 1 / (len(x) * trainer.variance)
    loss = x.new_zeros(())
    for end in [*settings.prefixes, settings.num_atoms]:
        made = latents[:, :end] @ weights.decoder[:end] + weights.decoder_bias
        loss = loss + unit * (made - x).square().sum()
    if len(dead):
        residual = (x - made).detach()
        of_dead = pre[:, dead]
        most = min(len(dead), x.shape[1] // 2)
        of_dead = of_dead.relu() * (of_dead >= of_dead.topk(most, dim=1).values[:, -1:])
        loss = loss + settings.auxiliary_weight * unit * (of_dead @ weights.decoder[dead] - residual).square().sum()
    return loss


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prefixes", [(), (5,), (3, 9, 20)])
@pytest.mark.parametrize("with_dead", [False, True])
def test_gradients_are_those_of_autograd(method: str, prefixes: tuple[int, ...], with_dead: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(300, 6, generator=generator, dtype=torch.float64)
    settings = SaeSettings(24, 4, 10, method, prefixes, auxiliary_weight=0.3)
    trainer = SaeTrainer.begin(settings, rows, dtype=torch.float64)
    for tensor in trainer.parameters:
        tensor += 0.1 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    if with_dead:
        trainer.seen = 10_000
        trainer.last_use[8:] = 10_000
    x = constant_norm(rows[:40])
    leaves = Parameters(*(tensor.clone().requires_grad_() for tensor in trainer.parameters))
    found, figures = trainer.gradients(x)
    dead = trainer.dead
    assert (len(dead) > 0) == with_dead
    assert figures.dead == len(dead)
    loss = loss_of(trainer, leaves, x, dead)
    loss.backward()
    assert figures.loss == pytest.approx(float(loss.detach()))
    for name in Parameters._fields:
        torch.testing.assert_close(getattr(found, name), getattr(leaves, name).grad, rtol=1e-9, atol=1e-12)


def some_settings(method: str, **changes: Any) -> SaeSettings:
    return SaeSettings(**{"num_atoms": 40, "k": 4, "updates": 40, "method": method, "prefixes": (8,), **changes})


def bytes_of(sae: Any) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in sae.weights if tensor is not None]


@pytest.mark.parametrize("method", METHODS)
def test_resumed_equals_never_stopped_and_seeds_decide(
    method: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sae_training, "DEAD_ROWS_PER_LATENT", 5)  # some latents die
    rows, _ = planted()
    settings, batches = some_settings(method), batches_of(rows)
    whole = train_sae(SaeTrainer.begin(settings, rows), batches(0))
    stopped = SaeTrainer.begin(settings, rows)
    stream = batches(0)
    for _ in range(17):
        stopped.update(next(stream))
    torch.save(stopped.state(), tmp_path / "state.pt")
    for _ in range(3):  # lost
        stopped.update(next(stream))
    resumed = SaeTrainer.resume(settings, torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.updates == 17
    assert bytes_of(train_sae(resumed, batches(17))) == bytes_of(whole)
    other = train_sae(SaeTrainer.begin(some_settings(method, seed=2), rows), batches(0))
    assert bytes_of(other) != bytes_of(whole)


def test_state_that_does_not_fit_is_refused() -> None:
    rows, _ = planted()
    settings = some_settings("topk")
    trainer = SaeTrainer.begin(settings, rows)
    trainer.update(rows[:50])
    state = trainer.state()
    for change in ({"seen": None}, {"last_use": torch.zeros(3)}, {"encoder.exp_avg": torch.zeros(3)}):
        changed = {name: value for name, value in {**state, **change}.items() if value is not None}
        with pytest.raises(ValueError, match=r"does not fit|another shape"):
            SaeTrainer.resume(settings, changed)


@pytest.mark.parametrize(("method", "prefixes"), [("topk", ()), ("batchtopk", (12, 24))])
def test_latents_without_a_gradient_rest(method: str, prefixes: tuple[int, ...]) -> None:
    """The momentum of Adam does not move them: a rare latent would drift until no row activates it."""
    rows, _ = planted()
    trainer = SaeTrainer.begin(SaeSettings(64, 4, 600, method, prefixes, weight_decay=0.0), rows)
    batches, rested = batches_of(rows, 8)(0), 0
    for _ in range(5):
        batch, before = next(batches), trainer.state()
        before = {name: tensor.clone() for name, tensor in before.items()}
        trainer.update(batch)
        resting = trainer.parameters.encoder_bias.grad == 0
        rested += int(resting.sum())
        for name in ("encoder", "encoder_bias", "decoder"):
            for part in (part for part in (name, f"{name}.exp_avg", f"{name}.exp_avg_sq") if part in before):
                after = trainer.state()[part]
                assert torch.allclose(after[resting], before[part][resting], rtol=1e-6)  # the decoder has unit rows
                assert not torch.equal(after[~resting], before[part][~resting])
    assert rested


@pytest.mark.slow
def test_auxiliary_loss_revives_dead_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the latents begin where no row activates them enough."""
    monkeypatch.setattr(sae_training, "DEAD_ROWS_PER_LATENT", 20)
    rows, _ = planted()
    unused = {}
    for weight in (0.0, 1 / 32):
        settings = SaeSettings(64, 4, 600, rate=1e-2, auxiliary_weight=weight, weight_decay=0.0)
        trainer = SaeTrainer.begin(settings, rows)
        trainer.parameters.encoder[:16] *= 0.02
        sae = train_sae(trainer, batches_of(rows)(0))
        unused[weight] = int((~(sae.latents(rows) > 0).any(0)[:16]).sum())
    assert unused[0.0] >= 8
    assert unused[1 / 32] <= unused[0.0] // 3


def test_products_in_bfloat16_only_choose() -> None:
    rows, _ = planted()
    trainers = [SaeTrainer.begin(some_settings("topk"), rows, fast_bf16=fast) for fast in (False, True)]
    for tensors in zip(*(trainer.parameters for trainer in trainers), strict=True):
        tensors[1].copy_(tensors[0])
    explained = [trainer.update(rows[:500]).explained_variance for trainer in trainers]
    assert explained[1] == pytest.approx(explained[0], abs=0.01)


def test_rate_warms_up_and_falls() -> None:
    rates = [schedule(done, 100) for done in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(rates[4:81]) == {1.0}
    assert rates[-1] == pytest.approx(0.05)
    assert 0 < schedule(0, 1) <= 1


def test_rows_of_zeros_stay_zero() -> None:
    rows = constant_norm(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    torch.testing.assert_close(rows, torch.tensor([[0.0, 0.0], [0.6, 0.8]]) * 2**0.5)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"method": "relu"}, "method must be one of topk, batchtopk, got 'relu'"),
        ({"k": 0}, "k must be from 1 to the number of atoms, 40, got 0"),
        ({"k": 41}, "got 41"),
        ({"updates": 0}, "updates must be positive, got 0"),
        ({"rate": float("nan")}, "rate must be a finite number"),
        ({"prefixes": (8, 8)}, "ascending, at least 1 and below the number of atoms, 40, got 8 8"),
        ({"prefixes": (0,)}, "got 0"),
        ({"prefixes": (40,)}, "got 40"),
    ],
)
def test_settings_out_of_range(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        some_settings(**{"method": "topk", **change})


def test_too_few_rows_for_the_atoms() -> None:
    with pytest.raises(ValueError, match="num_atoms is 40 but hidden has only"):
        SaeTrainer.begin(some_settings("topk"), torch.randn(20, 6))
