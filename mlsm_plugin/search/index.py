"""Build an index of documents, and search it by codes, by words, or by both."""

import io
import itertools
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open, read_json, sha256_of_files, write_json, write_npy
from mlsm_plugin.core.files.output_lock import only_writer
from mlsm_plugin.core.files.planned_folder import PLAN_FILE, PlannedFolder
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.text.text_files import check_text
from mlsm_plugin.search.bm25 import OF_CODES, OF_WORDS, TermScores, best, fused, write_term_scores
from mlsm_plugin.search.documents import (
    Document,
    StoredDocuments,
    as_line,
    damaged,
    number_of_repeated_names,
    read_documents,
)
from mlsm_plugin.search.labels import labels_of, token_weights
from mlsm_plugin.search.settings import IndexSettings
from mlsm_plugin.search.text_codes import TextCoder, TextCodes

if TYPE_CHECKING:
    from sklearn.feature_extraction.text import HashingVectorizer

logger = logging.getLogger(__name__)

FORMAT = 1
HASHED_WORDS = 2**20  # columns of the words, which are hashed: few of them share one
CANDIDATES = 1000  # of each ranking that are fused
MODES = ("both", "codes", "words")


@dataclass(frozen=True)
class Reason:
    """A property that query and document share."""

    atom: int
    label: str  # its most telling tokens
    share: float  # of the score of the document
    query_tokens: tuple[str, ...]  # of the query that have it, the strongest first
    document_tokens: tuple[tuple[int, int], ...]  # the characters of the document's tokens that have it


@dataclass(frozen=True)
class Hit:
    """A document that was found."""

    document: Document
    score: float
    reasons: tuple[Reason, ...]
    words: tuple[str, ...]  # that query and document share


def build_index(
    paths: Sequence[PathLike],
    coder: TextCoder,
    output: PathLike,
    settings: IndexSettings = IndexSettings(),  # noqa: B008
) -> dict[str, int]:
    """Index the documents of some files; the same call resumes after a stop.

    Args:
        paths: files of :func:`.read_documents`.
        coder: of the codes.
        output: folder of the index.
        settings: lines of a passage, documents at once.

    Returns:
        the numbers of ``documents``, ``empty`` documents (without a token), and ``bytes`` of the index.

    Raises:
        ValueError: a file is no text, there is no document, or the folder was begun with other files or another model,
            or holds anything else. All files are read before the first document is indexed.
    """
    plan = {
        "format": FORMAT,
        "files": [sha256_of_files(path) for path in paths],
        "names": [Path(path).name for path in paths],
        "codes": coder.fingerprint,
        "passage_lines": settings.passage_lines,
        "shard_documents": settings.shard_documents,
    }
    folder = PlannedFolder(output, plan)
    _check_folder(folder)
    with only_writer(output):
        if folder.is_complete():
            return dict(folder.sealed_content()["figures"])
        number_of_documents = _checked_number(read_documents(paths, passage_lines=settings.passage_lines))
        folder.begin()
        shards = folder.directory / "shards"
        shards.mkdir(exist_ok=True)
        documents = read_documents(paths, passage_lines=settings.passage_lines)
        number_of_shards = _write_shards(documents, number_of_documents, coder, shards, settings)
        figures = _merge(folder.directory, shards, number_of_shards, coder)
        folder.seal({**plan, "origin": coder.origin, "num_atoms": coder.num_atoms, "figures": figures})
        shutil.rmtree(shards)
    return figures


def _check_folder(folder: PlannedFolder) -> None:
    """Raise ValueError if a folder was begun with other documents, model or settings, or holds no index."""
    recorded = folder.recorded_plan if folder.directory.is_dir() and _is_index(folder.directory) else None
    if recorded is None:
        return
    remedy = "name another --output, or delete the folder to start anew"
    if recorded.get("names") != folder.plan["names"]:
        names = ", ".join(map(str, recorded.get("names") or []))
        raise ValueError(f"the index in {folder.directory} was begun with other files: {names}; {remedy}")
    for name, before, now in zip(folder.plan["names"], recorded["files"], folder.plan["files"], strict=True):
        if before != now:
            raise ValueError(f"{name} has changed since the index in {folder.directory} was begun; {remedy}")
    if recorded.get("codes") != folder.plan["codes"]:
        raise ValueError(f"the index in {folder.directory} was begun with another model or dictionary; {remedy}")
    folder.check()


def _is_index(folder: Path) -> bool:
    """Whether a folder holds an index, not finished perhaps; ValueError if it holds anything else."""
    if (folder / PLAN_FILE).is_file():
        return True
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if others:
        raise ValueError(f"{folder} holds files that do not belong to an index, such as {others[0]}; name a new folder")
    return False


def _checked_number(documents: Iterator[Document]) -> int:
    """The number of documents, all of which are read; ValueError if there is none, or one cannot be read."""
    number = 0

    def names() -> Iterator[str]:
        nonlocal number
        for document in documents:
            number += 1
            yield document.name

    repeated = number_of_repeated_names(names())
    if not number:
        raise ValueError("there is no document in the files")
    if repeated:
        logger.warning(
            "%d of %d documents have the id of another: results cannot tell them apart, and they cannot be exported; "
            "give each its own id",
            repeated,
            number,
        )
    return number


def _write_shards(
    documents: Iterator[Document], total: int, coder: TextCoder, shards: Path, settings: IndexSettings
) -> int:
    """Write the shards that are missing; returns their number."""
    number = 0
    with Progress(total=total, desc="indexing", unit="document") as progress:
        while batch := list(itertools.islice(documents, settings.shard_documents)):
            last_file = shards / f"{number:06d}.codes.npz"
            if not last_file.is_file():
                _write_shard(batch, coder, shards, number, settings.batch_tokens)
            progress.update(len(batch))
            number += 1
    return number


def _write_shard(batch: list[Document], coder: TextCoder, shards: Path, number: int, batch_tokens: int) -> None:
    coded = coder.coded([document.text for document in batch], batch_tokens=batch_tokens)
    vocabulary = coder.tokenizer.largest_id + 1
    labels = sp.csr_matrix((coder.num_atoms, vocabulary), dtype=np.float32)
    for text in coded:
        labels += token_weights(text.ids, text.codes, vocabulary)
    with atomic_open(shards / f"{number:06d}.jsonl") as file:
        file.writelines(as_line(document) for document in batch)
    _save_matrix(shards / f"{number:06d}.words.npz", word_counts([document.text for document in batch]))
    _save_matrix(shards / f"{number:06d}.labels.npz", labels)
    _save_matrix(shards / f"{number:06d}.codes.npz", sp.vstack([text.summed() for text in coded], format="csr"))


def _merge(folder: Path, shards: Path, number_of_shards: int, coder: TextCoder) -> dict[str, int]:
    """Make the files of the index from all shards."""

    def matrices(part: str) -> Iterator[sp.csr_matrix]:
        for number in range(number_of_shards):
            yield sp.csr_matrix(sp.load_npz(shards / f"{number:06d}.{part}.npz"))

    write_term_scores(folder, "codes", coder.num_atoms, lambda: matrices("codes"), OF_CODES)
    write_term_scores(folder, "words", HASHED_WORDS, lambda: matrices("words"), OF_WORDS)
    labels = sum(matrices("labels"), start=sp.csr_matrix((coder.num_atoms, coder.tokenizer.largest_id + 1)))
    write_json(folder / "labels.json", labels_of(sp.csr_matrix(labels), coder.tokenizer))
    starts = [0]
    with atomic_open(folder / "documents.jsonl") as file:
        for number in range(number_of_shards):
            for line in (shards / f"{number:06d}.jsonl").open("rb"):
                file.write(line)
                starts.append(starts[-1] + len(line))
    write_npy(folder / "documents.starts.npy", np.array(starts, dtype=np.int64))
    empty = sum(int((np.diff(shard.indptr) == 0).sum()) for shard in matrices("codes"))
    files = [path for path in folder.iterdir() if path.is_file()]
    return {"documents": len(starts) - 1, "empty": empty, "bytes": sum(path.stat().st_size for path in files)}


def word_counts(texts: Sequence[str]) -> sp.csr_matrix:
    """Counts of lower-cased words of two or more characters, hashed, ``(n, HASHED_WORDS)`` float32."""
    return sp.csr_matrix(_vectorizer().transform(texts), dtype=np.float32)


class SearchIndex:
    """An index that :func:`build_index` wrote, with the model and the dictionary of its codes.

    ``coder`` is needed for searches by codes, and must be that of the index; None: by words only. ValueError if the
    index is incomplete or damaged, or the model or the dictionary is another one.
    """

    def __init__(self, folder: PathLike, coder: TextCoder | None = None) -> None:
        self.folder = Path(folder)
        meta = read_meta(self.folder)
        if coder is not None and coder.fingerprint != meta["codes"]:
            raise ValueError(
                f"{folder} was built with another model or dictionary ({describe(meta['origin'])}) than "
                f"{describe(coder.origin)}; pass those of the index, or build it again"
            )
        self.meta = meta
        self._coder = coder
        self.documents = StoredDocuments(self.folder)
        self._codes = TermScores.open(self.folder, "codes", len(self.documents))
        self._words = TermScores.open(self.folder, "words", len(self.documents))
        self.labels: list[str] = _read_labels(self.folder)

    def search(self, query: str, *, count: int = 10, mode: str = "both", explain: bool = True) -> list[Hit]:
        """The best documents for a text.

        Args:
            query: the text.
            count: documents, at most.
            mode: ``codes``, ``words``, or ``both``: the two rankings fused by rank.
            explain: say which properties and words each document shares with the query.

        Raises:
            ValueError: the query has no token, ``mode`` is unknown, or the index was opened without a model.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if not query.strip():
            raise ValueError("the query is empty")
        check_text(query, "the query")
        if mode != "words" and self._coder is None:
            raise ValueError("the index was opened without a model; search by words, or pass the coder of the index")
        coded = None if self._coder is None else self._coder.coded([query])[0]
        by_words = self._words_of(query)
        if mode == "words" or coded is None:
            ranked = [(int(number), float(by_words[number])) for number in best(by_words, count)]
        else:
            of_query = coded.summed()
            by_codes = self._codes.of_query(of_query.indices, of_query.data)
            if mode == "codes":
                ranked = [(int(number), float(by_codes[number])) for number in best(by_codes, count)]
            else:
                ranked = fused([best(by_codes, CANDIDATES), best(by_words, CANDIDATES)], count)
        return [self._hit(number, score, query, coded if explain else None) for number, score in ranked]

    def close(self) -> None:
        """Close the files."""
        self.documents.close()

    def _words_of(self, query: str) -> np.ndarray:
        counts = word_counts([query])
        return self._words.of_query(counts.indices, counts.data)

    def _hit(self, number: int, score: float, query: str, coded: TextCodes | None) -> Hit:
        document = self.documents[number]
        analyzer = _vectorizer().build_analyzer()
        in_document = set(analyzer(document.text))
        words = tuple(word for word in dict.fromkeys(analyzer(query)) if word in in_document)
        reasons = () if coded is None else self._reasons(number, document, query, coded)
        return Hit(document, score, reasons, words)

    def _reasons(
        self, number: int, document: Document, query: str, coded: TextCodes, most: int = 5
    ) -> tuple[Reason, ...]:
        assert self._coder is not None
        of_query = coded.summed()
        parts = of_query.data * self._codes.of_document(number, of_query.indices)
        total = float(parts.sum())
        if total <= 0:
            return ()
        in_document = self._coder.coded([document.text])[0]
        reasons = []
        for place in np.argsort(-parts, kind="stable")[:most]:
            atom = int(of_query.indices[place])
            if parts[place] <= 0:
                break
            reasons.append(
                Reason(
                    atom,
                    self.labels[atom],
                    float(parts[place] / total),
                    tuple(query[start:stop].strip() for start, stop in _tokens_with(coded, atom)),
                    tuple(_tokens_with(in_document, atom)),
                )
            )
        return tuple(reasons)


def read_meta(folder: Path) -> dict[str, object]:
    """What an index says of itself; ValueError if it is none, or was not finished."""
    folder = Path(folder)
    if not (folder / PLAN_FILE).is_file():
        raise ValueError(f"{folder} is not an index; `mlsm search index` builds one")
    sealed = PlannedFolder(folder, {})
    if not sealed.is_sealed:
        raise ValueError(f"the index in {folder} is not finished; run the same `mlsm search index` again")
    meta = sealed.sealed_content()
    if meta.get("format") != FORMAT or not isinstance(meta.get("origin"), dict):
        raise ValueError(f"{folder} has another format than this version reads; build the index again")
    return meta


def describe(origin: object) -> str:
    """Model, dictionary and layer in words."""
    assert isinstance(origin, dict)
    if origin.get("dictionary") is None:
        return f"{origin.get('model')}, its own head"
    return f"{origin.get('model')}, {origin.get('dictionary')}, layer {origin.get('layer')}"


def _tokens_with(coded: TextCodes, atom: int, most: int = 3) -> list[tuple[int, int]]:
    """The characters of the tokens that have an atom, the strongest first."""
    column = coded.codes[:, [atom]].tocoo()
    strongest = column.row[np.argsort(-column.data, kind="stable")[:most]]
    return [(int(coded.offsets[token][0]), int(coded.offsets[token][1])) for token in strongest]


def _vectorizer() -> "HashingVectorizer":
    try:
        from sklearn.feature_extraction.text import HashingVectorizer
    except ImportError:
        raise ValueError("search by words needs scikit-learn: pip install scikit-learn") from None
    return HashingVectorizer(n_features=HASHED_WORDS, alternate_sign=False, norm=None, dtype=np.float32)


def _read_labels(folder: Path) -> list[str]:
    path = folder / "labels.json"
    try:
        labels = read_json(path)
    except (OSError, ValueError):
        raise damaged(path) from None
    if not isinstance(labels, list):
        raise damaged(path)
    return [str(label) for label in labels]


def _save_matrix(path: Path, matrix: sp.csr_matrix) -> None:
    content = io.BytesIO()
    sp.save_npz(content, matrix, compressed=False)
    with atomic_open(path) as file:
        file.write(content.getvalue())
