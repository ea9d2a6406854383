"""An output that would replace an input is refused; one beside a model is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlsm_plugin.core.files.output_files import check_output


def test_an_input_is_no_output_under_any_name(tmp_path: Path) -> None:
    source = tmp_path / "pairs.jsonl"
    source.write_text("{}\n", encoding="utf-8")
    (tmp_path / "link.json").symlink_to(source)
    os.link(source, tmp_path / "second.json")
    for name in ("pairs.jsonl", "link.json", "second.json"):
        with pytest.raises(ValueError, match=f"{name} is the output and also an input"):
            check_output(tmp_path / name, [source])
    check_output(tmp_path / "figures.json", [source])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.txt", "checkpoint_best.pt", "dict.txt"])
def test_a_part_of_an_input_folder_is_no_output(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for source in (model, f"hf:{model}"):
        with pytest.raises(ValueError, match=f"{name} is named like a part of {model}"):
            check_output(model / name, [source])


def test_figures_may_lie_beside_a_model(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text("{}", encoding="utf-8")
    check_output(figures, [tmp_path, "hf:some/name", "nothing-there"])
    check_output(tmp_path / "pairs.json", [tmp_path])
