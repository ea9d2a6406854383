"""The card of an adapted model: its training text, its settings, and its gain on held-out text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open, sha256_of_files
from mlsm_plugin.core.files.hf_files import HF_PREFIX
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.version import __version__

CARD = "README.md"
WITH_KEPT_VECTORS = "mlm, vectors kept"
PAPERS = {  # by objective
    "mlm": "masked language modelling (Devlin et al., 2019, [N19-1423](https://aclanthology.org/N19-1423))",
    WITH_KEPT_VECTORS: "masked language modelling (Devlin et al., 2019, "
    "[N19-1423](https://aclanthology.org/N19-1423)) and a loss that keeps the hidden states of unmasked tokens (Jung "
    "et al., 2016, [1607.00122](https://arxiv.org/abs/1607.00122))",
    "mlsm": "masked latent semantic modelling (Berend, 2023, "
    "[findings-acl.876](https://aclanthology.org/2023.findings-acl.876))",
    "mlsm+mlm": "masked latent semantic modelling together with masked language modelling (Berend, 2023, "
    "[findings-acl.876](https://aclanthology.org/2023.findings-acl.876))",
    "regression+mlm": "masked language modelling together with regression of another model's hidden states (Romero et "
    "al., 2015, [1412.6550](https://arxiv.org/abs/1412.6550))",
    "taco": "masked language modelling with a token-level contrastive loss (Fu et al., 2022, "
    "[acl-long.193](https://aclanthology.org/2022.acl-long.193))",
    "npm": "nonparametric masked language modelling (Min et al., 2023, [2212.01349](https://arxiv.org/abs/2212.01349))",
    "distill": "distillation of a teacher's predictions (Hinton et al., 2015, "
    "[1503.02531](https://arxiv.org/abs/1503.02531))",
    "distill-vectors": "distillation of a teacher's sentence vectors (Reimers and Gurevych, 2020, "
    "[2020.emnlp-main.365](https://aclanthology.org/2020.emnlp-main.365))",
}
UNITS = {  # others: nats
    "vector_loss": "mean squared error",
    "state_loss": "variances",
    "accuracy": "share",
    "contrastive_accuracy": "share",
}
QUALITY_HEADING = "## Before and after"
SETTINGS = "## Settings"
LEFT_OUT = "-"
INTERVAL = "In brackets: 95 % interval of the difference from the first row. "
OF_RETRIEVAL = (
    "nDCG@10 (higher is better): each of {sentences} held-out sentences has to find its passage among {passages}. "
)
OF_WORDS = "bits/token and bits/word (lower is better): cross entropy of masked words. "
PROBES = "Others: accuracy of a linear probe."
PROBES_ALONE = "All figures: accuracy of a linear probe."
TEXT = """---
library_name: transformers
pipeline_tag: {task}
---

# {title}

{origin} It was trained for {updates:,} updates with {objective}.

```python
from transformers import pipeline

pipeline("{task}", "PATH")
```

## Text

| file | SHA-256 |
| --- | --- |
{texts}

## Held-out text

{figures}

## Settings

{settings}

Made with mlsm_plugin {version}.
"""


@dataclass(frozen=True)
class CardFacts:
    """The contents of a card.

    Attributes:
        model: name of the original model.
        student: size of a new model that learned from it; None: the model itself was trained.
        objective: name of the objective.
        updates: number of updates.
        texts: training files.
        before, after: losses on held-out text, in nats.
        settings: other settings by name.
        fills_masks: whether the trained model has a trained masked-LM head.
    """

    model: str
    student: str | None
    objective: str
    updates: int
    texts: Sequence[PathLike]
    before: Mapping[str, float]
    after: Mapping[str, float]
    settings: Mapping[str, object]
    fills_masks: bool


def name_in_card(model: str) -> str:
    """How the card names a model: a hub name, or the end of a path, with the folder above a folder called ``model``."""
    name = model.removeprefix(HF_PREFIX)
    if not Path(name).exists():
        return name
    path = Path(name).resolve()
    return f"{path.parent.name}/{path.name}" if path.name == "model" else path.name


def write_card(folder: Path, facts: CardFacts) -> None:
    """Write the card of a model to its folder."""
    name = name_in_card(facts.model)
    origin = f"An adaptation of `{name}` to a text."
    if facts.student is not None:
        origin = f"A new model of the size {facts.student}, made with the help of `{name}`."
    rows = ["| loss | unit | before | after |", "| --- | --- | ---: | ---: |"]
    for loss, value in facts.after.items():
        before = facts.before.get(loss)
        begin = "" if before is None else f"{before:.4f}"
        rows.append(f"| {loss} | {UNITS.get(loss, 'nats')} | {begin} | {value:.4f} |")
    card = TEXT.format(
        task="fill-mask" if facts.fills_masks else "feature-extraction",
        title=f"{name}, {facts.objective}" if facts.student is None else f"{facts.student} from {name}",
        origin=origin,
        updates=facts.updates,
        objective=PAPERS[facts.objective],
        texts="\n".join(f"| {Path(path).name} | `{sha256_of_files(path)}` |" for path in facts.texts),
        figures="\n".join(rows),
        settings="\n".join(f"- {key}: {value}" for key, value in facts.settings.items()),
        version=__version__,
    )
    with atomic_open(folder / CARD, "w") as file:
        file.write(card)


def add_quality(folder: Path, quality: JsonObject) -> None:
    """Add a section with the figures of the models before and after to the card in a folder, if it has a card.

    ``quality`` has the figures of the ``models``, the numbers of ``sentences``, ``passages`` and ``lines`` that were
    measured, and ``notes``. The section replaces an earlier one.
    """
    path = folder / CARD
    if not path.exists():
        return
    sections = re.split(r"^(?=## )", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = [section for section in sections if not section.startswith(QUALITY_HEADING)]
    place = next((number for number, section in enumerate(sections) if section.startswith(SETTINGS)), len(sections))
    if place == len(sections):
        sections[-1] = f"{sections[-1].rstrip()}\n\n"
    sections.insert(place, _quality_section(quality))
    with atomic_open(path, "w") as file:
        file.write("".join(sections))


def _quality_section(quality: JsonObject) -> str:
    models: Mapping[str, JsonObject] = quality["models"]
    parts = [QUALITY_HEADING]
    columns = list(dict.fromkeys(name for model in models.values() for name in model["measures"]))
    if columns:
        rows = [["model", *columns], ["---", *["---:"] * len(columns)]]
        rows += [
            [name, *(_cell(model["measures"].get(column)) for column in columns)] for name, model in models.items()
        ]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
        parts.append(_explanation(quality))
    parts += quality["notes"]
    return "\n\n".join(parts) + "\n\n"


def _explanation(quality: JsonObject) -> str:
    """What the columns mean; a short held-out text lacks some."""
    of_text = OF_RETRIEVAL.format(**quality) if quality["sentences"] else ""
    if quality["lines"]:
        of_text += OF_WORDS
    return INTERVAL + of_text + (PROBES if of_text else PROBES_ALONE)


def _cell(measure: JsonObject | None) -> str:
    if measure is None:
        return LEFT_OUT
    interval = measure["difference_from_first"]
    difference = "" if interval is None else f" ({interval[0]:+.3f} to {interval[1]:+.3f})"
    return f"{measure['figure']:.3f}{difference}"
