"""RoBERTa's LM head in its two halves."""

from __future__ import annotations

from fairseq.models.roberta.model import RobertaLMHead
from torch import Tensor, nn
from torch.nn import functional as F


class DividedLMHead(RobertaLMHead):
    """RoBERTa's LM head, whose transform can also feed another projection.

    ``RobertaLMHead.forward`` computes both halves at once, from the parts that are used here.

    Args:
        embed_dim, output_dim, activation_fn, weight: as of :class:`RobertaLMHead`; without ``weight`` it has its own.
    """

    def __init__(self, embed_dim: int, output_dim: int, activation_fn: str, weight: nn.Parameter | None = None) -> None:
        super().__init__(embed_dim, output_dim, activation_fn, weight)
        self._has_own_weight = weight is None

    @property
    def width(self) -> int:
        """Width of what the projections read."""
        return int(self.dense.in_features)

    def transform(self, features: Tensor) -> Tensor:
        """What the projections read, ``(..., embed_dim)``."""
        return self.layer_norm(self.activation_fn(self.dense(features)))

    def token_logits(self, transformed: Tensor) -> Tensor:
        """Vocabulary logits."""
        return F.linear(transformed, self.weight) + self.bias

    def own_token_parameters(self) -> list[nn.Parameter]:
        """The parameters that only :meth:`token_logits` uses; a given weight is that of the embeddings."""
        return [self.bias, self.weight] if self._has_own_weight else [self.bias]
