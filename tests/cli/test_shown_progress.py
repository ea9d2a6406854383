"""What a user sees of a long command: bars in a pseudo-terminal, and lines in a log file."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM

from mlsm_plugin.core.files import progress
from tests.conftest import REPOSITORY, TINY_TRAINING, mlsm
from tests.tiny_hf_models import make_model
from tests.tiny_models import TinyData

BAR = re.compile(r"\r([a-z][^|\r\n]*?)(?:, loss [\d.]+)?(?:, [\d,]+ tokens/s)?: +(\d+)%\|[^|]*\|")


def shown_in_terminal(*arguments: object) -> str:
    """What a command shows in a terminal of 100 columns; it must succeed."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    command = [sys.executable, "-m", "mlsm_plugin.cli.main", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        try:
            while data := os.read(reader, 65536):
                shown += data
        except OSError:  # the terminal is closed
            pass
        os.close(reader)
    text = shown.decode(errors="replace")
    assert process.returncode == 0, text[-3000:]
    return text


def command_of(root: Path, text: Path) -> tuple[object, ...]:
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)[:300]
    (root / "text.txt").write_text("".join(lines), encoding="utf-8")
    model = make_model("bert", root / "text.txt", root / "model", kind=AutoModelForMaskedLM)
    codes = ("--objective", "mlsm+mlm", "--atoms", 20, "--k", 3, "--tokens", 2000)
    training = ("--updates", 40, "--batch-size", 4, "--max-length", 32, "--bf16", "off", "--cpu")
    return ("adapt", model, "--text", root / "text.txt", "--output", root / "out", *codes, *training)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_every_step_of_an_adaptation_has_a_bar(tmp_path: Path, english_text: tuple[Path, Path]) -> None:
    shown = shown_in_terminal(*command_of(tmp_path, english_text[0]))
    bars = dict.fromkeys(name for name, _ in BAR.findall(shown))
    steps = ("tokenizing", "hidden states", "training the SAE", "coding sequences", "training", "evaluating")
    assert set(steps) <= set(bars)
    # with the speed and the time left
    assert re.search(r"training, loss \d+\.\d+, [\d,]+ tokens/s: +\d+%\|.*\d+/40 \[\d\d:\d\d<\d\d:\d\d", shown)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_a_training_of_fairseq_has_a_bar(tmp_path: Path, tiny: TinyData) -> None:
    options = ("--max-update", 30, "--save-dir", tmp_path / "aux", "--arch", "mlsm_roberta_tiny", "--keep-at", 100)
    shown = shown_in_terminal("auxiliary", tiny.data_bin, *options, *TINY_TRAINING)
    assert {"training", "validating"} <= {name for name, _ in BAR.findall(shown)}
    assert re.search(r"training(, loss \d+\.\d+, [\d,]+ tokens/s)?: +\d+%\|.*\d+/30 ", shown)
    # neither fairseq's configuration nor the modules of the model
    assert "'_name'" not in shown
    assert "Embedding(" not in shown
    assert "num. shared model params" in shown


@pytest.mark.slow
def test_every_step_of_an_adaptation_has_lines_in_a_log(
    tmp_path: Path, english_text: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.002)
    mlsm(*command_of(tmp_path, english_text[0]))
    lines = capsys.readouterr().err.splitlines()
    for step in ("tokenizing", "training the SAE", "coding sequences", "evaluating"):
        assert any(line.startswith(f"{step}: ") and " so far" in line for line in lines), step
    trained = [line for line in lines if re.match(r"training, loss \d+\.\d+, [\d,]+ tokens/s: \d+%, ", line)]
    assert any(re.search(r"\d+%, \d+/40 update, \d\d:\d\d so far, \d\d:\d\d left", line) for line in trained)
    assert any(re.match(r"(text|dictionary|codes|before|training|quality): \d\d:\d\d so far", line) for line in lines)
