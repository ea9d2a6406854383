"""The dataset of fairseq's ``sentence_prediction``, and classifiers as its trainings leave them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fairseq import tasks
from fairseq.data import Dictionary

from mlsm_plugin.core.files.model_files import copy_dicts
from mlsm_plugin.fairseq_plugin.compat.binarized_files import StreamingMMapBuilder
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import open_tokenizer
from tests.composed_once import configuration_of
from tests.conftest import TINY_MODEL
from tests.tiny_models import POSITIONS, TinyData, save_model
from tests.tiny_run import seeded_model

OVERWRITE = " #fairseq:overwrite"  # a label that is called like a special symbol gets an id of its own


def write_classification_data(source: Path, texts: Sequence[str], labels: Sequence[str], output: Path) -> None:
    """Write ``input0`` and ``label``, each with the split ``train``, and the tokenizer of the folder ``source``."""
    tokenizer = open_tokenizer(source)
    for name in ("input0", "label"):
        (output / name).mkdir(parents=True)
    builder = StreamingMMapBuilder(str(output / "input0" / "train.bin"), len(tokenizer.dictionary))
    for text in texts:
        ids = tokenizer.encode_batch([text]).ids
        builder.add_sentences(ids, np.array([len(ids)]))
    builder.finalize(str(output / "input0" / "train.idx"))
    tokenizer.dictionary.save(str(output / "input0" / "dict.txt"))
    tokenizer.write_to(output)
    special = Dictionary().symbols
    lines = [f"{label} 1{OVERWRITE if label in special else ''}\n" for label in sorted({*labels})]
    (output / "label" / "dict.txt").write_text("".join(lines), encoding="utf-8")
    dictionary = Dictionary.load(str(output / "label" / "dict.txt"))
    builder = StreamingMMapBuilder(str(output / "label" / "train.bin"), len(dictionary))
    for label in labels:
        builder.add_sentences(np.array([dictionary.index(label), dictionary.eos()]), np.array([2]))
    builder.finalize(str(output / "label" / "train.idx"))


def save_classifier(tiny: TinyData, folder: Path, labels: Sequence[str], *flags: object) -> Path:
    """The folder of a training of ``sentence_prediction``, with random weights."""
    data = folder / "data"
    write_classification_data(tiny.tokenizer, ["The name is bound."] * len(labels), labels, data)
    words: list[object] = [data, "--task", "sentence_prediction", "--criterion", "sentence_prediction", *TINY_MODEL]
    words += ["--optimizer", "adam", "--lr", "1e-3", "--max-positions", POSITIONS, "--num-classes", len({*labels})]
    words += ["--init-token", 0, "--separator-token", 2, *flags]
    cfg = configuration_of([str(word) for word in words])
    save_model(cfg, seeded_model(cfg, tasks.setup_task(cfg.task)), folder / "run", data)
    copy_dicts(data, folder / "run")
    return folder / "run"
