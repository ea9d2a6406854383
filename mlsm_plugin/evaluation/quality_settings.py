"""Settings of the comparison of encoders; imports nothing slow, so that the command's help is fast."""

from dataclasses import dataclass

from mlsm_plugin.core.files.settings import check, option, seed

FEWEST_QUERIES = 20


@dataclass(frozen=True, kw_only=True)
class QualitySettings:
    """How many sentences and passages are measured; ValueError if a value is out of range."""

    queries: int = option(
        500, least=FEWEST_QUERIES, help="number of sentences, each of which has to find the passage it is from"
    )
    passages: int = option(5000, least=2, help="largest number of passages of the text to search")
    header: bool = option(False, help="the first line of labelled and scored files names the columns")
    seed: int = seed("of the chosen sentences and masked words")

    def __post_init__(self) -> None:
        check(self)
