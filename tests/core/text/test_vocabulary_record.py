"""What a checkpoint remembers of its symbols, labels and tokenizer, and that exchanged files are refused everywhere."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from sentencepiece import sentencepiece_model_pb2

from mlsm_plugin import hub
from mlsm_plugin.core.files.model_files import DICTIONARY_NAME, FOLDER_NAME, MODEL_NAME
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.vocabulary_record import (
    TOKENIZER,
    VOCABULARY,
    check_vocabulary_record,
    symbols_record,
    tokenizer_fingerprint,
    vocabulary_record,
)
from mlsm_plugin.fairseq_plugin.compat.checkpoint_averaging import average_checkpoints
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import read_state
from mlsm_plugin.fairseq_plugin.data.token_blocks import folders_of
from tests.conftest import failing_mlsm
from tests.denoising_flags import TINY
from tests.tiny_hf_models import TOKENIZERS, add_own_tokens
from tests.tiny_models import MASKED_LM, TinyData, positions, save_untrained, save_untrained_npm

Capture = pytest.CaptureFixture[str]


def exchange_pieces(folder: Path) -> None:
    """Exchange a SentencePiece model for one with the same pieces and other scores: dict.txt stays as it is."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((folder / MODEL_NAME).read_bytes())
    ordinary = [piece for piece in proto.pieces if piece.type == piece.NORMAL]
    scores = [piece.score for piece in ordinary]
    for piece, score in zip(ordinary, reversed(scores), strict=True):
        piece.score = score
    (folder / MODEL_NAME).write_bytes(proto.SerializeToString())


def forget(checkpoint: Path) -> None:
    """Leave a checkpoint as an earlier version of this package has written it."""
    state = torch.load(checkpoint, weights_only=True)
    torch.save({**state, "task_state": {}}, checkpoint)


def test_symbols_are_those_that_fairseq_reads(tmp_path: Path) -> None:
    for name, content in {
        "dict.txt": "\ufeff\u2581the 5\n\u00e9 1\nmadeupword0000 0\n",
        "input0/dict.txt": "a 3\nb 2\n",
        "label/dict.txt": "<pad> 80 #fairseq:overwrite\nlong one 7\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
        plain = tmp_path / "plain.txt"
        plain.write_text(content.removeprefix("\ufeff"), encoding="utf-8")
        symbols = Dictionary.load(str(plain)).symbols
        key = {"dict.txt": VOCABULARY, "input0/dict.txt": "input_vocabulary", "label/dict.txt": "labels"}[name]
        assert symbols_record(tmp_path)[key] == hashlib.sha256("\n".join(symbols).encode()).hexdigest()
    before = vocabulary_record(tmp_path)
    assert TOKENIZER not in before
    (tmp_path / "label/dict.txt").write_text("<pad> 1 #fairseq:overwrite\nlong one 1\n", encoding="utf-8")
    assert vocabulary_record(tmp_path) == before
    check_vocabulary_record(before, tmp_path, "it", "do")
    check_vocabulary_record({}, tmp_path, "it", "do")  # an older checkpoint
    (tmp_path / "label/dict.txt").write_text("long one 7\n<pad> 80 #fairseq:overwrite\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"^it was trained with another list of labels .*/label/dict.txt .*; do$"):
        check_vocabulary_record(before, tmp_path, "it", "do")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_is_known_by_what_it_reads(kind: str, hf_tokenizers: dict[str, Path], tmp_path: Path) -> None:
    def fingerprint(name: str, change: Callable[[dict[str, Any]], object]) -> str | None:
        folder = shutil.copytree(hf_tokenizers[kind], tmp_path / name / FOLDER_NAME)
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        return tokenizer_fingerprint(tmp_path / name)

    def without_normalizer(content: dict[str, Any]) -> None:
        content["normalizer"] = None if content["normalizer"] else {"type": "Lowercase"}

    def other_segments(content: dict[str, Any]) -> None:
        model = content["model"]
        if model["type"] == "BPE":
            model["merges"].reverse()
        elif model["type"] == "Unigram":
            model["vocab"] = [[piece, -score] for piece, score in model["vocab"]]
        else:
            model["continuing_subword_prefix"] = "@@"

    same = fingerprint("same", lambda content: content.update(truncation=None, version="1.0"))
    HuggingFaceTokenizer(hf_tokenizers[kind]).save(tmp_path / "saved" / FOLDER_NAME)
    assert same is not None
    assert same == tokenizer_fingerprint(tmp_path / "saved")
    add_own_tokens(hf_tokenizers[kind], tmp_path / "own" / FOLDER_NAME)
    config = shutil.copytree(tmp_path / "saved", tmp_path / "lower") / FOLDER_NAME / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "do_lower_case": True, "strip_accents": None}))
    others = {
        fingerprint("normalized", without_normalizer),
        fingerprint("segments", other_segments),
        tokenizer_fingerprint(tmp_path / "own"),
        tokenizer_fingerprint(tmp_path / "lower"),
    }
    assert len({same, *others}) == 5
    (tmp_path / "same" / FOLDER_NAME / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer: "):
        tokenizer_fingerprint(tmp_path / "same")


OTHER_READINGS: dict[str, dict[str, Any]] = {
    "case": {"tokenizer_class": "BertTokenizerFast", "do_lower_case": False},
    "characters": {"tokenizer_class": "BertTokenizerFast", "tokenize_chinese_chars": False},
}


@pytest.mark.parametrize("name", OTHER_READINGS)
def test_options_and_class_that_change_the_ids_are_another_tokenizer(
    name: str, hf_tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(hf_tokenizers["word_piece"], tmp_path / FOLDER_NAME)
    config = folder / "tokenizer_config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(content | {"tokenizer_class": "BertTokenizerFast"}))
    before = vocabulary_record(tmp_path)
    probe = "The Man \u4f60\u597dx"
    ids = HuggingFaceTokenizer(folder).ids_of(probe)
    check_vocabulary_record(before, tmp_path, "it", "do")
    config.write_text(json.dumps(content | OTHER_READINGS[name]))
    assert HuggingFaceTokenizer(folder).ids_of(probe) != ids
    with pytest.raises(ValueError, match="it was trained with another tokenizer"):
        check_vocabulary_record(before, tmp_path, "it", "do", only=TOKENIZER)


def test_an_exchanged_tokenizer_is_refused_by_every_command(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    pairs, texts, words = tmp_path / "pairs.jsonl", tmp_path / "texts.tsv", tmp_path / "words.tsv"
    pairs.write_text(json.dumps({"sentence_good": "the name", "sentence_bad": "a value"}) + "\n")
    texts.write_text("0\tthe name\n1\ta value\n")
    words.write_text("0\tclass\n1\tname\n")
    save_untrained(tiny.data_bin, tmp_path / "lm", *positions(32), **MASKED_LM)
    save_untrained_npm(tiny, tmp_path / "npm")
    save_untrained(tiny.data_bin, tmp_path / "t5", *TINY, task="span_denoising", criterion="cross_entropy")
    data = tiny.copy(tmp_path / "data")
    learn = ("dictionary", tiny.data_bin, "--layer", 1, "--atoms", 8, "--tokens", 500, "--output", tmp_path / "out")
    commands = {
        "lm": [
            ("evaluate", "pairs", "--input", pairs, "--checkpoint"),
            ("npm", "classify", "--parametric", "--verbalizer", words, "--input", texts, "--template", "{} <mask>",
             "--checkpoint"),
            (*learn, "--auxiliary"),
        ],
        "npm": [("npm", "datastore", tiny.data_bin, "--output", tmp_path / "out", "--checkpoint")],
        "t5": [("infill", "the <extra_id_0> name", "--checkpoint")],
    }  # fmt: skip
    for name, own in commands.items():
        exchange_pieces(tmp_path / name)
        for command in own:
            line = failing_mlsm(capsys, *command, tmp_path / name)
            assert f"was trained with another tokenizer (SHA-256 {vocabulary_record(data)[TOKENIZER][:12]})" in line
            assert f"than that of {tmp_path / name} " in line
    exchange_pieces(data)
    trained = vocabulary_record(tiny.data_bin)[TOKENIZER][:12]
    for command in (
        (*learn[:1], data, *learn[2:], "--auxiliary"),
        ("npm", "datastore", data, "--output", tmp_path / "out", "--checkpoint"),
    ):
        line = failing_mlsm(capsys, *command, tiny.model)
        assert f"another tokenizer (SHA-256 {trained}) than that of {data} " in line
    assert not (tmp_path / "out").exists()


def test_checkpoints_of_before_stay_as_they_are(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    checkpoint = save_untrained(tiny.data_bin, tmp_path / "run", *positions(32), **MASKED_LM)
    assert read_state(checkpoint)["task_state"] == vocabulary_record(tiny.data_bin)
    forget(checkpoint)
    exchange_pieces(checkpoint.parent)
    hub.from_pretrained(checkpoint)
    learn = ("--layer", 1, "--atoms", 8, "--tokens", 500, "--output", tmp_path / "out")
    line = failing_mlsm(capsys, "dictionary", tiny.data_bin, "--auxiliary", checkpoint, *learn)
    assert f"{tiny.data_bin} was binarized with another tokenizer than the one beside {checkpoint}: the same" in line


@pytest.mark.parametrize("name", ["label", "input0"])
def test_dictionaries_of_a_classifier_are_remembered(tiny: TinyData, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    for own in ("label", "input0"):
        (folder / own).mkdir(parents=True)
        (folder / own / DICTIONARY_NAME).write_text("bad 5\ngood 7\n")
    checkpoint = save_untrained(tiny.data_bin, folder, *positions(32), **MASKED_LM)
    hub.from_pretrained(checkpoint)
    (folder / name / DICTIONARY_NAME).write_text("good 7\nbad 5\n")
    what = "list of labels" if name == "label" else "vocabulary"
    with pytest.raises(
        ValueError, match=rf"last.pt was trained with another {what} .* {folder}/{name}/dict.txt .* put"
    ):
        hub.from_pretrained(checkpoint)


def test_folders_that_take_turns_have_one_tokenizer(tiny: TinyData, tmp_path: Path) -> None:
    second = tiny.copy(tmp_path / "second")
    both = f"{tiny.data_bin}:{second}"
    assert len(folders_of(both)) == 2
    exchange_pieces(second)
    for name in (None, DICTIONARY_NAME):
        if name is not None:
            (second / name).unlink()
        with pytest.raises(ValueError, match=f"^{second} was binarized with another tokenizer than {tiny.data_bin}: "):
            folders_of(both)
    (second / MODEL_NAME).unlink()
    folders_of(both)  # binarize.json of both says the same
    summary = json.loads((second / "binarize.json").read_text())
    (second / "binarize.json").write_text(json.dumps({**summary, "tokenizer_sha256": "0" * 64}))
    with pytest.raises(ValueError, match="was binarized with another tokenizer than"):
        folders_of(both)
    (second / "binarize.json").unlink()
    folders_of(both)  # as fairseq's own shards, of which nothing else is known


def test_checkpoints_of_two_tokenizers_have_no_mean(tiny: TinyData, tmp_path: Path) -> None:
    first, second = (
        save_untrained(tiny.data_bin, tmp_path / name, *positions(32), **MASKED_LM) for name in ("first", "second")
    )
    average_checkpoints([first, second], tmp_path / "mean.pt")
    shutil.copytree(tiny.data_bin, tmp_path / "data")
    exchange_pieces(tmp_path / "data")
    third = save_untrained(tmp_path / "data", tmp_path / "third", *positions(32), **MASKED_LM)
    with pytest.raises(ValueError, match="cannot be averaged: their tokenizers differ"):
        average_checkpoints([first, third], tmp_path / "other.pt")
    with pytest.raises(ValueError, match=f"trained with another tokenizer .* {tmp_path / 'third'} .* another folder"):
        average_checkpoints([first, second], tmp_path / "third" / "mean.pt")
