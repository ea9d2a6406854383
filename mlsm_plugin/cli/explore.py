"""``mlsm explore``: a local web page on what a model and its latent properties make of a sentence."""

import argparse

from mlsm_plugin.cli.settings_flags import add_settings
from mlsm_plugin.core.hidden_states.settings import ModelRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = (
        "--output of `mlsm adapt`, or a Hugging Face folder or hub name (hf:NAME), such as one that `mlsm convert` "
        "wrote"
    )
    parser.add_argument("model", metavar="MODEL", help=model)
    dictionary = (
        "dictionary or sparse autoencoder of a layer of the model; without it, the model's latent head predicts the "
        "properties"
    )
    parser.add_argument("--dictionary", metavar="DICT_DIR", help=dictionary)
    parser.add_argument(
        "--index",
        metavar="INDEX",
        help="also search the documents that `mlsm search index` indexed with this model and dictionary",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="call each property by its most telling tokens in this text (default: in the index, or in the text of "
        "`mlsm adapt`)",
    )
    parser.add_argument(
        "--names", metavar="PATH", help="names of properties: JSON of atom to text, of Neuronpedia, or Delphi's folder"
    )
    parser.add_argument(
        "--datastore", metavar="DIR", help="also retrieve phrases for masks from what `mlsm npm datastore` made"
    )
    parser.add_argument("--npm-checkpoint", metavar="PATH", help="run or checkpoint that --datastore was made with")
    parser.add_argument("--port", type=int, help="port on 127.0.0.1 (default: the first free one from 7860 on)")
    add_settings(parser, ModelRun, only=("device", "threads"))


def needs_fairseq(args: argparse.Namespace) -> bool:
    """True only for a datastore, which needs a fairseq model."""
    return args.datastore is not None


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Serve the page until it is interrupted."""
    from mlsm_plugin.core.sparse_coding.sparse_coder import torch_threads
    from mlsm_plugin.explore.explorer import open_explorer
    from mlsm_plugin.explore.page import import_gradio, serve

    if args.port is not None and not 1 <= args.port <= 65535:
        raise ValueError(f"--port must be from 1 to 65535, got {args.port}")
    import_gradio()  # fails before the model is loaded
    explorer = open_explorer(
        args.model,
        dictionary=args.dictionary,
        index=args.index,
        names=args.names,
        text=args.text,
        datastore=args.datastore,
        npm_checkpoint=args.npm_checkpoint,
        device=args.device,
    )
    with torch_threads(args.threads):
        serve(explorer, args.port)
    return 0
