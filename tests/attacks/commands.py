"""The ``mlsm`` commands that the attacks run, and all the files that they read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from tests.conftest import CRITERIONS, PLUGIN, TINY_MODEL, TINY_TRAINING, WITH_AUXILIARY, mlsm
from tests.denoising_flags import TINY
from tests.hub.modern_models import make_stock
from tests.tiny_models import TinyData, save_untrained, save_untrained_npm

Words = tuple[object, ...]
# a small dictionary
SMALL = ("--atoms", 4, "--tokens", 300, "--iterations", 2, "--batch-size", 50, "--threads", 1)


@dataclass(frozen=True)
class Inputs:
    """What the commands read."""

    text: Path
    tokenizer: Path
    data_bin: Path
    model: Path
    npm: Path
    denoising: Path
    dictionary: Path
    store: Path
    modernbert: Path
    published: Path
    log: Path
    pairs: Path
    labelled: Path
    verbalizer: Path
    sequences: Path
    coder: Path

    @classmethod
    def within(cls, folder: Path) -> Self:
        """Where all of them are in one folder."""
        files = {
            **{name: name for name in ("tokenizer", "dictionary", "store", "modernbert", "verbalizer")},
            **{"sequences": "sequences/train", "coder": "coder"},
            **{name: f"{name}/checkpoint_last.pt" for name in ("model", "npm", "denoising")},
            **{"data_bin": "data-bin", "text": "text.txt", "published": "atoms.npy", "log": "train.log"},
            **{"pairs": "pairs.jsonl", "labelled": "labelled.tsv"},
        }
        return cls(**{name: folder / file for name, file in files.items()})

    @property
    def codes(self) -> Path:
        return self.data_bin / "valid.codes"

    def make(self, tiny: TinyData) -> None:
        """Make all of them but ``codes``."""
        for name in ("tokenizer", "data_bin"):
            shutil.copytree(getattr(tiny, name), getattr(self, name))
        shutil.copytree(tiny.model.parent, self.model.parent)
        shutil.copyfile(tiny.text, self.text)
        save_untrained_npm(tiny, self.npm.parent)
        options = {"task": "span_denoising", "criterion": "cross_entropy", "arch": "denoising_small"}
        save_untrained(self.data_bin, self.denoising.parent, *TINY, **options)
        make_stock("modernbert", self.text, self.modernbert)
        np.save(self.published, np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32))
        lines = [f"x | INFO | train_inner | epoch 001: {n} / 9 loss={9 - n}, num_updates={n}" for n in (1, 2, 3)]
        self.log.write_text("\n".join(lines).replace("x |", "2026-01-01 00:00:00 |"))
        self.pairs.write_text('{"sentence_good": "The name is bound.", "sentence_bad": "Names the is."}\n')
        self.labelled.write_text("a\tThe name is bound.\nb\tNames are bound.\n" * 2)
        self.verbalizer.write_text("a\tname\nb\tobject\n")
        mlsm(*COMMANDS["dictionary"](self, self.dictionary))
        mlsm(*COMMANDS["datastore"](self, self.store))
        mlsm(*COMMANDS["binarize sequences"](self, self.sequences.parent))
        mlsm(*COMMANDS["convert dictionary"](self, self.coder))


def _dictionary(own: Inputs, output: Path) -> Words:
    return ("dictionary", own.data_bin, "--auxiliary", own.model, "--layer", 1, "--output", output, *SMALL)


def _binarize(own: Inputs, output: Path) -> Words:
    return ("binarize", "--tokenizer", own.tokenizer, "--train", own.text, "--valid", own.text, "--output", output)


# each with its output; `encode` writes into the dataset and `auxiliary` into the folder of the model
COMMANDS: dict[str, Callable[[Inputs, Path], Words]] = {
    "tokenizer": lambda own, output: ("tokenizer", "--input", own.text, "--vocab-size", 200, "--output", output),
    "binarize": _binarize,
    "binarize hf:": lambda own, output: (*_binarize(own, output), "--tokenizer", f"hf:{own.modernbert}"),
    "auxiliary": lambda own, output: (
        *("auxiliary", own.data_bin, "--save-dir", own.model.parent, "--max-update", 1, "--cpu"),
    ),
    "dictionary": _dictionary,
    "dictionary hf:": lambda own, output: (*_dictionary(own, output), "--auxiliary", f"hf:{own.modernbert}"),
    "dictionary --coder": lambda own, output: (
        *("dictionary", own.data_bin, "--auxiliary", own.model, "--layer", 1, "--output", output, "--coder", "topk"),
        *("--k", 2, "--atoms", 4, "--tokens", 300, "--batch-size", 50, "--threads", 1),
    ),
    "evaluate dictionary": lambda own, output: (
        *("evaluate", "dictionary", own.dictionary, own.data_bin, "--auxiliary", own.model, "--output", output),
        *("--max-tokens", 300, "--threads", 1),
    ),
    "encode": lambda own, output: (
        *("encode", own.data_bin, "--auxiliary", own.model, "--dictionary", own.dictionary),
        *("--splits", "valid", "--shard-tokens", 1500, "--threads", 1),
    ),
    "binarize sequences": lambda own, output: (
        *("binarize", "--format", "sequences", "--train", own.text, "--tokenizer", f"hf:{own.modernbert}"),
        *("--output", output, "--max-length", 24),
    ),
    "encode sequences": lambda own, output: (
        *("encode", own.sequences, "--auxiliary", f"hf:{own.modernbert}", "--dictionary", own.coder, "--layer", 2),
        *("--output", output),
        *("--shard-tokens", 2500, "--threads", 1),
    ),
    "convert dictionary": lambda own, output: (
        *("convert", own.published, output, "--transpose", "--normalize", "--lambda", 0.1),
    ),
    "preprocess": lambda own, output: (
        *("preprocess", "--train", own.text, "--valid", own.text, "--auxiliary", own.model, "--layer", 1),
        *("--output", output, *SMALL[:6], "--threads", 1),
    ),
    "datastore": lambda own, output: (
        *("npm", "datastore", own.data_bin, "--checkpoint", own.npm, "--output", output),
        *("--splits", "valid", "--shard-tokens", 1500),
    ),
    "datastore --index": lambda own, output: (*COMMANDS["datastore"](own, output), "--index", "flat"),
    "fill": lambda own, output: (
        *("npm", "fill", "--checkpoint", own.npm, "--datastore", own.store, "The <mask> is bound.", "--neighbors", 4),
    ),
    "infill": lambda own, output: (
        *("infill", "--checkpoint", own.denoising, "The <extra_id_0> walks.", "--beam", 1, "--max-length", 2),
    ),
    "inspect": lambda own, output: ("inspect", own.data_bin, "--split", "valid", "--output", output),
    "plot": lambda own, output: ("plot", own.log, "--output", output),
    "evaluate pairs": lambda own, output: (
        *("evaluate", "pairs", "--checkpoint", own.model, "--input", own.pairs, "--output", output),
    ),
    "classify": lambda own, output: (
        *("npm", "classify", "--checkpoint", own.model, "--template", "{} <mask>", "--verbalizer", own.verbalizer),
        *("--input", own.labelled, "--output", output, "--parametric"),
    ),
    "finetune": lambda own, output: (
        *("finetune", "--checkpoint", own.model, "--train", own.labelled, "--valid", own.labelled),
        *("--output", output, "--max-epoch", 1, "--cpu"),
    ),
    "convert model": lambda own, output: ("convert", own.model, output, "--text", own.text, "--lines", 2),
    "convert hf:": lambda own, output: ("convert", own.modernbert, output, "--text", own.text, "--lines", 2),
}


def _fairseq_train(task: str, *flags: object) -> Callable[[Inputs, Path], Words]:
    size = TINY if task == "span_denoising" else (*TINY_MODEL, "--max-positions", 40)
    has_auxiliary = task in WITH_AUXILIARY
    chosen = ("--task", task, "--criterion", CRITERIONS[task], *TINY_TRAINING, *size, "--train-subset", "valid", *flags)
    return lambda own, output: (
        *("fairseq-train", own.data_bin, "--user-dir", PLUGIN, *chosen, "--save-dir", own.text.parent),
        *("--max-update", 1, "--tokens-per-sample", 24),
        *(("--auxiliary-checkpoint", own.model) if has_auxiliary else ()),
    )


TRAINING: dict[str, Callable[[Inputs, Path], Words]] = {
    f"fairseq-train {task}": _fairseq_train(task) for task in CRITERIONS
}
TRAINING["fairseq-train --finetune-from-model"] = lambda own, output: (
    *TRAINING["fairseq-train plain_masked_lm"](own, output),
    *("--max-positions", 32, "--finetune-from-model", own.model),
)
# commands that write files, and do not train
WRITING = (
    *("tokenizer", "binarize", "dictionary", "encode", "datastore --index", "inspect", "plot"),
    *("evaluate pairs", "classify", "convert model", "convert hf:", "convert dictionary"),
    *("dictionary --coder", "evaluate dictionary", "binarize sequences", "encode sequences"),
)
