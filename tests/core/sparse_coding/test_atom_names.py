"""Names of atoms: the forms of other programs, and what is no name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlsm_plugin.core.sparse_coding.atom_names import read_names

NAMES = {3: "months of the year", 0: "rain"}


@pytest.mark.parametrize(
    "content",
    [
        {"3": "months  of\nthe year", "0": "rain", "1": " "},
        [{"modelId": "bert", "index": "3", "description": "months of the year"}, {"index": 0, "description": "rain"}],
        [{"atom": 3, "name": "months of the year"}, {"atom": 0, "name": "rain"}],
    ],
    ids=["object", "Neuronpedia", "list"],
)
def test_forms_of_other_programs(content: object, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps(content))
    assert read_names(tmp_path / "names.json", 4) == NAMES


def test_the_folder_of_delphi(tmp_path: Path) -> None:
    for atom, name in NAMES.items():
        (tmp_path / f"encoder.layer.5_latent{atom}.txt").write_text(json.dumps(name))
    (tmp_path / "other.txt").write_text("not JSON")
    assert read_names(tmp_path, 4) == NAMES
    (tmp_path / "encoder.layer.6_latent2.txt").write_text('"snow"')  # Delphi explains a sample of the latents of each
    with pytest.raises(ValueError, match=r"several modules: encoder\.layer\.5, encoder\.layer\.6; pass a folder"):
        read_names(tmp_path, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"4": "rain"}, "names atom 4, but there are only 4, numbered from 0; pass names of this dictionary"),
        ({"-1": "rain"}, "expected the number of an atom and a text, got '-1': 'rain'"),
        ({"\u0663": "rain"}, "expected the number of an atom"),
        ({"rain": "0"}, "expected the number of an atom"),
        ({"0": 3}, "expected the number of an atom and a text, got '0': 3"),
        ({"0": "a", "00": "b"}, "names atom 0 twice"),
        ([{"index": 0, "text": "rain"}], "has no names of atoms; expected an object"),
        ({}, "has no names of atoms; expected an object"),
        ([], "has no names of atoms; expected an object"),
        ("rain", "has no names of atoms; expected an object"),
    ],
)
def test_what_is_no_name_is_one_line(content: object, message: str, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_names(tmp_path / "names.json", 4)


def test_a_folder_without_names_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no names of atoms; pass a JSON file, or Delphi's folder"):
        read_names(tmp_path, 4)
