"""Continue the pre-training of a Hugging Face model on a text, from raw text to adapted model; it can be resumed."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch

from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.coding.settings import STORE
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.atomic_files import read_json, write_json
from mlsm_plugin.core.files.hf_files import hf_folder
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.model_folders import new_model_folder
from mlsm_plugin.core.files.output_lock import only_writer
from mlsm_plugin.core.files.process_rank import process_rank
from mlsm_plugin.core.files.sentence_modules import copy_modules, modules_of, write_modules
from mlsm_plugin.core.files.settings import identity
from mlsm_plugin.core.files.step_record import RECORD, Step, StepRecord
from mlsm_plugin.core.hidden_states.encoder import check_layer
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceSource, positions_of
from mlsm_plugin.core.machine.devices import Device
from mlsm_plugin.core.machine.memory import keep_freed_memory
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.text_files import read_text
from mlsm_plugin.huggingface.adaptation_folder import (
    CHECKPOINTS,
    DICTIONARY,
    HELD_OUT_TEXT,
    MODEL,
    QUALITY,
    TEXT_PARTS,
    check_output,
)
from mlsm_plugin.huggingface.adaptation_settings import VECTORS, WITH_AUXILIARY, Adaptation
from mlsm_plugin.huggingface.adaptation_setup import AdaptationSetup
from mlsm_plugin.huggingface.adaptation_text import AdaptationText
from mlsm_plugin.huggingface.adaptation_trainer import TrainerParts
from mlsm_plugin.huggingface.coding import encode_sequences, learn_from_sequences
from mlsm_plugin.huggingface.epoch_order import samples_of_update
from mlsm_plugin.huggingface.held_out_text import held_out_lines, last_lines, write_held_out
from mlsm_plugin.huggingface.low_rank import merge_low_rank
from mlsm_plugin.huggingface.model_card import CARD, WITH_KEPT_VECTORS, CardFacts, add_quality, write_card
from mlsm_plugin.huggingface.saved_folder import check_saved, save_pretrained
from mlsm_plugin.huggingface.training import train

MOST_PASSES = 5  # over the text, to learn a dictionary
QUALITY_STEP = "quality"
COMPARED_LINES = 200  # lines of the text whose ids are compared when the model is written


class Quality(Protocol):
    """A measurement of the models before and after; ``evaluation.held_out_quality`` implements it."""

    def identity(self) -> JsonObject:
        """The values on which the figures depend, besides the files."""

    def files(self) -> list[Path]:
        """The files on which the figures depend, besides the held-out text."""

    def check(self) -> None:
        """Raise ValueError if the files cannot be used."""

    def measure(self, models: Mapping[str, Path], text: Path, *, loss_fell: bool, device: Device = None) -> JsonObject:
        """The figures on a text by model name, and ``notes``."""


def adapt(settings: Adaptation, quality: Quality | None = None) -> dict[str, JsonObject]:
    """Tokenize the text, learn and code if the objective needs it, train, and write ``model`` in the output folder.

    Each step resumes after a stop, and is skipped if it is complete. If its settings or inputs have changed, it runs
    again, as do all later steps; their earlier output is renamed. Under torchrun, all processes code and train.

    Args:
        settings: the model, the text and how it is trained.
        quality: measures the models before and after; None: only the losses.

    Returns:
        the figures on the held-out text ``before`` and ``after``, in nats, and the figures of ``quality``; only in
        the first process.

    Raises:
        ValueError: model, tokenizer, text and settings do not fit together.
        OSError: a file cannot be read or written.
    """
    keep_freed_memory()
    process = process_rank(None, None, os.environ)
    output = Path(settings.output)
    record = StepRecord(output / RECORD, process)
    check_output(output)
    if quality is not None:
        quality.check()
    chain = _Chain(AdaptationSetup(settings, process, record))
    with only_writer(output) if process.rank == 0 else nullcontext():
        _run(chain, quality)
    figures = {"before": record.figures_of("before"), "after": record.figures_of("training")}
    if quality is not None and (output / QUALITY).exists():
        figures["quality"] = read_json(output / QUALITY)
    return figures


def _run(chain: "_Chain", quality: Quality | None) -> None:
    """Run the incomplete steps; after a complete training, only the measurement."""
    setup = chain.setup
    process = setup.process
    record = setup.record
    steps = chain.steps()
    measuring = [] if quality is None else [chain.quality_step(quality)]
    is_trained = record.is_complete(steps)
    if is_trained and record.is_complete([*steps, *measuring]):
        return
    if not is_trained and setup.processes != process.world_size:
        raise ValueError(
            f"the number of processes is {setup.processes} in {setup.output} and {process.world_size} now; start "
            f"{setup.processes} (several: with torchrun --nproc-per-node), or choose another --output"
        )
    # the first call connects the processes
    record.first = setup.training.arguments(setup.output / CHECKPOINTS).main_process_first
    if is_trained:
        record.skip(steps)
    else:
        chain.check()
        if process.rank == 0 and setup.keep_weight and setup.settings.keep_vectors is None:
            print(
                f"the vectors of {setup.settings.model} are kept, with a weight of {setup.keep_weight:g}; pass "
                "--keep-vectors 0 to let them change"
            )
        for step in chain.steps():  # again, since the check completes the configuration of a new model
            record.run(step)
    for step in measuring:
        record.run(step)
    if process.rank == 0:
        print(f"\n{record.table()}\n")


class _Chain:
    """The steps of an adaptation."""

    def __init__(self, setup: AdaptationSetup) -> None:
        self.setup = setup
        self.settings = setup.settings
        self.output = setup.output
        self.text = AdaptationText(setup)
        self.parts = TrainerParts(setup, self.text)

    def steps(self) -> list[Step]:
        """The steps up to the trained model, in order; some objectives and options need more of them than others."""
        text = self.text
        learning = self.setup.learning
        steps = []
        if not text.is_plain:
            steps.append(text.documents_step())
        if self.settings.vocab_size is not None:
            steps.append(text.tokenizer_step())
        steps.append(text.text_step())
        if text.is_aligned:
            steps.append(text.alignment_step())
        if self.settings.objective == VECTORS:
            steps.append(text.vectors_step())
        if self.setup.narrows_vectors:
            steps.append(text.directions_step())
        if learning is not None:
            steps.append(self._dictionary_step(learning))
        if learning is not None and self.settings.latent_source == STORE:
            steps.append(self._codes_step(learning))
        training = self.setup.training_identity()
        steps.append(self._before_step(training))
        steps.append(self._training_step(training))
        return steps

    def check(self) -> None:
        """Raise ValueError for problems that would only show up hours later."""
        second_model = self.settings.teacher_model if self.settings.objective == "distill" else self.settings.auxiliary
        if second_model:
            self._check_same_vocabulary(second_model)
        positions: dict[str, int] = {}  # by the model that reads the text
        readers = [] if second_model is None else [second_model]
        if self.settings.student is not None:
            positions["the new model"] = positions_of(self.setup.config)
        if self.settings.student is None or self.settings.objective in WITH_AUXILIARY:
            readers.append(self.settings.model)
        if not self.text.is_aligned:
            for name in readers:
                positions[name] = HuggingFaceSource.usual_tokens_of(name)
        name = min(positions, key=lambda reader: positions[reader])
        if self.setup.length > positions[name]:
            raise ValueError(f"--max-length {self.setup.length} is more than the {positions[name]} positions of {name}")
        if self.settings.objective in WITH_AUXILIARY:
            auxiliary = self.settings.auxiliary_model
            check_layer(self.setup.layer, HuggingFaceSource.layers_of(auxiliary), auxiliary)
        if self.settings.vocab_size is None:  # otherwise the tokenizer does not exist yet
            _ = self.parts.model

    def _check_same_vocabulary(self, second_model: str) -> None:
        if HuggingFaceTokenizer(second_model).vocabulary_fingerprint != self.text.tokenizer.vocabulary_fingerprint:
            role = "teacher" if self.settings.objective == "distill" else "auxiliary model"
            raise ValueError(
                f"the {role} {second_model} has another vocabulary than {self.settings.model}; their tokens must be "
                "the same"
            )

    def _dictionary_step(self, learning: LearningSettings) -> Step:
        """The step that learns the dictionary."""
        values = identity(learning)
        values["auxiliary"] = HuggingFaceSource.fingerprint_of(self.settings.auxiliary_model)
        return Step("dictionary", partial(self._learn, learning), values, [], [self.output / DICTIONARY])

    def _learn(self, learning: LearningSettings) -> None:
        """Learn the dictionary from the training text; a short text gives fewer hidden states than requested."""
        text = self.text.coded_sequences[0]
        enough = max(MOST_PASSES * text.num_tokens, learning.atoms)
        learn_from_sequences(
            text,
            self.settings.auxiliary_model,
            output=self.output / DICTIONARY,
            settings=replace(learning, tokens=min(learning.tokens, enough)),
            encoder=self.parts.encoder,
        )

    def _codes_step(self, learning: LearningSettings) -> Step:
        """The step that codes both parts of the text."""
        return Step(
            "codes",
            partial(self._code, learning),
            {"latent_top": self.settings.latent_top},
            [],
            [self.output / f"{name}.codes" for name in TEXT_PARTS],
            by_all=True,
            evaluated=self.text.evaluated_files,
            of_evaluation=[self.output / f"{TEXT_PARTS[1]}.codes"],
        )

    def _code(self, learning: LearningSettings) -> None:
        """Code both parts of the text; each process codes its share."""
        process = self.setup.process
        encode = partial(
            encode_sequences,
            model=self.settings.auxiliary_model,
            coder=load_coder(self.output / DICTIONARY),
            settings=CodingSettings.with_run(learning, learning.layer, latent_top=self.settings.latent_top),
            process=process,
            encoder=self.parts.encoder,
        )
        for name, sequences in zip(TEXT_PARTS, self.text.coded_sequences, strict=True):
            output = self.output / f"{name}.codes"
            encode(sequences, output=output)
            if process.world_size > 1:
                torch.distributed.barrier()
                encode(sequences, output=output)  # now all shards exist
                torch.distributed.barrier()

    def _before_step(self, training: JsonObject) -> Step:
        """The step that evaluates the model as it is."""
        evaluated = self.text.evaluated_files
        return Step("before", self._evaluate, training, [], [], by_all=True, evaluated=evaluated)

    def _evaluate(self) -> dict[str, float]:
        """The losses before the training; ValueError if they are not finite."""
        figures = self.parts.trainer.evaluate()
        return _losses({name.removeprefix("eval_"): value for name, value in figures.items()})

    def _training_step(self, training: JsonObject) -> Step:
        """The step that trains, and writes the model."""
        model = self.output / MODEL
        return Step(
            "training",
            self._train,
            training,
            [],
            [model, self.output / CHECKPOINTS],
            checked=[model],
            by_all=True,
            editable=[model / CARD],
            evaluated=self.text.evaluated_files,
            of_evaluation=[model],  # its card; the last checkpoint has its weights
        )

    def _train(self) -> dict[str, float]:
        """Train, and write the model; return the losses after the training."""
        after = _losses(train(self.parts.trainer))
        if self.setup.process.rank == 0:
            self.setup.record.invalidate(QUALITY_STEP)  # it adds its figures to the card, which is written anew
            with new_model_folder(self.output / MODEL, overwrite=True) as folder:
                self._write_model(folder, after)
        return after

    def _write_model(self, folder: Path, after: dict[str, float]) -> None:
        """Write the trained model with its tokenizer, its card and the files of sentence-transformers."""
        trainer = self.parts.trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        if self.setup.training.lora is not None:
            merge_low_rank(model)
        save_pretrained(folder, model, self.parts.fast_tokenizer)
        self._write_modules(folder)
        self._write_card(folder, after)
        lines = (line for line in read_text(self.text.files) if line)
        check_saved(folder, model, self.text.tokenizer, islice(lines, COMPARED_LINES))

    def _write_modules(self, folder: Path) -> None:
        """Write the files of sentence-transformers, if MODEL has them or they were requested."""
        source = self.setup.source
        config = self.setup.config
        modules = modules_of(source)
        if modules and self.settings.student is None:
            copy_modules(source, folder)
        elif modules or self.settings.sentence_transformer:
            normalized = any(module["type"].endswith("Normalize") for module in modules)
            width = int(config.hidden_size)
            is_new = self.settings.student is not None
            longest = self.setup.length if is_new else positions_of(config)  # longer texts were never read
            write_modules(folder, width=width, max_length=longest, normalized=normalized)

    def _write_card(self, folder: Path, after: dict[str, float]) -> None:
        trainer = self.parts.trainer
        facts = CardFacts(
            model=self.settings.model,
            student=self.settings.student,
            objective=WITH_KEPT_VECTORS if self.setup.keep_weight else self.settings.objective,
            updates=trainer.state.global_step,
            texts=self.text.files,
            before=self.setup.record.figures_of("before"),
            after=after,
            settings=self.setup.settings_of_card(samples_of_update(trainer.args)),
            fills_masks=self.parts.model.has_trained_head,
        )
        write_card(folder, facts)

    def quality_step(self, quality: Quality) -> Step:
        """The step after the training, which compares the model with the original."""
        values = {"reference": HuggingFaceSource.fingerprint_of(self._reference), **quality.identity()}
        results = [self.output / QUALITY, self.output / HELD_OUT_TEXT]
        files = [*quality.files(), *self.text.evaluated_files]
        return Step(QUALITY_STEP, partial(self._measure, quality), values, files, results)

    @property
    def _reference(self) -> str:
        """The model to compare with: MODEL, or the teacher of a new model, since random weights know nothing."""
        if self.settings.student is not None and self.settings.teacher is not None:
            return self.settings.teacher
        return self.settings.model

    def _measure(self, quality: Quality) -> None:
        """Measure both models on the held-out text, and write the figures to a file and to the model card."""
        text = self.output / HELD_OUT_TEXT
        if self.settings.valid_texts:
            lines = last_lines(self.settings.valid_texts)
        else:
            apart = self.settings.objective == VECTORS
            lines = held_out_lines(self.text.files, self.text.sequences[1], self.text.tokenizer, apart=apart)
        write_held_out(lines, text)
        is_new = self.settings.student is not None
        names = ("teacher", "student") if is_new else ("before", "after")
        folders = (hf_folder(self._reference), self.output / MODEL)
        record = self.setup.record
        loss_fell = not is_new and _losses_fell(record.figures_of("before"), record.figures_of("training"))
        models = dict(zip(names, folders, strict=True))
        figures = quality.measure(models, text, loss_fell=loss_fell, device=self.setup.device)
        add_quality(self.output / MODEL, figures)
        write_json(self.output / QUALITY, figures)


def _losses_fell(before: dict[str, float], after: dict[str, float]) -> bool:
    """Whether all losses are lower after the training; accuracies are not losses."""
    losses = [name for name in after if name in before and not name.endswith("accuracy")]
    return all(after[name] < before[name] for name in losses)


def _losses(figures: dict[str, float]) -> dict[str, float]:
    """Only the means over tokens; the Trainer's own loss depends on its batches."""
    return {name: value for name, value in figures.items() if name.endswith(("_loss", "kl", "accuracy"))}
