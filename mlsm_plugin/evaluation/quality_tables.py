"""Figures of several encoders as JSON and as a table, with intervals of the differences from the first encoder."""

from collections.abc import Mapping

from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.evaluation.encoder_quality import Measure

RETRIEVAL = "nDCG@10"
WORDS = "bits/word"
NOT_MEASURED = "-"


def record_of(rows: Mapping[str, Mapping[str, Measure]], parameters: Mapping[str, int]) -> JsonObject:
    """The figures of all rows as JSON, each with the interval of its difference from the first row."""
    reference = next(iter(rows.values()))
    record: JsonObject = {}
    for name, measures in rows.items():
        figures = {}
        for column, measure in measures.items():
            interval = None if measures is reference else _difference(measure, reference.get(column))
            figures[column] = {"figure": measure.figure, "difference_from_first": interval}
        record[name] = {"parameters": parameters.get(name), "measures": figures}
    return record


def table_of(record: Mapping[str, JsonObject]) -> list[str]:
    """The lines of a table with a row for each model of the ``record`` of :func:`record_of`."""
    columns = list(dict.fromkeys(name for entry in record.values() for name in entry["measures"]))
    table = [["model", "parameters", *columns]]
    for name, entry in record.items():
        size = f"{entry['parameters'] / 1e6:.1f} M" if entry["parameters"] else ""
        table.append([name, size, *(_cell(entry["measures"].get(column)) for column in columns)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for cells in table:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines


def contradictions(measures: Mapping[str, Mapping[str, Measure]]) -> list[str]:
    """A line for each model that predicts masked words better than the first model, but is worse at retrieval."""
    first, *others = measures
    return [
        f"{name} predicts masked words better than {first}, but its sentence vectors find fewer passages: it got worse "
        "at retrieval and similarity"
        for name in others
        if is_lower(measures[name], measures[first], WORDS) and is_lower(measures[name], measures[first], RETRIEVAL)
    ]


def is_lower(measures: Mapping[str, Measure], reference: Mapping[str, Measure], name: str) -> bool:
    """Whether a figure is significantly lower than in the reference: the 95 % interval is below 0."""
    if name not in measures or name not in reference:
        return False
    _, highest = measures[name].difference(reference[name])
    return highest < 0


def _difference(measure: Measure, reference: Measure | None) -> list[float] | None:
    if reference is None or len(reference.values) != len(measure.values):
        return None
    return list(measure.difference(reference))


def _cell(figures: JsonObject | None) -> str:
    if figures is None:
        return NOT_MEASURED
    figure = f"{figures['figure']:.3f}"
    if figures["difference_from_first"] is None:
        return figure
    low, high = figures["difference_from_first"]
    return f"{figure} ({low:+.3f} to {high:+.3f}){'*' if low > 0 or high < 0 else ' '}"
