"""A kind of sparse coder: a sparse autoencoder, trained here or elsewhere."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike, read_json, write_json, write_npy
from mlsm_plugin.core.files.json_checks import JsonObject, anything, check_json, fields, optional, text, whole
from mlsm_plugin.core.files.npy_files import read_npy
from mlsm_plugin.core.files.planned_folder import META_FILE
from mlsm_plugin.core.sparse_coding.dictionary import META_CHECK as ORIGIN_CHECK
from mlsm_plugin.core.sparse_coding.sae_screening import Screen, screen_of
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig, SaeWeights, SparseAutoencoder, tensors_of
from mlsm_plugin.core.sparse_coding.sparse_coder import (
    DENSE_ENTRIES,
    HiddenStates,
    SparseCoder,
    SparseCodes,
    torch_threads,
)

SAE_CHECK = fields(
    {
        "activation": text,
        "k": optional(whole(1)),
        "input_norm": text,
        "subtract_decoder_bias": anything,
        "rescale_by_decoder_norm": anything,
    }
)


class SaeCoder(SparseCoder):
    """Codes hidden states with a :class:`~mlsm_plugin.core.sparse_coding.sparse_autoencoder.SparseAutoencoder`.

    On disk: an npy file for each tensor, with the tensor's name, and ``meta.json`` with the configuration under
    ``sae``. ``meta`` is as for :class:`~mlsm_plugin.core.sparse_coding.sparse_coder.SparseCoder`.
    """

    kind: ClassVar[str] = "sae"

    def __init__(self, sae: SparseAutoencoder, meta: JsonObject | None = None) -> None:
        self.sae = sae
        self._screen: Screen | None = None
        meta = meta or {}
        sizes = {"n_atoms": sae.num_atoms, "dim": sae.dim}
        for name, size in sizes.items():
            if meta.get(name, size) != size:
                raise ValueError(f"{META_FILE} says {name} {meta[name]} but the encoder has {size}")
        self.meta = {"kind": self.kind, **meta, **sizes, "sae": dataclasses.asdict(sae.config)}

    @property
    def num_atoms(self) -> int:
        return self.sae.num_atoms

    def directions(self) -> np.ndarray:
        decoder: np.ndarray = self.sae.weights.decoder.float().cpu().numpy()
        return decoder

    @property
    def dim(self) -> int:
        return self.sae.dim

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the configuration and the weights."""
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(self.sae.config), sort_keys=True).encode())
        for name, tensor in self.sae.weights._asdict().items():
            if tensor is not None:
                digest.update(name.encode())
                digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()

    def encode(self, hidden: HiddenStates, *, threads: int | None = None) -> SparseCodes:
        """The latents; normalization is part of the SAE. ``threads`` None: keep torch's number of threads."""
        with torch_threads(threads):
            parts = [self._codes(rows) for rows in self._rows(hidden)]
        empty = sp.csr_matrix((0, self.num_atoms), dtype=np.float32)
        return SparseCodes(sp.vstack([empty, *parts], format="csr", dtype=np.float32))

    def encode_padded(self, hidden: HiddenStates, *, threads: int | None = None) -> tuple[Tensor, Tensor] | None:
        k = self.sae.config.k
        if k is None:
            return None
        with torch_threads(threads):
            parts = [self._latents(rows)[1:] for rows in self._rows(hidden)]
        atoms = torch.cat([part_atoms for part_atoms, _ in parts]).view(-1, k)
        weights = torch.cat([part_weights for _, part_weights in parts]).view(-1, k)
        return atoms, weights

    def _rows(self, hidden: HiddenStates) -> list[Tensor]:
        """Split hidden states into parts whose dense latents fit into memory, and move the SAE to their device."""
        rows = hidden.detach() if isinstance(hidden, Tensor) else torch.from_numpy(np.asarray(hidden))
        if rows.dim() != 2 or rows.shape[1] != self.dim:
            raise ValueError(f"hidden must be (n_tokens, {self.dim}), got {tuple(rows.shape)}")
        self.sae = self.sae.to(rows.device)
        size = max(1, DENSE_ENTRIES // self.num_atoms)
        return list(rows.split(size))

    def reconstruct(self, hidden: HiddenStates, codes: sp.csr_matrix) -> np.ndarray:
        rows = torch.as_tensor(hidden).detach().cpu()
        sae = self.sae.to("cpu")
        size = max(1, DENSE_ENTRIES // self.num_atoms)
        parts = [
            sae.reconstructed(torch.from_numpy(codes[start : start + size].toarray()), rows[start : start + size])
            for start in range(0, len(rows), size)
        ]
        return torch.cat([torch.empty(0, self.dim), *parts]).numpy()

    def _latents(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`SparseAutoencoder.active_latents`."""
        if self._screen is None or self._screen.sae is not self.sae:
            self._screen = screen_of(self.sae)
        screened = None if self._screen is None else self._screen.latents(hidden)
        return screened or self.sae.active_latents(hidden)

    def _codes(self, hidden: Tensor) -> sp.csr_matrix:
        rows, atoms, values = self._latents(hidden)
        ends = np.bincount(rows.cpu().numpy(), minlength=len(hidden)).cumsum()
        entries = (values.cpu().numpy(), atoms.cpu().numpy(), np.append(0, ends))
        codes = sp.csr_matrix(entries, shape=(len(hidden), self.num_atoms))
        codes.sort_indices()
        codes.eliminate_zeros()
        return codes

    def save(self, directory: PathLike) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / META_FILE).unlink(missing_ok=True)
        for name, tensor in self.sae.weights._asdict().items():
            if tensor is not None:
                write_npy(directory / f"{name}.npy", tensor.cpu().numpy())
        write_json(directory / META_FILE, self.meta)

    @classmethod
    def load(cls, directory: PathLike, options: Any) -> "SaeCoder":
        directory = Path(directory)
        meta = check_json(read_json(directory / META_FILE), ORIGIN_CHECK, directory / META_FILE)
        sae_meta = check_json(meta, fields({"sae": SAE_CHECK}), directory / META_FILE)["sae"]
        try:
            config = SaeConfig(**{field.name: sae_meta[field.name] for field in dataclasses.fields(SaeConfig)})
            tensors = {
                name: torch.from_numpy(read_npy(directory / f"{name}.npy").astype(np.float32))
                for name in tensors_of(config)
            }
            return cls(SparseAutoencoder(config, SaeWeights(**tensors)), meta)
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory} is not a valid sparse autoencoder: {error}") from None

    def settings(self) -> JsonObject:
        return {**super().settings(), "activation": self.sae.config.activation}
