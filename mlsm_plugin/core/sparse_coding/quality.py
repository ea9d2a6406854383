"""How well a coder reconstructs hidden states, with the names and definitions of SAEBench's core evaluation.

Source: Karvonen et al., "SAEBench: A Comprehensive Benchmark for Sparse Autoencoders in Language Model
Interpretability", 2025, arXiv 2503.09532, and its code. Two definitions follow textbooks instead.
``explained_variance`` is relative to the mean of all rows, with sums before the ratio (SAEBench's issue 76 and
SAELens's pull request 665 discuss earlier variants), and ``mse`` is divided by the number of rows once.
"""

import numpy as np
import scipy.sparse as sp
import torch

from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.sparse_coding.encode import ROWS_PER_CHUNK, as_array, check_finite
from mlsm_plugin.core.sparse_coding.sparse_coder import HiddenStates, SparseCoder

Figures = dict[str, float | int | None]
# shares of the tokens; latents that fire more often are counted
DENSITIES = {"1_percent": 0.01, "10_percent": 0.1}


class ReconstructionQuality:
    """The figures of a coder, from chunks of rows, in one pass and in float64.

    It needs memory for one chunk and a few numbers for each latent and dimension. The size of the chunks does not
    affect the result.
    """

    def __init__(self, num_atoms: int, dim: int) -> None:
        self.rows = 0
        self._uses = np.zeros(num_atoms, np.int64)
        self._origin = np.zeros(dim)  # the first row; distances from it keep their digits even if zero is far away
        self._mean = np.zeros(dim)  # of the rows minus the origin
        self._variation = np.zeros(dim)  # sum of squared distances from the mean
        self._rows_with_norm = 0
        names = ("squared_error", "squared_norm", "l1", "cosine", "norm_ratio", "squared_norm_out", "product")
        self._sums = dict.fromkeys(names, 0.0)

    def add(self, hidden: HiddenStates, codes: sp.csr_matrix, reconstruction: HiddenStates) -> None:
        """Add a chunk of rows: hidden states and their reconstructions (n, dim), and codes (n, num_atoms).

        ValueError if shapes differ, or a value is NaN or infinite (names the row of this chunk).
        """
        x = np.asarray(as_array(hidden), np.float64)
        reconstructed = np.asarray(as_array(reconstruction), np.float64)
        codes = sp.csr_matrix(codes)
        if x.ndim != 2 or x.shape[1] != len(self._mean) or reconstructed.shape != x.shape:
            shapes = f"{x.shape} and {reconstructed.shape}"
            raise ValueError(f"hidden states and reconstructions must both be (n, {len(self._mean)}), got {shapes}")
        if codes.shape != (len(x), len(self._uses)):
            raise ValueError(f"codes must be {(len(x), len(self._uses))}, got {codes.shape}")
        check_finite(x, "the hidden state of row")
        check_finite(reconstructed, "the reconstruction of row")
        if not np.isfinite(codes.data).all():
            raise ValueError("the code holds NaN or infinity; all values must be finite")
        if len(x) == 0:
            return
        self._add_variation(x)
        columns = codes.indices[codes.data != 0]
        self._uses += np.bincount(columns, minlength=len(self._uses))
        norms = np.linalg.norm(x, axis=1)
        norms_out = np.linalg.norm(reconstructed, axis=1)
        products = (x * reconstructed).sum(axis=1)
        known = norms > 0  # a row of zeros has no direction
        self._rows_with_norm += int(known.sum())
        scale = np.where(norms_out > 0, norms * norms_out, 1.0)
        self._sums["squared_error"] += float(((x - reconstructed) ** 2).sum())
        self._sums["squared_norm"] += float((x**2).sum())
        self._sums["l1"] += float(np.abs(codes.data.astype(np.float64)).sum())
        self._sums["cosine"] += float((products[known] / scale[known]).sum())
        self._sums["norm_ratio"] += float((norms_out[known] / norms[known]).sum())
        self._sums["squared_norm_out"] += float((norms_out**2).sum())
        self._sums["product"] += float(products.sum())

    def _add_variation(self, x: np.ndarray) -> None:
        """Chan, Golub and LeVeque's update of mean and sum of squares (The American Statistician, 1983)."""
        if self.rows == 0:
            self._origin = x[0].copy()
        shifted = x - self._origin
        mean = shifted.mean(axis=0)
        total = self.rows + len(x)
        step = mean - self._mean
        self._variation += ((shifted - mean) ** 2).sum(axis=0) + step**2 * (self.rows * len(x) / total)
        self._mean += step * (len(x) / total)
        self.rows = total

    def health(self) -> JsonObject:
        """The health in a coder's ``meta.json``; the error is ``||x - r||_F / ||x||_F``, 0 if all rows are zero."""
        error = self._sums["squared_error"]
        norm = self._sums["squared_norm"]
        return {
            "n_tokens": self.rows,
            "n_atoms": len(self._uses),
            "unused_atoms": int((self._uses == 0).sum()),
            "mean_nonzeros": int(self._uses.sum()) / self.rows,
            "reconstruction_error": (error / norm) ** 0.5 if norm else 0.0,
        }

    def result(self) -> Figures:
        """The figures as JSON values; None if a figure is not defined.

        - ``tokens``: number of rows.
        - ``explained_variance``: ``1 - sum ||x - r||^2 / sum ||x - mean||^2``; 1 is perfect, and 0 means no better than
          the mean. None if all rows are equal.
        - ``mse``: mean of ``||x - r||^2``, summed over dimensions.
        - ``cossim``: mean cosine of ``x`` and ``r``, 0 if ``r`` is zero.
        - ``l2_ratio``: mean of ``||r|| / ||x||``; below 1 the reconstructions are shrunk. This and ``cossim`` leave
          out rows of zeros.
        - ``relative_reconstruction_bias``: ``sum ||r||^2 / sum x r`` (Rajamanoharan et al., 2024, arXiv 2404.16014,
          eq. 10); 1 is unbiased.
        - ``l0``, ``l1``: mean number, and mean sum, of the non-zeros of a code.
        - ``frac_alive``: share of the latents that any row uses.
        - ``freq_over_1_percent``, ``freq_over_10_percent``: share of the latents used by more than this share of rows.
        - ``normalized_freq_over_1_percent``, ...: the share of all non-zeros that belong to these latents.
        """
        sums = self._sums
        rows = self.rows
        uses = self._uses
        frequent = {name: uses > share * rows for name, share in DENSITIES.items()}
        variation = float(self._variation.sum())
        return {
            "tokens": rows,
            "explained_variance": 1 - sums["squared_error"] / variation if variation > 0 else None,
            "mse": _ratio(sums["squared_error"], rows),
            "cossim": _ratio(sums["cosine"], self._rows_with_norm),
            "l2_ratio": _ratio(sums["norm_ratio"], self._rows_with_norm),
            "relative_reconstruction_bias": _ratio(sums["squared_norm_out"], sums["product"]),
            "l0": _ratio(int(uses.sum()), rows),
            "l1": _ratio(sums["l1"], rows),
            "frac_alive": _ratio(int((uses > 0).sum()), len(uses)),
            **{f"freq_over_{name}": _ratio(int(some.sum()), len(uses)) for name, some in frequent.items()},
            **{
                f"normalized_freq_over_{name}": _ratio(int(uses[some].sum()), int(uses.sum()))
                for name, some in frequent.items()
            },
        }


def coder_health(
    hidden: np.ndarray, coder: SparseCoder, *, threads: int | None = None, device: torch.device | str = "cpu"
) -> JsonObject:
    """Code and reconstruct a sample on a device, and measure the quality; see :meth:`ReconstructionQuality.health`.

    The error is relative to ``hidden`` (n_tokens, dim), so normalize its rows to give them equal weight.
    """
    quality = ReconstructionQuality(coder.num_atoms, coder.dim)
    for start in Progress(range(0, len(hidden), ROWS_PER_CHUNK), desc="judging the dictionary", unit="chunk"):
        chunk = hidden[start : start + ROWS_PER_CHUNK]
        codes = coder.encode(torch.from_numpy(chunk).to(device), threads=threads).codes
        quality.add(chunk, codes, coder.reconstruct(chunk, codes))
    return quality.health()


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
