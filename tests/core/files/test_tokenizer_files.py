"""The files of a tokenizer: which they are, copies of them, and fairseq's options for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.core.files.model_files import bpe_options, copy_tokenizer, tokenizer_files


def folder_with(folder: Path, *names: str) -> Path:
    """A folder whose files hold their own names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


SENTENCEPIECE = ["dict.txt", "sentencepiece.bpe.model"]
HUGGING_FACE = ["dict.txt", "hf_tokenizer/tokenizer.json", "hf_tokenizer/tokenizer_config.json"]


@pytest.mark.parametrize("names", [SENTENCEPIECE, HUGGING_FACE, ["dict.txt"], []])
def test_only_the_tokenizer_is_listed_and_copied(tmp_path: Path, names: list[str]) -> None:
    source = folder_with(tmp_path / "data", *names, "train.bin", "train.codes/meta.json", "hf_tokenizer.txt")
    (source / "hf_tokenizer" / "cache").mkdir(parents=True)
    assert [path.as_posix() for path in tokenizer_files(source)] == names
    target = folder_with(tmp_path / "run", "checkpoint_last.pt", "dict.txt")
    copy_tokenizer(source, target)
    found = {path.relative_to(target).as_posix(): path.read_text() for path in target.rglob("*") if path.is_file()}
    assert found == {name: name for name in [*names, "checkpoint_last.pt", "dict.txt"]}


@pytest.mark.parametrize(("names", "others"), [(SENTENCEPIECE, HUGGING_FACE), (HUGGING_FACE, SENTENCEPIECE)])
def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path, names: list[str], others: list[str]) -> None:
    source = folder_with(tmp_path / "data", *names)
    target = folder_with(tmp_path / "run", *others)
    with pytest.raises(ValueError, match=r"run/(sentencepiece\.bpe\.model|hf_tokenizer) is the tokenizer of another d"):
        copy_tokenizer(source, target)
    assert not (target / names[1]).exists()


def test_options_of_the_first_folder_with_a_tokenizer(tmp_path: Path) -> None:
    neither = folder_with(tmp_path / "neither", "dict.txt")
    sentencepiece = folder_with(tmp_path / "sentencepiece", *SENTENCEPIECE)
    hugging_face = folder_with(tmp_path / "hugging_face", *HUGGING_FACE)
    model = {"bpe": "sentencepiece", "sentencepiece_model": str(sentencepiece / "sentencepiece.bpe.model")}
    folder = {"bpe": "hf_tokenizer", "hf_tokenizer": str(hugging_face / "hf_tokenizer")}
    assert bpe_options(neither, sentencepiece, hugging_face) == model
    assert bpe_options(hugging_face, sentencepiece) == folder
    with pytest.raises(FileNotFoundError, match=r"neither has no tokenizer \(sentencepiece\.bpe\.model or hf_tok"):
        bpe_options(neither, tmp_path)
