"""Codes of texts: those of the coder on the library's hidden states, whatever the batch; and predicted ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.huggingface import LatentSemanticModel, save_pretrained
from mlsm_plugin.search.text_codes import DictionaryCodes, PredictedCodes, TextCoder, open_text_coder
from tests.search.searched import make_encoder
from tests.tiny_hf_models import make_model_with_own_tokens
from tests.tiny_models import TinyData

TEXTS = ["the name of a value", "", "return the value of the name, if there is one", "a"]


@pytest.fixture(scope="module")
def folders(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_encoder(tiny.text, tmp_path_factory.mktemp("encoder"))


def test_codes_are_those_of_the_librarys_hidden_states(folders: tuple[Path, Path]) -> None:
    model, dictionary = folders
    coder = DictionaryCodes(model, dictionary)
    library = AutoModel.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    for batch_tokens in (1, 20, 1000):
        for text, coded in zip(TEXTS, coder.coded(TEXTS, batch_tokens=batch_tokens), strict=True):
            encoding = tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
            offsets = encoding.pop("offset_mapping")[0, 1:-1].tolist()
            with torch.no_grad():
                hidden = library(**encoding, output_hidden_states=True).hidden_states[1][0, 1:-1]
            expected = load_coder(dictionary).encode(hidden).codes.toarray() if len(hidden) else np.zeros((0, 40))
            np.testing.assert_allclose(coded.codes.toarray(), expected, atol=1e-4)
            assert [list(place) for place in coded.offsets] == offsets
            np.testing.assert_allclose(
                coded.summed().toarray()[0], np.log1p(expected).sum(axis=0), rtol=1e-4, atol=1e-4
            )


def test_a_long_text_is_read_in_parts(folders: tuple[Path, Path]) -> None:
    coder = DictionaryCodes(*folders)
    text = " ".join(["name"] * (2 * coder.positions))
    coded = coder.coded([text])[0]
    assert coded.codes.shape == (len(coded.ids), 40)
    room = coder.positions - 2
    first = coder.coded([" ".join(["name"] * room)])[0]
    np.testing.assert_allclose(coded.codes[:room].toarray(), first.codes.toarray(), atol=1e-5)
    assert np.diff(coded.codes.indptr).min() > 0


@pytest.mark.parametrize("kind", ["dictionary", "latent head"])
def test_an_unknown_token_has_no_code(folders: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    coder: TextCoder = DictionaryCodes(*folders)
    if kind == "latent head":
        model = LatentSemanticModel.from_pretrained(folders[0], num_atoms=30)
        save_pretrained(tmp_path, model, AutoTokenizer.from_pretrained(folders[0]))
        coder = PredictedCodes(tmp_path)
    coded = coder.coded(["name 漢 value", "漢"])
    is_unknown = np.concatenate([text.ids for text in coded]) == coder.tokenizer.unknown_id
    has_code = np.concatenate([np.diff(text.codes.indptr) for text in coded]) > 0
    assert is_unknown.sum() == 2
    assert (has_code == ~is_unknown).all()
    assert coder.codes_of_ids(coded[1].ids.tolist()).nnz == 0


def test_a_latent_head_predicts_codes(tiny: TinyData, tmp_path: Path) -> None:
    folder = make_model_with_own_tokens("bert", tiny.text, tmp_path / "bert")
    with pytest.raises(ValueError, match="has no latent head"):
        PredictedCodes(folder)
    model = LatentSemanticModel.from_pretrained(folder, num_atoms=30)
    save_pretrained(tmp_path / "mlsm", model, AutoTokenizer.from_pretrained(folder))
    coded = PredictedCodes(tmp_path / "mlsm").coded(TEXTS)
    encoding = AutoTokenizer.from_pretrained(folder)(TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        everywhere = torch.ones_like(encoding["input_ids"]).bool()
        logits = model.eval().latent_logits(encoding["input_ids"], encoding["attention_mask"], everywhere)[1:-1]
    values, atoms = logits.softmax(dim=1).topk(16, dim=1)
    for row in range(len(atoms)):
        expected = np.zeros(30)
        expected[atoms[row]] = values[row] * 16
        np.testing.assert_allclose(coded[0].codes[row].toarray()[0], expected, atol=1e-4)


def test_a_dictionary_of_another_model_and_a_checkpoint_are_one_line(
    tiny: TinyData, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    other = make_model_with_own_tokens("roberta", tiny.text, tmp_path / "roberta")
    with pytest.raises(ValueError, match="learned from another auxiliary"):
        open_text_coder(other, folders[1])
    model = LatentSemanticModel.from_pretrained(other, num_atoms=40)
    save_pretrained(tmp_path / "mlsm", model, AutoTokenizer.from_pretrained(other))
    with pytest.raises(
        ValueError, match="has a latent head and predicts its properties itself: leave out --dictionary"
    ):
        open_text_coder(tmp_path / "mlsm", folders[1])
    assert isinstance(open_text_coder(tmp_path / "mlsm", None), PredictedCodes)
    with pytest.raises(ValueError, match="`mlsm convert` writes one"):
        open_text_coder(tiny.model.parent, folders[1])
