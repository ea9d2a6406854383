"""Text whose tokens are easily read in another way, and vocabularies that are not those of their tokenizer."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from fairseq.tasks import FairseqTask
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mlsm_plugin import hub
from mlsm_plugin.core.files.model_files import MODEL_NAME
from mlsm_plugin.hub import hf_export, stock_models
from mlsm_plugin.hub.comparison import compare
from tests.conftest import failing_mlsm, made_once, mlsm
from tests.hub.modern_models import NPM, save_modern
from tests.tiny_hf_models import make_tokenizer
from tests.tiny_models import MASKED_LM, TinyData, positions, save_untrained

Capture = pytest.CaptureFixture[str]
SYMBOLS = ["<s>", "</s>", "<pad>", "<unk>", "<mask>", "<mask_s>", "<mask_e>", "[MASK]", "[CLS]", "[UNK]"]
ODD = [
    "\x85",
    "\u2028",
    "\xa0",
    "\t",
    " ",
    "  ",
    "<",
    ">",
    "＜s＞",
    "☃",
    "é",
    "\u200b",
    "\u2581",
    "s>",
    "madeupword0000",
]
TEXTS = st.lists(st.sampled_from([*SYMBOLS, *ODD, "a", "the", "name "]), min_size=1, max_size=8).map("".join)


def test_the_characters_that_an_export_leaves_out_are_those_that_fairseq_does() -> None:
    characters = [chr(number) for number in range(sys.maxunicode + 1)]
    pattern = re.compile(hf_export.WHITESPACE)
    assert [c for c in characters if pattern.fullmatch(c)] == [c for c in characters if c.isspace() and c != " "]


SLOW = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=["sentencepiece", "unigram", *(pytest.param(kind, marks=SLOW) for kind in ("word_piece", "byte_level"))],
)
def compared(
    request: pytest.FixtureRequest, tiny: TinyData, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    """Compares a model of this kind of tokenizer with its export on a text."""

    def make(root: Path) -> None:
        data = tiny.data_bin
        if request.param != "sentencepiece":
            make_tokenizer(request.param, tiny.text, root / "tokenizer")
            texts = ("--train", tiny.text, "--valid", tiny.text, "--output", root / "data", "--workers", 1)
            mlsm("binarize", "--tokenizer", f"hf:{root}/tokenizer", *texts)
            data = root / "data"
        save_modern(data, root / "run", **NPM)

    root = made_once(tmp_path_factory, f"compared-{request.param}", make)
    ours = hub.from_pretrained(root / "run")
    hf_export.export(ours, root / "out", ["The name is bound."])
    ids, tokenizer = hf_export.exported_ids(ours), AutoTokenizer.from_pretrained(root / "out")
    model = stock_models.stock_model(ours, ids)
    return lambda text: compare(ours, ids, tokenizer, model, [text], word="exported")


@settings(max_examples=60)
@given(text=TEXTS)
def test_every_text_is_compared_as_the_text_that_it_is(text: str, compared: Callable[[str], Any]) -> None:
    found = compared(text)
    assert found.lines + found.reordered == 1
    assert found.with_symbols <= any(symbol in text for symbol in SYMBOLS)


def test_lines_that_name_special_tokens_do_not_stop_an_export(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    text = tmp_path / "text.txt"
    lines = [*(f"a {symbol} b" for symbol in SYMBOLS[:5]), "a\x85b", "a ＜mask＞ b", "The name is bound."]
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    mlsm("convert", tiny.model, tmp_path / "out", "--text", text)
    printed = capsys.readouterr().out
    assert "ids are the same on 8 lines" in printed
    assert "5 of the lines name a special token and were compared as plain text" in printed
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a <mask> b")["input_ids"].count(tokenizer.mask_token_id) == 1
    assert tokenizer.mask_token_id not in tokenizer("a <mask> b", split_special_tokens=True)["input_ids"]


def preprocessed(tiny: TinyData, folder: Path, change: Callable[[list[str]], list[str]]) -> Path:
    """A model with the vocabulary that ``fairseq-preprocess`` makes of changed pieces without ``--srcdict``."""
    (folder / "data").mkdir(parents=True)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tiny.tokenizer / MODEL_NAME))
    text = tiny.text.read_text(encoding="utf-8").splitlines()
    lines = [" ".join(processor.encode(line, out_type=str)) for line in text]
    (folder / "pieces.txt").write_text("\n".join(change(lines)) + "\n", encoding="utf-8")
    dictionary = FairseqTask.build_dictionary([str(folder / "pieces.txt")], padding_factor=8)
    dictionary.save(str(folder / "data" / "dict.txt"))
    (folder / "data" / MODEL_NAME).write_bytes((tiny.tokenizer / MODEL_NAME).read_bytes())
    return save_untrained(folder / "data", folder / "run", *positions(32), **MASKED_LM)


def test_a_vocabulary_of_fairseq_preprocess_is_named(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    lacking = preprocessed(tiny, tmp_path / "lacking", lambda lines: [line.replace("▁the ", "") for line in lines])
    line = failing_mlsm(capsys, "convert", lacking, tmp_path / "out", "--text", tiny.text)
    assert "the exported tokenizer gives other ids for" in line
    assert re.search(
        r"dict\.txt lacks \d+ \('.*', \.\.\.\) of the tokenizer's pieces and has (\d+ .*|none) that are no pieces", line
    )
    assert "as that of fairseq-preprocess without --srcdict; train on a dataset of `mlsm binarize`, or" in line
    assert not (tmp_path / "out").exists()
    short = tmp_path / "short.txt"
    short.write_text("a b c\n", encoding="utf-8")
    mlsm("convert", lacking, tmp_path / "warned", "--text", short)
    assert "mlsm: warning: other text can get other ids, since the model's dict.txt lacks" in capsys.readouterr().err


def test_another_order_and_fillers_change_nothing(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    own = [line.rpartition(" ")[0] for line in (tiny.data_bin / "dict.txt").read_text(encoding="utf-8").splitlines()]

    def only_own(lines: list[str]) -> list[str]:
        return [" ".join(own), *(" ".join(piece for piece in line.split() if piece in own) for line in lines)]

    checkpoint = preprocessed(tiny, tmp_path, only_own)
    symbols = (tmp_path / "data" / "dict.txt").read_text(encoding="utf-8")
    assert "\nmadeupword0000 0\n" in symbols
    assert [line.rpartition(" ")[0] for line in symbols.splitlines()][: len(own)] != own
    mlsm("convert", checkpoint, tmp_path / "out", "--text", tiny.text)
    printed = capsys.readouterr()
    assert "ids are the same on" in printed.out
    assert "warning" not in printed.err


@SLOW
def test_the_vocabulary_of_another_hugging_face_tokenizer_is_named(
    tiny: TinyData, tmp_path: Path, capsys: Capture
) -> None:
    make_tokenizer("word_piece", tiny.text, tmp_path / "tokenizer")
    texts = ("--train", tiny.text, "--valid", tiny.text, "--output", tmp_path / "data", "--workers", 1)
    mlsm("binarize", "--tokenizer", f"hf:{tmp_path}/tokenizer", *texts)
    lines = (tmp_path / "data" / "dict.txt").read_text(encoding="utf-8").splitlines()
    (tmp_path / "data" / "dict.txt").write_text("\n".join([*lines[1:], lines[0]]) + "\n", encoding="utf-8")
    checkpoint = save_modern(tmp_path / "data", tmp_path / "run")
    line = failing_mlsm(capsys, "convert", checkpoint, tmp_path / "out", "--text", tiny.text)
    assert "the model's dict.txt was not made from its Hugging Face tokenizer; train on a dataset of" in line
    assert not (tmp_path / "out").exists()
