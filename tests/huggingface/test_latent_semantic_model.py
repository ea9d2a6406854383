"""MLSM in the library's Trainer: saving, accumulation, resuming, evaluation."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments

from mlsm_plugin.core.coding.state_codes import StateCodes
from mlsm_plugin.core.files.hf_files import LATENT_HEAD
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig, SaeWeights, SparseAutoencoder
from mlsm_plugin.huggingface import AuxiliaryTextCollator, LatentSemanticCollator, PretrainingSequences, TokenSequences
from mlsm_plugin.huggingface.collators import IGNORED, Masking
from mlsm_plugin.huggingface.latent_semantic_model import LatentSemanticModel
from mlsm_plugin.huggingface.trainer_callback import prepare
from tests.huggingface.tiny_corpus import ATOMS, make_tokenizer, random_ids, tiny_bert, write_codes

MASKING = Masking(mask_prob=0.4, seed=5)


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> PretrainingSequences:
    sequences = TokenSequences(random_ids(24))
    folder = tmp_path_factory.mktemp("coded") / "codes"
    write_codes(sequences, folder)
    return PretrainingSequences(sequences, folder)


def make_model(**options: Any) -> Any:
    return LatentSemanticModel.of(tiny_bert(), **{"num_atoms": ATOMS, **options})


def trained(folder: Path, data: PretrainingSequences, *, resume: Path | None = None, **options: Any) -> Trainer:
    """A Trainer after 8 updates of 8 sequences: two epochs, and two thirds of a third one."""
    arguments = {
        **{"max_steps": 8, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 7, "save_steps": 4},
        **{"logging_steps": 1, "learning_rate": 1e-2, "report_to": [], "use_cpu": True, "disable_tqdm": True},
        **options,
    }
    trainer = Trainer(
        make_model(),
        TrainingArguments(str(folder), **arguments),
        train_dataset=data,
        eval_dataset=data,
        data_collator=LatentSemanticCollator(make_tokenizer(), MASKING),
    )
    prepare(trainer)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def largest_difference(one: Any, other: Any) -> float:
    states = one.model.state_dict(), other.model.state_dict()
    return max(float((values - states[1][name]).abs().max()) for name, values in states[0].items())


def test_a_saved_model_is_a_stock_one_with_its_head_beside_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model().eval()
    ids = torch.tensor([[2, 9, 4, 3]])
    wanted = model(input_ids=ids).logits
    model.save_pretrained(tmp_path / "saved")
    stock, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert (set(info["missing_keys"]), set(info["unexpected_keys"])) == (set(), set())
    assert stock.config.architectures == ["BertForMaskedLM"]
    assert not isinstance(stock, LatentSemanticModel)
    assert torch.equal(stock.eval()(input_ids=ids).logits, wanted)
    again = LatentSemanticModel.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(values, model.state_dict()[name]) for name, values in again.state_dict().items())
    assert not caplog.messages
    assert LatentSemanticModel.from_pretrained(tmp_path / "saved", num_atoms=5).latent_head.out_features == 5
    assert "atoms, but 5 are needed; a new one is initialized at random" in caplog.text


def test_accumulated_batches_are_one_batch(tmp_path: Path, coded: PretrainingSequences) -> None:
    sgd = {"optim": "sgd", "learning_rate": 0.1}  # unlike Adam, it does not make rounding larger
    once = trained(tmp_path / "once", coded, **sgd)
    often = trained(
        tmp_path / "often",
        coded,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        dataloader_num_workers=1,
        **sgd,
    )
    assert largest_difference(once, often) < 1e-6
    for one, other in zip(once.state.log_history[:8], often.state.log_history[:8], strict=True):
        assert {name: other[name] for name in ("loss", "kl", "mlm_loss")} == pytest.approx(
            {name: one[name] for name in ("loss", "kl", "mlm_loss")}, rel=1e-5
        )
        assert one["loss"] == pytest.approx(one["kl"] + one["mlm_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "save_steps", [pytest.param(2, marks=pytest.mark.slow), 4]
)  # in the first and in the second epoch
def test_a_resumed_run_equals_one_that_never_stopped(
    tmp_path: Path, coded: PretrainingSequences, save_steps: int
) -> None:
    options = {"save_steps": save_steps, "gradient_accumulation_steps": 1}
    whole = trained(tmp_path / "whole", coded, **options)
    resumed = trained(tmp_path / "resumed", coded, resume=tmp_path / "whole" / f"checkpoint-{save_steps}", **options)
    assert largest_difference(whole, resumed) == 0
    # the collected parts begin anew, so that the first log after the stop is of fewer updates at most
    assert resumed.state.log_history[-2]["kl"] == whole.state.log_history[-2]["kl"]


def test_evaluation_gives_means_over_all_tokens(tmp_path: Path, coded: PretrainingSequences) -> None:
    trainer = trained(tmp_path / "run", coded, max_steps=1, save_strategy="no")
    found = trainer.evaluate()
    collator = LatentSemanticCollator(make_tokenizer(), MASKING)
    coded.set_epoch(0)
    batch = collator([coded[index] for index in range(len(coded))])
    model = trainer.model.eval()
    with torch.no_grad():
        masked = batch["labels"] != IGNORED
        hidden = model.bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0][masked]
        transformed = model.cls.predictions.transform(hidden)
        tokens = model.cls.predictions.decoder(transformed).double().log_softmax(dim=1)
        atoms = model.latent_head(transformed).double().log_softmax(dim=1)
    mlm = -tokens.gather(1, batch["labels"][masked][:, None]).mean()
    kl = 0.0
    for row in range(len(atoms)):
        kept = batch["codes"]["atoms"][row] >= 0
        weights = batch["codes"]["weights"][row][kept].double()
        weights = weights / weights.sum()
        kl += float((weights * (weights.log() - atoms[row][batch["codes"]["atoms"][row][kept].long()])).sum())
    assert found["eval_mlm_loss"] == pytest.approx(float(mlm), rel=1e-5)
    assert found["eval_kl"] == pytest.approx(kl / len(atoms), rel=1e-4)


@pytest.mark.slow
def test_bf16_learns_as_float32(tmp_path: Path, coded: PretrainingSequences) -> None:
    exact, rounded = trained(tmp_path / "exact", coded), trained(tmp_path / "rounded", coded, bf16=True)
    losses = [run.state.log_history[-2]["loss"] for run in (exact, rounded)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert all(values.dtype == torch.float32 for values in rounded.model.parameters())


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("kind", ["nothing masked", "no codes", "one token", "all padding"])
def test_every_batch_gives_every_parameter_a_finite_gradient(weights: tuple[float, float], kind: str) -> None:
    model = make_model(latent_weight=weights[0], mlm_weight=weights[1]).train()
    ids = torch.tensor([[9]]) if kind == "one token" else torch.tensor([[2, 9, 4, 3], [2, 8, 3, 0]])
    attention = torch.zeros_like(ids) if kind == "all padding" else (ids != 0).long()
    labels = torch.full_like(ids, IGNORED)
    if kind in ("no codes", "one token"):
        labels[0, -1] = 7
    number = int((labels != IGNORED).sum())
    width = 0 if kind == "no codes" else 2
    codes = {"atoms": torch.full((number, width), -1), "weights": torch.zeros(number, width).half()}
    if kind == "one token":
        codes = {"atoms": torch.tensor([[1, 3]]), "weights": torch.tensor([[0.5, 0.5]]).half()}
    loss = model(input_ids=ids, attention_mask=attention, labels=labels, codes=codes)["loss"]
    loss.backward()
    assert math.isfinite(float(loss))
    for name, values in model.named_parameters():
        assert values.grad is not None, name
        assert bool(values.grad.isfinite().all()), name


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    tiny_bert().save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="has no latent head; pass num_atoms"):
        LatentSemanticModel.from_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="must not be negative, and not both 0"):
        make_model(latent_weight=0, mlm_weight=0)
    with pytest.raises(ValueError, match="latent_target must be one of distribution, argmax"):
        make_model(latent_target="none")
    with pytest.raises(ValueError, match="num_atoms must be at least 1"):
        make_model(num_atoms=0)
    with pytest.raises(ValueError, match="the batch has no codes"):
        make_model()(input_ids=torch.tensor([[2, 9, 3]]), labels=torch.tensor([[IGNORED, 9, IGNORED]]))
    for damage in (b"no weights", None):
        path = tmp_path / "plain" / LATENT_HEAD
        if damage is None:
            save_file({"weight": torch.zeros(3, 4)}, path)
        else:
            path.write_bytes(damage)
        with pytest.raises(ValueError, match=re.escape(LATENT_HEAD)):
            LatentSemanticModel.from_pretrained(tmp_path / "plain")


def coder_of(dim: int, atoms: int, seed: int = 0) -> SaeCoder:
    """A top-k SAE with random weights."""
    directions = torch.randn(atoms, dim, generator=torch.Generator().manual_seed(seed))
    weights = SaeWeights(directions, torch.zeros(atoms), directions, torch.zeros(dim))
    return SaeCoder(SparseAutoencoder(SaeConfig("topk", k=3), weights))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceEncoder:
    folder = tmp_path_factory.mktemp("auxiliary")
    tiny_bert(7, initializer_range=0.3).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return HuggingFaceEncoder(folder, layer=1, device="cpu")


def online_trainer(folder: Path, encoder: HuggingFaceEncoder, collator: Any, *, seed: int = 0) -> Trainer:
    model = make_model()
    model.compute_codes(encoder, coder_of(32, ATOMS, seed))
    arguments = TrainingArguments(str(folder), max_steps=2, save_steps=1, report_to=[], use_cpu=True)
    return prepare(
        Trainer(model, arguments, data_collator=collator, train_dataset=PretrainingSequences(random_ids(24)))
    )


def test_codes_can_be_computed_in_each_batch(tmp_path: Path, encoder: HuggingFaceEncoder) -> None:
    collator = AuxiliaryTextCollator(make_tokenizer(), MASKING)
    batch = collator([PretrainingSequences(random_ids(6))[row] for row in range(6)])
    model = make_model().eval()
    model.compute_codes(encoder, coder_of(32, ATOMS), latent_top=2)
    masked = batch["labels"] != IGNORED
    original = torch.where(masked, batch["labels"], batch["input_ids"])
    codes = StateCodes(coder_of(32, ATOMS), 2).of_states(encoder.hidden_states(original)[masked])
    assert codes["atoms"].shape == (int(masked.sum()), 2)
    stored = {name: values for name, values in batch.items() if name != "auxiliary"}
    expected = make_model().eval()(**stored, codes=codes)["loss"]
    assert float(model(**batch)["loss"]) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.slow
def test_a_training_with_computed_codes_resumes_with_the_same_dictionary_only(
    tmp_path: Path, encoder: HuggingFaceEncoder
) -> None:
    collator = AuxiliaryTextCollator(make_tokenizer(), MASKING)
    online_trainer(tmp_path, encoder, collator).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    online_trainer(tmp_path, encoder, collator).train(resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match=r"the dictionary was .* and is .* now; resume the training as it was begun"):
        online_trainer(tmp_path, encoder, collator, seed=1).train(resume_from_checkpoint=checkpoint)


def test_computed_codes_need_a_coder_and_batches_that_fit(tmp_path: Path, encoder: HuggingFaceEncoder) -> None:
    with pytest.raises(ValueError, match="the dictionary is 8 wide, the hidden states of the auxiliary model are 32"):
        make_model().compute_codes(encoder, coder_of(8, ATOMS))
    with pytest.raises(ValueError, match=f"the latent head has {ATOMS} atoms, the coder 9"):
        make_model().compute_codes(encoder, coder_of(32, 9))
    with pytest.raises(ValueError, match="LatentSemanticCollator has no text for the auxiliary model; use Auxiliary"):
        online_trainer(tmp_path, encoder, LatentSemanticCollator(make_tokenizer(), MASKING))
