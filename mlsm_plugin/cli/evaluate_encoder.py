"""``mlsm evaluate encoder``: which of several encoders is better, with and without labels."""

import argparse
from typing import TYPE_CHECKING

from mlsm_plugin.cli.settings_flags import Parser, add_settings, settings_of
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
    add_labelled(parser)
    similarity = "files of pairs of texts with a score: score, tab, text, tab, text"
    parser.add_argument("--sts", nargs="+", default=[], metavar="FILE", help=similarity)
    parser.add_argument("--output", metavar="JSON", help="file for the same figures as JSON")
    add_settings(parser, QualitySettings)
    add_settings(parser, ModelRun, only=("device", "batch_tokens"))


def add_labelled(parser: Parser) -> None:
    """Add the option for linear probes."""
    labelled = "files for a linear probe: label, tab, text (and tab, text for pairs); can be given several times"
    parser.add_argument("--labelled", nargs=2, action="append", default=[], metavar=("TRAIN", "TEST"), help=labelled)


def run_encoder(args: argparse.Namespace, extra: list[str]) -> int:
    """Measure each model, and print a table with a row for each."""
    from mlsm_plugin.core.files.atomic_files import write_json
    from mlsm_plugin.core.files.output_files import check_output
    from mlsm_plugin.evaluation.encoder_quality import bm25_gains, evaluate_encoder, read_evaluation_data
    from mlsm_plugin.evaluation.quality_settings import QualitySettings
    from mlsm_plugin.evaluation.quality_tables import contradictions, record_of, table_of
    from mlsm_plugin.evaluation.sentence_encoders import check_encoder_names, open_sentence_encoder

    settings: QualitySettings = settings_of(QualitySettings, args)
    run: ModelRun = settings_of(ModelRun, args)
    if args.output:
        labelled = [path for paths in args.labelled for path in paths]
        check_output(args.output, [*args.models, *args.text, *labelled, *args.sts])
    names = list(dict.fromkeys(args.models))
    check_encoder_names(names)
    data = read_evaluation_data(args.text, args.labelled, args.sts, settings)
    bm25_measure = None if data.retrieval is None else bm25_gains(data.retrieval)
    measures: dict[str, dict[str, Measure]] = {}
    parameters: dict[str, int] = {}
    for name in names:
        encoder = open_sentence_encoder(name, run.device)
        parameters[name] = encoder.parameters
        measures[name] = evaluate_encoder(encoder, data, batch_tokens=run.batch_tokens)
    rows = dict(measures)
    if data.retrieval is not None and bm25_measure is not None:
        print(f"{len(data.retrieval.queries):,} sentences, {len(data.retrieval.passages):,} passages")
        rows["BM25"] = {"nDCG@10": bm25_measure}
    record = record_of(rows, parameters)
    for line in [*table_of(record), *contradictions(measures)]:
        print(line)
    if args.output:
        write_json(args.output, record)
        print(f"figures: {args.output}")
    return 0
