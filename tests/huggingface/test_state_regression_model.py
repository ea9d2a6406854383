"""Masked LM with regression of an auxiliary model's hidden states in the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments

from mlsm_plugin.huggingface import (
    AuxiliaryTextCollator,
    HuggingFaceEncoder,
    MaskedLmCollator,
    MaskedLmModel,
    Masking,
    PretrainingSequences,
    TokenSequences,
    prepare,
)
from mlsm_plugin.huggingface.aligned_sequences import AlignedSequences
from mlsm_plugin.huggingface.state_regression_model import StateRegressionModel
from tests.huggingface.tiny_corpus import make_tokenizer, random_ids, tiny_bert

LAYER = 1


@pytest.fixture(scope="module")
def auxiliary(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceEncoder:
    """The first layer of a model on disk."""
    folder = tmp_path_factory.mktemp("auxiliary")
    tiny_bert(7, initializer_range=0.3).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return HuggingFaceEncoder(folder, layer=LAYER, device="cpu")


def batch_of(number: int = 6, **options: Any) -> dict[str, Any]:
    dataset = PretrainingSequences(random_ids(number), **options)
    return AuxiliaryTextCollator(make_tokenizer(), Masking(mask_prob=0.4))([dataset[row] for row in range(number)])


def model_of(auxiliary: HuggingFaceEncoder, **options: Any) -> StateRegressionModel:
    torch.manual_seed(3)
    return StateRegressionModel.of(tiny_bert(1, initializer_range=0.2), auxiliary=auxiliary, **options)


def aligned_text(folder: Path) -> tuple[TokenSequences, AlignedSequences]:
    """Sequences, and others, with known places: token ``i`` belongs to the last but ``i`` of the others, or to none."""
    ids = random_ids(6)
    others = random_ids(6, seed=5, longest=9)
    places = [np.maximum(len(other) - np.arange(len(row)), 0) for row, other in zip(ids, others, strict=True)]
    sequences = TokenSequences.write(folder / "tokens", iter(ids))
    pair = (TokenSequences.write(folder / name, iter(rows)) for name, rows in (("others", others), ("places", places)))
    return sequences, AlignedSequences(*pair)


def test_the_states_are_those_of_the_masked_tokens_in_the_unmasked_text(auxiliary: HuggingFaceEncoder) -> None:
    batch = batch_of()
    masked = batch["labels"] >= 0
    original = torch.where(masked, batch["labels"], batch["input_ids"])
    stock = AutoModelForMaskedLM.from_pretrained(auxiliary._model.config._name_or_path)
    mask = batch["attention_mask"]
    expected = stock(original, attention_mask=mask, output_hidden_states=True).hidden_states[LAYER][masked]
    states = model_of(auxiliary).auxiliary_states.of_places(**batch["auxiliary"])
    torch.testing.assert_close(states, expected.detach(), rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_sum_of_both_means(auxiliary: HuggingFaceEncoder) -> None:
    batch = batch_of()
    model = model_of(auxiliary, regression_weight=0.5).eval()
    model.standardize([batch])
    output = model(**batch)
    figures = model.means_of(output["parts"].sum(0))
    masked = batch["labels"] >= 0
    stock = tiny_bert(1, initializer_range=0.2).eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    mlm = torch.nn.functional.cross_entropy(stock(**inputs).logits[masked], batch["labels"][masked])
    transformed = stock.cls.predictions.transform(stock.bert(**inputs)[0][masked])
    layer = model.regression
    targets = (model.auxiliary_states.of_places(**batch["auxiliary"]) - layer.mean) / layer.deviation
    error = (layer.projection(transformed) - targets).square().mean()
    assert figures["mlm_loss"] == pytest.approx(float(mlm), rel=1e-4)
    assert figures["state_loss"] == pytest.approx(float(error), rel=1e-4)
    assert float(output["loss"]) == pytest.approx(float(mlm + 0.5 * error), rel=1e-4)
    assert figures["masked_share"] == pytest.approx(float(masked.sum() / batch["content"].sum()))


def test_tokens_of_another_vocabulary_take_the_states_at_their_places(tmp_path: Path, auxiliary: Any) -> None:
    sequences, aligned = aligned_text(tmp_path)
    dataset = PretrainingSequences(sequences, aligned=aligned)
    collator = AuxiliaryTextCollator(make_tokenizer(), Masking(mask_prob=0.9))
    batch = collator([dataset[row] for row in (4, 0, 2)])
    states = model_of(auxiliary).auxiliary_states.of_places(**batch["auxiliary"])
    expected = []
    for row, index in enumerate((4, 0, 2)):
        hidden = auxiliary.hidden_states(torch.from_numpy(aligned.sequences[index])[None])[0]
        for place in np.flatnonzero(batch["labels"][row].numpy() >= 0):
            assert aligned.places[index][place] > 0
            expected.append(hidden[aligned.places[index][place] - 1])
    assert len(expected) > 10
    torch.testing.assert_close(states, torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_a_batch_with_nothing_masked_has_gradients_of_zero(auxiliary: HuggingFaceEncoder) -> None:
    dataset = PretrainingSequences(random_ids(3))
    batch = AuxiliaryTextCollator(make_tokenizer(), Masking(mask_prob=1e-9))([dataset[row] for row in range(3)])
    model = model_of(auxiliary).train()
    loss = model(**batch)["loss"]
    loss.backward()
    assert float(loss) == 0
    assert model.regression.projection.weight.grad is not None
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters() if weight.grad is not None)


def test_weights_in_bfloat16_are_trained(auxiliary: HuggingFaceEncoder) -> None:
    model = StateRegressionModel.of(tiny_bert(1).bfloat16(), auxiliary=auxiliary)
    loss = model.train()(**batch_of())["loss"]
    loss.backward()
    assert float(loss.detach()) > 0
    assert bool(model.regression.projection.weight.grad.isfinite().all())


def test_another_objective_removes_the_layer(tmp_path: Path, auxiliary: HuggingFaceEncoder) -> None:
    model = MaskedLmModel.of(model_of(auxiliary))
    assert not [name for name in model.state_dict() if name.startswith("regression.")]
    again = StateRegressionModel.of(StateRegressionModel.of(model, auxiliary=auxiliary), auxiliary=auxiliary)
    assert not again.regression.is_standardized


def trained(folder: Path, auxiliary: HuggingFaceEncoder, updates: int, *, resume: bool = False) -> Trainer:
    """A training of four updates that stops after some of them."""
    arguments = TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        dataloader_num_workers=0,
    )
    dataset = PretrainingSequences(random_ids(24))
    collator = AuxiliaryTextCollator(make_tokenizer(), Masking(mask_prob=0.4))
    trainer = prepare(Trainer(model_of(auxiliary), arguments, data_collator=collator, train_dataset=dataset))
    if updates < 4:
        trainer.callback_handler.add_callback(StopAfter(updates))
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    return trainer


@pytest.mark.slow
def test_a_training_learns_resumes_and_leaves_a_stock_model(tmp_path: Path, auxiliary: HuggingFaceEncoder) -> None:
    whole = trained(tmp_path / "whole", auxiliary, 4)
    trained(tmp_path / "stopped", auxiliary, 2)
    resumed = trained(tmp_path / "stopped", auxiliary, 4, resume=True)
    for (name, values), other in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(values, other), name
    assert not torch.equal(whole.model.regression.mean, torch.zeros(32))
    assert {"state_loss", "mlm_loss", "masked_share"} <= whole.state.log_history[0].keys()
    whole.model.save_pretrained(tmp_path / "model")
    stock, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    for name, values in stock.state_dict().items():
        assert torch.equal(values, whole.model.state_dict()[name])


@pytest.mark.slow
def test_a_training_resumes_with_the_same_auxiliary_model_and_layer_only(
    tmp_path: Path, auxiliary: HuggingFaceEncoder
) -> None:
    trained(tmp_path / "run", auxiliary, 2)
    last_layer = HuggingFaceEncoder(auxiliary.folder, layer=2, device="cpu")
    with pytest.raises(ValueError, match="the layer of the auxiliary model was 1 and is 2 now; resume the training as"):
        trained(tmp_path / "run", last_layer, 4, resume=True)
    tiny_bert(8).save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    other = HuggingFaceEncoder(tmp_path / "other", layer=LAYER, device="cpu")
    with pytest.raises(ValueError, match=r"the auxiliary model was \w+ and is \w+ now"):
        trained(tmp_path / "run", other, 4, resume=True)


def test_an_evaluation_of_a_new_layer_is_a_warning(
    tmp_path: Path, auxiliary: HuggingFaceEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(auxiliary)

    def evaluated() -> None:
        arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
        collator = AuxiliaryTextCollator(make_tokenizer())
        dataset = PretrainingSequences(random_ids(8))
        prepare(Trainer(model, arguments, data_collator=collator, eval_dataset=dataset)).evaluate()

    evaluated()
    assert caplog.text.count("the layer that predicts hidden states is new, and without train_dataset") == 1
    model.standardize([batch_of()])
    evaluated()
    assert caplog.text.count("without train_dataset") == 1


class StopAfter:
    """Ends a training as a stop does, without changing its length."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def __getattr__(self, name: str) -> Any:
        return lambda args, state, control, **_: self.end(state, control) if name == "on_step_end" else control

    def end(self, state: Any, control: Any) -> Any:
        control.should_training_stop = state.global_step >= self.updates
        return control


def prepared(auxiliary: HuggingFaceEncoder, dataset: Any, collator: Any) -> Trainer:
    arguments = TrainingArguments("unused", max_steps=1, report_to=[], use_cpu=True)
    return prepare(Trainer(model_of(auxiliary), arguments, data_collator=collator, train_dataset=dataset))


def test_parts_that_do_not_fit_are_errors(tmp_path: Path, auxiliary: HuggingFaceEncoder) -> None:
    tokenizer = make_tokenizer()
    text = PretrainingSequences(random_ids(8))
    with pytest.raises(ValueError, match="MaskedLmCollator has no text for the auxiliary model; use Auxil"):
        prepared(auxiliary, text, MaskedLmCollator(tokenizer))
    other = TokenSequences.write(tmp_path / "tokens", iter(random_ids(8)), about={"tokenizer": "0" * 64})
    places = (np.ones_like(row) for row in random_ids(8))
    aligned = AlignedSequences(other, TokenSequences.write(tmp_path / "places", places))
    wrong = PretrainingSequences(random_ids(8), aligned=aligned)
    with pytest.raises(ValueError, match=r"auxiliary model's sequences of train_dataset.*align them"):
        prepared(auxiliary, wrong, AuxiliaryTextCollator(tokenizer))
    with pytest.raises(ValueError, match="regression_weight must be positive and finite, got 0"):
        model_of(auxiliary, regression_weight=0)
    with pytest.raises(ValueError, match="regression_weight must be positive and finite, got inf"):
        model_of(auxiliary, regression_weight=float("inf"))
    with pytest.raises(
        ValueError, match=r"the auxiliary model is a BertForMaskedLM; pass HuggingFaceEncoder\(FOLDER, layer=N\)"
    ):
        model_of(tiny_bert(2))
    with pytest.raises(ValueError, match="make it with AuxiliaryTextCollator"):
        model_of(auxiliary)(**MaskedLmCollator(tokenizer)([text[0]]))
    with pytest.raises(ValueError, match="train_dataset has no length"):
        prepared(auxiliary, iter([text[0]]), AuxiliaryTextCollator(tokenizer))


def test_ids_of_another_vocabulary_need_aligned_text(tmp_path: Path, auxiliary: HuggingFaceEncoder) -> None:
    """Ids in a list have no record of their tokenizer; the collator's is that of the text."""
    other = make_tokenizer()
    other.add_tokens(["new"])
    model = tiny_bert(1, vocab_size=len(other))
    arguments = TrainingArguments("unused", max_steps=1, report_to=[], use_cpu=True)

    def prepare_with(dataset: PretrainingSequences) -> Trainer:
        trainer = Trainer(
            StateRegressionModel.of(model, auxiliary=auxiliary),
            arguments,
            data_collator=AuxiliaryTextCollator(other, Masking(mask_prob=0.4)),
            train_dataset=dataset,
        )
        return prepare(trainer)

    with pytest.raises(ValueError, match="would read train_dataset in the ids of the collator's tokenizer"):
        prepare_with(PretrainingSequences(random_ids(6)))
    sequences, aligned = aligned_text(tmp_path)
    prepare_with(PretrainingSequences(sequences, aligned=aligned))


def test_text_that_is_too_long_for_the_auxiliary_model_is_an_error(tmp_path: Path) -> None:
    tiny_bert(3, max_position_embeddings=8).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    short = HuggingFaceEncoder(tmp_path, layer=LAYER, device="cpu")
    message = r"sequence \d+ of the auxiliary model's sequences of train_dataset has 21 tokens.* at most 8"
    with pytest.raises(ValueError, match=message):
        prepared(short, PretrainingSequences(random_ids(24)), AuxiliaryTextCollator(make_tokenizer()))


def test_aligned_text_of_other_sequences_is_an_error(tmp_path: Path) -> None:
    sequences, aligned = aligned_text(tmp_path)
    with pytest.raises(ValueError, match="the aligned text belongs to other sequences, or to another part of them"):
        PretrainingSequences(sequences.part(1, 4), aligned=aligned)
    with pytest.raises(ValueError, match="the aligned text belongs to other sequences"):
        PretrainingSequences(sequences.part(1, 4), aligned=aligned.part(2, 5))
    collator = AuxiliaryTextCollator(make_tokenizer())
    collator([PretrainingSequences(sequences.part(1, 4), aligned=aligned.part(1, 4))[2]])
    wrong = AlignedSequences(TokenSequences(random_ids(6, seed=6, longest=2)), aligned.places)
    with pytest.raises(ValueError, match="the aligned text of sequence 0 is shorter than its places"):
        collator([PretrainingSequences(sequences, aligned=wrong)[0]])
