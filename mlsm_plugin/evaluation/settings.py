"""How a checkpoint is fine-tuned, and how a dictionary is judged; imports nothing slow, for the help of commands."""

from dataclasses import dataclass, field

from mlsm_plugin.core.files.settings import option, seed
from mlsm_plugin.core.hidden_states.settings import BlockSettings, ModelRun, layer
from mlsm_plugin.core.text.unknown_tokens import KnownText


@dataclass(frozen=True)
class FinetuneSettings(KnownText):
    """How a checkpoint is fine-tuned. The learning rate rises in the first 6 % of the updates, and falls to 0.

    ``extra`` are further flags of ``fairseq-train``, which override the others. ValueError if a value is out of range.
    """

    max_epoch: int = option(10, least=1, help="largest number of epochs")
    patience: int = option(3, least=1, help="stop after this many epochs without a better result")
    lr: float = option(1e-4, above=0, help="peak learning rate")
    batch_size: int = option(32, least=1, help="texts in an update")
    metric: str = option("accuracy", choices=("accuracy", "f1"), help="what the best epoch is best in; f1: of label 1")
    regression: bool = option(False, help="predict numbers; all labels must be numbers")
    header: bool = option(False, help="skip the first line of each file, which names its columns")
    allow_single_labels: bool = option(False, help="accept a label that only one training text has")
    from_scratch: bool = option(False, help="start from random weights of the same architecture, for comparison")
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvaluationSettings(ModelRun):
    """What is evaluated, and how; ValueError if a value is out of range. ``blocks`` are what the model sees at once."""

    layer: int = layer()
    blocks: BlockSettings = field(default_factory=BlockSettings)
    max_tokens: int = option(100_000, least=1, help="tokens to evaluate, in whole blocks")
    seed: int = seed("of the blocks and of the masked tokens")
