"""Names that are recorded do not say where the files lay."""

from __future__ import annotations

import pytest

from mlsm_plugin.core.files.recorded_names import without_place


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("/home/me/models/encoder", "models/encoder"),
        ("hf:organization/encoder", "hf:organization/encoder"),
        ("hf:/data/organization/encoder", "organization/encoder"),
        ("encoder", "encoder"),
        ("run/checkpoint_best.pt", "run/checkpoint_best.pt"),
        (None, None),
    ],
)
def test_the_last_two_parts_are_recorded(name: str | None, recorded: str | None) -> None:
    assert without_place(name) == recorded
