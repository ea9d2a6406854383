"""Measure speed, size and memory of a search index at growing numbers of documents.

    python scripts/bench/search_scale.py [--documents 100000 1000000] [--queries 200]

Documents are drawn, with 16 to 64 tokens; the property of a token follows a Zipf law over 2,000 properties, and each
property has ten words. They are indexed as by ``mlsm search index``, with codes that are computed from the words: the
time of a model is left out, and so is the time for these codes. Each number of documents has its own process. Peaks of
memory are that of the process's own memory (anonymous pages), and that with the pages of mapped files, which the system
takes back when it needs them. The memory includes the interpreter and torch, but no model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch

from mlsm_plugin.core.text.unknown_tokens import UnknownTokens
from mlsm_plugin.search.index import MODES, SearchIndex, build_index
from mlsm_plugin.search.text_codes import BATCH_TOKENS, TextCoder, TextCodes

ATOMS = 2000
FORMS = 10  # words of a property
FEWEST = 16  # tokens of a document
MOST = 64
TOKENS_OF_QUERY = 8
DRAWN_AT_ONCE = 10_000
MEBIBYTE = 1 << 20


class WordNames:
    """The part of a tokenizer that an index needs: a word is called ``w`` and its number."""

    largest_id = ATOMS * FORMS - 1
    unknown_id = -1  # none

    @property
    def backend(self) -> WordNames:
        return self

    def decode(self, numbers: list[int], skip_special_tokens: bool) -> str:
        return " ".join(f"w{number}" for number in numbers)

    def unknown_of(self, text: str) -> UnknownTokens:
        return UnknownTokens()


class DrawnCodes(TextCoder):
    """Codes that follow from the words: each token has its property alone."""

    def __init__(self) -> None:
        self.num_atoms = ATOMS
        self.tokenizer = WordNames()  # type: ignore[assignment]
        self.positions = MOST
        self.device = torch.device("cpu")
        self.origin = {"model": "drawn", "dictionary": None, "layer": None}
        self.fingerprint = "drawn"
        self.seconds = 0.0

    def _codes(self, tokens: torch.Tensor, chosen: torch.Tensor) -> sp.csr_matrix:
        ids = tokens[chosen].numpy()
        activations = (0.5 + ids % 7 / 4).astype(np.float32)
        return sp.csr_matrix((activations, ids // FORMS, np.arange(len(ids) + 1)), shape=(len(ids), ATOMS))

    def coded(self, texts: Sequence[str], *, batch_tokens: int = BATCH_TOKENS) -> list[TextCodes]:
        start = time.perf_counter()
        codes = [self._coded(text) for text in texts]
        self.seconds += time.perf_counter() - start
        return codes

    def _coded(self, text: str) -> TextCodes:
        ids = np.array([int(word[1:]) for word in text.split()])
        codes = self._codes(torch.from_numpy(ids), torch.ones(len(ids), dtype=torch.bool))
        return TextCodes(codes, ids, [(0, 0)] * len(ids))


def drawn_texts(rng: np.random.Generator, number: int, fewest: int, most: int) -> Iterator[str]:
    """Texts of ``fewest`` to ``most`` words."""
    probabilities = 1 / np.arange(1, ATOMS + 1)
    probabilities /= probabilities.sum()
    for first in range(0, number, DRAWN_AT_ONCE):
        lengths = rng.integers(fewest, most + 1, size=min(DRAWN_AT_ONCE, number - first))
        words = rng.choice(ATOMS, size=lengths.sum(), p=probabilities) * FORMS + rng.integers(FORMS, size=lengths.sum())
        for ids in np.split(words, np.cumsum(lengths)[:-1]):
            yield " ".join(f"w{number}" for number in ids.tolist())


@dataclass
class Peaks:
    """The largest memory of this process so far, in bytes."""

    own: int = 0  # anonymous pages
    resident: int = 0  # with those of mapped files

    def look(self) -> None:
        """Compare with the present memory."""
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        memory = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}
        self.own = max(self.own, memory["RssAnon"])
        self.resident = max(self.resident, memory["VmRSS"])


@contextmanager
def watched() -> Iterator[Peaks]:
    """The peaks of memory during the block, looked at 20 times a second."""
    peaks = Peaks()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            peaks.look()

    peaks.look()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()
        peaks.look()


def measure(documents: int, queries: int, root: Path) -> dict[str, float]:
    """Figures of an index of this number of documents."""
    rng = np.random.default_rng(0)
    with open(root / "documents.jsonl", "w", encoding="utf-8") as file:
        for number, text in enumerate(drawn_texts(rng, documents, FEWEST, MOST)):
            file.write(json.dumps({"id": f"d{number}", "text": text}) + "\n")
    coder = DrawnCodes()
    start = time.perf_counter()
    with watched() as indexing:
        figures = build_index([root / "documents.jsonl"], coder, root / "index")
    seconds = time.perf_counter() - start - coder.seconds
    result = {
        "documents": documents,
        "per_second": documents / seconds,
        "bytes": figures["bytes"] / documents,
        "indexing_own": indexing.own,
        "indexing_resident": indexing.resident,
    }
    with watched() as searching:
        index = SearchIndex(root / "index", coder)
        texts = list(drawn_texts(rng, queries, TOKENS_OF_QUERY, TOKENS_OF_QUERY))
        for mode in MODES:
            index.search(texts[0], mode=mode, explain=False)
            start = time.perf_counter()
            for text in texts:
                index.search(text, mode=mode, explain=False)
            result[f"queries_{mode}"] = queries / (time.perf_counter() - start)
        index.close()
    return {**result, "searching_own": searching.own, "searching_resident": searching.resident}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--directory", help="folder for the files, which are removed (default: the system's)")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        with tempfile.TemporaryDirectory(dir=args.directory) as root:
            print(json.dumps(measure(args.documents[0], args.queries, Path(root))))
        return 0
    print(
        "| documents | indexed a second | bytes each | queries a second: codes | words | both "
        "| memory of indexing, MiB | with mapped files | of searching | with mapped files |"
    )
    print("| ---: " * 10 + "|")
    for documents in args.documents:
        command = [sys.executable, __file__, "--alone", "--documents", str(documents), "--queries", str(args.queries)]
        command += ["--directory", args.directory] if args.directory else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        figures = json.loads(done.stdout.splitlines()[-1])
        cells = [figures[name] for name in ("documents", "per_second", "bytes")]
        cells += [figures[f"queries_{mode}"] for mode in ("codes", "words", "both")]
        for name in ("indexing_own", "indexing_resident", "searching_own", "searching_resident"):
            cells.append(figures[name] / MEBIBYTE)
        print("| " + " | ".join(f"{cell:,.0f}" for cell in cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
