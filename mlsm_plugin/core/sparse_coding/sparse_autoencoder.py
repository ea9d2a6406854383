"""A sparse autoencoder (SAE): one matrix product and an activation give the latents of a hidden state.

With ``x`` the hidden state after :func:`SparseAutoencoder.normalized`, and ``b_dec`` subtracted if the SAE was trained
that way,

    pre = x @ encoder.T + encoder_bias
    latents = activation(pre)
    reconstruction = latents @ decoder + decoder_bias, then the normalization is undone.

Each row of ``encoder`` and ``decoder`` belongs to a latent, like the rows of a dictionary. The activations:

- ``relu``: ``max(pre, 0)``.
- ``topk``: the same for the ``k`` largest values of a row, else 0 (Gao et al., 2024, arXiv 2406.04093).
- ``jumprelu``: the same where ``pre > threshold``, else 0 (Rajamanoharan et al., 2024, arXiv 2407.14435). A BatchTopK
  SAE (Bussmann et al., 2024, arXiv 2412.06410) is used in this form, with one threshold for all latents.
- ``gated``: ``max(exp(gate_scale) * (x @ encoder.T) + gate_bias, 0)`` where ``pre > 0``, else 0 (Rajamanoharan et al.,
  2024, arXiv 2404.16014).

Only ``k`` of thousands of latents are non-zero. On a CPU, products with the ``k`` chosen rows of a matrix (torch's CSR
kernels) take about a tenth of the time of dense products. On other devices the products are dense.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# a global filter, since `catch_warnings` around each product would make Python repeat all other warnings
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state", category=UserWarning)

ACTIVATIONS = ("relu", "topk", "jumprelu", "gated")
INPUT_NORMS = ("none", "constant_norm", "layer_norm")
LAYER_NORM_EPSILON = 1e-5  # as in SAELens
# A longer row is cut into groups of sqrt(n / k) values. The k largest values lie in the k groups with the largest
# maxima, so that two short searches find them.
FEWEST_GROUPED = 256


@dataclass(frozen=True)
class SaeConfig:
    """The configuration of an SAE; ValueError if a value is not allowed.

    The input norm ``constant_norm`` scales each hidden state to the norm sqrt(dim). ``layer_norm`` subtracts its mean
    and divides by its standard deviation (n - 1) + 1e-5. With ``rescale_by_decoder_norm``, ``pre`` is multiplied by the
    norms of the decoder's rows, and the latents are divided by them before the decoder.
    """

    activation: str = "relu"  # one of ACTIVATIONS
    k: int | None = None  # number of latents that topk keeps; None for the other activations
    subtract_decoder_bias: bool = True  # from the input of the encoder
    input_norm: str = "none"  # one of INPUT_NORMS
    rescale_by_decoder_norm: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"the activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.input_norm not in INPUT_NORMS:
            raise ValueError(f"the input norm {self.input_norm!r} is not one of {', '.join(INPUT_NORMS)}")
        if not isinstance(self.subtract_decoder_bias, bool) or not isinstance(self.rescale_by_decoder_norm, bool):
            raise ValueError("subtract_decoder_bias and rescale_by_decoder_norm must be true or false")
        whole = isinstance(self.k, int) and not isinstance(self.k, bool) and self.k >= 1
        if (self.activation == "topk") != whole:
            raise ValueError(f"k must be a whole number >= 1 with topk, and absent otherwise, got {self.k!r}")
        if self.rescale_by_decoder_norm and self.activation == "gated":
            raise ValueError("a gated SAE cannot be rescaled by the norms of its decoder")


class SaeWeights(NamedTuple):
    """The tensors of an SAE; tensors that its activation does not use are None."""

    encoder: Tensor  # (n_atoms, dim)
    encoder_bias: Tensor  # (n_atoms,); in a gated SAE, the bias of the gates
    decoder: Tensor  # (n_atoms, dim)
    decoder_bias: Tensor  # (dim,)
    threshold: Tensor | None = None  # (n_atoms,), jumprelu
    gate_scale: Tensor | None = None  # (n_atoms,), gated: logarithm of the scale of the magnitudes
    gate_bias: Tensor | None = None  # (n_atoms,), gated: bias of the magnitudes


ONLY_OF = {"threshold": "jumprelu", "gate_scale": "gated", "gate_bias": "gated"}


class SparseAutoencoder:
    """An SAE that codes and reconstructs; it has no state, and its tensors become float32.

    ValueError if a tensor is missing or superfluous, has another shape, or holds NaN or infinity.
    """

    def __init__(self, config: SaeConfig, weights: SaeWeights) -> None:
        self.config = config
        self.weights = weights = _each(weights, lambda tensor: tensor.detach().float().contiguous())
        if weights.encoder.dim() != 2 or weights.encoder.numel() == 0:
            raise ValueError(f"the encoder must be (n_atoms, dim) and not empty, got {tuple(weights.encoder.shape)}")
        latents, dim = weights.encoder.shape
        shapes = {"encoder": (latents, dim), "decoder": (latents, dim), "decoder_bias": (dim,)}
        for name, tensor in weights._asdict().items():
            expected = name in tensors_of(self.config)
            if (tensor is not None) != expected:
                problem = "is missing" if expected else "does not belong"
                raise ValueError(f"{name} {problem} in an SAE with the activation {self.config.activation}")
            if tensor is None:
                continue
            shape = shapes.get(name, (latents,))
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, but must have {shape}")
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} holds NaN or infinity; all values must be finite")
        if self.config.k is not None and self.config.k > latents:
            raise ValueError(f"k is {self.config.k}, but there are only {latents} latents")
        self.num_atoms = latents
        self.dim = dim
        self.decoder_norms = torch.linalg.vector_norm(weights.decoder, dim=1)

    def to(self, device: torch.device | str) -> "SparseAutoencoder":
        """The SAE on a device; itself if it is already there."""
        if self.weights.encoder.device == torch.device(device):
            return self
        moved = copy.copy(self)
        moved.weights = _each(self.weights, lambda tensor: tensor.to(device))
        moved.decoder_norms = self.decoder_norms.to(device)
        return moved

    def latents(self, hidden: Tensor) -> Tensor:
        """Non-negative latents (n, n_atoms) float32 of hidden states (n, dim) on the device of the weights."""
        weights = self.weights
        config = self.config
        pre = self._pre_activations(hidden)
        if config.k is not None:
            values, columns = largest(pre, config.k)
            return torch.zeros_like(pre).scatter_(1, columns, values.relu())
        if config.activation == "gated":
            assert weights.gate_scale is not None
            assert weights.gate_bias is not None
            magnitudes = (pre - weights.encoder_bias) * weights.gate_scale.exp() + weights.gate_bias
            return magnitudes.relu() * (pre > 0)
        if config.activation == "jumprelu":
            assert weights.threshold is not None
            return pre.relu() * (pre > weights.threshold)
        return pre.relu()

    def active_latents(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The non-zero latents of hidden states (n, dim); for ``topk``, the k largest of each row.

        Returns ascending rows (m,), columns (m,), and non-negative values (m,) float32.
        """
        if self.config.k is not None:
            values, columns = largest(self._pre_activations(hidden), self.config.k)
            return row_indices(columns), columns.flatten(), values.relu().flatten()
        latents = self.latents(hidden)
        # takes a sixth of the time of to_sparse_csr
        places = torch.from_numpy(np.flatnonzero((latents > 0).cpu().numpy())).to(latents.device)
        rows = places // self.num_atoms
        return rows, places - rows * self.num_atoms, latents.flatten()[places]

    def reconstructed(self, latents: Tensor, hidden: Tensor) -> Tensor:
        """Reconstructions (n, dim) float32 of hidden states from their latents, dense or sparse (CSR).

        Only the norm, or the mean and deviation, of ``hidden`` are used, to undo the normalization.
        """
        _, scale, shift = self.normalized(hidden)
        directions = self.weights.decoder
        if self.config.rescale_by_decoder_norm:
            directions = _divided(directions, self.decoder_norms)
        return (latents @ directions + self.weights.decoder_bias) * scale + shift

    def with_unit_decoder(self, norms: Tensor) -> "SparseAutoencoder":
        """The same SAE with the norms (n_atoms,) of the decoder's rows folded into the encoder.

        Multiplying the encoder's rows and biases by ``norms`` gives the pre-activations ``pre * norms``. Dividing the
        latents by ``norms`` before the decoder amounts to a decoder with unit rows.
        """
        weights = self.weights
        folded = weights._replace(
            encoder=weights.encoder * norms[:, None],
            encoder_bias=weights.encoder_bias * norms,
            decoder=_divided(weights.decoder, norms),
        )
        return SparseAutoencoder(replace(self.config, rescale_by_decoder_norm=False), folded)

    def normalized(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalized hidden states (n, dim), and the scale and shift (n, 1) that undo it; float32."""
        hidden = hidden.float()
        ones = torch.ones_like(hidden[:, :1])
        if self.config.input_norm == "constant_norm":
            scale = constant_norm_scale(hidden)
            return hidden / scale, scale, torch.zeros_like(ones)
        if self.config.input_norm == "layer_norm":
            mean = hidden.mean(dim=1, keepdim=True)
            deviation = hidden.std(dim=1, keepdim=True)
            return (hidden - mean) / (deviation + LAYER_NORM_EPSILON), deviation, mean
        return hidden, ones, torch.zeros_like(ones)

    def encoder_input(self, hidden: Tensor) -> Tensor:
        """Hidden states (n, dim) as the encoder sees them, float32."""
        x, _, _ = self.normalized(hidden)
        return x - self.weights.decoder_bias if self.config.subtract_decoder_bias else x

    def _pre_activations(self, hidden: Tensor) -> Tensor:
        """(n, n_atoms)"""
        pre = torch.addmm(self.weights.encoder_bias, self.encoder_input(hidden), self.weights.encoder.T)
        return pre * self.decoder_norms if self.config.rescale_by_decoder_norm else pre


def constant_norm_scale(rows: Tensor) -> Tensor:
    """The divisors (n, 1) that scale rows (n, dim) to the norm sqrt(dim); 1 for a row of zeros."""
    scale = torch.linalg.vector_norm(rows, dim=1, keepdim=True) / rows.shape[1] ** 0.5
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _divided(decoder: Tensor, norms: Tensor) -> Tensor:
    return decoder / norms.clamp(min=torch.finfo(torch.float32).tiny)[:, None]


def row_indices(columns: Tensor) -> Tensor:
    """The row of each entry of ``columns`` (n, k), (n * k,)."""
    return torch.arange(len(columns), device=columns.device).repeat_interleave(columns.shape[1])


def _each(weights: SaeWeights, change: Callable[[Tensor], Tensor]) -> SaeWeights:
    return SaeWeights(**{name: change(tensor) for name, tensor in weights._asdict().items() if tensor is not None})


def tensors_of(config: SaeConfig) -> list[str]:
    """The names of the tensors of an SAE with this configuration."""
    return [name for name in SaeWeights._fields if ONLY_OF.get(name) in (None, config.activation)]


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of values (n, m), like ``topk(k, dim=1, sorted=False)`` up to ties and order.

    Returns values (n, k) and columns (n, k) int64. On a CPU this is about three times as fast as ``torch.topk`` for
    3,000 values and k = 42, since it does not search all values.
    """
    rows, width = values.shape
    size = int((width / k) ** 0.5)
    if values.device.type != "cpu" or size < 2 or width < FEWEST_GROUPED or rows == 0:
        return values.topk(k, dim=1, sorted=False)
    groups = width // size  # column c of the first groups * size columns is in group c % groups
    grouped = values[:, : groups * size].unflatten(1, (size, groups))
    rest = values[:, groups * size :]
    best = grouped.amax(1).topk(k, dim=1, sorted=False).indices  # (n, k)
    columns = (best[:, None, :] + torch.arange(0, groups * size, groups)[:, None]).flatten(1)  # (n, size * k)
    if rest.shape[1]:
        last = torch.arange(groups * size, width).expand(rows, -1)
        columns = torch.cat([columns, last], dim=1)
    top, places = values.gather(1, columns).topk(k, dim=1, sorted=False)
    return top, columns.gather(1, places)


def largest_of_all(values: Tensor, count: int, bar: float) -> Tensor:
    """Ascending flat indices (count,) int64 of the largest values of a matrix.

    ``bar`` is a guess: if at least ``count`` values are above it, only these are searched.
    """
    flat = values.flatten()
    above = torch.nonzero(flat > bar).squeeze(1)
    if len(above) >= count:
        above = above[flat[above].topk(count, sorted=False).indices]
    else:
        above = flat.topk(count, sorted=False).indices
    return above.sort().values


class ChosenLatents:
    """Places in a matrix of latents, and products with the values at these places.

    ``rows`` (m,) are ascending and, like ``columns`` (m,), int64; ``shape`` is (n, n_atoms).
    """

    def __init__(self, rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> None:
        self.rows = rows
        self.columns = columns
        self.shape = shape
        self.dense = rows.device.type != "cpu"
        self._by_column: Tensor | None = None

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """(m,), the inner products of the rows of ``left`` (n, dim) and ``right`` (n_atoms, dim) at these places."""
        if self.dense:
            return (left @ right.T)[self.rows, self.columns]
        places = _csr(self.rows, self.columns, left.new_zeros(len(self.rows)), self.shape)
        return torch.sparse.sampled_addmm(places, left, right.T).values()

    def times(self, values: Tensor, matrix: Tensor) -> Tensor:
        """(n, dim), the product of the matrix of ``values`` (m,) and ``matrix`` (n_atoms, dim)."""
        if self.dense:
            return self._filled(values) @ matrix
        return _csr(self.rows, self.columns, values, self.shape) @ matrix

    def transposed_times(self, values: Tensor, matrix: Tensor) -> Tensor:
        """(n_atoms, dim), the product of the transposed matrix of ``values`` (m,) and ``matrix`` (n, dim)."""
        if self.dense:
            return self._filled(values).T @ matrix
        if self._by_column is None:
            self._by_column = torch.argsort(self.columns, stable=True)
        order = self._by_column
        return _csr(self.columns[order], self.rows[order], values[order], self.shape[::-1]) @ matrix

    def sums(self, values: Tensor) -> Tensor:
        """(n_atoms,), the sums of the columns of the matrix of ``values`` (m,)."""
        if self.dense:
            return self._filled(values).sum(0)
        return values.new_zeros(self.shape[1]).index_add_(0, self.columns, values)

    def _filled(self, values: Tensor) -> Tensor:
        filled = values.new_zeros(self.shape)
        filled[self.rows, self.columns] = values
        return filled


def _csr(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A sparse matrix; ``rows`` must be ascending."""
    ends = torch.bincount(rows, minlength=shape[0]).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)
