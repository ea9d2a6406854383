"""Unknown tokens are counted wherever text becomes ids, and too many are refused with the characters that they are."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.core.text.unknown_tokens import KnownText, UnknownTokens, check_known, unknown_tokens_in
from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary, load_split
from mlsm_plugin.hub import from_pretrained
from mlsm_plugin.huggingface.coding import blocks_for_model
from mlsm_plugin.huggingface.text_sequences import write_text_sequences
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from tests.conftest import failing_mlsm, mlsm
from tests.tiny_hf_models import make_model
from tests.tiny_models import TinyData

CJK = "\u4e30\u4e0c\u4ede\u4eaf"  # not in the tests' text
CAPTURE = pytest.CaptureFixture[str]


class Letters:
    """A tokenizer whose pieces are the characters a to e, and the dictionary of these."""

    def encode(self, text: str) -> str:
        return " ".join(text)

    def index(self, piece: str) -> int:
        return 4 + "abcde".index(piece) if piece in "abcde" else self.unk()

    def unk(self) -> int:
        return 3


@given(st.lists(st.text("abcdexy \u4e30", max_size=12), max_size=5))
def test_texts_are_counted_by_character(texts: list[str]) -> None:
    letters = [character for text in texts for character in text if not character.isspace()]
    unknown = Counter(character for character in letters if character not in "abcde")
    found = unknown_tokens_in([f"<mask>{text}<extra_id_3>" for text in texts], Letters(), Letters())
    assert (found.tokens, found.unknown, found.characters) == (len(letters), unknown.total(), unknown)
    assert (found.all_characters, found.texts) == (len(letters), len(texts))
    share_of_tokens, share_of_characters, share_of_texts = found.shares.values()
    assert share_of_tokens == share_of_characters == (unknown.total() / len(letters) if letters else 0)
    assert found.rate == max(share_of_tokens, share_of_texts)


@given(st.integers(0, 50), st.integers(1, 50), st.floats(0, 1))
def test_more_than_the_limit_is_refused(unknown: int, known: int, limit: float) -> None:
    found = UnknownTokens(unknown + known, unknown, Counter("x" * unknown))
    if unknown / (unknown + known) <= limit:
        found.check("t", limit)
        return
    with pytest.raises(
        ValueError, match=rf"of the tokens of t are unknown, above the limit of {limit:.2%}; most .* 'x'"
    ):
        found.check("t", limit)


THAI = "".join(map(chr, range(0xE01, 0xE15)))  # without spaces: one token
ENGLISH = "the name of the class is bound and it is a value of the object"


def a_tenth_thai(lines: int = 200) -> list[str]:
    """Lines of which every tenth is Thai: below 1 % of the tokens, and a tenth of the text."""
    return [THAI * 3 if number % 10 == 0 else ENGLISH for number in range(lines)]


def test_an_unknown_token_counts_by_the_characters_that_are_lost(model: Path, tiny: TinyData, tmp_path: Path,
                                                                 capsys: CAPTURE) -> None:  # fmt: skip
    text, output = tmp_path / "thai.txt", tmp_path / "out"
    text.write_text("\n".join(a_tenth_thai()), encoding="utf-8")
    both = ("--train", text, "--valid", tiny.text, "--output", output)
    for tokenizer in (tiny.tokenizer, f"hf:{model}"):
        error = failing_mlsm(capsys, "binarize", "--tokenizer", tokenizer, *both)
        assert re.search(r" 1\d\.\d\d% of the characters of the train split are unknown, above the limit of 1", error)
        assert not output.exists()
    error = failing_mlsm(
        *(capsys, "binarize", "--format", "sequences", "--tokenizer", f"hf:{model}", "--train", text),
        *("--output", output),
    )
    assert re.search(r" 1\d\.\d\d% of the characters of the text are unknown, above the limit of 1", error)


def test_texts_of_a_file_are_judged_one_by_one(model: Path, tiny: TinyData, tmp_path: Path, capsys: CAPTURE) -> None:
    texts = [
        CJK[0] if number % 20 in (0, 11) else f"{ENGLISH} {ENGLISH} {'a' * (number % 20)}" for number in range(200)
    ]
    files = {name: tmp_path / name for name in ("labelled.tsv", "pairs.jsonl", "words.tsv")}
    files["labelled.tsv"].write_text("".join(f"{number % 2}\t{text}\n" for number, text in enumerate(texts)))
    pairs = ({"sentence_good": text, "sentence_bad": text} for text in texts)
    files["pairs.jsonl"].write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    files["words.tsv"].write_text("0\tclass\n1\tname\n")
    labelled, output = files["labelled.tsv"], tmp_path / "out"
    both, words = ("--train", labelled, "--valid", labelled), ("--verbalizer", files["words.tsv"])
    commands = (
        ("finetune", "--checkpoint", tiny.model, *both, "--output", output),
        ("evaluate", "pairs", "--checkpoint", tiny.model, "--input", files["pairs.jsonl"]),
        ("evaluate", "pairs", "--checkpoint", f"hf:{model}", "--input", files["pairs.jsonl"]),
        ("npm", "classify", "--checkpoint", tiny.model, "--parametric", "--input", labelled, *words, "--template",
         "{} is a <mask>"),
    )  # fmt: skip
    for command in commands:
        error = failing_mlsm(capsys, *command)
        wanted = "10.00% of the texts (each of them more than 10%) of .* are unknown, above the limit of 1.00%"
        assert re.search(wanted.replace("(", r"\(").replace(")", r"\)"), error), error
    assert not output.exists()


def test_a_model_judges_each_text_of_a_list(tiny: TinyData) -> None:
    model = from_pretrained(tiny.model)
    texts = [ENGLISH] * 50
    check_known(texts, model.bpe, model.task.source_dictionary, model.max_unk_rate)
    with pytest.raises(
        ValueError, match=r"of text 51 are unknown, above the limit of 10.00%; .* in Python, its max_unk_rate"
    ):
        check_known([*texts, CJK], model.bpe, model.task.source_dictionary, model.max_unk_rate)


def test_a_dataset_with_unknown_tokens_is_reported(tiny: TinyData, tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                                   capsys: CAPTURE) -> None:  # fmt: skip
    text = tmp_path / "thai.txt"
    text.write_text("\n".join([*a_tenth_thai(20), *["\u0e01 a"] * 100]), encoding="utf-8")
    data = tmp_path / "data"
    both = ("--train", text, "--valid", tiny.text)
    mlsm("binarize", "--tokenizer", tiny.tokenizer, *both, "--output", data, "--max-unk-rate", 1)
    (data / "binarize.json").unlink()  # as where another program has written it
    dictionary = load_dictionary(data)
    for _ in range(2):  # said once
        load_split(str(data / "train"), dictionary)
    load_split(str(data / "valid"), dictionary)
    (message,) = caplog.messages
    assert re.match(rf"1\d\.\d\d% of the tokens of {data}/train are unknown, more than 1.00%: nothing is", message)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_limit_is_a_share(rate: float) -> None:
    with pytest.raises(ValueError, match=r"max_unk_rate must be (from 0 to 1|a finite number), got"):
        KnownText(max_unk_rate=rate)


def test_single_texts_are_refused_or_reported(caplog: pytest.LogCaptureFixture) -> None:
    check_known(["abc"], Letters(), Letters(), 0)
    with pytest.raises(ValueError, match=r"25.00% of the tokens of the text .* 'x' U\+0078 \(1 times\); use a model"):
        check_known(["abcx"], Letters(), Letters(), 0.2)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_known(["abcx"], Letters(), Letters(), 0.25)
    assert caplog.messages == ["25.00% of the tokens of the text are unknown; most frequent unknown characters: "
                               "'x' U+0078 (1 times)"]  # fmt: skip


@pytest.fixture
def model(english_text: tuple[Path, Path], tmp_path: Path) -> Path:
    """A BERT beside two texts: all of ``unknown.txt`` is unknown to it, and one character of ``few.txt``."""
    from transformers import AutoModelForMaskedLM

    (tmp_path / "unknown.txt").write_text(f"{' '.join(CJK)}\n" * 400, encoding="utf-8")
    known = "the name of the class is bound and it is a value of the object\n" * 20
    (tmp_path / "few.txt").write_text(f"{known}{CJK[0]}\n", encoding="utf-8")
    return make_model("bert", english_text[1], tmp_path / "model", kind=AutoModelForMaskedLM)


def test_adapt_and_tokenize_refuse_what_the_model_does_not_know(model: Path, tmp_path: Path, capsys: CAPTURE) -> None:
    text, output = tmp_path / "unknown.txt", tmp_path / "out"
    wanted = (
        "100.00% of the tokens of the text are unknown, above the limit of 1.00%; most frequent unknown characters: "
        f"'{CJK[1]}' U+4E0C (400 times), '{CJK[0]}' U+4E30 (400 times)"
    )
    adapt = ("adapt", model, "--objective", "mlm", "--updates", 2, "--cpu", "--text")
    binarize = ("binarize", "--format", "sequences", "--tokenizer", f"hf:{model}", "--train")
    for command in ((*adapt, text), (*binarize, text)):
        assert wanted in failing_mlsm(capsys, *command, "--output", output)
        assert not output.exists() or not any(output.rglob("*.npy"))
    assert "must be from 0 to 1" in failing_mlsm(capsys, *adapt, text, "--output", output, "--max-unk-rate", 2)
    for command in ((*binarize, text, "--output", output / "a", "--max-unk-rate", 1),
                    (*binarize, tmp_path / "few.txt", "--output", output / "b")):  # fmt: skip
        mlsm(*command)
    with pytest.raises(ValueError, match=r"100.00% of the tokens of .*train are unknown"):  # the limit is lower now
        write_text_sequences([text], model, output / "a" / "train")


def test_few_unknown_tokens_are_reported(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sequences, _ = write_text_sequences([tmp_path / "few.txt"], model, tmp_path / "few")
    assert f"unknown characters: '{CJK[0]}' U+4E30 (1 times); nothing is learned about them" in caplog.text
    blocks, tokenizer = blocks_for_model(sequences, model)
    found = sequences.unknown_tokens(tokenizer)
    content = [token for ids in sequences for token in ids.tolist() if token not in tokenizer.special_ids]
    assert (found.tokens, found.unknown) == (len(content), 1)
    assert len(blocks) == len(sequences)


def test_sequences_that_others_made_are_checked_when_they_are_coded(model: Path, tmp_path: Path) -> None:
    sequences, _ = write_text_sequences([tmp_path / "unknown.txt"], model, tmp_path / "tokens", max_unk_rate=1)
    blocks_for_model(sequences, model)  # they were allowed
    raw = TokenSequences([ids.tolist() for ids in sequences])
    with pytest.raises(
        ValueError, match=r"100.00% of the tokens of the sequences .* `mlsm binarize --format sequences --max-unk-rate`"
    ):
        blocks_for_model(raw, model)


def test_loaded_models_refuse_texts_that_they_do_not_know(tiny: TinyData, caplog: pytest.LogCaptureFixture) -> None:
    model = from_pretrained(tiny.model)
    text = f"the {CJK} is <mask>"
    refused = pytest.raises(ValueError, match=rf"of the characters of the text are unknown, .*'{CJK[0]}'")
    for use in (model.fill_mask, model.latent_properties):
        with refused:
            use(text)
    model.fill_mask("the class is <mask>")
    assert "unknown" not in caplog.text
    model.max_unk_rate = 1
    model.fill_mask(text)
    assert "unknown characters" in caplog.text
