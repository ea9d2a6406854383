"""Losses and gradients of fairseq's criterions and of the models for the Trainer, for the same weights and batches."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import tasks

from mlsm_plugin import hub
from mlsm_plugin.core.losses.token_contrastive import sample_pairs
from mlsm_plugin.fairseq_plugin.compat import model_parts
from mlsm_plugin.hub.hf_export import export
from mlsm_plugin.hub.stock_models import deberta_weights, modernbert_weights, roberta_weights, stock_model
from mlsm_plugin.huggingface import (
    HuggingFaceEncoder,
    LatentSemanticModel,
    SentenceVectorModel,
    SpanContrastiveModel,
    StateRegressionModel,
    TokenContrastiveModel,
)
from mlsm_plugin.huggingface.collators import IGNORED
from tests.conftest import Pipeline
from tests.tiny_models import save_model
from tests.tiny_run import each_batch, seeded_model, training_config

SLOW = pytest.mark.slow
FEWEST = 15  # gradients to compare, so that no name is missed
ARCHS = [pytest.param("mlsm_roberta_tiny", marks=SLOW), "mlsm_modern_tiny", "mlsm_deberta_tiny"]
FURTHER = [(1.0, 0.0), (0.5, 2.0), (0.0, 1.0)]
FLAGS = ("--dropout", 0, "--attention-dropout", 0, "--max-positions", 64, "--tokens-per-sample", 48)


class Both:
    """A model of fairseq with its criterion, and the stock model with the same weights."""

    def __init__(self, data_bin: Path, arch: str, *flags: object, **options: Any) -> None:
        self.cfg = training_config(data_bin, *FLAGS, *flags, arch=arch, **options)
        self.task = tasks.setup_task(self.cfg.task)
        self.model = seeded_model(self.cfg, self.task).eval()
        self.criterion = self.task.build_criterion(self.cfg.criterion).eval()
        self.arch = arch
        self.pad = self.task.source_dictionary.pad()
        self.ids = torch.arange(len(self.task.source_dictionary))
        self.stock = stock_model(SimpleNamespace(model=self.model, task=self.task), self.ids)

    def batch(self) -> dict[str, Any]:
        found: dict[str, Any] = next(each_batch(self.cfg, task=self.task))
        return found

    def latent(self, **weights: float) -> Any:
        """The stock model with the latent head of the other."""
        projection = model_parts.lm_head(self.model).atom_projection
        model = LatentSemanticModel.of(self.stock, num_atoms=projection.out_features, **weights)
        model.latent_head.load_state_dict(projection.state_dict())
        return model

    def gradients(self) -> dict[str, torch.Tensor]:
        """Those of the fairseq model, by the names of the library."""
        own = {}
        for name, values in self.model.named_parameters(remove_duplicate=False):
            own[name] = torch.zeros_like(values) if values.grad is None else values.grad
        if self.arch.startswith("mlsm_roberta"):
            found = roberta_weights(own, self.ids, self.pad)
        else:
            found = (modernbert_weights if "modern" in self.arch else deberta_weights)(own, self.ids)
        head = "encoder.lm_head.atom_projection."
        return found | {f"latent_head.{name[len(head) :]}": own[name] for name in own if name.startswith(head)}

    def compare(self, model: Any, batch: dict[str, Any], sample: dict[str, Any]) -> int:
        """Loss within 1e-6, and gradients within 1e-5 of their norms, or of a thousandth of the largest norm.

        Returns:
            how many gradients were compared.
        """
        loss, sample_size, _ = self.criterion(self.model, sample)
        (loss / sample_size).backward()
        output = model.eval()(**batch)
        output["loss"].backward()
        assert float(output["loss"].detach()) == pytest.approx(float((loss / sample_size).detach()), rel=1e-6)
        expected = self.gradients()
        largest = max(float(values.norm()) for values in expected.values())
        # fairseq's RoBERTa has no token types, whose embedding is the same for all tokens
        named = [one for one in model.named_parameters() if "token_type" not in one[0]]
        compared = [(name, values) for name, values in named if name in expected]
        for name, values in compared:
            found = torch.zeros_like(values) if values.grad is None else values.grad
            difference, norm = float((found - expected[name]).norm()), float(expected[name].norm())
            assert difference <= 1e-5 * max(norm, 1e-3 * largest), name
        return len(compared)


def for_trainer(sample: dict[str, Any], pad: int) -> dict[str, torch.Tensor]:
    tokens, target = sample["net_input"]["src_tokens"], sample["target"]
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != pad).long(),
        "labels": torch.where(target == pad, IGNORED, target),
    }


def codes_in(sample: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: sample["codes"][name] for name in ("atoms", "weights")}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("weights", [(1.0, 1.0), *(pytest.param(one, marks=SLOW) for one in FURTHER)])
def test_mlsm(pipeline: Pipeline, arch: str, weights: tuple[float, float]) -> None:
    both = Both(pipeline.data_bin, arch, "--latent-weight", weights[0], "--mlm-weight", weights[1])
    sample = both.batch()
    model = both.latent(latent_weight=weights[0], mlm_weight=weights[1])
    assert both.compare(model, {**for_trainer(sample, both.pad), "codes": codes_in(sample)}, sample) >= FEWEST


@pytest.mark.slow
def test_mlsm_where_tokens_lack_a_code(pipeline: Pipeline) -> None:
    both = Both(pipeline.data_bin, "mlsm_modern_tiny", "--mlm-weight", 1)
    sample = copy.deepcopy(both.batch())
    del sample["codes"]["number"]  # they are other codes now
    sample["codes"]["weights"][::3] = 0
    assert both.compare(both.latent(), {**for_trainer(sample, both.pad), "codes": codes_in(sample)}, sample) >= FEWEST


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("anchors", ["all", pytest.param("masked", marks=SLOW)])
def test_taco(pipeline: Pipeline, arch: str, anchors: str) -> None:
    flags = ("--contrastive-weight", 0.7, "--contrastive-anchors", anchors)
    both = Both(pipeline.data_bin, arch, *flags, task="taco", criterion="token_contrastive")
    sample = both.batch()
    valid, masked = both.criterion._valid_and_masked(sample)
    generator = both.criterion._generator(sample, torch.device("cpu"))
    positive, negative = sample_pairs(valid, window=5, num_negatives=50, generator=generator)
    pairs = {"anchors": valid & masked if anchors == "masked" else valid, "positive": positive, "negative": negative}
    model = TokenContrastiveModel.of(both.stock, contrastive_weight=0.7)
    assert both.compare(model, {**for_trainer(sample, both.pad), "pairs": pairs}, sample) >= FEWEST


@pytest.mark.parametrize("arch", ARCHS)
def test_regression(pipeline: Pipeline, tmp_path: Path, arch: str) -> None:
    """The auxiliary model of fairseq's way, exported, is that of the other."""
    export(hub.from_pretrained(pipeline.auxiliary.parent, pipeline.auxiliary.name), tmp_path / "auxiliary", ["a line"])
    flags = ("--auxiliary-checkpoint", pipeline.auxiliary, "--auxiliary-layer", 1, "--regression-weight", 0.7)
    both = Both(pipeline.data_bin, arch, *flags, task="state_regression", criterion="state_regression")
    both.task.auxiliary._fp16 = False
    both.task.auxiliary._encoder = None
    sample = both.task._with_states(both.batch())
    both.criterion.standardize([sample["states"]])
    encoder = HuggingFaceEncoder(tmp_path / "auxiliary", layer=1, device="cpu")
    model = StateRegressionModel.of(both.stock, auxiliary=encoder, regression_weight=0.7)
    model.regression.load_state_dict(both.criterion.regression.state_dict())
    batch = for_trainer(sample, both.pad)
    masked = batch["labels"] != IGNORED
    ids = torch.where(masked, batch["labels"], batch["input_ids"])
    batch["auxiliary"] = {"ids": ids, "places": masked.flatten().nonzero().squeeze(1)}
    assert both.compare(model, batch, sample) >= FEWEST


@pytest.mark.parametrize("arch", ARCHS)
def test_sentence_vectors(pipeline: Pipeline, arch: str) -> None:
    flags = ("--auxiliary-checkpoint", pipeline.auxiliary, "--sample-break-mode", "eos")
    both = Both(pipeline.data_bin, arch, *flags, task="sentence_vectors", criterion="sentence_vectors")
    sample = both.task.prepare_batch(both.batch(), both.criterion, 0)
    tokens = sample["net_input"]["src_tokens"]
    batch = {
        "input_ids": tokens,
        "attention_mask": (tokens != both.pad).long(),
        "vectors": sample["vectors"],
        "labels": torch.zeros(len(tokens), 1, dtype=torch.int64),
    }
    assert both.compare(SentenceVectorModel.of(both.stock, width=32), batch, sample) >= FEWEST


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("similarity", ["inner", pytest.param("l2", marks=SLOW)])
def test_npm(pipeline: Pipeline, arch: str, similarity: str) -> None:
    options = {"task": "nonparametric_masked_lm", "criterion": "span_contrastive"}
    both = Both(pipeline.data_bin, arch, "--group-size", 4, "--similarity", similarity, **options)
    both.task.load_dataset("train")
    dataset = both.task.dataset("train")
    sample = dataset.collater([dataset[0], dataset[1]])
    assert len(sample["spans"]["length"]) > 4
    batch = {
        "input_ids": sample["net_input"]["src_tokens"],
        "context_ids": sample["context"]["src_tokens"],
        "spans": sample["spans"],
        "special": torch.tensor([both.pad, 0, 2, both.task.mask_idx, *both.task.span_masks]),
        "labels": torch.ones_like(sample["spans"]["length"])[None],
    }
    assert both.compare(SpanContrastiveModel.of(both.stock, similarity=similarity), batch, sample) >= FEWEST


@pytest.mark.slow
def test_an_exported_checkpoint_gives_the_same_losses(pipeline: Pipeline, tmp_path: Path) -> None:
    both = Both(pipeline.data_bin, "mlsm_modern_tiny", "--mlm-weight", 1)
    save_model(both.cfg, both.model, tmp_path / "model", pipeline.data_bin)
    lines = pipeline.valid_text.read_text(encoding="utf-8").splitlines()[:3]
    export(hub.from_pretrained(tmp_path / "model"), tmp_path / "exported", lines)
    sample = both.batch()
    model = LatentSemanticModel.from_pretrained(tmp_path / "exported")
    assert both.compare(model, {**for_trainer(sample, both.pad), "codes": codes_in(sample)}, sample) >= FEWEST
