"""Turn a text column of JSON lines, CSV, Parquet or a dataset on the hub into a plain text file."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open
from mlsm_plugin.core.files.hf_files import first_line
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.text.text_files import check_text

KINDS_OF_SUFFIXES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
logger = logging.getLogger(__name__)


def write_column(rows: Iterable[dict[str, Any]], column: str, output: PathLike) -> int:
    """Write the texts of a column as documents, with a blank line after each; return their number.

    The file is written atomically. Rows with an empty cell are left out. ValueError if a row lacks the column, the cell
    holds anything but text, or there is no text.
    """
    documents = 0
    empty = 0
    with atomic_open(output, "w") as file, Progress(desc="reading the dataset", unit="document") as progress:
        for number, row in enumerate(rows, 1):
            if column not in row:
                raise ValueError(f"row {number} has no column {column}, only {', '.join(row)}; name one with --column")
            text = row[column]
            if text is None:
                empty += 1
                text = ""
            if not isinstance(text, str):
                raise ValueError(f"row {number} has {type(text).__name__} instead of text in the column {column}")
            check_text(text, f"row {number}")
            lines = [line for line in text.splitlines() if line.strip()]
            if lines:
                documents += 1
                file.write("\n".join([*lines, "", ""]))
            progress.update(1)
        if not documents:
            raise ValueError(f"no row has text in the column {column}")
    if empty:
        logger.warning("%d rows have nothing in the column %s, and are left out", empty, column)
    return documents


def rows_of_files(paths: Sequence[PathLike]) -> Iterator[dict[str, Any]]:
    """The rows of files of JSON lines, CSV or Parquet, plain or compressed, in order.

    ValueError if a file is of another kind, or cannot be read.
    """
    for path in paths:
        suffixes = [suffix.lower() for suffix in Path(path).suffixes if suffix.lower() not in COMPRESSIONS]
        kind = KINDS_OF_SUFFIXES.get(suffixes[-1] if suffixes else "")
        if kind is None:
            raise ValueError(f"{path} is not JSON lines, CSV or Parquet, which --column is for")
        if suffixes[-1] == ".tsv":
            yield from _rows(kind, str(path), data_files=str(path), split="train", sep="\t")
        else:
            yield from _rows(kind, str(path), data_files=str(path), split="train")


def rows_of_dataset(name: str, split: str) -> Iterator[dict[str, Any]]:
    """The rows of a split of a dataset, read one by one.

    ``name`` is a folder or a hub name, with ``:CONFIG`` if the dataset has several configurations. ValueError if the
    dataset does not exist, or cannot be read.
    """
    path, _, configuration = (name, "", "") if Path(name).exists() else name.partition(":")
    yield from _rows(path, name, name=configuration or None, split=split)


def files_of_dataset(name: str) -> list[Path]:
    """The sorted files of a dataset in a folder; none for a hub name."""
    return sorted(path for path in Path(name).rglob("*") if path.is_file()) if Path(name).is_dir() else []


def _rows(path: str, shown: str, **options: Any) -> Iterator[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError("--column and --dataset need: pip install datasets") from None
    try:
        yield from load_dataset(path, streaming=True, **options)
    except Exception as error:  # datasets has no common error for missing, damaged and unknown files
        raise ValueError(f"{shown} cannot be read as a dataset: {first_line(error)}") from None
