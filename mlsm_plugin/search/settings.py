"""How documents are indexed; imports nothing slow, so that the help of the command stays fast."""

from dataclasses import dataclass

from mlsm_plugin.core.files.settings import check, option


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """How documents are indexed; ValueError if a value is out of range."""

    passage_lines: int = option(
        5, least=1, help="largest number of lines that make a document in a text file; a blank line also ends one"
    )
    shard_documents: int = option(
        2000, least=1, help="documents per batch; after a stop, the unfinished batch is indexed again"
    )
    batch_tokens: int = option(8192, least=1, help="tokens in one forward pass; limits the memory")

    def __post_init__(self) -> None:
        check(self)
