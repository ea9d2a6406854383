"""Coders of other programs, brought in and taken out with Python; ``tests/cli/test_convert.py`` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.core.coding.coder_conversion import export_sae, import_coder
from mlsm_plugin.core.coding.settings import CoderImport
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from tests.core.sparse_coding.formats.foreign_saes import saelens_config, write_saelens


def test_there_and_back(tmp_path: Path) -> None:
    write_saelens(tmp_path / "in", saelens_config("topk"))
    made = import_coder(tmp_path / "in", tmp_path / "own", CoderImport(layer=2))
    assert isinstance(made, SaeCoder)
    assert made.meta["layer"] == 2
    assert import_coder(tmp_path / "in", tmp_path / "own", CoderImport(layer=2)) is None
    with pytest.raises(ValueError, match=r"layer is 2 there and 3 now"):
        import_coder(tmp_path / "in", tmp_path / "own", CoderImport(layer=3))
    written = export_sae(tmp_path / "own", tmp_path / "out")
    assert written is not None
    assert export_sae(tmp_path / "own", tmp_path / "out") is None
    with pytest.raises(ValueError, match="would be read from and written to"):
        export_sae(tmp_path / "own", tmp_path / "own")


def test_what_is_out_of_range_is_refused() -> None:
    for name, value in (("layer", -1), ("lambda_", 0.0)):
        with pytest.raises(ValueError, match=rf"{name} must be"):
            CoderImport(**{name: value})
