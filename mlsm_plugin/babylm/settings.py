"""The tracks of the BabyLM challenge, and what is trained in one; imports nothing slow, for the help of commands."""

import re
from dataclasses import dataclass

from mlsm_plugin.core.files.settings import check, option

MOST_EPOCHS = 10
SIZES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
OBJECTIVES = ("mlm", "mlsm+mlm", "taco")
CUSTOM = "custom"
CHECKPOINTS = "checkpoints"  # folder of the exported models in a run
MAIN = "main"  # the last one


@dataclass(frozen=True)
class Track:
    """The limits of a track: words of all text, and how often it may be seen (BabyLM challenge, 2026)."""

    words: int
    epochs: int
    first: int  # the number of words of the first checkpoint, a power of ten

    @property
    def exposures(self) -> int:
        """The most words that may be seen, repetitions included."""
        return self.words * self.epochs

    def checkpoints(self, exposures: int) -> dict[str, int]:
        """The names of the checkpoints of a run that sees so many words, each with its number of words.

        There are nine for each power of ten: ``chck_1M``, ..., ``chck_9M``, ``chck_10M``, ``chck_20M``, ...
        """
        counts, step = [], self.first
        while step <= exposures:
            counts += [step * number for number in range(1, 10) if step * number <= exposures]
            step *= 10
        return {name_of(words): words for words in counts}


TRACKS = {
    "strict": Track(100_000_000, MOST_EPOCHS, 1_000_000),
    "strict-small": Track(10_000_000, MOST_EPOCHS, 1_000_000),
}


def name_of(words: int) -> str:
    """The name of a checkpoint: ``chck_1M``, ``chck_1000M``, and ``chck_200K`` or ``chck_30`` in small runs."""
    size = next(size for size in ("M", "K", "") if words % SIZES[size] == 0)
    return f"chck_{words // SIZES[size]}{size}"


def words_from(text: str) -> int:
    """The number that a text such as ``7.7M`` says; ValueError if it says none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.replace(",", "").replace("_", "").upper())
    words = round(float(found[1]) * SIZES[found[2]]) if found else 0
    if words < 1:
        raise ValueError(f"words must be a number such as 7.7M, got {text!r}")
    return words


@dataclass(frozen=True)
class BabylmSettings:
    """What is trained, and within which limits. ValueError if a value is out of range, or does not fit the track."""

    track: str = option("strict-small", choices=(*TRACKS, CUSTOM), help="the track, whose limits hold")
    words: str | None = option(None, metavar="N", help="of --track custom: the most words of all text, e.g. 7.7M")
    epochs: int | None = option(
        None, least=1, most=1000, help=f"how often the text is seen (default: as often as the track allows, at most "
        f"{MOST_EPOCHS})",
    )  # fmt: skip
    objective: str = option("mlm", choices=OBJECTIVES, help="what is learned")
    auxiliary: str | None = option(
        None,
        metavar="RUN",
        help="of mlsm+mlm: the run of `mlsm babylm train` whose model gives the codes; its words are charged (default: "
        "the model itself, as in `mlsm pretrain`)",
    )
    license: str | None = option(None, help="licence of the model, for its card, e.g. mit")

    def __post_init__(self) -> None:
        check(self)
        if (self.words is None) == (self.track == CUSTOM):
            raise ValueError("--words is of --track custom, which needs it; the other tracks have their own")
        if self.auxiliary and self.objective != "mlsm+mlm":
            raise ValueError(f"--auxiliary gives the codes of --objective mlsm+mlm, and not of {self.objective}")
        self.limits()

    def limits(self) -> Track:
        """The limits of the track; ValueError if more epochs are asked for than it has."""
        if self.words is not None:
            words, epochs = words_from(self.words), self.epochs or MOST_EPOCHS
            decades = len(str(words * epochs)) - 1
            return Track(words, epochs, 10 ** min(6, max(0, decades - 1)))
        track = TRACKS[self.track]
        if self.epochs is not None and self.epochs > track.epochs:
            raise ValueError(f"epochs must be at most {track.epochs} in the track {self.track}, got {self.epochs}")
        return track
