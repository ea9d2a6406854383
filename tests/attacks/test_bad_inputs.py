"""Each bad file and option is one line on standard error that names it, a status that is not 0, and no new file."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mlsm_plugin.cli.main import main
from tests.attacks import bad_inputs
from tests.attacks.bad_inputs import Damage, snapshot
from tests.attacks.test_faults import SMALL, Inputs, inputs
from tests.conftest import mlsm
from tests.denoising_flags import TINY
from tests.tiny_models import save_untrained

__all__ = ["inputs"]

Capture = pytest.CaptureFixture[str]
Words = tuple[object, ...]


class Place:
    """Copies of everything that commands read, in one folder that a test changes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output, self.data_bin = folder, folder / "output", folder / "data-bin"
        self.tokenizer, self.dictionary, self.store = (folder / name for name in ("tokenizer", "dictionary", "store"))
        self.model, self.npm, self.denoising = (folder / name / "checkpoint_last.pt" for name in ("model", "npm", "t5"))
        self.text, self.pairs, self.labelled = (folder / name for name in ("text.txt", "pairs.jsonl", "labelled.tsv"))
        self.log, self.published, self.modernbert = (folder / name for name in ("train.log", "atoms.npy", "modernbert"))
        self.codes, self.verbalizer = folder / "data-bin" / "valid.codes", folder / "words"


@pytest.fixture(scope="session")
def everything(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny, place = inputs.tiny, Place(tmp_path_factory.mktemp("everything"))
    for source, target in {
        tiny.data_bin: place.data_bin,
        tiny.tokenizer: place.tokenizer,
        tiny.model.parent: place.model.parent,
        inputs.npm.parent: place.npm.parent,
        inputs.dictionary: place.dictionary,
        inputs.store: place.store,
        inputs.modernbert: place.modernbert,
    }.items():
        shutil.copytree(source, target)
    for source, target in {
        tiny.text: place.text,
        inputs.pairs: place.pairs,
        inputs.labelled: place.labelled,
        inputs.verbalizer: place.verbalizer,
        inputs.log: place.log,
        inputs.published: place.published,
    }.items():
        shutil.copyfile(source, target)
    options = {"task": "span_denoising", "criterion": "cross_entropy", "arch": "denoising_small"}
    save_untrained(tiny.data_bin, place.denoising.parent, *TINY, **options)
    mlsm(*COMMANDS["encode"](place))
    return place.folder


def learning(place: Place) -> Words:
    return ("dictionary", place.data_bin, "--auxiliary", place.model, "--layer", 1, "--output", place.output, *SMALL)


def binarizing(place: Place) -> Words:
    files = ("--train", place.text, "--valid", place.text)
    return ("binarize", "--tokenizer", place.tokenizer, *files, "--output", place.output)


COMMANDS: dict[str, Callable[[Place], Words]] = {
    "dictionary": learning,
    "dictionary --import": lambda own: (*learning(own), "--import", own.published),
    "dictionary hf:": lambda own: (*learning(own), "--auxiliary", f"hf:{own.modernbert}"),
    "encode": lambda own: (
        *("encode", own.data_bin, "--auxiliary", own.model, "--dictionary", own.dictionary),
        *("--splits", "valid", "--threads", 1),
    ),
    "datastore": lambda own: (
        *("datastore", "build", own.data_bin, "--checkpoint", own.npm, "--output", own.output, "--splits", "valid"),
    ),
    "fill": lambda own: (
        *("fill", "--checkpoint", own.npm, "--datastore", own.store, "The <mask> is bound.", "--k", 4),
    ),
    "classify": lambda own: (
        *("classify", "--checkpoint", own.model, "--template", "{} <mask>", "--verbalizer", own.verbalizer),
        *("--input", own.labelled, "--output", own.output, "--parametric"),
    ),
    "evaluate-pairs": lambda own: (
        *("evaluate-pairs", "--checkpoint", own.model, "--input", own.pairs, "--output", own.output),
    ),
    "finetune": lambda own: (
        *("finetune", "--checkpoint", own.model, "--train", own.labelled, "--valid", own.labelled),
        *("--output", own.output, "--max-epoch", 1, "--cpu"),
    ),
    "infill": lambda own: (
        *("infill", "--checkpoint", own.denoising, "The <extra_id_0> walks.", "--beam", 1, "--max-length", 2),
    ),
    "export-hf": lambda own: ("export-hf", own.model, own.output, "--text", own.text, "--lines", 2),
    "import-hf": lambda own: ("import-hf", own.modernbert, own.output, "--text", own.text, "--lines", 2),
    "binarize": binarizing,
    "binarize hf:": lambda own: (*binarizing(own), "--tokenizer", f"hf:{own.modernbert}"),
    "tokenizer": lambda own: ("tokenizer", "--input", own.text, "--vocab-size", 200, "--output", own.output),
    "inspect": lambda own: ("inspect", own.data_bin, "--split", "valid", "--output", own.output),
    "plot": lambda own: ("plot", own.log, "--output", own.output),
    "auxiliary": lambda own: (
        *("auxiliary", own.data_bin, "--save-dir", own.model.parent, "--max-update", 1, "--cpu"),
    ),
}


@dataclass(frozen=True)
class Case:
    """A command with further words, and what is wrong."""

    command: str
    change: Callable[[Place], object] = lambda place: None
    more: Words = ()


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
}
# commands, a file that they read, and its ways to be wrong
TABLE: list[tuple[tuple[str, ...], str, dict[str, Damage]]] = [
    (("dictionary", "export-hf", "evaluate-pairs", "finetune", "classify"), "model", bad_inputs.CHECKPOINT),
    (("datastore", "fill"), "npm", bad_inputs.CHECKPOINT),
    (("infill",), "denoising", bad_inputs.DENOISING),
    (("auxiliary",), "model", bad_inputs.LAST_CHECKPOINT),
    (("dictionary", "dictionary --import"), "train.idx", bad_inputs.INDEX),
    (("dictionary", "dictionary --import"), "train.bin", bad_inputs.DATA),
    (("encode", "datastore"), "valid.idx", bad_inputs.INDEX),
    (("encode", "datastore"), "valid.bin", bad_inputs.DATA),
    (("dictionary", "encode", "datastore"), "dict.txt", bad_inputs.DICT_TXT),
    (("encode",), "meta of dictionary", bad_inputs.META_OF_DICTIONARY),
    (("encode",), "dictionary.npy", bad_inputs.ATOMS),
    (("dictionary --import",), "published", bad_inputs.ATOMS),
    (("inspect",), "meta of codes", bad_inputs.META_OF_CODES),
    (("inspect",), "indptr", bad_inputs.ROWS),
    (("inspect",), "atoms", bad_inputs.INDICES),
    (("inspect",), "weights", bad_inputs.WEIGHTS),
    (("fill",), "meta of store", bad_inputs.META_OF_DATASTORE),
    *((("fill",), name, bad_inputs.NPY) for name in ("tokens", "block starts", "keys", "positions")),
    (("tokenizer", "binarize", "export-hf"), "text", bad_inputs.TEXT),
    (("evaluate-pairs",), "pairs", bad_inputs.PAIRS),
    (("finetune",), "labelled", bad_inputs.LABELLED),
    (("classify",), "labelled", bad_inputs.TEXT),
    (("classify",), "verbalizer", bad_inputs.VERBALIZER),
    (("binarize",), "tokenizer model", bad_inputs.MODEL_PROTO),
    (("binarize",), "tokenizer dict.txt", bad_inputs.DICT_TXT),
    (("dictionary hf:", "import-hf"), "config.json", bad_inputs.CONFIG),
    (("dictionary hf:", "import-hf"), "model.safetensors", bad_inputs.SAFETENSORS),
    (("binarize hf:",), "tokenizer.json", bad_inputs.JSON_FILE),
    (("plot",), "log", bad_inputs.LOG),
]


def cases() -> Iterator[tuple[str, Case]]:
    for commands, file, damages in TABLE:
        for command in commands:
            for name, damage in damages.items():
                find = FILES[file]
                yield f"{command}: {file}: {name}", Case(command, lambda own, d=damage, f=find: d(f(own)))
    for command in ("dictionary", "datastore", "fill", "evaluate-pairs", "infill"):
        for device in bad_inputs.DEVICES:
            yield f"{command}: --device {device}", Case(command, more=("--device", device))
    for command in ("tokenizer", "binarize", "dictionary", "datastore", "finetune", "export-hf", "import-hf"):
        yield f"{command}: into a file", Case(command, lambda own: own.output.write_text("mine"))
    for command in ("inspect", "evaluate-pairs", "classify"):
        yield f"{command}: into a folder", Case(command, lambda own: own.output.mkdir())
        yield f"{command}: below a file", Case(command, more=("--output", "text.txt/below"))
    for command, flag, value in NUMBERS:
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
    *(("encode", flag, 0) for flag in ("--threads", "--batch-tokens", "--shard-tokens", "--coverage")),
    *(("datastore", flag, 0) for flag in ("--threads", "--batch-tokens", "--shard-tokens", "--tokens-per-sample")),
    *(("finetune", flag, 0) for flag in ("--max-epoch", "--patience", "--lr", "--batch-size")),
    *(("tokenizer", "--vocab-size", value) for value in (0, -5, 10, 10**7)),
    *(("binarize", flag, value) for flag, value in (("--workers", 0), ("--max-unk-rate", 2), ("--max-unk-rate", -1))),
    *(("fill", flag, 0) for flag in ("--k", "--topk", "--max-length")),
    *(("infill", flag, 0) for flag in ("--beam", "--max-length")),
    *(("evaluate-pairs", "--batch-tokens", value) for value in (0, -1)),
    *(("export-hf", "--lines", value) for value in (0, -1)),
    *(("inspect", "--max-tokens", value) for value in (0, -1)),
]

CASES = dict(cases())
SAMPLE = random.Random(16).sample(sorted(CASES), 40)


def check(name: str, everything: Path, folder: Path, capsys: Capture) -> None:
    case = CASES[name]
    place = Place(folder / "place")
    shutil.copytree(everything, place.folder)
    if case.command == "encode":
        shutil.rmtree(place.codes)
    case.change(place)
    before = snapshot(place.folder)
    words = [str(word) for word in (*COMMANDS[case.command](place), *case.more)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.folder)
        capsys.readouterr()
        try:
            status = main(words)
        except SystemExit as stopped:  # argparse's
            status = int(str(stopped.code))
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if "error: " in line]
    assert status in (1, 2), (status, printed)
    assert len(lines) == 1, printed.err
    assert "Traceback" not in printed.err
    assert len(lines[0]) < 700
    assert snapshot(place.folder) == before


@pytest.mark.parametrize("name", SAMPLE)
def test_some_bad_inputs_are_one_line(name: str, everything: Path, tmp_path: Path, capsys: Capture) -> None:
    check(name, everything, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_bad_input_is_one_line(name: str, everything: Path, tmp_path: Path, capsys: Capture) -> None:
    if "cuda" in name and torch.cuda.device_count() > 7:
        pytest.skip("this machine has that many GPUs")
    check(name, everything, tmp_path, capsys)


def test_there_are_at_least_400() -> None:
    assert len(CASES) >= 400
