"""The codes of an adaptation in a report: the tokens of the model, with the codes that it learned."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.huggingface.pretraining_sequences import PretrainingSequences
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from mlsm_plugin.reports.adapted_texts import coded_blocks, coded_part, is_adaptation, summarize_adaptation
from tests.adapted_student import ATOMS, adapted_student
from tests.conftest import failing_mlsm, mlsm


@pytest.fixture(params=[(), ("--vocab-size", 300)], ids=["one vocabulary", "two"], scope="module")
def adapted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]
) -> Path:
    return adapted_student(tmp_path_factory, english_text[0], *request.param)


def test_atoms_are_summarized_over_the_tokens_of_the_model(adapted: Path) -> None:
    assert is_adaptation(adapted)
    summaries, store = summarize_adaptation(adapted, "train", max_tokens=10**9)
    assert len(summaries) == store.num_atoms == ATOMS
    tokenizer = HuggingFaceTokenizer(adapted / "model")
    vocabulary = set(tokenizer.tokens_by_id())
    assert all(token in vocabulary for summary in summaries for token, _ in summary.top_tokens)
    text = TokenSequences(adapted / "tokens")
    if not (adapted / "tokens.places").exists():
        number = int(np.searchsorted(text.starts, len(store)))
        dataset = PretrainingSequences(text.part(0, number), adapted / "train.codes")
        assert dataset.codes is not None
        atoms, weights = dataset.codes.lookup(np.arange(len(store)))
        for atom in range(ATOMS):
            share = float(((atoms == atom) & (weights > 0)).any(axis=1).sum()) / store.meta["coded_tokens"]
            assert summaries[atom].frequency == pytest.approx(share, rel=0.2)


def test_no_more_tokens_are_read_than_asked_for(adapted: Path) -> None:
    blocks = list(coded_blocks(coded_part(adapted, "train"), 10))
    assert [(len(ids), codes.shape) for ids, codes in blocks] == [(10, (10, ATOMS))]


def test_both_parts_of_the_text_are_shown(adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "valid"):
        mlsm("inspect", adapted, "--split", split, "--output", tmp_path / f"{split}.html")
        assert f"{ATOMS} atoms" in capsys.readouterr().out
        assert f"out, {split}" in (tmp_path / f"{split}.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("split", ["train", "valid"])
def test_folders_of_an_earlier_run_with_other_options_are_not_read(adapted: Path, tmp_path: Path, split: str) -> None:
    expected, _ = summarize_adaptation(adapted, split, max_tokens=10**9)
    copied = tmp_path / "out"
    shutil.copytree(adapted, copied)
    for name in ("tokens.places", "tokens.auxiliary", "valid", "valid.places", "valid.auxiliary"):
        if not (copied / name).exists():
            TokenSequences.write(copied / name, [[1, 2, 3], [1, 4, 3]])
    summaries, _ = summarize_adaptation(copied, split, max_tokens=10**9)
    assert [summary.top_tokens for summary in summaries] == [summary.top_tokens for summary in expected]


def test_what_an_adaptation_lacks_is_one_line(
    adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ("--output", tmp_path / "page.html")
    assert "--split is one of train, valid" in failing_mlsm(capsys, "inspect", adapted, "--split", "test", *page)
    assert "leave --codes out" in failing_mlsm(capsys, "inspect", adapted, "--codes", tmp_path, *page)
    (adapted / "valid.codes").rename(adapted / "moved")
    line = failing_mlsm(capsys, "inspect", adapted, "--split", "valid", *page)
    (adapted / "moved").rename(adapted / "valid.codes")
    assert "has no codes (valid.codes); only objectives with mlsm make them" in line
    (adapted / "model").rename(adapted / "moved")
    line = failing_mlsm(capsys, "inspect", adapted, *page)
    (adapted / "moved").rename(adapted / "model")
    assert "is not finished; run the same `mlsm adapt` again" in line
    assert not (tmp_path / "page.html").exists()
