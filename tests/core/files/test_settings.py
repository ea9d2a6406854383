"""Which values of settings decide a result."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

import pytest

from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.settings import check, identity, names_that_decide_nothing, option, undeciding
from mlsm_plugin.huggingface.adaptation_settings import Adaptation
from mlsm_plugin.huggingface.training import TrainingSettings


@dataclass(frozen=True)
class Inner:
    """A number that decides, and one that does not."""

    size: int = option(3, least=1, help="how many")
    threads: int | None = option(None, help="how fast", decides=False)


@dataclass(frozen=True)
class Outer:
    """Inner settings, and where the result goes."""

    output: str = undeciding()
    seed: int = option(1, help="of all")
    inner: Inner = field(default_factory=Inner)


def test_the_identity_has_what_decides_and_nothing_else() -> None:
    assert identity(Outer("here", inner=Inner(threads=4))) == {"seed": 1, "inner": {"size": 3}}
    assert identity(Outer("here")) == identity(Outer("there"))
    assert identity(Outer("here", inner=Inner(size=4))) != identity(Outer("here"))


@pytest.mark.parametrize("kind", [LearningSettings, CodingSettings, TrainingSettings, Adaptation])
def test_where_and_how_fast_never_decides(kind: type) -> None:
    fields = {entry.name for entry in dataclasses.fields(kind)}
    undecided = names_that_decide_nothing(kind)
    speed = {"device", "threads", "batch_tokens", "log", "workers", "cpu", "compile", "report_to", "output"}
    assert fields & speed <= undecided
    # what a path names is recorded by its contents
    assert undecided <= speed | {"model", "texts", "valid_texts", "auxiliary", "teacher", "max_unk_rate"}


def test_the_identity_is_json() -> None:
    learning = LearningSettings(layer=2, coder="topk")
    settings = Adaptation("model", ["text"], "out", objective="mlsm", learning=learning)
    values = identity(settings)
    assert json.loads(json.dumps(values)) == values


def test_a_text_is_not_a_number() -> None:
    check(Inner(size=4))
    with pytest.raises(ValueError, match="size must be a number, got the text '4'"):
        check(Inner(size="4"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep_vectors must be a number, got the text '3'"):
        Adaptation("model", ["text"], "out", keep_vectors="3")  # type: ignore[arg-type]
