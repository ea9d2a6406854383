"""Comparison of encoders: retrieval and masked words without labels, probes and similarity with labels."""

import logging
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.text.text_files import read_text
from mlsm_plugin.evaluation.labelled_texts import LabelledTexts, check_same_kind, read_labelled_texts
from mlsm_plugin.evaluation.quality_settings import FEWEST_QUERIES, QualitySettings
from mlsm_plugin.evaluation.sentence_encoders import BATCH_TOKENS, SentenceEncoder

logger = logging.getLogger(__name__)

PASSAGE_LINES = 5
SHORTEST_QUERY = 5  # words
RANKS = 10  # of nDCG@10
MASKED_WORDS = 0.15
RESAMPLES = 1000
PENALTIES = (0.01, 0.1, 1.0)  # inverse L2; cross-validation chooses one
NATS_PER_BIT = math.log(2)


@dataclass(frozen=True)
class Retrieval:
    """Passages of consecutive lines, and queries: sentences removed from some of the passages."""

    passages: list[str]
    queries: list[str]
    sources: list[int]  # the passage number of each query


@dataclass
class Measure:
    """A figure of a model with its n parts, which give intervals for differences between models.

    The figure is the sum of ``values`` ``(n,)`` divided by the sum of ``weights`` ``(n,)``.
    """

    values: np.ndarray
    weights: np.ndarray
    higher_is_better: bool = True

    @property
    def figure(self) -> float:
        return float(self.values.sum() / self.weights.sum())

    def difference(self, other: "Measure", seed: int = 1) -> tuple[float, float]:
        """The 95 % bootstrap interval of this figure minus the figure of ``other``, measured on the same parts.

        Resamples in which one of the two has no weight are left out; NaN if these are all.
        """
        rng = np.random.default_rng(seed)
        rows = rng.integers(len(self.values), size=(RESAMPLES, len(self.values)))
        weights = self.weights[rows].sum(axis=1)
        other_weights = other.weights[rows].sum(axis=1)
        defined = (weights > 0) & (other_weights > 0)
        if not defined.any():
            return math.nan, math.nan
        figures = self.values[rows].sum(axis=1)[defined] / weights[defined]
        others = other.values[rows].sum(axis=1)[defined] / other_weights[defined]
        low, high = np.quantile(figures - others, [0.025, 0.975])
        return float(low), float(high)


@dataclass(frozen=True)
class EvaluationData:
    """The data on which every model is measured."""

    retrieval: Retrieval | None = None
    lines: list[str] = field(default_factory=list)  # words of these are masked
    words: list[list[int]] = field(default_factory=list)  # numbers of the masked words of each line
    labelled: dict[str, tuple[LabelledTexts, LabelledTexts]] = field(default_factory=dict)  # train and test
    similarity: dict[str, LabelledTexts] = field(default_factory=dict)


def read_evaluation_data(
    texts: Sequence[PathLike],
    labelled: Sequence[tuple[PathLike, PathLike]],
    similarity: Sequence[PathLike],
    settings: QualitySettings,
) -> EvaluationData:
    """Read all files, and choose queries and masked words.

    Args:
        texts: held-out text with one sentence per line and blank lines between documents.
        labelled: a training and a test file for each linear probe, see :func:`read_labelled_texts`.
        similarity: files of pairs with a score instead of a label.
        settings: number of queries and passages, the seed, and whether labelled and scored files have a header.

    Raises:
        ValueError: there is nothing to measure on, a text is too short for retrieval, a file is damaged, all scores
            are the same, or a package is missing.
    """
    if labelled:
        _import_scikit_learn()
    if not (texts or labelled or similarity):
        raise ValueError("there is nothing to measure on; pass --text, --labelled or --sts")
    probes: dict[str, tuple[LabelledTexts, LabelledTexts]] = {}
    for train_path, test_path in labelled:
        train = read_labelled_texts(train_path, header=settings.header)
        test = read_labelled_texts(test_path, header=settings.header)
        check_same_kind(train, [test], regression=False, allow_single=True)
        probes[_unused(_name(train_path), probes)] = (train, test)
    pairs: dict[str, LabelledTexts] = {}
    for path in similarity:
        scored_pairs = read_labelled_texts(path, regression=True, header=settings.header)
        if scored_pairs.texts_per_line != 2:
            raise ValueError(f"{path}: similarity needs two texts in each line: score, tab, text, tab, text")
        if len({float(score) for score in scored_pairs.labels}) < 2:
            raise ValueError(f"{path}: all scores are the same; a correlation needs pairs of different similarity")
        pairs[_unused(Path(path).stem, {*probes, *pairs})] = scored_pairs
    if not texts:
        return EvaluationData(labelled=probes, similarity=pairs)
    documents = documents_of(texts)
    lines, words = choose_masked_words(documents, settings)
    return EvaluationData(make_retrieval(documents, settings), lines, words, probes, pairs)


def evaluate_encoder(
    encoder: SentenceEncoder, data: EvaluationData, *, batch_tokens: int = BATCH_TOKENS
) -> dict[str, Measure]:
    """The measures of a model by name: ``nDCG@10``, ``bits/token``, ``bits/word``, and one for each file."""
    measures: dict[str, Measure] = {}
    if data.retrieval is not None:
        measures["nDCG@10"] = _gains(encoder, data.retrieval, batch_tokens)
    if data.lines and encoder.mask is not None:
        measures |= _masked_words(encoder, data, batch_tokens)
    elif data.lines:
        logger.warning("no masked words are predicted: %s", encoder.why_no_head)
    for name, (train, test) in data.labelled.items():
        measures[name] = _probe(encoder, name, train, test, batch_tokens)
    for name, scored_pairs in data.similarity.items():
        measures[name] = _similarity(encoder, name, scored_pairs, batch_tokens)
    return measures


def bm25_gains(retrieval: Retrieval) -> Measure:
    """nDCG@10 of BM25 over lower-cased words of two letters or more, a baseline for every encoder; needs ``bm25s``."""
    try:
        import bm25s
    except ImportError:
        raise ValueError("BM25 needs the package bm25s: pip install bm25s") from None
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    index = bm25s.BM25()
    index.index(bm25s.tokenize(retrieval.passages, stopwords=None, show_progress=False), show_progress=False)
    queries = bm25s.tokenize(retrieval.queries, stopwords=None, show_progress=False)
    count = min(RANKS, len(retrieval.passages))
    numbers, _ = index.retrieve(queries, k=count, show_progress=False)
    return _measure_of_ranks(np.asarray(numbers), retrieval.sources)


def make_retrieval(documents: Sequence[Sequence[str]], settings: QualitySettings) -> Retrieval:
    """Passages of :data:`PASSAGE_LINES` consecutive lines of a document; a query is a line removed from a passage.

    ValueError if fewer than :data:`FEWEST_QUERIES` passages have a line of :data:`SHORTEST_QUERY` words.
    """
    groups = [
        list(document[first : first + PASSAGE_LINES])
        for document in documents
        for first in range(0, len(document), PASSAGE_LINES)
    ]
    groups = [group for group in groups if len(group) > 1]
    rng = random.Random(settings.seed)
    rng.shuffle(groups)
    groups = groups[: settings.passages]
    queries: list[str] = []
    sources: list[int] = []
    for number, group in enumerate(groups):
        long_enough = [place for place, line in enumerate(group) if len(line.split()) >= SHORTEST_QUERY]
        if long_enough and len(queries) < settings.queries:
            queries.append(group.pop(rng.choice(long_enough)))
            sources.append(number)
    if len(queries) < FEWEST_QUERIES:
        raise ValueError(
            f"the text has {len(queries)} passages with a sentence of {SHORTEST_QUERY} words or more, at least "
            f"{FEWEST_QUERIES} are needed; give it more lines, with several lines in a document"
        )
    return Retrieval([" ".join(group) for group in groups], queries, sources)


def choose_masked_words(
    documents: Sequence[Sequence[str]], settings: QualitySettings
) -> tuple[list[str], list[list[int]]]:
    """Random lines of the text, and the numbers of the words to mask: 15 %, the same for every model."""
    lines = [line for document in documents for line in document]
    rng = random.Random(settings.seed)
    lines = rng.sample(lines, min(len(lines), 2 * settings.queries))
    words = []
    for line in lines:
        number = len(line.split())
        words.append(sorted(rng.sample(range(number), max(1, round(MASKED_WORDS * number)))))
    return lines, words


def documents_of(texts: Sequence[PathLike]) -> list[list[str]]:
    """The lines of each document of text files, without blank lines."""
    documents: list[list[str]] = [[]]
    for line in read_text(texts):
        if line:
            documents[-1].append(line)
        elif documents[-1]:
            documents.append([])
    return documents


def _gains(encoder: SentenceEncoder, retrieval: Retrieval, batch_tokens: int) -> Measure:
    passages = _unit_rows(encoder.vectors(retrieval.passages, batch_tokens=batch_tokens, what="passages"))
    queries = _unit_rows(encoder.vectors(retrieval.queries, batch_tokens=batch_tokens, what="queries"))
    numbers = np.argsort(-(queries @ passages.T), axis=1, kind="stable")[:, :RANKS]
    return _measure_of_ranks(numbers, retrieval.sources)


def _measure_of_ranks(numbers: np.ndarray, sources: Sequence[int]) -> Measure:
    """nDCG with one relevant passage per query, 1 / log2(1 + rank), from ranked passage ``numbers`` ``(n, k)``."""
    hits = numbers == np.array(sources)[:, None]
    gains = (hits / np.log2(np.arange(2, numbers.shape[1] + 2))).sum(axis=1)
    return Measure(gains, np.ones(len(gains)))


def _masked_words(encoder: SentenceEncoder, data: EvaluationData, batch_tokens: int) -> dict[str, Measure]:
    losses = np.array(encoder.masked_word_losses(data.lines, data.words, batch_tokens=batch_tokens))
    bits = losses[:, 0] / NATS_PER_BIT
    masked_words = losses[:, 1]
    masked_tokens = losses[:, 2]
    chosen = sum(map(len, data.words))
    missing = chosen - int(masked_words.sum())
    if missing:
        logger.warning("%d of %d masked words are beyond the model's positions or could not be placed", missing, chosen)
    if not masked_words.sum():
        return {}
    return {
        "bits/token": Measure(bits, masked_tokens, higher_is_better=False),
        "bits/word": Measure(bits, masked_words, higher_is_better=False),
    }


def _probe(
    encoder: SentenceEncoder, name: str, train: LabelledTexts, test: LabelledTexts, batch_tokens: int
) -> Measure:
    features = [
        _features_of_pairs(encoder, texts, f"{name}: {split}", batch_tokens)
        for split, texts in (("train", train), ("test", test))
    ]
    predicted = linear_probe(features[0], train.labels, features[1])
    correct = predicted == np.array(test.labels)
    return Measure(correct.astype(float), np.ones(len(correct)))


def linear_probe(train: np.ndarray, labels: Sequence[str], test: np.ndarray) -> np.ndarray:
    """The labels that logistic regression on frozen vectors predicts, as in SentEval (Conneau and Kiela 2018).

    Columns are standardized by the training rows, and cross-validation on these rows chooses the L2 penalty.

    Args:
        train: ``(n, dim)``.
        labels: labels of the training rows, at least two distinct labels.
        test: ``(m, dim)``.

    Returns:
        ``(m,)`` labels.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    _import_scikit_learn()
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    _, counts = np.unique(labels, return_counts=True)
    folds = min(3, int(counts.min()))
    if folds < 2:  # cross-validation needs two texts of each label
        return np.asarray(probe.fit(train, labels).predict(test))
    search = GridSearchCV(probe, {"logisticregression__C": PENALTIES}, cv=folds)
    return np.asarray(search.fit(train, labels).predict(test))


def _import_scikit_learn() -> None:
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise ValueError("a linear probe needs scikit-learn: pip install scikit-learn") from None


def _features_of_pairs(encoder: SentenceEncoder, texts: LabelledTexts, what: str, batch_tokens: int) -> np.ndarray:
    """The vectors of single texts; SentEval's ``[|u - v|, u * v]`` for pairs u and v."""
    columns = [
        encoder.vectors(column, batch_tokens=batch_tokens, what=what) for column in zip(*texts.texts, strict=True)
    ]
    if len(columns) == 1:
        return columns[0]
    return np.concatenate([np.abs(columns[0] - columns[1]), columns[0] * columns[1]], axis=1)


def _similarity(encoder: SentenceEncoder, name: str, scored_pairs: LabelledTexts, batch_tokens: int) -> Measure:
    """Spearman's correlation of the cosines with the scores, as the mean of products of standardized ranks."""
    from scipy.stats import rankdata

    left, right = zip(*scored_pairs.texts, strict=True)
    first = _unit_rows(encoder.vectors(left, batch_tokens=batch_tokens, what=name))
    second = _unit_rows(encoder.vectors(right, batch_tokens=batch_tokens, what=name))
    ranks = []
    for values in ((first * second).sum(axis=1), np.array([float(label) for label in scored_pairs.labels])):
        ranked = rankdata(values)
        deviation = ranked.std()
        ranks.append((ranked - ranked.mean()) / (deviation if deviation else 1.0))
    return Measure(ranks[0] * ranks[1], np.ones(len(ranks[0])))


def _unit_rows(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    rows: np.ndarray = vectors / np.maximum(norms, 1e-12)
    return rows


def _name(path: PathLike) -> str:
    """The name of a task: the folder for a file such as ``sst2/train.tsv``, else the name of the training file."""
    stem = Path(path).name.split(".")[0]
    folder = Path(path).resolve().parent.name
    return folder if stem == "train" and folder else stem


def _unused(name: str, names: Collection[str]) -> str:
    number = 2
    unused = name
    while unused in names:
        unused = f"{name}-{number}"
        number += 1
    return unused
