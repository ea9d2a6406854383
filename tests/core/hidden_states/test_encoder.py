"""What every source of hidden states is asked before a model is loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from mlsm_plugin.core.hidden_states.encoder import HiddenStateSource, check_layer


class FilesOnly(HiddenStateSource):
    """A source that knows the files of a model."""

    @classmethod
    def files_of(cls, name: Any) -> list[Path]:
        return sorted(Path(name).iterdir())


def test_fingerprint_is_that_of_all_files_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    first = FilesOnly.fingerprint_of(tmp_path)
    assert first == hashlib.sha256(b"one").hexdigest()
    (tmp_path / "b").write_bytes(b"two")
    assert FilesOnly.fingerprint_of(tmp_path) != first
    (tmp_path / "b").unlink()
    assert FilesOnly.fingerprint_of(str(tmp_path)) == first
    assert FilesOnly.width_of(tmp_path) is None


def test_source_that_lacks_a_method_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="abstract") as error:
        FilesOnly(tmp_path, tmp_path, layer=0)  # type: ignore[abstract]
    assert "hidden_states" in str(error.value)
    assert "files_of" not in str(error.value)


def test_layers_count_from_the_embeddings_to_the_last() -> None:
    for layer in (0, 1, 6):
        check_layer(layer, 6, "model.pt")
    for layer in (-1, 7):
        with pytest.raises(ValueError, match=f"--layer {layer} is out of range: model.pt has 6 layers") as error:
            check_layer(layer, 6, "model.pt")
        assert "0 (embeddings) to 6 (last layer) exist" in str(error.value)
