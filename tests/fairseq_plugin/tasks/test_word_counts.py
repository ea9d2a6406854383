"""An epoch has the words of the text, however it is cut into blocks and batches; the limit holds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.babylm.training import check_words
from mlsm_plugin.core.text.words import write_words
from mlsm_plugin.fairseq_plugin.tasks import word_counts
from mlsm_plugin.fairseq_plugin.tasks.base_masked_lm import PlainMaskedLMTask
from mlsm_plugin.fairseq_plugin.tasks.word_counts import WordCount, begins_word, write_word_plan
from mlsm_plugin.fairseq_plugin.text.binarize import binarize
from mlsm_plugin.fairseq_plugin.text.sentencepiece_training import TokenizerSettings, train_tokenizer
from tests.babylm.odd_text import write_odd_text
from tests.core.text.test_words import counted_by_wc
from tests.tiny_run import batches, training_config


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A dataset, and the words of its text, which ``wc`` has counted."""
    root = tmp_path_factory.mktemp("odd")
    files = write_odd_text(root / "text", lines=40)
    texts = [root / file.name for file in files]
    for file, text in zip(files, texts, strict=True):
        write_words(file, text)
    train_tokenizer(texts, root / "tokenizer", TokenizerSettings(vocab_size=100, keep_characters=True))
    binarize(tokenizer=root / "tokenizer", train=texts, valid=texts[:1], output=root / "data-bin")
    check_words(texts, root / "data-bin")
    return root / "data-bin", counted_by_wc(*files)


def counting(odd: tuple[Path, int], tmp_path: Path, *flags: object, limit: int) -> tuple[Any, Any]:
    """A task that counts words, and its configuration."""
    write_word_plan(tmp_path / "words.json", limit, {"half": limit // 2, "all": limit})
    mlm = {"task": "plain_masked_lm", "criterion": "masked_lm"}
    cfg = training_config(odd[0], "--count-words", tmp_path / "words.json", "--update-freq", 1, *flags, **mlm)
    task = PlainMaskedLMTask.setup_task(cfg.task)
    task.begin_run(SimpleNamespace(get_num_updates=lambda: 0), {})
    return task, cfg


def count_of(task: Any, batch: Any) -> None:
    inputs, targets = batch["net_input"]["src_tokens"], batch["target"]
    task.word_count.add(task._unmasked(inputs, targets))


@pytest.mark.slow
@settings(max_examples=8)
@given(
    length=st.integers(2, 40),
    mode=st.sampled_from(["none", "complete", "complete_doc", "eos"]),
    prob=st.sampled_from([0.15, 0.5]),
    per_update=st.integers(1, 5),
    seed=st.integers(1, 3),
)
def test_an_epoch_has_the_words_of_the_text(
    odd: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory, length: int, mode: str, prob: float,
    per_update: int, seed: int,
) -> None:  # fmt: skip
    flags = ("--tokens-per-sample", length, "--sample-break-mode", mode, "--mask-prob", prob, "--seed", seed)
    task, cfg = counting(odd, tmp_path_factory.getbasetemp(), *flags, limit=odd[1])
    found, seen = batches(cfg, task=task), 0
    for first in range(0, len(found), per_update):
        for batch in found[first : first + per_update]:
            count_of(task, batch)
        task.word_count.end_update(seen, torch.device("cpu"))
        seen += task.word_count.take()
    assert seen == odd[1]


def test_an_update_beyond_the_limit_is_refused_and_models_are_kept_when_it_is_reached(
    odd: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, cfg = counting(odd, tmp_path, "--tokens-per-sample", 30, limit=odd[1] - 1)
    saved: list[tuple[str, int]] = []
    monkeypatch.setattr(word_counts, "save_weights", lambda trainer, path: saved.append((path.name, seen)))
    seen, trainer = 0, SimpleNamespace(cfg=SimpleNamespace(checkpoint=SimpleNamespace(save_dir=str(tmp_path))))
    *within, last = batches(cfg, task=task)
    for batch in within:
        count_of(task, batch)
        task.word_count.end_update(seen, torch.device("cpu"))
        before, seen = seen, seen + task.word_count.take()
        task.word_count.save_reached(trainer, before, seen)
    count_of(task, last)
    with pytest.raises(ValueError, match=f"words that the run has seen to {odd[1]:,}, and its limit is {odd[1] - 1:,}"):
        task.word_count.end_update(seen, torch.device("cpu"))
    assert [name for name, _ in saved] == ["half.pt"]
    assert saved[0][1] >= odd[1] // 2 - 1


@pytest.mark.parametrize("first", [[], [3]])
def test_the_first_updates_of_a_process_are_held_to_the_limit(tmp_path: Path, first: list[int]) -> None:
    write_word_plan(tmp_path / "words.json", 100, {})
    count = WordCount(tmp_path / "words.json", begins_word(["<s>", "\u2581a", "b"], [0]))
    seen = 70
    for words in first:  # the last, short update of an epoch, which says nothing about the size of others
        count.add(torch.ones(1, words, dtype=torch.int64))
        count.end_update(seen, torch.device("cpu"))
        seen += count.take()
    count.add(torch.ones(1, 40, dtype=torch.int64))
    with pytest.raises(ValueError, match=f"would bring the words that the run has seen to {seen + 40}, and its limit"):
        count.end_update(seen, torch.device("cpu"))


def test_a_run_that_did_not_count_is_not_resumed(odd: tuple[Path, int], tmp_path: Path) -> None:
    task, _ = counting(odd, tmp_path, limit=10)
    later = SimpleNamespace(get_num_updates=lambda: 4)
    with pytest.raises(ValueError, match="holds a run that did not count its words; pass another --save-dir"):
        task.begin_run(later, {"vocabulary": "x"})
    task.begin_run(later, {"words": 7})
    assert task.state_dict()["words"] == 7


def test_a_damaged_plan_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "words.json").write_text('{"limit": 0, "keep": {}}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"words.json is not valid: limit: 0 is not a whole number"):
        WordCount(tmp_path / "words.json", begins_word(["<s>", "\u2581a", "b"], [0]))


def test_a_line_whose_words_the_tokenizer_changes_is_named(odd: tuple[Path, int], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two\n\na\u00b4 b\n", encoding="utf-8")  # NFKC makes a space of the accent
    train_tokenizer([text], tmp_path / "tokenizer", TokenizerSettings(vocab_size=13))
    binarize(tokenizer=tmp_path / "tokenizer", train=[text], valid=[text], output=tmp_path / "data-bin")
    with pytest.raises(ValueError, match=r"text.txt:3: 2 words became 3 tokens that begin a word; the tokenizer"):
        check_words([text], tmp_path / "data-bin")
