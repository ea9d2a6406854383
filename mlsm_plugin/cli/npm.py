"""``mlsm npm``: retrieval with an NPM model: build a datastore, fill masks, classify texts."""

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from mlsm_plugin.cli.actions import actions_of
from mlsm_plugin.cli.coding_options import (
    add_block_options,
    add_checkpoint,
    add_data,
    add_device,
    add_output,
    add_share_options,
    block_settings,
    check_positive,
)
from mlsm_plugin.cli.settings_flags import add_settings, refuse_changed, settings_of
from mlsm_plugin.core.files.settings import options_of
from mlsm_plugin.core.hidden_states.settings import ModelRun
from mlsm_plugin.core.text.unknown_tokens import KnownText
from mlsm_plugin.retrieval.key_index import INDEX_KINDS, check_installed
from mlsm_plugin.retrieval.settings import MOST_OCCURRENCES, DatastoreSettings, FillingSettings

if TYPE_CHECKING:
    from mlsm_plugin.fairseq_plugin.compat.model_parts import RobertaHub
    from mlsm_plugin.retrieval.phrase_datastore import PhraseDatastore

PHRASES = 5  # printed for each mask
OF_SOURCES = ("contexts", "context_tokens")  # which sources of a phrase are printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = actions_of(parser)
    _add_datastore_options(add("datastore", "build a datastore of a corpus", _build))
    _add_fill_options(add("fill", "fill masks with phrases of a datastore", _fill))
    _add_classify_options(add("classify", "classify texts zero-shot, by retrieval or by the masked-LM head", _classify))


def _add_datastore_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "The same command resumes a stopped build."
    add_data(parser, "binarized dataset of the corpus")
    add_checkpoint(parser)
    add_output(parser, "folder of the datastore")
    text = "file of words, one per line; those that are a single token get no key"
    parser.add_argument("--drop-stopwords", metavar="FILE", help=text)
    add_settings(parser, DatastoreSettings)
    add_block_options(parser)
    text = (
        "kind of index. none: exact, each search reads all keys; flat: exact; ivfpq: approximate, small and fast. "
        "flat and ivfpq need faiss (pip install 'mlsm_plugin[retrieval]'), and can be added to a complete datastore"
    )
    parser.add_argument("--index", default="none", choices=INDEX_KINDS, help=text)
    add_settings(parser, ModelRun)
    add_share_options(parser)


def _build(args: argparse.Namespace, extra: list[str]) -> int:
    """Print an estimate, then build the missing parts of the datastore."""
    import torch

    from mlsm_plugin.core.files.process_rank import process_rank
    from mlsm_plugin.retrieval.datastore_builder import DatastoreBuilder, read_stopwords
    from mlsm_plugin.retrieval.key_index import KeyIndex
    from mlsm_plugin.retrieval.phrase_datastore import PhraseDatastore

    settings_of(ModelRun, args)
    checkpoint = Path(args.checkpoint)
    for folder in (Path(args.data_bin), checkpoint if checkpoint.is_dir() else checkpoint.parent):
        if Path(args.output).resolve() == folder.resolve():
            raise ValueError(f"--output {args.output} holds the dataset or the model; name a new folder")
    if args.index != "none":
        check_installed()
    process = process_rank(args.process_index, args.num_processes, os.environ)
    if args.threads:
        torch.set_num_threads(args.threads)
    blocks = block_settings(args, args.checkpoint)
    stopwords = read_stopwords(args.drop_stopwords)
    settings = settings_of(DatastoreSettings, args, blocks=blocks, stopwords=stopwords)
    builder = DatastoreBuilder(
        args.data_bin,
        args.checkpoint,
        args.output,
        settings,
        device=args.device or process.device(torch.cuda.device_count()),
        fp16=args.fp16,
        batch_tokens=args.batch_tokens,
    )
    index = KeyIndex.open(Path(args.output)) if builder.writer.is_complete else None
    if builder.writer.is_complete and args.index in ("none", index and index.kind):
        print(f"nothing to do, {args.output} is complete")
        return 0
    print(builder.estimate(args.index), flush=True)
    start = time.perf_counter()
    if not builder.build(process):
        print(
            f"process {process.rank} of {process.world_size} is done; shards of other processes are missing (if one "
            "failed, run the same command again)"
        )
        return 0
    store = PhraseDatastore(args.output)
    if args.index != "none":
        store.build_index(args.index)
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in store.directory.glob("[!.]*"))
    print(
        f"{args.output}: {len(store):,} keys of {store.meta['num_tokens']:,} tokens, {store.dim} wide, "
        f"{size / 1e6:.1f} MB ({size / store.meta['num_tokens']:.0f} bytes a token), {seconds:.1f} s"
    )
    return 0


def _add_retrieval_options(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument(
        "--datastore", metavar="DIR", help="datastore that `mlsm npm datastore` made with this checkpoint"
    )
    add_device(parser)


def _add_fill_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="texts with <mask>, each in quotes")
    _add_retrieval_options(parser)
    text = f"phrases to print for each mask (default: {PHRASES})"
    parser.add_argument("--topk", type=int, metavar="N", help=text)
    add_settings(parser, FillingSettings)
    text = "append N phrases to each text, one after the other, instead of filling its masks"
    parser.add_argument("--continue", dest="steps", type=int, default=0, metavar="N", help=text)


def _fill(args: argparse.Namespace, extra: list[str]) -> int:
    """Print the phrases of each mask with their sources."""
    from mlsm_plugin.fairseq_plugin.text.masked_text import MASK
    from mlsm_plugin.retrieval.phrase_filling import PhraseFiller

    check_positive(args, "topk")
    if args.steps < 0:
        raise ValueError(f"--continue must not be negative, got {args.steps}")
    if args.steps:
        defaults = {name: options_of(FillingSettings)[name].default for name in OF_SOURCES}
        refuse_changed(args, {"topk": None, **defaults}, "not with --continue, which appends the best phrase alone")
    settings = settings_of(FillingSettings, args)
    if args.datastore is None:
        raise ValueError("--datastore is required; make one with `mlsm npm datastore`")
    interface, store = _open(args)
    assert store is not None
    filler = PhraseFiller(interface, store, settings)
    for text in args.texts:  # a bad text is refused before anything is printed
        filler.encode(f"{text} {MASK}" if args.steps else text)
    if args.steps:
        texts = []
        for text in args.texts:
            texts.append(filler.continue_text(text, steps=args.steps))
            print(texts[-1])
        _warn_of_cuts(sum(map(filler.was_cut, texts)), len(texts))
        return 0
    _warn_of_cuts(sum(map(filler.was_cut, args.texts)), len(args.texts))
    for text in args.texts:
        print(text)
        for number, candidates in enumerate(filler.fill(text, topk=args.topk or PHRASES), start=1):
            print(f"  mask {number}" + ("" if candidates else ": no phrase; try more --neighbors, or --any-pieces"))
            for candidate in candidates:
                print(f"    {candidate.score:.4f}  {candidate.phrase}")
                for context in candidate.contexts:
                    print(f"            {context}")
    return 0


def _warn_of_cuts(number: int, total: int) -> None:
    """Warn on standard error if the model sees only a part of some texts."""
    if number:
        what = f"{number} of {total} texts are longer than the model's positions and are cut around the mask"
        print(f"mlsm: warning: {what}", file=sys.stderr)


def _open(args: argparse.Namespace) -> "tuple[RobertaHub, PhraseDatastore | None]":
    """The model on its device, and the datastore; None if the command line names no datastore."""
    from mlsm_plugin.core.machine.devices import default_device
    from mlsm_plugin.hub import checkpoint_of, from_pretrained
    from mlsm_plugin.retrieval.phrase_datastore import PhraseDatastore

    checkpoint = checkpoint_of(args.checkpoint)
    store = None
    if args.datastore is not None:
        store = PhraseDatastore(args.datastore)
        store.check_belongs_to(checkpoint)
    interface = from_pretrained(checkpoint)
    interface.to(default_device(args.device))
    return interface, store


def _add_classify_options(parser: argparse.ArgumentParser) -> None:
    _add_retrieval_options(parser)
    parser.add_argument(
        "--template", required=True, metavar="TEXT", help="sentence with {} for the text and one <mask>"
    )
    text = "words for the labels, one line per label: label TAB word, word, ..."
    parser.add_argument("--verbalizer", required=True, metavar="FILE", help=text)
    parser.add_argument(
        "--input", required=True, metavar="TSV", help="texts to classify; lines are: label TAB text, or text alone"
    )
    parser.add_argument("--header", action="store_true", help="skip the first line of --input, which names its columns")
    add_settings(parser, KnownText)
    parser.add_argument("--output", metavar="TSV", help="file to write: predicted label, its probability, text")
    parser.add_argument(
        "--parametric", action="store_true", help="use the softmax of the masked-LM head instead of retrieval"
    )
    text = f"with --datastore: largest number of occurrences of a word to compare with (default: {MOST_OCCURRENCES:,})"
    parser.add_argument("--max-occurrences", type=int, metavar="N", help=text)


def _classify(args: argparse.Namespace, extra: list[str]) -> int:
    """Predict, and print the accuracy if the input has labels."""
    from mlsm_plugin.core.files.atomic_files import atomic_open
    from mlsm_plugin.core.files.output_files import check_output
    from mlsm_plugin.core.text.text_files import check_text
    from mlsm_plugin.fairseq_plugin.text.masked_text import MASK
    from mlsm_plugin.retrieval.zero_shot import classify, read_texts, read_verbalizer

    check_positive(args, "max_occurrences")
    settings_of(KnownText, args)
    if args.output:
        inputs = (args.input, args.verbalizer, args.checkpoint, args.datastore)
        check_output(args.output, [path for path in inputs if path is not None])
    check_text(args.template, "--template")
    if args.template.count("{}") != 1 or args.template.count(MASK) != 1:
        raise ValueError(f"--template needs {{}} and {MASK}, once each; got {args.template!r}")
    if (args.datastore is None) != args.parametric:
        raise ValueError("pass either --datastore, to retrieve, or --parametric, for the masked-LM head")
    if args.parametric and args.max_occurrences is not None:
        raise ValueError("--max-occurrences is only allowed with --datastore")
    verbalizer = read_verbalizer(args.verbalizer)
    items = read_texts(args.input, list(verbalizer), header=args.header)
    interface, store = _open(args)
    predictions = classify(
        interface,
        items,
        verbalizer,
        args.template,
        store=store,
        max_occurrences=args.max_occurrences or MOST_OCCURRENCES,
        max_unk_rate=args.max_unk_rate,
        where=args.input,
    )
    _warn_of_cuts(sum(cut for *_, cut in predictions), len(items))
    predicted = Counter(label for label, *_ in predictions)
    print("predicted: " + ", ".join(f"{label} {predicted[label]}" for label in verbalizer))
    if items[0].label is not None:
        correct = sum(label == item.label for (label, *_), item in zip(predictions, items, strict=True))
        majority = max(Counter(item.label for item in items).values())
        print(
            f"accuracy {correct / len(items):.4f} ({correct} of {len(items)}; always the most frequent label: "
            f"{majority / len(items):.4f})"
        )
    if args.output:
        with atomic_open(args.output, "w") as file:
            for (label, share, _), item in zip(predictions, items, strict=True):
                file.write(f"{label}\t{share:.4f}\t{item.text}\n")
    return 0
