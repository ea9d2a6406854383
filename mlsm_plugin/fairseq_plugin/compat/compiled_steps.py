"""``torch.compile`` of a model that is trained, and fairseq's masked-LM loss as a compiled step needs it."""

from __future__ import annotations

from collections.abc import Iterable

from fairseq.criterions import masked_lm
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from mlsm_plugin.core.losses.cross_entropy import token_cross_entropy
from mlsm_plugin.fairseq_plugin.compat.batches import LoggingOutput, Sample
from mlsm_plugin.fairseq_plugin.compat.model_parts import project_masked, unwrapped

CompileError = TorchDynamoException  # a model cannot be compiled


def is_one_graph(model: nn.Module) -> bool:
    """Whether torch.compile makes one graph of the encoder of a model."""
    return bool(getattr(getattr(unwrapped(model), "encoder", None), "one_graph", False))


def compile_parts(model: nn.Module, *, one_length: bool) -> list[nn.Module]:
    """Compile encoder and decoder in place: the names of the weights stay. Returns the compiled modules.

    A model that compiles to one graph gets one for each shape if all samples have ``one_length``; others become pieces.
    """
    one_graph = is_one_graph(model)
    model = unwrapped(model)
    parts = [getattr(model, name) for name in ("encoder", "decoder") if hasattr(model, name)]
    for part in parts:
        part.compile(fullgraph=one_graph, dynamic=not (one_graph and one_length))
    return parts


def forget_compiled(parts: Iterable[nn.Module]) -> None:
    """Let these modules compute as if they had never been compiled."""
    for part in parts:
        part._compiled_call_impl = None


class MaskedLmLoss(masked_lm.MaskedLmLoss):
    """fairseq's ``masked_lm``, but no float32 copy of all logits is made, and nothing waits for a GPU.

    Checkpoints record the name of this class, which is fairseq's.
    """

    def forward(
        self, model: BaseFairseqModel, sample: Sample, reduce: bool = True
    ) -> tuple[Tensor, int | Tensor, LoggingOutput]:
        targets, number, logits, _ = project_masked(model, sample, self.padding_idx)
        assert logits is not None
        loss = token_cross_entropy(logits, targets, ignored=self.padding_idx).sum()
        counts = {"ntokens": sample["ntokens"], "nsentences": sample["nsentences"], "sample_size": number}
        return loss, number, {"loss": loss.detach(), **counts}

    @staticmethod
    def reduce_metrics(logging_outputs: list[LoggingOutput]) -> None:
        """Log the loss of each masked token; an update without one, as of a short last batch, has none."""
        if sum(log.get("sample_size", 0) for log in logging_outputs) > 0:
            masked_lm.MaskedLmLoss.reduce_metrics(logging_outputs)
