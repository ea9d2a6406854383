"""Sums over workers, divided by counts over workers; nothing counted is 0 without weight."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fairseq.logging import metrics

from mlsm_plugin.fairseq_plugin.criterions.logged_means import BIT, LoggedMeans

# three batches; the last one has no tokens of the second kind
LOGS = [
    {"loss": 6.0, "tokens": 4, "other": 1.0, "others": 1},
    {"loss": torch.tensor(2.0), "tokens": 4, "other": torch.tensor(2.0), "others": 2},
    {"loss": 1.0, "tokens": 1},
]


def logged(*calls: tuple[str, str, Any], logs: list[dict[str, Any]] = LOGS, **options: Any) -> Any:
    means = LoggedMeans(logs)
    with metrics.aggregate() as found:
        for name, key, count in calls:
            means.log(name, key, count, **options)
    return found


def test_sums_are_divided_by_the_counts_of_all_batches() -> None:
    means = LoggedMeans(LOGS)
    assert (float(means.total("loss")), means.total("tokens"), means.total("others")) == (9, 9, 3)
    assert means.total("nosuch") == 0
    assert [means.has(name) for name in ("loss", "other", "nosuch")] == [True, True, False]
    found = logged(("loss", "loss", means.total("tokens")), ("second", "other", means.total("others")))
    assert found["loss"].avg == pytest.approx(1)
    assert found["second"].avg == pytest.approx(1)
    assert float(found["loss"].count) == 9


def test_unit_and_digits() -> None:
    found = logged(("bits", "loss", 9), unit=BIT, digits=1)
    assert found["bits"].avg == pytest.approx(1 / math.log(2))
    assert found.get_smoothed_value("bits") == 1.4


@pytest.mark.parametrize("count", [0, torch.tensor(0), torch.tensor(0.0)])
def test_nothing_counted_is_zero_and_weighs_nothing(count: Any) -> None:
    found = logged(("mean", "loss", count))
    assert found.get_smoothed_value("mean") == 0
    with metrics.aggregate() as epoch:
        LoggedMeans(LOGS).log("mean", "loss", 9)
        LoggedMeans([{}]).log("mean", "loss", count)
    assert epoch["mean"].avg == pytest.approx(1)
    assert logged(("mean", "loss", count), logs=[])["mean"].avg == 0
