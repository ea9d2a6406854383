"""The layers of a ModernBERT-style encoder in plain PyTorch: pre-norm, rotary positions, GeGLU, no biases.

Hugging Face's ModernBERT computes the same (Warner et al., 2024, arXiv 2412.13663); its weights have other names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlsm_plugin.core.masking.chosen_tokens import ChosenTokens
from mlsm_plugin.fairseq_plugin.compat.model_parts import encoder_output

# On CPUs with bfloat16 units, products of whole matrices are faster than torch's fused attention up to this length
# (docs/research/learning_curves.md); the fused kernel takes less memory.
LONGEST_UNFUSED = 512
# Added to the score of a token that is not seen. It is finite, so that a token that sees nothing gets finite hidden
# states. Twice this number still fits in float16.
NEVER = -30_000.0


@dataclass(frozen=True)
class ModernSize:
    """The size of a :class:`ModernTransformer`."""

    num_symbols: int  # rows of the embeddings
    padding: int  # the padding id
    layers: int
    dim: int  # width of the hidden states
    ffn_dim: int  # width of the GeGLU; its first matrix produces twice as many values, and one half gates the other
    heads: int
    dropout: float = 0.0  # of the embeddings and of each block's output
    attention_dropout: float = 0.0  # of the attention weights
    activation_dropout: float = 0.0  # of the GeGLU
    window: int = 0  # tokens that a local layer sees, about half of them on each side; 0: all layers are global
    global_every: int = 3  # every global_every-th layer, beginning with the first, is global
    theta: float = 10_000.0  # base of the rotary angles in global layers
    local_theta: float = 10_000.0

    def is_local(self, layer: int) -> bool:
        """Whether layer number ``layer``, from 0, sees only its window."""
        return self.window > 0 and layer % self.global_every != 0


def rotary_angles(length: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE (Su et al., 2021), ``(length, head_dim / 2)``, on the device of ``like``.

    The angle of position t and pair i is ``t * theta ** (-2 i / head_dim)``.
    """
    if torch.compiler.is_compiling():
        return _tables(length, head_dim, theta, like.detach())
    dtype = torch.promote_types(like.dtype, torch.float32)
    pairs = torch.arange(0, head_dim, 2, dtype=dtype, device=like.device)
    angles = torch.outer(torch.arange(length, dtype=dtype, device=like.device), theta ** (-pairs / head_dim))
    return angles.cos(), angles.sin()


@torch.library.custom_op("mlsm_plugin::rotary_angles", mutates_args=())
def _tables(length: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`rotary_angles` as an operator; otherwise the compiler would recompute them for each rotated value."""
    return rotary_angles(length, head_dim, theta, like)


@_tables.register_fake
def _shapes_of_tables(length: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    like = like.new_empty(length, head_dim // 2, dtype=torch.promote_types(like.dtype, torch.float32))
    return like, torch.empty_like(like)


def rotated(source: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pairs (i, i + d/2) of ``source``, ``(..., T, d)``, rotated; as in GPT-NeoX and ModernBERT."""
    if not torch.compiler.is_compiling():
        result: Tensor = _Rotation.apply(source, cos, sin)
        return result
    first, second = source.chunk(2, dim=-1)
    rotated_first = torch.addcmul(first * cos, second, sin, value=-1)
    rotated_second = torch.addcmul(second * cos, first, sin)
    return torch.cat((rotated_first, rotated_second), dim=-1)


class _Rotation(torch.autograd.Function):
    """:func:`rotated` in fewer passes: both halves are written in place, and the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _written(source, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _written(gradient, cos, -sin), None, None


def _written(source: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The values of :func:`rotated`, without a gradient."""
    result = source.new_empty(source.shape)
    first, second = source.chunk(2, dim=-1)
    rotated_first, rotated_second = result.chunk(2, dim=-1)
    torch.mul(first, cos, out=rotated_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated_second).addcmul_(first, sin)
    return result


def mask_rows(only: ChosenTokens, mask: Tensor | None) -> Tensor | None:
    """The rows of an attention mask for the places of the tokens ``only``; see :func:`attend`."""
    if mask is None or mask.size(2) == 1:
        return mask
    batch, most = only.places.shape
    rows = only.places[:, None, :, None].expand(batch, 1, most, mask.size(3))
    return mask.expand(batch, -1, -1, -1).gather(2, rows)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float | None = None
) -> Tensor:
    """Scaled dot-product attention of queries ``(B, H, M, d)`` to keys and values ``(B, H, T, d)``: ``(B, H, M, d)``.

    The mask is added to the scores, broadcast to ``(B, H, M, T)``; None: every token sees all others. Products of
    queries and keys are multiplied by ``scale``; None: ``1 / sqrt(d)``.
    """
    short = key.size(2) <= LONGEST_UNFUSED and not torch.compiler.is_compiling()
    if short and query.device.type == "cpu" and query.dtype == torch.bfloat16:
        scores = (query * (scale or 1 / math.sqrt(query.size(3)))) @ key.transpose(2, 3)
        weights = (scores if mask is None else scores + mask).softmax(dim=-1)
        return F.dropout(weights, dropout, training=dropout > 0) @ value
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)


class Norm(nn.LayerNorm):
    """A layer norm, by default without bias, in the precision of its input even under ``torch.autocast``."""

    def __init__(self, dim: int, *, bias: bool = False, eps: float = 1e-5) -> None:
        super().__init__(dim, eps, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return F.layer_norm(hidden, self.normalized_shape, self.weight.to(hidden.dtype), bias, self.eps)


class ModernLayer(nn.Module):
    """One layer: attention and GeGLU, each on normalized hidden states and with a residual connection.

    The first layer (``number`` 0) has no norm before its attention, since a norm follows the embeddings.
    """

    def __init__(self, size: ModernSize, number: int) -> None:
        super().__init__()
        self.size = size
        self.is_local = size.is_local(number)
        dim = size.dim
        self.attention_norm = Norm(dim) if number else nn.Identity()
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = Norm(dim)
        self.fc1 = nn.Linear(dim, 2 * size.ffn_dim, bias=False)
        self.fc2 = nn.Linear(size.ffn_dim, dim, bias=False)

    def forward(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, only: ChosenTokens | None = None
    ) -> Tensor:
        """Hidden states after this layer, ``(B, T, dim)`` as before it, or ``(n, dim)`` of the tokens ``only``.

        ``angles`` are the result of :func:`rotary_angles`, and ``mask`` is an argument of :func:`attend`.
        """
        normalized = self.attention_norm(hidden)
        if only is None:
            attended = self._attention(normalized, angles, mask)
        else:
            attended = self._attention_of(only, normalized, angles, mask)
            hidden = hidden.flatten(0, 1)[only.flat]
        hidden = hidden + self._dropped(self.out_proj(attended))
        return hidden + self._dropped(self._geglu(self.ffn_norm(hidden)))

    def _attention(self, hidden: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """The output of attention for all tokens, ``(B, T, dim)``."""
        projected = self.qkv_proj(hidden)
        cos = angles[0].to(projected.dtype)
        sin = angles[1].to(projected.dtype)
        query, key, value = projected.unflatten(-1, (3, self.size.heads, -1)).permute(2, 0, 3, 1, 4)
        return self._attended(rotated(query, cos, sin), rotated(key, cos, sin), value, mask)

    def _attention_of(
        self, only: ChosenTokens, hidden: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        """The output of attention for the tokens ``only``, ``(n, dim)``."""
        query_weight, key_value_weight = self.qkv_proj.weight.split([self.size.dim, 2 * self.size.dim])
        projected = F.linear(hidden, key_value_weight).unflatten(-1, (2, self.size.heads, -1))
        key, value = projected.permute(2, 0, 3, 1, 4)  # (B, H, T, d) each
        selected = hidden.gather(1, only.places[:, :, None].expand(-1, -1, hidden.size(2)))  # (B, M, dim)
        query = F.linear(selected, query_weight).unflatten(-1, (self.size.heads, -1)).transpose(1, 2)
        cos = angles[0].to(projected.dtype)
        sin = angles[1].to(projected.dtype)
        key = rotated(key, cos, sin)
        query = rotated(query, cos[only.places][:, None], sin[only.places][:, None])
        return self._attended(query, key, value, mask_rows(only, mask)).flatten(0, 1)[only.slots]

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """From ``(B, H, ..., d)`` to ``(B, ..., dim)``."""
        dropout = self.size.attention_dropout if self.training else 0.0
        attended = attend(query, key, value, None if mask is None else mask.to(query.dtype), dropout)
        return attended.transpose(1, 2).flatten(2)

    def _geglu(self, hidden: Tensor) -> Tensor:
        """Shazeer, 2020, arXiv 2002.05202."""
        if torch.compiler.is_compiling():  # with two products, no gradient is copied into one matrix
            activated_weight, gate_weight = self.fc1.weight.chunk(2)
            activated = F.linear(hidden, activated_weight)
            gate = F.linear(hidden, gate_weight)
        else:
            activated, gate = self.fc1(hidden).chunk(2, dim=-1)
        inner = F.gelu(activated) * gate
        return self.fc2(F.dropout(inner, self.size.activation_dropout, training=self.training))

    def _dropped(self, values: Tensor) -> Tensor:
        return F.dropout(values, self.size.dropout, training=self.training)


class ModernTransformer(nn.Module):
    """Token ids to hidden states, with the interface of fairseq's ``TransformerEncoder``."""

    batch_first = True  # its layers get hidden states as (B, T, dim); fairseq's layers as (T, B, dim)
    can_choose_tokens = True  # its last layer can compute only some tokens

    def __init__(self, size: ModernSize, embed_tokens: nn.Embedding) -> None:
        super().__init__()
        self.size = size
        self.embed_tokens = embed_tokens
        self.embedding_norm = Norm(size.dim)
        self.layers: Any = nn.ModuleList(self._layer(number) for number in range(size.layers))
        self.layer_norm: Norm | None = Norm(size.dim)

    def _layer(self, number: int) -> nn.Module:
        return ModernLayer(self.size, number)

    def scale_down_residual_projections(self, std: float = 0.02) -> None:
        """Initialize each block's output projections with ``std / sqrt(2 layers)`` (GPT-2; Radford et al., 2019)."""
        for layer in self.layers:
            for projection in (layer.out_proj, layer.fc2):
                nn.init.normal_(projection.weight, std=std / math.sqrt(2 * self.size.layers))

    def draw_weights_by_width(self) -> None:
        """Initialize the weights of all layers such that they keep the variance of their input: ``1 / sqrt(dim)``."""
        std = 1 / math.sqrt(self.size.dim)
        for layer in self.layers:
            for projection in (layer.qkv_proj, layer.fc1):
                nn.init.normal_(projection.weight, std=std)
        self.scale_down_residual_projections(std)

    def forward(
        self,
        src_tokens: Tensor,
        *,
        return_all_hiddens: bool = False,
        has_padding: bool | None = None,
        only: ChosenTokens | None = None,
    ) -> dict[str, list[Tensor]]:
        """Hidden states of a batch.

        Args:
            src_tokens: ``(B, T)`` ids, right-padded.
            return_all_hiddens: also return the hidden states before and after each layer.
            has_padding: whether the batch has padding; None looks for it, and on a GPU waits for the answer.
            only: compute only the final hidden states of these N tokens, ``(1, N, dim)``. The last layer then takes a
                fraction of its time.

        Returns:
            see :func:`~mlsm_plugin.fairseq_plugin.compat.model_parts.encoder_output`; the final norm is only applied to
            the final hidden states.
        """
        padding = src_tokens.eq(self.size.padding)
        if has_padding is None:
            has_padding = bool(padding.any())
        hidden = self.embedding_norm(self._embedded(src_tokens))
        hidden = F.dropout(hidden, self.size.dropout, self.training)
        states = [hidden]
        masks = self._masks(hidden, padding if has_padding else None)
        positions = self._positions(hidden)
        for number, layer in enumerate(self.layers, start=1):
            is_last = number == len(self.layers)
            hidden = layer(hidden, positions[layer.is_local], masks[layer.is_local], only if is_last else None)
            if return_all_hiddens:
                states.append(hidden)
        if only is not None:
            hidden = hidden[None] if self.layers else hidden.flatten(0, 1)[None, only.flat]
        if self.layer_norm is not None:
            hidden = self.layer_norm(hidden)
        return encoder_output(hidden, states if return_all_hiddens else [])

    def _embedded(self, src_tokens: Tensor) -> Tensor:
        """The embeddings, in the precision of the matrix products, which all hidden states keep."""
        embedded = self.embed_tokens(src_tokens)
        kind = src_tokens.device.type
        return embedded.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else embedded

    def _positions(self, hidden: Tensor) -> Mapping[bool, Tensor | tuple[Tensor, Tensor]]:
        """The rotary angles of global (False) and local (True) layers."""
        size = self.size
        length = hidden.size(1)
        global_angles = rotary_angles(length, size.dim // size.heads, size.theta, hidden)
        local_angles = global_angles
        if size.window > 0 and size.local_theta != size.theta:
            local_angles = rotary_angles(length, size.dim // size.heads, size.local_theta, hidden)
        return {False: global_angles, True: local_angles}

    def _masks(self, hidden: Tensor, padding: Tensor | None) -> dict[bool, Tensor | None]:
        """The masks of global (False) and local (True) layers; None if a layer sees all tokens."""
        global_mask = None
        if padding is not None:
            global_mask = hidden.new_zeros(padding.shape).masked_fill_(padding, NEVER)[:, None, None, :]
        half = self.size.window // 2
        length = hidden.size(1)
        if self.size.window == 0 or length <= half + 1:
            return {False: global_mask, True: global_mask}
        place = torch.arange(length, device=hidden.device)
        outside = (place[:, None] - place).abs() > half
        local_mask = hidden.new_zeros(outside.shape).masked_fill_(outside, NEVER)[None, None]
        return {False: global_mask, True: local_mask if global_mask is None else local_mask + global_mask}
