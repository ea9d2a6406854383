"""Threads on a shared machine: how long they spin while they wait, and how busy the cores are.

OpenMP's threads spin while they wait for each other. If another process keeps a core busy, one thread does not run, and
the others spin for whole time slices of the kernel. A small layer then takes ten times as long as on one thread.
"""

import os
import time
from pathlib import Path

# Fewer spins cost time on an idle machine, more spins cost time if a core is busy (docs/speed.md). libgomp's default is
# 300,000.
SPINS = "4000"
CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # environment variables by which the user decides
STATISTICS = Path("/proc/stat")
SECONDS_TO_LOOK = 0.2
BUSY = 0.5  # number of cores busy with others above which spinning costs more than it gains


def wait_briefly() -> None:
    """Let waiting threads of this process and its children sleep after :data:`SPINS` spins, unless the user decides.

    OpenMP reads this when torch is imported; a later call only affects new processes.
    """
    if not waits_as_chosen():
        os.environ["GOMP_SPINCOUNT"] = SPINS


def waits_as_chosen() -> bool:
    """Whether the user's environment decides how long threads spin."""
    return any(name in os.environ for name in CHOICES)


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(_usable())


def cores_busy_with_others(seconds: float = SECONDS_TO_LOOK) -> float:
    """The mean number of usable cores that other processes keep busy; 0 if the system does not report it."""
    before = _seconds_of_cores()
    used_before = time.process_time()
    begin = time.perf_counter()
    time.sleep(seconds)
    used_here = time.process_time() - used_before
    passed = time.perf_counter() - begin
    used = sum(after - earlier for after, earlier in zip(_seconds_of_cores(), before, strict=True))
    return max(0.0, (used - used_here) / passed)


def _usable() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # macOS
        return set(range(os.cpu_count() or 1))


def _seconds_of_cores() -> list[float]:
    """The seconds that each usable core has been busy; empty if the system does not report them."""
    try:
        lines = STATISTICS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines if line.startswith("cpu") and line[3].isdecimal()]
    ticks = os.sysconf("SC_CLK_TCK")
    # user, nice, system, idle, waiting for input or output, interrupts, soft interrupts, stolen
    return [
        (sum(map(int, row[1:9])) - int(row[4]) - int(row[5])) / ticks for row in rows if int(row[0][3:]) in _usable()
    ]
