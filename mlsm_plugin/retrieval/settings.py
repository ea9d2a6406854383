"""The settings of a datastore and of phrase search. Imports nothing slow, since the help of commands needs it."""

from dataclasses import dataclass, field

from mlsm_plugin.core.files.settings import check, option
from mlsm_plugin.core.hidden_states.settings import BlockSettings

DTYPES = ("float16", "float32")
MOST_OCCURRENCES = 10_000  # of a word, to classify texts


@dataclass(frozen=True)
class DatastoreSettings:
    """Which tokens get a key; ``stopwords`` of one token get none. ValueError if a value is out of range."""

    splits: list[str] = option(["train"], metavar="SPLIT", help="splits of the binarized dataset, in this order")
    blocks: BlockSettings = field(default_factory=lambda: BlockSettings(256))
    word_boundaries_only: bool = option(False, help="keep only tokens that begin or end a word")
    stopwords: frozenset[str] = frozenset()
    dtype: str = option("float16", choices=DTYPES, help="data type of the keys")
    shard_tokens: int = option(1 << 16, least=1, help="tokens in a shard; limits the memory")

    def __post_init__(self) -> None:
        check(self)
        if not self.splits:
            raise ValueError("splits names no split")
        if len(set(self.splits)) < len(self.splits):
            raise ValueError(f"--splits {' '.join(self.splits)} names a split twice; name each once")


@dataclass(frozen=True)
class FillingSettings:
    """How phrases are found; ValueError if a value is out of range."""

    k: int = option(256, least=1, flag="--neighbors", help="number of starts, and of ends, to retrieve")
    max_length: int = option(10, least=1, help="longest phrase in tokens")
    length_alpha: float = option(0.0, metavar="A", help="multiply the scores by the length of the phrase to this power")
    any_pieces: bool = option(False, help="allow phrases that begin or end in the middle of a word")
    context_tokens: int = option(15, least=0, help="tokens of a source to show on each side of a phrase")
    contexts: int = option(3, least=0, help="sources to show for each phrase")

    def __post_init__(self) -> None:
        check(self)
