"""Writes labelled texts as the dataset that fairseq's ``sentence_prediction`` loads."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from fairseq.data import Dictionary

from mlsm_plugin.evaluation.labelled_texts import LabelledTexts
from mlsm_plugin.fairseq_seams.binarized_files import StreamingMMapBuilder
from mlsm_plugin.files.atomic_files import atomic_directory
from mlsm_plugin.tokenization.text_tokenizer import TextTokenizer
from mlsm_plugin.tokenization.unknown_tokens import UnknownTokens

logger = logging.getLogger(__name__)

DICTIONARY = "dict.txt"


def check_tokens(texts: LabelledTexts, tokenizer: TextTokenizer, max_unk_rate: float) -> None:
    """Check that every text has tokens; warn of unknown ones.

    Raises:
        ValueError: a text has no token, such as a zero-width space (the message names its line), or more than the share
            ``max_unk_rate`` of the tokens of all texts is unknown.
    """
    found = UnknownTokens()
    for index, own in enumerate(texts.texts):
        for text in own:
            encoded = tokenizer.line_encoder.encode_batch([text])
            if not len(encoded.ids):
                raise ValueError(f"{texts.where(index)}: the text {text!r} has no tokens after normalization")
            found.tokens += len(encoded.ids) - 1  # </s>
            found.unknown += encoded.unknown
            found.characters.update(encoded.unknown_characters)
    found.check(str(texts.path), max_unk_rate)
    if found.unknown:
        logger.warning(found.describe(str(texts.path)))


def write_classification_data(
    splits: Mapping[str, LabelledTexts], tokenizer: TextTokenizer, output: Path, *, positions: int, regression: bool
) -> dict[str, int]:
    """Write ``input0``, ``input1`` (for pairs) and ``label``, each with ``<split>.{bin,idx}`` and ``dict.txt``.

    Args:
        splits: texts by split; ``train`` decides which labels exist.
        tokenizer: the tokenizer of the checkpoint.
        output: the folder to write; nothing appears there unless everything succeeds.
        positions: longest sample in tokens, with those that mark its beginning and its ends.
        regression: labels are numbers, in ``label/<split>.label``.

    Returns:
        for each split how many samples are longer; training cuts them.
    """
    too_long = {}
    with atomic_directory(output) as folder:
        inputs = [folder / f"input{i}" for i in range(splits["train"].texts_per_line)]
        for directory in (*inputs, folder / "label"):
            directory.mkdir()
        for name, texts in splits.items():
            lengths = np.zeros(len(texts), np.int64)
            for column, directory in enumerate(inputs):
                builder = StreamingMMapBuilder(str(directory / f"{name}.bin"), len(tokenizer.dictionary))
                for line, own in enumerate(texts.texts):
                    ids = tokenizer.ids_of(own[column])
                    builder.add_sentences(ids, np.array([len(ids)]))
                    lengths[line] += 1 + len(ids)  # BOS, or the separator
                builder.finalize(str(directory / f"{name}.idx"))
            too_long[name] = int((lengths > positions).sum())
        for directory in inputs:
            tokenizer.dictionary.save(str(directory / DICTIONARY))
        _write_labels(splits, folder / "label", regression=regression)
    return too_long


def _write_labels(splits: Mapping[str, LabelledTexts], folder: Path, *, regression: bool) -> None:
    if regression:
        for name, texts in splits.items():
            (folder / f"{name}.label").write_text("".join(f"{label}\n" for label in texts.labels), encoding="utf-8")
        return
    counts = Counter(splits["train"].labels)
    names = sorted(counts)
    special = Dictionary().symbols  # a label that is called like one of these gets an id of its own
    flags = {label: " #fairseq:overwrite" if label in special else "" for label in names}
    lines = "".join(f"{label} {counts[label]}{flags[label]}\n" for label in names)
    (folder / DICTIONARY).write_text(lines, encoding="utf-8")
    dictionary = Dictionary.load(str(folder / DICTIONARY))
    for name, texts in splits.items():
        builder = StreamingMMapBuilder(str(folder / f"{name}.bin"), len(dictionary))
        for label in texts.labels:
            builder.add_sentences(np.array([dictionary.index(label), dictionary.eos()]), np.array([2]))
        builder.finalize(str(folder / f"{name}.idx"))
