from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from fairseq import tasks
from fairseq.logging import metrics

from mlsm_plugin.core.losses.latent_semantic import latent_semantic_kl, strongest_atom_cross_entropy
from mlsm_plugin.fairseq_plugin.criterions.latent_semantic_kl import LatentSemanticKlCriterion
from tests.tiny_run import each_batch, seeded_model, training_config

LOSSES = [latent_semantic_kl, strongest_atom_cross_entropy]


@pytest.fixture(scope="module")
def run(pipeline):
    """Config, task and a batch of real data."""
    cfg = training_config(pipeline.data_bin)
    task = tasks.setup_task(cfg.task)
    return SimpleNamespace(data=pipeline.data_bin, cfg=cfg, task=task, batch=next(each_batch(cfg, task=task)))


@pytest.fixture
def model(run):
    return seeded_model(run.cfg, run.task).eval()


def make_criterion(run, **options):
    cfg = copy.deepcopy(run.cfg.criterion)
    for name, value in options.items():
        cfg[name] = value
    return LatentSemanticKlCriterion(cfg, run.task)


def real(run):
    return run.batch


def to_edit(run):
    """A copy of the batch that says nothing of how many tokens are masked or coded."""
    batch = copy.deepcopy(run.batch)
    del batch["masked_sizes"], batch["codes"]["number"]
    return batch


def partly_coded(run):
    """A copy of the batch of which every fifth masked token has no code."""
    batch = copy.deepcopy(run.batch)
    batch["codes"]["atoms"][::5] = -1
    batch["codes"]["weights"][::5] = 0
    batch["codes"]["number"] = int((batch["codes"]["weights"] > 0).any(dim=1).sum())
    return batch


def all_masked_without_codes(run):
    batch = to_edit(run)
    batch["codes"]["atoms"].fill_(-1)
    batch["codes"]["weights"].zero_()
    return batch


def nothing_masked(run):
    batch = to_edit(run)
    batch["target"].fill_(run.task.source_dictionary.pad())
    batch["codes"] = {"atoms": torch.zeros(0, 0, dtype=torch.int32), "weights": torch.zeros(0, 0).half()}
    return batch


def all_padding(run):
    batch = nothing_masked(run)
    batch["net_input"]["src_tokens"].fill_(run.task.source_dictionary.pad())
    return batch


def one_token(run):
    batch = to_edit(run)
    batch["net_input"] = {"src_tokens": torch.tensor([[run.task.mask_idx]]), "src_lengths": torch.tensor([1])}
    batch["target"] = torch.tensor([[7]])
    batch["codes"] = {
        "atoms": torch.tensor([[3, 5]], dtype=torch.int32),
        "weights": torch.tensor([[0.25, 0.75]]).half(),
    }
    return batch


def no_columns(run):
    batch = all_masked_without_codes(run)
    batch["codes"] = {key: value[:, :0] for key, value in batch["codes"].items()}
    return batch


WEIGHTS = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, 2.0)]


@pytest.mark.parametrize("target", ["distribution", "argmax"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("edit", [real, all_masked_without_codes, nothing_masked, all_padding, one_token, no_columns])
def test_every_parameter_gets_a_finite_gradient_on_every_batch(run, model, edit, weights, target):
    batch = edit(run)
    criterion = make_criterion(run, latent_weight=weights[0], mlm_weight=weights[1], latent_target=target)
    loss, sample_size, _ = criterion(model, batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert loss.dtype == torch.float32
    masked = batch["target"].ne(run.task.source_dictionary.pad()).sum()
    coded = batch["codes"]["weights"].gt(0).any(dim=1).sum()
    assert sample_size == (coded if weights[0] > 0 else masked)
    assert (loss.item() == 0) == (int(sample_size) == 0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    bias, projection = model.encoder.lm_head.bias.grad, model.encoder.lm_head.atom_projection.weight.grad
    assert bool(bias.any()) == (weights[1] > 0 and sample_size > 0)
    assert bool(projection.any()) == (weights[0] > 0 and sample_size > 0)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_loss_is_the_weighted_sum_of_its_parts(run, model, weights):
    batch = partly_coded(run)
    masked = batch["target"].ne(run.task.source_dictionary.pad())
    logits, extra = model(batch["net_input"]["src_tokens"], project_atoms=True)
    kl = latent_semantic_kl(extra["atom_logits"][masked], batch["codes"]["atoms"], batch["codes"]["weights"])
    kl = kl.sum().item()
    mlm = torch.nn.functional.cross_entropy(logits[masked], batch["target"][masked], reduction="sum").item()
    num_masked, num_coded = masked.sum().item(), batch["codes"]["weights"].gt(0).any(dim=1).sum().item()
    assert 0 < num_coded < num_masked

    loss, sample_size, log = make_criterion(run, latent_weight=weights[0], mlm_weight=weights[1])(model, batch)
    ratio = num_coded / num_masked if weights[0] > 0 else 1
    assert loss.item() == pytest.approx(weights[0] * kl + weights[1] * mlm * ratio, rel=1e-5)
    assert log["loss"].item() == loss.item()
    assert log["sample_size"] == sample_size
    assert (log["ntokens"], log["nsentences"], log["num_masked"]) == (batch["ntokens"], batch["nsentences"], num_masked)
    assert ("latent_loss" in log, "mlm_loss" in log) == (weights[0] > 0, weights[1] > 0)
    if weights[0] > 0:
        assert log["latent_loss"].item() == pytest.approx(kl, rel=1e-5)
        assert log["num_coded"] == num_coded
        assert log["num_nonzeros"] == batch["codes"]["weights"].gt(0).sum()
    if weights[1] > 0:
        assert log["mlm_loss"].item() == pytest.approx(mlm, rel=1e-5)
    assert not any(torch.is_tensor(value) and value.requires_grad for value in log.values())


def test_without_the_latent_loss_it_is_masked_lm(run, model):
    other = copy.deepcopy(model)
    stock_cfg = training_config(run.data, task="masked_lm", criterion="masked_lm")
    stock = tasks.setup_task(stock_cfg.task).build_criterion(stock_cfg.criterion)
    ours = make_criterion(run, latent_weight=0.0, mlm_weight=1.0)
    results = []
    for criterion, a_model in [(stock, other), (ours, model)]:
        torch.manual_seed(3)
        loss, sample_size, log = criterion(a_model.train(), run.batch)
        loss.backward()
        assert float(log["loss"]) == loss.item()
        assert int(log["sample_size"]) == int(sample_size)
        results.append((loss.item(), int(sample_size)))
    assert results[1] == (pytest.approx(results[0][0], rel=1e-6), results[0][1])  # the sums go in another order
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in other.named_parameters():
        if "atom_projection" not in name:
            assert torch.equal(gradients[name], parameter.grad), name


@pytest.mark.parametrize("weights", [(-1.0, 0.0), (1.0, -0.5), (0.0, 0.0)])
def test_weights_must_not_be_negative_nor_both_zero(run, weights):
    with pytest.raises(ValueError, match="--latent-weight and --mlm-weight must not be negative, and not") as error:
        make_criterion(run, latent_weight=weights[0], mlm_weight=weights[1])
    assert str(error.value).endswith(f"got {weights[0]} and {weights[1]}")


def test_the_latent_weight_falls_to_zero_and_stays_whole_in_validation(run, model):
    falling = make_criterion(run, latent_weight=0.8, mlm_weight=1.0, latent_updates=200)
    weights = []
    for update in (0, 50, 150, 200, 1000):
        falling.set_num_updates(update)
        weights.append(falling.train().latent_weight)
        assert falling.eval().latent_weight == 0.8
        _, _, log = falling.train()(model, run.batch)
        assert ("latent_loss" in log) == (update < 200)
    assert weights == pytest.approx([0.8, 0.6, 0.2, 0, 0])
    constant = make_criterion(run, latent_weight=0.8, mlm_weight=1.0)
    constant.set_num_updates(1000)
    assert constant.train().latent_weight == 0.8


@pytest.mark.parametrize(("updates", "mlm_weight"), [(0, 1.0), (-5, 1.0), (100, 0.0)])
def test_updates_of_the_latent_loss_are_positive_and_masked_lm_follows_them(run, updates, mlm_weight):
    with pytest.raises(ValueError, match="--latent-updates must be at least 1, and needs --mlm-weight above 0"):
        make_criterion(run, latent_weight=1.0, mlm_weight=mlm_weight, latent_updates=updates)


def reduced(logs):
    with metrics.aggregate() as aggregate:
        LatentSemanticKlCriterion.reduce_metrics(logs)
    return dict(aggregate.get_smoothed_values())


BIT = math.log(2)
FIRST = {
    "ntokens": 100, "nsentences": 2, "num_masked": torch.tensor(10), "num_coded": torch.tensor(8),
    "num_nonzeros": torch.tensor(32), "latent_loss": torch.tensor(16 * BIT), "mlm_loss": torch.tensor(30 * BIT),
    "loss": torch.tensor(40 * BIT), "sample_size": torch.tensor(8),
}  # fmt: skip
SECOND = {
    "ntokens": 50, "nsentences": 1, "num_masked": torch.tensor(6), "num_coded": torch.tensor(2),
    "num_nonzeros": torch.tensor(3), "latent_loss": torch.tensor(14 * BIT), "mlm_loss": torch.tensor(18 * BIT),
    "loss": torch.tensor(20 * BIT), "sample_size": torch.tensor(2),
}  # fmt: skip


def test_metrics_are_means_over_the_tokens_of_all_workers():
    expected = {
        "loss": 6.0, "kl": 3.0, "latent_ppl": 8.0, "nonzeros": 3.5, "coded": 0.625, "mlm_loss": 3.0, "mlm_ppl": 8.0,
    }  # fmt: skip
    together = reduced([FIRST, SECOND])
    assert set(together) == set(expected)
    for name, value in expected.items():
        assert float(together[name]) == pytest.approx(value, abs=1e-3), name
    summed = {key: FIRST[key] + SECOND[key] for key in FIRST}
    assert LatentSemanticKlCriterion.logging_outputs_can_be_summed()
    assert reduced([SECOND, FIRST]) == reduced([summed]) == together


def test_metrics_name_only_the_losses_that_were_computed():
    latent_only = {key: value for key, value in FIRST.items() if key != "mlm_loss"}
    assert set(reduced([latent_only])) == {"loss", "kl", "latent_ppl", "nonzeros", "coded"}
    mlm_only = {key: FIRST[key] for key in ("num_masked", "mlm_loss", "loss", "sample_size")}
    assert set(reduced([mlm_only])) == {"loss", "mlm_loss", "mlm_ppl"}


def test_metrics_of_an_update_without_codes_or_masks_are_zeros():
    empty = {key: torch.zeros_like(value) if torch.is_tensor(value) else value for key, value in FIRST.items()}
    assert {name: float(value) for name, value in reduced([empty]).items()} == {
        "loss": 0, "kl": 0, "latent_ppl": 1, "nonzeros": 0, "coded": 0, "mlm_loss": 0, "mlm_ppl": 1,
    }  # fmt: skip
    with metrics.aggregate() as aggregate:
        LatentSemanticKlCriterion.reduce_metrics([empty])
        LatentSemanticKlCriterion.reduce_metrics([FIRST])
    assert float(aggregate.get_smoothed_values()["kl"]) == pytest.approx(2.0, abs=1e-3)  # the empty one has no weight


def test_a_model_without_a_latent_head_is_refused_unless_the_loss_is_masked_lm(run):
    small = ("--encoder-layers", 1, "--encoder-embed-dim", 32, "--encoder-ffn-embed-dim", 64)
    cfg = training_config(run.data, *small, "--encoder-attention-heads", 2, arch="roberta_base")
    stock = seeded_model(cfg, run.task).eval()
    with pytest.raises(
        ValueError, match="needs a model with a latent head: pass --arch mlsm_modern_base, mlsm_roberta"
    ):
        make_criterion(run)(stock, run.batch)
    loss, size, _ = make_criterion(run, latent_weight=0, mlm_weight=1)(stock, run.batch)
    assert size == len(run.batch["codes"]["atoms"])
    assert math.isfinite(loss.item())
