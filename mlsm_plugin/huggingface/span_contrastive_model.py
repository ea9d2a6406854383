"""NPM for encoders of Hugging Face (Min et al., 2022)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from mlsm_plugin.huggingface.collators import IGNORED
from mlsm_plugin.huggingface.pretraining_model import PretrainingModel
from mlsm_plugin.losses.span_contrastive import (
    NO_KEY,
    check_similarity,
    found_spans,
    span_batch_terms,
    span_ngrams,
    stacked,
)
from mlsm_plugin.losses.zero_gradients import zero_with_gradient


class SpanContrastiveModel(PretrainingModel):
    """An encoder that retrieves the ends of masked spans: NPM (Min et al., 2022), without an output vocabulary.

    Args (of :meth:`of` and :meth:`from_pretrained`):
        similarity: ``inner`` or ``l2``.
        temperature: divisor of the scores, positive; None: the square root of the width.
    """

    parts: ClassVar[tuple[str, ...]] = (
        "start",
        "end",
        "starts_found",
        "ends_found",
        "found",
        "spans",
        "masked",
        "content",
    )
    means: ClassVar[dict[str, tuple[str, str]]] = {
        "start_loss": ("start", "spans"),
        "end_loss": ("end", "spans"),
        "accuracy": ("found", "spans"),
        "masked_share": ("masked", "content"),
    }

    def set_objective(self, *, similarity: str = "inner", temperature: float | None = None) -> None:
        """Set the options of the class; raises ValueError if one is out of range."""
        check_similarity(similarity, temperature)
        self.similarity, self.temperature = similarity, temperature

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        context_ids: Tensor | None = None,
        spans: dict[str, Tensor] | None = None,
        special: Tensor | None = None,
        labels: Tensor | None = None,
        content: Tensor | None = None,
        num_items_in_batch: Any = None,
        **options: Any,
    ) -> Any:
        """The loss of a batch of :class:`~mlsm_plugin.huggingface.span_groups.SpanGroupsCollator`.

        Args:
            input_ids, attention_mask: ``(S, T')`` the masked sequences; alone, they get the stock forward pass.
            context_ids: ``(S, T)`` the sequences without masks, from which the tokens are retrieved.
            spans: as of :func:`~mlsm_plugin.losses.span_contrastive.span_batch_terms`, and the ``start`` of each span.
            special: ids that cannot be retrieved, ``(k,)``; the first is that of padding.
            labels: ``(G, most)`` 1 for each span of each group, in their order, then
                :data:`~mlsm_plugin.huggingface.collators.IGNORED`; None: all spans are of one group.
            content: ``(G,)`` number of tokens of each group but special ones, for ``masked_share``; or None.
            num_items_in_batch: number of spans of the update; None: those of the batch.
            options: of the stock class.
        """
        if spans is None or context_ids is None or special is None or input_ids is None:
            return super().forward(  # type: ignore[misc]
                input_ids=input_ids, attention_mask=attention_mask, **options
            )
        pad = int(special[0])
        both = stacked(input_ids, context_ids, pad)
        features, key_features = self._encoded(both, (both != pad).long(), **options)[0].chunk(2)
        is_key = ~torch.isin(context_ids, special)
        keys = key_features[:, : context_ids.size(1)][is_key]
        tokens = context_ids.masked_fill(~is_key, NO_KEY)

        def terms_of(spans: dict[str, Tensor]) -> dict[str, Any]:
            return span_batch_terms(
                *(features, keys, tokens, spans, span_ngrams(context_ids, spans)),
                similarity=self.similarity,
                temperature=self.temperature,
            )

        terms = terms_of(spans)
        prefix = f"{self.base_model_prefix}."  # type: ignore[attr-defined]
        named = self.named_parameters()  # type: ignore[attr-defined]
        idle = [parameter for name, parameter in named if not name.startswith(prefix)]
        loss = terms["start"].loss + terms["end"].loss + zero_with_gradient(idle).to(features.device)
        loss = self._mean(loss, terms["start"].counted.sum(), num_items_in_batch)
        if self.training or labels is None:
            number = spans["length"].new_zeros(()) if content is None else content.sum()
            sums = [*self._sums(terms, spans), number.double()]
            return self._result(loss, sums if self.training else torch.stack(sums)[None])
        groups = torch.arange(len(spans["length"]), device=labels.device).split((labels != IGNORED).sum(dim=1).tolist())
        rows = []
        for group, number in zip(groups, self._num_content(content, labels), strict=True):
            own = {name: values[group] for name, values in spans.items()}
            rows.append(torch.stack([*self._sums(terms_of(own), own), number.double()]))
        return self._result(loss, torch.stack(rows))

    @staticmethod
    def _sums(terms: dict[str, Any], spans: dict[str, Tensor]) -> list[Tensor]:
        sums = [terms["start"].loss, terms["end"].loss, *found_spans(terms).values(), terms["start"].counted.sum()]
        return [part.detach().double() for part in (*sums, spans["length"].sum())]
