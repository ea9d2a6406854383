"""Sentence vectors of a teacher, and a student that learns them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from mlsm_plugin.core.files.sentence_modules import write_modules
from mlsm_plugin.core.losses.sentence_vectors import leading_directions
from mlsm_plugin.huggingface import MaskedLmModel, SentenceVectorModel
from mlsm_plugin.huggingface.sentence_vectors import SentenceCollator, SentenceVectors, write_vectors
from mlsm_plugin.huggingface.text_sequences import write_text_sequences
from tests import tiny_hf_models
from tests.huggingface.tiny_corpus import make_tokenizer, random_ids, tiny_bert


@pytest.fixture(scope="module")
def made(english_text: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``text.txt``, the tokenizer of a ``student``, and a ``teacher`` with another one."""
    root = tmp_path_factory.mktemp("vectors")
    lines = [line for line in english_text[0].read_text(encoding="utf-8").splitlines() if line][:60]
    # a blank line, one without tokens for the student, and one that is too long for both
    lines[5:5] = ["", "\u200b", "a name is bound " * 40, ""]
    (root / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tiny_hf_models.make_tokenizer("word_piece", root / "text.txt", root / "student")
    tiny_hf_models.make_model("roberta", root / "text.txt", root / "teacher")
    return root


def test_a_narrow_model_gets_projections() -> None:
    vectors = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
    directions = leading_directions(vectors, 2)
    sentences = SentenceVectors([[5, 6], [7]], vectors, directions=directions)
    np.testing.assert_allclose(sentences[1].vector, vectors[1] @ directions, atol=1e-6)
    assert np.array_equal(SentenceVectors([[5, 6], [7]], vectors)[1].vector, vectors[1])


def test_vectors_are_the_means_of_the_library(made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text, student, teacher = (made / name for name in ("text.txt", "student", "teacher"))
    sentences, _ = write_text_sequences([text], student, tmp_path / "tokens", max_length=24, apart=True)
    with caplog.at_level(logging.WARNING):
        write_vectors([text], sentences, student, teacher, tmp_path / "vectors.npy", device="cpu")
    lines = [line for line in text.read_text(encoding="utf-8").splitlines() if line not in ("", "\u200b")]
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    long = sum(len(tokenizer(line)["input_ids"]) > 68 for line in lines)
    assert 0 < long < 20
    assert f"{long} of 61 lines are longer than the teacher's positions" in caplog.text
    vectors = np.load(tmp_path / "vectors.npy")
    assert (vectors.dtype, vectors.shape) == (np.float32, (len(lines), 32))
    model = AutoModel.from_pretrained(teacher).double().eval()
    for line, vector in zip(lines, vectors, strict=True):
        batch = tokenizer(line, truncation=True, max_length=68, return_tensors="pt")
        with torch.no_grad():
            expected = model(**batch).last_hidden_state[0].mean(dim=0)
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-5)
    own = AutoTokenizer.from_pretrained(student)
    wanted = [own(line, truncation=True, max_length=24)["input_ids"] for line in lines]
    assert [ids.tolist() for ids in sentences] == wanted
    with pytest.raises(ValueError, match="the text changed while it was read: it had 61 lines, and has 122 now"):
        write_vectors([text, text], sentences, student, teacher, tmp_path / "other.npy", device="cpu")
    assert not (tmp_path / "other.npy").exists()


def test_a_teacher_is_pooled_as_its_folder_says(made: Path, tmp_path: Path) -> None:
    text, student = made / "text.txt", made / "student"
    sentences, _ = write_text_sequences([text], student, tmp_path / "tokens", max_length=24, apart=True)
    teacher = tmp_path / "teacher"
    shutil.copytree(made / "teacher", teacher)
    write_modules(teacher, width=32, max_length=60)
    (teacher / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}', encoding="utf-8")
    write_vectors([text], sentences, student, teacher, tmp_path / "vectors.npy", device="cpu")
    batch = AutoTokenizer.from_pretrained(teacher)(text.read_text(encoding="utf-8").split("\n")[0], return_tensors="pt")
    with torch.no_grad():
        first = AutoModel.from_pretrained(teacher).eval()(**batch).last_hidden_state[0, 0]
    np.testing.assert_allclose(np.load(tmp_path / "vectors.npy")[0], first.numpy(), atol=1e-5)


def test_a_teacher_that_cannot_read_the_text_is_refused(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = (made / "text.txt").read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(lines + "Имя связано .\n" * 20, encoding="utf-8")
    make_teacher = {"bert": made / "text.txt", "student": tmp_path / "text.txt"}
    for name, text in make_teacher.items():
        tiny_hf_models.make_model("bert", text, tmp_path / name)
    student, vectors = tmp_path / "student", tmp_path / "vectors.npy"
    both = (
        [tmp_path / "text.txt"],
        write_text_sequences([tmp_path / "text.txt"], student, tmp_path / "ids", apart=True)[0],
    )
    with pytest.raises(
        ValueError, match=r"% of the characters of the text for the teacher are unknown, above .* teacher"
    ):
        write_vectors(*both, student, tmp_path / "bert", vectors, device="cpu")
    assert not vectors.exists()
    write_vectors(*both, student, tmp_path / "bert", vectors, device="cpu", max_unk_rate=0.5)
    assert "of the text for the teacher are unknown" in caplog.text


def test_the_student_learns_the_vectors() -> None:
    ids, random = random_ids(6), np.random.default_rng(1)
    data = SentenceVectors(ids, random.normal(size=(6, 32)).astype(np.float32))
    batch = SentenceCollator(make_tokenizer())([data[index] for index in range(6)])
    stock = tiny_bert(1).eval()
    with torch.no_grad():
        means = [stock.bert(torch.tensor(own[None])).last_hidden_state[0].mean(dim=0) for own in ids]
    expected = float((torch.stack(means) - torch.from_numpy(data.vectors)).square().mean())
    with torch.no_grad():
        firsts = [stock.bert(torch.tensor(own[None])).last_hidden_state[0, 0] for own in ids]
    first_error = float((torch.stack(firsts) - torch.from_numpy(data.vectors)).square().mean())
    of_firsts = SentenceVectorModel.of(tiny_bert(1), width=32, pooling="cls")
    assert float(of_firsts.eval()(**batch)["loss"].detach()) == pytest.approx(first_error, rel=1e-4)
    model = SentenceVectorModel.of(tiny_bert(1), width=32)
    found = model.eval()(**batch)
    assert float(found["loss"]) == pytest.approx(expected, rel=1e-4)
    assert model.means_of(found["parts"].sum(0)) == {"vector_loss": pytest.approx(expected, rel=1e-4)}
    head = [one for name, one in model.named_parameters() if name.startswith("cls")]
    values = [one.detach().clone() for one in head]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        model.train()(**batch)["loss"].backward()
        assert all((one.grad is None) is any(one is own for own in head) for one in model.parameters())
        optimizer.step()
    assert float(model.eval()(**batch)["loss"]) < 0.5 * expected
    assert all(map(torch.equal, head, values))  # weight decay does not touch it either
    assert all(one.requires_grad for one in MaskedLmModel.of(model).parameters())  # another objective trains it again


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="the vectors are 48 wide, those of the model 32"):
        SentenceVectorModel.of(tiny_bert(), width=48)
    with pytest.raises(ValueError, match="there are 3 sentences and 2 vectors"):
        SentenceVectors(random_ids(3), np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match=r"directions of shape \(3, 4\) are not for vectors of shape \(3, 4\)"):
        SentenceVectors(random_ids(3), np.zeros((3, 4), np.float32), directions=np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match="pooling must be mean or cls, got 'max'"):
        SentenceVectorModel.of(tiny_bert(), width=32, pooling="max")
    data = SentenceVectors(random_ids(2), np.zeros((2, 1), np.float32))
    batch = SentenceCollator(make_tokenizer())([data[0], data[1]])
    with pytest.raises(ValueError, match=r"have the shape \(2, 1\), those of the model \(2, 32\)"):
        SentenceVectorModel.of(tiny_bert(), width=32)(**batch)


def test_padding_is_no_part_of_a_sentence() -> None:
    collator = SentenceCollator(make_tokenizer())
    vectors = np.zeros((2, 4), np.float32)
    data = SentenceVectors([[2, 7, 3, collator.pad], [2, 7, 3]], vectors)
    assert collator([data[0], data[1]])["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]
    for ids, why in (([2, collator.pad, 3], "has padding"), ([2, collator.largest_id + 1], "only has ids below")):
        with pytest.raises(ValueError, match=f"sentence 1 of the batch {why}|{why}"):
            collator([data[1], SentenceVectors([ids, ids], vectors)[0]])
