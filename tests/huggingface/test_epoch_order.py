"""The order of the samples, and that a resumed training repeats it, with the lowest permitted versions, too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from safetensors.torch import load_file
from torch.utils.data import ConcatDataset, DataLoader, SequentialSampler, Subset
from transformers import AutoModelForMaskedLM, AutoTokenizer, Trainer, TrainerCallback, TrainerState, TrainingArguments

from mlsm_plugin.core.files.hf_files import save_pretrained
from mlsm_plugin.huggingface import (
    MaskedLmCollator,
    MaskedLmModel,
    Masking,
    PretrainingSequences,
    SentenceCollator,
    SentenceVectorModel,
    SentenceVectors,
    epoch_order,
    prepare,
)
from mlsm_plugin.huggingface.epoch_order import EpochOrder, check_resumable, order_by_epoch
from tests.attacks.killed_runs import assert_equal
from tests.conftest import REPOSITORY, made_once
from tests.hub.test_other_versions import install_version
from tests.huggingface.tiny_corpus import make_tokenizer, random_ids, tiny_bert
from tests.project.test_supported_versions import PYPROJECT
from tests.tiny_hf_models import make_model
from tests.tiny_models import TinyData

BATCHES = 6  # of an epoch
LOWEST = {
    requirement.name: min(one.version for one in requirement.specifier if one.operator == ">=")
    for requirement in map(Requirement, PYPROJECT["project"]["optional-dependencies"]["hf"])
    if requirement.specifier
}


class Stopped(TrainerCallback):
    """Stops a training as an interrupt does, before an update."""

    def __init__(self, update: int | None) -> None:
        self.update = update

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.update:
            raise KeyboardInterrupt


def trainer_of(
    folder: Path, wrapped: Any = None, *, stopped: int | None = None, masking: Masking | None = None, **options: Any
) -> tuple[Trainer, Any]:
    """A Trainer that is evaluated on what it is trained on, and the rows of its batches with their epochs."""
    options = {"per_device_train_batch_size": 4, **options}
    arguments = TrainingArguments(
        str(folder), learning_rate=1e-2, save_steps=2, eval_strategy="steps",
        report_to=[], use_cpu=True, disable_tqdm=True, **{"max_steps": 15, "seed": 3, "eval_steps": 2, **options},
    )  # fmt: skip
    rows: list[list[tuple[int, int]]] = []

    class Collator(MaskedLmCollator):
        def __call__(self, sequences: Any) -> Any:
            rows.append([(one.epoch, one.index) for one in sequences])
            return super().__call__(sequences)

    data: Any = PretrainingSequences(random_ids(4 * BATCHES - 2))
    data = wrapped(data) if wrapped else data
    collator = Collator(make_tokenizer(), masking or Masking(mask_prob=0.4))
    model = MaskedLmModel.of(tiny_bert(hidden_dropout_prob=0.1))
    trainer = prepare(Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collator))
    trainer.add_callback(Stopped(stopped))
    rows.clear()
    return trainer, rows


FALLING = Masking(mask_prob=0.8, mask_prob_end=0.2)


def test_the_share_of_masks_falls_with_the_updates_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    whole, _ = trainer_of(tmp_path / "whole", masking=FALLING)
    shares: list[float] = []
    masked = whole.data_collator._masked

    def spy(sequences: Any, rngs: Any) -> Any:
        shares.extend(FALLING.share_at(sequence.progress) for sequence in sequences)
        return masked(sequences, rngs)

    whole.data_collator._masked = spy
    whole.train()
    training = [share for share in shares if share > 0.2]  # an evaluation has the last share
    assert training == sorted(training, reverse=True)
    assert training[0] == 0.8
    assert training[-1] < 0.3
    assert len(training) >= 15 * 4 - 2 * 2  # two epochs end in a batch of 2
    stopped, _ = trainer_of(tmp_path / "stopped", masking=FALLING, stopped=9)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed, _ = trainer_of(tmp_path / "stopped", masking=FALLING)
    resumed.train(resume_from_checkpoint=True)
    for name, values in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_masks_fall_to_their_last_share_where_the_last_update_of_an_epoch_is_small(
    tmp_path: Path, accumulate: int
) -> None:
    options = {"per_device_train_batch_size": 14, "gradient_accumulation_steps": accumulate, "max_steps": 6}
    trainer, _ = trainer_of(tmp_path, masking=FALLING, eval_steps=100, **options)
    progress: list[float] = []
    masked = trainer.data_collator._masked

    def spy(sequences: Any, rngs: Any) -> Any:
        progress.extend(sequence.progress for sequence in sequences)
        return masked(sequences, rngs)

    trainer.data_collator._masked = spy
    trainer.train()
    samples = (4 * BATCHES - 2) * (3 if accumulate == 1 else 6)  # epochs of 2 updates, or of 1
    assert progress[:samples] == [place / samples for place in range(samples)]
    assert set(progress[samples:]) == {1.0}  # the evaluation at the end


@pytest.mark.parametrize("wrapped", [lambda data: Subset(data, range(6)), lambda data: ConcatDataset([data, data])])
def test_falling_masks_need_the_sequences_themselves(tmp_path: Path, wrapped: Any) -> None:
    with pytest.raises(ValueError, match="with mask_prob_end, train_dataset must be PretrainingSequences itself"):
        trainer_of(tmp_path, wrapped, masking=FALLING)


def test_the_order_depends_on_the_seed_and_the_epoch_only() -> None:
    epoch = 0
    orders = {(seed, again): EpochOrder(30, seed=seed, epoch=lambda: epoch) for seed in (1, 5) for again in range(2)}
    torch.manual_seed(9)
    first = {name: list(order) for name, order in orders.items()}
    torch.manual_seed(8)
    assert {name: list(order) for name, order in orders.items()} == first
    assert first[1, 0] == first[1, 1] != first[5, 0]
    assert sorted(first[1, 0]) == list(range(30))
    epoch = 1
    assert {name: list(order) for name, order in orders.items()} != first
    assert len(orders[1, 0]) == 30


@given(
    number=st.integers(0, 700), batch_size=st.integers(1, 20), seed=st.integers(0, 9), longest=st.sampled_from([1, 30])
)
def test_batches_of_similar_lengths_have_every_sample_once(
    number: int, batch_size: int, seed: int, longest: int
) -> None:
    lengths = torch.randint(1, longest + 1, (number,), generator=torch.Generator().manual_seed(seed))
    grouped = EpochOrder(number, seed=seed, epoch=lambda: 2, lengths=lengths, batch_size=batch_size)
    order = list(grouped)
    assert sorted(order) == list(range(number))
    assert list(grouped) == order
    plain = list(EpochOrder(number, seed=seed, epoch=lambda: 2))
    assert padded_length(lengths[order], batch_size) <= padded_length(lengths[plain], batch_size)
    of_group = 50 * batch_size
    for first in range(0, number, of_group):
        assert set(order[first : first + of_group]) == set(plain[first : first + of_group])


def padded_length(lengths: torch.Tensor, batch_size: int) -> int:
    return sum(int(batch.max()) * len(batch) for batch in lengths.split(batch_size) if len(batch))


def test_sentences_are_grouped_by_length(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    ids = [rng.integers(5, 60, length) for length in rng.integers(1, 40, 400)]
    data = SentenceVectors(ids, np.zeros((400, 32), np.float32))
    options = TrainingArguments(str(tmp_path), per_device_train_batch_size=8, report_to=[], use_cpu=True)
    model = SentenceVectorModel.of(tiny_bert(), width=32)
    trainer = prepare(Trainer(model, options, data_collator=SentenceCollator(make_tokenizer()), train_dataset=data))
    spreads = [
        int(batch["attention_mask"].sum(1).max() - batch["attention_mask"].sum(1).min())
        for batch in trainer.get_train_dataloader()
    ]
    assert len(spreads) == 50
    assert max(spreads) <= 4
    record = epoch_order.samples_record(trainer.args, data, model)
    state = TrainerState(epoch=0.5, global_step=25)
    state.stateful_callbacks[epoch_order.SAMPLES] = {**record}
    epoch_order.check_same_samples(state, record, 50)
    earlier = {name: value for name, value in record.items() if name != epoch_order.ORDER}
    state.stateful_callbacks[epoch_order.SAMPLES] = earlier
    with pytest.raises(ValueError, match="the order of the samples was random and is random, in batches of similar"):
        epoch_order.check_same_samples(state, record, 50)


def test_another_order_stays(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path)
    assert isinstance(trainer.get_train_dataloader().batch_sampler.sampler, EpochOrder)
    sequential = DataLoader(range(3))  # type: ignore[arg-type]
    trainer.get_train_dataloader = lambda: sequential  # type: ignore[method-assign]
    order_by_epoch(trainer)
    assert trainer.get_train_dataloader() is sequential
    assert isinstance(sequential.batch_sampler.sampler, SequentialSampler)


@pytest.mark.parametrize("wrapped", [None, lambda data: ConcatDataset([Subset(data, range(len(data)))])])
@pytest.mark.parametrize("stopped", [8, pytest.param(12, marks=pytest.mark.slow)])  # in an epoch, and between two
def test_a_resumed_training_equals_one_that_never_stopped(tmp_path: Path, wrapped: Any, stopped: int) -> None:
    whole, rows = trainer_of(tmp_path / "whole", wrapped)
    whole.train()
    epochs = [epoch for batch in rows for epoch, _ in batch]
    first, _ = trainer_of(tmp_path / "parts", wrapped, stopped=stopped + 1)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second, _ = trainer_of(tmp_path / "parts", wrapped)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / f"checkpoint-{stopped}"))
    assert_equal(dict(second.model.state_dict()), dict(whole.model.state_dict()))
    figures = [[log["eval_mlm_loss"] for log in one.state.log_history if "eval_loss" in log] for one in (whole, second)]
    assert figures[0] == figures[1]
    assert {*epochs} == {0, 1, 2}  # an evaluation of the same sequences does not take the training back to epoch 0


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"per_device_train_batch_size": 8}, "number of samples of an update was 4 and is 8"),
        pytest.param({"seed": 4}, "seed of the order was 3 and is 4", marks=pytest.mark.slow),
        pytest.param({"wrapped": lambda data: Subset(data, range(20))}, "text was", marks=pytest.mark.slow),
    ],
)
def test_a_training_resumes_within_an_epoch_as_it_was_begun(tmp_path: Path, changed: Any, what: str) -> None:
    first, _ = trainer_of(tmp_path, stopped=9)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    checkpoint = tmp_path / "checkpoint-8"
    second, _ = trainer_of(tmp_path, **changed)
    with pytest.raises(ValueError, match=f"the {what}.* now, but the training was stopped within an epoch"):
        second.train(resume_from_checkpoint=str(checkpoint))
    # half the batches of twice the size, and a checkpoint that remembers nothing
    trainer_of(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=9)[0].train(
        resume_from_checkpoint=str(checkpoint)
    )
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    del state["stateful_callbacks"][epoch_order.SAMPLES]
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    second.train(resume_from_checkpoint=str(checkpoint))


def test_masks_of_an_evaluation_are_always_the_same(tmp_path: Path) -> None:
    trainer, rows = trainer_of(tmp_path, dataloader_persistent_workers=False)
    loader = trainer.get_eval_dataloader()
    for _ in range(2):  # accelerate counts the passes, and tells the dataset
        list(loader)
    assert {epoch for batch in rows for epoch, _ in batch} == {0}
    assert trainer.eval_dataset is not trainer.train_dataset


@pytest.mark.parametrize(("version", "exact"), [("4.56.2", False), ("4.57.0", True), ("5.0.0", True)])
def test_smaller_updates_are_not_resumed_by_old_versions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, version: str, exact: bool
) -> None:
    monkeypatch.setattr(epoch_order.transformers, "__version__", version)
    trainer, _ = trainer_of(tmp_path, gradient_accumulation_steps=4)
    check_resumable(trainer.args, trainer.state, batches=8)
    check_resumable(trainer.args, trainer.state, batches=BATCHES)
    assert ["install transformers 4.57 or newer before" in text for text in caplog.messages] == [True] * (not exact)
    trainer.state.global_step = 3
    check_resumable(trainer.args, trainer.state, batches=8)
    if not exact:
        with pytest.raises(ValueError, match=r"an epoch of 6 batches ends with an update of fewer than 4; install"):
            check_resumable(trainer.args, trainer.state, batches=BATCHES)


def lowest_versions(tmp_path_factory: pytest.TempPathFactory, *, all_of_them: bool) -> Path:
    """A folder with the lowest permitted versions of what the Trainer needs, with or without ``transformers``."""
    names = ("accelerate", "safetensors") if all_of_them else ("accelerate",)
    lowest_of_others = tuple(f"{name}=={LOWEST[name]}" for name in names)
    return install_version(LOWEST["transformers"] if all_of_them else None, tmp_path_factory, more=lowest_of_others)


def run(library: Path, *words: object, killed_at: int | None = None) -> None:
    """Train with these versions; with ``killed_at``, until the process dies before this update."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(library), str(REPOSITORY)]), "OMP_NUM_THREADS": "1"}
    if killed_at is not None:
        environment["MLSM_KILLED_AT"] = str(killed_at)
    # ``datasets`` is hidden, as that of this environment needs a newer hub than old versions of transformers
    code = "import runpy, sys; sys.modules['datasets'] = None; "
    code += "runpy.run_module('tests.huggingface.resumed_training', run_name='__main__')"
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=library)
    expected = 0 if killed_at is None else -signal.SIGKILL
    assert done.returncode == expected, done.stderr[-3000:]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("all_of_them", [True, False])
def test_your_own_trainer_resumes_with_the_lowest_versions(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, all_of_them: bool
) -> None:
    lowest = lowest_versions(tmp_path_factory, all_of_them=all_of_them)
    run(lowest, tmp_path / "whole")
    run(lowest, tmp_path / "parts", killed_at=9)
    run(lowest, tmp_path / "parts")
    assert_equal(weights_in(tmp_path / "parts"), weights_in(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "all_of_them"), [("mlsm+mlm", True), ("npm", False)])
def test_adapt_resumes_with_the_lowest_versions(
    tiny: TinyData, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, objective: str, all_of_them: bool
) -> None:
    lowest = lowest_versions(tmp_path_factory, all_of_them=all_of_them)

    def make(root: Path) -> None:
        made = make_model("bert", tiny.text, root / "new", kind=AutoModelForMaskedLM, hidden_dropout_prob=0.1)
        parts = AutoModelForMaskedLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
        save_pretrained(root / "any-version", *parts)

    start = made_once(tmp_path_factory, "start-of-lowest", make) / "any-version"
    words = ("adapt", start, "--text", tiny.text, "--objective", objective, "--max-length", 32, "--batch-size", 2)
    words += ("--updates", 24, "--evaluate-every", 3, "--learning-rate", 0.01, "--bf16", "off", "--cpu")
    words += ("--atoms", 20, "--k", 3, "--tokens", 800) if objective == "mlsm+mlm" else ()
    run(lowest, *words, "--output", tmp_path / "whole")
    run(lowest, *words, "--output", tmp_path / "parts", killed_at=17)
    run(lowest, *words, "--output", tmp_path / "parts")
    assert_equal(weights_in(tmp_path / "parts"), weights_in(tmp_path / "whole"))


def test_the_record_names_the_objective_and_not_the_stock_class(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path)
    record = epoch_order.samples_record(trainer.args, trainer.train_dataset, trainer.model)
    assert (record["objective of the model"], type(trainer.model).__name__) == ("MaskedLmModel", "BertForMaskedLM")
