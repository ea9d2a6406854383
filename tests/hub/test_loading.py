"""Loading a trained model from a copy of its folder, with everything else gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from fairseq.models.roberta import RobertaModel
from fairseq.models.roberta.hub_interface import RobertaHubInterface

from mlsm_plugin.fairseq_plugin.models.mlsm_roberta import MlsmRobertaModel
from mlsm_plugin.hub import from_pretrained
from mlsm_plugin.hub.infilling import DenoisingHubInterface
from mlsm_plugin.hub.interface import MlsmHubInterface
from tests.conftest import REPOSITORY, fairseq_train
from tests.denoising_flags import TINY
from tests.tiny_models import TinyData, save_untrained

pytestmark = pytest.mark.slow

TEXT = "The value of the expression is a list."


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    """A moved --save-dir whose data and original place no longer exist."""
    root = tmp_path_factory.mktemp("hub")
    data, save = root / "data-bin", root / "save"
    shutil.copytree(pipeline.data_bin, data)
    fairseq_train(data, save, "--max-update", 3, "--save-interval-updates", 2, "--mlm-weight", 1)
    shutil.rmtree(data)
    moved = root / "moved" / "model"
    shutil.copytree(save, moved)
    shutil.rmtree(save)
    return moved


@pytest.fixture(scope="module")
def model(folder):
    return from_pretrained(folder)


@pytest.fixture
def own_folder(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "model")


def same_weights(one, other):
    one, other = one.model.state_dict(), other.model.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_training_leaves_all_that_loading_needs(folder):
    names = {path.name for path in folder.iterdir()}
    assert {"dict.txt", "sentencepiece.bpe.model", "checkpoint_best.pt", "checkpoint_last.pt"} <= names
    assert not [name for name in names if name.endswith(".tmp")]


def test_all_ways_of_loading_give_the_same_model(folder, model):
    others = [
        from_pretrained(folder, "checkpoint_best.pt"),
        from_pretrained(folder / "checkpoint_best.pt"),
        from_pretrained(str(folder), data_name_or_path=str(folder)),
        MlsmRobertaModel.from_pretrained(str(folder)),
        MlsmRobertaModel.from_pretrained(str(folder), "checkpoint_best.pt"),
        torch.hub.load(str(REPOSITORY), "mlsm", str(folder), source="local"),
        torch.hub.load(str(REPOSITORY), "mlsm", str(folder), checkpoint_file="checkpoint_best.pt", source="local"),
    ]
    for other in others:
        assert type(other) is MlsmHubInterface
        assert same_weights(other, model)


def test_stock_roberta_interface_loads_it(folder, model):
    stock = RobertaModel.from_pretrained(str(folder), "checkpoint_best.pt", bpe="sentencepiece").eval()
    assert type(stock) is RobertaHubInterface
    assert same_weights(stock, model)
    tokens = stock.encode(TEXT)
    assert torch.equal(tokens, model.encode(TEXT))
    assert torch.equal(stock.extract_features(tokens), model.extract_features(tokens))


def test_checkpoint_holds_nothing_but_data(folder):
    saved = torch.load(folder / "checkpoint_best.pt", map_location="cpu", weights_only=True)
    assert "encoder.lm_head.atom_projection.weight" in saved["model"]


def test_what_is_missing_is_named(own_folder, tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        from_pretrained(tmp_path / "nowhere")
    where = tmp_path / "nowhere"
    assert str(error.value) == f"{where} does not exist; pass the --save-dir of a training run, or a checkpoint"
    with pytest.raises(FileNotFoundError) as error:
        from_pretrained(own_folder, "checkpoint99.pt")
    names = sorted(path.name for path in own_folder.glob("*.pt"))
    assert str(error.value) == f"{own_folder} has no checkpoint99.pt; it has {names}"

    (own_folder / "sentencepiece.bpe.model").unlink()
    with pytest.raises(FileNotFoundError) as error:
        from_pretrained(own_folder)
    missing = "has no tokenizer (sentencepiece.bpe.model or hf_tokenizer); copy it there from the binarized dataset"
    assert str(error.value) == f"{own_folder} {missing}"
    (own_folder / "dict.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"is not a binarized dataset: dict\.txt is missing"):
        from_pretrained(own_folder)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.txt").write_text("some text")
    with pytest.raises(ValueError, match=r"train\.txt is not a readable fairseq checkpoint"):
        from_pretrained(tmp_path / "text" / "train.txt")
    for path in own_folder.glob("*.pt"):
        path.unlink()
    with pytest.raises(FileNotFoundError) as error:
        from_pretrained(own_folder)
    assert str(error.value) == f"{own_folder} has no checkpoint (*.pt); pass the --save-dir of a training run"


def test_each_kind_of_model_gets_its_interface(tiny: TinyData, tmp_path: Path) -> None:
    assert type(from_pretrained(tiny.model)) is MlsmHubInterface
    options = {"task": "span_denoising", "criterion": "cross_entropy", "arch": "denoising_small"}
    checkpoint = save_untrained(tiny.data_bin, tmp_path / "denoising", *TINY, **options)
    assert type(from_pretrained(checkpoint)) is DenoisingHubInterface


def test_options_of_the_model_and_another_place_of_the_dictionary(tiny: TinyData, tmp_path: Path) -> None:
    model = from_pretrained(tiny.model, dropout=0.3)
    assert model.model.encoder.args.dropout == 0.3
    (tmp_path / "model").mkdir()
    shutil.copy(tiny.model, tmp_path / "model")
    with pytest.raises(FileNotFoundError, match=r"dict\.txt is missing"):
        from_pretrained(tmp_path / "model")
    shutil.copytree(tiny.data_bin, tmp_path / "data")
    moved = from_pretrained(tmp_path / "model", data_name_or_path="../data")
    assert same_weights(moved, model)
    assert torch.equal(moved.encode(TEXT), model.encode(TEXT))
    assert not moved.training
