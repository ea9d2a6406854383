"""The lines of the held-out sequences: none of them is in a sequence to train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.huggingface import held_out_text
from mlsm_plugin.huggingface.held_out_text import held_out_lines, last_lines, write_held_out
from mlsm_plugin.huggingface.text_sequences import write_text_sequences
from tests.tiny_hf_models import make_tokenizer


@pytest.mark.parametrize("kind", ["word_piece", "byte_level", "unigram"])
@pytest.mark.parametrize("length", [16, 64])
def test_they_are_the_whole_lines_of_the_last_sequences(
    kind: str, length: int, english_text: tuple[Path, Path], tmp_path: Path
) -> None:
    make_tokenizer(kind, english_text[1], tmp_path / "tokenizer")
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(english_text[1].read_text(encoding="utf-8").splitlines()[:300]), encoding="utf-8")
    whole, _ = write_text_sequences([text], tokenizer, tmp_path / "ids", max_length=length, max_unk_rate=1)
    lines = text.read_text(encoding="utf-8").splitlines()
    for number in (1, 2, 7, 40):
        chosen = held_out_lines([text], whole.part(len(whole) - number, len(whole)), tokenizer, apart=False)
        assert lines[len(lines) - len(chosen) :] == chosen
        if not any(chosen):  # a long line was cut in two
            continue
        (tmp_path / "chosen.txt").write_text("\n".join(chosen), encoding="utf-8")
        read, _ = write_text_sequences(
            [tmp_path / "chosen.txt"], tokenizer, tmp_path / f"{number}", max_length=length, max_unk_rate=1
        )
        held_out = whole.part(len(whole) - number, len(whole))
        assert number - 2 <= len(read) <= number
        # the first line may be read without the space before it, and then the last sequences may be cut elsewhere
        assert read.num_tokens <= held_out.num_tokens


def test_sequences_of_a_line_each_are_counted(english_text: tuple[Path, Path], tmp_path: Path) -> None:
    make_tokenizer("word_piece", english_text[1], tmp_path / "tokenizer")
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer")
    text = tmp_path / "text.txt"
    text.write_text("a long line that is cut\n\nthe second line\n\nthe last one\n", encoding="utf-8")
    whole, _ = write_text_sequences([text], tokenizer, tmp_path / "ids", max_length=4, max_unk_rate=1, apart=True)
    assert held_out_lines([text], whole.part(1, 3), tokenizer, apart=True) == [
        "",
        "the second line",
        "",
        "the last one",
    ]


def test_a_long_text_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out_text, "MOST_LINES", 3)
    (tmp_path / "text.txt").write_text("1\n2\n\n3\n4\n", encoding="utf-8")
    assert last_lines([tmp_path / "text.txt"]) == ["", "3", "4"]


def test_documents_of_one_line_become_sentences(tmp_path: Path) -> None:
    path = tmp_path / "held_out.txt"
    write_held_out(["One film. It is bad!", "", "Another one.", ""], path)
    assert path.read_text(encoding="utf-8") == "One film.\nIt is bad!\n\nAnother one.\n\n"
    write_held_out(["One film. It is bad!", "Another one."], path)
    assert path.read_text(encoding="utf-8") == "One film. It is bad!\nAnother one.\n"
