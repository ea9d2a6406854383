"""Export the codes of an index as sparse vectors for other search engines, one document at a time."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open, check_output_file
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.search.bm25 import TermScores
from mlsm_plugin.search.documents import Document, StoredDocuments, number_of_repeated_names
from mlsm_plugin.search.index import read_meta

LUCENE_SCALE = 100  # Anserini repeats each term as many times as its weight, so weights must be whole numbers
FIELD = "codes"
Writer = Callable[[int, Document, sp.csr_matrix], list[object]]


def export_index(folder: PathLike, output: PathLike, engine: str) -> int:
    """Write the documents of an index and their score vectors as JSON lines; returns the number of documents.

    The weight of a property in a document is its BM25 score there. The dot product with the codes of a query
    (:meth:`.TextCodes.summed`) is therefore the score of ``mlsm search query --by codes``.

    Args:
        folder: the index; its model is not needed.
        output: a new file.
        engine: a key of :data:`ENGINES`.

    Raises:
        ValueError: the engine is unknown, the index is incomplete or damaged, the output exists, or documents share an
            id in an engine that looks them up by id.
    """
    if engine not in ENGINES:
        raise ValueError(f"the engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    folder = Path(folder)
    read_meta(folder)
    check_output_file(output)
    if os.path.lexists(output):
        raise ValueError(f"{output} exists already; name another output, or delete it")
    documents = StoredDocuments(folder)
    repeated = number_of_repeated_names(documents[number].name for number in range(len(documents)))
    if repeated and engine != "qdrant":
        raise ValueError(
            f"{repeated} documents have the id of another, which {engine} would replace; give each its own id, and "
            "index them again"
        )
    write = ENGINES[engine]
    number = 0
    with atomic_open(output) as file, Progress(total=len(documents), desc="exporting", unit="document") as progress:
        for block in TermScores.open(folder, "codes", len(documents)).blocks_of_documents():
            for row in block:
                for item in write(number, documents[number], row):
                    file.write(json.dumps(item, ensure_ascii=False, allow_nan=False).encode() + b"\n")
                number += 1
            progress.update(block.shape[0])
    documents.close()
    return number


def property_name(atom: int) -> str:
    """The name of a property in engines that index terms: it begins with a letter and has no dot."""
    return f"p{atom}"


def _lucene(number: int, document: Document, scores: sp.csr_matrix) -> list[object]:
    weights = np.rint(scores.data.astype(np.float64) * LUCENE_SCALE).astype(int).tolist()
    pairs = zip(scores.indices.tolist(), weights, strict=True)
    vector = {property_name(atom): weight for atom, weight in pairs if weight > 0}
    return [{"id": document.name, "contents": document.text, "vector": vector}]


def _elasticsearch(number: int, document: Document, scores: sp.csr_matrix) -> list[object]:
    pairs = zip(scores.indices.tolist(), _shortest(scores.data), strict=True)
    vector = {property_name(atom): score for atom, score in pairs}
    return [{"index": {"_id": document.name}}, {"text": document.text, FIELD: vector}]


def _qdrant(number: int, document: Document, scores: sp.csr_matrix) -> list[object]:
    vector = {"indices": scores.indices.tolist(), "values": _shortest(scores.data)}
    payload = {"name": document.name, "text": document.text}
    return [{"id": number, "vector": {FIELD: vector}, "payload": payload}]


ENGINES: dict[str, Writer] = {"lucene": _lucene, "elasticsearch": _elasticsearch, "qdrant": _qdrant}


def _shortest(scores: np.ndarray) -> list[float]:
    """Float32 scores as numbers with as few digits as they need."""
    return [float(text) for text in scores.astype(str)]
