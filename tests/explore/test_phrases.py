"""Phrases of a datastore on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.explore import page
from mlsm_plugin.explore.explorer import Explorer
from mlsm_plugin.explore.html import phrases_html
from mlsm_plugin.explore.phrases import Phrases
from mlsm_plugin.search.text_codes import open_text_coder
from tests.retrieval.conftest import Retrieval, retrieval  # noqa: F401  (a fixture)


@pytest.mark.slow
def test_masks_are_filled_with_phrases_and_their_sources(
    retrieval: Retrieval,  # noqa: F811
    folders: tuple[Path, Path, Path],
) -> None:
    phrases = Phrases(retrieval.checkpoint, retrieval.store)
    (candidates,) = phrases.of_masks("The <mask> of a function", count=2)
    assert len(candidates) == 2
    assert candidates[0].score >= candidates[1].score
    assert f"[[{candidates[0].phrase}]]" in candidates[0].contexts[0].replace("  ", " ")
    assert f"<mark>{candidates[0].phrase}</mark>" in phrases_html([candidates])
    with pytest.raises(ValueError, match="no <mask>"):
        phrases.of_masks("The name")
    explorer = Explorer(open_text_coder(folders[0], folders[1]), phrases=phrases)
    assert "<mark>" in page.phrases(explorer, "The <mask> of a function")
    own_mask = explorer.coder.tokenizer.backend.decode([explorer.coder.tokenizer.mask_id], skip_special_tokens=False)
    assert own_mask != "<mask>"
    filled = page.phrases(explorer, f"The {own_mask} of a function")
    assert filled == page.phrases(explorer, "The <mask> of a function")
    assert "Write &lt;mask&gt; in the text" in page.phrases(explorer, "The name")
    pytest.importorskip("gradio")
    labels = [item["props"].get("value") for item in page.make_page(explorer).config["components"]]
    assert "### Phrases for the masks" in labels
    assert "### Documents with these properties" not in labels
