"""Words are those of the real ``wc -w``, and the written text has them and no others."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.text.words import SEPARATORS, count_words, word_lines, words_in_line, write_words

# control characters only within words: of words of nothing else, versions of wc think differently
INSIDE = ("a", "é", "你", "'", "\u2581", "<mask>", "a\x85b", "a\x1bb", "\u200b", "\U0001f600")


def counted_by_wc(*files: Path) -> int:
    """What ``wc -w`` says of all files in a UTF-8 locale."""
    done = subprocess.run(["wc", "-w", *files], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    return int(done.stdout.strip().splitlines()[-1].split()[0])


@settings(max_examples=25)
@given(st.lists(st.sampled_from([*INSIDE, *SEPARATORS.replace("\r", "")]), max_size=60))
def test_words_are_those_of_wc(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    source = tmp_path_factory.getbasetemp() / "text.txt"
    source.write_text(f"first\n{''.join(parts)}\n", encoding="utf-8", newline="\n")
    written = source.with_name("words.txt")
    write_words(source, written)
    assert count_words(source) == counted_by_wc(source) == counted_by_wc(written)
    lines = written.read_text(encoding="utf-8").split("\n")[:-1]
    assert lines == list(word_lines(source)) == list(word_lines(written))
    assert count_words(source) == sum(line.count(" ") + 1 for line in lines if line)


def test_a_word_keeps_its_characters() -> None:
    assert words_in_line(" The\u00a0ﬁrst  ½\tcafe\u0301 \u2581x \x1b \r\n") == ["The", "ﬁrst", "½", "cafe\u0301", "_x"]
