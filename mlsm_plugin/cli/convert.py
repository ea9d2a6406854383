"""``mlsm convert``: bring a model or a dictionary of another program in, or take one there."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsm_plugin.cli.coding_options import check_positive, output_folder
from mlsm_plugin.cli.next_commands import encode_command, print_next
from mlsm_plugin.files.hf_files import HF_PREFIX, is_hf

if TYPE_CHECKING:
    from mlsm_plugin.hub.comparison import Comparison
    from mlsm_plugin.sparse_coding.dictionary import Dictionary
    from mlsm_plugin.sparse_coding.sae_coder import SaeCoder

ADVICE = "pass --overwrite to replace it, or choose another folder"
# which options each conversion has
OPTIONS = {
    "a checkpoint": ("text", "lines"),
    "a ModernBERT": ("text", "lines"),
    "several checkpoints": ("last",),
    "a dictionary of this package": ("overwrite",),
    "a dictionary of another program": ("layer", "auxiliary", "lambda_", "normalize", "transpose", "overwrite"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.epilog = (
        "What SOURCE holds decides. A run, or a checkpoint: export to Hugging Face (RobertaForMaskedLM or "
        "ModernBertForMaskedLM). A ModernBertForMaskedLM of Hugging Face: a checkpoint that training starts from. "
        "Several checkpoints, or --last: one with the mean of their weights. An SAE of this package: a folder of "
        "SAELens. A folder of SAELens, sparsify or dictionary_learning, or an .npy file of atoms: a dictionary of this "
        "package."
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="folder or file; a hub name begins with hf:")
    parser.add_argument("output", metavar="OUTPUT", help="folder (of checkpoints: file) to write")
    models = parser.add_argument_group("options of models")
    models.add_argument("--text", metavar="FILE", help="text on which ids and logits of both models are compared")
    models.add_argument("--lines", type=int, metavar="N", help="largest number of lines to compare (default: 1000)")
    models.add_argument("--last", type=int, metavar="N", help="average the N newest numbered checkpoints of the folder")
    dictionaries = parser.add_argument_group("options of dictionaries")
    dictionaries.add_argument(
        "--layer",
        type=int,
        metavar="L",
        help="hidden state that it is for: 0 is the embeddings, 1 the first layer, ...",
    )
    dictionaries.add_argument(
        "--auxiliary", metavar="CHECKPOINT", help="model that it is for: a fairseq checkpoint, or hf:PATH"
    )
    dictionaries.add_argument(
        "--lambda", dest="lambda_", type=float, metavar="X", help="weight of the L1 penalty (of an .npy file)"
    )
    dictionaries.add_argument("--normalize", action="store_true", help="scale the rows of an .npy file to unit norm")
    dictionaries.add_argument("--transpose", action="store_true", help="columns of the .npy file are atoms")
    dictionaries.add_argument("--overwrite", action="store_true", help="replace what is already there")


def needs_fairseq(args: argparse.Namespace) -> bool:
    """Whether a model is converted, and not a dictionary, or a dictionary of a checkpoint of fairseq."""
    return "dictionary" not in _kind_of(args) or (bool(args.auxiliary) and not is_hf(args.auxiliary))


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Convert what the source holds; see the epilog of the help."""
    kind = _kind_of(args)
    if kind != "several checkpoints":
        output_folder(args.output)
    _check_options(args, kind)
    if kind == "several checkpoints":
        return _average(args)
    if kind == "a checkpoint":
        return _export_model(args, args.sources[0])
    if kind == "a ModernBERT":
        return _import_model(args, args.sources[0])
    source, output = Path(args.sources[0]), Path(args.output)
    if output.resolve() in (source.resolve(), source.resolve().parent if source.is_file() else None):
        raise ValueError(f"{source} would be read from and written to; choose another folder for the result")
    return _export_sae(args, source, output) if "this package" in kind else _import_dictionary(args, source, output)


def _kind_of(args: argparse.Namespace) -> str:
    """What the sources are: a key of :data:`OPTIONS`."""
    from mlsm_plugin.sparse_coding.sparse_coder import META_FILE

    source = args.sources[0]
    if len(args.sources) > 1 or args.last is not None:
        return "several checkpoints"
    if source.startswith(HF_PREFIX):
        return "a ModernBERT"
    path = Path(source)
    if path.suffix == ".pt" and path.name != "ae.pt":
        return "a checkpoint"
    if not path.exists():
        raise FileNotFoundError(f"{source} does not exist (a hub name begins with {HF_PREFIX})")
    if (path / META_FILE).is_file():
        return "a dictionary of this package"
    if any(path.glob("*.pt")) and not (path / "ae.pt").exists():
        return "a checkpoint"
    if (path / "config.json").exists() and not (path / "ae.pt").exists():
        return "a ModernBERT"
    return "a dictionary of another program"


def _check_options(args: argparse.Namespace, kind: str) -> None:
    """Raise ValueError if an option is given that this conversion does not have, or one that it needs is missing."""
    for name in dict.fromkeys(name for names in OPTIONS.values() for name in names):
        if getattr(args, name) not in (None, False) and name not in OPTIONS[kind]:
            raise ValueError(f"--{name.strip('_')} is not for {kind}, which {args.sources[0]} is")
    if "text" in OPTIONS[kind] and args.text is None:
        raise ValueError(f"{args.sources[0]} is {kind}: --text is required, on which both models are compared")
    check_positive(args, "lines", "last")


def _average(args: argparse.Namespace) -> int:
    from mlsm_plugin.fairseq_seams.checkpoint_averaging import average_checkpoints, last_checkpoints
    from mlsm_plugin.fairseq_seams.checkpoint_states import updates_of
    from mlsm_plugin.files.atomic_files import check_output_file
    from mlsm_plugin.files.model_files import copy_tokenizer

    check_output_file(args.output)
    paths = [Path(path) for path in args.sources]
    if args.last is not None:
        if len(paths) > 1 or not paths[0].is_dir():
            raise ValueError("--last takes the folder of one run")
        paths = last_checkpoints(paths[0], args.last)
    average_checkpoints(paths, args.output)
    source, folder = paths[-1].parent, Path(args.output).parent
    if source.resolve() != folder.resolve():
        copy_tokenizer(source, folder)
    updates = ", ".join(f"{updates_of(path):,}" for path in paths)
    print(f"{args.output}: the mean of {len(paths)} checkpoints, of updates {updates}")
    return 0


def _export_model(args: argparse.Namespace, source: str) -> int:
    """Export, load the result, and compare; fail if something differs."""
    import os

    from mlsm_plugin.hub import from_pretrained

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded
    try:
        import safetensors  # noqa: F401
        import transformers
        from google import protobuf  # noqa: F401
    except ImportError as error:
        raise ValueError(f"an export needs {error.name}: pip install 'mlsm_plugin[hf]'") from None
    from mlsm_plugin.hub.hf_export import export

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    lines = _lines_to_compare(args)
    proof = export(from_pretrained(source), args.output, lines)
    _print_comparison(args.output, proof)
    if proof.vocabulary:
        print(f"mlsm: warning: other text can get other ids, since {proof.vocabulary}", file=sys.stderr)
    if proof.latent_atoms:
        print(
            f"latent_head.safetensors: the projection to {proof.latent_atoms} atoms, which follows lm_head's layer norm"
        )
    return 0


def _import_model(args: argparse.Namespace, source: str) -> int:
    """Import, load the result, and compare; fail if something differs. Then print the next command."""
    from mlsm_plugin.fairseq_seams.version_shims import PACKAGE_DIR
    from mlsm_plugin.hub.modernbert_import import CHECKPOINT, OBJECTIVE, import_modernbert

    proof = import_modernbert(source, args.output, _lines_to_compare(args))
    _print_comparison(args.output, proof)
    words = ["fairseq-train", "DATA_BIN", "--user-dir", args.user_dir or PACKAGE_DIR, *OBJECTIVE, *proof.flags]
    words += ["--finetune-from-model", f"{args.output}/{CHECKPOINT}"]
    print_next(
        f"Train it further on a dataset that `mlsm binarize --tokenizer {args.output}` wrote (add the optimizer)",
        shlex.join(words),
    )
    return 0


def _lines_to_compare(args: argparse.Namespace) -> list[str]:
    """The first of the lines of the text that are not empty."""
    from mlsm_plugin.tokenization.text_files import read_lines

    return list(itertools.islice((line for line in read_lines(args.text) if line), args.lines or 1000))


def _print_comparison(output: str, found: Comparison) -> None:
    print(
        f"{output}: ids are the same on {found.lines:,} lines, logits of {found.tokens:,} tokens differ by at most "
        f"{found.largest_difference:.1e}"
    )
    if found.reordered:
        print(f"on {found.reordered:,} more lines the same pieces come in another order, with equal probability")
    if found.with_symbols:
        print(
            f"{found.with_symbols:,} of the lines name a special token and were compared as plain text, which "
            "transformers reads with split_special_tokens=True"
        )


def _import_dictionary(args: argparse.Namespace, source: Path, output: Path) -> int:
    from mlsm_plugin.files.output_lock import only_writer
    from mlsm_plugin.sparse_coding.formats.any_format import read_any_format

    if args.layer is not None and args.layer < 0:
        raise ValueError(f"--layer must not be negative, got {args.layer}")
    made = read_any_format(source, normalize=args.normalize, transpose=args.transpose, lambda_=args.lambda_)
    origin = _origin(args, made.meta["dim"])
    made.meta |= origin
    with only_writer(output):
        if not args.overwrite and _holds(output, made, origin):
            print(f"nothing to do, {output} is complete")
            return 0
        _replace(made, output)
    meta = made.meta
    kind = f"{meta['kind']} ({meta['sae']['activation']})" if "sae" in meta else str(meta["kind"])
    print(f"{output}: {meta['n_atoms']:,} atoms for hidden states of width {meta['dim']:,}, {kind}")
    if args.auxiliary and args.layer is not None:
        print_next("Code a dataset with", encode_command("DATA_BIN", args.auxiliary, output, args.user_dir))
    return 0


def _origin(args: argparse.Namespace, dim: int) -> dict[str, Any]:
    """What ``meta.json`` says of the hidden states that the dictionary is for."""
    from mlsm_plugin.hidden_states.encoder import check_layer
    from mlsm_plugin.hidden_states.sources import source_of

    found = {} if args.layer is None else {"layer": args.layer}
    if args.auxiliary:
        model = source_of(args.auxiliary)
        found["auxiliary_fingerprint"] = model.fingerprint_of(args.auxiliary)
        if args.layer is not None:
            check_layer(args.layer, model.layers_of(args.auxiliary), args.auxiliary)
        width = model.width_of(args.auxiliary)
        if width not in (None, dim):
            raise ValueError(
                f"the dictionary is {dim} wide, but the hidden states of {args.auxiliary} are {width} wide"
            )
    return found


def _holds(output: Path, made: SaeCoder | Dictionary, origin: dict[str, Any]) -> bool:
    """Whether ``output`` holds this very coder; ValueError where it holds another one."""
    from mlsm_plugin.files.planned_folder import PlannedFolder
    from mlsm_plugin.sparse_coding.coder import kind_of
    from mlsm_plugin.sparse_coding.dictionary import KIND, Dictionary
    from mlsm_plugin.sparse_coding.sparse_coder import META_FILE, SparseCoder

    if not (output / META_FILE).exists():
        return False
    try:
        kind = kind_of(output)
        # a dictionary need not say its lambda
        there: SparseCoder | Dictionary
        there = Dictionary.load(output) if kind.kind == KIND else kind.load(output, kind.options_type())
    except ValueError as error:
        raise ValueError(f"{error}; {ADVICE}") from None
    if there.fingerprint != made.fingerprint:
        raise ValueError(f"{output} holds another dictionary; {ADVICE}")
    wanted = {**origin, **{name: made.meta[name] for name in ("lambda",) if name in made.meta}}
    return PlannedFolder(output, wanted, plan_file=None, advice=ADVICE.capitalize()).is_complete()


def _replace(made: SaeCoder | Dictionary, output: Path) -> None:
    """Save, after the files of what was there or was begun; ``meta.json`` goes first and comes last."""
    from mlsm_plugin.sparse_coding.dictionary import ATOMS_FILE
    from mlsm_plugin.sparse_coding.sparse_autoencoder import SaeWeights
    from mlsm_plugin.sparse_coding.sparse_coder import META_FILE

    for name in (META_FILE, ATOMS_FILE, *(f"{tensor}.npy" for tensor in SaeWeights._fields)):
        if (output / name).exists():
            (output / name).unlink()
    made.save(output)


def _export_sae(args: argparse.Namespace, source: Path, output: Path) -> int:
    from mlsm_plugin.files.output_lock import only_writer
    from mlsm_plugin.sparse_coding.coder import kind_of
    from mlsm_plugin.sparse_coding.formats.saelens import (
        CONFIG_FILE,
        check_exportable,
        for_saelens,
        read_saelens,
        write_saelens,
    )
    from mlsm_plugin.sparse_coding.sae_coder import SaeCoder
    from mlsm_plugin.sparse_coding.sparse_coder import NoOptions

    check_exportable(kind_of(source))
    coder = for_saelens(SaeCoder.load(source, NoOptions()))
    with only_writer(output):
        if not args.overwrite and (output / CONFIG_FILE).exists():
            try:
                there = read_saelens(output).fingerprint
            except ValueError as error:
                raise ValueError(f"{error}; {ADVICE}") from None
            if there != coder.fingerprint:
                raise ValueError(f"{output} holds another SAE; {ADVICE}")
            print(f"nothing to do, {output} is complete")
            return 0
        write_saelens(coder, output)
    print(f"{output}: {coder.num_atoms:,} latents for SAELens (sae_lens.SAE.load_from_disk)")
    return 0
