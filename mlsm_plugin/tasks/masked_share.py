"""The share of the tokens that is masked, in the log of every task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from fairseq.logging import metrics

MASKED, ALL = "num_masked_content", "num_all_content"  # in the logging outputs


class MaskedShareSteps(ABC):
    """A mixin for tasks: logs ``masked_share``, the share of the content tokens that is masked, over all workers."""

    @abstractmethod
    def masked_counts(self, sample: dict[str, Any]) -> tuple[Any, Any]:
        """How many content tokens of a batch are masked, and how many there are."""

    def train_step(self, sample: Any, *arguments: Any, **named: Any) -> Any:
        """See :meth:`FairseqTask.train_step`."""
        result = super().train_step(sample, *arguments, **named)  # type: ignore[misc]
        self._count(sample, result[-1])
        return result

    def valid_step(self, sample: Any, *arguments: Any, **named: Any) -> Any:
        """See :meth:`FairseqTask.valid_step`."""
        result = super().valid_step(sample, *arguments, **named)  # type: ignore[misc]
        self._count(sample, result[-1])
        return result

    def _count(self, sample: Any, logging_output: dict[str, Any]) -> None:
        logging_output[MASKED], logging_output[ALL] = self.masked_counts(sample) if sample else (0, 0)

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """See :meth:`FairseqTask.reduce_metrics`."""
        super().reduce_metrics(logging_outputs, criterion)  # type: ignore[misc]
        masked, content = (sum(log.get(key, 0) for log in logging_outputs) for key in (MASKED, ALL))
        metrics.log_scalar("masked_share", masked / content if content > 0 else 0.0, content, round=3)
