"""What a card says of a new model, and of one without a masked-LM head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlsm_plugin.huggingface.adaptation import MODELS
from mlsm_plugin.huggingface.model_card import PAPERS, CardFacts, write_card


@pytest.fixture
def facts(tmp_path: Path) -> CardFacts:
    (tmp_path / "text.txt").write_text("a name", encoding="utf-8")
    return CardFacts(
        model="folder/encoder",
        student="4x256",
        objective="mlsm",
        updates=1200,
        texts=[tmp_path / "text.txt"],
        before={},
        after={"kl": 2.5},
        settings={"seed": 1},
        fills_masks=False,
    )


def test_a_new_model_names_where_its_codes_come_from(facts: CardFacts, tmp_path: Path) -> None:
    write_card(tmp_path, facts)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "# 4x256 from encoder" in card
    assert "A new model of the size 4x256, whose codes or tokenizer come from `encoder`." in card
    assert "trained for 1,200 updates" in card
    assert "pipeline_tag: feature-extraction" in card
    assert "| kl |  | 2.5000 |" in card
    assert "- seed: 1" in card


def test_every_objective_has_a_paper(facts: CardFacts, tmp_path: Path) -> None:
    assert set(PAPERS) == set(MODELS)
    for objective in MODELS:
        write_card(tmp_path, replace(facts, objective=objective, student=None))
        assert PAPERS[objective] in (tmp_path / "README.md").read_text(encoding="utf-8")
