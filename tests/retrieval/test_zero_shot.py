"""Zero-shot classification, compared with slow formulas."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlsm_plugin import hub
from mlsm_plugin.retrieval import PhraseDatastore
from mlsm_plugin.retrieval.phrase_filling import PhraseFiller
from mlsm_plugin.retrieval.zero_shot import (
    ParametricClassifier,
    RetrievalClassifier,
    read_texts,
    read_verbalizer,
    word_ids,
)
from tests.conftest import REPOSITORY, Pipeline
from tests.retrieval.conftest import Retrieval

VERBALIZER = {"a": ["the", "the target"], "b": ["is", "list"]}
TEXT = "The name is bound. It was <mask>."


@pytest.fixture(scope="module")
def filler(retrieval: Retrieval) -> PhraseFiller:
    return PhraseFiller(hub.from_pretrained(retrieval.checkpoint), PhraseDatastore(retrieval.store))


def test_labels_get_the_share_of_the_occurrences_of_their_words(filler: PhraseFiller) -> None:
    store = filler.datastore
    text = store.tokens.tolist()
    starts, ends = filler.queries(TEXT)
    weight = {"a": [0.0, 0.0], "b": [0.0, 0.0]}
    for label, words in VERBALIZER.items():
        for word in words:
            ids = word_ids(filler.interface, word)
            places = [place for place in range(len(text)) if text[place : place + len(ids)] == ids]
            assert places
            for place in places:
                for number, (query, at) in enumerate(((starts[0], place), (ends[0], place + len(ids) - 1))):
                    key = torch.from_numpy(store.keys_of(store.rows_of(np.array([at]))))[0]
                    weight[label][number] += math.exp(float(key @ query) / math.sqrt(32))
    totals = [sum(weight[label][number] for label in weight) for number in (0, 1)]
    expected = [sum(weight[label][number] / totals[number] for number in (0, 1)) / 2 for label in weight]
    found = RetrievalClassifier(filler, VERBALIZER).probabilities(TEXT)
    assert found.tolist() == pytest.approx(expected, rel=1e-3)
    few = RetrievalClassifier(filler, VERBALIZER, max_occurrences=2)
    assert len(few.owners) <= 8 < len(RetrievalClassifier(filler, VERBALIZER).owners)
    assert float(few.probabilities(TEXT).sum()) == pytest.approx(1)


def test_words_have_to_be_in_the_corpus(filler: PhraseFiller) -> None:
    with pytest.raises(ValueError, match="no word of the label 'c' is in the corpus: zebra quagga"):
        RetrievalClassifier(filler, {**VERBALIZER, "c": ["zebra quagga"]})
    with pytest.raises(ValueError, match="cannot write the word"):
        RetrievalClassifier(filler, {**VERBALIZER, "c": ["雪"]})


def test_repeated_words_count_once_and_labels_differ(filler: PhraseFiller, pipeline: Pipeline) -> None:
    repeated = {"a": ["the", "the target", "the", " the "], "b": ["is", "list", "is"]}
    model = hub.from_pretrained(pipeline.auxiliary)
    for classifier, argument in ((RetrievalClassifier, filler), (ParametricClassifier, model)):
        found, expected = (classifier(argument, words).probabilities(TEXT).tolist() for words in (repeated, VERBALIZER))
        assert found == expected
        with pytest.raises(ValueError, match=r"^the labels 'a' and 'c' have the same words; give each .* own$"):
            classifier(argument, {**VERBALIZER, "c": ["the target", "the", "the"]})
        with pytest.raises(ValueError, match=r"^all words of the label 'c' are words of 'a', too, so it is never"):
            classifier(argument, {**VERBALIZER, "c": ["the target"]})


def test_parametric_scores_are_those_of_the_masked_lm_head(pipeline: Pipeline) -> None:
    model = hub.from_pretrained(pipeline.auxiliary)
    dictionary = model.task.source_dictionary
    words = {"a": ["the", "a"], "b": ["is"]}
    assert all(len(word_ids(model, word)) == 1 for group in words.values() for word in group)
    line = "<s> " + " <mask> ".join(model.bpe.encode(part.strip()) for part in TEXT.split("<mask>")) + " </s>"
    tokens = dictionary.encode_line(line, append_eos=False, add_if_not_exist=False).long()
    logits = model.model(tokens[None])[0][0, tokens.tolist().index(dictionary.index("<mask>"))]
    probability = logits.softmax(dim=-1)
    scores = [sum(float(probability[word_ids(model, word)[0]]) for word in group) for group in words.values()]
    found = ParametricClassifier(model, words).probabilities(TEXT)
    assert found.tolist() == pytest.approx((np.array(scores) / sum(scores)).tolist(), rel=5e-4)
    long_text = "the value of it " * 60 + "It was <mask>."
    assert float(ParametricClassifier(model, VERBALIZER).probabilities(long_text).sum()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tgood\nb bad\n", "line 2: expected a label, a tab, and words with commas between them"),
        ("a\t, ,\nb\tbad\n", "line 1: expected a label"),
        ("a\tgood\na\tgreat\nb\tbad\n", "line 2: 'a' has words already; give each label one line"),
        ("# nothing\na\tgood\n", "has 1 labels; at least 2 are needed"),
        ("# a\tgood\nb\tbad\n", "line 1: a comment has no tab, and a label does not begin with '# '"),
    ],
)
def test_verbalizers_of_another_form_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "v.tsv").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_verbalizer(tmp_path / "v.tsv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tgood\nc\tbad\n", r"line 2: label 'c' is not in the verbalizer \(a, b\)"),
        ("a\tgood\nb\t \n", "line 2 has no text"),
        ("a\tgood\nbad\n", "only some lines have a label"),
        ("a\tgood\tvery\n", "line 1 has more than one tab; expected label and text, or text alone"),
        ("\n", "holds no text"),
    ],
)
def test_inputs_of_another_form_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "i.tsv").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_texts(tmp_path / "i.tsv", ["a", "b"])


def test_labels_may_begin_with_a_hash(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "v.tsv").write_text("# topics\n#war\tarmy\n#War\tarmies\n#art\tmusic\n", encoding="utf-8")
    assert read_verbalizer(tmp_path / "v.tsv") == {"#war": ["army"], "#War": ["armies"], "#art": ["music"]}
    assert caplog.messages == [f"{tmp_path / 'v.tsv'}: the labels '#War', '#war' look alike, but count as 2 classes"]


def test_verbalizers_of_the_example_are_read() -> None:
    for name, labels in (("sentiment", 2), ("subjectivity", 2), ("topic", 4)):
        path = REPOSITORY / "examples" / "npm" / f"{name}.tsv"
        assert len(read_verbalizer(path)) == labels
        assert re.search(r"^# template: .*\{\}.*<mask>", path.read_text(encoding="utf-8"))


def test_single_mode_models_retrieve_a_token_for_one_mask(filler: PhraseFiller, monkeypatch: Any) -> None:
    monkeypatch.setattr(filler, "single", True)
    tokens, places = filler.encode(TEXT)
    assert tokens[places[0]] == filler.span_masks[0]
    assert tokens[places[0] + 1] != filler.span_masks[1]
    found = filler.fill(TEXT, topk=5)[0]
    assert all(occurrence.length == 1 for candidate in found for occurrence in candidate.occurrences)
    assert 0 < sum(candidate.score for candidate in found) <= 1
