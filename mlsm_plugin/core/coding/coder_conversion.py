"""Dictionaries and sparse autoencoders of other programs as coders of this package, and the way back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlsm_plugin.core.coding.settings import CoderImport
from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.output_lock import only_writer
from mlsm_plugin.core.files.planned_folder import META_FILE, PlannedFolder
from mlsm_plugin.core.hidden_states.encoder import check_layer
from mlsm_plugin.core.hidden_states.sources import source_of
from mlsm_plugin.core.sparse_coding.coder import kind_of
from mlsm_plugin.core.sparse_coding.dictionary import ATOMS_FILE, AtomDictionary
from mlsm_plugin.core.sparse_coding.formats import saelens
from mlsm_plugin.core.sparse_coding.formats.any_format import read_any_format
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeWeights
from mlsm_plugin.core.sparse_coding.sparse_coder import NoOptions

ADVICE = "pass --overwrite to replace it, or choose another folder"


def import_coder(
    source: PathLike, output: PathLike, settings: CoderImport, *, overwrite: bool = False
) -> SaeCoder | AtomDictionary | None:
    """Read a folder of SAELens, sparsify or dictionary_learning, or an npy matrix of atoms, and save it.

    Returns the coder; None if this very one is there. ValueError if the source cannot be converted, does not fit the
    model, or another coder is there.
    """
    source, output = _apart(source, output)
    made = read_any_format(source, normalize=settings.normalize, transpose=settings.transpose, lambda_=settings.lambda_)
    origin = _origin(settings, made.meta["dim"])
    made.meta |= origin

    def fingerprint() -> str:
        if kind_of(output).kind != made.meta["kind"]:
            return "of another kind"
        # a dictionary need not say its lambda
        there = AtomDictionary.load(output) if isinstance(made, AtomDictionary) else SaeCoder.load(output, NoOptions())
        return there.fingerprint

    with only_writer(output):
        if not overwrite and (output / META_FILE).exists():
            _check_same(output, fingerprint, made.fingerprint, "dictionary")
            wanted = {**origin, **{name: made.meta[name] for name in ("lambda",) if name in made.meta}}
            if PlannedFolder(output, wanted, plan_file=None, advice=ADVICE.capitalize()).is_complete():
                return None
        # of what was there or was begun; meta.json goes first and comes last
        for name in (META_FILE, ATOMS_FILE, *(f"{tensor}.npy" for tensor in SaeWeights._fields)):
            (output / name).unlink(missing_ok=True)
        made.save(output)
    return made


def _origin(settings: CoderImport, dim: int) -> dict[str, Any]:
    """What ``meta.json`` says of the hidden states that the dictionary is for."""
    layer = settings.layer
    auxiliary = settings.auxiliary
    found: dict[str, Any] = {} if layer is None else {"layer": layer}
    if auxiliary:
        model = source_of(auxiliary)
        found["auxiliary_fingerprint"] = model.fingerprint_of(auxiliary)
        if layer is not None:
            check_layer(layer, model.layers_of(auxiliary), auxiliary)
        if (width := model.width_of(auxiliary)) not in (None, dim):
            raise ValueError(f"the dictionary is {dim} wide, but the hidden states of {auxiliary} are {width} wide")
    return found


def export_sae(source: PathLike, output: PathLike, *, overwrite: bool = False) -> SaeCoder | None:
    """Write an SAE of this package for SAELens, and return it; None if this very one is there.

    ValueError if the source is no SAE, or another one is there.
    """
    source, output = _apart(source, output)
    saelens.check_exportable(kind_of(source))
    coder = saelens.for_saelens(SaeCoder.load(source, NoOptions()))
    with only_writer(output):
        if not overwrite and (output / saelens.CONFIG_FILE).exists():
            _check_same(output, lambda: saelens.read_saelens(output).fingerprint, coder.fingerprint, "SAE")
            return None
        saelens.write_saelens(coder, output)
    return coder


def _apart(source: PathLike, output: PathLike) -> tuple[Path, Path]:
    """The two as paths; raises ValueError if the output would lie in the place of the source."""
    source = Path(source)
    output = Path(output)
    if output.resolve() in (source.resolve(), source.resolve().parent if source.is_file() else None):
        raise ValueError(f"{source} would be read from and written to; choose another folder for the result")
    return source, output


def _check_same(output: Path, fingerprint: Callable[[], str], wanted: str, what: str) -> None:
    """Raise ValueError unless what is in a folder can be read and has the fingerprint that is wanted."""
    try:
        found = fingerprint()
    except ValueError as error:
        raise ValueError(f"{error}; {ADVICE}") from None
    if found != wanted:
        raise ValueError(f"{output} holds another {what}; {ADVICE}")
