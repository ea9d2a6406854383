"""``mlsm evaluate``: judge a masked LM on minimal pairs, or a dictionary on a split."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from mlsm_plugin.cli.settings_flags import add_coder_flags, add_settings, coder_of, settings_of
from mlsm_plugin.evaluation.settings import EvaluationSettings
from mlsm_plugin.hidden_states.settings import ModelRun
from mlsm_plugin.tokenization.unknown_tokens import KnownText

if TYPE_CHECKING:
    from mlsm_plugin.sparse_coding.coder import SparseCoder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two actions, each with its options."""
    add = actions_of(parser)
    add_pairs_options(add("pairs", "measure the accuracy of a masked LM on minimal pairs (BLiMP)", run_pairs))
    add_dictionary_options(
        add("dictionary", "judge its reconstructions, and what a masked LM loses by them", run_dictionary)
    )


def add_dictionary_options(parser: argparse.ArgumentParser) -> None:
    """Options of ``mlsm evaluate dictionary``."""
    parser.epilog = "docs/dictionaries.md explains the figures."
    parser.add_argument("dictionary", metavar="DICT_DIR", help="folder of the dictionary or sparse autoencoder")
    add_data(parser, "binarized dataset")
    add_auxiliary(parser)
    parser.add_argument("--split", default="valid", help="split to evaluate on; it should not be the one learned from")
    parser.add_argument("--output", metavar="JSON", help="file for the same figures as JSON")
    add_settings(parser, EvaluationSettings, defaults=ITS_LAYER)
    add_coder_flags(parser)
    add_block_options(parser, OF_THE_DICTIONARY)


def run_dictionary(args: argparse.Namespace, extra: list[str]) -> int:
    """Judge the reconstructions, then the loss of the masked LM, and print and write the figures."""
    from mlsm_plugin.auxiliary.coder_fit import fitting_encoder, fitting_fingerprint, fitting_layer
    from mlsm_plugin.data.token_blocks import split_fingerprint
    from mlsm_plugin.evaluation.dictionary_quality import evaluate_reconstruction
    from mlsm_plugin.files.atomic_files import check_output_file, write_json
    from mlsm_plugin.hidden_states.block_reader import BlockReader

    if args.output:
        check_output_file(args.output)
    coder = coder_of(args)
    settings: EvaluationSettings = settings_of(
        *(EvaluationSettings, args),
        layer=fitting_layer(coder, getattr(args, "layer", None), folder=args.dictionary, option="--layer"),
        blocks=block_settings(args, args.auxiliary, coder.meta.get("blocks")),
    )
    reader = BlockReader(args.data_bin, args.split, settings.blocks)
    fingerprint = fitting_fingerprint(args.auxiliary, coder, settings.layer)
    encoder = fitting_encoder(args.auxiliary, args.data_bin, coder, settings)
    quality, inexact = evaluate_reconstruction(reader, encoder, coder, settings)
    del encoder
    loss, why_no_loss = _loss(args, reader, coder, settings)
    record = {
        "dictionary": {"fingerprint": coder.fingerprint, "n_atoms": coder.num_atoms, **coder.settings()},
        "auxiliary_fingerprint": fingerprint,
        "layer": settings.layer,
        "fp16": args.fp16,
        "blocks": asdict(settings.blocks),
        "split": args.split,
        "split_fingerprint": split_fingerprint(f"{args.data_bin}/{args.split}"),
        "seed": args.seed,
        "inexact_codes": inexact,
        "reconstruction": quality,
        "loss": loss,
        "why_no_loss": why_no_loss,
    }
    _print(record)
    if inexact:
        print(f"mlsm: warning: {inexact} codes do not reach --tolerance; the figures are theirs", file=sys.stderr)
    if args.output:
        write_json(args.output, record)
        print(f"figures: {args.output}")
    return 0


def _loss(
    args: argparse.Namespace, reader: Any, coder: SparseCoder, settings: EvaluationSettings
) -> tuple[dict[str, Any] | None, str | None]:
    """The figures of the loss, or None and why there are none."""
    from mlsm_plugin.evaluation.dictionary_quality import evaluate_loss
    from mlsm_plugin.evaluation.masked_batches import MASKED_SHARE
    from mlsm_plugin.hidden_states.masked_lms import NoMaskedLmError, open_masked_lm

    try:
        model = open_masked_lm(args.auxiliary, args.data_bin, device=args.device, fp16=args.fp16)
    except NoMaskedLmError as error:
        return None, str(error)
    figures = evaluate_loss(reader, model, coder, settings)
    return {**figures, "masked_share": MASKED_SHARE, "ablation": "zero"}, None


def _print(record: dict[str, Any]) -> None:
    dictionary, figures = record["dictionary"], {**record["reconstruction"], **(record["loss"] or {})}
    print(f"{dictionary['n_atoms']} atoms, layer {record['layer']}, split {record['split']}, seed {record['seed']}")
    width = max(map(len, figures))
    for name, value in figures.items():
        shown = "not defined" if value is None else f"{value:,}" if isinstance(value, int) else value
        print(f"{name:{width}}  {shown:.4f}" if isinstance(shown, float) else f"{name:{width}}  {shown}")
    if record["loss"] is None:
        print(f"no masked-LM loss: {record['why_no_loss']}")


def add_pairs_options(parser: argparse.ArgumentParser) -> None:
    """Options of ``mlsm evaluate pairs``."""
    parser.epilog = (
        "A pair is right if the good sentence has the higher pseudo-log-likelihood. Scores that differ by less than "
        "0.001 nats, which is more than float noise, are a tie. A tie does not count as right."
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="JSONL",
        help="minimal pairs; each line has sentence_good and sentence_bad, as in BLiMP",
    )
    parser.add_argument("--output", metavar="JSON", help="file for the same figures as JSON")
    add_settings(parser, KnownText)
    add_settings(parser, ModelRun, only=("device", "batch_tokens"))


def run_pairs(args: argparse.Namespace, extra: list[str]) -> int:
    """Score the pairs, and print the accuracy on each file and on all of them."""
    from mlsm_plugin.evaluation.minimal_pairs import check_head_was_trained, compare_pairs, read_pairs
    from mlsm_plugin.files.atomic_files import check_output_file, write_json
    from mlsm_plugin.hidden_states.devices import default_device
    from mlsm_plugin.hub import from_pretrained
    from mlsm_plugin.tokenization.unknown_tokens import ANOTHER_TOKENIZER, check_known

    settings_of(ModelRun, args)
    settings_of(KnownText, args)
    if args.output:
        check_output_file(args.output)
    files = {path: read_pairs(path) for path in args.input}
    model = from_pretrained(args.checkpoint)
    check_head_was_trained(model)
    model.to(default_device(args.device))
    for path, pairs in files.items():
        check_known(
            (text for pair in pairs for text in (pair.good, pair.bad)), model.bpe, model.task.source_dictionary,
            args.max_unk_rate, where=path, remedy=ANOTHER_TOKENIZER,
        )  # fmt: skip
    pairs = [pair for of_file in files.values() for pair in of_file]
    verdicts = compare_pairs(model, pairs, batch_tokens=args.batch_tokens, progress=True)
    of_files = iter(verdicts)
    figures = {path: _pair_figures(list(islice(of_files, len(own)))) for path, own in files.items()}
    width = max(len(Path(path).name) for path in files)
    for path, own in figures.items():
        print(f"{Path(path).name.ljust(width)}  {_shown_pairs(own)}")
    overall = _pair_figures(verdicts)
    mean = sum(own["accuracy"] for own in figures.values()) / len(figures)
    print(f"{'all'.ljust(width)}  {_shown_pairs(overall)}  (mean of the files {mean:.4f})")
    if args.output:
        write_json(args.output, {"files": figures, **overall, "mean_of_files": mean})
    return 0


def _pair_figures(verdicts: list[int]) -> dict[str, Any]:
    """The figures of some pairs from what ``compare_pairs`` found."""
    return {"pairs": len(verdicts), "accuracy": verdicts.count(1) / len(verdicts), "ties": verdicts.count(0)}


def _shown_pairs(figures: dict[str, Any]) -> str:
    return f"{figures['pairs']:6,} pairs  accuracy {figures['accuracy']:.4f}  ties {figures['ties']:,}"
