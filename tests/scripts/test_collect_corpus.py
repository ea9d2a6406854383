"""The demo's corpus: prose comes out, code stays out, no package or document is on both sides."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts.script_module import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("collect_corpus")


NUMPY_STYLE = """
    Compute the weighted mean of the ``rows`` of `x`,
    along an axis [1]_.  See :func:`~numpy.average` for what a weight is.

    Parameters
    ----------
    x : array_like, shape (n, d)
        The samples whose mean
        is to be computed.
    axis : int, optional
        Axis that is averaged over. If None, all of them are.

    .. versionadded:: 1.2
       This sentence of a directive is left out.

    .. note::
       The weights need not sum to one. They are always normalized first.

    =====  =======================
    Name   What it does to a table
    =====  =======================

    Notes
    -----
    The mean is a sum over the samples::

        This is an indented block and it is left out.

    It is stable, i.e. the order of the samples does not matter.

    - the first item of the list is a sentence too,
      and it is unwrapped.

    References
    ----------
    .. [1] The author of the book, A title that reads like a sentence.

    Examples
    --------
    >>> weighted_mean(x)
    The output of the example is not a sentence.
    """


def test_sentences_of_a_docstring(script: ModuleType) -> None:
    assert script._document_of(NUMPY_STYLE) == [
        "Compute the weighted mean of the rows of x, along an axis.",
        "See numpy.average for what a weight is.",
        "The samples whose mean is to be computed.",
        "Axis that is averaged over.",
        "If None, all of them are.",
        "The weights need not sum to one.",
        "They are always normalized first.",
        "It is stable, i.e. the order of the samples does not matter.",
        "The first item of the list is a sentence too, and it is unwrapped.",
    ]


def test_google_style_arguments_become_sentences(script: ModuleType) -> None:
    docstring = """Opens the file that is at the path.

    Args:
        path (str, optional): the path of the file, which has
            to exist already.
        mode: one of the modes that are listed above.
    """
    assert script._document_of(docstring) == [
        "Opens the file that is at the path.",
        "The path of the file, which has to exist already.",
        "One of the modes that are listed above.",
    ]


@pytest.mark.parametrize(
    "sentence",
    [
        "the sentence does not start with a capital letter.",
        "This sentence does not end with a stop",
        "Too short a one.",
        "See https://example.org for the rest of the story.",
        "The value is f(x) = a * x ** 2 + b[i] for a in {0, 1}.",
        "This is a sentence with (an open parenthesis.",
        "The gamma function is written as \\Gamma in the formula.",
        "Foo Bar Baz Qux Quux Corge Grault.",
        "The algorithm was introduced by.",
    ],
)
def test_what_is_not_prose_is_refused(script: ModuleType, sentence: str) -> None:
    assert not script.is_english_sentence(sentence)


def test_docstrings_come_from_definitions_attributes_setters_and_topics(script: ModuleType) -> None:
    source = '''
"""Of the module."""
class A:
    """Of the class."""
    field = 1
    """Of the attribute."""
    def f(self):
        """Of the method."""
        print("not documentation")
if True:
    async def g():
        """Of the nested function."""
add_newdoc("module", "name", """Of a setter.""")
add_docstr(f, """Of another, {x}.""".format(x=1))
topics = {"if": """Of a topic."""}
other = {"if": """Of no topic."""}
'''
    assert script.docstrings_of(source) == [
        "Of the module.",
        "Of the class.",
        "Of the attribute.",
        "Of the method.",
        "Of the nested function.",
        "Of a setter.",
        "Of another, {x}.",
        "Of a topic.",
    ]


def test_deduplicate_ignores_case_and_numbers(script: ModuleType) -> None:
    seen: set[str] = set()
    assert script.deduplicate([["A is 1.", "B."], ["a is 2."], ["C.", "b"]], seen) == [["A is 1.", "B."], ["C."]]
    assert script.deduplicate([["C."]], seen) == []


def test_fill_evenly_takes_the_small_ones_whole(script: ModuleType) -> None:
    assert script.fill_evenly({"big": 900, "small": 10, "middle": 300, "large": 800}, 610) == {
        "small": 10,
        "middle": 200,
        "large": 200,
        "big": 200,
    }
    assert script.fill_evenly({"a": 5, "b": 6}, 100) == {"a": 5, "b": 6}


@pytest.mark.parametrize("sizes", [{"a": 10, "b": 10}, {"a": 1000, "b": 900}, dict.fromkeys("abcdefgh", 10)])
def test_valid_packages_leave_some_to_train(script: ModuleType, sizes: dict[str, int]) -> None:
    chosen = script.choose_valid_packages(sizes, 30)
    assert chosen
    assert chosen < set(sizes)
    assert chosen == script.choose_valid_packages(dict(reversed(sizes.items())), 30)


def test_a_package_is_read_without_being_imported(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text('"""This is a test and it is not read."""')
    (tmp_path / "b.py").write_text('"""The other text is of module b and is longer."""\nraise SystemExit')
    (tmp_path / "a.py").write_text('"""This is the text of the module a."""')
    (tmp_path / "broken.py").write_text('"""This is a file that does not parse.""" def')
    (tmp_path / "binary.py").write_bytes(b'"""\xff\xfe is not in UTF-8 at all."""')
    text = script.collect_package("pkg", tmp_path, 1000, lambda: None)
    assert text.documents == [["This is the text of the module a."], ["The other text is of module b and is longer."]]
    assert text.size == sum(len(document[0]) + 2 for document in text.documents)


def test_installed_packages(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "PACKAGES", {"python": "", "networkx": "networkx", "fsspec": "fsspec"})
    arguments = ["--output", str(tmp_path / "out"), "--max-megabytes", "0.2"]
    assert script.main(arguments) == 0
    table = capsys.readouterr().out
    packages = {name: [line.split()[0] for line in table.splitlines() if name in line] for name in script.PACKAGES}
    assert sorted(map(len, packages.values())) == [1, 1, 1]
    train = (tmp_path / "out" / "train.txt").read_text(encoding="utf-8")
    valid = (tmp_path / "out" / "valid.txt").read_text(encoding="utf-8")
    assert len(valid) > 1000
    sentences = [line for text in (train, valid) for line in text.splitlines() if line]
    assert len(sentences) == len(set(sentences)) > 500
    assert all(map(script.is_english_sentence, sentences))
    assert "\n\n\n" not in train
    assert train.endswith(".\n")
    assert not train.startswith("\n")

    assert script.main(arguments) == 0
    assert "nothing to do" in capsys.readouterr().out
    (tmp_path / "out" / "train.txt").write_text("tampered")
    assert script.main(arguments) == 0
    assert (tmp_path / "out" / "train.txt").read_text(encoding="utf-8") == train


def split(script: ModuleType, corpus: Path, output: Path) -> tuple[list[str], list[str]]:
    assert script.main(["--corpus", str(corpus), "--output", str(output)]) == 0
    texts = [(output / f"{name}.txt").read_text(encoding="utf-8") for name in ("train", "valid")]
    return texts[0].split("\n\n"), texts[1].split("\n\n")


def test_every_twentieth_document_validates(script: ModuleType, tmp_path: Path) -> None:
    corpus = tmp_path / "mine.txt"
    corpus.write_bytes(
        "\ufeff".encode() + b"\r\n\r\n\r\n".join(f"First {i}.\r\nZw\u00f6lf.".encode() for i in range(41))
    )
    train, valid = split(script, corpus, tmp_path / "out")
    assert [text.split(".")[0] for text in valid] == ["First 19", "First 39"]
    assert len(train) == 39
    assert train[0] == "First 0.\nZw\u00f6lf."
    assert train[-1] == "First 40.\nZw\u00f6lf.\n"


def test_the_last_of_few_documents_validates(script: ModuleType, tmp_path: Path) -> None:
    corpus = tmp_path / "mine.txt.gz"
    corpus.write_bytes(gzip.compress(b"One.\n\nTwo.\n\nThree.", mtime=0))
    assert split(script, corpus, tmp_path / "out") == (["One.", "Two.\n"], ["Three.\n"])


def test_text_without_blank_lines_is_cut_into_pseudo_documents(script: ModuleType, tmp_path: Path) -> None:
    corpus = tmp_path / "mine.txt"
    corpus.write_text("".join(f"Line {i}.\n" for i in range(101)))
    train, valid = split(script, corpus, tmp_path / "out")
    assert [text.count("Line") for text in train] == [50, 50]
    assert valid == ["Line 100.\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "missing.txt: No such file or directory"),
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b"\n \n", "holds no text"),
        ("short.txt", b"One.\nTwo.\n\n", "too little text to be split: 2 lines"),
        ("latin1.txt", b"One.\n\nTwo.\n\xe9t\xe9\n", "latin1.txt, line 4: not UTF-8"),
        ("plain.txt.gz", b"One.\n\nTwo.\n", "not a whole .gz file"),
        ("cut.txt.gz", gzip.compress(b"One.\n\nTwo.\n" * 9, mtime=0)[:-9], "not a whole .gz file"),
    ],
)
def test_errors_are_one_line(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes | None,
    message: str,
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert script.main(["--corpus", str(tmp_path / name), "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("out/*.txt"))


def test_the_source_is_not_overwritten(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.txt").write_text("One.\n\nTwo.\n")
    assert script.main(["--corpus", str(tmp_path / "train.txt"), "--output", str(tmp_path)]) == 1
    assert "would be overwritten" in capsys.readouterr().err
    assert (tmp_path / "train.txt").read_text() == "One.\n\nTwo.\n"
