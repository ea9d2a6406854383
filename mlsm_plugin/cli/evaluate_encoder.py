"""``mlsm evaluate encoder``: which of several encoders is better, with and without labels."""

import argparse
import sys
from typing import TYPE_CHECKING

from mlsm_plugin.cli.settings_flags import add_settings, settings_of
from mlsm_plugin.core.hidden_states.settings import ModelRun

if TYPE_CHECKING:
    from mlsm_plugin.evaluation.encoder_quality import Measure

EPILOG = (
    "nDCG@10: each sentence has to find the passage of the text that it was taken from, by the cosine of their "
    "vectors (the mean of the last hidden states, unless a sentence-transformers folder defines another); 1 is best, "
    "and the row BM25 shows what words alone find. bits/token and bits/word: cross entropy of masked words, with all "
    "tokens of a word masked; lower is better, and bits/word can be compared between vocabularies. Others: accuracy "
    "of a linear probe (--labelled), or Spearman's correlation (--sts). With several models, each difference from the "
    "first has a 95 % interval, marked with * if 0 is not in it. Example: mlsm evaluate encoder bert-base out/model "
    "--text held_out.txt --labelled train.tsv test.tsv"
)


def add_encoder_options(parser: argparse.ArgumentParser) -> None:
    from mlsm_plugin.evaluation.quality_settings import QualitySettings

    parser.epilog = EPILOG
    models = "Hugging Face folders, folders of fairseq runs, checkpoints, or hub names (hf:NAME)"
    parser.add_argument("models", nargs="+", metavar="MODEL", help=models)
    text = "held-out text: one sentence a line, blank lines between documents"
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help=text)
    labelled = "files for a linear probe: label, tab, text (and tab, text for pairs); can be given several times"
    parser.add_argument("--labelled", nargs=2, action="append", default=[], metavar=("TRAIN", "TEST"), help=labelled)
    similarity = "files of pairs of texts with a score: score, tab, text, tab, text"
    parser.add_argument("--sts", nargs="+", default=[], metavar="FILE", help=similarity)
    parser.add_argument("--output", metavar="JSON", help="file for the same figures as JSON")
    add_settings(parser, QualitySettings)
    add_settings(parser, ModelRun, only=("device", "batch_tokens"))


def run_encoder(args: argparse.Namespace, extra: list[str]) -> int:
    """Measure each model, and print a table with a row for each."""
    from mlsm_plugin.core.files.atomic_files import write_json
    from mlsm_plugin.core.files.output_files import check_output
    from mlsm_plugin.evaluation.encoder_quality import bm25_gains, evaluate_encoder, read_evaluation_data
    from mlsm_plugin.evaluation.quality_settings import QualitySettings
    from mlsm_plugin.evaluation.sentence_encoders import check_encoder_names, open_sentence_encoder

    settings: QualitySettings = settings_of(QualitySettings, args)
    run: ModelRun = settings_of(ModelRun, args)
    if args.output:
        labelled = [path for paths in args.labelled for path in paths]
        check_output(args.output, [*args.models, *args.text, *labelled, *args.sts])
    names = list(dict.fromkeys(args.models))
    check_encoder_names(names)
    data = read_evaluation_data(args.text, args.labelled, args.sts, settings)
    of_words = None if data.retrieval is None else bm25_gains(data.retrieval)
    measures: dict[str, dict[str, Measure]] = {}
    parameters: dict[str, int] = {}
    for name in names:
        encoder = open_sentence_encoder(name, run.device)
        parameters[name] = encoder.parameters
        measures[name] = evaluate_encoder(encoder, data, batch_tokens=run.batch_tokens)
    rows = dict(measures)
    if data.retrieval is not None and of_words is not None:
        print(f"{len(data.retrieval.queries):,} sentences, {len(data.retrieval.passages):,} passages")
        rows["BM25"] = {"nDCG@10": of_words}
    _print_table(rows, parameters)
    for line in contradictions(measures):
        print(line)
    if args.output:
        write_json(args.output, _record(rows, parameters, names[0]))
        print(f"figures: {args.output}")
    return 0


def contradictions(measures: "dict[str, dict[str, Measure]]") -> list[str]:
    """A line for each model that predicts masked words better than the first, and retrieves worse."""
    first, *others = measures
    lines = []
    for name in others:
        both = measures[first], measures[name]
        if not all({"nDCG@10", "bits/word"} <= model.keys() for model in both):
            continue
        _, highest_bits = measures[name]["bits/word"].difference(measures[first]["bits/word"])
        _, highest_gain = measures[name]["nDCG@10"].difference(measures[first]["nDCG@10"])
        if highest_bits < 0 and highest_gain < 0:
            lines.append(
                f"{name} predicts masked words better than {first}, but its sentence vectors find fewer passages: it "
                "got worse at retrieval and similarity"
            )
    return lines


def _print_table(rows: "dict[str, dict[str, Measure]]", parameters: dict[str, int]) -> None:
    columns = list(dict.fromkeys(name for measures in rows.values() for name in measures))
    reference = next(iter(rows.values()))
    table = [["model", "parameters", *columns]]
    for name, measures in rows.items():
        size = f"{parameters[name] / 1e6:.1f} M" if name in parameters else ""
        table.append([name, size, *(_cell(measures.get(column), reference.get(column)) for column in columns)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        print("  ".join(padded).rstrip(), flush=True)
    sys.stdout.flush()


def _cell(measure: "Measure | None", reference: "Measure | None") -> str:
    if measure is None:
        return "-"
    figure = f"{measure.figure:.3f}"
    if reference is None or measure is reference or len(reference.values) != len(measure.values):
        return figure
    low, high = measure.difference(reference)
    return f"{figure} ({low:+.3f} to {high:+.3f}){'*' if low > 0 or high < 0 else ' '}"


def _record(rows: "dict[str, dict[str, Measure]]", parameters: dict[str, int], first: str) -> dict[str, object]:
    """The figures of all rows as JSON, with the interval of each difference from the first model."""
    record: dict[str, object] = {}
    for name, measures in rows.items():
        figures: dict[str, object] = {}
        for column, measure in measures.items():
            reference = rows[first].get(column)
            comparable = name != first and reference is not None and len(reference.values) == len(measure.values)
            interval = list(measure.difference(reference)) if comparable and reference is not None else None
            figures[column] = {"figure": measure.figure, "difference_from_first": interval}
        record[name] = {"parameters": parameters.get(name), "measures": figures}
    return record
