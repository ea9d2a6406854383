"""Where the files of a Hugging Face model are found, without a network."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from mlsm_plugin.core.files.hf_files import (
    LATENT_HEAD,
    first_line,
    hf_folder,
    import_transformers,
    is_hf,
    other_name_of_bias,
    portable_weights,
    weight_files,
)


def test_the_prefix_tells_the_names_of_the_library() -> None:
    assert is_hf("hf:roberta-base")
    assert not is_hf("roberta-base")
    assert not is_hf(Path("checkpoints/hf:x"))


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert hf_folder(f"hf:{tmp_path}") == hf_folder(tmp_path) == hf_folder(tmp_path, weights=True) == tmp_path


@pytest.mark.parametrize("name", ["hf:", "", "./nowhere", "/nowhere", "~/nowhere", "a/b/c", "hf:../nowhere"])
def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it now fails
    with pytest.raises(ValueError, match="folder of a Hugging Face model"):
        hf_folder(name)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"model\.safetensors is .* folder of a Hugging Face model"):
        hf_folder(f"hf:{tmp_path / 'model.safetensors'}")


def test_a_hub_name_is_its_folder_in_the_cache_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_transformers()
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789" * 4
    cached = tmp_path / "models--someone--tiny" / "snapshots" / commit
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    refs = tmp_path / "models--someone--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    assert hf_folder("hf:someone/tiny") == hf_folder("someone/tiny") == cached
    with pytest.raises(ValueError, match=r"^someone/tiny is .*, and the hub does not offer it: [^\n]+$"):
        hf_folder("someone/tiny", weights=True)  # they are not in the cache
    (cached / "model.safetensors").touch()
    assert hf_folder("hf:someone/tiny", weights=True) == cached
    for weights in (False, True):
        with pytest.raises(ValueError, match=r"^someone/else is .*, and the hub does not offer it: [^\n]+$"):
            hf_folder("hf:someone/else", weights=weights)


def test_the_latent_head_comes_with_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_transformers()
    import huggingface_hub

    wanted: list[str] = []

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        wanted[:] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name: ["config.json", "pytorch_model.bin"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hf_folder("someone/tiny", weights=True) == tmp_path
    assert {"*.json", "pytorch_model.bin", LATENT_HEAD} <= {*wanted}
    assert hf_folder("someone/tiny") == tmp_path
    assert not {"pytorch_model.bin", LATENT_HEAD} & {*wanted}


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"need transformers: pip install 'mlsm_plugin\[hf\]'"):
        import_transformers()


def test_a_torchaudio_of_another_torch_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchaudio.py").write_text("raise OSError('undefined symbol')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torchaudio", sys)  # so that whatever is there afterwards is taken back
    del sys.modules["torchaudio"]
    import_transformers()
    assert importlib.util.find_spec("torchaudio") is None


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (["pytorch_model.bin", "model.safetensors"], ["model.safetensors"]),
        (["pytorch_model.bin", "model-00001-of-00001.safetensors"], ["pytorch_model.bin"]),
        (
            ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"],
            ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
        (
            ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "tokenizer.json"],
            ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"],
        ),
    ],
)
def test_files_of_the_weights_in_the_order_of_the_library(
    tmp_path: Path, there: list[str], expected: list[str]
) -> None:
    for name in there:
        (tmp_path / name).touch()
    assert [path.name for path in weight_files(tmp_path)] == expected


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match=r"has no weights \(model\.safetensors or pytorch_model\.bin\)"):
        weight_files(tmp_path)


def test_errors_are_cut_to_one_line() -> None:
    assert first_line(OSError("\n first\nsecond")) == "first"
    assert first_line(RuntimeError()) == "RuntimeError"


@pytest.mark.parametrize("front", ["cls.predictions", "lm_head"])
def test_both_names_of_a_bias_have_the_value_that_counts(front: str) -> None:
    trained, other = torch.arange(4.0), torch.zeros(4)
    found = portable_weights({f"{front}.bias": other, f"{front}.decoder.bias": trained})
    assert found.keys() == {f"{front}.bias", f"{front}.decoder.bias"}
    assert all(torch.equal(values, trained) for values in found.values())
    assert (
        len({values.data_ptr() for values in found.values()}) == 2
    )  # the library leaves out a tensor that it has seen
    assert other_name_of_bias(f"{front}.decoder.bias") == f"{front}.bias"
    assert other_name_of_bias("decoder.bias") == "decoder.bias"  # of ModernBERT, which has only this name


def test_the_new_head_of_a_deberta_gets_the_names_of_the_legacy_one() -> None:
    parts = ("dense.weight", "dense.bias", "LayerNorm.weight", "LayerNorm.bias")
    weights = {f"lm_predictions.lm_head.{part}": torch.rand(3) for part in parts}
    bias = torch.rand(5)
    found = portable_weights({**weights, "lm_predictions.lm_head.bias": bias, "deberta.x": torch.ones(1)})
    names = {f"cls.predictions.transform.{part}" for part in parts}
    assert found.keys() == {*names, "cls.predictions.bias", "cls.predictions.decoder.bias", "deberta.x"}
    assert torch.equal(found["cls.predictions.transform.dense.bias"], weights["lm_predictions.lm_head.dense.bias"])
    assert torch.equal(found["cls.predictions.bias"], bias)
