"""A stock Hugging Face text classifier: made from an encoder, trained in the Trainer, and used for predictions."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import import_transformers, save_pretrained
from mlsm_plugin.core.files.model_folders import new_model_folder
from mlsm_plugin.core.hidden_states.hf_encoder import FLOAT32_ONLY, load_library_model, positions_of, supported_config
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer, load_fast_tokenizer
from mlsm_plugin.evaluation.labelled_texts import LabelledTexts
from mlsm_plugin.evaluation.settings import FinetuneSettings
from mlsm_plugin.huggingface.training import last_checkpoint, resume

if TYPE_CHECKING:
    from transformers import EvalPrediction, PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

CLASSIFIER = "AutoModelForSequenceClassification"
# dropout options in the configurations of all supported encoders, except dropout in feed-forward layers
DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "cls_dropout",
    "pooler_dropout",
    "dropout",
    "attention_dropout",
    "seq_classif_dropout",
    "embedding_dropout",
)
Prediction = tuple[str, float]  # a label and its probability; in regression, the number twice


class TextClassifier:
    """Trains the encoder in a folder as a classifier, and predicts labels with it.

    ValueError if the folder holds no supported encoder, or it overflows in the precision of the settings.

    Args:
        folder: folder of a stock encoder.
        tokenizer: tokenizer of the encoder.
        labels: the classes in the order of the logits; empty for regression.
        settings: how the classifier is trained.
    """

    def __init__(
        self, folder: Path, tokenizer: HuggingFaceTokenizer, labels: Sequence[str], settings: FinetuneSettings
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.labels = tuple(labels)
        self.settings = settings
        self.positions = positions_of(supported_config(folder))

    def config(self) -> "PretrainedConfig":
        """The configuration of the encoder with the labels and the dropout of the classifier."""
        config = supported_config(self.folder)
        if self.settings.bf16 == "on" and config.model_type in FLOAT32_ONLY:
            raise ValueError(f"a model of type {config.model_type} overflows in bfloat16; pass --bf16 off")
        if self.labels:
            config.id2label = dict(enumerate(self.labels))
            config.label2id = {label: number for number, label in enumerate(self.labels)}
        else:
            config.num_labels = 1
        config.problem_type = "single_label_classification" if self.labels else "regression"
        for name in DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, self.settings.dropout)
        return config

    def samples(self, texts: LabelledTexts) -> tuple[list[dict[str, object]], int]:
        """The inputs and the label of each text, and how many texts were cut to the model's positions."""
        inputs, cut = self.tokenizer.inputs_of(texts.texts, self.positions)
        numbers = {label: number for number, label in enumerate(self.labels)}
        targets = [numbers[label] if self.labels else float(label) for label in texts.labels]
        return [{**sample, "labels": target} for sample, target in zip(inputs, targets, strict=True)], cut

    def train(self, train: LabelledTexts, valid: LabelledTexts, checkpoints: Path, seed: int) -> Path:
        """Train, or resume a stopped training; return the checkpoint of the best epoch.

        ValueError if the weights of the encoder cannot be used or a loss is not finite, OSError if a checkpoint cannot
        be written.
        """
        from mlsm_plugin.evaluation.training_epochs import best_checkpoint, is_over

        last = last_checkpoint(checkpoints)
        if last is None or not is_over(Path(last), self.settings):
            resume(self._trainer(train, valid, checkpoints, seed))
        return best_checkpoint(checkpoints, self.settings)

    def write(self, checkpoint: Path, folder: PathLike) -> None:
        """Write the model of a checkpoint, and its tokenizer, which cuts texts to the model's positions."""
        tokenizer = load_fast_tokenizer(self.folder)
        tokenizer.model_max_length = self.positions
        with new_model_folder(folder, overwrite=True) as new:
            save_pretrained(new, load_library_model(checkpoint, kind=CLASSIFIER), tokenizer)

    def predictions(self, folder: Path, texts: LabelledTexts) -> list[Prediction]:
        """The predictions of the classifier in a folder."""
        from transformers import Trainer

        model = load_library_model(folder, kind=CLASSIFIER)
        samples: Any = self.samples(texts)[0]
        arguments = self._arguments(folder, 1, seed=1)
        trainer = Trainer(model, arguments, data_collator=self._collator(), eval_dataset=samples)
        return self._predictions_of(_logits(trainer.predict(samples)))

    def _model(self, seed: int) -> "PreTrainedModel":
        transformers = import_transformers()
        transformers.set_seed(seed)
        if self.settings.from_scratch:
            model: PreTrainedModel = getattr(transformers, CLASSIFIER).from_config(self.config())
        else:
            model = self._with_new_head()
        return model.float()

    def _with_new_head(self) -> "PreTrainedModel":
        """The encoder with a new head, initialized at random as torch initializes a layer of this width.

        The usual 0.02 in configurations suits a width of 768; heads of narrow models would learn slowly with it.
        """
        config = self.config()
        usual = config.initializer_range
        config.initializer_range = (3 * config.hidden_size) ** -0.5
        model: PreTrainedModel = load_library_model(self.folder, config, CLASSIFIER, new_head="", other_head=True)
        model.config.initializer_range = usual
        return model

    def _trainer(self, train: LabelledTexts, valid: LabelledTexts, checkpoints: Path, seed: int) -> "Trainer":
        model = self._model(seed)  # imports transformers without its startup messages
        from transformers import PrinterCallback, Trainer

        from mlsm_plugin.evaluation.training_epochs import Epochs
        from mlsm_plugin.huggingface.epoch_order import order_by_epoch
        from mlsm_plugin.huggingface.trainer_callback import ProgressBars

        train_samples: Any = self.samples(train)[0]
        valid_samples: Any = self.samples(valid)[0]
        trainer = Trainer(
            model,
            self._arguments(checkpoints, len(train), seed),
            data_collator=self._collator(),
            train_dataset=train_samples,
            eval_dataset=valid_samples,
            compute_metrics=self._metrics_on(valid),
            callbacks=[ProgressBars(), Epochs(self.settings)],  # the bar of an evaluation ends before its figures
        )
        trainer.remove_callback(PrinterCallback)
        order_by_epoch(trainer)
        return trainer

    def _arguments(self, checkpoints: Path, samples: int, seed: int) -> "TrainingArguments":
        from transformers import TrainingArguments

        settings = self.settings
        updates = settings.max_epoch * math.ceil(samples / settings.batch_size)
        arguments = TrainingArguments(
            output_dir=str(checkpoints),
            num_train_epochs=settings.max_epoch,
            per_device_train_batch_size=settings.batch_size,
            per_device_eval_batch_size=settings.batch_size,
            learning_rate=settings.lr,
            lr_scheduler_type="linear",
            warmup_steps=updates * 6 // 100,  # the first update has the rate 0
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.98,
            adam_epsilon=1e-6,
            max_grad_norm=1.0,
            bf16=settings.bf16 == "on",
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_strategy="epoch",
            save_total_limit=1,  # besides the best checkpoint
            load_best_model_at_end=True,
            metric_for_best_model=settings.best_in,
            greater_is_better=not settings.regression,
            seed=seed,
            use_cpu=settings.cpu,
            report_to=[],
        )
        check_one_process(arguments)
        arguments.dataloader_pin_memory = arguments.device.type == "cuda"  # elsewhere torch warns of it
        return arguments

    def _collator(self) -> Callable[..., Any]:
        from transformers import DataCollatorWithPadding

        return DataCollatorWithPadding(load_fast_tokenizer(self.folder))

    def _metrics_on(self, texts: LabelledTexts) -> "Callable[[EvalPrediction], dict[str, float]]":
        return lambda output: measured(texts.labels, self._predictions_of(_logits(output)), self.settings)

    def _predictions_of(self, logits: np.ndarray) -> list[Prediction]:
        if not self.labels:
            return [(str(number), number) for number in logits[:, 0].tolist()]
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        best = probabilities.argmax(axis=1)
        return [(self.labels[place], float(row[place])) for place, row in zip(best, probabilities, strict=True)]


def check_one_process(arguments: "TrainingArguments") -> None:
    """Raise ValueError if the Trainer would split the batches over several processes or GPUs."""
    if arguments.world_size > 1:
        raise ValueError("fine-tuning runs in one process; start it without torchrun")
    if arguments.n_gpu > 1:
        raise ValueError(
            f"fine-tuning uses one GPU, and this process sees {arguments.n_gpu}; make only one visible with "
            "CUDA_VISIBLE_DEVICES=0"
        )


def _logits(output: Any) -> np.ndarray:
    """The logits ``(n, labels)`` float32 of an ``EvalPrediction`` or a ``PredictionOutput``."""
    logits = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
    return np.asarray(logits, np.float32)


def measured(labels: Sequence[str], predictions: Sequence[Prediction], settings: FinetuneSettings) -> dict[str, float]:
    """Accuracy, and F1 of the label 1 if the settings ask for it; for regression, both correlations."""
    if settings.regression:
        expected = [float(label) for label in labels]
        numbers = [number for _, number in predictions]
        return {
            "pearson": _correlation(stats.pearsonr, expected, numbers),
            "spearman": _correlation(stats.spearmanr, expected, numbers),
        }
    pairs = [(label, predicted) for label, (predicted, _) in zip(labels, predictions, strict=True)]
    measures = {"accuracy": float(np.mean([label == predicted for label, predicted in pairs]))}
    if settings.metric == "f1":
        positives = sum(pair.count("1") for pair in pairs)
        measures["f1"] = 2 * pairs.count(("1", "1")) / max(1, positives)
    return measures


def _correlation(measure: Callable[..., Any], expected: list[float], predicted: list[float]) -> float:
    """The correlation of two lists by ``measure``; 0 if either list is constant."""
    if len(set(expected)) < 2 or len(set(predicted)) < 2:
        return 0.0
    return float(measure(expected, predicted)[0])
