"""Text to sequences: the ids are the library's, and a folder is whole, current or refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.huggingface.text_sequences import default_max_length, ids_of_lines, write_text_sequences
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from tests.huggingface.coded_model import MAX_LENGTH, CodedModel, coded_model, files_of
from tests.tiny_hf_models import TOKENIZERS, add_nothing_around, add_own_tokens, library_ids, make_model, make_tokenizer


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> CodedModel:
    return coded_model(tmp_path_factory, english_text[0])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_of_lines_are_the_librarys(kind: str, english_text: tuple[Path, Path], tmp_path: Path) -> None:
    make_tokenizer(kind, english_text[1], tmp_path / "tokenizer")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    lines = ["A name, and a [MASK] or <mask>.", "", "  x\u0301 \u4e2d", "", "</s>"]
    found = list(ids_of_lines(lines, HuggingFaceTokenizer(tmp_path / "tokenizer")))
    special = {theirs.mask_token_id, theirs.eos_token_id, theirs.sep_token_id}
    wanted = [library_ids(theirs, line) if line else None for line in lines]
    # what is a piece of the vocabulary, as of Unigram, neither masks nor ends a text
    assert found == [ids and [theirs.unk_token_id if number in special else number for number in ids] for ids in wanted]


def test_sequences_are_what_the_tokenizer_makes_of_a_text(english_text: tuple[Path, Path], tmp_path: Path) -> None:
    model = make_model("bert", english_text[1], tmp_path / "model")
    text, line = tmp_path / "text.txt", "the name of [E1] a value [/E1] is bound"
    text.write_text(f"{line}\n", encoding="utf-8")
    add_own_tokens(model, model)
    (sequence,), _ = write_text_sequences([text], model, tmp_path / "first")
    assert sequence.tolist() == AutoTokenizer.from_pretrained(model)(line)["input_ids"]
    add_nothing_around(model)
    (bare,), _ = write_text_sequences([text], model, tmp_path / "second")
    assert bare.tolist() == AutoTokenizer.from_pretrained(model)(line)["input_ids"] == sequence[1:-1].tolist()
    with pytest.raises(ValueError, match="Pass --overwrite"):
        write_text_sequences([text], model, tmp_path / "first")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_lines_of_a_document_are_words_apart(kind: str, english_text: tuple[Path, Path], tmp_path: Path) -> None:
    tokenizer = make_tokenizer(kind, english_text[1], tmp_path / "tokenizer")
    lines = ["A name is bound.", "It is a value.", "", "Names are bound"]
    found = list(ids_of_lines(lines, HuggingFaceTokenizer(tmp_path / "tokenizer")))
    assert found[0] + found[1] == library_ids(tokenizer, "A name is bound. It is a value.")
    assert found[3] == library_ids(tokenizer, lines[3])


def test_sequences_hold_the_text_in_order(made: CodedModel) -> None:
    sequences, tokenizer = TokenSequences(made.tokens), AutoTokenizer.from_pretrained(made.model)
    lines = [line for line in made.text.read_text("utf-8").splitlines() if line.strip()]
    wanted = [number for line in lines for number in library_ids(tokenizer, line)]
    assert [number for sequence in sequences for number in sequence[1:-1].tolist()] == wanted
    assert {(int(sequence[0]), int(sequence[-1])) for sequence in sequences} == {
        (tokenizer.cls_token_id, tokenizer.sep_token_id)
    }
    assert max(map(len, sequences)) <= MAX_LENGTH


def test_the_same_text_is_not_written_again_and_another_is_refused(made: CodedModel, tmp_path: Path) -> None:
    output, text = tmp_path / "tokens", tmp_path / "text.txt.gz"
    text.write_bytes(gzip.compress(b"A name is bound.\n\nIt is a value.\n"))
    first, new = write_text_sequences([text], made.model, output)
    assert (new, len(first)) == (True, 2)
    before = files_of(output)
    again, new = write_text_sequences([text], f"hf:{made.model}", output)
    assert (new, again.fingerprint) == (False, first.fingerprint)
    with pytest.raises(
        ValueError, match=r"max_length is 70 there and 9 now. Pass --overwrite to `mlsm binarize`, or delete"
    ):
        write_text_sequences([text], made.model, output, max_length=9)
    with pytest.raises(ValueError, match=r"texts is .* there and .* now"):
        write_text_sequences([text, text], made.model, output)
    assert files_of(output) == before
    _, new = write_text_sequences([text], made.model, output, max_length=9, overwrite=True)
    assert new
    assert files_of(output) != before
    assert set(files_of(output)) == {"ids.npy", "starts.npy", "meta.json"}


def test_default_length_is_what_the_model_takes(made: CodedModel, tmp_path: Path) -> None:
    assert default_max_length(made.model) == 70
    make_tokenizer("word_piece", made.text, tmp_path / "tokenizer")
    assert default_max_length(tmp_path / "tokenizer") == 512


def test_lines_that_are_cut_are_counted(
    english_text: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tokenizer("word_piece", english_text[1], tmp_path / "tokenizer")
    text = tmp_path / "text.txt"
    text.write_text("the name\n\nthe value of the name of the value\nname\n", encoding="utf-8")
    sequences, _ = write_text_sequences([text], tmp_path / "tokenizer", tmp_path / "out", max_length=5, apart=True)
    assert [len(ids) for ids in sequences] == [4, 5, 3]
    assert caplog.messages == ["1 of 3 lines are longer than 5 ids, and are cut"]
