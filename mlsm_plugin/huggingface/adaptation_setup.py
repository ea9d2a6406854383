"""The settings of an adaptation, with all defaults filled in for its model, output folder and machine."""

import json
import os
from dataclasses import replace
from pathlib import Path

import torch

from mlsm_plugin.core.coding.coder_learning import LASSO, LearningSettings
from mlsm_plugin.core.coding.settings import STORE
from mlsm_plugin.core.files.atomic_files import read_json
from mlsm_plugin.core.files.hf_files import hf_folder
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.metric_log import MetricLog
from mlsm_plugin.core.files.process_rank import ProcessRank
from mlsm_plugin.core.files.sentence_modules import CLS, MEAN, modules_of, pooling_of
from mlsm_plugin.core.files.settings import identity
from mlsm_plugin.core.files.step_record import StepRecord
from mlsm_plugin.core.hidden_states.hf_encoder import FLOAT32_ONLY, HuggingFaceSource, model_and_tokenizer
from mlsm_plugin.huggingface.adaptation_folder import LOGS
from mlsm_plugin.huggingface.adaptation_settings import (
    COLLATORS,
    LEARNING_RATE_OF_KEPT,
    REGRESSION,
    VECTORS,
    WITH_AUXILIARY,
    WITH_CODES,
    Adaptation,
)
from mlsm_plugin.huggingface.kept_states_model import KEEP_WEIGHT
from mlsm_plugin.huggingface.model_card import name_in_card
from mlsm_plugin.huggingface.pretraining_sequences import SEQUENCES_OF_GROUP
from mlsm_plugin.huggingface.student_model import FROM_TOKENIZER, SIZE, config_folder, student_config
from mlsm_plugin.huggingface.text_sequences import default_max_length
from mlsm_plugin.huggingface.training import LEARNING_RATE, TrainingSettings

LENGTH_OF_STUDENT = 128
VECTORS_IN_WORDS = {MEAN: "mean of the last hidden states", CLS: "last hidden state of its first token"}  # by pooling


class AdaptationSetup:
    """The settings with every default filled in; ValueError if model and settings do not fit together.

    Attributes:
        settings: what the user chose.
        process: this process, of those that run now.
        record: the finished steps in the output folder.
        processes: how many train, on which batches and updates depend: of the recorded training, else of this run.
        output: the output folder.
        source: the folder of MODEL.
        source_tokenizer: the tokenizer of MODEL, with which the auxiliary model reads.
        config: the configuration of the model that is trained.
        training: how it is trained, with the precision and the sizes of batches that are used.
        device: where hidden states, vectors and quality are computed.
        learning: how the dictionary is learned; None: the objective needs none.
        layer: hidden state of the auxiliary model that is coded or predicted.
        pooling: how the hidden states of the model become the vector of a text.
        narrows_vectors: whether the model is narrower than the teacher whose sentence vectors it learns.
        length: longest sequence in ids.
        keep_weight: weight of the loss that keeps the hidden states of unmasked tokens; 0 or None: there is none.
    """

    def __init__(self, settings: Adaptation, process: ProcessRank, record: StepRecord) -> None:
        self.settings = settings
        self.process = process
        self.record = record
        self.processes: int = record.settings_of("training").get("processes", process.world_size)
        self.output = Path(settings.output)
        self.source, self.config, self.source_tokenizer = model_and_tokenizer(settings.model, weights=True)
        if settings.student is not None:
            self.config = student_config(settings.student)
        self.training = settings.training
        if self.config.model_type in FLOAT32_ONLY:
            if self.training.bf16 == "on":
                raise ValueError(f"a model of type {self.config.model_type} overflows in bfloat16; pass --bf16 off")
            self.training = replace(self.training, bf16="off")
        self.device = "cpu" if settings.training.cpu else process.device(torch.cuda.device_count())
        self.pooling = MEAN  # as the folder of a new model says
        if settings.objective == VECTORS and settings.student is None:
            self.pooling = pooling_of(self.source)
        self.narrows_vectors = settings.objective == VECTORS and self._teacher_is_wider()
        self.learning: LearningSettings | None = None
        self.layer = 0
        if settings.objective in WITH_AUXILIARY:
            last = HuggingFaceSource.layers_of(settings.auxiliary_model)
            self.layer = last if settings.regressed_layer is None else settings.regressed_layer
        if settings.objective in WITH_CODES:
            learning = settings.learning or LearningSettings(layer=last, coder="topk")
            self.learning = replace(learning, device=self.device, log=self._log(learning))
            self.layer = learning.layer
        self.length = settings.max_length or default_max_length(self.source)
        if settings.max_length is None and settings.student is not None:
            self.length = min(self.length, LENGTH_OF_STUDENT)
        self.training = self._sized(self.training)
        self.keep_weight = self._keep_weight()
        rate = self.training.learning_rate or (LEARNING_RATE_OF_KEPT if self.keep_weight else LEARNING_RATE)
        self.training = replace(self.training, learning_rate=rate)

    def _teacher_is_wider(self) -> bool:
        """Whether the teacher is wider than the model; ValueError if it is narrower."""
        teacher = str(self.settings.teacher_model)
        width = HuggingFaceSource.width_of(teacher) or 0
        width_of_model: int = self.config.hidden_size
        if width < width_of_model:
            raise ValueError(
                f"the model is {width_of_model} wide, and the vectors of the teacher {teacher} are only {width} wide; "
                "choose a teacher that is at least as wide"
            )
        return width > width_of_model

    def _sized(self, training: TrainingSettings) -> TrainingSettings:
        """The training with batch sizes as chosen, else as recorded, else to suit the length."""
        recorded = self.record.settings_of("training").get("training", {})
        is_earlier = recorded and "attention_dropout" not in recorded  # such a run has the dropout of the model
        if training.attention_dropout is None and not is_earlier:
            training = replace(training, attention_dropout=0.0)
        is_unset = training.batch_size is None and training.accumulate in (None, recorded.get("accumulate"))
        if is_unset and "batch_size" in recorded:
            return replace(training, batch_size=recorded["batch_size"], accumulate=recorded["accumulate"])
        group = SEQUENCES_OF_GROUP if self.settings.objective == "npm" else 1
        training = training.for_length(self.length, group)
        return replace(training, batch_size=training.samples_per_batch, accumulate=training.batches_per_update)

    def _keep_weight(self) -> float | None:
        """The weight as chosen, else to suit the model; None for a training that was begun before there was one."""
        settings = self.settings
        if settings.objective != "mlm" or settings.student is not None:
            return None
        recorded = self.record.settings_of("training")
        is_earlier = (
            recorded.get("objective") == settings.objective
            and recorded.get("model") == HuggingFaceSource.fingerprint_of(settings.model)
            and "keep_weight" not in recorded
        )
        default = KEEP_WEIGHT if modules_of(self.source) and not is_earlier else None
        if settings.keep_vectors is None:
            return default
        if settings.keep_vectors == 0 and default is None:
            return None  # the same training as without the option
        return settings.keep_vectors

    def _log(self, learning: LearningSettings) -> MetricLog:
        """The log for the training of an SAE: the same as the Trainer's, if that is TensorBoard or Weights & Biases."""
        names = self.settings.training.report_to if learning.coder != LASSO else []
        board = str(self.output / LOGS / "dictionary") if "tensorboard" in names else None
        return MetricLog(board, os.environ.get("WANDB_PROJECT", "huggingface") if "wandb" in names else None)

    def updates(self, sequences: int) -> int:
        """The number of updates with so many sequences to train on."""
        epochs = self.settings.epochs
        if epochs is None:
            return self.training.updates
        return self.training.updates_of_epochs(epochs, sequences, self.process.world_size)

    def training_identity(self) -> JsonObject:
        """The settings that decide the trained model, besides the text."""
        settings = self.settings
        training = identity(settings)
        training["model"] = HuggingFaceSource.fingerprint_of(settings.model)
        if settings.latent_source == STORE:  # records of earlier versions lack it
            del training["latent_source"]
        recipe = identity(self.training)
        for name in ("lora", "attention_dropout"):
            if recipe[name] is None:  # records of earlier versions lack it
                del recipe[name]
        training["training"] = recipe
        training["processes"] = self.processes
        if settings.student is not None:
            training["student"] = self._student_identity(settings.student)
        if settings.objective == "distill":
            training["teacher"] = HuggingFaceSource.fingerprint_of(str(settings.teacher_model))
        del training["regressed_layer"]  # records of earlier versions lack it
        del training["keep_vectors"]
        if self.keep_weight is not None:
            training["keep_weight"] = self.keep_weight
        if settings.objective == REGRESSION:
            training["regressed_layer"] = self.layer
            training["auxiliary"] = HuggingFaceSource.fingerprint_of(settings.auxiliary_model)
        return training

    def _student_identity(self, student: str) -> object:
        """What decides the configuration of a new model: its size, or the content of ``config.json``.

        Earlier versions recorded the whole configuration, which also depends on the version of transformers.
        """
        if SIZE.fullmatch(student):
            return student
        content: JsonObject = read_json(config_folder(student) / "config.json")
        content.pop("transformers_version", None)
        recorded = self.record.settings_of("training").get("student")
        whole = json.loads(json.dumps(self.config.to_dict()))
        return recorded if isinstance(recorded, dict) and _same_student(recorded, whole) else content

    def settings_of_card(self, sequences_of_update: int) -> dict[str, object]:
        """The settings that the card of the model shows, by name."""
        masking = self.settings.masking
        shown: dict[str, object] = {"ids of a sequence": f"at most {self.length}"}
        if self.settings.objective in COLLATORS:
            shown["masked"] = masking.mask_prob
            if masking.mask_prob_end is not None:
                shown["masked at the end"] = masking.mask_prob_end
        if self.keep_weight:
            shown["weight of kept hidden states"] = self.keep_weight
        shown["sequences of an update"] = sequences_of_update
        shown["optimizer"] = self.training.optimizer
        shown["learning rate"] = self.training.learning_rate
        if self.training.attention_dropout is not None:
            shown["attention dropout"] = self.training.attention_dropout
        if self.training.lora is not None:
            shown["LoRA"] = f"rank {self.training.lora}, merged"
        if self.settings.objective.startswith("distill"):
            shown["teacher"] = f"`{name_in_card(str(self.settings.teacher_model))}`"
        if self.settings.objective == VECTORS:
            teacher = hf_folder(str(self.settings.teacher_model))
            shown["vector of a text, by the teacher"] = VECTORS_IN_WORDS[pooling_of(teacher)]
            shown["vector of a text, by the model"] = VECTORS_IN_WORDS[self.pooling]
        if self.narrows_vectors:
            shown["directions of the teacher's vectors"] = (
                f"{self.config.hidden_size}, those along which they are longest"
            )
        shown["seed"] = self.training.seed
        if self.learning is not None:
            shown["dictionary"] = f"{self.learning.coder}, {self.learning.atoms} atoms, layer {self.learning.layer}"
        return shown


def _same_student(recorded: JsonObject, whole: JsonObject) -> bool:
    """Whether two whole configurations are of the same new model, whatever its tokenizer and the version."""
    ignored = {*FROM_TOKENIZER, "transformers_version"}
    return all(recorded.get(name) == whole.get(name) for name in (recorded.keys() | whole.keys()) - ignored)
