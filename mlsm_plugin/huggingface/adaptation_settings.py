"""The settings of an adaptation: its objectives, and which option belongs to which of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.coding.settings import ONLINE, STORE
from mlsm_plugin.core.files.settings import option, undeciding
from mlsm_plugin.core.text.unknown_tokens import KnownText
from mlsm_plugin.huggingface.collators import (
    AuxiliaryTextCollator,
    LatentSemanticCollator,
    MaskedLmCollator,
    Masking,
    TokenContrastiveCollator,
)
from mlsm_plugin.huggingface.distilled_model import DistilledModel, SentenceVectorModel
from mlsm_plugin.huggingface.kept_states_model import KEEP_WEIGHT
from mlsm_plugin.huggingface.latent_semantic_model import LatentSemanticModel
from mlsm_plugin.huggingface.pretraining_model import (
    MaskedLmModel,
    PretrainingModel,
    SpanContrastiveModel,
    TokenContrastiveModel,
)
from mlsm_plugin.huggingface.state_regression_model import StateRegressionModel
from mlsm_plugin.huggingface.training import TrainingSettings

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
    "keep_vectors": ("mlm",),
}
LEARNING_RATE_OF_KEPT = 5e-4  # where a loss keeps the vectors, which this rate harms otherwise
# the recipe for a model with random weights
TRAINING_OF_STUDENT = TrainingSettings(optimizer="muon", learning_rate=2e-3, muon_learning_rate=0.01)
MASKS_OF_STUDENT = Masking(mask_prob=0.3, mask_prob_end=0.15)


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
        "regression+mlm: these hidden states; taco: also, which tokens are near each other; npm: which spans of the "
        "text are equal; distill, distill-vectors: the predictions, or the sentence vectors, of --teacher",
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
        help="model with the same vocabulary whose predictions are learned, for distill; for distill-vectors any "
        "encoder, at least as wide, whose sentence vectors are learned (default with --student: MODEL)",
        decides=False,
    )
    temperature: float = option(2.0, above=0, help="temperature of the predictions, for distill")
    keep_vectors: float | None = option(
        None,
        least=0,
        most=1000,
        metavar="WEIGHT",
        help="with mlm, weight of a loss that keeps the hidden states of tokens that are not masked, and so the "
        f"vectors of texts, as they are in MODEL; 0: none (default: {KEEP_WEIGHT:g} if MODEL is a "
        "sentence-transformers folder, else 0)",
    )
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
        None, least=1, help="longest sequence in ids (default: what the model takes, at most 512; 128 with --student)"
    )
    training: TrainingSettings = field(default_factory=TrainingSettings)
    epochs: float | None = option(None, above=0, help="passes over the text (default: 3)")

    def __post_init__(self) -> None:
        super().__post_init__()
        is_taught = self.objective.startswith("distill")
        if (self.teacher is not None and not is_taught) or (self.teacher_model is None and is_taught):
            raise ValueError("--objective distill and distill-vectors need --teacher, and no other objective takes one")
        if self.student is not None and self.keep_vectors is not None:
            raise ValueError("a new model of --student has no vectors to keep; leave --keep-vectors out")
        for name, objectives in OBJECTIVES_OF_OPTIONS.items():
            if self.objective not in objectives and getattr(self, name) != getattr(Adaptation, name):
                raise ValueError(f"{name} is only allowed with --objective {' or '.join(objectives)}")
        if bool(self.texts) is (self.dataset is not None):
            raise ValueError("pass either files with --text, or --dataset")
        if self.dataset is None and self.split != Adaptation.split:
            raise ValueError("--split is only allowed with --dataset")
        if self.student is None and self.vocab_size is not None:
            raise ValueError("vocab_size needs --student: a model that is trained already has its tokenizer")
        if self.objective == "distill" and self.vocab_size is not None:
            raise ValueError("vocab_size is not for --objective distill, which predicts the teacher's vocabulary")
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

    @property
    def teacher_model(self) -> str | None:
        """The model whose predictions or sentence vectors are learned; a new model learns from MODEL."""
        return self.model if self.teacher is None and self.student is not None else self.teacher
