"""The table of docs/using_models.md names every figure that a criterion, a model of the Trainer or an SAE logs."""

from __future__ import annotations

import re

from mlsm_plugin.core.sparse_coding.sae_training import Figures
from mlsm_plugin.huggingface.kept_states_model import KeptStatesModel
from mlsm_plugin.huggingface.latent_semantic_model import LatentSemanticModel
from mlsm_plugin.huggingface.pretraining_model import MaskedLmModel, SpanContrastiveModel, TokenContrastiveModel
from mlsm_plugin.huggingface.state_regression_model import StateRegressionModel
from tests.conftest import PLUGIN
from tests.docs.pages import read

SECTION = read("docs/using_models.md").split("## Watch a run, and plot curves")[1].split("\n## ")[0]
ROWS = [[cell.strip() for cell in row.split("|")[1:-1]] for row in SECTION.splitlines() if row.startswith("|")]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_0-9]+)`", text))


def test_the_table_has_what_the_criterions_log() -> None:
    found: set[str] = set()
    for path in (PLUGIN / "fairseq_plugin").rglob("*.py"):
        code = path.read_text(encoding="utf-8")
        for name in re.findall(r"(?:means\.log|metrics\.log_\w+)\(\s*f?\"([\w{}]+)\"", code):
            found |= {name.replace("{end}", end) for end in ("start", "end")}
    assert len(found) > 15
    fairseq = {"loss", "ppl"}  # of its own masked_lm and cross_entropy
    assert names_in(" ".join(row[2] for row in ROWS)) == {name for name in found if not name.startswith("_")} | fairseq


def test_the_table_has_what_the_trainer_logs() -> None:
    models = (
        MaskedLmModel,
        KeptStatesModel,
        LatentSemanticModel,
        StateRegressionModel,
        TokenContrastiveModel,
        SpanContrastiveModel,
    )
    of_models = {name for model in models for name in model.figures}
    shown = {name for row in ROWS for name in names_in(row[2] if row[3] == "the same" else row[3])}
    assert shown == of_models | {"loss"}


def test_the_page_has_what_the_training_of_an_autoencoder_logs() -> None:
    assert set(Figures._fields) <= names_in(SECTION.split("The training of a sparse autoencoder")[1])
