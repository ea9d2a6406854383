"""``mlsm convert-dictionary``: bring in a dictionary of another program, or take one there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsm_plugin.cli.next_commands import encode_command, print_next
from mlsm_plugin.cli.output_folder import output_folder

if TYPE_CHECKING:
    from mlsm_plugin.sparse_coding.dictionary import Dictionary
    from mlsm_plugin.sparse_coding.sae_coder import SaeCoder

SAELENS = "saelens"
# flags of the import, and what they are when they are not given
OF_IMPORT = {"layer": None, "auxiliary": None, "lambda_": None, "normalize": False, "transpose": False}
ADVICE = "pass --overwrite to replace it, or choose another folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.epilog = (
        "The format of PATH is told by its files: SAELens (cfg.json, sae_weights.safetensors), sparsify (cfg.json, "
        "sae.safetensors), dictionary_learning (config.json, ae.pt), or an .npy file. See docs/dictionaries.md."
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="folder of SAELens, sparsify or dictionary_learning, or an .npy file (n_atoms, dim), whose rows are atoms",
    )
    parser.add_argument("output", type=output_folder, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--to",
        choices=[SAELENS],
        help="write the format of this program instead: PATH is then a dictionary of this package (an SAE)",
    )
    parser.add_argument(
        "--layer",
        type=int,
        metavar="L",
        help="hidden state that the dictionary is for: 0 is the embeddings, 1 the first layer, ...",
    )
    parser.add_argument(
        "--auxiliary",
        metavar="CHECKPOINT",
        help="auxiliary model that the dictionary is for: a fairseq checkpoint, or hf:PATH",
    )
    parser.add_argument(
        "--lambda", dest="lambda_", type=float, metavar="X", help="weight of the L1 penalty (of an .npy file)"
    )
    parser.add_argument("--normalize", action="store_true", help="scale the rows of an .npy file to unit norm")
    parser.add_argument(
        "--transpose", action="store_true", help="the .npy file is (dim, n_atoms): its columns are atoms"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is already there")


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Convert, unless the result is already there."""
    source, output = Path(args.path), Path(args.output)
    if output.resolve() in (source.resolve(), source.resolve().parent if source.is_file() else None):
        raise ValueError(f"{source} would be read from and written to; choose another folder for the result")
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; name a folder for the result")
    return _export(args, source, output) if args.to else _import(args, source, output)


def _import(args: argparse.Namespace, source: Path, output: Path) -> int:
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
    print(f"{output}: {meta['n_atoms']:,} atoms for hidden states of width {meta['dim']:,}, {_kind(meta)}")
    if args.auxiliary and args.layer is not None:
        print_next("Code a dataset with", encode_command("DATA_BIN", args.auxiliary, output, args.user_dir))
    return 0


def _origin(args: argparse.Namespace, dim: int) -> dict[str, Any]:
    """What ``meta.json`` says of the hidden states that the dictionary is for."""
    from mlsm_plugin.files.planned_folder import recorded_in
    from mlsm_plugin.hidden_states.encoder import check_layer
    from mlsm_plugin.hidden_states.sources import source_of

    found = {} if args.layer is None else {"layer": args.layer}
    if args.auxiliary:
        model = source_of(args.auxiliary)
        recorded = None if args.overwrite else recorded_in(args.output, "auxiliary_fingerprint")
        found["auxiliary_fingerprint"] = model.recorded_fingerprint(args.auxiliary, recorded)
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
    from mlsm_plugin.files.planned_folder import differences
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
    if named := differences({name: there.meta.get(name) for name in wanted}, wanted):
        raise ValueError(f"{output} holds this dictionary, but {'; '.join(named)}; {ADVICE}")
    return True


def _replace(made: SaeCoder | Dictionary, output: Path) -> None:
    """Save, after the files of what was there or was begun; ``meta.json`` goes first and comes last."""
    from mlsm_plugin.sparse_coding.dictionary import ATOMS_FILE
    from mlsm_plugin.sparse_coding.sparse_autoencoder import SaeWeights
    from mlsm_plugin.sparse_coding.sparse_coder import META_FILE

    for name in (META_FILE, ATOMS_FILE, *(f"{tensor}.npy" for tensor in SaeWeights._fields)):
        if (output / name).exists():
            (output / name).unlink()
    made.save(output)


def _export(args: argparse.Namespace, source: Path, output: Path) -> int:
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

    for name, absent in OF_IMPORT.items():
        if getattr(args, name) != absent:
            raise ValueError(f"--{name.strip('_')} is not for --to {args.to}, which takes the dictionary as it is")
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder of a dictionary of this package")
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


def _kind(meta: dict[str, Any]) -> str:
    return f"{meta['kind']} ({meta['sae']['activation']})" if "sae" in meta else str(meta["kind"])
