"""The card of a model: text, objective, ledger, figures, and citations."""

from pathlib import Path

from mlsm_plugin.babylm.ledger import Ledger
from mlsm_plugin.core.files.atomic_files import atomic_open, read_json

CARD = "README.md"
NAMES_AND_CITATIONS = {  # by objective
    "mlm": ("masked language modelling", "Devlin et al., 2019, [N19-1423](https://aclanthology.org/N19-1423)"),
    "mlsm+mlm": (
        "masked latent semantic modelling together with masked language modelling",
        "Berend, 2023, [findings-acl.876](https://aclanthology.org/2023.findings-acl.876)",
    ),
    "taco": (
        "masked language modelling with a token-level contrastive loss (TACO)",
        "Fu et al., 2022, [acl-long.193](https://aclanthology.org/2022.acl-long.193)",
    ),
}
CARD_TEXT = """---
{license}language: en
library_name: transformers
pipeline_tag: fill-mask
tags: [babylm, {track}]
---

# {title}

A {model} for masked language modelling, trained from scratch for the track {track} of the BabyLM challenge with
{objective}. This revision, `{name}`, has seen {words:,} words in {updates:,} updates.

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

model = AutoModelForMaskedLM.from_pretrained("REPOSITORY", revision="{name}")
tokenizer = AutoTokenizer.from_pretrained("REPOSITORY", revision="{name}")
```

## Text

Words are whitespace words (`wc -w`). The tokenizer was trained on the same text as the model.

| file | words | read by |
| --- | ---: | --- |
{texts}

## Ledger

| | words |
| --- | ---: |
| all text | {all_words:,} of {words_allowed:,} |
| seen by the run, in {epochs} epochs | {seen:,} of {planned:,} |
| seen by an auxiliary model | {auxiliary:,} |
| seen in all | {exposures:,} of {exposures_allowed:,} |

## Model

{size}

## Citation

- The objective: {citation}.
- The toolkit: mlsm_plugin.
"""
SIZES_IN_CONFIG = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")


def write_card(folder: Path, name: str, ledger: Ledger) -> None:
    """Write atomically the card of the exported model ``name`` (as in the ledger) of a run."""
    config = read_json(folder / "config.json")
    checkpoint = ledger.checkpoints[name]
    objective, citation = NAMES_AND_CITATIONS[ledger.objective]
    texts = "\n".join(f"| {text['file']} | {text['words']:,} | {text['of']} |" for text in ledger.texts)
    card = CARD_TEXT.format(
        license=f"license: {ledger.license}\n" if ledger.license else "",
        title=f"BabyLM {ledger.track}: {objective}",
        model=config["architectures"][0],
        size="\n".join(f"- {key}: {config[key]:,}" for key in SIZES_IN_CONFIG if key in config),
        name=name,
        track=ledger.track,
        objective=objective,
        citation=citation,
        texts=texts,
        words=checkpoint["words"],
        updates=checkpoint["updates"],
        epochs=ledger.epochs,
        seen=ledger.seen,
        planned=ledger.planned,
        words_allowed=ledger.words_allowed,
        exposures_allowed=ledger.exposures_allowed,
        all_words=ledger.words,
        auxiliary=ledger.auxiliary_exposures,
        exposures=ledger.exposures,
    )
    with atomic_open(folder / CARD, "w") as file:
        file.write(card)
