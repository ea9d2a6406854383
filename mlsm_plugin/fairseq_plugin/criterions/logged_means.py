"""Criterions whose logging outputs are summed, and means over the outputs of several batches and workers."""

import math

from fairseq.criterions import FairseqCriterion
from fairseq.logging import metrics
from torch import Tensor

from mlsm_plugin.fairseq_plugin.compat.batches import LoggingOutput

BIT = math.log(2)  # in nats


class SummedCriterion(FairseqCriterion):
    """A criterion whose logging outputs are numbers that fairseq may sum over workers."""

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


class LoggedMeans:
    """Logs sums over all batches and workers of an update, divided by counts; keys may be missing in some outputs."""

    def __init__(self, logging_outputs: list[LoggingOutput]) -> None:
        self.logging_outputs = logging_outputs

    def has(self, key: str) -> bool:
        """Whether any logging output has ``key``."""
        return any(key in log for log in self.logging_outputs)

    def total(self, key: str) -> float | Tensor:
        """The sum of ``key`` over all logging outputs."""
        return sum(log.get(key, 0) for log in self.logging_outputs)

    def log(self, name: str, key: str, count: float | Tensor, *, unit: float = 1.0, digits: int = 3) -> None:
        """Log the sum of ``key``, divided by ``count`` and ``unit``, as ``name``.

        If nothing was counted, 0 is logged with weight 0, since other metrics may be derived from it.
        """
        mean = self.total(key) / count / unit if count > 0 else 0.0
        metrics.log_scalar(name, mean, count, round=digits)
