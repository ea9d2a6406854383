"""Folders of sentence-transformers stay what they are, and others can become one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from mlsm_plugin.core.files.sentence_modules import copy_modules, modules_of, pooling_of, write_modules
from mlsm_plugin.evaluation.sentence_encoders import open_sentence_encoder
from tests.tiny_hf_models import make_model


@pytest.fixture
def model(tmp_path: Path, english_text: tuple[Path, Path]) -> Path:
    return make_model("bert", english_text[1], tmp_path / "model")


def test_a_model_becomes_one_whose_vectors_are_means(model: Path) -> None:
    write_modules(model, width=32, max_length=20, normalized=True)
    assert [module["type"].split(".")[-1] for module in modules_of(model)] == ["Transformer", "Pooling", "Normalize"]
    assert pooling_of(model) == "mean"
    tokenizer = AutoTokenizer.from_pretrained(model)
    batch = tokenizer("the name", return_tensors="pt")
    mean = AutoModel.from_pretrained(model).eval()(**batch).last_hidden_state[0].mean(0)
    vector = torch.as_tensor(open_sentence_encoder(str(model), "cpu").vectors(["the name"])[0])
    torch.testing.assert_close(
        torch.nn.functional.normalize(vector, dim=0), torch.nn.functional.normalize(mean.detach(), dim=0)
    )
    library = pytest.importorskip("sentence_transformers")
    opened = library.SentenceTransformer(str(model), device="cpu")
    torch.testing.assert_close(torch.from_numpy(opened.encode("the name")), torch.nn.functional.normalize(mean, dim=0))


def test_the_modules_of_a_folder_are_copied(model: Path, tmp_path: Path) -> None:
    write_modules(model, width=32, max_length=20)
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}', encoding="utf-8")
    (tmp_path / "copy").mkdir()
    copy_modules(model, tmp_path / "copy")
    assert modules_of(tmp_path / "copy") == modules_of(model)
    assert pooling_of(tmp_path / "copy") == "cls"
    assert modules_of(tmp_path) == []


@pytest.mark.parametrize("path", ["../secret", "/etc", "a/b"])
def test_a_module_outside_of_the_folder_is_refused(model: Path, path: str) -> None:
    (model / "modules.json").write_text(json.dumps([{"type": "Pooling", "path": path}]), encoding="utf-8")
    with pytest.raises(ValueError, match="which is not in"):
        modules_of(model)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_the_pooling_is_that_of_the_folder(tmp_path: Path, config: dict[str, object], pooling: str) -> None:
    assert pooling_of(tmp_path) == "mean"
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert pooling_of(tmp_path) == pooling
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ValueError, match="pooling_mode_max_tokens"):
        pooling_of(tmp_path)


@pytest.mark.parametrize(
    ("modules", "problem"),
    [
        ("x", "is not valid JSON"),
        ('["a"]', "is not a dictionary"),
        ('[{"type": "a.Pooling"}]', "path"),
        ('[{"type": "a.Pooling", "path": "nowhere"}]', "which does not exist"),
    ],
)
def test_a_damaged_list_of_modules_is_one_line(tmp_path: Path, modules: str, problem: str) -> None:
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(ValueError, match=f"modules.json.*{problem}"):
        pooling_of(tmp_path)


def test_a_module_that_is_left_out_is_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_modules(model, width=32, max_length=20, normalized=True)
    assert pooling_of(model) == "mean"
    assert not caplog.records
    modules = [*modules_of(model), {"type": "sentence_transformers.models.Dense", "path": "3_Dense"}]
    (model / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    assert pooling_of(model) == "mean"
    assert "are taken before its module Dense, so they are not those" in caplog.text
