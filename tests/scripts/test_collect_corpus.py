"""The demo's corpus: it has prose but no code, no module is imported for it, and a repeated run does nothing."""

from __future__ import annotations

import gzip
import random
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.script_module import load_script

collect_corpus = load_script("scripts/collect_corpus.py")

DOCSTRING = """Compute the weighted mean of the ``rows`` of `x`,
along an axis.  See :func:`numpy.average` for what a weight is. This part is cut

Parameters
----------
x : array_like, shape (n, d)
    The samples whose mean
    is to be computed. If None, all of them are.

Notes
-----
It is stable, i.e. the order of the samples does not matter.
The mean is f(x) = a * x ** 2 and this is not plain text.

>>> weighted_mean(x)
[1, 2]
"""


def test_sentences_of_a_docstring() -> None:
    assert list(collect_corpus.sentences_of(DOCSTRING)) == [
        "Compute the weighted mean of the rows of x, along an axis.",
        "See numpy.average for what a weight is.",
        "The samples whose mean is to be computed.",
        "If None, all of them are.",
        "It is stable, i.e. the order of the samples does not matter.",
    ]


@pytest.mark.parametrize(
    "sentence",
    [
        "the sentence does not start with a capital letter.",
        "This sentence does not end with a stop",
        "Too short a one.",
        "See https://example.org for the rest of the story.",
        "The value is a * x ** 2 for all the rows of it.",
        "The value of f(x) is what we have to compute.",
        "This is a sentence with (an open parenthesis.",
        "The gamma function is written as \\Gamma in the formula.",
        "Foo Bar Baz Qux Quux Corge Grault.",
        "Notes ----- This is text that stands below a heading.",
        "The algorithm was introduced by Berend et al.",
        "This is the one that is not the other, " * 12 + "and that is all.",
    ],
)
def test_what_is_not_prose_is_refused(sentence: str) -> None:
    assert not collect_corpus.is_prose(sentence)


@given(st.text(alphabet=st.characters(codec="utf-8") | st.sampled_from(list("Ab. \n\t`:()_")), max_size=300))
def test_sentences_of_any_docstring_are_plain_lines(docstring: str) -> None:
    last = "This is the end of the text."
    sentences = list(collect_corpus.sentences_of(f"{docstring}\n\n{last}"))
    assert sentences[-1] == last
    assert all(re.fullmatch(r"[A-Z](?!.*  )[ -~]*[.?!]", sentence) for sentence in sentences)


@given(st.integers(1, 12), st.integers(20, 90), st.integers(0, 2**32))
def test_how_the_lines_are_wrapped_does_not_matter(indent: int, width: int, seed: int) -> None:
    text = "The samples of the array are weighted.|Each of them has a weight that is not negative."
    words = text.replace("|", " ").split(" ")
    lines, draw = [""], random.Random(seed)
    for word in words:
        if len(lines[-1]) + len(word) > width or draw.random() < 0.2:
            lines.append("")
        lines[-1] += f"{word} "
    docstring = "Sum:\n\n" + "".join(f"{' ' * indent}{line}\n" for line in lines if line)
    assert list(collect_corpus.sentences_of(docstring)) == text.split("|")


@given(st.lists(st.lists(st.sampled_from(["A is 1.", "a is 2.", "B!", "C?", "b.", "D."]))))
def test_without_duplicates(documents: list[list[str]]) -> None:
    seen: set[str] = set()
    kept = [sentence for document in documents for sentence in collect_corpus.without_duplicates(document, seen)]
    letters = [re.sub(r"[^a-z]+", " ", sentence.lower()) for sentence in kept]
    assert len(letters) == len(set(letters))
    assert {sentence[0].lower() for sentence in kept} == {text[0].lower() for part in documents for text in part}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with 45 modules instead of the installed ones."""
    folder = tmp_path / "package"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "a.py").write_text('"""This is a test and it is not read."""')
    (folder / "broken.py").write_text('"""This is a file that does not parse.""" def')
    (folder / "binary.py").write_bytes(b'"""\xff\xfe is a text that is not in UTF-8 at all."""')
    for i in range(45):
        name = "".join(chr(ord("a") + int(digit)) for digit in f"{i:02}")
        (folder / f"module_{name}.py").write_text(
            f'"""This is the text of module {name}.\n\n    It is the same text in all of them."""\n'
            f'class A:\n    """This is the class that is in {name}."""\n'
            f'    def f(self):\n        """The method of {name} is the last one."""\n'
            '        """This is not a docstring, but an expression."""\n'
            "raise SystemExit('this is an error if the module is imported')\n"
        )
    monkeypatch.setattr(collect_corpus, "installed_packages", lambda: {"package 1.0": folder})
    return folder


def collect(output: Path, *arguments: str) -> tuple[list[list[str]], list[list[str]]]:
    """Run the script; the documents of train.txt and of valid.txt."""
    assert collect_corpus.main(["--output", str(output), *arguments]) == 0
    texts = [(output / f"{name}.txt").read_text(encoding="utf-8") for name in ("train", "valid")]
    assert all(re.fullmatch(r"(\S.*\n)+(\n(\S.*\n)+)*", text) for text in texts)  # no blank line too many
    train, valid = ([document.splitlines() for document in text.split("\n\n")] for text in texts)
    return train, valid


def test_packages_are_read_without_being_imported(packages: Path, tmp_path: Path) -> None:
    train, valid = collect(tmp_path / "out")
    assert (len(train), len(valid)) == (43, 2)
    sentences = [sentence for document in train + valid for sentence in document]
    assert len(sentences) == len(set(sentences)) == 3 * 45 + 1
    assert "It is the same text in all of them." in sentences


def test_the_text_does_not_depend_on_where_packages_are(packages: Path, tmp_path: Path) -> None:
    documents = collect_corpus.documents_of_packages({"package 1.0": packages}, 2000)
    moved = packages.rename(tmp_path / "elsewhere")
    assert collect_corpus.documents_of_packages({"package 1.0": moved}, 2000) == documents


def test_max_megabytes_limits_the_text(packages: Path, tmp_path: Path) -> None:
    _, valid = collect(tmp_path / "out", "--max-megabytes", "0.001")
    size = sum((tmp_path / "out" / name).stat().st_size for name in ("train.txt", "valid.txt"))
    assert 1000 - 2 <= size <= 1200
    assert len(valid) == 1


def test_a_repeated_run_does_nothing(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = collect(tmp_path / "out")
    before = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("out/*"))]
    assert collect(tmp_path / "out") == written
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("out/*"))] == before
    (tmp_path / "out" / "valid.txt").unlink()
    assert collect(tmp_path / "out") == written
    (packages / "new.py").write_text('"""This is the text of the new version."""')
    monkeypatch.setattr(collect_corpus, "installed_packages", lambda: {"package 2.0": packages})
    assert sum(map(len, collect(tmp_path / "out"))) == 46


def test_installed_packages_hold_prose() -> None:
    found = collect_corpus.installed_packages()
    assert {"python", "numpy", "torch"} <= {name.split()[0] for name in found}
    documents = collect_corpus.documents_of_packages(found, 40_000)
    assert sum(map(len, documents)) > 300
    assert all(collect_corpus.is_prose(sentence) for document in documents for sentence in document)


def test_help_explains(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        collect_corpus.main(["--help"])
    assert "docstrings" in capsys.readouterr().out


@settings(max_examples=25, deadline=None)
@example(sizes=[1, 3] * 20 + [2])
@example(sizes=[2] * 20)
@example(sizes=[2] * 19)
@given(sizes=st.lists(st.integers(1, 3), min_size=2, max_size=90))
def test_every_twentieth_document_validates(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    folder = tmp_path_factory.mktemp("own")
    documents = [[f"Zw\u00f6lf {i} {line}." for line in range(size)] for i, size in enumerate(sizes)]
    text = "\ufeff" + "\r\n \r\n\r\n".join("\r\n".join(document) for document in documents)
    (folder / "mine.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    train, valid = collect(folder, "--corpus", str(folder / "mine.gz"))
    assert valid == (documents[19::20] or documents[-1:])
    assert train == [document for document in documents if document not in valid]


def test_text_without_blank_lines_is_cut_into_pieces(tmp_path: Path) -> None:
    lines = [f"Line {i}." for i in range(101)]
    (tmp_path / "mine.txt").write_text("\n".join(lines))
    assert collect(tmp_path, "--corpus", str(tmp_path / "mine.txt")) == ([lines[:50], lines[50:100]], [lines[100:]])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "No such file"),
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b"\n \n", "holds no text"),
        ("short.txt", b"One.\nTwo.\n\n", "too little text"),
        ("latin1.txt", b"One.\n\nTwo.\n\xe9t\xe9\n", "latin1.txt:4: not UTF-8"),
        ("cut.gz", gzip.compress(b"One.\n\nTwo.\n" * 9, mtime=0)[:-9], "damaged gzip"),
        ("train.txt", b"One.\n\nTwo.\n", "would be overwritten"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = sorted(tmp_path.glob("*.txt"))
    assert collect_corpus.main(["--corpus", str(tmp_path / name), "--output", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("collect_corpus: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.glob("*.txt")) == before
