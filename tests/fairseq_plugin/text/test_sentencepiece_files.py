"""The two files of a tokenizer folder belong together, or an error says what to do."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import sentencepiece as spm

from mlsm_plugin.fairseq_plugin.text.sentencepiece_training import dictionary_pieces, dictionary_text
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import SentencePieceTokenizer

MODEL, DICTIONARY = "sentencepiece.bpe.model", "dict.txt"


def processor_with(*symbols: str) -> spm.SentencePieceProcessor:
    """A model of a few words in which ``symbols`` are pieces."""
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(["the value of the name", "a name and the value"] * 5), model_writer=model,
        vocab_size=30, model_type="bpe", user_defined_symbols=list(symbols), minloglevel=3,
    )  # fmt: skip
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture
def folder(tokenizer: Path, tmp_path: Path) -> Path:
    """A tokenizer that a test may change."""
    return Path(shutil.copytree(tokenizer, tmp_path / "tok"))


def test_pieces_are_the_vocabulary_without_what_fairseq_adds() -> None:
    processor = processor_with("<pad>", "x<y>z")
    names = [processor.id_to_piece(i) for i in range(len(processor))]
    assert names[:5] == ["<unk>", "<s>", "</s>", "<pad>", "x<y>z"]
    assert dictionary_pieces(processor) == names[4:]


@pytest.mark.parametrize("symbol", ["<mask>", "<extra_id_0>", "<a b>"])
def test_pieces_that_fairseq_would_misread_are_refused(symbol: str) -> None:
    reason = "contains whitespace" if " " in symbol else "looks like a special symbol"
    with pytest.raises(ValueError, match=f"the piece '{symbol}' {reason}"):
        dictionary_pieces(processor_with(symbol))


def test_every_piece_has_a_line_and_a_count_of_at_least_one() -> None:
    processor = processor_with()
    pieces = dictionary_pieces(processor)
    lines = dictionary_text(processor, {pieces[1]: 7, pieces[2]: 0, "elsewhere": 9}).split("\n")
    assert lines == [f"{piece} {7 if piece == pieces[1] else 1}" for piece in pieces] + [""]


def test_a_folder_that_is_whole_loads(folder: Path) -> None:
    processor = SentencePieceTokenizer(folder).processor
    assert processor.decode(processor.encode("the value")) == "the value"
    # counts are not the tokenizer's business
    lines = (folder / DICTIONARY).read_text(encoding="utf-8").splitlines()
    (folder / DICTIONARY).write_text("".join(f"{line.split(' ')[0]} 5\n" for line in lines), encoding="utf-8")
    assert len(SentencePieceTokenizer(str(folder)).processor) == len(processor)


@pytest.mark.parametrize("name", [MODEL, DICTIONARY])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"tok/{name} does not exist; `mlsm tokenizer --output \S+tok` makes it"):
        SentencePieceTokenizer(folder)


def test_damaged_files_are_named(folder: Path, tokenizer: Path) -> None:
    (folder / MODEL).write_bytes(b"no model at all")
    with pytest.raises(ValueError, match=rf"{MODEL} is .* SentencePiece model; `mlsm tokenizer"):
        SentencePieceTokenizer(folder)
    shutil.copyfile(tokenizer / MODEL, folder / MODEL)
    (folder / DICTIONARY).write_bytes(b"caf\xe9 1\n")
    with pytest.raises(ValueError, match=rf"{DICTIONARY} is not a dictionary of fairseq \(.*utf-8"):
        SentencePieceTokenizer(folder)


def test_a_dictionary_with_a_byte_order_mark_is_the_same(folder: Path) -> None:
    content = (folder / DICTIONARY).read_bytes()
    (folder / DICTIONARY).write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"))
    SentencePieceTokenizer(folder)
    (folder / "copy").mkdir()
    SentencePieceTokenizer(folder).write_to(folder / "copy")
    assert (folder / "copy" / DICTIONARY).read_bytes() == content  # fairseq itself reads this file, too


@pytest.mark.parametrize("change", ["reversed", "shorter", "longer"])
def test_a_dictionary_of_another_tokenizer_is_refused(folder: Path, change: str) -> None:
    lines = (folder / DICTIONARY).read_text(encoding="utf-8").splitlines(keepends=True)
    changed = {"reversed": lines[::-1], "shorter": lines[:-1], "longer": [*lines, "more 1\n"]}[change]
    (folder / DICTIONARY).write_text("".join(changed), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{DICTIONARY} was not made from {MODEL}"):
        SentencePieceTokenizer(folder)
