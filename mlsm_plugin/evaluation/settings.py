"""Settings of fine-tuning and of the evaluation of dictionaries; imports nothing slow, so that help is fast."""

from dataclasses import dataclass, field

from mlsm_plugin.core.files.settings import option, seed
from mlsm_plugin.core.hidden_states.settings import BlockSettings, ModelRun, layer
from mlsm_plugin.core.text.unknown_tokens import KnownText


@dataclass(frozen=True)
class FinetuneSettings(KnownText):
    """How a model is fine-tuned. The learning rate rises in the first 6 % of the updates, and falls linearly to 0.

    ValueError if a value is out of range.
    """

    max_epoch: int = option(10, least=1, help="largest number of epochs")
    patience: int = option(3, least=1, help="stop after this many epochs without a better result")
    lr: float = option(1e-4, above=0, help="peak learning rate")
    batch_size: int = option(32, least=1, help="texts per update")
    dropout: float = option(0.1, least=0, most=0.9, help="dropout of hidden states, attention weights and classifier")
    metric: str = option(
        "accuracy", choices=("accuracy", "f1"), help="metric by which the best epoch is chosen; f1: of label 1"
    )
    regression: bool = option(False, help="predict numbers; all labels must be numbers")
    header: bool = option(False, help="skip the first line of each file, which names its columns")
    allow_single_labels: bool = option(False, help="accept a label that only one training text has", decides=False)
    from_scratch: bool = option(False, help="start from random weights of the same architecture, for comparison")
    bf16: str = option("off", choices=("on", "off"), help="matrix products in bfloat16")
    cpu: bool = option(False, help="do not use a GPU", decides=False)

    @property
    def best_in(self) -> str:
        """The figure on the validation texts by which the best epoch is chosen."""
        return "loss" if self.regression else self.metric


@dataclass(frozen=True)
class EvaluationSettings(ModelRun):
    """Settings of the evaluation of a dictionary; ValueError if a value is out of range.

    ``blocks``: the text that the model sees at once.
    """

    layer: int = layer()
    blocks: BlockSettings = field(default_factory=BlockSettings)
    max_tokens: int = option(100_000, least=1, help="tokens to evaluate, in whole blocks")
    seed: int = seed("of the blocks and of the masked tokens")
