"""What a card says of a new model, and of one without a masked-LM head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlsm_plugin.huggingface.adaptation_settings import MODELS
from mlsm_plugin.huggingface.model_card import (
    PAPERS,
    WITH_KEPT_VECTORS,
    CardFacts,
    add_quality,
    name_in_card,
    write_card,
)


@pytest.fixture
def facts(tmp_path: Path) -> CardFacts:
    (tmp_path / "text.txt").write_text("a name", encoding="utf-8")
    (tmp_path / "encoder").mkdir()
    return CardFacts(
        model=str(tmp_path / "encoder"),
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
    assert "A new model of the size 4x256, made with the help of `encoder`." in card
    assert "trained for 1,200 updates" in card
    assert "pipeline_tag: feature-extraction" in card
    assert "| kl | nats |  | 2.5000 |" in card
    assert "- seed: 1" in card


def test_a_model_has_a_name_that_tells_it_apart(tmp_path: Path) -> None:
    (tmp_path / "small" / "model").mkdir(parents=True)
    assert name_in_card(str(tmp_path / "small")) == "small"
    assert name_in_card(str(tmp_path / "small" / "model")) == "small/model"
    assert name_in_card(f"hf:{tmp_path}/small") == "small"
    assert name_in_card("hf:sentence-transformers/all-MiniLM-L6-v2") == "sentence-transformers/all-MiniLM-L6-v2"


def test_every_objective_has_a_paper(facts: CardFacts, tmp_path: Path) -> None:
    objectives = {*MODELS, WITH_KEPT_VECTORS}
    assert set(PAPERS) == objectives
    for objective in objectives:
        write_card(tmp_path, replace(facts, objective=objective, student=None))
        assert PAPERS[objective] in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_the_comparison_stands_before_the_settings_once(facts: CardFacts, tmp_path: Path) -> None:
    write_card(tmp_path, facts)
    card = tmp_path / "README.md"
    card.write_text(card.read_text(encoding="utf-8") + "\n## License\n\nmine\n", encoding="utf-8")
    first = {"nDCG@10": {"figure": 0.5, "difference_from_first": None}}
    second = {"nDCG@10": {"figure": 0.25, "difference_from_first": [-0.3, -0.2]}}
    models = {"before": {"measures": first}, "after": {"measures": second}}
    for notes in ([], ["It got worse."]):
        add_quality(tmp_path, {"models": models, "sentences": 200, "passages": 300, "lines": 400, "notes": notes})
    text = card.read_text(encoding="utf-8")
    assert text.count("## Before and after") == 1
    assert "| after | 0.250 (-0.300 to -0.200) |" in text
    assert text.index("kl | nats |  | 2.5000") < text.index("It got worse.") < text.index("## Settings\n\n- seed: 1")
    assert text.endswith("\n## License\n\nmine\n")
    assert "each of 200 held-out sentences has to find its passage among 300" in text
    add_quality(tmp_path, {"models": models, "sentences": 0, "passages": 0, "lines": 20, "notes": ["left out"]})
    text = card.read_text(encoding="utf-8")
    assert "bits/token and bits/word (lower is better): cross entropy of masked words. Others: accuracy of" in text
    assert "each of 0" not in text
    add_quality(tmp_path, {"models": models, "sentences": 0, "passages": 0, "lines": 0, "notes": ["left out"]})
    text = card.read_text(encoding="utf-8")
    assert "All figures: accuracy of a linear probe." in text
    assert "masked words" not in text
    unmeasured = {name: {"measures": {}} for name in models}
    add_quality(tmp_path, {"models": unmeasured, "sentences": 0, "passages": 0, "lines": 6, "notes": ["left out"]})
    assert "## Before and after\n\nleft out\n" in card.read_text(encoding="utf-8")
    add_quality(tmp_path, {"models": {}, "sentences": 0, "passages": 0, "lines": 0, "notes": ["left out"]})
    assert "It got worse." not in card.read_text(encoding="utf-8")
    card.unlink()
    add_quality(tmp_path, {"models": {}, "sentences": 0, "passages": 0, "lines": 0, "notes": []})
    assert not card.exists()
