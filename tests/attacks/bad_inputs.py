"""Files and options that no command can use: for each kind of file, its ways to be wrong."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import struct
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlsm_plugin.cli.main import main
from tests.conftest import REPOSITORY
from tests.fairseq_process import run_fairseq_train

# a change of a file or folder that is there
Damage = Callable[[Path], object]
DEEP = "[" * 100_000


def replaced(content: bytes | str) -> Damage:
    """The file has this content."""
    data = content.encode() if isinstance(content, str) else content
    return lambda path: path.write_bytes(data)


def cut(share: float) -> Damage:
    """The file ends too early."""
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def removed(path: Path) -> None:
    path.unlink()


def made_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def bytes_at(place: int, value: bytes) -> Damage:
    """Some bytes are others."""

    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[place : place + len(value)] = value
        path.write_bytes(content)

    return change


def json_with(**values: object) -> Damage:
    """A JSON dictionary has these values; DELETED removes a key."""

    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        content.update(values)
        path.write_text(json.dumps({key: value for key, value in content.items() if value != DELETED}))

    return change


def state_with(change: Callable[[dict[str, Any]], object]) -> Damage:
    """A checkpoint holds something else."""

    def write(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        torch.save(state if (new := change(state)) is None or not isinstance(new, dict) else new, path)

    return write


def npy(array: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def npy_header_only(shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.ones(3))
    return buffer.getvalue()


def a_weight(state: dict[str, Any]) -> str:
    return next(name for name in state["model"] if name.endswith("layers.0.fc1.weight"))


DELETED = "deleted"
ANY_FILE: dict[str, Damage] = {
    "empty": replaced(b""),
    "garbage": replaced(bytes(range(256)) * 8),
    "absent": removed,
    "a folder": made_folder,
}
CHECKPOINT: dict[str, Damage] = {
    **ANY_FILE,
    "half": cut(0.58),
    "without its last byte": cut(0.99999),
    "text": replaced("a checkpoint"),
    "a list": state_with(lambda state: {"model": [1]}),
    "without configuration": state_with(lambda state: state.pop("cfg")),
    "without weights": state_with(lambda state: state.pop("model")),
    "configuration of another type": state_with(lambda state: state.update(cfg=[1, 2])),
    "unknown task": state_with(lambda state: state["cfg"]["task"].update(_name="mystery")),
    "unknown architecture": state_with(lambda state: vars(state["cfg"]["model"]).update(_name="mystery")),
    "options that are a number": state_with(lambda state: state["cfg"].update(task=3)),
    "model that is nothing": state_with(lambda state: state["cfg"].update(model=Namespace())),
    "missing weight": state_with(lambda state: state["model"].pop(a_weight(state))),
    "misshapen weight": state_with(lambda state: state["model"].update({a_weight(state): torch.zeros(2, 2, 2)})),
    "weight that is text": state_with(lambda state: state["model"].update({a_weight(state): "x"})),
    "more layers than weights": state_with(lambda state: vars(state["cfg"]["model"]).update(encoder_layers=3)),
}
JSON_FILE: dict[str, Damage] = {
    **ANY_FILE,
    "half": cut(0.5),
    "null": replaced("null"),
    "list": replaced("[1, 2]"),
    "number": replaced("17"),
    "deep": replaced(DEEP),
    "another encoding": replaced('{"a": "\u00e9"}'.encode("latin-1")),
}
# what a command left that was stopped
RECORD = {name: damage for name, damage in JSON_FILE.items() if name != "absent"}
STEPS = {**RECORD, "step that is a number": json_with(tokenizer=3), "no signature": json_with(tokenizer={"done": True})}
PLAN = {**RECORD, "of other work": json_with(meta={"n_atoms": 3})}
NPY: dict[str, Damage] = {
    **ANY_FILE,
    "half": cut(0.5),
    "a byte too many": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "terabytes": replaced(npy_header_only((1 << 30, 1 << 12))),
    "negative": replaced(npy_header_only((1 << 30, 1 << 12)).replace(b"1073741824", b"       -12")),
    "npz": replaced(npz()),
    "objects": replaced(npy(np.array([{}], dtype=object), allow_pickle=True)),
    "one number": replaced(npy(np.float32(1))),
}
ATOMS: dict[str, Damage] = {
    **NPY,
    "text": replaced(npy(np.array(["a", "b"]))),
    "one row": replaced(npy(np.ones(32, np.float32))),
    "NaN": replaced(npy(np.full((8, 32), np.nan, np.float32))),
    "zeros": replaced(npy(np.zeros((8, 32), np.float32))),
    "another width": replaced(npy(np.eye(8, 7, dtype=np.float32))),
    "no rows": replaced(npy(np.zeros((0, 32), np.float32))),
}
MATRIX = {name: damage for name, damage in ATOMS.items() if name != "another width"}
START = 26  # of the sizes in an index
INDEX: dict[str, Damage] = {
    **ANY_FILE,
    "half": cut(0.5),
    "version 7": bytes_at(9, struct.pack("<Q", 7)),
    "unknown type": bytes_at(17, b"\x63"),
    "floats": bytes_at(17, b"\x06"),
    "2^60 sentences": bytes_at(18, struct.pack("<Q", 1 << 60)),
    "no sentence": bytes_at(18, struct.pack("<Q", 0)),
    "negative size": bytes_at(START, struct.pack("<i", -3)),
    "size of 2^31": bytes_at(START, struct.pack("<I", 1 << 31)),
    "size of a billion": bytes_at(START, struct.pack("<i", 10**9)),
}
DATA: dict[str, Damage] = {
    **ANY_FILE,
    "half": cut(0.5),
    "symbols beyond the vocabulary": bytes_at(4, struct.pack("<H", 60_000)),
}
DICT_TXT: dict[str, Damage] = {
    **ANY_FILE,
    "duplicate": lambda path: path.write_bytes(path.read_bytes() * 2),
    "special symbol": lambda path: path.write_bytes(b"<pad> 1\n" + path.read_bytes()),
    "latin-1": lambda path: path.write_bytes(path.read_bytes() + "\u00e9 1\n".encode("latin-1")),
    "without counts": replaced("a\nb\n"),
    "counts that are words": replaced("a b\n"),
    "other symbols": replaced("a 1\nb 1\n"),
}
TEXT: dict[str, Damage] = {
    **{name: damage for name, damage in ANY_FILE.items() if name != "garbage"},
    "not UTF-8": replaced(b"good line\n\xff\xfe bad\n"),
    "blank lines": replaced("\n \n\t\n"),
    "damaged gzip": replaced(gzip.compress("\n".join(map(str, range(5000))).encode())[:5000]),
    "damaged bzip2": replaced(bz2.compress("\n".join(map(str, range(5000))).encode())[:5000]),
    "damaged xz": replaced(lzma.compress(b"A line.\n" * 900)[:40] + bytes(90)),
    "zip archive": replaced(b"PK\x03\x04" + bytes(100)),
    "carriage returns": replaced("a\tThe name is bound.\rb\tNames are bound.\r" * 90),
    "JSON lines": replaced('{"label": "a", "text": "The name is bound."}\n' * 90),
}
META_OF_DICTIONARY: dict[str, Damage] = {
    **JSON_FILE,
    "unknown kind": json_with(kind="mystery"),
    "kind that is a list": json_with(kind=[1]),
    "text for a number": json_with(n_atoms="many"),
    "10^10 atoms": json_with(n_atoms=10**10),
    "layer that is text": json_with(layer="two"),
    "blocks that are a list": json_with(blocks=[64]),
    "blocks of minus one": json_with(blocks={"tokens_per_sample": -1, "sample_break_mode": "complete"}),
    "health that is text": json_with(health="good"),
    "another model": json_with(auxiliary_fingerprint="0" * 64),
}
# of a dictionary that says nothing of a model
META_OF_CODER = {
    name: damage for name, damage in META_OF_DICTIONARY.items() if not name.startswith(("blocks", "layer", "health"))
}
META_OF_CODES: dict[str, Damage] = {
    **JSON_FILE,
    "another format": json_with(format_version=99),
    "10^10 atoms": json_with(n_atoms=10**10),
    "atoms that are text": json_with(n_atoms="x"),
    "no shards": json_with(shards=DELETED),
    "shards that are a number": json_with(shards=3),
    "shards that are numbers": json_with(shards=[3]),
    "blocks missing": json_with(blocks=DELETED),
    "blocks that are text": json_with(blocks="x"),
    "fingerprints missing": json_with(fingerprints=DELETED),
    "tokens that are text": json_with(token_count="x"),
}
META_TO_TRAIN = {name: damage for name, damage in META_OF_CODES.items() if name != "blocks missing"}
META_OF_DATASTORE: dict[str, Damage] = {
    **JSON_FILE,
    "another format": json_with(format=99),
    "keys that are text": json_with(num_keys="x"),
    "shards that are text": json_with(shard_keys="x"),
    "negative shards": json_with(shard_keys=[-4]),
    "width of nothing": json_with(dim=0),
    "another checkpoint": json_with(fingerprints={"checkpoint": "0" * 64}),
}
META_OF_SEQUENCES: dict[str, Damage] = {
    **RECORD,
    "tokenizer that is a number": json_with(tokenizer=3),
    "another tokenizer": json_with(tokenizer="0" * 64),
    "length that is text": json_with(max_length="x"),
}
IDS: dict[str, Damage] = {
    **NPY,
    "floats": replaced(npy(np.ones(4, np.float32))),
    "fewer than the sequences have": replaced(npy(np.ones(4, np.int32))),
    "beyond the vocabulary": lambda path: path.write_bytes(path.read_bytes()[:-4] + b"\xff\xff\xff\x7f"),
    "below 0": lambda path: path.write_bytes(path.read_bytes()[:-4] + b"\xff\xff\xff\xff"),
}
STARTS: dict[str, Damage] = {
    **NPY,
    "descending": replaced(npy(np.array([0, 9, 4, 9]))),
    "not from 0": replaced(npy(np.array([1, 9]))),
    "floats": lambda path: path.write_bytes(npy(np.load(path).astype(np.float64))),
    "a long sequence": lambda path: path.write_bytes(npy(np.load(path)[[0, -1]])),
}
PAIRS: dict[str, Damage] = {
    **TEXT,
    "not JSON": replaced("{good}\n"),
    "deep": replaced(DEEP + "\n"),
    "numbers": replaced('{"sentence_good": 1, "sentence_bad": 2}\n'),
    "a list": replaced("[1]\n"),
    "one sentence": replaced('{"sentence_good": "a"}\n'),
    "too long": replaced(json.dumps({"sentence_good": "name " * 90, "sentence_bad": "b"}) + "\n"),
}
LABELLED: dict[str, Damage] = {
    **TEXT,
    "one column": replaced("only text\n"),
    "four columns": replaced("a\tb\tc\td\n"),
    "empty label": replaced("\ttext\n"),
    "empty text": replaced("a\t\nb\tx\n"),
    "one label": replaced("a\tone\na\ttwo\n"),
    "mixed": replaced("a\tone\nb\ttwo\tthree\n"),
}
MODEL_PROTO: dict[str, Damage] = {**ANY_FILE, "half": cut(0.5), "text": replaced("a tokenizer")}
LOG: dict[str, Damage] = {
    **ANY_FILE,
    "another log": replaced("nothing that fairseq printed\n"),
    "deep JSON": replaced('{"a":' * 100_000),
    "infinite updates": replaced('{"loss": "1", "num_updates": "inf"}\n'),
}
CONFIG: dict[str, Damage] = {
    **JSON_FILE,
    "unknown model": replaced('{"model_type": "mystery"}'),
    "another model": replaced('{"model_type": "gpt2"}'),
    "code of its own": json_with(auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}, model_type="evil"),
    "layers that are text": json_with(num_hidden_layers="two"),
    "a billion layers": json_with(num_hidden_layers=10**9),
    "no width": json_with(hidden_size=0),
}
SAFETENSORS: dict[str, Damage] = {
    **ANY_FILE,
    "half": cut(0.5),
    "header of 2^60": bytes_at(0, struct.pack("<Q", 1 << 60)),
}
VERBALIZER: dict[str, Damage] = {**TEXT, "one label": replaced("a\tx\n"), "no tab": replaced("a x\nb y\n")}
# what a training command notices before it trains
LAST_CHECKPOINT = {name: CHECKPOINT[name] for name in ("half", "empty", "garbage", "text", "without its last byte")}
WEIGHTS_TO_BEGIN_WITH = {
    **LAST_CHECKPOINT,
    **{name: CHECKPOINT[name] for name in ("a list", "missing weight", "misshapen weight", "weight that is text")},
}
DENOISING = {name: damage for name, damage in CHECKPOINT.items() if name != "more layers than weights"}
BEHIND_HEADER = 128  # of a small npy file
WEIGHTS: dict[str, Damage] = {
    **NPY,
    "NaN": bytes_at(BEHIND_HEADER, b"\x00\x7e"),
    "infinity": bytes_at(BEHIND_HEADER, b"\x00\x7c"),
    "below 0": bytes_at(BEHIND_HEADER, b"\x00\xbc"),
}
INDICES: dict[str, Damage] = {**NPY, "out of range": bytes_at(BEHIND_HEADER, b"\xff")}
ROWS: dict[str, Damage] = {**NPY, "out of range": bytes_at(BEHIND_HEADER + 8, b"\xff\xff\xff\x7f")}
DEVICES = ("nonsense", "cuda:7", "meta", "cpu:x")


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of all that is in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = os.lstat(path)
        found[str(path.relative_to(folder))] = (0, 0) if path.is_dir() else (status.st_size, status.st_mtime_ns)
    return found


def _in_this_process(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        capsys.readouterr()
        try:
            status = main(words)
        except SystemExit as stopped:  # argparse's
            status = int(str(stopped.code))
    return status, capsys.readouterr().err


def check_one_line(words: Sequence[object], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run ``mlsm words``, or ``fairseq-train``, in a folder: it fails with one line, and changes nothing there."""
    before = snapshot(folder)
    own = [str(word) for word in words]
    if own[0] == "fairseq-train":
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        run = run_fairseq_train(own[1:], environment=environment, cwd=folder)
        status, printed = run.returncode, run.stdout + run.stderr
    else:
        status, printed = _in_this_process(own, folder, capsys)
    lines = [line for line in printed.splitlines() if "error: " in line]
    assert status in (1, 2), (status, printed)
    assert len(lines) == 1, printed
    assert "Traceback" not in printed
    assert len(lines[0]) < 700
    assert snapshot(folder) == before
