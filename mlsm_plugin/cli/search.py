"""``mlsm search``: index documents by the properties of their tokens, and search them."""

import argparse
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mlsm_plugin.cli.actions import actions_of
from mlsm_plugin.cli.coding_options import add_output, add_share_options
from mlsm_plugin.cli.next_commands import print_next
from mlsm_plugin.cli.settings_flags import add_settings, refuse_changed, settings_of
from mlsm_plugin.core.files.process_rank import process_rank
from mlsm_plugin.core.hidden_states.settings import ModelRun
from mlsm_plugin.search.settings import IndexSettings

if TYPE_CHECKING:
    from mlsm_plugin.search.index import Hit

BOLD = "\033[1m"
PLAIN = "\033[0m"
SHOWN_CHARACTERS = 300
# characters that change a terminal's colours, title or text direction
HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
EXAMPLE_OF_INDEX = "example:  mlsm search index docs.txt --model encoder/ --dictionary dictionary/ --output index"
EXAMPLE_OF_EXPORT = "example:  mlsm search export index --to qdrant --output points.jsonl"
EXAMPLE_OF_QUERY = 'example:  mlsm search query index "how people lose weight" --count 3'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = actions_of(parser)
    index = add("index", "index documents by codes and words; the same command resumes after a stop", run_index)
    index.epilog = EXAMPLE_OF_INDEX
    documents = (
        "text (one sentence a line, blank lines between documents), or JSON lines with `text` and optionally `id` "
        "(*.jsonl)"
    )
    index.add_argument("documents", nargs="+", metavar="FILE", help=documents)
    add_model_and_dictionary(index, required=True)
    add_output(index, "folder of the index")
    add_settings(index, IndexSettings)
    add_settings(index, ModelRun, only=("device", "threads"))
    add_share_options(index)

    export = add("export", "write the codes of an index as sparse vectors for another search engine", run_export)
    export.epilog = EXAMPLE_OF_EXPORT
    export.add_argument("index", metavar="INDEX", help="folder that `mlsm search index` wrote")
    engines = "lucene (Anserini, Pyserini), elasticsearch (also OpenSearch) or qdrant"
    export.add_argument("--to", choices=("lucene", "elasticsearch", "qdrant"), required=True, help=engines)
    export.add_argument("--output", required=True, metavar="FILE", help="new file of JSON lines")

    query = add("query", "search an index; each result says which properties and words it shares", run_query)
    query.epilog = EXAMPLE_OF_QUERY
    query.add_argument("index", metavar="INDEX", help="folder that `mlsm search index` wrote")
    query.add_argument("text", nargs="?", help="what to search for; without it, --input")
    query.add_argument("--input", metavar="FILE", help="file with one query per line")
    query.add_argument("--count", type=int, default=10, help="results per query")
    modes = "rank by codes, by words, or by both (default: both)"
    query.add_argument("--by", choices=("both", "codes", "words"), default="both", help=modes)
    add_model_and_dictionary(query, required=False)
    query.add_argument("--json", action="store_true", help="print a JSON object for each query")
    add_settings(query, ModelRun, only=("device", "threads"))


def add_model_and_dictionary(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options for the model and the dictionary of the codes."""
    default = "" if required else " (default: where those of the index were)"
    model = f"Hugging Face folder or hub name (hf:NAME); without --dictionary, one with an MLSM latent head{default}"
    parser.add_argument("--model", required=required, help=model)
    dictionary = (
        "dictionary or sparse autoencoder of a layer of the model; without it, the latent head predicts the codes"
        f"{default}"
    )
    parser.add_argument("--dictionary", metavar="DICT_DIR", help=dictionary)


def needs_fairseq(args: argparse.Namespace) -> bool:
    return False


def run_index(args: argparse.Namespace, extra: list[str]) -> int:
    """Build the index, and print its size."""
    import torch

    from mlsm_plugin.core.sparse_coding.sparse_coder import torch_threads
    from mlsm_plugin.search.index import build_index
    from mlsm_plugin.search.text_codes import open_text_coder

    settings: IndexSettings = settings_of(IndexSettings, args)
    process = process_rank(args.process_index, args.num_processes, os.environ)
    device = args.device or process.device(torch.cuda.device_count())
    coder = open_text_coder(args.model, args.dictionary, device=device)
    with torch_threads(args.threads):
        figures = build_index(args.documents, coder, args.output, settings, process)
    if figures is None:
        print(
            f"process {process.rank} of {process.world_size} is done; batches of other processes are missing (if one "
            "failed, run the same command again)"
        )
        return 0
    size = figures["bytes"] / figures["documents"]
    print(f"{figures['documents']:,} documents, {size:,.0f} bytes for each: {args.output}")
    if figures["empty"]:
        print(f"documents without a code, which are only found by their words: {figures['empty']:,}")
    print_next("Search it with", shlex.join(["mlsm", "search", "query", str(args.output), "your words"]))
    return 0


def run_export(args: argparse.Namespace, extra: list[str]) -> int:
    """Write the file, and print how many documents it has."""
    from mlsm_plugin.search.exports import export_index

    documents = export_index(args.index, args.output, args.to)
    print(f"{documents:,} documents: {args.output}")
    return 0


def run_query(args: argparse.Namespace, extra: list[str]) -> int:
    """Search, and print the results with their reasons."""
    from mlsm_plugin.core.sparse_coding.sparse_coder import torch_threads
    from mlsm_plugin.core.text.text_files import read_lines
    from mlsm_plugin.search.index import SearchIndex, read_meta
    from mlsm_plugin.search.text_codes import TextCoder, open_text_coder

    if (args.text is None) == (args.input is None):
        raise ValueError("pass either a text or --input")
    if args.count < 1:
        raise ValueError(f"--count must be positive, got {args.count}")
    if args.by == "words":
        refuse_changed(args, {"model": None, "dictionary": None}, "--by words needs no model; leave it out")
    queries = [args.text] if args.input is None else [line for line in read_lines(args.input) if line]
    origin = read_meta(args.index)["origin"]
    assert isinstance(origin, dict)
    coder: TextCoder | None = None
    if args.by != "words":
        dictionary = args.dictionary or origin["dictionary"]
        _check_origin(args, origin)
        coder = open_text_coder(args.model or origin["model"], dictionary, layer=origin["layer"], device=args.device)
    index = SearchIndex(args.index, coder)
    with torch_threads(args.threads):
        for query in queries:
            hits = index.search(query, count=args.count, mode=args.by)
            if args.json:
                print(json.dumps(_record(query, hits), ensure_ascii=False))
            else:
                _print_hits(query, hits, in_color=sys.stdout.isatty())
    return 0


def _check_origin(args: argparse.Namespace, origin: dict[str, str]) -> None:
    """Raise ValueError if the model or dictionary of an index has moved, and the command line names no other."""
    from mlsm_plugin.core.files.hf_files import is_hf

    for name in ("model", "dictionary"):
        place = origin[name]
        if getattr(args, name) is None and place and not is_hf(place) and not Path(place).exists():
            raise ValueError(f"the {name} of {args.index}, {place}, does not exist; pass --{name}, or --by words")


def printable(text: str) -> str:
    """A text that is safe to print in a terminal: U+FFFD replaces control characters."""
    return HIDDEN.sub("\ufffd", text)


def _print_hits(query: str, hits: "list[Hit]", *, in_color: bool) -> None:
    print(f"\n{printable(query)}")
    if not hits:
        print("  nothing was found")
    for rank, hit in enumerate(hits, 1):
        print(f"\n{rank:3}. {printable(hit.document.name)}  (score {hit.score:.3f})")
        places = [place for reason in hit.reasons[:3] for place in reason.document_tokens]
        print(f"     {highlighted(hit.document.text, places if in_color else [])}")
        for reason in hit.reasons:
            tokens = ", ".join(dict.fromkeys(reason.query_tokens))
            print(printable(f"     {reason.share:4.0%}  property {reason.atom} ({reason.label}), here: {tokens}"))
        if hit.words:
            print(f"     words: {', '.join(hit.words)}")


def highlighted(text: str, places: list[tuple[int, int]]) -> str:
    """The beginning of a text, with the character spans in ``places`` in bold."""
    shown = printable(text[:SHOWN_CHARACTERS])
    for start, stop in sorted(set(places), reverse=True):
        if stop <= len(shown):
            shown = shown[:start] + BOLD + shown[start:stop] + PLAIN + shown[stop:]
    return shown + ("..." if len(text) > SHOWN_CHARACTERS else "")


def _record(query: str, hits: "list[Hit]") -> dict[str, object]:
    results = [
        {
            "id": hit.document.name,
            "text": hit.document.text,
            "score": hit.score,
            "words": list(hit.words),
            "properties": [
                {"atom": reason.atom, "label": reason.label, "share": reason.share, "tokens": reason.document_tokens}
                for reason in hit.reasons
            ],
        }
        for hit in hits
    ]
    return {"query": query, "results": results}
