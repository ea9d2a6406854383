"""Files of older formats are read, and what is not a checkpoint is refused; tests/attacks has hostile ones."""

from __future__ import annotations

from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.fairseq_plugin.compat import checkpoint_contents
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import check_configuration, names_in, read_contents
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import load_model, read_state
from tests.fairseq_plugin.compat.compat_checks import saved_checkpoint

NAMES = {"task": "masked_lm", "model": "mlsm_roberta_tiny", "criterion": "masked_lm"}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = saved_checkpoint(str(tmp_path))
    return path, torch.load(path, weights_only=True)


def test_a_good_checkpoint_passes(saved: tuple[Path, dict[str, Any]]) -> None:
    contents = read_contents(saved[0])
    check_configuration(contents, saved[0])
    assert names_in(contents) == NAMES


def test_the_format_before_torch_1_6(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert names_in(read_contents(path)) == NAMES
    load_model(path, {})


def test_one_namespace_for_all_options(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    words = {"task": "masked_lm", "criterion": "masked_lm", "arch": "mlsm_roberta_tiny", "data": str(path.parent)}
    torch.save({**state, "cfg": None, "args": Namespace(**{**vars(state["cfg"]["model"]), **words})}, path)
    assert names_in(read_contents(path)) == NAMES
    model, _, _ = load_model(path, {})
    assert all(torch.equal(value, state["model"][name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([1], "it is of the type list, not a dictionary"),
        ({}, "it has no configuration"),
        ({"cfg": 3}, "its cfg is of the type int"),
        ({"cfg": {}, "model": {1: 2}}, "its weights are not a dictionary"),
        ({"cfg": {}, "optimizer_history": []}, "its optimizer_history is not a list of runs"),
        ({"cfg": {}, "optimizer_history": [{"num_updates": True}]}, "its number of updates is True"),
        ({"cfg": {}, "extra_state": []}, "its extra_state is of the type list"),
        ({"cfg": {}, "extra_state": {"metrics": 3}}, "3 is not a meter"),
    ],
)
def test_what_is_not_a_checkpoint(content: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    with pytest.raises(ValueError, match="is not a readable fairseq checkpoint") as caught:
        read_state(path)
    assert reason in str(caught.value)


def test_weights_that_do_not_fit_are_named(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    name = "encoder.sentence_encoder.layers.0.fc1.weight"
    torch.save({**state, "model": {key: value for key, value in state["model"].items() if key != name}}, path)
    with pytest.raises(ValueError, match=f"cannot be built.*Missing key.*{name}") as caught:
        load_model(path, {})
    assert "\n" not in str(caught.value)
    torch.save({**state, "model": state["model"] | {name: torch.zeros(3, 3)}}, path)
    with pytest.raises(ValueError, match=f"cannot be built.*size mismatch for {name}"):
        load_model(path, {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)


@given(changes=st.dictionaries(st.sampled_from(["cfg", "args", "model", "optimizer_history", "extra_state"]), JSON))
def test_any_plain_content_is_taken_or_refused(changes: dict[str, Any]) -> None:
    """No content of the wrong form ends in another error than ValueError."""
    contents = {"cfg": {kind: {"_name": name} for kind, name in NAMES.items()}, "model": {}} | changes
    with suppress(ValueError):
        checkpoint_contents._check_contents(contents)
        check_configuration(contents, "file")


@given(part=st.sampled_from(["task", "model", "criterion"]), options=st.dictionaries(st.text(max_size=9), JSON))
def test_any_options_are_taken_or_refused(part: str, options: dict[str, Any]) -> None:
    cfg = {kind: {"_name": name} for kind, name in NAMES.items()}
    cfg[part] |= options
    with suppress(ValueError):
        check_configuration({"cfg": cfg, "model": {}}, "file")
