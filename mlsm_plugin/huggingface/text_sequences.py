"""Raw text to token sequences of a Hugging Face tokenizer; needs no fairseq."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike, sha256_of_files
from mlsm_plugin.core.files.hf_files import HF_PREFIX, hf_folder
from mlsm_plugin.core.files.planned_folder import PlannedFolder
from mlsm_plugin.core.hidden_states.sources import LONGEST_DEFAULT_BLOCK, default_tokens_per_sample
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.text_files import check_text_files, progress_bar, read_text
from mlsm_plugin.core.text.unknown_tokens import DEFAULT_MAX_UNK_RATE, KnownText, UnknownTokens
from mlsm_plugin.huggingface.token_sequences import IDS_FILE, STARTS_FILE, TokenSequences

logger = logging.getLogger(__name__)

LINES_AT_ONCE = 1000


def ids_of_lines(
    lines: Iterable[str], tokenizer: HuggingFaceTokenizer, unknown: UnknownTokens | None = None
) -> Iterator[list[int] | None]:
    """Hugging Face's ids of each line, without special tokens; None for a blank line, which ends a document.

    A line that follows another line is read with a space before it: otherwise, byte-level pieces would continue the
    last word. With BERT and SentencePiece, each line begins a word in any case. ``unknown`` counts the tokens.
    """
    spaced_lines = (f" {line}" if line and before else line for before, line in pairwise(chain([""], lines)))
    while batch := list(islice(spaced_lines, LINES_AT_ONCE)):
        encoded = iter(tokenizer.encoded([line for line in batch if line]))
        for line in batch:
            if not line:
                yield None
                continue
            ids, offsets = next(encoded)
            if unknown is not None:
                unknown.add(line, ids, offsets, tokenizer.unknown_id)
            yield ids


def default_max_length(tokenizer: PathLike) -> int:
    """The longest sequence of the model in the tokenizer's folder, at most 512; 512 if the folder has no model."""
    folder = hf_folder(tokenizer)
    has_model = (folder / "config.json").is_file()
    return default_tokens_per_sample(f"{HF_PREFIX}{folder}") if has_model else LONGEST_DEFAULT_BLOCK


def write_text_sequences(
    texts: Sequence[PathLike],
    tokenizer: HuggingFaceTokenizer | PathLike,
    output: PathLike,
    *,
    max_length: int | None = None,
    max_unk_rate: float = DEFAULT_MAX_UNK_RATE,
    apart: bool = False,
    overwrite: bool = False,
) -> tuple[TokenSequences, bool]:
    """Tokenize text, and write sequences of whole lines (see :func:`packed`); the folder is written atomically.

    Args:
        texts: files with one sentence per line and blank lines between documents, plain or compressed.
        tokenizer: an open tokenizer, or a folder or hub name, with or without ``hf:``.
        output: folder for the sequences.
        max_length: longest sequence, including special tokens; None: :func:`default_max_length`.
        max_unk_rate: largest share of the tokens and characters that may be unknown; above it, nothing is written.
        apart: each line with tokens becomes one sequence, read without a space before it; lines that are too long are
            cut.
        overwrite: replace other sequences in the folder.

    Returns:
        the sequences, and whether they were written now (False: they existed).

    Raises:
        ValueError: a text is empty or not UTF-8, there is no usable tokenizer, too many tokens are unknown,
            ``max_length`` is too small, or the folder holds other sequences.
        OSError: a text cannot be read, or the folder cannot be written.
    """
    size = check_text_files(texts)
    reader = tokenizer if isinstance(tokenizer, HuggingFaceTokenizer) else HuggingFaceTokenizer(tokenizer)
    length = default_max_length(reader.folder) if max_length is None else max_length
    check_max_length(length)
    KnownText(max_unk_rate=max_unk_rate)  # raises if it is out of range
    room = length - len(reader.surrounded([]))
    plan = _plan(reader, texts, max_length=length, apart=apart)
    advice = "Pass --overwrite to `mlsm binarize`, or delete the folder, or choose another --output"
    folder = PlannedFolder(output, plan, resumable=False, advice=advice)
    if folder.directory.exists() and not folder.directory.is_dir():
        raise ValueError(f"{output} is a file; name a folder for the sequences")
    # a killed process can leave only one of the files
    if not overwrite and folder.is_complete() and all(Path(output, name).exists() for name in (IDS_FILE, STARTS_FILE)):
        corpus = TokenSequences(output)
        if corpus.about.get("max_unk_rate", 1) > max_unk_rate:
            corpus.unknown_tokens(reader).check(str(output), max_unk_rate)
        return corpus, False
    unknown = UnknownTokens()
    cut = 0

    def known_lines() -> Iterator[list[int] | None]:
        nonlocal cut
        lines = read_text(texts, progress.update)
        if apart:
            parts = ids_of_lines((part for line in lines if line for part in (line, "")), reader, unknown)
            for ids in parts:
                cut += ids is not None and len(ids) > room
                yield None if ids is None else ids[:room]
        else:
            yield from ids_of_lines(lines, reader, unknown)
        unknown.check("the text", max_unk_rate)  # before the folder appears

    with progress_bar("tokenizing", size, show=True) as progress:
        sequences = packed(known_lines(), max_length=length, begin=reader.before, end=reader.after)
        corpus = TokenSequences.write(output, sequences, about={**plan, "max_unk_rate": max_unk_rate})
    if cut:
        logger.warning("%d of %d lines are longer than %d ids, and are cut", cut, len(corpus), length)
    if unknown.unknown:
        logger.warning("%s; nothing is learned about them", unknown.describe("the text"))
    return corpus, True


def _plan(
    tokenizer: HuggingFaceTokenizer, texts: Sequence[PathLike], *, max_length: int, apart: bool
) -> dict[str, object]:
    """The values on which the sequences of :func:`write_text_sequences` depend, as JSON."""
    plan: dict[str, object] = {
        "tokenizer": tokenizer.vocabulary_fingerprint,
        "segmentation": tokenizer.segmentation_fingerprint,
        "texts": sha256_of_files(*texts),
        "max_length": max_length,
    }
    if apart:
        plan["apart"] = True
    if (tokenizer.before, tokenizer.after) != ([tokenizer.begin_id], [tokenizer.end_id]):
        plan["around"] = [tokenizer.before, tokenizer.after]
    return plan


def check_max_length(max_length: int) -> None:
    """Raise ValueError if ``max_length`` leaves no room for a token between two special tokens."""
    if max_length < 3:
        raise ValueError("--max-length must be at least 3: two special tokens and one of the text")


def packed(
    lines: Iterable[Sequence[int] | None], *, max_length: int, begin: Sequence[int], end: Sequence[int]
) -> Iterator[list[int]]:
    """Sequences of as many whole lines as fit into ``max_length`` ids, with the ids ``begin`` and ``end`` around them.

    ``lines`` has the ids of each line, and None between documents, which never share a sequence. A line that does not
    fit begins a new sequence. A line that is longer than a sequence is cut, and its last piece is packed with the
    following lines.
    """
    check_max_length(max_length)
    room = max_length - len(begin) - len(end)
    current: list[int] = []
    for line in lines:
        if current and (line is None or len(current) + len(line) > room):
            yield [*begin, *current, *end]
            current = []
        if not line:
            continue
        cut = max(0, (len(line) - 1) // room * room)  # where the last piece of a long line begins
        for first in range(0, cut, room):
            yield [*begin, *line[first : first + room], *end]
        current.extend(line[cut:])
    if current:
        yield [*begin, *current, *end]
