"""``torch.compile`` for training, and fairseq's masked-LM loss in a form that a compiled step needs."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from fairseq.criterions import masked_lm
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn

from mlsm_plugin.core.losses.cross_entropy import token_cross_entropy
from mlsm_plugin.fairseq_plugin.compat.batches import LoggingOutput, Sample
from mlsm_plugin.fairseq_plugin.compat.model_parts import project_masked, unwrapped


def is_compile_error(error: Exception) -> bool:
    """Whether the compiler of torch failed; importing it, which takes a second, is left to the first compilation."""
    errors = sys.modules.get("torch._dynamo.exc")
    return errors is not None and isinstance(error, errors.TorchDynamoException)


def is_one_graph(model: nn.Module) -> bool:
    """Whether torch.compile makes one graph of the encoder of a model."""
    return bool(getattr(getattr(unwrapped(model), "encoder", None), "one_graph", False))


def compile_parts(model: nn.Module, *, one_length: bool) -> list[nn.Module]:
    """Compile encoder and decoder in place, which keeps the names of the weights. Returns the compiled modules.

    If all samples have ``one_length``, a model that compiles to one graph gets a graph for each shape; other models
    become several graphs.
    """
    one_graph = is_one_graph(model)
    model = unwrapped(model)
    parts = [getattr(model, name) for name in ("encoder", "decoder") if hasattr(model, name)]
    for part in parts:
        part.compile(fullgraph=one_graph, dynamic=not (one_graph and one_length))
    return parts


def forget_compiled(parts: Iterable[nn.Module]) -> None:
    """Undo the compilation of these modules."""
    for part in parts:
        part._compiled_call_impl = None


class MaskedLmLoss(masked_lm.MaskedLmLoss):
    """fairseq's ``masked_lm``, without a float32 copy of all logits and without waiting for a GPU.

    It has the name of fairseq's class, since checkpoints record it.
    """

    def forward(
        self, model: BaseFairseqModel, sample: Sample, reduce: bool = True
    ) -> tuple[Tensor, int | Tensor, LoggingOutput]:
        targets, number, logits, _ = project_masked(model, sample, self.padding_idx)
        assert logits is not None
        loss = token_cross_entropy(logits, targets, ignore_index=self.padding_idx).sum()
        counts = {"ntokens": sample["ntokens"], "nsentences": sample["nsentences"], "sample_size": number}
        return loss, number, {"loss": loss.detach(), **counts}

    @staticmethod
    def reduce_metrics(logging_outputs: list[LoggingOutput]) -> None:
        """Log the loss per masked token, unless the update has none, such as in a short last batch."""
        if sum(log.get("sample_size", 0) for log in logging_outputs) > 0:
            masked_lm.MaskedLmLoss.reduce_metrics(logging_outputs)
