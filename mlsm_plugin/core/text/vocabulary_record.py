"""The record in a checkpoint of the files that give its ids a meaning: symbols, labels and the tokenizer.

The record is part of the state of the task, which fairseq saves with each checkpoint. Entries that an older checkpoint
lacks are not compared.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mlsm_plugin.core.files.atomic_files import PathLike, read_json, sha256_of_files
from mlsm_plugin.core.files.hf_files import first_line
from mlsm_plugin.core.files.json_checks import check_json, fields
from mlsm_plugin.core.files.model_files import DICTIONARIES, FOLDER_NAME, MODEL_NAME, symbols_in

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = "vocabulary"
TOKENIZER = "tokenizer"
READING = "tokenizer_reading"  # the tokenizer as transformers opens it
SYMBOL_FILES = dict(zip((VOCABULARY, "input_vocabulary", "labels"), DICTIONARIES, strict=True))
TOKENIZERS = (TOKENIZER, READING)
RECORDED = (*SYMBOL_FILES, *TOKENIZERS)
SPECIAL = (b"<s>", b"<pad>", b"</s>", b"<unk>")  # fairseq puts these before the symbols of a file
# Two tokenizers count as the same if they cut these texts and all tokens of their vocabulary alike. Their files cannot
# be compared, since they depend on the version of the library that wrote them.
PROBES = (
    "The name's value is 3.14, and isn't it?  Two  spaces;\ta tab.",
    "https://example.org/a_b?c=d#e user@example.org 1,000,000 10% $5 <b>bold</b> [1] {x} \\n",
    "UPPER Title camelCase \uff26\uff35\uff2c\uff2c \ufb01ne \u2460 x\u00b2 \u2026",  # characters that NFKC changes
    "na\u00efve nai\u0308ve Stra\u00dfe \u0130stanbul \u041f\u0440\u0438\u0432 \u03ba\u03cc\u03c3\u03bc",
    "\u4f60\u597d\u4e16\u754c \u3053\u3093 \u0e2a\u0e27\u0e31\u0e2a \u0627\u0644\u0633 \U0001f600",
)
# options of tokenizer_config.json by which transformers overrides tokenizer.json
READING_OPTIONS = (
    "add_prefix_space",
    "do_lower_case",
    "split_special_tokens",
    "strip_accents",
    "tokenize_chinese_chars",
)


def vocabulary_record(folder: PathLike) -> dict[str, str]:
    """The fingerprints of the ``RECORDED`` parts of a folder: SHA-256 of the symbols of each dictionary (without
    counts), and of the tokenizer. ValueError if the tokenizer is damaged.
    """
    tokenizers = {TOKENIZER: tokenizer_fingerprint(folder), READING: reading_fingerprint(folder)}
    return symbols_record(folder) | {name: value for name, value in tokenizers.items() if value is not None}


def symbols_record(folder: PathLike) -> dict[str, str]:
    """The part of :func:`vocabulary_record` about dictionaries."""
    files = {name: Path(folder, file) for name, file in SYMBOL_FILES.items()}
    return {name: _symbols_fingerprint(path) for name, path in files.items() if path.is_file()}


def check_vocabulary_record(
    recorded: Mapping[str, object], folder: PathLike, trained: str, remedy: str, *, only: str | None = None
) -> None:
    """Raise ValueError if a folder differs from its record in a checkpoint, which ``trained`` names.

    ``only`` is the part to compare (``TOKENIZER`` includes ``READING``); None: all.
    """
    compared = RECORDED if only is None else (only,)
    if only == TOKENIZER:
        compared = TOKENIZERS
    remembered = [name for name in compared if isinstance(recorded.get(name), str)]
    present = vocabulary_record(folder) if remembered else {}
    for name in remembered:
        was = str(recorded[name])
        now = present.get(name)
        if now is not None and was != now:
            what, where, effect = _difference(name, folder)
            raise ValueError(
                f"{trained} was trained with {what} (SHA-256 {was[:12]}) than that of {where} ({now[:12]}): {effect}; "
                f"{remedy}"
            )


def _difference(name: str, folder: PathLike) -> tuple[str, str, str]:
    """What differs, where it is, and the effect of the difference."""
    if name in TOKENIZERS:
        return "another tokenizer", str(folder), "it reads text differently, even where the symbols are the same"
    where = f"{folder}/{SYMBOL_FILES[name]}"
    if name == "labels":
        return "another list of labels", where, "the same ids mean other labels"
    return "another vocabulary", where, "the same ids mean other pieces"


def tokenizer_fingerprint(folder: PathLike) -> str | None:
    """SHA-256 of the tokenizer in a data folder or beside checkpoints; None if there is none.

    For SentencePiece, it is the file's SHA-256. For a Hugging Face tokenizer, it is computed from how it cuts its own
    tokens and some texts; ValueError if it is damaged.
    """
    if Path(folder, MODEL_NAME).is_file():
        return sha256_of_files(Path(folder, MODEL_NAME))
    file = Path(folder, FOLDER_NAME, "tokenizer.json")
    times = [path.stat().st_mtime_ns for path in sorted(file.parent.glob("*.json"))]
    return _file_fingerprint(file, tuple(times)) if file.is_file() else None


def reading_fingerprint(folder: PathLike) -> str | None:
    """SHA-256 of how the Hugging Face tokenizer of a folder, as transformers opens it, cuts its tokens and some texts.

    This tokenizer reads all text: transformers overrides ``tokenizer.json`` by the class and the options in
    ``tokenizer_config.json``. None if there is no tokenizer, or transformers cannot open it.
    """
    files = sorted(Path(folder, FOLDER_NAME).glob("*.json"))
    times = tuple(path.stat().st_mtime_ns for path in files)
    return _reading_fingerprint(Path(folder, FOLDER_NAME), times) if files else None


@cache
def _reading_fingerprint(folder: Path, _times: tuple[int, ...]) -> str | None:
    from mlsm_plugin.core.text.hf_tokenizer import load_fast_tokenizer, text_backend

    try:
        tokenizer = text_backend(load_fast_tokenizer(folder))
    except (ValueError, ImportError):  # reading text will raise the error again
        return None
    return hashlib.sha256(json.dumps(_read_by(tokenizer)).encode()).hexdigest()


@cache
def _file_fingerprint(file: Path, _times: tuple[int, ...]) -> str | None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else processes forked later could not use it
    try:
        from tokenizers import Tokenizer
    except ImportError:  # nothing reads text then
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no error type of its own
        raise ValueError(f"{file} is not a readable tokenizer: {first_line(error)}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    read = [*_read_by(tokenizer), _reading_options(file.parent)]
    return hashlib.sha256(json.dumps(read).encode()).hexdigest()


def _read_by(tokenizer: "Tokenizer") -> list[object]:
    """The vocabulary of a tokenizer, and the ids of ``PROBES`` and of its own tokens."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    texts = [*PROBES, *(token for token, _ in vocabulary)]
    return [vocabulary, [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]]


def _reading_options(folder: Path) -> dict[str, object]:
    """The ``READING_OPTIONS`` that are set."""
    file = folder / "tokenizer_config.json"
    config = check_json(read_json(file), fields(), file) if file.is_file() else {}
    return {name: config[name] for name in READING_OPTIONS if config.get(name)}


def _symbols_fingerprint(file: Path) -> str:
    return hashlib.sha256(b"\n".join([*SPECIAL, *symbols_in(file)])).hexdigest()
