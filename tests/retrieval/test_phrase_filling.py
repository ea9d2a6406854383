"""Filling masks with phrases, compared with a slow enumeration of the whole text."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlsm_plugin import hub
from mlsm_plugin.core.masking.word_boundaries import PieceClasses, word_boundaries
from mlsm_plugin.retrieval import PhraseDatastore
from mlsm_plugin.retrieval.phrase_filling import PhraseFiller
from mlsm_plugin.retrieval.settings import FillingSettings
from tests.retrieval.conftest import Retrieval

TEXT = "The <mask> is called with one argument."


@pytest.fixture(scope="module")
def model(retrieval: Retrieval) -> Any:
    return hub.from_pretrained(retrieval.checkpoint)


@pytest.fixture(scope="module")
def store(retrieval: Retrieval) -> PhraseDatastore:
    return PhraseDatastore(retrieval.store)


def all_phrases(
    model: Any, store: PhraseDatastore, alpha: float, max_length: int, k: int | None = None
) -> dict[str, float]:
    """Spans of whole words of every block, with one of the ``k`` best starts or ends: p(start) + p(end) by phrase.

    The probabilities are those among the k best.
    """
    dictionary = model.task.source_dictionary
    starts, ends = PhraseFiller(model, store).queries(TEXT)
    keys = torch.from_numpy(store.keys_of(np.arange(len(store)))).double()
    scores_of = [keys @ query.double() / math.sqrt(32) for query in (starts[0], ends[0])]
    best = [scores.topk(k or len(store)) for scores in scores_of]
    probability = [
        (scores - top.values.logsumexp(dim=0)).exp().numpy() for scores, top in zip(scores_of, best, strict=True)
    ]
    retrieved = [set(top.indices.tolist()) for top in best]
    pieces = PieceClasses.of_vocabulary(dictionary.symbols, [0, 1, 2, 3, dictionary.index("<mask>")])
    scores: dict[str, float] = {}
    limits = [*store.block_starts.tolist(), len(store.tokens)]
    for first, last in itertools.pairwise(limits):
        ids = np.asarray(store.tokens[first:last], dtype=np.int64)
        begins, stops = word_boundaries(ids, np.zeros(len(ids), np.int64), pieces)
        for start in np.flatnonzero(begins):
            for length in range(1, max_length + 1):
                part = ids[start : start + length]
                if len(part) < length or (part < 4).any():
                    break
                if not stops[start + length - 1]:
                    continue
                rows = store.rows_of(np.array([first + start, first + start + length - 1]))
                if int(rows[0]) not in retrieved[0] and int(rows[1]) not in retrieved[1]:
                    continue
                text = "".join(dictionary[int(token)] for token in part).replace("\u2581", " ").strip()
                score = probability[0][rows[0]] + probability[1][rows[1]]
                scores[text] = scores.get(text, 0.0) + score * length**alpha
    return scores


@pytest.mark.parametrize("alpha", [float("nan"), float("inf")])
def test_powers_that_are_not_finite_are_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"^length_alpha must be a finite number, got {alpha}$"):
        FillingSettings(length_alpha=alpha)
    assert FillingSettings(length_alpha=-0.5).length_alpha == -0.5


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 1.5])
def test_candidates_are_those_of_the_whole_text(model: Any, store: PhraseDatastore, alpha: float) -> None:
    settings = FillingSettings(k=len(store), length_alpha=alpha, max_length=4)
    filler = PhraseFiller(model, store, settings)
    starts, ends = filler.queries(TEXT)
    found = filler.candidates(starts[0], ends[0])
    expected = sorted(all_phrases(model, store, alpha, 4).items(), key=lambda item: -item[1])
    assert len(found) > 50
    for candidate, (_, score) in zip(found, expected, strict=False):
        assert candidate.score == pytest.approx(score, rel=1e-3)
    by_text = dict(expected)
    assert all(candidate.score == pytest.approx(by_text[candidate.phrase], rel=1e-3) for candidate in found[:200])


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 5, 40])
def test_candidates_begin_or_end_where_a_key_was_retrieved(model: Any, store: PhraseDatastore, k: int) -> None:
    starts, ends = PhraseFiller(model, store).queries(TEXT)
    found = PhraseFiller(model, store, FillingSettings(k=k, max_length=4)).candidates(starts[0], ends[0])
    expected = all_phrases(model, store, 0.0, 4, k)
    assert len(expected) > 0
    assert len(found) == min(len(expected), 50)
    assert {candidate.phrase for candidate in found} <= set(expected)
    assert all(candidate.score == pytest.approx(expected[candidate.phrase], rel=2e-3) for candidate in found)


def test_sources_show_the_phrase_in_its_sentence(model: Any, store: PhraseDatastore) -> None:
    for candidate in PhraseFiller(model, store, FillingSettings(k=50)).fill(TEXT, topk=10)[0]:
        assert 1 <= len(candidate.occurrences) == len(candidate.contexts) <= 3
        scores = [occurrence.score for occurrence in candidate.occurrences]
        assert scores == sorted(scores, reverse=True)
        assert candidate.score >= sum(scores) - 1e-6
        for context in candidate.contexts:
            assert f"[[{candidate.phrase}]]" in context
            assert "</s>" not in context


def test_fewer_retrieved_keys_give_a_subset(model: Any, store: PhraseDatastore) -> None:
    few, many = (PhraseFiller(model, store, FillingSettings(k=k)).fill(TEXT, topk=10**6)[0] for k in (3, 400))
    assert 0 < len(few) < len(many)
    assert {candidate.phrase for candidate in few} <= {candidate.phrase for candidate in many}
    pieces = PhraseFiller(model, store, FillingSettings(k=3, any_pieces=True)).fill(TEXT, topk=10**6)[0]
    assert len(pieces) > len(few)


def test_several_masks_are_filled_each(model: Any, store: PhraseDatastore) -> None:
    found = model.fill_phrase("The <mask> returns a <mask> of names.", store, topk=4)
    assert [len(candidates) for candidates in found] == [4, 4]
    single = model.fill_phrase(TEXT, str(store.directory), topk=4)
    assert single == PhraseFiller(model, store).fill(TEXT, topk=4)[0]
    assert len(single) == 4


def test_every_setting_of_filling_can_be_named(model: Any, store: PhraseDatastore) -> None:
    settings = {"k": 3, "max_length": 4, "length_alpha": 0.5, "any_pieces": True, "context_tokens": 2}
    settings["contexts"] = 1
    assert settings.keys() == FillingSettings.__dataclass_fields__.keys()
    found = model.fill_phrase(TEXT, store, 10**6, **settings)
    assert found == PhraseFiller(model, store, FillingSettings(**settings)).fill(TEXT, topk=10**6)[0]
    assert len(found) < len(model.fill_phrase(TEXT, store, 10**6, **{**settings, "k": 400}))


def test_long_text_is_cut_around_its_masks(model: Any, store: PhraseDatastore) -> None:
    filler = PhraseFiller(model, store)
    masks = list(filler.span_masks)
    words = "the statement is executed and the value returned " * 30
    for text in (f"{words} <mask>", f"<mask> {words}", f"{words} <mask> {words}", f"{words} a <mask> b <mask> {words}"):
        tokens, places = filler.encode(text)
        assert len(tokens) == 64
        assert (int(tokens[0]), int(tokens[-1])) == (0, 2)
        assert [tokens[place : place + 2].tolist() for place in places] == [masks] * text.count("<mask>")
        assert filler.was_cut(text)
        assert filler.queries(text)[0].shape == (text.count("<mask>"), 32)
    assert not filler.was_cut(TEXT)
    tokens, places = filler.encode(TEXT)
    assert tokens[places[0] : places[0] + 2].tolist() == masks
    with pytest.raises(ValueError, match="tokens apart, but the model has 64 positions: use fewer masks"):
        filler.encode(f"<mask> {words} <mask>")
    with pytest.raises(ValueError, match="the text has no <mask>"):
        filler.encode("no mask")


def test_text_is_continued(model: Any, store: PhraseDatastore) -> None:
    filler = PhraseFiller(model, store)
    once, twice = (filler.continue_text("The value", steps=steps) for steps in (1, 2))
    assert once == f"The value {filler.fill('The value <mask>', topk=1)[0][0].phrase}"
    assert twice.startswith(once)
    assert len(twice) > len(once)


def test_checkpoint_moves_with_its_folder(retrieval: Retrieval, tmp_path: Path, store: PhraseDatastore) -> None:
    import shutil

    moved = shutil.copytree(retrieval.checkpoint.parent, tmp_path / "moved")
    store.check_belongs_to(moved / "checkpoint_last.pt")
    model = hub.from_pretrained(moved)
    assert len(model.fill_phrase(TEXT, store, topk=2)) == 2
    state = torch.load(moved / "checkpoint_last.pt", weights_only=True)
    next(iter(state["model"].values())).add_(1)
    torch.save(state, moved / "checkpoint_last.pt")
    with pytest.raises(ValueError, match="was built with another checkpoint"):
        hub.from_pretrained(moved).fill_phrase(TEXT, store, topk=2)
