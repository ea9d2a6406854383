"""``mlsm plot --watch``: a page that follows a run while its log grows, and ends with it."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlsm_plugin.reports.live_page import watch
from mlsm_plugin.reports.training_log import draw_curves, read_training_log
from tests.conftest import REPOSITORY

LINE = "2026-01-01 00:00:00 | INFO | train_inner | epoch 001:      {0} / 10 loss={1}, num_updates={0}\n"
END = "2026-01-01 00:00:00 | INFO | fairseq_cli.train | done training in 3.0 seconds\n"


def picture_of(page: str) -> bytes:
    (data,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    return base64.b64decode(data)


def test_the_page_of_a_run_that_is_over_does_not_load_anew(tmp_path: Path) -> None:
    log, picture, page = tmp_path / "<a run>.log", tmp_path / "curves.png", tmp_path / "curves.html"
    log.write_text(LINE.format(1, 5) + LINE.format(2, 4) + END, encoding="utf-8")
    os.utime(log, (0, 0))  # a run in parts logs more
    watch([log], picture, page, lambda: draw_curves([("a", read_training_log(log))], picture))
    text = page.read_text(encoding="utf-8")
    assert "refresh" not in text
    assert ": over, " in text
    assert "&lt;a run&gt;.log: over" in text
    assert picture_of(text) == picture.read_bytes()


@pytest.mark.slow
def test_the_command_follows_a_run_to_its_end(tmp_path: Path) -> None:
    log, page = tmp_path / "train.log", tmp_path / "live.html"
    log.write_text("a line before any progress\n", encoding="utf-8")
    code = (
        "import sys; from mlsm_plugin.reports import live_page; from mlsm_plugin.cli.main import main; "
        "live_page.SECONDS, live_page.QUIET = 0.2, 2; sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "plot", str(log), "--watch", "--output", str(tmp_path / "live")]
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            time.sleep(3)
            with log.open("a", encoding="utf-8") as file:
                file.write(LINE.format(1, 5) + LINE.format(2, 4)[:-5])
            first = wait_for(page, "")
            assert '<meta http-equiv="refresh" content="1">' in first
            assert ": running, " in first
            with log.open("a", encoding="utf-8") as file:
                file.write(LINE.format(2, 4)[-5:] + END + LINE.format(3, 2))
            second = wait_for(page, first)
            assert picture_of(second) != picture_of(first)
            with log.open("a", encoding="utf-8") as file:
                file.write(END)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
    assert ": over, " in page.read_text(encoding="utf-8")


def wait_for(page: Path, before: str) -> str:
    """The text of a page when it is another one."""
    for _ in range(600):
        if page.exists() and (text := page.read_text(encoding="utf-8")) != before:
            return text
        time.sleep(0.1)
    raise AssertionError(f"{page} does not change")
