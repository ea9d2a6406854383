"""Import dictionaries and sparse autoencoders of other programs, and export sparse autoencoders."""

from collections.abc import Callable
from pathlib import Path

from mlsm_plugin.core.coding.settings import CoderImport
from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.output_lock import only_writer
from mlsm_plugin.core.files.planned_folder import META_FILE, PlannedFolder
from mlsm_plugin.core.files.recorded_names import without_place
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

    Returns the coder, or None if the output is already this coder. ValueError if the source cannot be converted or does
    not fit the model, or if the output is another coder.
    """
    source, output = _distinct_paths(source, output)
    coder = read_any_format(
        source, normalize=settings.normalize, transpose=settings.transpose, lambda_=settings.lambda_
    )
    origin = _origin(settings, coder.meta["dim"])
    coder.meta |= origin
    if settings.auxiliary:
        coder.meta["auxiliary"] = without_place(settings.auxiliary)

    def fingerprint() -> str:
        if kind_of(output).kind != coder.meta["kind"]:
            return "of another kind"
        # a dictionary may have no lambda
        existing = (
            AtomDictionary.load(output) if isinstance(coder, AtomDictionary) else SaeCoder.load(output, NoOptions())
        )
        return existing.fingerprint

    with only_writer(output):
        if not overwrite and (output / META_FILE).exists():
            _check_same(output, fingerprint, coder.fingerprint, "dictionary")
            plan = {**origin, **{name: coder.meta[name] for name in ("lambda",) if name in coder.meta}}
            if PlannedFolder(output, plan, resumable=False, advice=ADVICE.capitalize()).is_complete():
                return None
        # remove an earlier coder; meta.json is removed first and written last
        for name in (META_FILE, ATOMS_FILE, *(f"{tensor}.npy" for tensor in SaeWeights._fields)):
            (output / name).unlink(missing_ok=True)
        coder.save(output)
    return coder


def _origin(settings: CoderImport, dim: int) -> JsonObject:
    """The entries of ``meta.json`` about the hidden states that the dictionary codes."""
    layer = settings.layer
    auxiliary = settings.auxiliary
    origin: JsonObject = {} if layer is None else {"layer": layer}
    if auxiliary:
        model = source_of(auxiliary)
        origin["auxiliary_fingerprint"] = model.fingerprint_of(auxiliary)
        if layer is not None:
            check_layer(layer, model.layers_of(auxiliary), auxiliary)
        if (width := model.width_of(auxiliary)) not in (None, dim):
            raise ValueError(f"the dictionary is {dim} wide, but the hidden states of {auxiliary} are {width} wide")
    return origin


def export_sae(source: PathLike, output: PathLike, *, overwrite: bool = False) -> SaeCoder | None:
    """Write an SAE of this package for SAELens and return it; None if the output is already this SAE.

    ValueError if the source is not an SAE, or the output is another one.
    """
    source, output = _distinct_paths(source, output)
    saelens.check_exportable(kind_of(source))
    coder = saelens.for_saelens(SaeCoder.load(source, NoOptions()))
    with only_writer(output):
        if not overwrite and (output / saelens.CONFIG_FILE).exists():
            _check_same(output, lambda: saelens.read_saelens(output).fingerprint, coder.fingerprint, "SAE")
            return None
        saelens.write_saelens(coder, output)
    return coder


def _distinct_paths(source: PathLike, output: PathLike) -> tuple[Path, Path]:
    """Both as paths; raises ValueError if the output would replace the source."""
    source = Path(source)
    output = Path(output)
    if output.resolve() in (source.resolve(), source.resolve().parent if source.is_file() else None):
        raise ValueError(f"{source} would be read from and written to; choose another folder for the result")
    return source, output


def _check_same(output: Path, fingerprint: Callable[[], str], expected: str, what: str) -> None:
    """Raise ValueError unless the content of a folder can be read and has the ``expected`` fingerprint."""
    try:
        existing = fingerprint()
    except ValueError as error:
        raise ValueError(f"{error}; {ADVICE}") from None
    if existing != expected:
        raise ValueError(f"{output} holds another {what}; {ADVICE}")
