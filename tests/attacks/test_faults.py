"""Whatever file operation of a command fails or is its last, the same command then ends as if nothing had happened."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.attacks.commands import WRITING
from tests.attacks.conftest import Place
from tests.attacks.faults import Fault, Outcome, run_command

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts fsync with /proc")


# more of its faults, where the environment asks for few
SAMPLE = ("dictionary",)


def faults(clean: Outcome, sizes: list[int], share: float) -> Iterator[Fault]:
    """Kill and full disk before each operation, or a share of them, and files that are cut."""
    step = max(1, round(1 / share))
    for kind in ("kill", "full"):
        yield from (Fault(kind, at) for at in range(1, clean.operations + 1, step))
    yield from (Fault("bytes", bytes=size // 2) for size in sizes[::step])


def check_faults(place: Place, share: float) -> int:
    """Returns the number of faults; see the file's docstring."""
    place.reset()
    before = place.contents()
    clean = run_command(place.words, place.root, place.log)
    assert clean.status == 0, clean.printed
    wanted = place.contents()
    new = sorted({len(value) for name, value in wanted.items() if value and before.get(name) != value})
    number = 0
    for fault in faults(clean, new, share):
        place.reset()
        failed = run_command(place.words, place.root, place.log, fault)
        number += 1
        if fault.kind != "kill" and failed.status != 0:  # a failure to tidy is not the command's failure
            assert failed.status == 1, (fault, failed.printed)
            assert "Traceback" not in failed.printed, (fault, failed.printed)
            assert failed.printed.count("mlsm: error: ") == 1, (fault, failed.printed)
        if fault.kind != "kill" and failed.status == 0:
            assert place.contents() == wanted, fault
            continue
        again = run_command(place.words, place.root, place.log)
        assert again.status == 0, (fault, again.printed)
        assert place.contents().keys() == wanted.keys(), fault
        different = [name for name, value in place.contents().items() if value != wanted[name]]
        assert not different, (fault, different)
    return number


@pytest.mark.slow
@pytest.mark.parametrize("command", SAMPLE)
def test_some_faults_leave_no_trace(command: str, place: Place) -> None:
    assert check_faults(place, share=0.2) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("command", WRITING)
def test_no_fault_leaves_a_trace(command: str, place: Place, record_property: Callable[[str, object], None]) -> None:
    number = check_faults(place, share=float(os.environ.get("MLSM_FAULTS", "1")))
    record_property("faults", number)
    print(f"{command}: {number} faults")
