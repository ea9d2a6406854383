"""Pairs of texts with sentinels as a dataset that fairseq loads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fairseq.data import data_utils

from mlsm_plugin.cli.main import main
from mlsm_plugin.files.atomic_files import sha256_of_files
from mlsm_plugin.tokenization.binarize_pairs import binarize_pairs
from mlsm_plugin.tokenization.sentinels import dictionary_with_sentinels, encode_with_sentinels

SOURCES = ["The <extra_id_0> of the<extra_id_1>.", "a class <extra_id_2>", "<extra_id_0> \u2603"]
TARGETS = ["<extra_id_0> value <extra_id_1> name", "<extra_id_2> and objects", "<extra_id_0>"]
ALLOWED: dict[str, Any] = {"max_unk_rate": 0.2}  # the snowman


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path / "source.txt", SOURCES), write(tmp_path / "target.txt", TARGETS)


def test_each_line_is_a_text_of_its_side(loaded: SimpleNamespace, tmp_path: Path, pair: tuple[Path, Path]) -> None:
    other = (write(tmp_path / "a", SOURCES[:1]), write(tmp_path / "b", TARGETS[:1]))
    output = tmp_path / "data"
    figures = binarize_pairs(
        tokenizer=loaded.folder,
        splits={"train": pair, "valid": other},
        output=output,
        sentinels=3,
        progress=False,
        **ALLOWED,
    )
    dictionary, _ = dictionary_with_sentinels(output, 3)

    def pieces_of(text: str) -> list[str]:
        return list(loaded.processor.encode(text, out_type=str))

    def ids_of(line: str) -> list[int]:
        return [*encode_with_sentinels(line, pieces_of, dictionary, 3), dictionary.eos()]

    for split, number in (("train", 3), ("valid", 1)):
        unknown = 0
        for side, lines in (("source", SOURCES), ("target", TARGETS)):
            dataset = data_utils.load_indexed_dataset(str(output / f"{split}.{side}"), dictionary)
            expected = [ids_of(line) for line in lines[:number]]
            assert [dataset[i].tolist() for i in range(len(dataset))] == expected
            assert figures[split][f"{side}_tokens"] == sum(map(len, expected))
            unknown += sum(ids.count(dictionary.unk()) for ids in expected)
        assert (figures[split]["pairs"], figures[split]["unknown"]) == (number, unknown)
    assert figures["train"]["unknown"] == 1
    summary = json.loads((output / "binarize.json").read_text())
    fingerprint = sha256_of_files(loaded.folder / "sentencepiece.bpe.model")
    assert summary == {"tokenizer_sha256": fingerprint, "sentinels": 3, "splits": figures}
    files = [f"{split}.{side}.{end}" for split in figures for side in ("source", "target") for end in ("bin", "idx")]
    names = sorted([*files, "dict.txt", "sentencepiece.bpe.model", "binarize.json"])
    assert sorted(path.name for path in output.iterdir()) == names
    for name in ("dict.txt", "sentencepiece.bpe.model"):
        assert (output / name).read_bytes() == (loaded.folder / name).read_bytes()


def test_packed_files_give_the_same_bytes(tokenizer: Path, tmp_path: Path, pair: tuple[Path, Path]) -> None:
    packed = tmp_path / "source.gz"
    packed.write_bytes(gzip.compress(pair[0].read_bytes()))
    for name, source in (("plain", pair[0]), ("packed", packed)):
        splits = {"train": (source, pair[1])}
        binarize_pairs(
            tokenizer=tokenizer, splits=splits, output=tmp_path / name, sentinels=3, progress=False, **ALLOWED
        )
    plain, again = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("plain", "packed")
    )
    assert plain == again


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("a <extra_id_0>\nb\n", "<extra_id_0> c\n", r"target.txt has 1 lines, the other file of the pair has more"),
        ("a\n", "a\nb\nc\n", r"source.txt has 1 lines, the other file of the pair has more"),
        ("a\n\nb\n", "a\nb\nc\n", r"source.txt, line 2 is blank; each line needs a partner"),
        ("a\n\u200b\n", "a\nb\n", r"source.txt, line 2 has no tokens after normalization"),
        ("a\n", "<extra_id_100> b\n", r"target.txt, line 1: <extra_id_100> is not one of the 100 sentinels"),
        ("a <extra_id_1> <extra_id_1>\n", "b\n", r"source.txt, line 1: <extra_id_1> occurs twice"),
        ("a\n", "", r"target.txt is empty"),
    ],
)
def test_pairs_that_do_not_match_are_refused(
    tokenizer: Path, tmp_path: Path, source: str, target: str, message: str
) -> None:
    (tmp_path / "source.txt").write_text(source, encoding="utf-8")
    (tmp_path / "target.txt").write_text(target, encoding="utf-8")
    splits = {"train": (tmp_path / "source.txt", tmp_path / "target.txt")}
    with pytest.raises(ValueError, match=message):
        binarize_pairs(tokenizer=tokenizer, splits=splits, output=tmp_path / "data", sentinels=100, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.txt", "target.txt"]


def test_a_failed_run_leaves_earlier_data_alone(tokenizer: Path, tmp_path: Path, pair: tuple[Path, Path]) -> None:
    output = tmp_path / "data"
    binarize_pairs(tokenizer=tokenizer, splits={"train": pair}, output=output, sentinels=3, progress=False, **ALLOWED)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    with pytest.raises(ValueError, match="<extra_id_2> is not one of the 2 sentinels"):
        binarize_pairs(
            tokenizer=tokenizer, splits={"train": pair}, output=output, sentinels=2, progress=False, **ALLOWED
        )
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    with pytest.raises(ValueError, match=r"source\.txt exists and is "):
        binarize_pairs(
            tokenizer=tokenizer, splits={"train": pair}, output=pair[0], sentinels=3, progress=False, **ALLOWED
        )


def test_too_many_unknown_tokens_name_the_file(tokenizer: Path, tmp_path: Path, pair: tuple[Path, Path]) -> None:
    for rate in (0.0, 0.01):
        with pytest.raises(ValueError, match=rf"% of the tokens of .*source\.txt are unknown, above .* {rate:.2%}"):
            binarize_pairs(
                tokenizer=tokenizer, splits={"train": pair}, output=tmp_path / "data", sentinels=3, max_unk_rate=rate
            )
    assert not (tmp_path / "data").exists()
    words = ["--source", *map(str, (pair[0], "--target", pair[1]))]
    assert main(["binarize", "--tokenizer", str(tokenizer), *words, "--output", str(tmp_path / "data")]) == 1
    assert (
        main(
            [
                "binarize",
                "--tokenizer",
                str(tokenizer),
                *words,
                "--output",
                str(tmp_path / "data"),
                "--max-unk-rate",
                "0.2",
            ]
        )
        == 0
    )
