"""How much each atom of a code matters for the auxiliary model's own prediction, to first order.

CoCoMix (Tack et al., "LLM Pretraining with Continuous Concepts", 2025, arXiv 2502.08524) selects the latents of a
hidden state by weight times gradient of the model's loss with respect to the weight. A weight adds a multiple of its
atom to the hidden state, so that the gradient with respect to the weight is that with respect to the hidden state,
times the atom. Here the model is a masked LM, and the loss is that of the unmasked text whose hidden states are coded:
the sum of ``-log p(token)`` over the content tokens of a batch.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from mlsm_plugin.data.token_blocks import is_content
from mlsm_plugin.hidden_states.masked_lms import MaskedLm, NoMaskedLmError, open_masked_lm
from mlsm_plugin.sparse_coding.code_selection import CodeSelection
from mlsm_plugin.sparse_coding.coder import SparseCoder


class LossGradients:
    """Gradients of a masked LM's own loss; like an encoder, it gives a vector for each token.

    Args:
        model: the masked LM.
        layer: hidden state with respect to which the gradients are.
        dim: width of the hidden states.
    """

    def __init__(self, model: MaskedLm, layer: int, dim: int) -> None:
        self.model, self.layer, self.dim = model, layer, dim

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """The gradients.

        Args:
            tokens: ``(B, T)`` fairseq's ids, right-padded.

        Returns:
            ``(B, T, dim)`` float32, on the model's device.
        """
        tokens = tokens.to(self.device)
        content = is_content(tokens, self.model.dictionary)
        taken: list[Tensor] = []

        def take(hidden: Tensor) -> Tensor:
            taken.append(hidden.detach().requires_grad_())
            return taken[-1]

        with torch.enable_grad(), self.model.changed(self.layer, take):
            logits = self.model.logits(tokens, content)
            loss = F.cross_entropy(logits.float(), self.model.columns(tokens[content]), reduction="sum")
            (gradient,) = torch.autograd.grad(loss, taken)
        return gradient.float()


def open_loss_gradients(
    selection: CodeSelection,
    name: str | os.PathLike[str],
    data_bin: str | os.PathLike[str],
    coder: SparseCoder,
    *,
    layer: int,
    device: str | torch.device | None,
    fp16: bool,
) -> LossGradients | None:
    """What a selection by attribution needs; None for another selection.

    Args:
        selection: which atoms are kept.
        name, data_bin, layer, device, fp16: as of :class:`~mlsm_plugin.hidden_states.encoder.HiddenStateEncoder`.
        coder: what codes the hidden states.

    Raises:
        ValueError: the auxiliary model is not a masked LM, or the coder has no directions.
    """
    if not selection.needs_gradients:
        return None
    coder.directions()  # raises an error for a kind without them
    try:
        model = open_masked_lm(name, data_bin, device=device, fp16=fp16)
    except NoMaskedLmError as error:
        raise ValueError(f"--latent-select {selection.by} needs the loss of a masked LM, but {error}") from None
    return LossGradients(model, layer, coder.dim)
