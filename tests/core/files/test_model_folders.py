"""Folders of models, and what may lie in them before."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.core.files.model_folders import check_model_folder, check_new_model_folder, new_model_folder

STALE = (
    "special_tokens_map.json",
    "added_tokens.json",
    "adapter_config.json",
    "chat_template.jinja",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "sentencepiece.bpe.model",
    "vocab.txt",
)


def write(path: Path, *, overwrite: bool = False, content: str = "new") -> None:
    with new_model_folder(path, overwrite=overwrite) as folder:
        (folder / "config.json").write_text(content)
        (folder / "tokenizer.json").write_text(content)


@pytest.mark.parametrize("name", STALE)
def test_nothing_of_another_model_is_left(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_text("old")
    with pytest.raises(ValueError, match=rf"holds another model already \({name}\)"):
        write(folder)
    with pytest.raises(ValueError, match=rf"holds another model already \({name}\); choose another --output"):
        check_new_model_folder(folder)
    assert [path.name for path in folder.iterdir()] == [name]
    write(folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]


def test_the_same_model_and_what_lies_beside_one_stay(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / ".git").mkdir(parents=True)
    for name in ("README.md", "LICENSE", ".gitattributes"):
        (folder / name).write_text("mine")
    check_new_model_folder(folder)
    write(folder)
    write(folder)
    with pytest.raises(ValueError, match="holds another model already"):
        write(folder, content="newer")
    assert (folder / "config.json").read_text() == "new"
    write(folder, content="newer", overwrite=True)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".git", ".gitattributes", "LICENSE", "README.md", "config.json", "tokenizer.json"]
    assert (folder / "config.json").read_text() == "newer"


@pytest.mark.parametrize("name", ["checkpoint_best.pt", "meta.json", "notes.txt", "checkpoint-5"])
def test_what_is_no_model_is_never_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=f"holds files that do not belong to a model, such as {name}"):
            write(tmp_path, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_failed_export_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "added_tokens.json").write_text("old")
    with pytest.raises(RuntimeError, match="no"), new_model_folder(folder, overwrite=True):
        raise RuntimeError("no")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (folder / "added_tokens.json").read_text() == "old"
    check_model_folder(tmp_path / "nothing")
