"""Text that is trained on and measured on, or trained on twice, is named, whatever the files are called."""

import gzip
from pathlib import Path

import pytest

from mlsm_plugin.core.text import shared_text
from mlsm_plugin.core.text.shared_text import NamedText, warn_of_shared_files, warn_of_shared_text

LINES = [f"the sentence number {number} of a text" for number in range(200)]
OTHER = [f"another sentence, which is the {number}th" for number in range(200)]


def write(path: Path, lines: list[str]) -> Path:
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize(
    ("held_out", "share"),
    [(LINES, 100), (["one line more, which is another", *LINES], 100), (LINES[:20] + OTHER[:80], 20), (OTHER, 0)],
)
@pytest.mark.parametrize("name", ["valid.txt", "valid.txt.gz"])
def test_lines_of_the_training_text_in_held_out_text_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, held_out: list[str], share: int, name: str
) -> None:
    train = [
        write(tmp_path / "a.txt", ["a line before the others", "", *OTHER[100:]]),
        write(tmp_path / "b.txt", LINES),
    ]
    valid = write(tmp_path / name, held_out[:100] if held_out == OTHER else held_out)
    warn_of_shared_files(train, [], [valid])
    said = (
        f"{valid}: {share}% of its lines are in the training text, too (most of them in {train[1]}): what is measured "
        "on it says little about other text"
    )
    assert caplog.messages == ([said] if share else [])


def test_short_lines_are_equal_by_chance(caplog: pytest.LogCaptureFixture) -> None:
    short = ["Yes.", "No.", "Why?", "Thank you."]
    train = NamedText("train", [*LINES, *short])
    warn_of_shared_text([train], [NamedText("valid", [*OTHER, *short])])
    warn_of_shared_text([train], [NamedText("valid", [*OTHER, *LINES[:10]])])  # 10 of 210 are no warning
    assert caplog.messages == []
    warn_of_shared_text([NamedText("train", short)], [NamedText("valid", short[2:])])  # nothing else could be compared
    assert "valid: 100% of its lines" in caplog.text


def test_a_text_that_is_trained_on_twice_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = write(tmp_path / "a.txt", LINES)
    copies = [first, write(tmp_path / "a.txt.gz", LINES), write(tmp_path / "b.txt", ["one line more", *LINES[::-1]])]
    warn_of_shared_files([first, write(tmp_path / "c.txt", LINES[:50] + OTHER)])
    warn_of_shared_files([first])
    assert caplog.messages == []
    warn_of_shared_files([first, *copies, first])
    assert caplog.messages == [
        f"{first} has the lines of {first}; {tmp_path}/a.txt.gz has the lines of {first}; {tmp_path}/b.txt has the "
        f"lines of {first}, and so have 1 more files: they are trained on more than once"
    ]


def test_a_long_text_is_compared_by_a_sample(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(shared_text, "COMPARED_LINES", 500)
    lines = [f"{number:08d} is the beginning of a line" for number in range(20_000)]
    warn_of_shared_text([NamedText("train", lines[:10_000])], [NamedText("valid", iter(lines[5_000:]))])
    (share,) = (int(message.split()[1].rstrip("%")) for message in caplog.messages)
    assert 25 <= share <= 42  # of a third


@pytest.mark.parametrize("later_first", [False, True])
@pytest.mark.parametrize(
    ("part", "more", "longer"), [(20_000, 0, "a"), (12_000, 0, "a"), (40_000, 20_000, "b"), (20_000, 1_000, "a")]
)
def test_copies_of_a_part_and_with_more_lines_are_found(
    caplog: pytest.LogCaptureFixture, part: int, more: int, longer: str, later_first: bool
) -> None:
    lines = [f"{number:08d} is the beginning of a line" for number in range(40_000)]
    other = [f"{number:08d} is another beginning" for number in range(more)]
    texts = [NamedText("a", lines), NamedText("b", [*lines[:part], *other])]
    warn_of_shared_text(texts[::-1] if later_first else texts, [])
    shorter = "b" if longer == "a" else "a"
    assert f"{longer} has the lines of {shorter}: they are trained on more than once" in caplog.text


def test_headings_that_all_texts_have_are_no_copies(caplog: pytest.LogCaptureFixture) -> None:
    headings = [f"the heading of chapter number {number}" for number in range(15)]
    texts = [NamedText("0", [*headings, "a line that only this text has"])]
    for name in "123":
        texts.append(NamedText(name, [*headings, *[f"line {number} of the text {name}" for number in range(100)]]))
    warn_of_shared_text(texts, [])
    assert caplog.messages == []


def test_half_of_each_text_is_no_copy(caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"{number:08d} is the beginning of a line" for number in range(60_000)]
    warn_of_shared_text([NamedText("a", lines[:40_000]), NamedText("b", lines[20_000:])], [])
    assert caplog.messages == []
