"""Labels from a text are those of an index of the same text."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.explore.property_names import labels_of_adaptation, labels_of_text
from mlsm_plugin.reports.adapted_texts import summarize_adaptation
from mlsm_plugin.search.index import SearchIndex
from mlsm_plugin.search.text_codes import open_text_coder
from tests.adapted_student import adapted_student


def test_labels_of_a_text_are_those_of_an_index_of_it(folders: tuple[Path, Path, Path]) -> None:
    model, dictionary, index = folders
    labels = labels_of_text(index.parent / "docs.txt", open_text_coder(model, dictionary))
    assert labels == SearchIndex(index).labels
    with pytest.raises(FileNotFoundError):
        labels_of_text(index / "none.txt", open_text_coder(model, dictionary))


def test_labels_of_an_adaptation_have_the_tokens_of_its_report(
    tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]
) -> None:
    output = adapted_student(tmp_path_factory, english_text[0])
    tokenizer = HuggingFaceTokenizer(output / "model")
    labels = labels_of_adaptation(output, tokenizer)
    summaries, _ = summarize_adaptation(output, "train", max_tokens=10**9)
    for label, summary in zip(labels, summaries, strict=True):
        assert label.startswith(summary.label[0] if summary.label else "")
    assert labels_of_adaptation(output / "model", tokenizer) == []
