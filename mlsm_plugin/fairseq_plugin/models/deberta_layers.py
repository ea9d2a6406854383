"""The layers of a DeBERTa-v2 in plain PyTorch: post-norm, GELU, and disentangled attention.

Source: He et al., "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", ICLR 2021, arXiv 2006.03654, with the
changes of versions 2 and 3: distances share logarithmic buckets, their embeddings are normalized, and the projections
of the content also project them. A score has three parts: content to content, content to position, and position to
content. Hugging Face's DebertaV2 computes the same; the weights have other names.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlsm_plugin.core.masking.chosen_tokens import ChosenTokens
from mlsm_plugin.fairseq_plugin.models.modern_layers import ModernSize, ModernTransformer, Norm, attend

EPSILON = 1e-7  # of all norms


@dataclass(frozen=True)
class DebertaSize(ModernSize):
    """The size of a :class:`DebertaTransformer`; all of its layers are global."""

    buckets: int = 256  # of distances to one side; small distances, up to half of this, have one each. 0: all have
    longest: int = 512  # this distance and all larger distances count as the same

    @property
    def span(self) -> int:
        """Half the number of embeddings of distances."""
        return self.buckets or self.longest


def embeddings_of_distances(length: int, size: DebertaSize, device: torch.device) -> Tensor:
    """The indices of the embeddings of the distances from ``length`` down to ``-length``, ``(2 length + 1,)`` int64.

    The distance of a query at q from a key at k is ``q - k``.
    """
    distance = torch.arange(length, -length - 1, -1, device=device)
    if size.buckets:
        middle = size.buckets // 2
        far = distance.abs()
        last = torch.full((), (size.longest - 1) / middle, device=device)
        # the order of these float32 operations decides the bucket of a distance at a border
        grown = torch.ceil(torch.log(far.clamp(min=1) / middle) / torch.log(last) * (middle - 1)) + middle
        distance = torch.where(far <= middle, distance, (grown * distance.sign()).long())
    return (distance + size.span).clamp(0, 2 * size.span - 1)


def diagonals(products: Tensor) -> Tensor:
    """A view ``(..., T, T)`` of ``(..., T, 2 T)``: row t starts at column ``T - 1 - t``."""
    length = products.size(-2)
    rows = products.flatten(-2)[..., length - 1 : length - 1 + length * (2 * length - 1)]
    return rows.unflatten(-1, (length, 2 * length - 1))[..., :length]


def position_scores(query: Tensor, key: Tensor, of_keys: Tensor, of_queries: Tensor) -> Tensor:
    """The part of the scores that comes from positions, ``(H, B, T, T)``, for queries and keys ``(H, B, T, d)``.

    ``of_keys`` and ``of_queries``, ``(H, 2 T + 1, d)``, are the projected embeddings of the distances from T to -T.
    """
    key_table = of_keys[:, 1:]  # distances from T - 1 to -T
    query_table = of_queries.flip(1)[:, 1:]  # distances from -T + 1 to T
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        return _PositionScores.apply(query, key, key_table, query_table)
    to_position = diagonals((query.flatten(1, 2) @ key_table.mT).unflatten(1, query.shape[1:3]))
    to_content = diagonals((key.flatten(1, 2) @ query_table.mT).unflatten(1, key.shape[1:3]))
    return to_position + to_content.mT


class _PositionScores(torch.autograd.Function):
    """:func:`position_scores` head by head, so that the products with all distances fit into the cache."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, of_keys: Tensor, of_queries: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, of_keys, of_queries)
        batch, length = query.shape[1:3]
        scores = query.new_empty(*query.shape[:3], length)
        products = query.new_empty(batch, length, 2 * length)
        for head, head_scores in enumerate(scores):
            torch.mm(key[head].flatten(0, 1), of_queries[head].T, out=products.flatten(0, 1))
            head_scores.copy_(diagonals(products).mT)
            torch.mm(query[head].flatten(0, 1), of_keys[head].T, out=products.flatten(0, 1))
            head_scores.add_(diagonals(products))
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query = ctx.saved_tensors[0]
        (score_gradients,) = gradients
        input_gradients = [values.new_empty(values.shape) for values in ctx.saved_tensors]
        length = query.size(2)
        products = query.new_zeros(*query.shape[1:3], 2 * length)  # the part beside the diagonals stays 0
        rows = products.flatten(0, 1)
        for head, head_gradient in enumerate(score_gradients):
            for number, gradient in enumerate((head_gradient, head_gradient.mT)):
                states = ctx.saved_tensors[number][head]
                table = ctx.saved_tensors[2 + number][head]
                diagonals(products).copy_(gradient)
                torch.mm(rows, table, out=input_gradients[number][head].flatten(0, 1))
                torch.mm(rows.T, states.flatten(0, 1), out=input_gradients[2 + number][head])
        return tuple(input_gradients)


def chosen_position_scores(query: Tensor, key: Tensor, of_keys: Tensor, of_queries: Tensor, places: Tensor) -> Tensor:
    """:func:`position_scores` of only the queries ``(H, B, M, d)`` at ``places`` ``(B, M)``: ``(H, B, M, T)``."""
    length = key.size(2)
    rows = length - places[:, :, None] + torch.arange(length, device=places.device)  # (B, M, T), rows of the distances
    rows = rows.expand(len(key), -1, -1, -1)
    to_position = (query.flatten(1, 2) @ of_keys.mT).unflatten(1, query.shape[1:3]).gather(3, rows)
    to_content = (key.flatten(1, 2) @ of_queries.mT).unflatten(1, key.shape[1:3]).gather(3, rows.mT)
    return to_position + to_content.mT


class DebertaLayer(nn.Module):
    """One layer: attention and an MLP, each with a residual connection followed by a norm."""

    is_local = False

    def __init__(self, size: DebertaSize) -> None:
        super().__init__()
        self.size = size
        dim = size.dim
        self.qkv_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        self.attention_norm = Norm(dim, bias=True, eps=EPSILON)
        self.fc1 = nn.Linear(dim, size.ffn_dim)
        self.fc2 = nn.Linear(size.ffn_dim, dim)
        self.ffn_norm = Norm(dim, bias=True, eps=EPSILON)

    def forward(
        self, hidden: Tensor, distances: Tensor, mask: Tensor | None, only: ChosenTokens | None = None
    ) -> Tensor:
        """Hidden states after this layer, ``(B, T, dim)`` as before it, or ``(n, dim)`` of the tokens ``only``.

        ``distances`` are the embeddings ``(2 T + 1, dim)`` of the distances from T to -T. The mask ``(B, 1, 1, T)`` is
        added to the scores.
        """
        attended = self._attended(hidden, distances, mask, only)
        if only is not None:
            attended = attended.flatten(0, 1)[only.slots]
            hidden = hidden.flatten(0, 1)[only.flat]
        hidden = self.attention_norm(hidden + self._dropped(self.out_proj(attended)))
        inner = F.dropout(F.gelu(self.fc1(hidden)), self.size.activation_dropout, training=self.training)
        return self.ffn_norm(hidden + self._dropped(self.fc2(inner)))

    def _attended(self, hidden: Tensor, distances: Tensor, mask: Tensor | None, only: ChosenTokens | None) -> Tensor:
        """The output of attention for all tokens, ``(B, T, dim)``, or for ``only.places``, ``(B, M, dim)``."""
        if only is None:
            query, key, value = self._projected(hidden, 0, 3)
        else:
            selected = hidden.gather(1, only.places[:, :, None].expand(-1, -1, hidden.size(2)))
            (query,) = self._projected(selected, 0, 1)
            key, value = self._projected(hidden, 1, 3)
        scale = 1 / math.sqrt(3 * query.size(3))
        of_queries, of_keys = (self._projected(self._dropped(distances)[None], 0, 2) * scale).squeeze(2)
        if only is None:
            scores = position_scores(query, key, of_keys, of_queries)
        else:
            scores = chosen_position_scores(query, key, of_keys, of_queries, only.places)
        if mask is not None:
            scores = scores + mask.transpose(0, 1).to(scores.dtype)
        dropout = self.size.attention_dropout if self.training else 0.0
        return attend(query, key, value, scores, dropout, scale).permute(1, 2, 0, 3).flatten(2)

    def _projected(self, hidden: Tensor, first: int, end: int) -> Tensor:
        """Some of queries, keys and values, ``(end - first, H, B, T, d)``."""
        if end - first == 3:
            projected = self.qkv_proj(hidden)
        else:
            rows = slice(first * self.size.dim, end * self.size.dim)
            projected = F.linear(hidden, self.qkv_proj.weight[rows], self.qkv_proj.bias[rows])
        return projected.unflatten(-1, (end - first, self.size.heads, -1)).permute(2, 3, 0, 1, 4).contiguous()

    def _dropped(self, values: Tensor) -> Tensor:
        return F.dropout(values, self.size.dropout, training=self.training)


class DebertaTransformer(ModernTransformer):
    """Token ids to hidden states, with embeddings of distances that all layers share."""

    size: DebertaSize

    def __init__(self, size: DebertaSize, embed_tokens: nn.Embedding) -> None:
        super().__init__(size, embed_tokens)
        self.embedding_norm = Norm(size.dim, bias=True, eps=EPSILON)
        self.layer_norm = None
        self.embed_distances = nn.Embedding(2 * size.span, size.dim)
        self.distance_norm = Norm(size.dim, bias=True, eps=EPSILON)

    def _layer(self, number: int) -> DebertaLayer:
        return DebertaLayer(self.size)

    def _positions(self, hidden: Tensor) -> dict[bool, Tensor]:
        """The embeddings of the distances from T to -T, ``(2 T + 1, dim)``."""
        rows = embeddings_of_distances(hidden.size(1), self.size, hidden.device)
        return {False: self.distance_norm(self.embed_distances.weight.to(hidden.dtype))[rows]}
