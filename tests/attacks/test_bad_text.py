"""Text that is no text, wherever a command reads some: one line, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlsm_plugin import hub
from mlsm_plugin.huggingface.t5_infilling import T5Infiller
from tests.conftest import failing_mlsm, mlsm
from tests.huggingface.test_t5_infilling import make_t5
from tests.tiny_hf_models import make_model_with_own_tokens
from tests.tiny_models import TinyData, save_untrained_npm

HALF = "\ud83d"  # of an emoji
BYTE = "\udcff"  # as Python reads the byte 0xff of a command line
Capture = pytest.CaptureFixture[str]


def test_half_a_character_in_json_lines_is_one_line(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    pairs, labelled = tmp_path / "pairs.jsonl", tmp_path / "labelled.jsonl"
    good = {"sentence_good": "the name", "sentence_bad": "a value", "not_read": HALF}
    model = make_model_with_own_tokens("bert", tiny.text, tmp_path / "model")
    for bad in ({"sentence_good": f"the {HALF}"}, {"sentence_bad": f"a{HALF}"}, {"UID": HALF}, {"sentence_bad": "a\0"}):
        pairs.write_text("".join(json.dumps(line) + "\n" for line in (good, good | bad)))
        for checkpoint in (tiny.model, f"hf:{model}"):
            line = failing_mlsm(capsys, "evaluate", "pairs", "--checkpoint", checkpoint, "--input", pairs)
            assert "pairs.jsonl, line 2 " in line
    pairs.write_text(json.dumps(good) + "\n")
    mlsm("evaluate", "pairs", "--checkpoint", tiny.model, "--input", pairs)
    text = {"label": 1, "sentence1": "the name", "sentence2": "a value"}
    for bad in ({"sentence1": f"the {HALF}"}, {"label": HALF}):
        labelled.write_text("".join(json.dumps(line) + "\n" for line in (text, {**text, "label": 0}, text | bad)))
        both, output = ("--train", labelled, "--valid", labelled), tmp_path / "out"
        line = failing_mlsm(capsys, "finetune", "--checkpoint", tiny.model, *both, "--output", output)
        assert "labelled.jsonl, line 3 is not Unicode text: at place " in line
        assert not output.exists()


def test_bytes_of_a_command_line_that_are_no_text_are_one_line(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    npm, store, texts = save_untrained_npm(tiny, tmp_path / "npm"), tmp_path / "store", tmp_path / "texts.tsv"
    mlsm("npm", "datastore", tiny.data_bin, "--checkpoint", npm, "--output", store)
    texts.write_text("0\tthe name\n1\ta value\n")
    (tmp_path / "words.tsv").write_text("0\tclass\n1\tname\n")
    make_t5(tiny.text, tmp_path / "t5")
    words = ("--verbalizer", tmp_path / "words.tsv", "--input", texts)
    commands = (
        ("npm", "fill", f"the <mask> {BYTE}", "--checkpoint", npm, "--datastore", store),
        ("npm", "fill", f"the {BYTE}", "--continue", 1, "--checkpoint", npm, "--datastore", store),
        ("npm", "classify", "--checkpoint", npm, "--datastore", store, *words, "--template", f"{{}} <mask>{BYTE}"),
        ("infill", f"the <extra_id_0> {BYTE}", "--checkpoint", f"hf:{tmp_path / 't5'}"),
        ("tokenizer", "--input", tiny.text, "--vocab-size", 300, "--output", tmp_path / "out", "--user-symbols", BYTE),
    )
    for command in commands:
        assert "is not Unicode text: at place" in failing_mlsm(capsys, *command)
    assert not (tmp_path / "out").exists()
    model = hub.from_pretrained(tiny.model)
    for use in (model.fill_mask, T5Infiller(tmp_path / "t5").infill):
        with pytest.raises(ValueError, match="the text is not Unicode text"):
            use(f"the <mask> <extra_id_0> {HALF}")


def test_a_path_need_not_be_text(tiny: TinyData, tmp_path: Path) -> None:
    text = tmp_path / f"text{BYTE}.txt"
    text.write_bytes(tiny.text.read_bytes())
    valid = tmp_path / "valid.txt"  # not the same text: the path in that warning would break pytest-xdist
    valid.write_text("the name of a value\n")
    both = ("--train", text, "--valid", valid)
    data_bin = tmp_path / f"data{BYTE}"
    mlsm("binarize", "--tokenizer", tiny.tokenizer, *both, "--output", data_bin, "--workers", 1)
    assert (data_bin / "train.bin").read_bytes() == (tiny.data_bin / "train.bin").read_bytes()


@pytest.mark.parametrize("content", ["the name".encode("utf-16-le"), b"<html><body>the name</body></html>\n"])
def test_other_kinds_of_files_are_refused_by_every_command(
    tiny: TinyData, tmp_path: Path, capsys: Capture, content: bytes
) -> None:
    bad, output = tmp_path / "bad.jsonl", tmp_path / "out"
    bad.write_bytes(content)
    model = make_model_with_own_tokens("bert", tiny.text, tmp_path / "model")
    both = ("--train", bad, "--valid", bad)
    commands = (
        ("tokenizer", "--input", bad, "--vocab-size", 300, "--output", output),
        ("binarize", "--tokenizer", tiny.tokenizer, *both, "--output", output),
        ("binarize", "--format", "sequences", "--tokenizer", f"hf:{model}", "--train", bad, "--output", output),
        ("adapt", model, "--objective", "mlm", "--updates", 1, "--cpu", "--text", bad, "--output", output),
        ("finetune", "--checkpoint", tiny.model, *both, "--output", output),
        ("evaluate", "pairs", "--checkpoint", tiny.model, "--input", bad),
        ("npm", "classify", "--checkpoint", tiny.model, "--parametric", "--verbalizer", bad, "--input", bad,
         "--template", "{} <mask>"),
        ("convert", tiny.model, output, "--text", bad),
    )  # fmt: skip
    for command in commands:
        line = failing_mlsm(capsys, *command)
        assert "begins as an HTML page" in line or "a NUL byte at column 2" in line
    assert not output.exists() or not any(path.is_file() for path in output.rglob("*"))
