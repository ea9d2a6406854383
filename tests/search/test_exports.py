"""Exported vectors: dot products are the scores of the index, in float64, and by an engine itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsm_plugin.search.bm25 import OF_CODES, TermScores
from mlsm_plugin.search.exports import ENGINES, LUCENE_SCALE, export_index
from mlsm_plugin.search.index import SearchIndex, build_index
from mlsm_plugin.search.settings import IndexSettings
from mlsm_plugin.search.text_codes import DictionaryCodes
from tests.search.searched import make_encoder, write_documents
from tests.tiny_models import TinyData

DOCUMENTS = 30


@pytest.fixture(scope="module")
def coder(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> DictionaryCodes:
    return DictionaryCodes(*make_encoder(tiny.text, tmp_path_factory.mktemp("encoder")))


@pytest.fixture(scope="module")
def index(tiny: TinyData, coder: DictionaryCodes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    write_documents(tiny.text, folder / "docs.txt", number=DOCUMENTS)
    build_index([folder / "docs.txt"], coder, folder / "index", IndexSettings(shard_documents=7))
    return folder / "index"


def exported(index: Path, engine: str, folder: Path) -> list[dict[str, Any]]:
    assert export_index(index, folder / "vectors.jsonl", engine) == DOCUMENTS
    return [json.loads(line) for line in (folder / "vectors.jsonl").read_text(encoding="utf-8").splitlines()]


def scores_in_float64(coder: DictionaryCodes, texts: list[str], query: dict[int, float]) -> list[float]:
    """BM25 as the formula has it, from the summed codes."""
    counts = np.array([text.summed().toarray()[0] for text in coder.coded(texts)], dtype=np.float64)
    rarity = np.log1p((len(texts) - (counts > 0).sum(axis=0) + 0.5) / ((counts > 0).sum(axis=0) + 0.5))
    lengths = counts.sum(axis=1) / counts.sum(axis=1).mean()
    norms = OF_CODES.saturation * (1 - OF_CODES.length_penalty + OF_CODES.length_penalty * lengths)
    weights = rarity * counts * (OF_CODES.saturation + 1) / (counts + norms[:, None])
    return [math.fsum(weight * row[atom] for atom, weight in query.items()) for row in weights]


def query_of(coder: DictionaryCodes, text: str) -> dict[int, float]:
    vector = coder.coded([text])[0].summed()
    return dict(zip(vector.indices.tolist(), vector.data.astype(float).tolist(), strict=True))


def weights_of(engine: str, lines: list[dict[str, Any]]) -> list[dict[int, float]]:
    if engine == "qdrant":
        vectors = [line["vector"]["codes"] for line in lines]
        return [dict(zip(vector["indices"], vector["values"], strict=True)) for vector in vectors]
    key = {"lucene": "vector", "elasticsearch": "codes"}[engine]
    return [{int(name[1:]): weight for name, weight in line[key].items()} for line in lines if key in line]


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_dot_products_are_the_scores_of_the_index(
    coder: DictionaryCodes, index: Path, tmp_path: Path, engine: str
) -> None:
    vectors = weights_of(engine, exported(index, engine, tmp_path))
    opened = SearchIndex(index, coder)
    texts = [opened.documents[number].text for number in range(DOCUMENTS)]
    query = query_of(coder, texts[3])
    products = [math.fsum(query.get(atom, 0.0) * weight for atom, weight in vector.items()) for vector in vectors]
    expected = scores_in_float64(coder, texts, query)
    by_hit = {hit.document.name: hit.score for hit in opened.search(texts[3], mode="codes", count=DOCUMENTS)}
    of_index = [by_hit.get(opened.documents[number].name, 0.0) for number in range(DOCUMENTS)]
    if engine == "lucene":
        rounding = 0.5 * sum(query.values())
        np.testing.assert_allclose(products, LUCENE_SCALE * np.array(expected), atol=rounding)
        assert all(isinstance(weight, int) and weight > 0 for vector in vectors for weight in vector.values())
    else:
        np.testing.assert_allclose(products, expected, rtol=1e-6)
        np.testing.assert_allclose(products, of_index, rtol=1e-5)
        stored = TermScores.open(index, "codes", DOCUMENTS)
        assert sum(map(len, vectors)) == np.count_nonzero(stored.scores)
        assert np.float32(next(iter(vectors[0].values()))) in stored.scores


def test_each_engine_has_its_lines(index: Path, tmp_path: Path) -> None:
    lines = {}
    for engine in ENGINES:
        (tmp_path / engine).mkdir()
        lines[engine] = exported(index, engine, tmp_path / engine)
    assert lines["lucene"][4].keys() == {"id", "contents", "vector"}
    assert lines["lucene"][4]["id"] == "docs.txt:9"
    assert len(lines["elasticsearch"]) == 2 * DOCUMENTS
    assert lines["elasticsearch"][8] == {"index": {"_id": "docs.txt:9"}}
    assert lines["elasticsearch"][9]["text"] == lines["lucene"][4]["contents"]
    assert lines["qdrant"][4]["id"] == 4
    assert lines["qdrant"][4]["payload"]["name"] == "docs.txt:9"


@pytest.mark.parametrize("size", [1, 7, 30, 100])
def test_rows_are_those_of_the_columns_whatever_the_blocks(index: Path, size: int) -> None:
    stored = TermScores.open(index, "codes", DOCUMENTS)
    blocks = list(stored.blocks_of_documents(size))
    assert max(block.shape[0] for block in blocks) <= size
    rows = np.concatenate([block.toarray() for block in blocks])
    terms = np.arange(len(stored.starts) - 1)
    for document in range(DOCUMENTS):
        np.testing.assert_array_equal(rows[document], stored.of_document(document, terms))


def test_what_exists_stays_and_ids_that_repeat_are_refused(coder: DictionaryCodes, index: Path, tmp_path: Path) -> None:
    (tmp_path / "vectors.jsonl").write_text("kept")
    with pytest.raises(ValueError, match="exists already; name another output"):
        export_index(index, tmp_path / "vectors.jsonl", "qdrant")
    assert (tmp_path / "vectors.jsonl").read_text() == "kept"
    with pytest.raises(ValueError, match="the engine must be one of lucene, elasticsearch, qdrant"):
        export_index(index, tmp_path / "other.jsonl", "solr")
    with pytest.raises(ValueError, match="is not an index"):
        export_index(tmp_path, tmp_path / "other.jsonl", "qdrant")
    (tmp_path / "docs.jsonl").write_text('{"id": "a", "text": "name"}\n{"id": "a", "text": ""}\n')
    build_index([tmp_path / "docs.jsonl"], coder, tmp_path / "index")
    with pytest.raises(ValueError, match="1 documents have the id of another, which lucene would replace"):
        export_index(tmp_path / "index", tmp_path / "other.jsonl", "lucene")
    assert not (tmp_path / "other.jsonl").exists()
    assert export_index(tmp_path / "index", tmp_path / "other.jsonl", "qdrant") == 2


@pytest.mark.slow
def test_qdrant_ranks_as_the_index_does(coder: DictionaryCodes, index: Path, tmp_path: Path) -> None:
    qdrant = pytest.importorskip("qdrant_client")
    models = qdrant.models
    client = qdrant.QdrantClient(":memory:")
    client.create_collection("docs", vectors_config={}, sparse_vectors_config={"codes": models.SparseVectorParams()})
    points = [models.PointStruct(**line) for line in exported(index, "qdrant", tmp_path)]
    client.upsert("docs", points)
    opened = SearchIndex(index, coder)
    for number in range(0, DOCUMENTS, 7):
        text = opened.documents[number].text
        query = query_of(coder, text)
        vector = models.SparseVector(indices=list(query), values=list(query.values()))
        answer = client.query_points("docs", query=vector, using="codes", limit=5).points
        hits = opened.search(text, mode="codes", count=5)
        np.testing.assert_allclose([point.score for point in answer], [hit.score for hit in hits], rtol=1e-5)
        assert [point.payload["name"] for point in answer] == [hit.document.name for hit in hits]
    client.close()
