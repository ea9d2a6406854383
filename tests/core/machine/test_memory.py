"""glibc keeps freed memory: fewer page faults, the same numbers, and nothing where the user has chosen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from mlsm_plugin.core.machine import memory
from mlsm_plugin.core.machine.memory import _allocates_with_glibc
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(not _allocates_with_glibc(), reason="needs glibc")

# the file alone, as importing the package takes seconds
KEEP = f"import runpy; print(runpy.run_path({memory.__file__!r})['keep_freed_memory']())"
# an allocator of another program, which has no mallopt
ALLOCATOR = (
    "#include <stddef.h>\nextern void *__libc_malloc(size_t);\nvoid *malloc(size_t n) { return __libc_malloc(n); }\n"
)
# as today, but chosen by the user
AS_GLIBC_DOES = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}
# of most updates after the first three; 59 MB of logits are 14,000 pages. In the beginning, the heap still grows
# by such a block now and then.
LARGEST_FAULTS = 2000


def python(*words: object, **environment: str) -> str:
    """Standard output of a new process."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **environment}
    command = [sys.executable, *(str(word) for word in words)]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_the_process_keeps_its_memory() -> None:
    assert python("-c", KEEP) == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"MALLOC_ARENA_MAX": "2"}, AS_GLIBC_DOES])
def test_the_choice_of_the_user_stays(variables: dict[str, str]) -> None:
    assert python("-c", KEEP, **variables) == "False\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_another_allocator_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "allocator.c").write_text(ALLOCATOR, encoding="utf-8")
    library = tmp_path / "allocator.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "allocator.c"], check=True)
    assert python("-c", KEEP, LD_PRELOAD=str(library)) == "False\n"


def updates_of(*words: object, **environment: str) -> list[list[str]]:
    """The loss and the page faults of each update."""
    lines = [line.split() for line in python(*words, **environment).splitlines()]
    return [line for line in lines if len(line) == 2 and line[1].isdecimal()]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fairseq", "huggingface"])
def test_updates_with_large_logits_cause_few_page_faults_and_the_same_losses(way: str, tmp_path: Path) -> None:
    script = Path(__file__).parent / "counted_faults.py"
    kept = updates_of(script, way, tmp_path / "kept")
    returned = updates_of(script, way, tmp_path / "returned", **AS_GLIBC_DOES)
    assert len(kept) == len(returned) == 31
    assert [loss for loss, _ in kept] == [loss for loss, _ in returned]
    assert median(int(faults) for _, faults in kept[3:]) <= LARGEST_FAULTS
    assert median(int(faults) for _, faults in returned[3:]) > 10 * LARGEST_FAULTS
