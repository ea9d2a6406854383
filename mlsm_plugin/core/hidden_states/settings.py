"""How a text is cut into blocks, and how a model runs on it. Imports nothing slow, since commands' help needs it."""

from dataclasses import dataclass
from typing import Any

from mlsm_plugin.core.files.settings import check, option


@dataclass(frozen=True)
class BlockSettings:
    """How a split is cut into blocks for the auxiliary model; longer blocks are cut.

    ValueError if a value is out of range.
    """

    tokens_per_sample: int = option(512, least=2, help="longest block (sequence) in tokens, BOS included")
    sample_break_mode: str = option(
        "complete",
        choices=("none", "complete", "complete_doc", "eos"),
        help="where blocks may end, as in fairseq-train",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """How a model runs on a text."""

    device: str | None = option(
        None, help="torch device of the model (default: the GPU if there is one)", decides=False
    )
    fp16: bool = option(False, help="run the model in half precision: float16, on a CPU bfloat16")
    threads: int | None = option(
        None, least=1, metavar="N", help="number of CPU threads (default: all cores)", decides=False
    )
    batch_tokens: int = option(8192, least=1, help="tokens in one forward pass; limits the memory", decides=False)

    def __post_init__(self) -> None:
        check(self)


def layer() -> Any:
    """A field that holds the number of a layer."""
    return option(least=0, metavar="L", help="hidden state: 0 is the embeddings, 1 the first layer, ...")
