"""Retrieval, masked words, probes, similarity and their intervals, against slow and plain computations."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from mlsm_plugin.evaluation.encoder_quality import (
    Measure,
    Retrieval,
    bm25_gains,
    evaluate_encoder,
    linear_probe,
    make_retrieval,
    read_evaluation_data,
)
from mlsm_plugin.evaluation.quality_settings import QualitySettings
from mlsm_plugin.evaluation.sentence_encoders import open_sentence_encoder
from tests.tiny_models import TinyData

SETTINGS = QualitySettings(queries=20)


def documents(number: int) -> list[list[str]]:
    """Each line of a document has the word of the document."""
    return [[f"word{index} a b c d e line{line}" for line in range(5)] for index in range(number)]


def test_a_query_is_no_part_of_its_passage_and_is_found_by_its_words() -> None:
    retrieval = make_retrieval(documents(30), SETTINGS)
    assert (len(retrieval.queries), len(retrieval.passages)) == (20, 30)
    for query, source in zip(retrieval.queries, retrieval.sources, strict=True):
        assert query not in retrieval.passages[source]
        assert query.split()[0] in retrieval.passages[source].split()
    assert bm25_gains(retrieval).figure == 1.0
    assert make_retrieval(documents(30), SETTINGS) == retrieval
    assert make_retrieval(documents(30), QualitySettings(queries=20, seed=2)) != retrieval


def test_a_short_text_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="at least 20 are needed"):
        make_retrieval(documents(19), SETTINGS)


@pytest.fixture(scope="module")
def text(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = tiny.text.read_text().split()
    rng = random.Random(1)
    lines = [" ".join(rng.choices(words, k=8)) for _ in range(150)]
    path.write_text("\n".join(lines))
    return path


def test_all_measures_of_a_model(tiny: TinyData, text: Path, tmp_path: Path) -> None:
    lines = text.read_text().splitlines()
    labelled = "".join(f"{number % 3}\t{line}\n" for number, line in enumerate(lines[:60]))
    scored = "".join(f"{number}\t{lines[number]}\t{lines[number + 1]}\n" for number in range(20))
    (tmp_path / "labelled.tsv").write_text(labelled)
    (tmp_path / "pairs.tsv").write_text(scored)
    both = (tmp_path / "labelled.tsv", tmp_path / "labelled.tsv")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "labelled.tsv").write_text(scored)
    alike = read_evaluation_data([], [both], [tmp_path / "more" / "labelled.tsv"], SETTINGS)
    assert (list(alike.labelled), list(alike.similarity)) == (["labelled"], ["labelled-2"])
    data = read_evaluation_data([text], [both], [tmp_path / "pairs.tsv"], SETTINGS)
    encoder = open_sentence_encoder(tiny.model)
    measures = evaluate_encoder(encoder, data)
    assert list(measures) == ["nDCG@10", "bits/token", "bits/word", "labelled", "pairs"]

    vectors = [encoder.vectors([line])[0].astype(float) for line in data.retrieval.passages]  # type: ignore[union-attr]
    gain = 0.0
    for query, source in zip(data.retrieval.queries, data.retrieval.sources, strict=True):  # type: ignore[union-attr]
        vector = encoder.vectors([query])[0].astype(float)
        cosines = [vector @ other / np.linalg.norm(vector) / np.linalg.norm(other) for other in vectors]
        rank = sum(cosine > cosines[source] for cosine in cosines)
        gain += 1 / math.log2(2 + rank) if rank < 10 else 0
    assert measures["nDCG@10"].figure == pytest.approx(gain / 20, abs=1e-6)

    symbols = 200 - 1  # a model with random weights knows nothing: about the logarithm of the number of pieces
    assert measures["bits/token"].figure == pytest.approx(math.log2(symbols), abs=1)
    assert measures["bits/word"].figure > measures["bits/token"].figure
    cosines = []
    for number in range(20):
        first, second = encoder.vectors(lines[number : number + 2]).astype(float)
        cosines.append(first @ second / np.linalg.norm(first) / np.linalg.norm(second))
    assert measures["pairs"].figure == pytest.approx(spearmanr(cosines, range(20)).statistic, abs=1e-6)
    assert 1 / 3 < measures["labelled"].figure <= 1


def test_a_probe_reads_what_is_linear_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(400, 5))
    linear = np.where(rows[:, 0] * 1e-3 + 7e-4 > 0, "yes", "no")
    assert (linear_probe(rows[:300], list(linear[:300]), rows[300:]) == linear[300:]).mean() > 0.95
    product = np.where(rows[:, 0] * rows[:, 1] > 0, "yes", "no")
    assert (linear_probe(rows[:300], list(product[:300]), rows[300:]) == product[300:]).mean() < 0.65


def test_a_label_with_a_single_text_does_not_stop_the_probe() -> None:
    rows = np.eye(5)
    assert list(linear_probe(rows, ["a", "a", "b", "b", "c"], rows)) == ["a", "a", "b", "b", "c"]


@given(st.integers(0, 1000))
def test_the_interval_of_equal_models_is_zero_and_that_of_a_better_one_above(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=50)
    measure = Measure(values, np.ones(50))
    assert measure.difference(measure) == (0.0, 0.0)
    low, high = Measure(values + 1, np.ones(50)).difference(measure)
    assert low == pytest.approx(1) == high


def test_intervals_cover_the_difference_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        first, second = rng.normal(0.2, 1, 100), rng.normal(0, 1, 100)
        low, high = Measure(first, np.ones(100)).difference(Measure(second, np.ones(100)))
        covered += low <= 0.2 <= high
    assert 180 <= covered <= 198


def test_nothing_to_measure_and_wrong_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass --text, --labelled or --sts"):
        read_evaluation_data([], [], [], SETTINGS)
    (tmp_path / "scored.tsv").write_text("1\ta\n2\tb\n")
    with pytest.raises(ValueError, match="two texts in each line"):
        read_evaluation_data([], [], [tmp_path / "scored.tsv"], SETTINGS)
    (tmp_path / "same.tsv").write_text("1\ta\tb\n1.0\tb\tc\n")
    with pytest.raises(ValueError, match="all scores are the same"):
        read_evaluation_data([], [], [tmp_path / "same.tsv"], SETTINGS)


def test_a_probe_that_is_tested_on_its_training_text_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("a\tfirst\nb\tsecond\n")
    read_evaluation_data([], [(path, path)], [], SETTINGS)
    assert "100% of its lines are in the training text" in caplog.text


def test_an_interval_over_few_parts_with_a_weight_is_finite() -> None:
    weights = np.array([1.0, 2.0] + [0.0] * 30)
    first = Measure(np.array([1.0, 4.0] + [0.0] * 30), weights)
    low, high = first.difference(Measure(np.array([2.0, 6.0] + [0.0] * 30), weights))
    assert -1 <= low <= high <= 0


def test_words_alone_find_what_has_only_common_words() -> None:
    passages = ["to be or not to be", *[f"another passage of number{number}" for number in range(30)]]
    assert bm25_gains(Retrieval(passages, ["not to be"], [0])).figure == 1.0
