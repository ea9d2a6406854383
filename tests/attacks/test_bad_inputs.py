"""Each bad file and option is one line on standard error that names it, a status that is not 0, and no new file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.attacks import bad_inputs
from tests.attacks.bad_inputs import Damage, check_one_line
from tests.attacks.commands import COMMANDS, TRAINING, Inputs, Words
from tests.conftest import CRITERIONS, mlsm
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]


class Place(Inputs):
    """What commands read, in a folder that a test changes, and what they write."""

    @property
    def folder(self) -> Path:
        return self.text.parent

    @property
    def output(self) -> Path:
        return self.folder / "output"


@pytest.fixture(scope="session")
def everything(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Place.within(tmp_path_factory.mktemp("everything"))
    made.make(tiny)
    mlsm(*COMMANDS["encode"](made, made.output))
    return made.folder


@dataclass(frozen=True)
class Case:
    """A command with further words, and what is wrong."""

    command: str
    change: Callable[[Place], object] = lambda place: None
    more: Words = ()


def begun(record: Path) -> Path:
    """The record of work that was begun."""
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text("{}")
    return record


FILES: dict[str, Callable[[Place], Path]] = {
    "model": lambda own: own.model,
    "npm": lambda own: own.npm,
    "denoising": lambda own: own.denoising,
    "train.idx": lambda own: own.data_bin / "train.idx",
    "train.bin": lambda own: own.data_bin / "train.bin",
    "valid.idx": lambda own: own.data_bin / "valid.idx",
    "valid.bin": lambda own: own.data_bin / "valid.bin",
    "dict.txt": lambda own: own.data_bin / "dict.txt",
    "meta of dictionary": lambda own: own.dictionary / "meta.json",
    "dictionary.npy": lambda own: own.dictionary / "dictionary.npy",
    "published": lambda own: own.published,
    "meta of codes": lambda own: own.codes / "meta.json",
    "indptr": lambda own: own.codes / "shard-00000.indptr.npy",
    "atoms": lambda own: own.codes / "shard-00000.atoms.npy",
    "weights": lambda own: own.codes / "shard-00000.weights.npy",
    "meta of store": lambda own: own.store / "meta.json",
    "tokens": lambda own: own.store / "tokens.npy",
    "block starts": lambda own: own.store / "block_starts.npy",
    "keys": lambda own: own.store / "shard-00000.keys.npy",
    "positions": lambda own: own.store / "shard-00000.positions.npy",
    "plan of codes": lambda own: begun(own.codes / "plan.json"),
    "plan in the output": lambda own: begun(own.output / "plan.json"),
    "record of steps": lambda own: begun(own.output / "steps.json"),
    "record of a training": lambda own: begun(own.model.with_name("steps.json")),
    "earlier record of data": lambda own: begun(own.model.with_name("data.json")),
    "text": lambda own: own.text,
    "pairs": lambda own: own.pairs,
    "labelled": lambda own: own.labelled,
    "verbalizer": lambda own: own.verbalizer,
    "tokenizer model": lambda own: own.tokenizer / "sentencepiece.bpe.model",
    "tokenizer dict.txt": lambda own: own.tokenizer / "dict.txt",
    "config.json": lambda own: own.modernbert / "config.json",
    "model.safetensors": lambda own: own.modernbert / "model.safetensors",
    "tokenizer.json": lambda own: own.modernbert / "tokenizer.json",
    "log": lambda own: own.log,
    "ids": lambda own: own.sequences / "ids.npy",
    "starts": lambda own: own.sequences / "starts.npy",
    "meta of sequences": lambda own: own.sequences / "meta.json",
    "meta of coder": lambda own: own.coder / "meta.json",
    "atoms of coder": lambda own: own.coder / "dictionary.npy",
    "meta in the output": lambda own: begun(own.output / "train" / "meta.json"),
}
# commands, a file that they read, and its ways to be wrong
TABLE: list[tuple[tuple[str, ...], str, dict[str, Damage]]] = [
    (
        ("dictionary", "convert model", "evaluate pairs", "finetune", "classify", "evaluate dictionary"),
        "model",
        bad_inputs.CHECKPOINT,
    ),
    (("datastore", "fill"), "npm", bad_inputs.CHECKPOINT),
    (("infill",), "denoising", bad_inputs.DENOISING),
    (("auxiliary",), "model", bad_inputs.LAST_CHECKPOINT),
    (("dictionary", "dictionary --coder"), "train.idx", bad_inputs.INDEX),
    (("dictionary", "dictionary --coder"), "train.bin", bad_inputs.DATA),
    (("encode", "datastore", "evaluate dictionary"), "valid.idx", bad_inputs.INDEX),
    (("encode", "datastore", "evaluate dictionary"), "valid.bin", bad_inputs.DATA),
    (("dictionary", "encode", "datastore"), "dict.txt", bad_inputs.DICT_TXT),
    (("encode", "evaluate dictionary"), "meta of dictionary", bad_inputs.META_OF_DICTIONARY),
    (("encode", "evaluate dictionary"), "dictionary.npy", bad_inputs.ATOMS),
    (("convert dictionary",), "published", bad_inputs.MATRIX),
    (("inspect",), "meta of codes", bad_inputs.META_OF_CODES),
    (("inspect",), "indptr", bad_inputs.ROWS),
    (("inspect",), "atoms", bad_inputs.INDICES),
    (("inspect",), "weights", bad_inputs.WEIGHTS),
    (("fill",), "meta of store", bad_inputs.META_OF_DATASTORE),
    *((("fill",), name, bad_inputs.NPY) for name in ("tokens", "block starts", "keys", "positions")),
    (("encode",), "plan of codes", bad_inputs.PLAN),
    (("datastore",), "plan in the output", bad_inputs.PLAN),
    (("finetune",), "plan in the output", bad_inputs.RECORD),
    (("preprocess",), "record of steps", bad_inputs.STEPS),
    (("auxiliary",), "record of a training", bad_inputs.STEPS),
    (("auxiliary",), "earlier record of data", bad_inputs.PLAN),
    (("tokenizer", "binarize", "convert model"), "text", bad_inputs.TEXT),
    (("evaluate pairs",), "pairs", bad_inputs.PAIRS),
    (("finetune",), "labelled", bad_inputs.LABELLED),
    (("classify",), "labelled", bad_inputs.TEXT),
    (("classify",), "verbalizer", bad_inputs.VERBALIZER),
    (("binarize",), "tokenizer model", bad_inputs.MODEL_PROTO),
    (("binarize",), "tokenizer dict.txt", bad_inputs.DICT_TXT),
    (("dictionary hf:", "convert hf:"), "config.json", bad_inputs.CONFIG),
    (("dictionary hf:", "convert hf:"), "model.safetensors", bad_inputs.SAFETENSORS),
    (("binarize hf:",), "tokenizer.json", bad_inputs.JSON_FILE),
    (("plot",), "log", bad_inputs.LOG),
    (("encode sequences",), "ids", bad_inputs.IDS),
    (("encode sequences",), "starts", bad_inputs.STARTS),
    (("encode sequences",), "meta of sequences", bad_inputs.META_OF_SEQUENCES),
    (("encode sequences",), "meta of coder", bad_inputs.META_OF_CODER),
    (("encode sequences",), "atoms of coder", bad_inputs.ATOMS),
    (("encode sequences",), "plan in the output", bad_inputs.PLAN),
    (("encode sequences",), "config.json", bad_inputs.CONFIG),
    (("encode sequences",), "model.safetensors", bad_inputs.SAFETENSORS),
    (("encode sequences", "binarize sequences"), "tokenizer.json", bad_inputs.JSON_FILE),
    (("binarize sequences",), "text", bad_inputs.TEXT),
    (("binarize sequences",), "meta in the output", bad_inputs.PLAN),
    (("fairseq-train plain_masked_lm", "fairseq-train span_denoising"), "valid.idx", bad_inputs.INDEX),
    (("fairseq-train nonparametric_masked_lm",), "valid.bin", bad_inputs.DATA),
    (("fairseq-train taco", "fairseq-train span_denoising"), "dict.txt", bad_inputs.DICT_TXT),
    (("fairseq-train masked_latent_semantic",), "meta of codes", bad_inputs.META_TO_TRAIN),
    (("fairseq-train masked_latent_semantic",), "indptr", bad_inputs.NPY),
    (("fairseq-train --finetune-from-model",), "model", bad_inputs.WEIGHTS_TO_BEGIN_WITH),
]


INTO_FOLDERS = ("convert model", "convert hf:", "convert dictionary", "binarize sequences", "encode sequences")


def cases() -> Iterator[tuple[str, Case]]:
    for commands, file, damages in TABLE:
        for command in commands:
            for name, damage in damages.items():
                find = FILES[file]
                yield f"{command}: {file}: {name}", Case(command, lambda own, d=damage, f=find: d(f(own)))
    for command in ("dictionary", "datastore", "fill", "evaluate pairs", "infill", "encode sequences"):
        for device in bad_inputs.DEVICES:
            yield f"{command}: --device {device}", Case(command, more=("--device", device))
    for command in (*("tokenizer", "binarize", "dictionary", "datastore", "finetune"), *INTO_FOLDERS):
        yield f"{command}: into a file", Case(command, lambda own: own.output.write_text("mine"))
    for command in ("inspect", "evaluate pairs", "classify", "evaluate dictionary"):
        yield f"{command}: into a folder", Case(command, lambda own: own.output.mkdir())
        yield f"{command}: below a file", Case(command, more=("--output", "text.txt/below"))
    for command, flag, value in (*NUMBERS, *TRAINING_OPTIONS):
        yield f"{command}: {flag} {value}", Case(command, more=(flag, value))


NUMBERS = [
    *(("dictionary", flag, value) for flag in ("--atoms", "--lambda", "--tokens", "--iterations") for value in (0, -1)),
    *(
        ("dictionary", flag, value)
        for flag in ("--batch-size", "--tokens-per-sample", "--threads")
        for value in (0, -3)
    ),
    *(("dictionary", "--layer", value) for value in (-1, 99)),
    *(("dictionary", "--seed", value) for value in (-1,)),
    *(("dictionary --coder", flag, 0) for flag in ("--k", "--learning-rate", "--matryoshka", "--tokens")),
    *(("dictionary --coder", flag, value) for flag, value in (("--k", 5), ("--matryoshka", 4), ("--atoms", 10**7))),
    *(("dictionary --coder", flag, 1) for flag in ("--lambda", "--iterations")),
    *(("evaluate dictionary", flag, value) for flag in ("--max-tokens", "--batch-tokens") for value in (0, -1)),
    ("evaluate dictionary", "--layer", 99),
    *(("encode", flag, 0) for flag in ("--threads", "--batch-tokens", "--shard-tokens", "--coverage")),
    *(("datastore", flag, 0) for flag in ("--threads", "--batch-tokens", "--shard-tokens", "--tokens-per-sample")),
    *(("finetune", flag, 0) for flag in ("--max-epoch", "--patience", "--lr", "--batch-size")),
    *(("tokenizer", "--vocab-size", value) for value in (0, -5, 10, 10**7)),
    *(("binarize", flag, value) for flag, value in (("--workers", 0), ("--max-unk-rate", 2), ("--max-unk-rate", -1))),
    *(("fill", flag, 0) for flag in ("--neighbors", "--topk", "--max-length")),
    *(("infill", flag, 0) for flag in ("--beam", "--max-length")),
    *(("evaluate pairs", "--batch-tokens", value) for value in (0, -1)),
    *(("convert model", "--lines", value) for value in (0, -1)),
    *(("inspect", "--max-tokens", value) for value in (0, -1)),
    *(("binarize sequences", "--max-length", value) for value in (-1, 0, 2)),
    *(("encode sequences", flag, 0) for flag in ("--threads", "--batch-tokens", "--shard-tokens", "--coverage")),
    *(("encode sequences", "--layer", value) for value in (-1, 99)),
]

OF_EVERY_TASK = {
    **dict.fromkeys(("--batch-size", "--tokens-per-sample", "--update-freq", "--required-batch-size-multiple"), 0),
    **dict.fromkeys(("--log-interval", "--save-interval", "--encoder-embed-dim"), 0),
    "--lr": -1,
    **dict.fromkeys(("--num-workers", "--max-update", "--seed"), -1),
    **dict.fromkeys(("--restore-file", "--finetune-from-model"), "absent.pt"),
    **{"--valid-subset": "valid,absent", "--train-subset": "absent", "--save-dir": "text.txt", "--dropout": 2},
    **{"--arch": "transformer_lm", "--criterion": "sentence_prediction", "--lr-scheduler": "polynomial_decay"},
}
TRAINING_OPTIONS = [
    *((f"fairseq-train {task}", flag, value) for task in CRITERIONS for flag, value in OF_EVERY_TASK.items()),
    ("fairseq-train taco", "--max-tokens", 5),
    ("fairseq-train plain_masked_lm", "--criterion", "latent_semantic_kl"),
    ("fairseq-train masked_latent_semantic", "--arch", "roberta"),
    ("fairseq-train masked_latent_semantic", "--num-atoms", 3),
    ("fairseq-train masked_latent_semantic", "--finetune-from-model", "denoising/checkpoint_last.pt"),
    ("fairseq-train span_denoising", "--finetune-from-model", "model/checkpoint_last.pt"),
]
CASES = dict(cases())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_bad_input_is_one_line(name: str, everything: Path, tmp_path: Path, capsys: Capture) -> None:
    if "cuda" in name and torch.cuda.device_count() > 7:
        pytest.skip("this machine has that many GPUs")
    case = CASES[name]
    place = Place.within(shutil.copytree(everything, tmp_path / "place"))
    if case.command == "encode":
        shutil.rmtree(place.codes)
    case.change(place)
    words = (COMMANDS | TRAINING)[case.command](place, place.output)
    check_one_line((*words, *case.more), place.folder, capsys)


def test_there_are_at_least_400() -> None:
    assert len(CASES) >= 400
