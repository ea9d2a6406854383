"""``mlsm evaluate``: compare encoders, judge a masked LM on minimal pairs, or a dictionary on a split."""

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlsm_plugin.cli.actions import actions_of
from mlsm_plugin.cli.coding_options import (
    ITS_LAYER,
    OF_THE_DICTIONARY,
    add_auxiliary,
    add_block_options,
    add_checkpoint,
    add_data,
    block_settings,
)
from mlsm_plugin.cli.evaluate_encoder import add_encoder_options, run_encoder
from mlsm_plugin.cli.settings_flags import add_coder_flags, add_settings, coder_of, settings_of
from mlsm_plugin.core.hidden_states.settings import ModelRun
from mlsm_plugin.core.text.unknown_tokens import KnownText
from mlsm_plugin.evaluation.settings import EvaluationSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = actions_of(parser)
    add_pairs_options(add("pairs", "measure the accuracy of a masked LM on minimal pairs (BLiMP)", run_pairs))
    add_encoder_options(add("encoder", "compare encoders by retrieval, masked words, probes, similarity", run_encoder))
    add_dictionary_options(
        add("dictionary", "judge its reconstructions, and what a masked LM loses by them", run_dictionary)
    )


def needs_fairseq(args: argparse.Namespace) -> bool:
    """False only for `evaluate encoder` without fairseq checkpoints."""
    if args.action != "encoder":
        return True
    from mlsm_plugin.evaluation.sentence_encoders import is_hugging_face_encoder

    return not all(is_hugging_face_encoder(name) for name in args.models)


def add_dictionary_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "docs/dictionaries.md explains the figures."
    parser.add_argument("dictionary", metavar="DICT_DIR", help="folder of the dictionary or sparse autoencoder")
    add_data(parser, "binarized dataset")
    add_auxiliary(parser)
    parser.add_argument(
        "--split",
        default="valid",
        help="split to evaluate on; it should not be the one that the dictionary was learned from",
    )
    parser.add_argument("--output", metavar="JSON", help="file for the same figures as JSON")
    add_settings(parser, EvaluationSettings, defaults=ITS_LAYER)
    add_coder_flags(parser)
    add_block_options(parser, OF_THE_DICTIONARY)


def run_dictionary(args: argparse.Namespace, extra: list[str]) -> int:
    """Evaluate the reconstructions and the masked-LM loss; print the figures, and write them if asked."""
    from mlsm_plugin.core.coding.coder_fit import fitting_layer
    from mlsm_plugin.core.files.atomic_files import write_json
    from mlsm_plugin.core.files.output_files import check_output
    from mlsm_plugin.evaluation.dictionary_quality import evaluate_dictionary

    if args.output:
        check_output(args.output, [args.dictionary, args.data_bin, args.auxiliary])
    coder = coder_of(args)
    settings = settings_of(
        EvaluationSettings,
        args,
        layer=fitting_layer(coder, getattr(args, "layer", None), folder=args.dictionary, option="--layer"),
        blocks=block_settings(args, args.auxiliary, coder.meta.get("blocks")),
    )
    record = evaluate_dictionary(args.data_bin, args.split, args.auxiliary, coder, settings)
    dictionary = record["dictionary"]
    figures = {**record["reconstruction"], **(record["loss"] or {})}
    print(f"{dictionary['n_atoms']} atoms, layer {record['layer']}, split {record['split']}, seed {record['seed']}")
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:{width}}  {_shown(value)}")
    if record["loss"] is None:
        print(f"no masked-LM loss: {record['why_no_loss']}")
    if inexact := record["inexact_codes"]:
        print(f"mlsm: warning: {inexact} codes do not reach --tolerance; the figures include them", file=sys.stderr)
    if args.output:
        write_json(args.output, record)
        print(f"figures: {args.output}")
    return 0


def _shown(figure: float | str | None) -> str:
    if figure is None:
        return "not defined"
    if isinstance(figure, str):
        return figure
    return f"{figure:,}" if isinstance(figure, int) else f"{figure:.4f}"


def add_pairs_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A pair is right if the good sentence has the higher pseudo-log-likelihood. Scores that differ by less than "
        "0.001 nats, which is more than float noise, are a tie. A tie does not count as right."
    )
    models = "models: checkpoints, their folders, or Hugging Face folders (hf:NAME: from the hub); several make one "
    "table"
    add_checkpoint(parser, nargs="+", metavar="MODEL", help=models)
    text = "minimal pairs, in BLiMP's or EWoK's JSON lines; a folder stands for the *.jsonl(.gz) in it and below"
    parser.add_argument("--input", nargs="+", required=True, metavar="JSONL", help=text)
    parser.add_argument("--output", metavar="JSON", help="file for the same figures as JSON, for `mlsm plot`")
    add_settings(parser, KnownText)
    add_settings(parser, ModelRun, only=("device", "batch_tokens"))


def run_pairs(args: argparse.Namespace, extra: list[str]) -> int:
    """Score the pairs; print one model's accuracies in rows, or a table with a row for each of several models."""
    from mlsm_plugin.core.files.atomic_files import write_json
    from mlsm_plugin.core.files.output_files import check_output
    from mlsm_plugin.evaluation.minimal_pairs import evaluate_pairs, pair_files, read_pairs
    from mlsm_plugin.evaluation.pair_models import is_library_model, open_pair_model
    from mlsm_plugin.reports.pair_accuracies import accuracies_of, words_seen_by

    settings_of(ModelRun, args)
    settings_of(KnownText, args)
    inputs = pair_files(args.input)
    if args.output:
        check_output(args.output, [*inputs, *args.checkpoint])
    files = {path: read_pairs(path) for path in inputs}
    models = sorted(dict.fromkeys(args.checkpoint), key=lambda name: words_seen_by(name) or math.inf)
    for name in models:
        is_library_model(name)  # fails early if a model does not exist
    figures_of_models: dict[str, Mapping[str, Any]] = {}
    width = max(map(len, ["model", *models]))
    for name in models:
        model = open_pair_model(name, args.device)
        figures = evaluate_pairs(model, files, max_unk_rate=args.max_unk_rate, batch_tokens=args.batch_tokens)
        if len(models) == 1:
            _print_rows(figures)
        else:
            columns = {column.rjust(6): value for column, value in accuracies_of(figures).items()}
            if not figures_of_models:
                print("  ".join(["model".ljust(width), *columns]))
            cells = (f"{value:.4f}".rjust(len(column)) for column, value in columns.items())
            print("  ".join([name.ljust(width), *cells]), flush=True)
        figures_of_models[name] = {"words": words_seen_by(name), **figures}
    if args.output:
        write_json(args.output, figures if len(models) == 1 else {"models": figures_of_models})
    return 0


def _print_rows(figures: Mapping[str, Any]) -> None:
    """Print a row for each file, each field and all pairs, then the means of the folders."""
    rows = [(Path(path).name, file_figures) for path, file_figures in figures["files"].items()]
    rows += [*figures["fields"].items(), ("all", figures)]
    width = max(len(name) for name, _ in rows)
    for name, row in rows:
        mean = f"  (mean of the files {figures['mean_of_files']:.4f})" if row is figures else ""
        cells = f"{row['pairs']:6,} pairs  accuracy {row['accuracy']:.4f}  ties {row['ties']:,}{mean}"
        print(f"{name.ljust(width)}  {cells}")
    for folder, folder_figures in figures["folders"].items():
        print(f"{folder}: mean of {folder_figures['tasks']:,} tasks {folder_figures['accuracy']:.4f}")
    if len(figures["folders"]) > 1:
        print(f"mean of the folders {figures['mean']:.4f}")
