"""Continue the pre-training of a Hugging Face model on a text: from the text to the adapted model, resumable."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mlsm_plugin.core.coding.coder_learning import LASSO, LearningSettings
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.atomic_files import read_json, sha256_of_files, write_json
from mlsm_plugin.core.files.metric_log import MetricLog
from mlsm_plugin.core.files.model_folders import check_new_model_folder, new_model_folder
from mlsm_plugin.core.files.npy_files import map_npy
from mlsm_plugin.core.files.output_lock import only_writer
from mlsm_plugin.core.files.planned_folder import PlannedFolder
from mlsm_plugin.core.files.process_rank import ProcessRank, process_rank
from mlsm_plugin.core.files.settings import option
from mlsm_plugin.core.hidden_states.hf_encoder import (
    FLOAT32_ONLY,
    HuggingFaceEncoder,
    load_masked_lm,
    model_and_tokenizer,
    positions_of,
)
from mlsm_plugin.core.machine.memory import keep_freed_memory
from mlsm_plugin.core.masking.span_groups import SpanRules
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer, load_fast_tokenizer
from mlsm_plugin.core.text.shared_text import warn_of_shared_files
from mlsm_plugin.core.text.text_files import read_text
from mlsm_plugin.core.text.unknown_tokens import KnownText
from mlsm_plugin.huggingface.coding import encode_sequences, learn_from_sequences
from mlsm_plugin.huggingface.collators import (
    LatentSemanticCollator,
    MaskedLmCollator,
    Masking,
    SpanGroupsCollator,
    TokenContrastiveCollator,
)
from mlsm_plugin.huggingface.distilled_model import DistilledModel, SentenceVectorModel
from mlsm_plugin.huggingface.latent_semantic_model import LatentSemanticModel
from mlsm_plugin.huggingface.pretraining_model import (
    MaskedLmModel,
    PretrainingModel,
    SpanContrastiveModel,
    TokenContrastiveModel,
    head_of,
)
from mlsm_plugin.huggingface.pretraining_sequences import PretrainingSequences, SpanGroups
from mlsm_plugin.huggingface.saved_folder import check_saved, save_pretrained
from mlsm_plugin.huggingface.sentence_vectors import SentenceCollator, SentenceVectors, write_vectors
from mlsm_plugin.huggingface.text_sequences import default_max_length, write_text_sequences
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from mlsm_plugin.huggingface.training import TrainingSettings, train

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, Trainer

VECTORS = "distill-vectors"
MODELS: dict[str, type[PretrainingModel]] = {  # of the objectives
    "mlm": MaskedLmModel,
    "mlsm": LatentSemanticModel,
    "mlsm+mlm": LatentSemanticModel,
    "taco": TokenContrastiveModel,
    "npm": SpanContrastiveModel,
    "distill": DistilledModel,
    VECTORS: SentenceVectorModel,
}
COLLATORS: dict[str, type[MaskedLmCollator]] = {  # of the objectives that take all of Masking
    "mlm": MaskedLmCollator,
    "mlsm": LatentSemanticCollator,
    "mlsm+mlm": LatentSemanticCollator,
    "taco": TokenContrastiveCollator,
    "distill": MaskedLmCollator,
}
WITH_CODES = ("mlsm", "mlsm+mlm")
OBJECTIVES_OF_OPTIONS = {
    "auxiliary": WITH_CODES,
    "latent_top": WITH_CODES,
    "learning": WITH_CODES,
    "temperature": ("distill",),
}
HELD_OUT = 0.02  # share of the sequences, at their end, if there is no text to evaluate on
MOST_HELD_OUT = 2000
COMPARED_LINES = 200  # of the text, whose ids are compared when the model is written
TEXT_PARTS = ("train", "valid")
MODEL = "model"  # the folder of the adapted model in the output
NOT_DECIDING_LEARNING = ("device", "log")  # fields of LearningSettings on which the result does not depend
LOGS = Path("checkpoints", "runs")  # of TensorBoard
Texts = tuple[TokenSequences, TokenSequences]  # to train on, and to evaluate on


@dataclass(frozen=True)
class Adaptation(KnownText):
    """What is adapted to which text, and how; ValueError if a value is out of range.

    Attributes:
        model: folder or hub name of a masked LM with its tokenizer.
        texts: files with a sentence a line and blank lines between documents.
        output: folder for all output.
        learning: how the dictionary is learned, and from which layer.
        masking: how much is masked, and how.
        training: how the model is trained; ``epochs`` replaces its ``updates``.
        epochs: passes over the text; None: train for ``training.updates``.
    """

    model: str
    texts: Sequence[str]
    output: str
    objective: str = option("mlsm+mlm", choices=tuple(MODELS), help="what the model is trained for")
    valid_texts: list[str] = option(
        [],
        flag="--valid",
        metavar="FILE",
        help="text to evaluate on (default: the last 2 %% of the sequences are held out, at most 2,000)",
    )
    auxiliary: str | None = option(
        None, metavar="MODEL", help="model whose hidden states are coded (default: MODEL itself, as it is)"
    )
    teacher: str | None = option(
        None,
        metavar="MODEL",
        help="model with the same vocabulary whose predictions are learned, for distill; for "
        "distill-vectors any encoder of the same width whose sentence vectors are learned",
    )
    temperature: float = option(2.0, above=0, help="of the predictions, for distill")
    learning: LearningSettings | None = None
    latent_top: int | None = option(None, least=1, help="keep the N strongest atoms of each code")
    masking: Masking = field(default_factory=Masking)
    max_length: int | None = option(
        None, least=1, help="ids of the longest sequence (default: what the model can take, at most 512)"
    )
    training: TrainingSettings = field(default_factory=TrainingSettings)
    epochs: float | None = option(None, above=0, help="passes over the text (default: 3)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective.startswith("distill") is (self.teacher is None):
            raise ValueError("--objective distill and distill-vectors need --teacher, and no other objective takes one")
        for name, objectives in OBJECTIVES_OF_OPTIONS.items():
            if self.objective not in objectives and getattr(self, name) != getattr(Adaptation, name):
                raise ValueError(f"{name} is only allowed with --objective {' or '.join(objectives)}")
        masking = self.masking
        if self.objective == "npm" and masking != Masking(mask_prob=masking.mask_prob, seed=masking.seed):
            raise ValueError("of the options for masks, --objective npm only takes --mask-prob")
        if self.objective == VECTORS and masking != Masking(seed=masking.seed):
            raise ValueError(f"--objective {VECTORS} takes no options for masks, since nothing is masked")

    @property
    def coded_model(self) -> str:
        """The model whose hidden states are coded."""
        return self.auxiliary or self.model


def adapt(settings: Adaptation) -> dict[str, dict[str, float]]:
    """Tokenize, learn and code if the objective needs it, train, and write ``model`` in the output folder.

    Every part resumes after a stop, or is skipped if it is complete. Under torchrun all ranks code and train.

    Returns:
        the figures on the held-out text ``before`` and ``after``, in nats.

    Raises:
        ValueError: model, tokenizer, text and settings do not belong together, or the folder was begun with others.
        OSError: a file cannot be read or written.
    """
    keep_freed_memory()
    run = _Run(settings, process_rank(None, None, os.environ))
    folder = PlannedFolder(run.output, run.plan(), advice="Pass these settings again, or choose another --output")
    with only_writer(run.output) if run.process.rank == 0 else nullcontext():
        folder.check()
        if folder.is_sealed:
            figures: dict[str, dict[str, float]] = folder.sealed_content()["figures"]
            return figures
        arguments = run.training.arguments(run.output / "checkpoints")  # lets the ranks find each other
        with arguments.main_process_first(desc="preparing the text"):
            new = folder.recorded_plan is None
            if new:
                check_new_model_folder(run.output / MODEL)
            folder.begin()
            with _forgetting(folder) if new else nullcontext():
                texts = run.prepare(overwrite=new)
        if run.learning is not None:
            run.code(texts, run.learning)
        with _forgetting(folder) if new and run.learning is None else nullcontext():
            trainer = run.trainer(texts)
        figures = run.train(trainer)
        if run.process.rank == 0:
            folder.seal({**folder.plan, "figures": figures})
    return figures


@contextmanager
def _forgetting(folder: PlannedFolder) -> Iterator[None]:
    """Forget the plan of a folder if its text does not fit; otherwise, the corrected command would be rejected."""
    try:
        yield
    except ValueError:
        folder.forget()
        raise


class _Run:
    """The parts of an adaptation, and what they share; ValueError now for problems that would appear hours later."""

    def __init__(self, settings: Adaptation, process: ProcessRank) -> None:
        self.settings = settings
        self.process = process
        self.output = Path(settings.output)
        self.processes = self._processes()
        source, config, tokenizer = model_and_tokenizer(settings.model, weights=True)
        self.training = settings.training
        if config.model_type in FLOAT32_ONLY:
            if self.training.bf16 == "on":
                raise ValueError(f"a model of type {config.model_type} overflows in bfloat16; pass --bf16 off")
            self.training = replace(self.training, bf16="off")
        self.tokenizer = load_fast_tokenizer(source)
        self.kind = MODELS[settings.objective]
        self.collator = self._collator(config)
        second_model = settings.teacher if settings.objective == "distill" else settings.auxiliary
        if second_model:
            self._check_same_vocabulary(second_model, tokenizer)
        self.device = "cpu" if settings.training.cpu else process.device(torch.cuda.device_count())
        self.learning: LearningSettings | None = None
        if settings.objective in WITH_CODES:
            last = HuggingFaceEncoder.layers_of(settings.coded_model)
            learning = settings.learning or LearningSettings(layer=last, coder="topk")
            self.learning = replace(learning, device=self.device, log=self._log(learning))
        self.length = settings.max_length or default_max_length(source)
        limit = min(map(HuggingFaceEncoder.usual_tokens_of, {settings.model, second_model or settings.model}))
        if self.length > limit:
            raise ValueError(f"--max-length {self.length} is more than the {limit} positions of the model")
        # last, as it takes longest; the training opens them again
        stock = load_masked_lm(source, new_head="")
        if self.learning is not None:
            head_of(stock)
        else:
            self._without_codes(stock)

    def _collator(self, config: "PretrainedConfig") -> MaskedLmCollator | SpanGroupsCollator | SentenceCollator:
        masking = self.settings.masking
        if self.settings.objective == "npm":
            rules = SpanRules(mask_prob=masking.mask_prob)
            return SpanGroupsCollator(self.tokenizer, max_length=positions_of(config), rules=rules, seed=masking.seed)
        if self.settings.objective == VECTORS:
            return SentenceCollator(self.tokenizer)
        return COLLATORS[self.settings.objective](self.tokenizer, masking=masking)

    def _check_same_vocabulary(self, second_model: str, tokenizer: HuggingFaceTokenizer) -> None:
        if HuggingFaceTokenizer(second_model).vocabulary_fingerprint != tokenizer.vocabulary_fingerprint:
            role = "teacher" if self.settings.objective == "distill" else "auxiliary model"
            raise ValueError(
                f"the {role} {second_model} has another vocabulary than {self.settings.model}; their tokens must be "
                "the same"
            )

    def _log(self, learning: LearningSettings) -> MetricLog:
        """The log of the training of an SAE: that of the Trainer, if it is TensorBoard or Weights & Biases."""
        names = self.settings.training.report_to if learning.coder != LASSO else []
        board = str(self.output / LOGS / "dictionary") if "tensorboard" in names else None
        return MetricLog(board, os.environ.get("WANDB_PROJECT", "huggingface") if "wandb" in names else None)

    def _processes(self) -> int:
        """The number of processes recorded in the plan, which decides batches and updates.

        ValueError if it is another one now, unless the adaptation is complete.
        """
        folder = PlannedFolder(self.output, {})
        now = self.process.world_size
        recorded: int = (folder.recorded_plan or {}).get("processes", now)
        if recorded != now and not folder.is_sealed:
            raise ValueError(
                f"the number of processes is {recorded} in {self.output} and {now} now; start {recorded} (several: "
                "with torchrun --nproc-per-node), or choose another --output"
            )
        return recorded

    def plan(self) -> dict[str, object]:
        """Everything that decides the result, as values that JSON can hold."""
        settings = self.settings
        plan: dict[str, object] = {
            "objective": settings.objective,
            "model": HuggingFaceEncoder.fingerprint_of(settings.model),
            "texts": sha256_of_files(*settings.texts),
            "max_length": self.length,
            "masking": asdict(settings.masking),
            "training": settings.training.deciding(),
            "epochs": settings.epochs,
            "processes": self.processes,
        }
        if settings.valid_texts:
            plan["valid_texts"] = sha256_of_files(*settings.valid_texts)
        if settings.teacher is not None:
            plan["teacher"] = HuggingFaceEncoder.fingerprint_of(settings.teacher)
            plan["temperature"] = settings.temperature
        if self.learning is not None:
            learning = asdict(self.learning)
            plan["learning"] = {name: value for name, value in learning.items() if name not in NOT_DECIDING_LEARNING}
            plan["auxiliary"] = HuggingFaceEncoder.fingerprint_of(settings.coded_model)
            plan["latent_top"] = settings.latent_top
        return plan

    def _sequences(self, texts: Sequence[str], name: str, overwrite: bool) -> TokenSequences:
        settings = self.settings
        learns_vectors = settings.objective == VECTORS
        sequences, _ = write_text_sequences(
            texts,
            settings.model,
            self.output / name,
            max_length=self.length,
            max_unk_rate=settings.max_unk_rate,
            apart=learns_vectors,
            overwrite=overwrite,
        )
        if learns_vectors:
            write_vectors(
                texts,
                sequences,
                settings.model,
                str(settings.teacher),
                self.output / f"{name}.vectors.npy",
                overwrite=overwrite,
                max_unk_rate=settings.max_unk_rate,
                device=self.device,
                fp16=self.training.in_bf16,
            )
        return sequences

    def prepare(self, *, overwrite: bool) -> Texts:
        """Make the sequences and the dictionary; with ``overwrite``, replace those of another plan."""
        fewest = 2 if self.settings.objective == "npm" else 1  # npm finds spans in other sequences
        text = self._sequences(self.settings.texts, "tokens", overwrite)
        warn_of_shared_files(self.settings.texts, self.settings.valid_texts)
        if self.settings.valid_texts:
            train = text
            valid = self._sequences(self.settings.valid_texts, "valid", overwrite)
        else:
            held_out = min(max(fewest, math.ceil(HELD_OUT * len(text))), MOST_HELD_OUT)
            if len(text) < 2 * held_out + 1:
                raise ValueError(
                    f"the text has only {len(text)} sequences of at most {self.length} ids, too few to hold some out; "
                    "pass more text, or text to evaluate on with --valid"
                )
            train = text.part(0, len(text) - held_out)
            valid = text.part(len(text) - held_out, len(text))
        short = [flag for flag, part in (("--text", train), ("--valid", valid)) if len(part) < fewest]
        if short:
            raise ValueError(
                f"the text of {short[0]} is only 1 sequence, and npm finds spans in other sequences; pass more text, "
                "or a smaller --max-length"
            )
        if self.learning is not None:
            learn_from_sequences(
                train,
                self.settings.coded_model,
                output=self.output / "dictionary",
                settings=self.learning,
                overwrite=overwrite,
            )
        return train, valid

    def code(self, texts: Texts, learning: LearningSettings) -> None:
        """Code both parts of the text; each rank codes its share."""
        coding = CodingSettings(
            layer=learning.layer,
            latent_top=self.settings.latent_top,
            device=learning.device,
            fp16=learning.fp16,
            threads=learning.threads,
            batch_tokens=learning.batch_tokens,
        )
        encode = partial(
            encode_sequences,
            model=self.settings.coded_model,
            coder=load_coder(self.output / "dictionary"),
            settings=coding,
            process=self.process,
        )
        for name, sequences in zip(TEXT_PARTS, texts, strict=True):
            output = self.output / f"{name}.codes"
            encode(sequences, output=output)
            if self.process.world_size > 1:
                torch.distributed.barrier()
                encode(sequences, output=output)  # now all shards exist
                torch.distributed.barrier()

    def trainer(self, texts: Texts) -> "Trainer":
        """The Trainer; ValueError if model, text and batches do not fit."""
        from transformers import PrinterCallback, Trainer

        from mlsm_plugin.huggingface.trainer_callback import ProgressBars, prepare

        model, datasets = self._model_and_datasets(texts)
        training = self.training
        epochs = self.settings.epochs
        if epochs is not None:
            updates = training.updates_of_epochs(epochs, len(datasets[0]), self.process.world_size)
            training = replace(training, updates=updates)
        trainer = prepare(
            Trainer(
                model,
                training.arguments(self.output / "checkpoints"),
                data_collator=self.collator,
                train_dataset=datasets[0],
                eval_dataset=datasets[1],
                optimizers=(training.optimizer_of(model), None),
            )
        )
        trainer.remove_callback(PrinterCallback)  # prints each log where the Trainer's own bar is off
        trainer.add_callback(ProgressBars())
        for callback in trainer.callback_handler.callbacks:
            # TensorBoard's callback would log figures from before the training to the current folder
            if getattr(callback, "logging_dir", "") is None:
                callback.logging_dir = str(self.output / LOGS / "training")
        return trainer

    def train(self, trainer: "Trainer") -> dict[str, dict[str, float]]:
        """Evaluate, train, evaluate again, and write the model; returns the losses before and after."""
        before = self.output / "before.json"
        if not before.exists():
            figures = trainer.evaluate()  # raises ValueError if the loss is not finite
            if self.process.rank == 0:
                write_json(before, {name.removeprefix("eval_"): value for name, value in figures.items()})
        after = train(trainer)
        if self.process.rank == 0:
            with new_model_folder(self.output / MODEL, overwrite=True) as folder:
                model = trainer.accelerator.unwrap_model(trainer.model)
                save_pretrained(folder, model, self.tokenizer)
                lines = (line for line in read_text(self.settings.texts) if line)
                check_saved(folder, model, HuggingFaceTokenizer(self.settings.model), islice(lines, COMPARED_LINES))
        return {"before": _losses(read_json(before)) if self.process.rank == 0 else {}, "after": _losses(after)}

    def _model_and_datasets(self, texts: Texts) -> tuple[Any, list[Any]]:
        """The model, and the datasets to train and to evaluate on."""
        if self.learning is not None:
            stores = [self.output / f"{name}.codes" for name in TEXT_PARTS]
            coded = [PretrainingSequences(text, store) for text, store in zip(texts, stores, strict=True)]
            return self._seeded(lambda: self._with_codes(coded[0].num_atoms)), coded
        model = self._seeded(lambda: self._without_codes(self.kind.opened(self.settings.model)))
        if self.settings.objective == VECTORS:
            return model, list(self._with_vectors(texts))
        if self.settings.objective == "npm":
            return model, [SpanGroups(text) for text in texts]
        return model, [PretrainingSequences(text) for text in texts]

    def _seeded(self, make: Callable[[], Any]) -> Any:
        """The model that ``make`` returns; its new heads depend only on the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.training.seed)
            return make()

    def _with_codes(self, num_atoms: int) -> Any:
        """The model of an objective with codes."""
        mlm_weight = float(self.settings.objective == "mlsm+mlm")
        stock = self.kind.opened(self.settings.model, mlm_weight=mlm_weight)
        return self.kind.of(stock, num_atoms=num_atoms, mlm_weight=mlm_weight)

    def _with_vectors(self, texts: Texts) -> list[SentenceVectors]:
        """Both parts of the text with the teacher's vectors; held-out sequences are at the end of the text."""
        first = map_npy(self.output / "tokens.vectors.npy", ndim=2)
        number = len(texts[0])
        second = map_npy(self.output / "valid.vectors.npy", ndim=2) if self.settings.valid_texts else first[number:]
        return [SentenceVectors(texts[0], first[:number]), SentenceVectors(texts[1], second)]

    def _without_codes(self, stock: "PreTrainedModel") -> Any:
        """A stock model with an objective without codes."""
        if self.settings.objective == VECTORS:
            return self.kind.of(stock, width=HuggingFaceEncoder.width_of(str(self.settings.teacher)))
        if self.settings.teacher is not None:
            teacher = load_masked_lm(self.settings.teacher)
            return self.kind.of(stock, teacher=teacher, temperature=self.settings.temperature)
        return self.kind.of(stock)


def _losses(figures: dict[str, float]) -> dict[str, float]:
    """The means over tokens; the Trainer's own loss depends on its batches."""
    return {name: value for name, value in figures.items() if name.endswith(("_loss", "kl", "accuracy"))}
