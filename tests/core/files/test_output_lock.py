from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mlsm_plugin.core.files import output_lock
from mlsm_plugin.core.files.output_lock import hold_lock, only_writer, release_lock

HOLDER = (
    "import sys\n"
    "from mlsm_plugin.core.files.output_lock import hold_lock\n"
    "assert hold_lock(sys.argv[1])\n"
    "print('held', flush=True)\n"
    "sys.stdin.read()\n"
)


def start_holder(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_one_process_at_a_time(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "folder"
    holder = start_holder(folder)
    monkeypatch.setattr(output_lock, "SECONDS_TO_WAIT", 0.3)
    with pytest.raises(ValueError, match=r"another process is writing to .*folder; wait until it ends, or choose"):
        hold_lock(folder)
    holder.kill()
    holder.communicate()
    with only_writer(folder), only_writer(str(folder)):  # this process has it already
        assert os.listdir(folder) == []
    assert hold_lock(folder)
    assert not hold_lock(folder)
    release_lock(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_the_lock_of_a_process_that_has_just_been_killed_is_waited_for(tmp_path):
    holder = start_holder(tmp_path)
    begin = time.monotonic()
    threading.Timer(0.5, holder.kill).start()
    with only_writer(tmp_path):
        assert time.monotonic() - begin >= 0.5  # not before the other process has ended
        assert holder.wait() == -signal.SIGKILL


def test_where_there_are_no_locks_nobody_is_refused(tmp_path, monkeypatch):
    def without_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with only_writer(tmp_path):
        assert not hold_lock(tmp_path)


def test_a_new_folder_in_which_nothing_was_written_is_removed(tmp_path):
    folder = tmp_path / "new"
    with pytest.raises(ValueError, match="bad input"), only_writer(folder):
        raise ValueError("bad input")
    assert not folder.exists()
    with only_writer(folder):
        (folder / "file").write_text("x")
    assert (folder / "file").exists()
    with only_writer(tmp_path):
        pass
    assert tmp_path.exists()  # it was there before


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_who_waited_for_a_folder_that_was_removed_makes_it_again(tmp_path):
    folder = tmp_path / "new"
    folder.mkdir()
    holder = start_holder(folder)
    threading.Timer(0.3, lambda: (folder.rmdir(), holder.kill())).start()
    with only_writer(folder):
        (folder / "file").write_text("x")
    assert (folder / "file").exists()
    holder.wait()
