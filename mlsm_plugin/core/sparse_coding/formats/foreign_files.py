"""The settings and tensors of another program: each must be understood, or known not to matter.

An unknown setting or tensor may change the codes, so it is an error. Files are read as plain data. Nothing larger than
a file is allocated: the sizes that the file claims are compared with its length first.
"""

import json
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike, parse_json
from mlsm_plugin.core.files.hf_files import first_line
from mlsm_plugin.core.files.json_checks import Check, JsonObject, anything
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig, SaeWeights, SparseAutoencoder

LARGEST_FACT = 1000  # characters of JSON
NEEDS_SAFETENSORS = "files of SAELens and sparsify need safetensors: pip install 'mlsm_plugin[hf]'"
TRANSPOSED = ("W_enc", "decoder.weight")  # tensors that are (dim, n_atoms) in all programs


class ConfigFile:
    """A JSON dictionary whose keys are taken one by one. All errors are ValueErrors that name ``path``."""

    def __init__(self, path: PathLike, values: JsonObject) -> None:
        self.path = Path(path)
        self._values = dict(values)

    @classmethod
    def read(cls, path: Path) -> "ConfigFile":
        """Read a file; ValueError if it is missing, is not JSON, or is not a dictionary."""
        _check_is_file(path)
        try:
            values = parse_json(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON ({error})") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} is not a dictionary of settings")
        return cls(path, values)

    def take(self, name: str, check: Check = anything, default: Any = ...) -> Any:
        """The value of a key, which then counts as understood; without a ``default``, the key is required."""
        if name not in self._values:
            if default is ...:
                raise ValueError(f"{self.path} lacks {name!r}")
            return default
        value = self._values.pop(name)
        problem = check(value)
        if problem is not None:
            raise ValueError(f"{self.path}: {name}: {problem}")
        return value

    def part(self, name: str) -> "ConfigFile":
        """The dictionary below a key, which is empty if the key is absent or null."""
        value = self.take(name, default=None)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{self.path}: {name}: it is not a dictionary")
        return ConfigFile(self.path, value or {})

    def facts(self, names: Iterable[str]) -> JsonObject:
        """The values of ``names`` that exist, are not null and are short; they are informative and decide nothing."""
        values = {name: self._values.pop(name, None) for name in names}
        return {name: value for name, value in values.items() if value is not None and _is_short(value)}

    def rename(self, old: str, new: str) -> None:
        """Treat an older name of a key as the newer name; both may exist if they have the same value."""
        if old in self._values:
            value = self._values.pop(old)
            if self._values.setdefault(new, value) != value:
                raise ValueError(f"{self.path} has {old!r} and {new!r}, which contradict each other")

    def finish(self, known: Iterable[str] = ()) -> None:
        """Raise ValueError if a key is left that is not in ``known``, the keys that do not matter."""
        if left := set(self._values) - set(known):
            raise ValueError(
                f"{self.path} has settings that this program does not know ({_named(map(repr, left))}); they may "
                "change the codes, so nothing is converted"
            )


class TensorFile:
    """Tensors that are taken one by one by name. All errors are ValueErrors that name ``path``."""

    def __init__(self, path: PathLike, tensors: dict[str, Tensor]) -> None:
        self.path = Path(path)
        self._tensors = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, ndim: int = 1) -> Tensor:
        """A tensor of floating-point numbers with ``ndim`` dimensions, as float32."""
        tensor = self._pop(name)
        if not tensor.is_floating_point() or tensor.is_quantized:
            raise ValueError(f"{self.path}: {name} holds {tensor.dtype}, not floating-point numbers")
        if tensor.dim() != ndim:
            raise ValueError(
                f"{self.path}: {name} has the shape {tuple(tensor.shape)}, but must have {ndim} dimensions"
            )
        return tensor.detach().float()

    def rest(self) -> dict[str, Tensor]:
        """All tensors that were not taken yet, by name, of any shape; converted as in :meth:`take`."""
        return {name: self.take(name, self._tensors[name].dim()) for name in list(self._tensors)}

    def number(self, name: str) -> float:
        """The value of a tensor that holds a single number, such as a threshold or k."""
        tensor = self._pop(name)
        if tensor.numel() != 1 or tensor.is_complex() or tensor.is_quantized:
            raise ValueError(f"{self.path}: {name} has the shape {tuple(tensor.shape)}, but must be a single number")
        return float(tensor.item())

    def weights(self, names: Mapping[str, str]) -> SaeWeights:
        """The weights of an SAE; ``names`` maps fields of :class:`SaeWeights` to names in the file."""
        tensors = {field: self.take(name, 2 if field in ("encoder", "decoder") else 1) for field, name in names.items()}
        return SaeWeights(
            **{field: tensors[field].T if name in TRANSPOSED else tensors[field] for field, name in names.items()}
        )

    def finish(self, known: Iterable[str] = ()) -> None:
        """Raise ValueError if a tensor is left that is not in ``known``, the tensors that do not matter."""
        if left := set(self._tensors) - set(known):
            raise ValueError(f"{self.path} has tensors that do not belong to this kind of SAE: {_named(left)}")

    def _pop(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ValueError(f"{self.path} lacks the tensor {name}")
        return self._tensors.pop(name)


def imported_sae(
    file: TensorFile, config: SaeConfig, weights: SaeWeights, shape: tuple[int, int], facts: JsonObject
) -> SaeCoder:
    """The coder of an SAE with weights from ``file``; ``meta.json`` will record the ``facts`` about its origin.

    ValueError if the weights do not have the ``shape`` (latents, width), do not fit together, or are not finite.
    """
    if tuple(weights.encoder.shape) != shape:
        raise ValueError(
            f"{file.path}: the encoder is {tuple(weights.encoder.shape)} (latents, width), but the settings say {shape}"
        )
    try:
        return SaeCoder(SparseAutoencoder(config, weights), {"imported_from": facts})
    except ValueError as error:
        raise ValueError(f"{file.path.parent} is not a valid SAE: {error}") from None


def one_of(*allowed: object) -> Check:
    """A check that the value is one of ``allowed``, and of the same type."""

    def check(value: object) -> str | None:
        if any(value == choice and type(value) is type(choice) for choice in allowed):
            return None
        return f"{_shown(value)} is not one of {', '.join(map(_shown, allowed))}"

    return check


def yes_or_no(value: object) -> str | None:
    """A check for true or false."""
    return None if isinstance(value, bool) else f"{_shown(value)} is neither true nor false"


def check_safetensors() -> None:
    """Raise ValueError if the package ``safetensors`` is not installed."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        raise ValueError(NEEDS_SAFETENSORS) from None


def read_safetensors(path: Path) -> TensorFile:
    """Read a safetensors file; the library compares its header with the length of the file.

    ValueError if the file is missing or damaged, or the package ``safetensors`` is not installed.
    """
    check_safetensors()
    from safetensors import SafetensorError, safe_open

    _check_is_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({first_line(error)})") from None
    return TensorFile(path, tensors)


def read_torch(path: Path) -> TensorFile:
    """Read a dictionary of tensors that ``torch.save`` wrote; Python objects in it are not loaded.

    ValueError if the file is missing, damaged or of another format, or holds something else.
    """
    _check_is_file(path)
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):  # also the pickles of torch < 1.6
        raise _unreadable(path, "it is damaged, or is a pickle, which is not loaded") from None
    stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    if not stored or sum(member.file_size for member in members) > size:
        raise _unreadable(path, "its contents are larger than the file")
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:  # torch's own message advises to load without its protection
        raise _unreadable(path, "it is damaged, or holds Python objects, which are not loaded") from None
    except Exception as error:  # reading another kind of file raises errors of no common type
        raise _unreadable(path, first_line(error)) from None
    if not isinstance(contents, dict) or not all(_is_named_tensor(*item) for item in contents.items()):
        raise _unreadable(path, "it is not a dictionary of tensors")
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in contents.values())
    if claimed > size:
        raise _unreadable(path, f"its tensors claim {claimed:,} bytes, which is more than it has")
    return TensorFile(path, contents)


def _check_is_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path} does not exist, or is not a file")


def _is_named_tensor(name: object, tensor: object) -> bool:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        return False
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


def _unreadable(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is not a readable file of weights: {reason}")


def _named(left: Iterable[str]) -> str:
    names = sorted(left)
    return ", ".join(name[:60] for name in names[:4]) + (", ..." if len(names) > 4 else "")


def _shown(value: object) -> str:
    try:
        shown = json.dumps(value)
    except ValueError:
        shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}..."


def _is_short(value: object) -> bool:
    try:
        return len(json.dumps(value, allow_nan=False)) <= LARGEST_FACT
    except (ValueError, RecursionError):
        return False
