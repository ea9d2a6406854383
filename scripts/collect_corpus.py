"""Write ``train.txt`` and ``valid.txt``: one sentence a line, a blank line between documents.

Without ``--corpus`` the text is English that every installation already holds, so nothing is downloaded: sentences
from the docstrings of Python's standard library and of the packages that this project depends on. Sources are parsed,
never imported, and each module gives one document. The same installed versions always give the same text.

With ``--corpus FILE`` your own text is split. In both cases every 20th document goes to ``valid.txt``.

    python scripts/collect_corpus.py --output corpus
    python scripts/collect_corpus.py --output corpus --corpus my_text.txt.gz
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import platform
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import atomic_open
from mlsm_plugin.core.files.step_record import Step, StepRecord
from mlsm_plugin.core.text.text_files import check_text_files, progress_bar, read_lines

VALID_EVERY = 20  # documents
PIECE_LINES = 50  # a text without blank lines is cut into documents of this length
# Dependencies with a lot of documentation. Other packages are not read, so that two developers get the same text.
PACKAGES = {name: name for name in ("networkx", "numpy", "scipy", "sympy", "torch")} | {"scikit-learn": "sklearn"}
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "testing", "externals", "_vendor"})

Document = list[str]  # sentences

TEXT_INDENTATION = re.compile(r"\s*[\w\"'(`:]|")  # empty for a blank line, an underline, a list item
INLINE_MARKUP = re.compile(r"(:[\w:]+:)?`+")  # `x`, ``x`` and :func:`x` become x
SENTENCE_BREAK = re.compile(r"(?<=[.?!])\s+(?=[A-Z\"'(])")
# From a capital to a full stop, without the characters of code, mathematics or markup.
PLAIN_SENTENCE = re.compile(r"[A-Z][A-Za-z0-9 ,;:()'\"/.?!-]*[A-Za-z0-9]{2}[)\"']?[.?!]")
# Calls, underlines, lists, URLs, and abbreviations where a sentence may have been cut.
NOT_PROSE = re.compile(r"\w\(|--| - |\.\.|//|\b(www|et al|vs|eg|Eq|Fig|Sec)\.")
COMMON_WORD = re.compile(
    r"\b(a|all|an|and|any|are|as|at|be|been|but|by|can|do|does|for|from|had|has|have|if|in|is|it|its|may|must|no|not|of|"
    r"on|or|should|than|that|the|then|there|they|this|to|was|we|when|which|will|with|you)\b"
)


def is_prose(sentence: str) -> bool:
    """Whether a sentence looks like English: 5 to 70 words, a fifth of them common, and nothing similar to code."""
    words = len(sentence.split())
    return (
        5 <= words <= 70
        and len(COMMON_WORD.findall(sentence.lower())) >= max(2, words / 5)
        and sentence.count("(") == sentence.count(")")
        and sentence.count('"') % 2 == 0
        and PLAIN_SENTENCE.fullmatch(sentence) is not None
        and NOT_PROSE.search(sentence) is None
    )


def sentences_of(docstring: str) -> Iterator[str]:
    """The prose sentences of a docstring: a paragraph ends where the indentation changes, or at a line without text."""
    for _, lines in groupby(docstring.splitlines(), key=lambda line: TEXT_INDENTATION.match(line).end()):
        paragraph = INLINE_MARKUP.sub("", " ".join(" ".join(lines).split()))
        yield from filter(is_prose, SENTENCE_BREAK.split(paragraph))


def docstrings_of(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The docstrings of a module, a class or a function, and of the classes and functions defined in it."""
    if docstring := ast.get_docstring(node):
        yield docstring
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from docstrings_of(child)


def sentences_of_module(path: Path) -> Document:
    """The prose of the docstrings of one source file; no sentences if the file cannot be parsed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        try:
            module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError):
            return []
    return [sentence for docstring in docstrings_of(module) for sentence in sentences_of(docstring)]


def without_duplicates(document: Document, seen: set[str]) -> Document:
    """The sentences that are not in ``seen`` yet, ignoring case, numbers and punctuation; adds them to ``seen``."""
    by_key = {re.sub(r"[^a-z]+", " ", sentence.lower()): sentence for sentence in document}
    fresh = {key: sentence for key, sentence in by_key.items() if key not in seen}
    seen.update(fresh)
    return list(fresh.values())


def installed_packages() -> dict[str, Path]:
    """Name and version of the packages to read, with their folders."""
    folders = {f"python {platform.python_version()}": Path(sysconfig.get_path("stdlib"))}
    for name, folder in PACKAGES.items():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        folders[f"{name} {distribution.version}"] = Path(str(distribution.locate_file(folder)))
    return folders


def documents_of_packages(packages: dict[str, Path], max_bytes: int) -> list[Document]:
    """One document per module; modules are read in a fixed random order until there are ``max_bytes`` of text."""
    modules = []
    for folder in packages.values():
        names = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
        modules += [folder / name for name in names if not SKIPPED_FOLDERS & set(name.parts)]
    random.Random(0).shuffle(modules)
    documents: list[Document] = []
    seen = set[str]()
    size = 0
    with progress_bar("reading docstrings", max_bytes, show=True) as bar:
        while modules and size < max_bytes:
            if document := without_duplicates(sentences_of_module(modules.pop()), seen):
                documents.append(document)
                added = len("\n".join(document)) + 2
                size += added
                bar.update(added)
    return documents


def documents_of_file(path: Path) -> list[Document]:
    """The documents of the user's text: runs of lines between blank lines."""
    with progress_bar(f"reading {path.name}", check_text_files([path]), show=True) as bar:
        return [list(lines) for is_text, lines in groupby(read_lines(path, bar.update), key=bool) if is_text]


def write_split(documents: list[Document], train: Path, valid: Path) -> None:
    """Write every 20th document (the last one if there are fewer) to ``valid``, and the others to ``train``.

    Raises:
        ValueError: there is no document, or a single document that is too short to be cut into pieces.
    """
    if len(documents) == 1:
        lines = documents[0]
        documents = [lines[start : start + PIECE_LINES] for start in range(0, len(lines), PIECE_LINES)]
    if len(documents) < 2:
        raise ValueError(f"too little text: a split needs two documents, or one of more than {PIECE_LINES} lines")
    texts = ["\n".join(document) + "\n" for document in documents]
    first = min(VALID_EVERY, len(texts)) - 1
    valid_texts = texts[first::VALID_EVERY]
    del texts[first::VALID_EVERY]
    for path, chosen in ((train, texts), (valid, valid_texts)):
        with atomic_open(path, "w") as file:
            file.write("\n".join(chosen))


def collect(args: argparse.Namespace) -> None:
    """Write the two files, unless they exist and their inputs have not changed."""
    train = args.output / "train.txt"
    valid = args.output / "valid.txt"
    packages = {} if args.corpus else installed_packages()
    settings = ["--corpus"] if args.corpus else ["--max-megabytes", str(args.max_megabytes), *packages]
    inputs = [Path(__file__), *([args.corpus] if args.corpus else [])]
    check_text_files(inputs)
    if args.corpus and args.corpus.resolve() in (train.resolve(), valid.resolve()):
        raise ValueError(f"--corpus {args.corpus} would be overwritten; choose another --output")

    def write() -> None:
        max_bytes = int(args.max_megabytes * 1e6)
        documents = documents_of_file(args.corpus) if args.corpus else documents_of_packages(packages, max_bytes)
        write_split(documents, train, valid)

    args.output.mkdir(parents=True, exist_ok=True)
    record = StepRecord(args.output / "corpus.json")
    record.run(Step("corpus", write, {"settings": settings}, inputs, [train, valid]))
    print(record.table())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or prints an error in one line and returns 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for train.txt and valid.txt")
    help_text = "your own text: UTF-8, plain or compressed, one sentence a line, blank lines between documents"
    parser.add_argument("--corpus", type=Path, metavar="FILE", help=help_text)
    help_text = "amount of text to collect from the installed packages (default: %(default)s)"
    parser.add_argument("--max-megabytes", type=float, default=4.0, metavar="MB", help=help_text)
    args = parser.parse_args(argv)
    if not 0 < args.max_megabytes < float("inf"):
        parser.error("--max-megabytes must be a positive number")
    try:
        collect(args)
    except (OSError, ValueError) as error:
        print(f"collect_corpus: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
