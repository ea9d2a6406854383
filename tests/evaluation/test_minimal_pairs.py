"""Scoring of minimal pairs, compared with masking one token at a time."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch

from mlsm_plugin import hub
from mlsm_plugin.cli.main import main
from mlsm_plugin.evaluation import minimal_pairs
from mlsm_plugin.evaluation.minimal_pairs import (
    TIE,
    MinimalPair,
    compare_pairs,
    evaluate_pairs,
    pair_files,
    pseudo_log_likelihoods,
    read_pairs,
)
from mlsm_plugin.evaluation.pair_models import PairModel
from tests.conftest import Pipeline, failing_mlsm
from tests.tiny_models import TinyData, save_untrained, save_untrained_npm

Capture = pytest.CaptureFixture[str]
SENTENCES = ["The name is bound.", "If the target is an attribute, it is called.", "A", "Names are bound to objects."]


@pytest.fixture(scope="module")
def model(pipeline: Pipeline) -> Any:
    return hub.from_pretrained(pipeline.auxiliary)


def slow_score(model: Any, sentence: str) -> float:
    tokens = model.encode(sentence)
    total = 0.0
    for place in range(1, len(tokens) - 1):
        masked = tokens.clone()
        masked[place] = model.task.mask_idx
        logits = model.model(masked[None])[0][0, place].double()
        total += float(logits.log_softmax(dim=0)[tokens[place]])
    return total


def scores(model: Any, sentences: list[str], *, batch_tokens: int) -> list[float]:
    return pseudo_log_likelihoods(model, [model.encode(text) for text in sentences], batch_tokens=batch_tokens)


@pytest.mark.parametrize("batch_tokens", [1, 60, 8192])
def test_scores_are_those_of_one_mask_at_a_time(model: Any, batch_tokens: int) -> None:
    with torch.no_grad():
        expected = [slow_score(model, sentence) for sentence in SENTENCES]
    found = scores(model, SENTENCES, batch_tokens=batch_tokens)
    assert found == pytest.approx(expected, rel=1e-4)
    assert pseudo_log_likelihoods(model, []) == []


def test_a_sentence_that_is_too_long_is_shown_in_part(model: Any) -> None:
    limit = model.model.max_positions()
    with pytest.raises(ValueError, match=rf"more than the {limit} positions of the model: '(w ){{40}}\.\.\.'"):
        compare_pairs(model, [pair("A name.", "w " * 10_000)])


def test_a_sentence_without_tokens_has_no_score(model: Any) -> None:
    for text in ("", " ", "\u200b"):
        with pytest.raises(ValueError, match="a sentence has no token, so it cannot be scored"):
            compare_pairs(model, [pair("A name.", text)])


def pair(good: str, bad: str) -> MinimalPair:
    return MinimalPair(good, bad, "somewhere")


@pytest.fixture(scope="module")
def sixty(english_text: tuple[Path, Path]) -> list[str]:
    lines = dict.fromkeys(english_text[0].read_text(encoding="utf-8").splitlines())
    return [line for line in lines if 20 < len(line) < 58][:60]


def test_identical_sentences_are_ties_in_any_batch(model: Any, sixty: list[str]) -> None:
    same = [pair(text, text) for text in sixty] + [pair("A  name. ", "A name.")]  # the same ids
    for batch_tokens in (8192, 2000, 700, 300, 64):
        assert compare_pairs(model, same, batch_tokens=batch_tokens) == [0] * len(same)


def test_the_result_is_that_of_one_mask_at_a_time_in_any_batch(model: Any, sixty: list[str]) -> None:
    pairs = [pair(good, bad) for good, bad in zip(sixty[::2], sixty[1::2], strict=True)]
    with torch.no_grad():
        slow = [slow_score(model, text) for text in sixty]
    differences = [good - bad for good, bad in zip(slow[::2], slow[1::2], strict=True)]
    assert min(map(abs, differences)) > 2 * TIE
    for batch_tokens in (8192, 64):
        assert compare_pairs(model, pairs, batch_tokens=batch_tokens) == [
            1 if value > 0 else -1 for value in differences
        ]


@pytest.mark.slow
def test_noise_does_not_decide_a_pair_close_to_a_tie(
    model: Any, sixty: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (8192, 700, 64)
    runs = [scores(model, sixty, batch_tokens=size) for size in sizes]
    found = [[abs(good - bad) for good, bad in zip(run[::2], run[1::2], strict=True)] for run in runs]
    spread = [max(values) - min(values) for values in zip(*found, strict=True)]
    number = spread.index(max(spread))
    own = [differences[number] for differences in found]
    monkeypatch.setattr(minimal_pairs, "TIE", (min(own) + max(own)) / 2)  # a tie in some of the batches
    pairs = [pair(good, bad) for good, bad in zip(sixty[::2], sixty[1::2], strict=True)]
    assert len({compare_pairs(model, pairs, batch_tokens=size)[number] for size in sizes}) == 1


def test_a_tie_is_far_above_float_noise(model: Any, sixty: list[str]) -> None:
    runs = [scores(model, sixty, batch_tokens=size) for size in (8192, 2000, 300)]
    noise = max(max(values) - min(values) for values in zip(*runs, strict=True))
    assert 0 < noise < TIE / 20


def test_the_help_says_what_a_tie_is(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "pairs", "--help"])
    assert f"less than {TIE} nats" in " ".join(capsys.readouterr().out.split())


def test_scores_that_are_no_numbers_are_refused(tiny: TinyData) -> None:
    damaged = hub.from_pretrained(tiny.model)
    torch.nn.init.constant_(next(damaged.model.parameters()), float("nan"))
    with pytest.raises(ValueError, match="the model's scores are not finite"):
        compare_pairs(damaged, [pair("A name.", "A value.")])


def test_model_whose_head_was_not_trained_is_refused(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    pairs = tmp_path / "in.jsonl"
    pairs.write_text('{"sentence_good": "a", "sentence_bad": "b"}\n', encoding="utf-8")
    save_untrained(tiny.data_bin, tmp_path / "mlsm", "--mlm-weight", 0, "--num-atoms", 8)
    save_untrained_npm(tiny, tmp_path / "npm")
    for name, why in (("mlsm", "--mlm-weight was 0"), ("npm", "has no loss on it")):
        line = failing_mlsm(capsys, "evaluate", "pairs", "--checkpoint", tmp_path / name, "--input", pairs)
        assert "the masked-LM head of this model was not trained" in line
        assert why in line


def test_files_of_a_folder_are_read_or_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = b'{"sentence_good": "A name.", "sentence_bad": "A names."}\n'
    folder = tmp_path / "blimp"
    (folder / "below").mkdir(parents=True)
    (folder / ".cache").mkdir()
    for name in ("a.jsonl", "B.JSONL", "._a.jsonl", "notes.txt", "a.jsonl.bak", ".cache/x.jsonl"):
        (folder / name).write_bytes(line)
    (folder / "below" / "c.jsonl.gz").write_bytes(gzip.compress(line))
    names = pair_files([folder, str(folder / "below" / ".." / "a.jsonl"), folder / "a.jsonl"])
    assert names == [str(folder / name) for name in ("B.JSONL", "a.jsonl", "below/c.jsonl.gz")]
    assert caplog.messages == [f"{folder}: not read: {folder}/._a.jsonl, {folder}/a.jsonl.bak, {folder}/notes.txt"]
    assert [read_pairs(name)[0].task for name in names] == ["B", "a", "c"]
    caplog.clear()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line))
    (tmp_path / "a.jsonl").write_bytes(line)
    pair_files([tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"])
    assert "are both read; if one is a copy, leave it out" in caplog.text


def test_a_model_that_cannot_tell_sentences_apart_is_named(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    same = [pair("A name.", "A  name.")] * 3
    figures = evaluate_pairs(model=PairModel(model), files={"x.jsonl": [*same, pair("A name.", "Bound is is.")]})
    assert figures["ties"] == 3
    assert "3 of 4 pairs are ties, which do not count as right" in caplog.text
