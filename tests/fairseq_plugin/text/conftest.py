"""Real English text for the tokenizer: the help topics that come with Python."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest
import sentencepiece as spm
from fairseq.data import Dictionary

from mlsm_plugin.core.files.hf_files import import_transformers
from mlsm_plugin.fairseq_plugin.text.sentencepiece_training import TokenizerSettings, train_tokenizer
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import SentencePieceTokenizer

import_transformers()  # as the package does, before the tests import it

VOCAB_SIZE = 1000


@pytest.fixture(scope="session")
def documents() -> list[list[str]]:
    """The topics as documents of stripped, non-blank lines."""
    texts = [[line.strip() for line in text.split("\n") if line.strip()] for _, text in sorted(topics.items())]
    return [text for text in texts if text]


@pytest.fixture(scope="session")
def corpus(documents, tmp_path_factory) -> SimpleNamespace:
    """Two training files and a validation file, blank lines between documents."""
    folder = tmp_path_factory.mktemp("corpus")

    def write(name: str, part: list[list[str]]) -> Path:
        path = folder / name
        path.write_text("\n\n".join("\n".join(document) for document in part) + "\n", encoding="utf-8")
        return path

    paths = SimpleNamespace(
        train=[write("a.txt", documents[:50]), write("b.txt", documents[50:-5])], valid=[write("c.txt", documents[-5:])]
    )
    assert sum(path.stat().st_size for path in paths.train) > 300_000
    return paths


@pytest.fixture(scope="session")
def tokenizer(corpus, tmp_path_factory) -> Path:
    """Folder of a unigram tokenizer of that text."""
    folder = tmp_path_factory.mktemp("tokenizer") / "unigram"
    train_tokenizer(corpus.train, folder, TokenizerSettings(VOCAB_SIZE))
    return folder


@pytest.fixture(scope="session")
def loaded(tokenizer) -> SimpleNamespace:
    """The tokenizer's processor, fairseq dictionary and our encoder of the two."""
    processor = spm.SentencePieceProcessor(model_file=str(tokenizer / "sentencepiece.bpe.model"))
    dictionary = Dictionary.load(str(tokenizer / "dict.txt"))
    return SimpleNamespace(
        processor=processor, dictionary=dictionary, encoder=SentencePieceTokenizer(tokenizer), folder=tokenizer
    )
