"""How often a masked word is retrieved, or predicted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlsm_plugin import hub
from mlsm_plugin.fairseq_plugin.text.masked_text import MASK
from tests.conftest import REPOSITORY, mlsm
from tests.documented import bash_blocks, run_in
from tests.script_module import load_script, runner_of
from tests.tiny_models import TinyData, save_untrained_npm

retrieval_accuracy = load_script("research/retrieval_accuracy.py")
WORDS = st.sampled_from(["the", "name", "Names", "is", "of", "a", "bound.", "3", ",", "zyzzyva", "the-name", MASK])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    return runner_of(retrieval_accuracy, monkeypatch)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.lists(WORDS, max_size=8).map(" ".join), max_size=6), count=st.integers(1, 4))
def test_only_single_tokens_are_masked_and_one_in_a_line(tiny: TinyData, lines: list[str], count: int) -> None:
    model = _MODELS.setdefault(tiny.model, hub.from_pretrained(tiny.model))
    dictionary = model.task.source_dictionary

    def is_single(word: str) -> bool:
        return word.isalpha() and dictionary.index(model.bpe.encode(word)) != dictionary.unk()

    usable = [line for line in lines if len(line.split()) >= 5 and any(map(is_single, line.split()))]
    usable = [line for line in usable if MASK not in line]  # one mask in a text
    if not usable:
        with pytest.raises(ValueError, match="no line has 5 words"):
            retrieval_accuracy.mask_words(lines, model, count=count, seed=1)
        return
    masked = retrieval_accuracy.mask_words(lines, model, count=count, seed=1)
    assert len(masked) == min(count, len(usable))
    left = list(usable)
    for one in masked:
        assert is_single(one.word)
        left.remove(one.filled(one.word))


_MODELS: dict[Path, object] = {}


def test_shares_are_counted() -> None:
    word = retrieval_accuracy.MaskedWord
    masked = [word("a", "b", "c", True), word("", "b", "d", True), word("e", "f", "", False), word("g", "h", "i", True)]
    given_answers = {
        f"a {MASK} c": ["a b c", "a x c"],
        f"{MASK} d": ["x d", "b d"],
        f"e {MASK}": ["e f"],
        f"g {MASK} i": [],
    }
    found = retrieval_accuracy.accuracy_of("model", masked, given_answers.__getitem__)
    assert (found.best, found.top, found.rarer) == (0.5, 0.75, pytest.approx(1 / 3))


@pytest.fixture
def runs(tiny: TinyData, tmp_path: Path) -> tuple[Path, Path]:
    """A model of NPM with random weights, and its datastore."""
    npm, store = save_untrained_npm(tiny, tmp_path / "npm"), tmp_path / "phrases"
    words = ("--checkpoint", npm, "--output", store, "--tokens-per-sample", 24, "--device", "cpu")
    mlsm("npm", "datastore", tiny.data_bin, *words)
    return npm, store


def test_the_table_and_the_file_have_all_models(
    tiny: TinyData, runs: tuple[Path, Path], run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    more = ("--predict", tiny.model, "--count", 20, "--output", tmp_path / "figures.json")
    assert run(tiny.text, "--retrieve", *runs, *more) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["words"] == 20
    assert re.fullmatch(r"20 words, \d+ of them rarer; always the most frequent one: \d+\.\d %", last)
    models = written["models"]
    assert [one["model"] for one in models] == [f"{runs[0]}, retrieved", f"{tiny.model}, predicted"]
    for one, line in zip(models, lines[-2:], strict=True):
        shares = " | ".join(f"{100 * one[name]:.1f}" for name in ("best", "top", "rarer"))
        assert line == f"| {one['model']} | {shares} |"
    # with the phrases of its text as a corpus, a model that only compares contexts finds some of its words
    assert 0 < models[0]["top"] <= 1


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_the_documented_commands_run(tiny: TinyData, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "research" / "comparison.md").read_text(encoding="utf-8")
    (block,) = (block for block in bash_blocks(page) if "retrieval_accuracy.py" in block)
    for folder, source in (("mlm-3", tiny.model.parent), ("npm-3", save_untrained_npm(tiny, tmp_path / "npm").parent)):
        (tmp_path / "comparison" / "runs").mkdir(parents=True, exist_ok=True)
        (tmp_path / "comparison" / "runs" / folder).symlink_to(source)
    (tmp_path / "comparison" / "tokenizer").symlink_to(tiny.tokenizer)
    (tmp_path / "research").symlink_to(REPOSITORY / "research")
    documents = tiny.text.read_text(encoding="utf-8").replace("\n", "\n\n")
    for name in ("train.txt", "valid.txt", "held_out.txt"):
        (tmp_path / name).write_text(documents, encoding="utf-8")
    block = block.replace("--tokens-per-sample 128", "--tokens-per-sample 24")  # the tiny models take no more
    assert "npm-3/checkpoint_last.pt, retrieved" in run_in(tmp_path, block)


def test_what_cannot_be_measured_is_one_line(tiny: TinyData, runs: tuple[Path, Path], run: Callable[..., int]) -> None:
    for words in (
        (tiny.text, "--predict", "absent.pt"),
        ("absent.txt", "--predict", tiny.model),
        (tiny.text, "--retrieve", runs[0], "absent"),
        (tiny.text, "--retrieve", tiny.model, runs[1]),  # a datastore of another model
        (tiny.text, "--predict", runs[0]),  # its masked-LM head was not trained
    ):
        with pytest.raises(SystemExit, match=r"^error: "):
            run(*words)
    for words in ((), ("--predict", tiny.model, "--count", 0), ("--predict", tiny.model, "--max-length", 0)):
        with pytest.raises(SystemExit, match="2"):
            run(tiny.text, *words)
