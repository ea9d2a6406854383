"""Figures of several models in a table, and what two figures that contradict each other mean."""

from __future__ import annotations

import numpy as np

from mlsm_plugin.evaluation.encoder_quality import Measure
from mlsm_plugin.evaluation.quality_tables import contradictions, record_of, table_of


def measures(gain: float, bits: float) -> dict[str, Measure]:
    noise = np.linspace(-0.1, 0.1, 50)
    return {
        "nDCG@10": Measure(gain + noise, np.ones(50)),
        "bits/word": Measure(bits + noise, np.ones(50), higher_is_better=False),
    }


def test_a_loss_that_falls_while_retrieval_falls_is_said() -> None:
    models = {"before": measures(0.5, 9), "after": measures(0.4, 8), "better": measures(0.6, 8)}
    assert [line.split()[0] for line in contradictions(models)] == ["after"]


def test_a_row_shows_its_difference_and_what_was_not_measured() -> None:
    rows = {"before": {"nDCG@10": measures(0.5, 9)["nDCG@10"]}, "after": measures(0.4, 8)}
    record = record_of(rows, {"before": 1_500_000, "after": 1_500_000})
    assert [line.split() for line in table_of(record)] == [
        ["model", "parameters", "nDCG@10", "bits/word"],
        ["before", "1.5", "M", "0.500", "-"],
        ["after", "1.5", "M", "0.400", "(-0.100", "to", "-0.100)*", "8.000"],
    ]
