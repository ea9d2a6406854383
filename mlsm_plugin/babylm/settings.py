"""The tracks of the BabyLM challenge, and the settings of a run. Imports nothing slow: commands' help needs it."""

import re
from dataclasses import dataclass

from mlsm_plugin.core.files.settings import check, option

MOST_EPOCHS = 10
FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}  # by the ending of a number
BABYLM_OBJECTIVES = ("mlm", "mlsm+mlm", "taco")
CUSTOM = "custom"
CHECKPOINTS = "checkpoints"  # subfolder of a run with the exported models
TEXT_FOLDER = "text"  # subfolder of a run with the words that it is trained on
MAIN = "main"  # the last model


@dataclass(frozen=True)
class Track:
    """The limits of a track: words in all text, and how often the text may be seen (BabyLM challenge, 2026)."""

    words: int
    epochs: int
    first: int  # the number of words of the first checkpoint, a power of ten

    @property
    def exposures(self) -> int:
        """The most words that may be seen, repetitions included."""
        return self.words * self.epochs

    def checkpoints(self, exposures: int) -> dict[str, int]:
        """The names of the checkpoints of a run that sees ``exposures`` words, each with its number of words.

        There are nine per power of ten: ``chck_1M``, ..., ``chck_9M``, ``chck_10M``, ``chck_20M``, ...
        """
        counts: list[int] = []
        step = self.first
        while step <= exposures:
            counts += [step * number for number in range(1, 10) if step * number <= exposures]
            step *= 10
        return {name_of(words): words for words in counts}


TRACKS = {
    "strict": Track(100_000_000, MOST_EPOCHS, 1_000_000),
    "strict-small": Track(10_000_000, MOST_EPOCHS, 1_000_000),
}


def name_of(words: int) -> str:
    """The name of a checkpoint, such as ``chck_1M`` or ``chck_1000M``; ``chck_200K`` or ``chck_30`` in small runs."""
    ending = next(ending for ending in ("M", "K", "") if words % FACTORS[ending] == 0)
    return f"chck_{words // FACTORS[ending]}{ending}"


def words_from(text: str) -> int:
    """The number in a text such as ``7.7M``; ValueError if it is not a number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.replace(",", "").replace("_", "").upper())
    words = round(float(match[1]) * FACTORS[match[2]]) if match else 0
    if words < 1:
        raise ValueError(f"words must be a number such as 7.7M, got {text!r}")
    return words


@dataclass(frozen=True)
class BabylmSettings:
    """The objective and the limits of a run. ValueError if a value is out of range, or does not fit the track."""

    track: str = option("strict-small", choices=(*TRACKS, CUSTOM), help="the track whose limits apply")
    words: str | None = option(
        None, metavar="N", help="largest number of words in all text, e.g. 7.7M; only with --track custom"
    )
    epochs: int | None = option(
        None,
        least=1,
        most=1000,
        help=f"how often the text is seen (default: as often as the track allows, at most {MOST_EPOCHS})",
    )
    objective: str = option("mlm", choices=BABYLM_OBJECTIVES, help="the training objective")
    auxiliary: str | None = option(
        None,
        metavar="RUN",
        help="for mlsm+mlm: the run of `mlsm babylm train` whose model provides the codes; the words that it has seen "
        "count, too (default: the model itself, as in `mlsm pretrain`)",
    )
    license: str | None = option(None, help="licence of the model, for its card, e.g. mit")

    def __post_init__(self) -> None:
        check(self)
        if (self.words is None) == (self.track == CUSTOM):
            raise ValueError("--words is only allowed with --track custom, which needs it; other tracks have a limit")
        if self.auxiliary and self.objective != "mlsm+mlm":
            raise ValueError(f"--auxiliary is only allowed with --objective mlsm+mlm, and not with {self.objective}")
        self.limits()

    def limits(self) -> Track:
        """The limits of the track; ValueError if ``epochs`` exceed them."""
        if self.words is not None:
            words = words_from(self.words)
            epochs = self.epochs or MOST_EPOCHS
            decades = len(str(words * epochs)) - 1
            return Track(words, epochs, 10 ** min(6, max(0, decades - 1)))
        track = TRACKS[self.track]
        if self.epochs is not None and self.epochs > track.epochs:
            raise ValueError(f"epochs must be at most {track.epochs} in the track {self.track}, got {self.epochs}")
        return track
