"""``mlsm convert``: import a model or a dictionary from another program, or export one."""

import argparse
import itertools
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mlsm_plugin.cli.coding_options import check_positive, output_folder
from mlsm_plugin.cli.next_commands import encode_command, print_next
from mlsm_plugin.cli.settings_flags import add_settings, settings_of
from mlsm_plugin.core.coding.settings import CoderImport
from mlsm_plugin.core.files.atomic_files import check_output_file
from mlsm_plugin.core.files.hf_files import HF_PREFIX, is_hf, is_library_folder
from mlsm_plugin.core.files.model_folders import check_model_folder
from mlsm_plugin.core.files.output_files import check_no_input
from mlsm_plugin.core.files.sentence_modules import MODULES_FILE

if TYPE_CHECKING:
    from mlsm_plugin.hub.comparison import Comparison

CODES = "codes of this package"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "What is done depends on SOURCE. A run or a checkpoint is exported to Hugging Face (RobertaForMaskedLM, "
        "ModernBertForMaskedLM or DebertaV2ForMaskedLM). One of these, or a BERT, XLM-R or CamemBERT, becomes a "
        "checkpoint that training can start from. Several checkpoints, or --last, give one with the mean of their "
        "weights. An SAE of this package becomes a SAELens folder. Codes of token sequences become the cache of "
        "activations that Delphi names latents from, or the folder that Neuronpedia imports. A folder of SAELens, "
        "sparsify or dictionary_learning, or an .npy file of atoms, becomes a dictionary of this package."
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="folder or file; a hub name begins with hf:")
    parser.add_argument("output", metavar="OUTPUT", help="folder (of checkpoints: file) to write")
    models = parser.add_argument_group("options of models")
    models.add_argument("--text", metavar="FILE", help="text on which ids and logits of both models are compared")
    models.add_argument("--lines", type=int, metavar="N", help="largest number of lines to compare (default: 1000)")
    models.add_argument("--last", type=int, metavar="N", help="average the N newest numbered checkpoints of the folder")
    text = "import a model of Min et al. (2022) for `mlsm npm`, which retrieves phrases (facebook/npm) or single tokens"
    models.add_argument("--npm", choices=("phrase", "single"), help=text)
    dictionaries = parser.add_argument_group("options of dictionaries")
    add_settings(dictionaries, CoderImport)
    text = "token sequences that were coded (of `mlsm adapt`: tokens), for codes, which also need --auxiliary hf:MODEL"
    dictionaries.add_argument("--sequences", metavar="DIR", help=text)
    text = "write codes for Neuronpedia instead of Delphi, as a set of sources with this name, such as res-mlsm"
    dictionaries.add_argument("--neuronpedia", metavar="SET", help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace existing output")


def needs_fairseq(args: argparse.Namespace) -> bool:
    """Whether the source is a model, or a dictionary for a fairseq checkpoint."""
    kind = _kind_of(args)
    if kind == CODES:
        return False
    return "dictionary" not in kind or (bool(args.auxiliary) and not is_hf(args.auxiliary))


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Convert the source; see the epilog of the help."""
    kind = _kind_of(args)
    if kind != "several checkpoints":
        output_folder(args.output)
    convert, options = CONVERSIONS[kind]
    for name in dict.fromkeys(name for _, names in CONVERSIONS.values() for name in names):
        value = getattr(args, name)
        is_set = value is not None and value is not False  # 0 is a value
        if is_set and name not in options:
            raise ValueError(f"--{name.strip('_')} is not for {kind}, which {args.sources[0]} is")
    if "text" in options and args.text is None:
        raise ValueError(f"{args.sources[0]} is {kind}: --text is required, to compare both models on it")
    check_positive(args, "lines", "last")
    convert(args)
    return 0


def _kind_of(args: argparse.Namespace) -> str:
    """The kind of the sources: a key of :data:`CONVERSIONS`."""
    from mlsm_plugin.core.files.planned_folder import META_FILE
    from mlsm_plugin.core.sparse_coding.code_store import is_code_store

    source = args.sources[0]
    if len(args.sources) > 1 or args.last is not None:
        return "several checkpoints"
    if source.startswith(HF_PREFIX):
        return "a model of Hugging Face"
    path = Path(source)
    if path.suffix == ".pt" and path.name != "ae.pt":
        return "a checkpoint"
    if not path.exists():
        raise FileNotFoundError(f"{source} does not exist (a hub name begins with {HF_PREFIX})")
    if (path / META_FILE).is_file() and is_code_store(path):
        return CODES
    if (path / META_FILE).is_file():
        return "a dictionary of this package"
    if is_library_folder(path):
        return "a model of Hugging Face"
    if any(path.glob("*.pt")) and not (path / "ae.pt").exists():
        return "a checkpoint"
    if (path / "config.json").exists() and not (path / "ae.pt").exists():
        return "a model of Hugging Face"
    return "a dictionary of another program"


def _average(args: argparse.Namespace) -> None:
    from mlsm_plugin.fairseq_plugin.compat.checkpoint_averaging import average_checkpoints, last_checkpoints

    check_output_file(args.output)
    paths = [Path(path) for path in args.sources]
    if args.last is not None:
        if len(paths) > 1 or not paths[0].is_dir():
            raise ValueError("--last takes the folder of one run")
        paths = last_checkpoints(paths[0], args.last)
    if Path(args.output).exists() and not args.overwrite:
        raise ValueError(f"{args.output} exists already; name a new file, or pass --overwrite to replace it")
    check_no_input(args.output, paths)
    updates = average_checkpoints(paths, args.output)
    print(f"{args.output}: the mean of {len(paths)} checkpoints, of updates {', '.join(f'{n:,}' for n in updates)}")


def _export_model(args: argparse.Namespace) -> None:
    """Export, load the result, and compare; fail if something differs."""
    from mlsm_plugin.hub import from_pretrained
    from mlsm_plugin.hub.hf_export import export

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the export downloads nothing
    check_model_folder(args.output)
    interface = from_pretrained(args.sources[0])
    proof = export(interface, args.output, _lines_to_compare(args), overwrite=args.overwrite)
    _print_comparison(args.output, proof, head=proof.no_head is None)
    if proof.no_head is not None:
        print(f"{proof.no_head}, and was left out; AutoModel opens the folder")
    if Path(args.output, MODULES_FILE).is_file():
        print("sentence-transformers opens it, too: the vector of a text is the mean of its last hidden states")
    if proof.vocabulary:
        print(f"mlsm: warning: other text can get other ids, since {proof.vocabulary}", file=sys.stderr)
    if proof.latent_atoms:
        print(
            f"latent_head.safetensors: the projection to {proof.latent_atoms} atoms, which follows lm_head's layer norm"
        )


def _import_model(args: argparse.Namespace) -> None:
    """Import, load the result, and compare; fail if something differs. Then print the next command."""
    from mlsm_plugin.fairseq_plugin.compat.version_shims import PACKAGE_DIR
    from mlsm_plugin.hub.hf_import import CHECKPOINT, import_model

    proof = import_model(args.sources[0], args.output, _lines_to_compare(args), npm=args.npm)
    _print_comparison(args.output, proof)
    if args.npm:
        words = ["mlsm", "npm", "datastore", "DATA_BIN", "--checkpoint", args.output, "--output", "STORE"]
        print_next("Build a datastore from a dataset made with its tokenizer", shlex.join(words))
    words = ["fairseq-train", "DATA_BIN", "--user-dir", args.user_dir or PACKAGE_DIR, *proof.flags]
    words += ["--finetune-from-model", f"{args.output}/{CHECKPOINT}"]
    print_next(
        f"Train it further on a dataset that `mlsm binarize --tokenizer {args.output}` wrote (add the optimizer)",
        shlex.join(words),
    )


def _lines_to_compare(args: argparse.Namespace) -> list[str]:
    """The first lines of the text, without empty lines."""
    from mlsm_plugin.core.text.text_files import read_lines

    return list(itertools.islice((line for line in read_lines(args.text) if line), args.lines or 1000))


def _print_comparison(output: str, comparison: "Comparison", *, head: bool = True) -> None:
    what = "logits" if head else "hidden states"
    print(
        f"{output}: ids are the same on {comparison.lines:,} lines, {what} of {comparison.tokens:,} tokens differ by "
        f"at most {comparison.largest_difference:.1e}"
    )
    if comparison.masked:
        print(f"ids are the same on {comparison.masked:,} of these lines with a mask, too")
    if comparison.reordered:
        print(f"on {comparison.reordered:,} more lines the same pieces come in another order, with equal probability")
    if comparison.with_symbols:
        print(
            f"{comparison.with_symbols:,} of the lines name a special token and were compared as plain text, which "
            "transformers reads with split_special_tokens=True"
        )


def _import_dictionary(args: argparse.Namespace) -> None:
    from mlsm_plugin.core.coding.coder_conversion import import_coder

    settings = settings_of(CoderImport, args)
    coder = import_coder(args.sources[0], args.output, settings, overwrite=args.overwrite)
    if coder is None:
        print(f"nothing to do, {args.output} is complete")
        return
    meta = coder.meta
    kind = f"{meta['kind']} ({meta['sae']['activation']})" if "sae" in meta else str(meta["kind"])
    print(f"{args.output}: {meta['n_atoms']:,} atoms for hidden states of width {meta['dim']:,}, {kind}")
    if args.auxiliary and args.layer is not None:
        print_next("Code a dataset with", encode_command("DATA_BIN", args.auxiliary, args.output, args.user_dir))


def _export_sae(args: argparse.Namespace) -> None:
    from mlsm_plugin.core.coding.coder_conversion import export_sae
    from mlsm_plugin.core.sparse_coding.formats import saelens

    coder = export_sae(args.sources[0], args.output, overwrite=args.overwrite)
    if coder is None:
        print(f"nothing to do, {args.output} is complete")
    else:
        print(f"{args.output}: {coder.num_atoms:,} latents for SAELens (sae_lens.SAE.load_from_disk)")
        facts = saelens.facts_of(coder)
        missing = [name for name in saelens.ORIGIN if name not in facts]
        if missing:
            print(f"{saelens.CONFIG_FILE} has no {' and no '.join(missing)}, which {args.sources[0]} does not record")


def _export_codes(args: argparse.Namespace) -> None:
    if args.sequences is None or args.auxiliary is None:
        raise ValueError(f"{args.sources[0]} is {CODES}: --sequences and --auxiliary are required, its text and model")
    if args.neuronpedia is None:
        _write_for_delphi(args)
    else:
        _write_for_neuronpedia(args)


def _write_for_delphi(args: argparse.Namespace) -> None:
    from mlsm_plugin.huggingface.delphi_cache import write_delphi_cache

    cache = write_delphi_cache(args.sources[0], args.sequences, args.auxiliary, args.output, overwrite=args.overwrite)
    print(f"{cache.folder}: {cache.nonzeros:,} activations on {cache.tokens:,} tokens, for Delphi")


def _write_for_neuronpedia(args: argparse.Namespace) -> None:
    from mlsm_plugin.huggingface.neuronpedia_export import write_neuronpedia_export

    export = write_neuronpedia_export(
        args.sources[0], args.sequences, args.auxiliary, args.output, args.neuronpedia, overwrite=args.overwrite
    )
    print(f"{export.folder}: {export.features:,} features with {export.examples:,} examples, for Neuronpedia")


# kind of source -> the function that converts it, and the options of this function
CONVERSIONS = {
    "a checkpoint": (_export_model, ("text", "lines", "overwrite")),
    "a model of Hugging Face": (_import_model, ("text", "lines", "npm")),
    "several checkpoints": (_average, ("last", "overwrite")),
    "a dictionary of this package": (_export_sae, ("overwrite",)),
    CODES: (_export_codes, ("sequences", "auxiliary", "neuronpedia", "overwrite")),
    "a dictionary of another program": (
        _import_dictionary,
        ("layer", "auxiliary", "lambda_", "normalize", "transpose", "overwrite"),
    ),
}
