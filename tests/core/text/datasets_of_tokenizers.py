"""Folders with what a binarized dataset has of its tokenizer, without fairseq."""

from __future__ import annotations

import io
from pathlib import Path

import sentencepiece as spm

from mlsm_plugin.core.files.model_files import DICTIONARY_NAME, FOLDER_NAME, MODEL_NAME
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer


def write_symbols(folder: Path, symbols: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{symbol} 1\n" for symbol in symbols)
    (folder / DICTIONARY_NAME).write_text(content, encoding="utf-8")


def hf_dataset(tokenizer: Path, folder: Path) -> HuggingFaceTokenizer:
    """The files of a dataset of a Hugging Face tokenizer."""
    opened = HuggingFaceTokenizer(tokenizer)
    write_symbols(folder, opened.symbols)
    opened.save(folder / FOLDER_NAME)
    return opened


def sentencepiece_dataset(text: Path, folder: Path, *, byte_fallback: bool = False) -> spm.SentencePieceProcessor:
    """The files of a dataset of a SentencePiece tokenizer, learned from a text."""
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(text.read_text(encoding="utf-8").splitlines()),
        model_writer=model,
        vocab_size=700,
        byte_fallback=byte_fallback,
        model_type="bpe" if byte_fallback else "unigram",
        minloglevel=2,
    )
    processor = spm.SentencePieceProcessor(model_proto=model.getvalue())
    write_symbols(folder, [processor.id_to_piece(number) for number in range(3, len(processor))])
    (folder / MODEL_NAME).write_bytes(model.getvalue())
    return processor
