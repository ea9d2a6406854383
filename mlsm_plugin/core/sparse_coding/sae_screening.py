"""Latents of an SAE on CPUs with fast bfloat16: screened in bfloat16, computed and certified in float32.

The pre-activations of a row differ from those in bfloat16 by at most

    ||x - x'|| max ||w|| + ||x'|| max ||w - w'|| + max |b - b'| + the rounding of the result

where a prime marks values rounded to bfloat16, and ``w`` runs over the rows of the encoder. Only latents that are
within this bound of being active are computed in float32. If that does not settle which latents are among the k
largest, the whole row is computed in float32. The latents are therefore those of float32, up to float32's rounding.
"""

import torch
from torch import Tensor

from mlsm_plugin.core.sparse_coding.sparse_autoencoder import ChosenLatents, SparseAutoencoder, largest, row_indices

# relative error of rounding to bfloat16, plus a little for the float32 sums
ROUNDING = 2.0**-8 + 1e-4
CANDIDATES = 1.5  # number of largest latents that are computed, in units of k
MOST_CANDIDATES = 0.1  # with more candidates than this share of all latents, dense products are faster


class Screen:
    """Rounded weights of an SAE and the bounds on their errors.

    The SAE is on the CPU, has the activation ``topk`` or ``jumprelu``, and is not rescaled by its decoder's norms.
    """

    def __init__(self, sae: SparseAutoencoder) -> None:
        self.sae = sae
        weights = sae.weights
        self.encoder = weights.encoder.bfloat16()
        self.bias = weights.encoder_bias.bfloat16()
        self.largest_norm = float(torch.linalg.vector_norm(weights.encoder, dim=1).max())
        self.encoder_error = float(torch.linalg.vector_norm(weights.encoder - self.encoder.float(), dim=1).max())
        self.bias_error = float((weights.encoder_bias - self.bias.float()).abs().max())

    def latents(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """As :meth:`SparseAutoencoder.active_latents`; None if dense products are faster."""
        x = self.sae.encoder_input(hidden)
        rounded = x.bfloat16()
        pre = torch.addmm(self.bias, rounded, self.encoder.T)
        row_error = torch.linalg.vector_norm(x - rounded.float(), dim=1)
        row_norm = torch.linalg.vector_norm(rounded.float(), dim=1)
        bound = (row_error * self.largest_norm + row_norm * self.encoder_error) * (1 + 1e-4) + self.bias_error
        return self._of_topk(x, pre, bound) if self.sae.config.k is not None else self._above_threshold(x, pre, bound)

    def _of_topk(self, x: Tensor, pre: Tensor, bound: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        k = self.sae.config.k
        assert k is not None
        count = round(CANDIDATES * k)
        if count > MOST_CANDIDATES * self.sae.num_atoms:
            return None
        rounded_values, columns = largest(pre, count)
        values = self._computed(x, row_indices(columns), columns.flatten()).view(-1, count)
        best, places = values.topk(k, dim=1, sorted=False)
        columns = columns.gather(1, places)
        highest_other = rounded_values.amin(1).float()  # no other latent is above this in bfloat16
        unsettled = torch.nonzero(
            best.amin(1).relu() <= highest_other + highest_other.abs() * (2 * ROUNDING) + bound
        ).squeeze(1)
        if len(unsettled):
            weights = self.sae.weights
            exact = torch.addmm(weights.encoder_bias, x[unsettled], weights.encoder.T)
            best[unsettled], columns[unsettled] = largest(exact, k)
        return row_indices(columns), columns.flatten(), best.relu().flatten()

    def _above_threshold(self, x: Tensor, pre: Tensor, bound: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        threshold = self.sae.weights.threshold
        assert threshold is not None
        # comparison with a rounded bar needs additional slack
        bar = threshold.clamp(min=0) - float(bound.max()) if len(x) else threshold
        places = torch.nonzero(pre > (bar - bar.abs() * (3 * ROUNDING)).bfloat16())
        if len(places) > MOST_CANDIDATES * pre.numel():
            return None
        rows, columns = places.unbind(1)
        values = self._computed(x, rows, columns)
        kept = (values > threshold[columns]) & (values > 0)
        return rows[kept], columns[kept], values[kept]

    def _computed(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Pre-activations in float32 at these places."""
        weights = self.sae.weights
        chosen = ChosenLatents(rows, columns, (len(x), self.sae.num_atoms))
        return chosen.products(x, weights.encoder) + weights.encoder_bias[columns]


def screen_of(sae: SparseAutoencoder) -> Screen | None:
    """A screen for an SAE, or None if it does not pay off."""
    config = sae.config
    fits = config.activation in ("topk", "jumprelu") and not config.rescale_by_decoder_norm
    return Screen(sae) if fits and sae.weights.encoder.device.type == "cpu" and _is_fast() else None


def _is_fast() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32, as far as torch knows."""
    return any(getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
