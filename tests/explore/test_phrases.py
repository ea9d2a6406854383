"""Phrases of a datastore on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.explore.html import phrases_html
from mlsm_plugin.explore.phrases import Phrases
from tests.retrieval.conftest import Retrieval, retrieval  # noqa: F401  (a fixture)


@pytest.mark.slow
def test_masks_are_filled_with_phrases_and_their_sources(retrieval: Retrieval, tmp_path: Path) -> None:  # noqa: F811
    phrases = Phrases(retrieval.checkpoint, retrieval.store)
    (candidates,) = phrases.of_masks("The <mask> of a function", count=2)
    assert len(candidates) == 2
    assert candidates[0].score >= candidates[1].score
    assert f"[[{candidates[0].phrase}]]" in candidates[0].contexts[0].replace("  ", " ")
    assert f"<mark>{candidates[0].phrase}</mark>" in phrases_html([candidates])
    with pytest.raises(ValueError, match="no <mask>"):
        phrases.of_masks("The name")
