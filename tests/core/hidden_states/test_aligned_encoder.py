"""Hidden states for datasets of another vocabulary, against the library's model run by hand."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from mlsm_plugin.core.files.sentence_modules import write_modules
from mlsm_plugin.core.hidden_states.aligned_encoder import AlignedEncoder
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder, HuggingFaceSource
from mlsm_plugin.core.hidden_states.sources import alignment_of, open_encoder
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.huggingface.aligned_sequences import write_aligned
from mlsm_plugin.huggingface.text_sequences import write_text_sequences
from tests.core.text.datasets_of_tokenizers import hf_dataset, sentencepiece_dataset, write_symbols
from tests.tiny_hf_models import make_model

LINES = ["The value of an expression is an object that has a name.", "Names, and values!", "It isn't  é or 文."]
BEGIN, PAD, END = range(3)
TEACHERS = ["bert", "roberta", "modernbert"]


@pytest.fixture(scope="module")
def models(english_text: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(name, english_text[0], root / name) for name in TEACHERS}


@pytest.fixture(scope="module")
def datasets(
    models: dict[str, Path], english_text: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The dataset of each model's tokenizer, and one of SentencePiece."""
    root = tmp_path_factory.mktemp("datasets")
    for name, model in models.items():
        hf_dataset(model, root / name)
    sentencepiece_dataset(english_text[0], root / "sentencepiece")
    return {name: root / name for name in (*models, "sentencepiece")}


def rows_of(tokenizer: HuggingFaceTokenizer, lines: list[str]) -> torch.Tensor:
    """Each line between BOS and EOS, right-padded ``(B, T)``."""
    rows = [[BEGIN, *tokenizer.fairseq_ids[tokenizer.ids_of(line)].tolist(), END] for line in lines]
    width = max(map(len, rows))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


def library_states(model: Path, ids: list[int], layer: int) -> torch.Tensor:
    """Hidden states of one sequence, ``(T, dim)``."""
    with torch.no_grad():
        output = AutoModel.from_pretrained(model).eval()(torch.tensor([ids]), output_hidden_states=True)
    return output.hidden_states[layer][0]


@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize("data", ["bert", "roberta", "sentencepiece"])
def test_each_id_has_the_state_of_its_token(
    teacher: str, data: str, models: dict[str, Path], datasets: dict[str, Path]
) -> None:
    name = f"hf:{models[teacher]}"
    encoder = AlignedEncoder(name, datasets[data], layer=2, device="cpu")
    ids = torch.randint(4, 500, (3, 12), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = BEGIN
    ids[:2, -1] = END
    ids[2, 9:] = PAD
    found = encoder.hidden_states(ids)
    aligned = encoder._aligner.read(ids.numpy())
    expected = torch.cat([library_states(models[teacher], row.tolist(), 2) for row in aligned.ids])
    assert (aligned.places[:, :9] >= 0).mean() > 0.5
    for state, place in zip(found.flatten(0, 1), aligned.places.ravel(), strict=True):
        torch.testing.assert_close(state, expected[place] if place >= 0 else torch.zeros(32), rtol=0, atol=1e-5)
    chosen = ids > 4
    assert torch.equal(encoder.hidden_states_of(ids, chosen), found[chosen])
    assert torch.equal(encoder.hidden_states(torch.full((2, 3), PAD)), torch.zeros(2, 3, 32))


@pytest.mark.parametrize("name", TEACHERS)
def test_the_own_vocabulary_has_the_same_states(name: str, models: dict[str, Path], datasets: dict[str, Path]) -> None:
    own = open_encoder(f"hf:{models[name]}", datasets[name], layer=3, device="cpu")
    assert type(own) is HuggingFaceSource
    assert alignment_of(f"hf:{models[name]}", datasets[name]) is None
    aligned = AlignedEncoder(f"hf:{models[name]}", datasets[name], layer=3, device="cpu")
    rows = rows_of(own.tokenizer, LINES[:2])  # the bytes of one character would all take the state of the last
    known = rows.ne(PAD)
    assert known.sum() > 20
    torch.testing.assert_close(aligned.hidden_states(rows)[known], own.hidden_states(rows)[known], rtol=0, atol=1e-5)
    two_lines = torch.cat([rows[:1, :-1].clone(), rows[1:2, 1:]], dim=1)[:, : own.max_tokens]
    two_lines = two_lines[:, (two_lines != PAD)[0]]
    torch.testing.assert_close(aligned.hidden_states(two_lines), own.hidden_states(two_lines), rtol=0, atol=1e-5)


@pytest.mark.parametrize("teacher", ["bert", "modernbert"])
def test_long_rows_are_read_in_parts(teacher: str, models: dict[str, Path], datasets: dict[str, Path]) -> None:
    encoder = AlignedEncoder(f"hf:{models[teacher]}", datasets["roberta"], layer=3, device="cpu")
    tokenizer = HuggingFaceTokenizer(datasets["roberta"] / "hf_tokenizer")
    rows = rows_of(tokenizer, [" ".join(["A zebra's xylophone, quite quick."] * 20), LINES[1]])
    aligned = encoder._aligner.read(rows.numpy())
    whole = aligned.ids[0].tolist()
    most = encoder.max_tokens
    assert len(whole) > 2 * most
    parts = [whole[:most], *(whole[start : start + most - 1] for start in range(most, len(whole), most - 1))]
    states = [library_states(models[teacher], parts[0], 3)]
    begin = encoder.tokenizer.begin_id
    states += [library_states(models[teacher], [begin, *part], 3)[1:] for part in parts[1:]]
    states.append(library_states(models[teacher], aligned.ids[1].tolist(), 3))
    expected = torch.cat(states)
    places = torch.from_numpy(aligned.places)
    found = encoder.hidden_states(rows)
    torch.testing.assert_close(found[places >= 0], expected[places[places >= 0]], rtol=0, atol=1e-5)


def test_states_are_those_of_the_trainers_way(
    models: dict[str, Path], datasets: dict[str, Path], tmp_path: Path
) -> None:
    tokenizer = HuggingFaceTokenizer(models["roberta"])
    library = HuggingFaceEncoder(models["bert"], layer=2, device="cpu")
    encoder = open_encoder(f"hf:{models['bert']}", datasets["roberta"], layer=2, device="cpu")
    assert type(encoder) is AlignedEncoder
    compared = 0
    for number, line in enumerate(LINES):
        text = tmp_path / f"{number}.txt"
        text.write_text(line + "\n", encoding="utf-8")
        options = {"max_length": 64, "max_unk_rate": 1.0}
        with redirect_stdout(io.StringIO()):
            sequences, _ = write_text_sequences([text], tokenizer, tmp_path / f"{number}.tokens", **options)
        aligned = write_aligned(
            [text],
            sequences,
            tokenizer,
            library.tokenizer,
            tmp_path / f"{number}.other",
            tmp_path / f"{number}.places",
            **options,
        )
        positions = aligned.positions_of(0)
        states = library.hidden_states(torch.from_numpy(aligned.sequences[0].astype(np.int64))[None])[0]
        found = encoder.hidden_states(rows_of(tokenizer, [line]))[0]
        tokens = tokenizer.tokens_by_id()
        for place, (token, position) in enumerate(zip(sequences[0], positions, strict=True)):
            if position >= 0:
                torch.testing.assert_close(found[place], states[position], rtol=0, atol=1e-5)
                compared += 1
            elif tokens[token] not in ("<s>", "</s>", "Ġ"):
                assert not found[place].any()
    assert compared > 25


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("teacher", TEACHERS)
def test_the_vector_of_a_row_is_that_of_its_text(
    teacher: str, pooling: str, models: dict[str, Path], datasets: dict[str, Path], tmp_path: Path
) -> None:
    """The library's of the line itself, whichever tokenizer made the ids."""
    folder = shutil.copytree(models[teacher], tmp_path / "teacher")
    write_modules(folder, width=32, max_length=60)
    mode = {"pooling_mode_mean_tokens": pooling == "mean", "pooling_mode_cls_token": pooling == "cls"}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(mode), encoding="utf-8")
    library = AutoModel.from_pretrained(folder).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for data in ("roberta", teacher):
        rows = rows_of(HuggingFaceTokenizer(datasets[data] / "hf_tokenizer"), LINES[:2])
        rows = torch.cat([rows, torch.full_like(rows[:1], PAD)])
        encoder = open_encoder(f"hf:{folder}", datasets[data], layer=3, device="cpu")
        vectors = encoder.text_vectors(rows, rows.ne(PAD))
        for line, vector in zip(LINES[:2], vectors, strict=False):
            with torch.no_grad():
                hidden = library(**tokenizer(line, return_tensors="pt")).last_hidden_state[0]
            expected = hidden[0] if pooling == "cls" else hidden.mean(dim=0)
            torch.testing.assert_close(vector.double(), expected, rtol=0, atol=1e-5)
        assert not vectors[2].any()


def test_a_text_that_is_too_long_is_cut(
    models: dict[str, Path], datasets: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    encoder = AlignedEncoder(f"hf:{models['bert']}", datasets["roberta"], layer=3, device="cpu")
    rows = rows_of(HuggingFaceTokenizer(datasets["roberta"] / "hf_tokenizer"), ["A zebra's quick." * 40])
    ids = encoder._aligner.read(rows.numpy()).ids[0].tolist()
    assert len(ids) > encoder.max_tokens
    for _ in range(2):
        (vector,) = encoder.text_vectors(rows, rows.ne(PAD))
    cut = library_states(models["bert"], [*ids[: encoder.max_tokens - 1], ids[-1]], 3)
    torch.testing.assert_close(vector, cut.mean(dim=0), rtol=0, atol=1e-5)
    assert caplog.text.count("positions are cut") == 1


def test_what_decides_the_alignment_is_recorded(
    models: dict[str, Path], datasets: dict[str, Path], tmp_path: Path
) -> None:
    name = f"hf:{models['bert']}"
    first = alignment_of(name, datasets["roberta"])
    assert first == alignment_of(name, datasets["roberta"])
    assert first is not None
    assert first != alignment_of(name, datasets["sentencepiece"])
    changed = shutil.copytree(models["bert"], tmp_path / "changed")
    content = json.loads((changed / "tokenizer.json").read_text(encoding="utf-8"))
    content["normalizer"]["lowercase"] = False
    (changed / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert alignment_of(f"hf:{changed}", datasets["roberta"]) != first
    assert alignment_of("checkpoint.pt", datasets["roberta"]) is None
    write_symbols(tmp_path / "bare", ["a", "b"])
    with pytest.raises(ValueError, match="bare has no tokenizer"):
        open_encoder(name, tmp_path / "bare", layer=1)


def test_half_precision_is_close(models: dict[str, Path], datasets: dict[str, Path]) -> None:
    rows = torch.tensor([[BEGIN, 100, 200, 300, 50, END]])
    found: list[Any] = []
    for fp16 in (False, True):
        encoder = AlignedEncoder(f"hf:{models['bert']}", datasets["sentencepiece"], layer=3, device="cpu", fp16=fp16)
        encoder.to("cpu")
        found.append(encoder.hidden_states(rows))
    assert 0 < float((found[0] - found[1]).abs().max()) < 0.1
