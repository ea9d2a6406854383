"""A data folder holds one run's splits, whatever it held before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from mlsm_plugin.tokenization.binarize import binarize
from mlsm_plugin.tokenization.binarize_pairs import binarize_pairs
from mlsm_plugin.tokenization.data_folder import remove_earlier_run


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_pairs_and_texts_replace_each_other(corpus: SimpleNamespace, tokenizer: Path, tmp_path: Path) -> None:
    lines = "The value of the object.\n"
    (tmp_path / "a").write_text(f"{lines}<extra_id_0>\n")
    (tmp_path / "b").write_text(f"<extra_id_0>\n{lines}")
    output = tmp_path / "data"
    texts = {"train": corpus.valid, "valid": corpus.valid, "output": output, "progress": False}
    pairs = {"train": (tmp_path / "a", tmp_path / "b"), "valid": (tmp_path / "a", tmp_path / "b")}
    binarize(tokenizer=tokenizer, **texts)
    of_texts = names(output)
    for splits in (pairs, {"train": pairs["train"]}):
        binarize_pairs(tokenizer=tokenizer, splits=splits, output=output, sentinels=3, progress=False)
        assert {name for name in names(output) if name.endswith((".idx", ".bin"))} == {
            f"{split}.{side}.{end}" for split in splits for side in ("source", "target") for end in ("idx", "bin")
        }
        binarize(tokenizer=tokenizer, **texts)
        assert names(output) == of_texts


def test_what_is_not_of_a_run_stays(tmp_path: Path) -> None:
    for name in ("train.idx", "test.target.bin", "binarize.json", "notes.txt", "train.source.txt"):
        (tmp_path / name).touch()
    (tmp_path / "train.codes").mkdir()
    (tmp_path / "hf_tokenizer").mkdir()
    remove_earlier_run(tmp_path)
    assert names(tmp_path) == {"notes.txt", "train.codes", "train.source.txt"}
    remove_earlier_run(tmp_path / "absent")
