"""``torch.compile`` of a model that is trained, and fairseq's masked-LM loss as a compiled step needs it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fairseq.criterions import masked_lm
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from mlsm_plugin.core.losses.cross_entropy import token_cross_entropy
from mlsm_plugin.fairseq_plugin.compat.model_parts import project_masked, unwrapped

CompileError = TorchDynamoException  # a model cannot be compiled


def is_one_graph(model: Any) -> bool:
    """Whether torch.compile makes one graph of the encoder of a model."""
    return bool(getattr(getattr(unwrapped(model), "encoder", None), "one_graph", False))


def compile_parts(model: Any, *, one_length: bool) -> list[Any]:
    """Compile encoder and decoder where they are: the names of the weights stay. Returns what is compiled.

    What is one graph has one for each shape if all samples have ``one_length``; other models become pieces.
    """
    model, one_graph = unwrapped(model), is_one_graph(model)
    parts = [getattr(model, name) for name in ("encoder", "decoder") if hasattr(model, name)]
    for part in parts:
        part.compile(fullgraph=one_graph, dynamic=not (one_graph and one_length))
    return parts


def forget_compiled(parts: Iterable[Any]) -> None:
    """Let these modules compute as if they had never been compiled."""
    for part in parts:
        part._compiled_call_impl = None


class MaskedLmLoss(masked_lm.MaskedLmLoss):
    """fairseq's ``masked_lm``, but no float32 copy of all logits is made, and nothing waits for a GPU.

    Checkpoints record the name of this class, which is fairseq's.
    """

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, Any, dict[str, Any]]:
        targets, number, logits, _ = project_masked(model, sample, self.padding_idx)
        loss = token_cross_entropy(logits, targets, ignored=self.padding_idx).sum()
        counts = {"ntokens": sample["ntokens"], "nsentences": sample["nsentences"], "sample_size": number}
        return loss, number, {"loss": loss.detach(), **counts}

    @staticmethod
    def reduce_metrics(logging_outputs: Any) -> None:
        """Log the loss of each masked token; an update without one, as of a short last batch, has none."""
        if sum(log.get("sample_size", 0) for log in logging_outputs) > 0:
            masked_lm.MaskedLmLoss.reduce_metrics(logging_outputs)
