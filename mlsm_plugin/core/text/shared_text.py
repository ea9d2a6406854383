"""Find texts that are trained on twice, or used for both training and evaluation, by hashes of their lines."""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.text.text_files import progress_bar, read_lines

COMPARED_LINES = 1 << 16  # distinct lines of each held-out text; in longer texts, the lines with the smallest hashes
COMPARED_LINES_OF_TRAINING = 256  # lines of each file, to find copies of it
LONG_LINE = 20  # characters; shorter lines, such as "Yes.", are equal by chance and only count if no line is longer
LARGEST_SHARED = 0.05  # share of held-out lines. In prose cut at random, 0 to 1.4 % of the lines are equal by chance.
FEWEST_COMPARED = 64  # lines of the shorter of two texts; of fewer, most may be headings that both have
SHARE_OF_A_COPY = 0.8  # share of a file's lines in another file
NAMED_COPIES = 3
LARGEST_HASH = 1 << 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamedText:
    """The lines of a text, which are read once, and its name in warnings."""

    name: str
    lines: Iterable[str]


@dataclass
class LineSample:
    """The hashes of distinct lines: all hashes of a short text, and the ``size`` smallest of a longer text."""

    size: int
    long: set[int] = field(default_factory=set)
    short: set[int] = field(default_factory=set)
    limits: dict[str, int] = field(default_factory=lambda: {"long": LARGEST_HASH, "short": LARGEST_HASH})

    def hashes(self) -> set[int]:
        """The smallest hashes of the lines that count; they do not depend on the order of lines."""
        return set(sorted(self.long or self.short)[: self.size])

    def add(self, line: str, hashed: int) -> None:
        """Add a line that is not blank."""
        kind = "long" if len(line) >= LONG_LINE else "short"
        if hashed >= self.limits[kind]:
            return
        sample = self.long if kind == "long" else self.short
        sample.add(hashed)
        if len(sample) > 2 * self.size:
            smallest = sorted(sample)[: self.size]
            sample.intersection_update(smallest)
            self.limits[kind] = smallest[-1]


def warn_of_shared_files(train: Sequence[PathLike], *held_out: Sequence[PathLike]) -> None:
    """Warn of ``held_out`` files, such as validation text, that share lines with ``train``, and of copies in ``train``.

    The files are compared by their lines, so compressed copies, copies with other lines added, and parts are found,
    too. Files that share a few short lines by chance cause no warning. ValueError and OSError as for
    :func:`.read_lines`.
    """
    others = [path for paths in held_out for path in paths]
    if len(train) == 1 and not others:
        return
    with progress_bar("comparing", sum(os.path.getsize(path) for path in (*train, *others))) as bar:
        held_out_texts = [NamedText(str(path), read_lines(path, bar.update)) for path in others]
        warn_of_shared_text([NamedText(str(path), read_lines(path, bar.update)) for path in train], held_out_texts)


def warn_of_shared_text(train: Sequence[NamedText], held_out: Sequence[NamedText]) -> None:
    """As :func:`warn_of_shared_files`, for texts with known lines. Memory does not grow with their length."""
    measured = [(text.name, _sample(text, COMPARED_LINES)[0]) for text in held_out]
    every_measured = set().union(*(lines for _, lines in measured))
    names = [text.name for text in train]
    trained_on = [_sample(text, COMPARED_LINES_OF_TRAINING, every_measured) for text in train]
    _warn_of_copies(names, [lines for lines, _ in trained_on])
    for name, lines in measured:
        counts = [len(lines & shared) for _, shared in trained_on]
        share = len(lines & set().union(*(shared for _, shared in trained_on))) / max(1, len(lines))
        if share > LARGEST_SHARED:
            most = names[counts.index(max(counts))]
            logger.warning(
                f"{name}: {share:.0%} of its lines are in the training text, too (most of them in {most}): what is "
                "measured on it says little about other text"
            )


def _sample(text: NamedText, size: int, measured: Set[int] = frozenset()) -> tuple[set[int], set[int]]:
    """The hashes of a sample of a text's lines, and of all its lines that are in ``measured``."""
    sample = LineSample(size)
    shared = set()
    for line in text.lines:
        visible = line.strip()
        if visible:
            hashed = int.from_bytes(blake2b(visible.encode(errors="surrogatepass"), digest_size=8).digest())
            sample.add(visible, hashed)
            if hashed in measured:
                shared.add(hashed)
    return sample.hashes(), shared


def _warn_of_copies(names: Sequence[str], samples: Sequence[set[int]]) -> None:
    """Warn of texts that are copies of an earlier text, or one of which has most lines of the other.

    The sample of a longer text has smaller hashes, so only lines that would be in both samples are compared.
    """
    limits = [LARGEST_HASH if len(lines) < COMPARED_LINES_OF_TRAINING else max(lines) for lines in samples]
    first_with: dict[int, int] = {}
    copies = []
    for number, lines in enumerate(samples):
        earlier = Counter(first_with[line] for line in lines if line in first_with)
        for line in lines:
            first_with.setdefault(line, number)
        for original, count in earlier.most_common(1):
            limit = min(limits[number], limits[original])
            comparable = sum(line <= limit for line in lines)
            comparable_before = sum(line <= limit for line in samples[original])
            is_copy = count > SHARE_OF_A_COPY * len(lines)
            fewest = min(comparable, comparable_before)
            if is_copy or (fewest >= FEWEST_COMPARED and count > SHARE_OF_A_COPY * fewest):
                longer, shorter = (number, original) if comparable >= comparable_before else (original, number)
                copies.append(f"{names[longer]} has the lines of {names[shorter]}")
    if copies:
        more = f", and so have {len(copies) - NAMED_COPIES:,} more files" if len(copies) > NAMED_COPIES else ""
        logger.warning(f"{'; '.join(copies[:NAMED_COPIES])}{more}: they are trained on more than once")
