"""The ledger of a run: the words of its text, how many words it may see, and how many it has seen."""

from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from mlsm_plugin.core.files.atomic_files import read_json, write_json
from mlsm_plugin.core.files.json_checks import Check, check_json, fields, list_of, number, optional, text, values, whole

LEDGER = "ledger.json"
TEXT = fields({"file": text, "words": whole(), "sha256": text, "of": text})
CHECKPOINT = fields({"words": whole(), "updates": whole(), "sha256": text})
# the readers of a text
OF_RUN = "training and tokenizer"
OF_AUXILIARY = "auxiliary model"

Entry = dict[str, Any]  # a text or a checkpoint, as JSON


def must(check: Check) -> dict[str, Check]:
    """The metadata of a field whose JSON must pass ``check``."""
    return {"check": check}


@dataclass
class Ledger:
    """Everything that the rules of a track limit. All numbers are words; exposures include repetitions."""

    track: str = field(metadata=must(text))
    words_allowed: int = field(metadata=must(whole(1)))
    exposures_allowed: int = field(metadata=must(whole(1)))
    objective: str = field(metadata=must(text))
    epochs: int = field(metadata=must(whole(1)))
    texts: list[Entry] = field(metadata=must(list_of(TEXT)))  # "of" names the reader
    auxiliary_exposures: int = field(metadata=must(whole()))
    planned: int = field(metadata=must(whole(1)))  # exposures of this run
    names: dict[str, int] = field(metadata=must(values(whole(1))))  # names of checkpoints, with the words of each
    seen: int = field(default=0, metadata=must(whole()))
    seconds: dict[str, float] = field(default_factory=dict, metadata=must(values(number)))
    license: str | None = field(default=None, metadata=must(optional(text)))
    checkpoints: dict[str, Entry] = field(default_factory=dict, metadata=must(values(CHECKPOINT)))

    @property
    def words(self) -> int:
        """The words of all text."""
        return sum(text["words"] for text in self.texts)

    @property
    def exposures(self) -> int:
        """The exposures so far, including those of an auxiliary model."""
        return self.auxiliary_exposures + self.seen

    def write(self, run: Path) -> None:
        """Write ``ledger.json`` of a run, atomically."""
        write_json(run / LEDGER, {**asdict(self), "words": self.words, "exposures": self.exposures})

    @classmethod
    def read(cls, run: Path) -> "Ledger":
        """The ledger of a run; FileNotFoundError if there is none, ValueError if it is damaged."""
        if not (run / LEDGER).is_file():
            raise FileNotFoundError(f"{run} has no {LEDGER}; pass the --output of `mlsm babylm train`")
        checks = {entry.name: entry.metadata["check"] for entry in dataclass_fields(cls)}
        content = check_json(read_json(run / LEDGER), fields(checks), run / LEDGER)
        values_of_fields = {name: content[name] for name in checks}
        return cls(**values_of_fields)

    def table(self) -> str:
        """The ledger as a readable table."""
        left = self.exposures_allowed - self.exposures
        rows = [(f"{text['file']} ({text['of']})", text["words"], "") for text in self.texts]
        rows.append(("all text", self.words, f"of {self.words_allowed:,} of the track {self.track}"))
        if self.auxiliary_exposures:
            rows.append(("seen by the auxiliary model", self.auxiliary_exposures, ""))
        rows.append(("seen", self.seen, f"of {self.planned:,} in {self.epochs} epochs; the track leaves {left:,}"))
        for name, checkpoint in self.checkpoints.items():
            rows.append((name, checkpoint["words"], f"after {checkpoint['updates']:,} updates"))
        width = max(len(name) for name, *_ in rows)
        return "\n".join(f"{name:{width}}  {words:>13,} words  {what}".rstrip() for name, words, what in rows)
