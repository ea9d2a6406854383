"""Progress in a log file: a line from time to time, also while nothing moves, and nothing about short work."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
import time
import types
from collections.abc import Callable, Iterator
from io import StringIO

import pytest

from mlsm_plugin.core.files import progress
from mlsm_plugin.core.files.progress import Progress, close_bars, elapsed_time, shown_by_another_process, still_running

INTERVAL = 0.05


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class Log:
    """What has been written to standard error, which is no terminal."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys, self.text = capsys, ""

    def getvalue(self) -> str:
        self.text += self.capsys.readouterr().err
        return self.text


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Log:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", INTERVAL)
    return Log(capsys)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_line_is_written_even_while_nothing_moves(log: Log) -> None:
    with Progress(total=80, desc="coding train", unit="token") as bar:
        bar.update(20)
        wait_for(lambda: log.getvalue().count("\n") >= 2)
    lines = log.getvalue().splitlines()
    assert all(line.startswith("coding train: 25%, 20/80 token, 00:00 so far, ") for line in lines)
    time.sleep(4 * INTERVAL)
    assert log.getvalue().splitlines() == lines  # it is over


def test_items_are_counted_and_an_error_ends_the_lines(log: Log) -> None:
    def broken() -> Iterator[int]:
        yield from range(3)
        wait_for(lambda: "words: 3 word, 00:00 so far" in log.getvalue())
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        list(Progress(broken(), desc="words", unit="word", mininterval=0, miniters=1))
    time.sleep(2 * INTERVAL)
    before = log.getvalue()
    time.sleep(4 * INTERVAL)
    assert log.getvalue() == before


def test_short_or_silent_work_writes_nothing(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    with Progress(total=2, desc="silent", disable=True):
        time.sleep(3 * INTERVAL)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 20.0)
    assert list(Progress(range(5), desc="short")) == list(range(5))
    assert log.getvalue() == ""


def test_a_terminal_has_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", INTERVAL)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(total=4, desc="coding", file=sys.stderr) as bar:
        bar.update(4)
        time.sleep(3 * INTERVAL)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "\rcoding: 100%|" in shown
    assert "so far" not in shown


def test_bars_that_an_error_left_open_end_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = Progress(total=4, desc="coding", file=terminal)
    assert not terminal.getvalue().endswith("\n")
    close_bars()
    assert terminal.getvalue().endswith("\n")
    assert bar.disable


def test_a_log_has_lines_also_where_the_packages_of_notebooks_are_imported(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    with Progress(total=4, desc="coding"):
        wait_for(lambda: "coding: 0%, 0/4" in log.getvalue())
    assert "\r" not in log.getvalue()


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (30, 60)])
def test_a_terminal_of_unknown_size_has_the_bar_too(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Progress(total=4, desc="coding", file=stderr) as bar:
            bar.update(4)
        stderr.flush()
        shown = os.read(reader, 4096).decode()
    os.close(reader)
    assert "\rcoding:   0%|" in shown


def test_work_without_a_bar_is_still_told(log: Log) -> None:
    with still_running("learning"):
        wait_for(lambda: log.getvalue().count("\n") >= 2)
        assert set(log.getvalue().splitlines()) == {"learning: 00:00 so far"}
        before = log.getvalue()
        with shown_by_another_process():
            time.sleep(4 * INTERVAL)
        with Progress(total=8, desc="coding"):
            wait_for(lambda: log.getvalue().count("coding: 0%") >= 2)
        assert log.getvalue().removeprefix(before).count("learning") <= 1  # it may have begun before
        wait_for(lambda: log.getvalue().count("learning") > before.count("learning") + 1)
    time.sleep(2 * INTERVAL)
    before = log.getvalue()
    time.sleep(4 * INTERVAL)
    assert log.getvalue() == before


def test_work_that_tells_no_progress_shows_its_time(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    with elapsed_time("learning"):
        wait_for(lambda: log.getvalue().count("\n") >= 2)
    assert set(log.getvalue().splitlines()) == {"learning: 00:00 so far"}
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_TIMES", 0.01)
    with elapsed_time("learning"):
        wait_for(lambda: terminal.getvalue().count("learning: 00:00 so far") > 2)
    assert "it/s" not in terminal.getvalue()


def test_the_time_left_follows_from_the_mean_speed(log: Log) -> None:
    """After 50 items in a burst and a break, not from the speed of the burst."""
    with Progress(total=100, desc="training the SAE", unit="batch", mininterval=0.0) as bar:
        for _ in range(50):
            bar.update(1)
        time.sleep(0.3)
        bar.update(1)
        figures = bar.format_dict
        shown = bar.format_meter(**{**figures, "bar_format": "{remaining_s}"})
    assert float(shown) == pytest.approx(49 * figures["elapsed"] / 51, rel=0.01)
