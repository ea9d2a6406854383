"""Build an index of documents, and search it by codes, by words, or by both."""

import io
import itertools
import logging
import math
import shutil
import zipfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open, read_json, sha256_of_files, write_json, write_npy
from mlsm_plugin.core.files.output_lock import in_turn, only_writer
from mlsm_plugin.core.files.planned_folder import PLAN_FILE, PlannedFolder
from mlsm_plugin.core.files.process_rank import SINGLE_PROCESS, ProcessRank
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.text.text_files import check_text
from mlsm_plugin.core.text.unknown_tokens import UnknownTokens
from mlsm_plugin.search.bm25 import OF_CODES, OF_WORDS, TermScores, best, fused, write_term_scores
from mlsm_plugin.search.documents import (
    Document,
    StoredDocuments,
    as_line,
    damaged,
    names_of,
    number_of_repeated_names,
    read_documents,
)
from mlsm_plugin.search.labels import labels_of, token_weights
from mlsm_plugin.search.settings import IndexSettings
from mlsm_plugin.search.text_codes import TextCoder, TextCodes, stacked_codes, summed_codes

if TYPE_CHECKING:
    from sklearn.feature_extraction.text import HashingVectorizer

logger = logging.getLogger(__name__)

FORMAT = 1
HASHED_WORDS = 2**20  # columns for hashed words; few words share a column
CANDIDATES = 1000  # documents of each ranking to fuse
MODES = ("both", "codes", "words")


@dataclass(frozen=True)
class Reason:
    """A property that the query and a document share."""

    atom: int
    label: str  # its most telling tokens
    share: float  # of the document's score
    query_tokens: tuple[str, ...]  # the query's tokens with it, strongest first
    document_tokens: tuple[tuple[int, int], ...]  # character spans of the document's tokens with it


@dataclass(frozen=True)
class Hit:
    """A search result."""

    document: Document
    score: float
    reasons: tuple[Reason, ...]
    words: tuple[str, ...]  # shared by the query and the document


def build_index(
    paths: Sequence[PathLike],
    coder: TextCoder,
    output: PathLike,
    settings: IndexSettings = IndexSettings(),  # noqa: B008
    process: ProcessRank = SINGLE_PROCESS,
) -> dict[str, int] | None:
    """Index the documents of some files; the same call resumes after a stop.

    Args:
        paths: files for :func:`.read_documents`.
        coder: makes the codes.
        output: folder of the index.
        settings: lines per passage, documents per shard, tokens per batch.
        process: the shards of one of several processes are written; the process that finds all of them there merges
            them.

    Returns:
        the number of ``documents``, of ``empty`` documents (without a code), and of ``bytes`` in the index; None while
        shards of other processes are missing.

    Raises:
        ValueError: a file is not text, there are no documents, or the folder holds other files, or an index begun with
            other documents or another model. All files are read before the first document is indexed.
    """
    plan = {
        "format": FORMAT,
        "files": [sha256_of_files(path) for path in paths],
        "names": names_of(paths),
        "codes": coder.fingerprint,
        "passage_lines": settings.passage_lines,
        "shard_documents": settings.shard_documents,
    }
    folder = PlannedFolder(output, plan)
    _check_folder(folder)
    shards = folder.directory / "shards"
    with only_writer(output) if process.world_size == 1 else nullcontext():
        if folder.is_complete():
            return dict(folder.sealed_content()["figures"])
        number_of_documents = _checked_number(read_documents(paths, passage_lines=settings.passage_lines))
        folder.begin()
        shards.mkdir(exist_ok=True)
        documents = read_documents(paths, passage_lines=settings.passage_lines)
        try:
            _write_shards(documents, number_of_documents, coder, shards, settings, process)
        except FileNotFoundError:
            if not folder.is_sealed:  # otherwise another process has merged and removed the shards
                raise
        for path, before in zip(paths, folder.plan["files"], strict=True):
            if sha256_of_files(path) != before:
                raise ValueError(f"{path} changed while it was indexed; delete {output} and run the same command again")
        with in_turn(folder.directory):
            if folder.is_sealed:  # by another process
                shutil.rmtree(shards, ignore_errors=True)
                return dict(folder.sealed_content()["figures"])
            number_of_shards = math.ceil(number_of_documents / settings.shard_documents)
            if not all(_is_written(shards, number) for number in range(number_of_shards)):
                return None
            figures = _merge(folder.directory, shards, number_of_shards, coder)
            folder.seal({**plan, "origin": coder.origin, "num_atoms": coder.num_atoms, "figures": figures})
            shutil.rmtree(shards)
    return figures


def _check_folder(folder: PlannedFolder) -> None:
    """Raise ValueError if a folder holds other files, or an index of other documents, another model or settings."""
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
    """Whether a folder holds an index, finished or not; ValueError if it holds anything else."""
    if (folder / PLAN_FILE).is_file():
        return True
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if others:
        raise ValueError(f"{folder} holds files that do not belong to an index, such as {others[0]}; name a new folder")
    return False


def _checked_number(documents: Iterator[Document]) -> int:
    """Read all documents and return their number; ValueError if none has a text, or one cannot be read."""
    number = 0
    has_text = False

    def names() -> Iterator[str]:
        nonlocal number, has_text
        for document in documents:
            number += 1
            has_text = has_text or bool(document.text.strip())
            yield document.name

    repeated = number_of_repeated_names(names())
    if not number:
        raise ValueError("there is no document in the files")
    if not has_text:
        raise ValueError(f"none of the {number} documents has a text")
    if repeated:
        logger.warning(
            "%d of %d documents have the id of another: results cannot tell them apart, and they cannot be exported; "
            "give each its own id",
            repeated,
            number,
        )
    return number


def _write_shards(
    documents: Iterator[Document],
    total: int,
    coder: TextCoder,
    shards: Path,
    settings: IndexSettings,
    process: ProcessRank,
) -> None:
    """Write the missing shards of a process, and warn of unknown tokens in them.

    The progress counts all documents, also those of other processes.
    """
    unknown = UnknownTokens()
    with Progress(total=total, desc="indexing", unit="document") as progress:
        for number in itertools.count():
            batch = list(itertools.islice(documents, settings.shard_documents))
            if not batch:
                break
            if process.owns(number) and not _is_written(shards, number):
                unknown += _write_shard(batch, coder, shards, number, settings.batch_tokens)
            progress.update(len(batch))
    unknown.warn("the documents")


def _is_written(shards: Path, number: int) -> bool:
    return (shards / f"{number:06d}.codes.npz").is_file()  # the last file of a shard


def _write_shard(
    batch: list[Document], coder: TextCoder, shards: Path, number: int, batch_tokens: int
) -> UnknownTokens:
    """Write a shard, and count its unknown tokens."""
    coded = coder.coded([document.text for document in batch], batch_tokens=batch_tokens)
    vocabulary = coder.tokenizer.largest_id + 1
    ids = np.concatenate([text.ids for text in coded])
    labels = token_weights(ids, stacked_codes(coded), vocabulary)
    with atomic_open(shards / f"{number:06d}.jsonl") as file:
        file.writelines(as_line(document) for document in batch)
    _save_matrix(shards / f"{number:06d}.words.npz", word_counts([document.text for document in batch]))
    _save_matrix(shards / f"{number:06d}.labels.npz", labels)
    _save_matrix(shards / f"{number:06d}.codes.npz", summed_codes(coded))
    unknown = UnknownTokens()
    for document, codes in zip(batch, coded, strict=True):
        unknown.add(document.text, codes.ids.tolist(), codes.offsets, coder.tokenizer.unknown_id)
    return unknown


def _merge(folder: Path, shards: Path, number_of_shards: int, coder: TextCoder) -> dict[str, int]:
    """Merge all shards into the files of the index; returns its figures."""

    def matrices(part: str) -> Iterator[sp.csr_matrix]:
        for number in range(number_of_shards):
            yield _read_matrix(shards / f"{number:06d}.{part}.npz")

    write_term_scores(folder, "codes", coder.num_atoms, lambda: matrices("codes"), OF_CODES)
    write_term_scores(folder, "words", HASHED_WORDS, lambda: matrices("words"), OF_WORDS)
    labels = sum(matrices("labels"), start=sp.csr_matrix((coder.num_atoms, coder.tokenizer.largest_id + 1)))
    write_json(folder / "labels.json", labels_of(sp.csr_matrix(labels), coder.tokenizer))
    starts = array("q", [0])
    with atomic_open(folder / "documents.jsonl") as file:
        for number, codes in enumerate(matrices("codes")):
            lines = (shards / f"{number:06d}.jsonl").read_bytes().splitlines(keepends=True)
            if len(lines) != codes.shape[0] or not lines[-1].endswith(b"\n"):
                raise _damaged_shard(shards / f"{number:06d}.jsonl")
            for line in lines:
                file.write(line)
                starts.append(starts[-1] + len(line))
    write_npy(folder / "documents.starts.npy", np.array(starts, dtype=np.int64))
    empty = sum(int((np.diff(shard.indptr) == 0).sum()) for shard in matrices("codes"))
    files = [path for path in folder.iterdir() if path.is_file()]
    return {"documents": len(starts) - 1, "empty": empty, "bytes": sum(path.stat().st_size for path in files)}


def _read_matrix(path: Path) -> sp.csr_matrix:
    try:
        return sp.csr_matrix(sp.load_npz(path))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        raise _damaged_shard(path) from None


def _damaged_shard(path: Path) -> ValueError:
    return ValueError(
        f"{path} is damaged; delete the files {path.name[:6]}.* beside it, and run the same command again"
    )


def word_counts(texts: Sequence[str]) -> sp.csr_matrix:
    """Counts of hashed, lower-cased words of two or more characters: ``(n, HASHED_WORDS)`` float32."""
    return sp.csr_matrix(_vectorizer().transform(texts), dtype=np.float32)


class SearchIndex:
    """An index that :func:`build_index` wrote, with the model and the dictionary of its codes.

    ``coder`` is needed to search by codes, and must match the index; with None, only search by words works. ValueError
    if the index is incomplete or damaged, or was built with another model or dictionary.
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
        """The best documents for a query.

        Args:
            query: a text.
            count: maximum number of documents.
            mode: ``codes``, ``words``, or ``both``, which fuses the two rankings.
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
        coded_query = None
        if self._coder is not None:
            coded_query = self._coder.coded([query])[0]
            self._coder.tokenizer.unknown_of(query).warn("the query")
        word_scores = self._word_scores(query)
        if mode == "words" or coded_query is None:
            ranked = [(int(number), float(word_scores[number])) for number in best(word_scores, count)]
        else:
            query_codes = coded_query.summed()
            code_scores = self._codes.of_query(query_codes.indices, query_codes.data)
            if mode == "codes":
                ranked = [(int(number), float(code_scores[number])) for number in best(code_scores, count)]
            else:
                ranked = fused([best(code_scores, CANDIDATES), best(word_scores, CANDIDATES)], count)
        return [self._hit(number, score, query, coded_query if explain else None) for number, score in ranked]

    def close(self) -> None:
        """Close the files."""
        self.documents.close()

    def _word_scores(self, query: str) -> np.ndarray:
        counts = word_counts([query])
        return self._words.of_query(counts.indices, counts.data)

    def _hit(self, number: int, score: float, query: str, coded_query: TextCodes | None) -> Hit:
        document = self.documents[number]
        analyzer = _vectorizer().build_analyzer()
        document_words = set(analyzer(document.text))
        words = tuple(word for word in dict.fromkeys(analyzer(query)) if word in document_words)
        reasons = () if coded_query is None else self._reasons(number, document, query, coded_query)
        return Hit(document, score, reasons, words)

    def _reasons(
        self, number: int, document: Document, query: str, coded_query: TextCodes, most: int = 5
    ) -> tuple[Reason, ...]:
        assert self._coder is not None
        query_codes = coded_query.summed()
        contributions = query_codes.data * self._codes.of_document(number, query_codes.indices)
        total = float(contributions.sum())
        if total <= 0:
            return ()
        coded_document = self._coder.coded([document.text])[0]
        reasons = []
        for place in np.argsort(-contributions, kind="stable")[:most]:
            atom = int(query_codes.indices[place])
            if contributions[place] <= 0:
                break
            reasons.append(
                Reason(
                    atom,
                    self.labels[atom],
                    float(contributions[place] / total),
                    tuple(query[start:stop].strip() for start, stop in _tokens_with(coded_query, atom)),
                    tuple(_tokens_with(coded_document, atom)),
                )
            )
        return tuple(reasons)


def read_meta(folder: Path) -> dict[str, object]:
    """The metadata of an index; ValueError if the folder holds no index, or an unfinished one."""
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
    """Name the model, dictionary and layer of some codes."""
    assert isinstance(origin, dict)
    if origin.get("dictionary") is None:
        return f"{origin.get('model')}, its own head"
    return f"{origin.get('model')}, {origin.get('dictionary')}, layer {origin.get('layer')}"


def _tokens_with(coded: TextCodes, atom: int, most: int = 3) -> list[tuple[int, int]]:
    """The character spans of at most ``most`` tokens with an atom, strongest first."""
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
