"""Whatever file operation of a command fails or is its last, the same command then ends as if nothing had happened."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.attacks.faults import Fault, Outcome, run_command
from tests.conftest import mlsm
from tests.tiny_models import TinyData, save_untrained_npm

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts fsync with /proc")


@dataclass(frozen=True)
class Inputs:
    """What the commands read; made once."""

    tiny: TinyData
    dictionary: Path
    npm: Path
    store: Path
    published: Path
    log: Path
    pairs: Path
    labelled: Path
    verbalizer: Path
    modernbert: Path


@pytest.fixture(scope="session")
def inputs(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    import numpy as np

    from tests.hub.modern_models import make_modernbert

    root = tmp_path_factory.mktemp("fault-inputs")
    made = Inputs(
        *(tiny, root / "dictionary", root / "npm" / "checkpoint_last.pt", root / "store", root / "published.npy"),
        *(root / "train.log", root / "pairs.jsonl", root / "labelled.tsv", root / "verbalizer", root / "modernbert"),
    )
    small = ("--atoms", 8, "--tokens", 400, "--iterations", 2, "--batch-size", 50, "--seed", 3)
    mlsm("dictionary", tiny.data_bin, "--auxiliary", tiny.model, "--layer", 1, "--output", made.dictionary, *small)
    save_untrained_npm(tiny, made.npm.parent)
    mlsm("datastore", "build", tiny.data_bin, "--checkpoint", made.npm, "--output", made.store)
    np.save(made.published, np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32))
    lines = [f"x | INFO | train_inner | epoch 001: {n} / 9 loss={9 - n}, num_updates={n}" for n in (1, 2, 3)]
    made.log.write_text("\n".join(lines).replace("x |", "2026-01-01 00:00:00 |"))
    made.pairs.write_text('{"sentence_good": "The name is bound.", "sentence_bad": "Names the is."}\n')
    made.labelled.write_text("a\tThe name is bound.\nb\tNames are bound.\n")
    made.verbalizer.write_text("a\tname\nb\tobject\n")
    make_modernbert(tiny.text, made.modernbert)
    return made


Words = tuple[object, ...]
SMALL = ("--atoms", 4, "--tokens", 300, "--iterations", 2, "--batch-size", 50, "--threads", 1)
COMMANDS: dict[str, Callable[[Inputs, Path], Words]] = {
    "tokenizer": lambda own, root: (
        "tokenizer",
        "--input",
        own.tiny.text,
        "--vocab-size",
        200,
        "--output",
        root / "out",
    ),
    "binarize": lambda own, root: (
        *("binarize", "--tokenizer", own.tiny.tokenizer, "--train", own.tiny.text, "--valid", own.tiny.text),
        *("--output", root / "out"),
    ),
    "dictionary": lambda own, root: (
        *("dictionary", own.tiny.data_bin, "--auxiliary", own.tiny.model, "--layer", 1, "--output", root / "out"),
        *SMALL,
    ),
    "dictionary --import": lambda own, root: (
        *("dictionary", own.tiny.data_bin, "--auxiliary", own.tiny.model, "--layer", 1, "--output", root / "out"),
        *("--import", own.published),
    ),
    "encode": lambda own, root: (
        *("encode", root / "data-bin", "--auxiliary", own.tiny.model, "--dictionary", own.dictionary),
        *("--splits", "valid", "--shard-tokens", 1500, "--threads", 1),
    ),
    "datastore": lambda own, root: (
        *("datastore", "build", own.tiny.data_bin, "--checkpoint", own.npm, "--output", root / "out"),
        *("--splits", "valid", "--shard-tokens", 1500, "--index", "flat"),
    ),
    "inspect": lambda own, root: ("inspect", root / "data-bin", "--output", root / "report.html", "--split", "valid"),
    "plot": lambda own, root: ("plot", own.log, "--output", root / "curves"),
    "evaluate-pairs": lambda own, root: (
        *("evaluate-pairs", "--checkpoint", own.tiny.model, "--input", own.pairs, "--output", root / "out.json"),
    ),
    "classify": lambda own, root: (
        *("classify", "--checkpoint", own.tiny.model, "--template", "{} <mask>", "--parametric"),
        *("--verbalizer", own.verbalizer, "--input", own.labelled, "--output", root / "out.tsv"),
    ),
    "export-hf": lambda own, root: (
        *("export-hf", own.tiny.model, root / "out", "--text", own.tiny.text, "--lines", 2),
    ),
    "import-hf": lambda own, root: (
        *("import-hf", own.modernbert, root / "out", "--text", own.tiny.text, "--lines", 2),
    ),
}
# what a command reads from the folder that it writes to
NEEDS_DATA = ("encode", "inspect")
# commands of the fast lane
SAMPLE = ("dictionary --import",)


@dataclass(frozen=True)
class Place:
    """A folder in which a command runs again and again, always from the same beginning."""

    root: Path
    begin: Path
    log: Path

    def reset(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.begin, self.root)

    def contents(self) -> dict[str, bytes]:
        """The content of each file below the folder; folders and links end in a slash or say where they lead."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            found[f"{name}/" if path.is_dir() else name] = b"" if path.is_dir() else path.read_bytes()
        return found


@pytest.fixture
def place(inputs: Inputs, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    command = request.node.callspec.params["command"]
    begin = tmp_path / "begin"
    begin.mkdir()
    if command in NEEDS_DATA:
        shutil.copytree(inputs.tiny.data_bin, begin / "data-bin")
    if command == "inspect":
        mlsm(*COMMANDS["encode"](inputs, begin))
    return Place(tmp_path / "root", begin, tmp_path / "log")


def faults(clean: Outcome, sizes: list[int], share: float) -> Iterator[Fault]:
    """Kill and full disk before each operation, or a share of them, and files that are cut."""
    step = max(1, round(1 / share))
    for kind in ("kill", "full"):
        yield from (Fault(kind, at) for at in range(1, clean.operations + 1, step))
    yield from (Fault("bytes", bytes=size // 2) for size in sizes[::step])


def check_faults(command: str, inputs: Inputs, place: Place, share: float) -> int:
    """Returns the number of faults; see the file's docstring."""
    words = COMMANDS[command](inputs, place.root)
    place.reset()
    before = place.contents()
    clean = run_command(words, place.root, place.log)
    assert clean.status == 0, clean.printed
    wanted = place.contents()
    new = sorted({len(value) for name, value in wanted.items() if value and before.get(name) != value})
    number = 0
    for fault in faults(clean, new, share):
        place.reset()
        failed = run_command(words, place.root, place.log, fault)
        number += 1
        if fault.kind != "kill" and failed.status != 0:  # a failure to tidy is not the command's failure
            assert failed.status == 1, (fault, failed.printed)
            assert "Traceback" not in failed.printed, (fault, failed.printed)
            assert failed.printed.count("mlsm: error: ") == 1, (fault, failed.printed)
        if fault.kind != "kill" and failed.status == 0:
            assert place.contents() == wanted, fault
            continue
        again = run_command(words, place.root, place.log)
        assert again.status == 0, (fault, again.printed)
        assert place.contents().keys() == wanted.keys(), fault
        different = [name for name, value in place.contents().items() if value != wanted[name]]
        assert not different, (fault, different)
    return number


@pytest.mark.parametrize("command", SAMPLE)
def test_some_faults_leave_no_trace(command: str, inputs: Inputs, place: Place) -> None:
    assert check_faults(command, inputs, place, share=0.2) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_no_fault_leaves_a_trace(
    command: str, inputs: Inputs, place: Place, record_property: Callable[[str, object], None]
) -> None:
    number = check_faults(command, inputs, place, share=float(os.environ.get("MLSM_FAULTS", "1")))
    record_property("faults", number)
    print(f"{command}: {number} faults")
