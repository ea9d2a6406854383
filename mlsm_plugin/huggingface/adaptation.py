"""Continue the pre-training of a Hugging Face model on a text, from raw text to adapted model; it can be resumed."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from mlsm_plugin.core.coding.coder_learning import LASSO, LearningSettings
from mlsm_plugin.core.coding.settings import ONLINE, STORE
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.atomic_files import PathLike, read_json, write_json
from mlsm_plugin.core.files.hf_files import hf_folder
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.metric_log import MetricLog
from mlsm_plugin.core.files.model_folders import check_new_model_folder, new_model_folder
from mlsm_plugin.core.files.npy_files import map_npy
from mlsm_plugin.core.files.output_lock import only_writer
from mlsm_plugin.core.files.planned_folder import PLAN_FILE
from mlsm_plugin.core.files.process_rank import ProcessRank, process_rank
from mlsm_plugin.core.files.settings import identity, option, undeciding
from mlsm_plugin.core.files.step_record import RECORD, Step, StepRecord
from mlsm_plugin.core.hidden_states.devices import Device
from mlsm_plugin.core.hidden_states.encoder import check_layer
from mlsm_plugin.core.hidden_states.hf_encoder import (
    FLOAT32_ONLY,
    HuggingFaceEncoder,
    HuggingFaceSource,
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
from mlsm_plugin.huggingface.aligned_sequences import AlignedSequences, write_aligned
from mlsm_plugin.huggingface.coding import encode_sequences, learn_from_sequences
from mlsm_plugin.huggingface.collators import (
    AuxiliaryTextCollator,
    LatentSemanticCollator,
    MaskedLmCollator,
    Masking,
    SpanGroupsCollator,
    TokenContrastiveCollator,
)
from mlsm_plugin.huggingface.dataset_text import files_of_dataset, rows_of_dataset, rows_of_files, write_column
from mlsm_plugin.huggingface.distilled_model import DistilledModel, SentenceVectorModel
from mlsm_plugin.huggingface.epoch_order import samples_of_update
from mlsm_plugin.huggingface.held_out_text import held_out_lines, last_lines, write_held_out
from mlsm_plugin.huggingface.latent_semantic_model import LatentSemanticModel
from mlsm_plugin.huggingface.low_rank import add_low_rank, merge_low_rank
from mlsm_plugin.huggingface.model_card import CARD, CardFacts, add_quality, write_card
from mlsm_plugin.huggingface.pretraining_model import (
    MaskedLmModel,
    PretrainingModel,
    SpanContrastiveModel,
    TokenContrastiveModel,
)
from mlsm_plugin.huggingface.pretraining_sequences import SEQUENCES_OF_GROUP, PretrainingSequences, SpanGroups
from mlsm_plugin.huggingface.saved_folder import check_saved, save_pretrained
from mlsm_plugin.huggingface.sentence_modules import copy_modules, modules_of, write_modules
from mlsm_plugin.huggingface.sentence_vectors import SentenceCollator, SentenceVectors, write_vectors
from mlsm_plugin.huggingface.state_regression_model import StateRegressionModel
from mlsm_plugin.huggingface.student_model import learn_tokenizer, new_model, student_config
from mlsm_plugin.huggingface.text_sequences import default_max_length, write_text_sequences
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from mlsm_plugin.huggingface.training import TrainingSettings, train

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer

VECTORS = "distill-vectors"
REGRESSION = "regression+mlm"
MODELS: dict[str, type[PretrainingModel]] = {  # by objective
    "mlm": MaskedLmModel,
    "mlsm": LatentSemanticModel,
    "mlsm+mlm": LatentSemanticModel,
    REGRESSION: StateRegressionModel,
    "taco": TokenContrastiveModel,
    "npm": SpanContrastiveModel,
    "distill": DistilledModel,
    VECTORS: SentenceVectorModel,
}
COLLATORS: dict[str, type[MaskedLmCollator]] = {  # by objective, for those with all options of Masking
    "mlm": MaskedLmCollator,
    "mlsm": LatentSemanticCollator,
    "mlsm+mlm": LatentSemanticCollator,
    REGRESSION: AuxiliaryTextCollator,
    "taco": TokenContrastiveCollator,
    "distill": MaskedLmCollator,
}
WITH_CODES = ("mlsm", "mlsm+mlm")
WITH_AUXILIARY = (*WITH_CODES, REGRESSION)
OBJECTIVES_OF_OPTIONS = {
    "auxiliary": WITH_AUXILIARY,
    "latent_top": WITH_CODES,
    "latent_source": WITH_CODES,
    "learning": WITH_CODES,
    "regressed_layer": (REGRESSION,),
    "temperature": ("distill",),
}
HELD_OUT = 0.02  # share of the sequences, at the end of the text, if no text to evaluate on was passed
MOST_HELD_OUT = 2000
LENGTH_OF_STUDENT = 128
MOST_PASSES = 5  # over the text, to learn a dictionary
COMPARED_LINES = 200  # lines of the text whose ids are compared when the model is written
TEXT_PARTS = ("train", "valid")
MODEL = "model"  # the folder of the adapted model in the output
HOLDS_OUT = "holds_out"  # key of the settings of the step ``text``
DOCUMENTS = "documents.txt"
HELD_OUT_TEXT = "held_out.txt"
QUALITY = "quality.json"
TOKENIZER = "tokenizer"
AUXILIARY = "auxiliary"  # suffix of the names of sequences that the auxiliary model reads
PLACES = "places"
DICTIONARY = "dictionary"
CHECKPOINTS = "checkpoints"
LOGS = "logs"  # for TensorBoard
# the recipe for a model with random weights
TRAINING_OF_STUDENT = TrainingSettings(optimizer="muon", learning_rate=2e-3, muon_learning_rate=0.01)
MASKS_OF_STUDENT = Masking(mask_prob=0.3, mask_prob_end=0.15)
Texts = tuple[TokenSequences, TokenSequences]  # training text and evaluation text


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


@dataclass(frozen=True)
class Adaptation(KnownText):
    """The model, the text and the settings of an adaptation; ValueError if a value is out of range.

    Attributes:
        model: folder or hub name of a masked LM with its tokenizer.
        texts: files with one sentence per line and blank lines between documents.
        output: folder for all output.
        learning: how the dictionary is learned, and from which layer.
        regressed_layer: hidden state of the auxiliary model to predict, with ``regression+mlm``; None: the last.
        masking: how much is masked, and how.
        training: how the model is trained; ``epochs`` replaces its ``updates``.
        epochs: passes over the text; None: train for ``training.updates``.
    """

    model: str = undeciding()  # the contents of these matter, not their names
    texts: Sequence[str] = undeciding()
    output: str = undeciding()
    objective: str = option(
        "mlm",
        choices=tuple(MODELS),
        help="what the model learns: mlm: masked tokens; mlsm: sparse codes of an auxiliary model's hidden states; "
        "regression: these hidden states; taco: also, which tokens are near each other; npm: which spans of the text "
        "are equal; distill, distill-vectors: the predictions, or the sentence vectors, of --teacher",
    )
    dataset: str | None = option(
        None, metavar="NAME[:CONFIG]", help="text from a Hugging Face dataset instead of files: a folder or a hub name"
    )
    split: str = option("train", help="split of --dataset")
    column: str | None = option(
        None, help="column with the text, of --dataset (default: text) or of files of JSON lines, CSV or Parquet"
    )
    student: str | None = option(
        None,
        metavar="SIZE",
        help="train a new, small model that learns from MODEL and has its tokenizer: LAYERSxWIDTH, such as 4x256 (a "
        "ModernBERT), or the folder of a config.json",
    )
    vocab_size: int | None = option(
        None,
        least=100,
        metavar="N",
        help="with --student: learn a tokenizer of N pieces from the text (default: the tokenizer of MODEL)",
    )
    valid_texts: list[str] = option(
        [],
        flag="--valid",
        metavar="FILE",
        help="text to evaluate on (default: the last 2 %% of the sequences are held out, at most 2,000)",
        decides=False,
    )
    auxiliary: str | None = option(
        None,
        metavar="MODEL",
        help="model whose hidden states are coded or predicted (default: MODEL itself, as it is)",
        decides=False,
    )
    teacher: str | None = option(
        None,
        metavar="MODEL",
        help="model with the same vocabulary whose predictions are learned, for distill; for "
        "distill-vectors any encoder of the same width whose sentence vectors are learned",
        decides=False,
    )
    temperature: float = option(2.0, above=0, help="temperature of the predictions, for distill")
    learning: LearningSettings | None = None
    regressed_layer: int | None = option(
        None, least=0, flag="--layer", help="hidden state of the auxiliary model to predict (default: the last)"
    )
    latent_top: int | None = option(None, least=1, help="keep the N strongest atoms of each code")
    latent_source: str = option(
        STORE,
        choices=(STORE, ONLINE),
        help="store: code the text before the training; online: code the masked tokens in every update, which needs no "
        "disk and pays if the text is read once",
    )
    masking: Masking = field(default_factory=Masking)
    sentence_transformer: bool = option(
        False, help="write a sentence-transformers folder, whose vectors are means; a MODEL that is one stays one"
    )
    max_length: int | None = option(
        None, least=1, help="longest sequence in ids (default: what the model can take, at most 512)"
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
        if bool(self.texts) is (self.dataset is not None):
            raise ValueError("pass either files with --text, or --dataset")
        if self.student is None and self.vocab_size is not None:
            raise ValueError("vocab_size needs --student: a model that is trained already has its tokenizer")
        if self.student is not None and self.auxiliary is not None:
            raise ValueError("with --student, MODEL itself is the auxiliary model; leave --auxiliary out")
        if self.student is not None and self.training.lora is not None:
            raise ValueError(
                "--lora keeps what a model knows, and a new model of --student knows nothing; pass one of them"
            )
        masking = self.masking
        if self.objective == "npm" and masking != Masking(mask_prob=masking.mask_prob, seed=masking.seed):
            raise ValueError("of the options for masks, --objective npm only takes --mask-prob")
        if self.objective == VECTORS and masking != Masking(seed=masking.seed):
            raise ValueError(f"--objective {VECTORS} takes no options for masks, since nothing is masked")

    @property
    def auxiliary_model(self) -> str:
        """The model whose hidden states are coded or predicted."""
        return self.auxiliary or self.model


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
    _check_folder(output, record)
    if quality is not None:
        quality.check()
    chain = _Chain(settings, process, record)
    with only_writer(output) if process.rank == 0 else nullcontext():
        _run(chain, record, quality)
    figures = {"before": record.figures_of("before"), "after": record.figures_of("training")}
    if quality is not None and (output / QUALITY).exists():
        figures["quality"] = read_json(output / QUALITY)
    return figures


def _run(chain: "_Chain", record: StepRecord, quality: Quality | None) -> None:
    """Run the incomplete steps; after a complete training, only the measurement."""
    process = chain.process
    steps = chain.steps()
    measuring = [] if quality is None else [chain.quality_step(quality)]
    is_trained = record.is_complete(steps)
    if is_trained and record.is_complete([*steps, *measuring]):
        return
    if not is_trained and chain.processes != process.world_size:
        raise ValueError(
            f"the number of processes is {chain.processes} in {chain.output} and {process.world_size} now; start "
            f"{chain.processes} (several: with torchrun --nproc-per-node), or choose another --output"
        )
    # the first call connects the processes
    record.first = chain.training.arguments(chain.output / CHECKPOINTS).main_process_first
    if is_trained:
        record.skip(steps)
    else:
        chain.check()
        for step in chain.steps():
            record.run(step)
    for step in measuring:
        record.run(step)
    if process.rank == 0:
        print(f"\n{record.table()}\n")


def recorded_objective(output: PathLike) -> str | None:
    """The objective that a folder was begun with; None if nothing that depends on it was begun.

    Codes of which no training was begun are taken to be for the default of earlier versions.
    """
    record = StepRecord(Path(output, RECORD))
    objective: str | None = record.settings_of("before").get("objective")
    if objective is None and record.settings_of("dictionary"):
        return "mlsm+mlm"
    return objective


def _check_folder(output: Path, record: StepRecord) -> None:
    """Raise ValueError if the folder holds something that a new adaptation cannot continue or must not replace."""
    if record.path.exists():
        return
    if (output / PLAN_FILE).exists():
        raise ValueError(
            f"{output} was begun by an earlier version, which recorded its steps in {PLAN_FILE}; choose another "
            f"--output (if it was finished, its model is {output / MODEL})"
        )
    check_new_model_folder(output / MODEL)


class _Chain:
    """The steps of an adaptation, and the objects that they share, each opened once."""

    def __init__(self, settings: Adaptation, process: ProcessRank, record: StepRecord) -> None:
        self.settings = settings
        self.process = process
        self.record = record
        # processes that train, on which batches and updates depend: of the recorded training, else of this run
        self.processes: int = record.settings_of("training").get("processes", process.world_size)
        self.output = Path(settings.output)
        self.source, self.config, self.coded_tokenizer = model_and_tokenizer(settings.model, weights=True)
        self.tokenizer_folder = self.source if settings.vocab_size is None else self.output / TOKENIZER
        self.kind = MODELS[settings.objective]
        if settings.student is not None:
            self.config = student_config(settings.student)
        self.training = settings.training
        if self.config.model_type in FLOAT32_ONLY:
            if self.training.bf16 == "on":
                raise ValueError(f"a model of type {self.config.model_type} overflows in bfloat16; pass --bf16 off")
            self.training = replace(self.training, bf16="off")
        self.device = "cpu" if settings.training.cpu else process.device(torch.cuda.device_count())
        self.learning: LearningSettings | None = None
        self.layer = 0  # of the auxiliary model
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
        # whether the auxiliary model reads the text in tokens of another vocabulary
        self.is_aligned = settings.vocab_size is not None and settings.objective in WITH_AUXILIARY

    def _sized(self, training: TrainingSettings) -> TrainingSettings:
        """The training with batch sizes as chosen, else as recorded, else to suit the length."""
        recorded = self.record.settings_of("training").get("training", {})
        is_earlier = recorded and "attention_dropout" not in recorded  # such a run has the dropout of the model
        if training.attention_dropout is None and not is_earlier:
            training = replace(training, attention_dropout=0.0)
        is_unset = training.batch_size is None and training.accumulate is None
        if is_unset and "batch_size" in recorded:
            return replace(training, batch_size=recorded["batch_size"], accumulate=recorded["accumulate"])
        group = SEQUENCES_OF_GROUP if self.settings.objective == "npm" else 1
        training = training.for_length(self.length, group)
        return replace(training, batch_size=training.samples_per_batch, accumulate=training.batches_per_update)

    def steps(self) -> list[Step]:
        """The steps in order, each with its inputs and outputs."""
        steps = [*self._source_steps(), *self._text_steps()]
        if self.learning is not None:
            steps += self._code_steps(self.learning)
        return [*steps, *self._training_steps()]

    def _reading(self) -> JsonObject:
        """The settings with which the text is read."""
        return {
            "files": len(self.texts_to_train),
            "max_length": self.length,
            "apart": self.settings.objective == VECTORS,
            "vocabulary": self.coded_tokenizer.vocabulary_fingerprint,
            "segmentation": self.coded_tokenizer.segmentation_fingerprint,
        }

    def _source_steps(self) -> Iterator[Step]:
        """The steps that make plain text of a dataset, and learn a tokenizer from it."""
        settings = self.settings
        if self.texts_to_train != settings.texts:
            source = {"dataset": settings.dataset, "split": settings.split, "column": settings.column}
            files = [Path(text) for text in settings.texts]
            if settings.dataset is not None:
                files = files_of_dataset(settings.dataset)
            yield Step("documents", self.write_documents, source, files, [self.output / DOCUMENTS])
        if settings.vocab_size is not None:
            size = {"vocab_size": settings.vocab_size, **self._reading()}
            texts = [Path(text) for text in self.texts_to_train]
            yield Step("tokenizer", self.learn_tokenizer, size, texts, [self.output / TOKENIZER])

    def _text_steps(self) -> Iterator[Step]:
        """The steps that make the inputs of the training from plain text."""
        evaluated = self._evaluated_texts
        texts = [Path(text) for text in self.texts_to_train]
        reading = self._reading()
        if evaluated:
            reading[HOLDS_OUT] = False  # all of the text is trained on
        else:  # an earlier version made everything anew for another --valid, and its folders still do
            texts += [Path(text) for text in self.settings.valid_texts]
        tokens = [self.output / name for name in self.names]
        of_valid = tokens[1:]
        yield Step("text", self.write_text, reading, texts, tokens, evaluated=evaluated, of_evaluation=of_valid)
        if self.is_aligned:
            folders = [self.output / f"{name}.{kind}" for name in self.names for kind in (AUXILIARY, PLACES)]
            of_valid = folders[2:]
            yield Step("alignment", self.align, {}, texts, folders, evaluated=evaluated, of_evaluation=of_valid)
        if self.settings.objective == VECTORS:
            vectors = [folder.with_name(f"{folder.name}.vectors.npy") for folder in tokens]
            teacher = {"teacher": HuggingFaceSource.fingerprint_of(str(self.settings.teacher))}
            of_valid = vectors[1:]
            yield Step("vectors", self.write_vectors, teacher, [], vectors, evaluated=evaluated, of_evaluation=of_valid)

    def _code_steps(self, settings: LearningSettings) -> Iterator[Step]:
        """The steps that learn a dictionary and code the text with it."""
        learning = identity(settings)
        learning["auxiliary"] = HuggingFaceSource.fingerprint_of(self.settings.auxiliary_model)
        yield Step("dictionary", self.learn, learning, [], [self.output / DICTIONARY])
        if self.settings.latent_source == ONLINE:
            return
        yield Step(
            "codes",
            self.code,
            {"latent_top": self.settings.latent_top},
            [],
            [self.output / f"{name}.codes" for name in TEXT_PARTS],
            by_all=True,
            evaluated=self._evaluated_texts,
            of_evaluation=[self.output / f"{TEXT_PARTS[1]}.codes"],
        )

    def _training_steps(self) -> Iterator[Step]:
        """The evaluation of the model as it is, and the training."""
        model = self.output / MODEL
        evaluated = self._evaluated_texts
        training = self._training_identity()
        yield Step("before", self.evaluate, training, [], [], by_all=True, evaluated=evaluated)
        yield Step(
            "training",
            self.train,
            training,
            [],
            [model, self.output / CHECKPOINTS],
            checked=[model],
            by_all=True,
            editable=[model / CARD],
            evaluated=evaluated,
            of_evaluation=[model],  # its card; the last checkpoint has its weights
        )

    def _training_identity(self) -> JsonObject:
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
            training["student"] = self.config.to_dict() if os.path.exists(settings.student) else settings.student
        if settings.objective == "distill":
            training["teacher"] = HuggingFaceSource.fingerprint_of(str(settings.teacher))
        del training["regressed_layer"]  # records of earlier versions lack it
        if settings.objective == REGRESSION:
            training["regressed_layer"] = self.layer
            training["auxiliary"] = HuggingFaceSource.fingerprint_of(settings.auxiliary_model)
        return training

    def quality_step(self, quality: Quality) -> Step:
        """The step after the training, which compares the model with the original."""
        reference = self._reference
        values = {"reference": HuggingFaceSource.fingerprint_of(reference), **quality.identity()}
        results = [self.output / QUALITY, self.output / HELD_OUT_TEXT]
        files = [*quality.files(), *self._evaluated_texts]
        return Step("quality", partial(self.measure, quality), values, files, results)

    @property
    def _evaluated_texts(self) -> list[Path]:
        """The files of --valid, on which nothing but figures depends; none in a folder of an earlier version."""
        recorded = self.record.settings_of("text")
        is_earlier = HOLDS_OUT not in recorded and "valid" in self.record.folders_of("text")
        return [] if is_earlier else [Path(text) for text in self.settings.valid_texts]

    @property
    def _reference(self) -> str:
        """The model to compare with: MODEL, or the teacher of a new model, since random weights know nothing."""
        if self.settings.student is not None and self.settings.teacher is not None:
            return self.settings.teacher
        return self.settings.model

    def check(self) -> None:
        """Raise ValueError for problems that would only show up hours later."""
        second_model = self.settings.teacher if self.settings.objective == "distill" else self.settings.auxiliary
        if second_model:
            self._check_same_vocabulary(second_model)
        positions: dict[str, int] = {}  # by the model that reads the text
        if self.settings.student is not None:
            positions["the new model"] = positions_of(self.config)
        if not self.is_aligned:
            for name in (self.settings.model, second_model or self.settings.model):
                positions[name] = HuggingFaceSource.usual_tokens_of(name)
        name = min(positions, key=lambda reader: positions[reader])
        if self.length > positions[name]:
            raise ValueError(f"--max-length {self.length} is more than the {positions[name]} positions of {name}")
        if self.settings.objective in WITH_AUXILIARY:
            auxiliary = self.settings.auxiliary_model
            check_layer(self.layer, HuggingFaceSource.layers_of(auxiliary), auxiliary)
        if self.settings.vocab_size is None:  # otherwise the tokenizer does not exist yet
            _ = self.model

    @property
    def texts_to_train(self) -> Sequence[str]:
        """The files of plain text to train on."""
        if self.settings.dataset is None and self.settings.column is None:
            return self.settings.texts
        return [str(self.output / DOCUMENTS)]

    @property
    def names(self) -> list[str]:
        """The names of the folders of sequences."""
        return ["tokens", "valid"] if self.settings.valid_texts else ["tokens"]

    @cached_property
    def tokenizer(self) -> HuggingFaceTokenizer:
        """The tokenizer of the model that is trained."""
        if self.settings.vocab_size is None:
            return self.coded_tokenizer
        return HuggingFaceTokenizer(self.tokenizer_folder)

    @cached_property
    def fast_tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer in the form that the collators take and that is saved."""
        tokenizer: PreTrainedTokenizerFast = load_fast_tokenizer(self.tokenizer_folder)
        return tokenizer

    @cached_property
    def collator(self) -> MaskedLmCollator | SpanGroupsCollator | SentenceCollator:
        """The collator, which makes the batches."""
        masking = self.settings.masking
        if self.settings.objective == "npm":
            rules = SpanRules(mask_prob=masking.mask_prob)
            length = positions_of(self.config)
            return SpanGroupsCollator(self.fast_tokenizer, max_length=length, rules=rules, seed=masking.seed)
        if self.settings.objective == VECTORS:
            return SentenceCollator(self.fast_tokenizer)
        if self.settings.latent_source == ONLINE:
            return AuxiliaryTextCollator(self.fast_tokenizer, masking=masking)
        return COLLATORS[self.settings.objective](self.fast_tokenizer, masking=masking)

    @cached_property
    def model(self) -> PretrainingModel:
        """The model with its objective; new weights depend only on the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.training.seed)
            model = self._with_objective()
            if self.training.lora is not None:
                add_low_rank(model, self.training.lora)
            return model

    def _with_objective(self) -> PretrainingModel:
        settings = self.settings
        if self.learning is not None:
            mlm_weight = float(settings.objective == "mlsm+mlm")
            stock = self._stock(mlm_weight=mlm_weight)
            return self.kind.of(stock, num_atoms=self.learning.atoms, mlm_weight=mlm_weight)
        stock = self._stock()
        if settings.objective == REGRESSION:
            return self.kind.of(stock, auxiliary=self.encoder)
        if settings.objective == VECTORS:
            return self.kind.of(stock, width=HuggingFaceSource.width_of(str(settings.teacher)))
        if settings.teacher is not None:
            teacher = load_masked_lm(settings.teacher)
            return self.kind.of(stock, teacher=teacher, temperature=settings.temperature)
        return self.kind.of(stock)

    def _stock(self, **options: float) -> "PreTrainedModel":
        """The model before it gets its objective."""
        stock: PreTrainedModel
        dropout = self.training.attention_dropout
        if self.settings.student is None:
            stock = self.kind.opened(self.settings.model, attention_dropout=dropout, **options)
        else:
            stock = new_model(self.config, self.fast_tokenizer, attention_dropout=dropout)
        return stock

    @cached_property
    def encoder(self) -> HuggingFaceEncoder:
        """The auxiliary model, up to its layer."""
        half = self.training.in_bf16 if self.learning is None else self.learning.fp16
        return HuggingFaceEncoder(self.settings.auxiliary_model, layer=self.layer, device=self.device, fp16=half)

    @cached_property
    def texts(self) -> Texts:
        """The sequences to train on and to evaluate on; ValueError if there are too few."""
        fewest = 2 if self.settings.objective == "npm" else 1  # npm finds spans in other sequences
        text = self._sequences(self.texts_to_train, "tokens")
        if self.settings.valid_texts:
            train = text
            valid = self._sequences(self.settings.valid_texts, "valid")
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
        return train, valid

    @cached_property
    def aligned(self) -> list[AlignedSequences | None]:
        """Both parts of the text as the auxiliary model reads them, if its vocabulary differs; else None for each."""
        if not self.is_aligned:
            return [None, None]
        whole_texts = [
            AlignedSequences(
                TokenSequences(self.output / f"{name}.{AUXILIARY}"), TokenSequences(self.output / f"{name}.{PLACES}")
            )
            for name in self.names
        ]
        train, valid = self.texts
        last = len(train) + len(valid)
        second = whole_texts[1] if self.settings.valid_texts else whole_texts[0].part(len(train), last)
        return [whole_texts[0].part(0, len(train)), second]

    @property
    def coded_texts(self) -> list[TokenSequences]:
        """Both parts of the text as the auxiliary model reads them."""
        pairs = zip(self.texts, self.aligned, strict=True)
        return [text if aligned is None else aligned.sequences for text, aligned in pairs]

    @cached_property
    def trainer(self) -> "Trainer":
        """The Trainer; ValueError if model, text and batches do not fit together."""
        from transformers import PrinterCallback, Trainer
        from transformers.integrations import TensorBoardCallback

        from mlsm_plugin.huggingface.trainer_callback import ProgressBars, TensorBoardLog, prepare

        train_dataset, eval_dataset = self._datasets()
        training = self.training
        if isinstance(self.model, LatentSemanticModel) and self.settings.latent_source == ONLINE:
            coder = load_coder(self.output / DICTIONARY)
            self.model.compute_codes(self.encoder, coder, latent_top=self.settings.latent_top)
        epochs = self.settings.epochs
        if epochs is not None:
            updates = training.updates_of_epochs(epochs, len(train_dataset), self.process.world_size)
            training = replace(training, updates=updates)
        trainer = prepare(
            Trainer(
                self.model,
                training.arguments(self.output / CHECKPOINTS),
                data_collator=self.collator,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                optimizers=(training.optimizer_of(self.model), None),
            )
        )
        trainer.remove_callback(PrinterCallback)  # it prints each log if the Trainer's own bar is off
        tokens_of_sample = self.texts[0].num_tokens / len(train_dataset)
        trainer.add_callback(ProgressBars(samples_of_update(trainer.args) * tokens_of_sample))
        if trainer.pop_callback(TensorBoardCallback) is not None:
            board = TensorBoardLog()
            # otherwise, figures from before the training would be logged to the current folder
            board.logging_dir = str(self.output / LOGS / "training")
            trainer.add_callback(board)
        return trainer

    def write_documents(self) -> None:
        """Write the text of a dataset, or of a column of the files."""
        rows = rows_of_files(self.settings.texts)
        if self.settings.dataset is not None:
            rows = rows_of_dataset(self.settings.dataset, self.settings.split)
        number = write_column(rows, self.settings.column or "text", self.output / DOCUMENTS)
        print(f"{number:,} documents")

    def learn_tokenizer(self) -> None:
        """Learn a tokenizer from the text to train on."""
        assert self.settings.vocab_size is not None
        learn_tokenizer(self.texts_to_train, self.source, self.output / TOKENIZER, vocab_size=self.settings.vocab_size)

    def align(self) -> None:
        """Write the text as the auxiliary model reads it, and where each token is in it."""
        sources = [self.texts_to_train, self.settings.valid_texts]
        for name, texts in zip(self.names, sources, strict=False):
            write_aligned(
                texts,
                TokenSequences(self.output / name),
                self.tokenizer,
                self.coded_tokenizer,
                self.output / f"{name}.{AUXILIARY}",
                self.output / f"{name}.{PLACES}",
                max_length=HuggingFaceSource.usual_tokens_of(self.settings.model),
                max_unk_rate=self.settings.max_unk_rate,
            )

    def write_text(self) -> None:
        """Tokenize the text, and print its size."""
        warn_of_shared_files(self.texts_to_train, self.settings.valid_texts)
        train, valid = self.texts
        updates = self.training.updates
        if self.settings.epochs is not None:
            updates = self.training.updates_of_epochs(self.settings.epochs, len(train), self.process.world_size)
        print(f"{len(train):,} sequences to train on in {updates:,} updates, {len(valid):,} to evaluate on")

    def write_vectors(self) -> None:
        """Write the teacher's vectors."""
        for texts, name in ((self.texts_to_train, "tokens"), (self.settings.valid_texts, "valid")):
            if texts:
                write_vectors(
                    texts,
                    self._sequences(texts, name),
                    self.settings.model,
                    str(self.settings.teacher),
                    self.output / f"{name}.vectors.npy",
                    max_unk_rate=self.settings.max_unk_rate,
                    device=self.device,
                    fp16=self.training.in_bf16,
                )

    def learn(self) -> None:
        """Learn the dictionary from the training text; a short text gives fewer hidden states than requested."""
        assert self.learning is not None
        text = self.coded_texts[0]
        enough = max(MOST_PASSES * text.num_tokens, self.learning.atoms)
        learn_from_sequences(
            text,
            self.settings.auxiliary_model,
            output=self.output / DICTIONARY,
            settings=replace(self.learning, tokens=min(self.learning.tokens, enough)),
            encoder=self.encoder,
        )

    def code(self) -> None:
        """Code both parts of the text; each process codes its share."""
        assert self.learning is not None
        coding = CodingSettings.with_run(self.learning, self.learning.layer, latent_top=self.settings.latent_top)
        encode = partial(
            encode_sequences,
            model=self.settings.auxiliary_model,
            coder=load_coder(self.output / DICTIONARY),
            settings=coding,
            process=self.process,
            encoder=self.encoder,
        )
        for name, sequences in zip(TEXT_PARTS, self.coded_texts, strict=True):
            output = self.output / f"{name}.codes"
            encode(sequences, output=output)
            if self.process.world_size > 1:
                torch.distributed.barrier()
                encode(sequences, output=output)  # now all shards exist
                torch.distributed.barrier()

    def evaluate(self) -> dict[str, float]:
        """The losses before the training; ValueError if they are not finite."""
        figures = self.trainer.evaluate()
        return _losses({name.removeprefix("eval_"): value for name, value in figures.items()})

    def train(self) -> dict[str, float]:
        """Train, and write the model; return the losses after the training."""
        after = train(self.trainer)
        if self.process.rank == 0:
            with new_model_folder(self.output / MODEL, overwrite=True) as folder:
                model = self.trainer.accelerator.unwrap_model(self.trainer.model)
                if self.training.lora is not None:
                    merge_low_rank(model)
                save_pretrained(folder, model, self.fast_tokenizer)
                self._write_modules(folder)
                self._write_card(folder, _losses(after))
                lines = (line for line in read_text(self.texts_to_train) if line)
                check_saved(folder, model, self.tokenizer, islice(lines, COMPARED_LINES))
        return _losses(after)

    def measure(self, quality: Quality) -> None:
        """Measure both models on the held-out text, and write the figures to a file and to the model card."""
        text = self.output / HELD_OUT_TEXT
        if self.settings.valid_texts:
            lines = last_lines(self.settings.valid_texts)
        else:
            apart = self.settings.objective == VECTORS
            lines = held_out_lines(self.texts_to_train, self.texts[1], self.tokenizer, apart=apart)
        write_held_out(lines, text)
        is_new = self.settings.student is not None
        names = ("teacher", "student") if is_new else ("before", "after")
        folders = (hf_folder(self._reference), self.output / MODEL)
        before = self.record.figures_of("before")
        after = self.record.figures_of("training")
        losses = [name for name in after if name in before and name != "accuracy"]
        loss_fell = not is_new and all(after[name] < before[name] for name in losses)
        models = dict(zip(names, folders, strict=True))
        figures = quality.measure(models, text, loss_fell=loss_fell, device=self.device)
        add_quality(self.output / MODEL, figures)
        write_json(self.output / QUALITY, figures)

    def _write_modules(self, folder: Path) -> None:
        """Write the files of sentence-transformers, if MODEL has them or they were requested."""
        modules = modules_of(self.source)
        if modules and self.settings.student is None:
            copy_modules(self.source, folder)
        elif modules or self.settings.sentence_transformer:
            normalized = any(module["type"].endswith("Normalize") for module in modules)
            width = int(self.config.hidden_size)
            write_modules(folder, width=width, max_length=positions_of(self.config), normalized=normalized)

    def _write_card(self, folder: Path, after: dict[str, float]) -> None:
        settings = self.settings
        shown: dict[str, object] = {"ids of a sequence": f"at most {self.length}"}
        if settings.objective in COLLATORS:
            shown["masked"] = settings.masking.mask_prob
            if settings.masking.mask_prob_end is not None:
                shown["masked at the end"] = settings.masking.mask_prob_end
        shown["sequences of an update"] = samples_of_update(self.trainer.args)
        shown["optimizer"] = self.training.optimizer
        shown["learning rate"] = self.training.learning_rate
        if self.training.attention_dropout is not None:
            shown["attention dropout"] = self.training.attention_dropout
        if self.training.lora is not None:
            shown["LoRA"] = f"rank {self.training.lora}, merged"
        shown["seed"] = self.training.seed
        if self.learning is not None:
            shown["dictionary"] = f"{self.learning.coder}, {self.learning.atoms} atoms, layer {self.learning.layer}"
        facts = CardFacts(
            model=settings.model,
            student=settings.student,
            objective=settings.objective,
            updates=self.trainer.state.global_step,
            texts=self.texts_to_train,
            before=self.record.figures_of("before"),
            after=after,
            settings=shown,
            fills_masks=self.model.has_trained_head,
        )
        write_card(folder, facts)

    def _datasets(self) -> Sequence[PretrainingSequences | SpanGroups | SentenceVectors]:
        """The datasets to train and to evaluate on."""
        if self.learning is not None and self.settings.latent_source == STORE:
            stores = [self.output / f"{name}.codes" for name in TEXT_PARTS]
            return [
                PretrainingSequences(text, store, aligned=aligned)
                for text, store, aligned in zip(self.texts, stores, self.aligned, strict=True)
            ]
        if self.settings.objective == VECTORS:
            return self._with_vectors()
        if self.settings.objective == "npm":
            return [SpanGroups(text) for text in self.texts]
        pairs = zip(self.texts, self.aligned, strict=True)
        return [PretrainingSequences(text, aligned=aligned) for text, aligned in pairs]

    def _with_vectors(self) -> list[SentenceVectors]:
        """Both parts of the text with the teacher's vectors; held-out sequences come from the end of the text."""
        train, valid = self.texts
        first = map_npy(self.output / "tokens.vectors.npy", ndim=2)
        second = first[len(train) :]
        if self.settings.valid_texts:
            second = map_npy(self.output / "valid.vectors.npy", ndim=2)
        return [SentenceVectors(train, first[: len(train)]), SentenceVectors(valid, second)]

    def _sequences(self, texts: Sequence[str], name: str) -> TokenSequences:
        sequences, _ = write_text_sequences(
            texts,
            self.tokenizer,
            self.output / name,
            max_length=self.length,
            max_unk_rate=self.settings.max_unk_rate,
            apart=self.settings.objective == VECTORS,
        )
        return sequences

    def _check_same_vocabulary(self, second_model: str) -> None:
        if HuggingFaceTokenizer(second_model).vocabulary_fingerprint != self.tokenizer.vocabulary_fingerprint:
            role = "teacher" if self.settings.objective == "distill" else "auxiliary model"
            raise ValueError(
                f"the {role} {second_model} has another vocabulary than {self.settings.model}; their tokens must be "
                "the same"
            )

    def _log(self, learning: LearningSettings) -> MetricLog:
        """The log for the training of an SAE: the same as the Trainer's, if that is TensorBoard or Weights & Biases."""
        names = self.settings.training.report_to if learning.coder != LASSO else []
        board = str(self.output / LOGS / "dictionary") if "tensorboard" in names else None
        return MetricLog(board, os.environ.get("WANDB_PROJECT", "huggingface") if "wandb" in names else None)


def _losses(figures: dict[str, float]) -> dict[str, float]:
    """Only the means over tokens; the Trainer's own loss depends on its batches."""
    return {name: value for name, value in figures.items() if name.endswith(("_loss", "kl", "accuracy"))}
