"""Labelled texts as the dataset of fairseq's ``sentence_prediction``, read back by fairseq."""

from __future__ import annotations

from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils
from fairseq.tasks.sentence_prediction import SentencePredictionTask

from mlsm_plugin import hub
from mlsm_plugin.evaluation.finetuning import check_tokens, write_classification_data
from mlsm_plugin.evaluation.labelled_texts import LabelledTexts
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import TextTokenizer, open_tokenizer
from tests.tiny_models import TinyData


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyData) -> TextTokenizer:
    return open_tokenizer(tiny.tokenizer)


def of(labels: str, *texts: tuple[str, ...]) -> LabelledTexts:
    return LabelledTexts(Path("none"), tuple(labels.split()), texts, tuple(range(1, len(texts) + 1)))


def read(path: Path, dictionary: Dictionary) -> list[list[int]]:
    split = data_utils.load_indexed_dataset(str(path), dictionary)
    return [split[index].tolist() for index in range(len(split))]


def test_texts_and_labels_are_read_back(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    splits = {
        "train": of("no yes yes", ("The name",), ("A value is a value",), ("It",)),
        "valid": of("yes", ("The value",)),
    }
    too_long = write_classification_data(splits, tokenizer, tmp_path / "data", positions=6, regression=False)
    symbols = Dictionary.load(str(tmp_path / "data" / "input0" / "dict.txt"))
    assert symbols.symbols == tokenizer.dictionary.symbols
    assert not (tmp_path / "data" / "input1").exists()
    labels = Dictionary.load(str(tmp_path / "data" / "label" / "dict.txt"))
    assert labels.symbols[labels.nspecial :] == ["no", "yes"]  # in order of the alphabet
    for name, texts in splits.items():
        ids = read(tmp_path / "data" / "input0" / name, symbols)
        assert ids == [tokenizer.ids_of(own[0]).tolist() for own in texts.texts]
        assert {row[-1] for row in ids} == {symbols.eos()}
        rows = read(tmp_path / "data" / "label" / name, labels)
        assert [labels[row[0]] for row in rows] == list(texts.labels)
        assert too_long[name] == sum(1 + len(row) > 6 for row in ids)  # BOS, too
    assert 1 <= too_long["train"] <= 2


def test_labels_may_be_called_like_special_symbols(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    names = ("<pad>", "</s>", "<unk>", "<s>", "<mask>", "#fairseq:overwrite", "b")
    texts = of(" ".join(names), *((f"The name {name}",) for name in names))
    write_classification_data({"train": texts}, tokenizer, tmp_path / "data", positions=60, regression=False)
    labels = SentencePredictionTask.load_dictionary(str(tmp_path / "data" / "label" / "dict.txt"))
    rows = read(tmp_path / "data" / "label" / "train", labels)
    assert [labels[row[0]] for row in rows] == list(names)
    assert sorted(row[0] - labels.nspecial for row in rows) == list(range(len(names)))  # classes from 0
    assert {row[1] for row in rows} == {labels.eos()}


def test_texts_without_tokens_are_named(tiny: TinyData) -> None:
    model = hub.from_pretrained(tiny.model)
    check_tokens(of("a b", ("The name",), ("A value",)), model, 0.01)
    with pytest.raises(ValueError, match=r"none, line 2: the text '\\u200b' has no tokens after normalization"):
        check_tokens(of("a b", ("The", "name"), ("A value", "\u200b")), model, 0.01)


def test_pairs_have_two_inputs_and_their_lengths_count_together(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    pairs = of("a b", ("One", "Two three four five"), ("One", "Two"))
    lengths = [sum(1 + len(tokenizer.ids_of(text)) for text in own) for own in pairs.texts]
    for positions, expected in ((lengths[0], 0), (lengths[0] - 1, 1), (lengths[1] - 1, 2)):
        output = tmp_path / str(positions)
        found = write_classification_data({"train": pairs}, tokenizer, output, positions=positions, regression=False)
        assert found == {"train": expected}
    seconds = read(output / "input1" / "train", tokenizer.dictionary)
    assert seconds == [tokenizer.ids_of(own[1]).tolist() for own in pairs.texts]


def test_numbers_are_lines(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    splits = {"train": of("0.5 -1", ("x",), ("y",))}
    write_classification_data(splits, tokenizer, tmp_path / "data", positions=60, regression=True)
    assert (tmp_path / "data" / "label" / "train.label").read_text() == "0.5\n-1\n"
    assert not (tmp_path / "data" / "label" / "dict.txt").exists()


def test_failure_leaves_nothing(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """A failure in the middle must not leave a folder that looks complete."""
    splits = {"train": of("a b", ("x",), ("y",))}
    splits["valid"] = LabelledTexts(Path("none"), ("a",), ((),), (1,))  # a line without a text
    with pytest.raises(IndexError):
        write_classification_data(splits, tokenizer, tmp_path / "data", positions=60, regression=False)
    assert list(tmp_path.iterdir()) == []
