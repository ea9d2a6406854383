"""What an output folder says about the adaptation that was begun there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlsm_plugin.huggingface.adaptation_folder import check_output, recorded_objective


@pytest.mark.parametrize(
    ("steps", "objective"),
    [
        ({}, None),
        ({"before": {}}, None),
        ({"dictionary": {"layer": 2}}, "mlsm+mlm"),
        ({"dictionary": {"layer": 2}, "before": {"objective": "mlsm"}}, "mlsm"),
    ],
)
def test_a_folder_knows_its_objective_from_the_training_on(
    steps: dict[str, dict[str, Any]], objective: str | None, tmp_path: Path
) -> None:
    record = {name: {"signature": {"settings": settings}, "done": True} for name, settings in steps.items()}
    (tmp_path / "steps.json").write_text(json.dumps(record), encoding="utf-8")
    assert recorded_objective(tmp_path) == objective


def test_a_model_of_something_else_is_kept_and_that_of_a_begun_adaptation_goes_on(tmp_path: Path) -> None:
    check_output(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="choose another --output"):
        check_output(tmp_path)
    (tmp_path / "steps.json").write_text("{}", encoding="utf-8")
    check_output(tmp_path)
