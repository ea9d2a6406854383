"""Codes of hidden states as padded distributions, computed when a batch needs them."""

import logging

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from mlsm_plugin.core.coding.block_coding import TOKENS_TO_JUDGE_EMPTINESS
from mlsm_plugin.core.machine.devices import half_products
from mlsm_plugin.core.sparse_coding.sparse_coder import SparseCoder
from mlsm_plugin.core.sparse_coding.stored_codes import padded_distributions, strongest, without_negative_codes

logger = logging.getLogger(__name__)


class StateCodes:
    """Codes of hidden states, the same as a store would have.

    ``top`` is the number of strongest atoms to keep of each code; None: all.
    """

    def __init__(self, coder: SparseCoder, top: int | None = None) -> None:
        self._coder = coder
        self._top = top
        self._warned = False
        self._has_coded = False

    def record(self) -> dict[str, object]:
        """What decides the codes, besides the hidden states."""
        return {"dictionary": self._coder.fingerprint[:12], "number of strongest atoms": self._top}

    @torch.no_grad()
    def of_states(self, hidden: Tensor, content: Tensor | None = None) -> dict[str, Tensor]:
        """Codes of hidden states ``(n, dim)``; only those with ``content`` ``(n,)`` bool have one (None: all).

        A token without a hidden state (zero) has no code.

        ValueError if all codes of a large batch are empty, for example because lambda is too large.

        Returns:
            ``atoms`` (n, m) int32 padded with -1, and ``weights`` (n, m) float16 padded with 0, on the device of
            ``hidden``; the rows without content are empty.
        """
        is_known = hidden.any(dim=1)
        content = is_known if content is None else content & is_known
        threads = torch.get_num_threads()  # other ranks may share the cores
        with half_products(hidden.device, half=False):  # a training in bfloat16 does not change the codes
            encoded = self._coder.encode_padded(hidden, threads=threads)
            if encoded is None:
                atoms, weights = self._solved(hidden, content, threads)
            else:
                atoms, weights = self._strongest(hidden, *encoded)
        weights.masked_fill_(~content[:, None], 0.0)
        return {"atoms": atoms.int().masked_fill_(weights == 0, -1), "weights": weights}

    def _solved(self, hidden: Tensor, content: Tensor, threads: int) -> tuple[Tensor, Tensor]:
        """Atoms and weights ``(n, m)`` of hidden states ``(n, dim)``, solved only for ``content`` tokens ``(n,)``."""
        rows = content.nonzero().squeeze(1)
        atoms = np.zeros((0, 0), np.int32)
        weights = np.zeros((0, 0), np.float16)
        if len(rows):
            codes = strongest(self._encode(hidden[rows], threads), self._top)
            atoms, weights = padded_distributions(codes)
        return _in_rows(atoms, rows, like=hidden), _in_rows(weights, rows, like=hidden)

    def _strongest(self, hidden: Tensor, atoms: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The strongest atoms ``(n, m)`` of ``(n, k)``, with float16 weights that sum to 1 or are all 0."""
        if hidden.device.type == "cpu" or not self._has_coded:  # waits for a GPU, until a batch has codes
            if not bool(weights.isfinite().all()):
                raise ValueError("codes must be finite and >= 0, as they become distributions")
            self._has_coded = bool(weights.any())
            self._check_not_all_empty(hidden, self._has_coded)
        top = self._top
        if top is not None and top < weights.size(1):
            weights, places = weights.topk(top, dim=1)
            atoms = atoms.gather(1, places)
        return atoms, (weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo().tiny)).half()

    def _encode(self, hidden: Tensor, threads: int) -> sp.csr_matrix:
        """Codes ``(n, n_atoms)`` of hidden states ``(n, dim)``, computed on their device."""
        coded = self._coder.encode(hidden, threads=threads)
        inexact = self._coder.inexact(coded)
        if inexact is not None and not self._warned:
            self._warned = True
            logger.warning("%d of %d codes of a batch %s", len(inexact.rows), len(hidden), inexact.reason)
        codes = without_negative_codes(coded.codes)
        self._check_not_all_empty(hidden, codes.nnz > 0)
        return codes

    def _check_not_all_empty(self, hidden: Tensor, has_codes: bool) -> None:
        if not has_codes and len(hidden) >= TOKENS_TO_JUDGE_EMPTINESS:
            why = self._coder.why_empty(hidden)
            raise ValueError(f"the codes of all {len(hidden)} masked tokens of a batch are empty, since {why}")


def _in_rows(values: np.ndarray, rows: Tensor, *, like: Tensor) -> Tensor:
    """A tensor with ``values`` in ``rows`` and 0 elsewhere, with as many rows as ``like`` and on its device."""
    part = torch.from_numpy(values).to(like.device)
    return part.new_zeros(len(like), part.size(1)).index_copy_(0, rows, part)
