"""Convert pairs of corrupted texts, with sentinels in them, to a dataset for ``--task span_denoising``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import sentencepiece as spm
from fairseq.data import Dictionary

from mlsm_plugin.fairseq_seams.mmap_builder import StreamingMMapBuilder
from mlsm_plugin.files.atomic_files import atomic_directory, write_json
from mlsm_plugin.tokenization.binarize import TRAIN_ANOTHER
from mlsm_plugin.tokenization.data_folder import SIDES, SUMMARY_NAME, remove_earlier_run
from mlsm_plugin.tokenization.sentinels import dictionary_with_sentinels, encode_with_sentinels
from mlsm_plugin.tokenization.text_files import PathLike, check_text_files, progress_bar, read_lines
from mlsm_plugin.tokenization.text_tokenizer import SentencePieceTokenizer
from mlsm_plugin.tokenization.unknown_tokens import DEFAULT_MAX_UNK_RATE, UnknownTokens, check_max_unk_rate


def binarize_pairs(
    *,
    tokenizer: PathLike,
    splits: Mapping[str, tuple[PathLike, PathLike]],
    output: PathLike,
    sentinels: int,
    max_unk_rate: float = DEFAULT_MAX_UNK_RATE,
    progress: bool = True,
) -> dict[str, dict[str, int]]:
    """Encode pairs of files, line by line, and write ``<split>.source.{bin,idx}`` and ``<split>.target.{bin,idx}``.

    In the text, sentinels are written ``<extra_id_0>``, ``<extra_id_1>``, ...; their ids follow those of ``dict.txt``.

    Args:
        tokenizer: folder written by ``mlsm tokenizer``.
        splits: source and target file of each split; lines of the same number belong together.
        output: the data folder. Nothing appears there unless all splits succeed; splits of an earlier run are replaced.
        sentinels: number of sentinels.
        max_unk_rate: largest share of unknown tokens in a file; above it, nothing is written.
        progress: show a progress bar on a terminal.

    Returns:
        ``pairs``, ``source_tokens``, ``target_tokens`` and ``unknown`` (tokens) of each split.

    Raises:
        ValueError: a file has more lines than the other, a line without tokens, an invalid sentinel, or too many
            unknown tokens.
        OSError: a file cannot be read or written.
    """
    check_max_unk_rate(max_unk_rate)
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} exists and is not a folder; choose another name")
    sizes = {split: check_text_files([files[0]]) for split, files in splits.items()}
    for _, target in splits.values():
        check_text_files([target])
    opened = SentencePieceTokenizer(tokenizer)
    dictionary, _ = dictionary_with_sentinels(tokenizer, sentinels)
    figures = {}
    with atomic_directory(output) as folder:
        for split, files in splits.items():
            builders = [StreamingMMapBuilder(str(folder / f"{split}.{side}.bin"), len(dictionary)) for side in SIDES]
            figures[split] = {"pairs": 0, "source_tokens": 0, "target_tokens": 0, "unknown": 0}
            unknown = dict.fromkeys(SIDES, 0)
            with progress_bar(split, sizes[split], progress) as bar:
                for pair in _pairs(files, opened.processor, dictionary, sentinels, bar):
                    figures[split]["pairs"] += 1
                    for side, builder, ids in zip(SIDES, builders, pair, strict=True):
                        builder.add_sentences(ids, np.array([len(ids)]))
                        figures[split][f"{side}_tokens"] += len(ids)
                        unknown[side] += int((ids == dictionary.unk()).sum())
            for side, path in zip(SIDES, files, strict=True):
                text_tokens = figures[split][f"{side}_tokens"] - figures[split]["pairs"]  # without EOS
                UnknownTokens(text_tokens, unknown[side]).check(str(path), max_unk_rate, remedy=TRAIN_ANOTHER)
            figures[split]["unknown"] = sum(unknown.values())
            for side, builder in zip(SIDES, builders, strict=True):
                builder.finalize(str(folder / f"{split}.{side}.idx"))
        opened.write_to(folder)
        remove_earlier_run(output)
    summary = {"tokenizer_sha256": opened.fingerprint, "sentinels": sentinels}
    write_json(output / SUMMARY_NAME, {**summary, "splits": figures})
    return figures


def _pairs(
    files: tuple[PathLike, PathLike],
    processor: spm.SentencePieceProcessor,
    dictionary: Dictionary,
    sentinels: int,
    bar: object,
) -> Iterator[tuple[np.ndarray, ...]]:
    """The ids of source and target of each line, each with EOS."""

    def pieces_of(text: str) -> list[str]:
        pieces: list[str] = processor.encode(text, out_type=str)
        return pieces

    lines = (read_lines(files[0], bar.update), read_lines(files[1]))  # type: ignore[attr-defined]
    for number, pair in enumerate(itertools.zip_longest(*lines), 1):
        encoded = []
        for path, line in zip(files, pair, strict=True):
            if line is None:
                raise ValueError(f"{path} has {number - 1} lines, the other file of the pair has more")
            if not line:
                raise ValueError(f"{path}, line {number} is blank; each line needs a partner")
            try:
                ids = encode_with_sentinels(line, pieces_of, dictionary, sentinels)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if not ids:
                raise ValueError(f"{path}, line {number} has no tokens after normalization: {line!r}")
            encoded.append(np.array([*ids, dictionary.eos()], dtype=np.int64))
        yield tuple(encoded)
