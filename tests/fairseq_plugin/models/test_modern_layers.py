"""The modern encoder against a plain oracle in float64, and what encoders do with padding, windows and precisions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mlsm_plugin.core.masking.chosen_tokens import ChosenTokens
from mlsm_plugin.fairseq_plugin.models import modern_layers
from mlsm_plugin.fairseq_plugin.models.deberta_layers import DebertaSize, DebertaTransformer
from mlsm_plugin.fairseq_plugin.models.modern_layers import ModernSize, ModernTransformer, attend
from mlsm_plugin.huggingface.student_model import geglu_dim

PAD, SYMBOLS = 1, 40


def size_with(kind: type[ModernSize] = ModernSize, **settings: Any) -> ModernSize:
    defaults = {"num_symbols": SYMBOLS, "padding": PAD, "layers": 4, "dim": 16, "ffn_dim": 24, "heads": 2}
    return kind(**{**defaults, **settings})


DEBERTA = size_with(DebertaSize, buckets=4, longest=8)
SIZES = [size_with(), size_with(window=4, theta=50.0, local_theta=7.0), DEBERTA]
NAMES = ["all layers global", "local layers", "deberta"]


def transformer(size: ModernSize, seed: int = 1) -> ModernTransformer:
    """An encoder with random norms and large weights, so that every part shows in the result."""
    torch.manual_seed(seed)
    kind = DebertaTransformer if isinstance(size, DebertaSize) else ModernTransformer
    model = kind(size, nn.Embedding(size.num_symbols, size.dim, size.padding))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.4)
    return model.eval()


def tokens_of(lengths: list[int], seed: int = 0) -> Tensor:
    """Random ids, right-padded."""
    torch.manual_seed(seed)
    tokens = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(tokens, lengths, strict=True):
        row[:length] = torch.randint(2, SYMBOLS, (length,))
    return tokens


def oracle(model: ModernTransformer, sentence: list[int]) -> list[list[list[float]]]:
    """All hidden states of one sentence, token by token and head by head, in float64 with Python's own numbers."""
    size, weights = model.size, {name: value.double().tolist() for name, value in model.state_dict().items()}

    def norm(vector: list[float], scale: list[float]) -> list[float]:
        mean = sum(vector) / len(vector)
        variance = sum((value - mean) ** 2 for value in vector) / len(vector)
        return [
            (value - mean) / math.sqrt(variance + 1e-5) * factor for value, factor in zip(vector, scale, strict=True)
        ]

    def product(matrix: list[list[float]], vector: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    def rotated(vector: list[float], place: int, theta: float) -> list[float]:
        half = len(vector) // 2
        turned = [complex(vector[i], vector[i + half]) for i in range(half)]
        turned = [z * complex(math.cos(a), math.sin(a)) for i, z in enumerate(turned)
                  for a in [place * theta ** (-2 * i / len(vector))]]  # fmt: skip
        return [z.real for z in turned] + [z.imag for z in turned]

    states = [[norm(weights["embed_tokens.weight"][token], weights["embedding_norm.weight"]) for token in sentence]]
    head_dim = size.dim // size.heads
    for number in range(size.layers):
        own = {name.removeprefix(f"layers.{number}."): value for name, value in weights.items()}
        local = size.window > 0 and number % size.global_every != 0
        theta = size.local_theta if local else size.theta
        hidden = states[-1]
        read = hidden if number == 0 else [norm(vector, own["attention_norm.weight"]) for vector in hidden]
        projected = [product(own["qkv_proj.weight"], vector) for vector in read]
        attended = [[0.0] * size.dim for _ in sentence]
        for head in range(size.heads):
            parts = [
                [row[part * size.dim + head * head_dim : part * size.dim + (head + 1) * head_dim] for row in projected]
                for part in range(3)
            ]
            queries, keys = ([rotated(v, place, theta) for place, v in enumerate(part)] for part in parts[:2])
            for i, query in enumerate(queries):
                seen = [j for j in range(len(sentence)) if not local or abs(i - j) <= size.window // 2]
                products = [sum(a * b for a, b in zip(query, keys[j], strict=True)) for j in seen]
                scores = [math.exp(product / math.sqrt(head_dim)) for product in products]
                for score, j in zip(scores, seen, strict=True):
                    for d in range(head_dim):
                        attended[i][head * head_dim + d] += score / sum(scores) * parts[2][j][d]
        hidden = [
            [a + b for a, b in zip(old, product(own["out_proj.weight"], new), strict=True)]
            for old, new in zip(hidden, attended, strict=True)
        ]
        after = []
        for vector in hidden:
            inner = product(own["fc1.weight"], norm(vector, own["ffn_norm.weight"]))
            activated, gate = inner[: size.ffn_dim], inner[size.ffn_dim :]
            gelu = [x * 0.5 * (1 + math.erf(x / math.sqrt(2))) * g for x, g in zip(activated, gate, strict=True)]
            after.append([a + b for a, b in zip(vector, product(own["fc2.weight"], gelu), strict=True)])
        states.append(after)
    return [*states, [norm(vector, weights["layer_norm.weight"]) for vector in states[-1]]]


@pytest.mark.parametrize("window", [0, 4])
def test_hidden_states_are_those_of_a_plain_oracle(window: int) -> None:
    model = transformer(size_with(window=window, theta=50.0, local_theta=7.0)).double()
    lengths = [9, 4, 1]
    tokens = tokens_of(lengths)
    found = model(tokens, return_all_hiddens=True)
    states = [*found["encoder_states"], found["encoder_out"][0]]
    for row, length in enumerate(lengths):
        expected = oracle(model, tokens[row, :length].tolist())
        assert len(states) == len(expected) == 6
        for ours, theirs in zip(states, expected, strict=True):
            torch.testing.assert_close(ours[:length, row], torch.tensor(theirs, dtype=torch.float64), rtol=0, atol=1e-9)


def test_rotation_and_its_gradient() -> None:
    torch.manual_seed(0)
    heads = torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    cos, sin = modern_layers.rotary_angles(5, 4, 10.0, heads)
    assert torch.autograd.gradcheck(lambda x: modern_layers.rotated(x, cos, sin), [heads])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.sampled_from(SIZES), st.integers(0, 99))
def test_padding_changes_nothing(lengths: list[int], size: ModernSize, seed: int) -> None:
    model = transformer(size).double()
    tokens = tokens_of(lengths, seed)
    together = model(tokens)["encoder_out"][0]
    for row, length in enumerate(lengths):
        alone = model(tokens[row : row + 1, :length], has_padding=False)["encoder_out"][0]
        torch.testing.assert_close(together[:length, row], alone[:, 0])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.sampled_from(SIZES), st.integers(0, 99), st.data())
def test_chosen_tokens_have_the_states_and_gradients_of_the_whole_batch(
    lengths: list[int], size: ModernSize, seed: int, data: st.DataObject
) -> None:
    model = transformer(size).double()
    tokens = tokens_of(lengths, seed)
    real = tokens.ne(PAD)
    flags = data.draw(st.lists(st.booleans(), min_size=real.numel(), max_size=real.numel()))
    chosen = torch.tensor(flags).view_as(real) & real
    found, gradients = [], []
    for only in (None, chosen):
        model.zero_grad()
        hidden = model(tokens, only=only if only is None else ChosenTokens.of(only))["encoder_out"][0].transpose(0, 1)
        found.append(hidden[chosen, :] if only is None else hidden.squeeze(0))
        found[-1].sin().sum().backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert found[1].shape == (int(chosen.sum()), 16)
    torch.testing.assert_close(*found)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])


@pytest.mark.parametrize("size", SIZES, ids=NAMES)
def test_the_last_layer_computes_chosen_tokens_only(size: ModernSize) -> None:
    model, tokens = transformer(size), tokens_of([6, 9])
    rows: list[int] = []
    for layer in model.layers:
        layer.fc1.register_forward_pre_hook(lambda _module, given: rows.append(given[0].flatten(0, -2).size(0)))
    chosen = torch.zeros_like(tokens, dtype=torch.bool)
    chosen[0, 2] = chosen[1, 0] = chosen[1, 7] = True
    model(tokens, only=chosen if chosen is None else ChosenTokens.of(chosen))
    assert rows == [18, 18, 18, 3]


def test_no_mask_is_made_where_there_is_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = transformer(size_with()), tokens_of([6, 6])
    masks: list[Any] = []
    original = modern_layers.attend
    monkeypatch.setattr(modern_layers, "attend", lambda *given: masks.append(given[3]) or original(*given))
    expected = model(tokens)["encoder_out"][0]
    assert masks == [None] * 4
    assert torch.equal(model(tokens, has_padding=True)["encoder_out"][0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES, ids=NAMES)
def test_batches_of_padding_and_of_one_token_are_finite(dtype: torch.dtype, size: ModernSize) -> None:
    model = transformer(size).to(dtype)
    batches = [torch.full((2, 9), PAD), tokens_of([1]), tokens_of([12, 1])]
    for tokens, chosen in [(batch, which) for batch in batches for which in (None, batch < 9, batch.ne(PAD))]:
        out = model(tokens, only=chosen if chosen is None else ChosenTokens.of(chosen))["encoder_out"][0]
        assert out.isfinite().all()
        out.float().square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_gradients_are_those_of_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same encoder with torch's own operations for the rotation."""

    def plain(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    tokens = tokens_of([7, 5])
    gradients = []
    for replaced in (False, True):
        if replaced:
            monkeypatch.setattr(modern_layers, "rotated", plain)
        model = transformer(size_with()).double()
        model(tokens)["encoder_out"][0].sin().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])


@pytest.mark.parametrize("masked", [False, True])
def test_unfused_attention_is_that_of_torch(masked: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 8, 4).bfloat16()
    mask = torch.zeros(2, 1, 1, 8).masked_fill_(torch.rand(2, 1, 1, 8) < 0.3, modern_layers.NEVER) if masked else None
    found = attend(query, key, value, None if mask is None else mask.bfloat16(), 0.0)
    expected = attend(query.double(), key.double(), value.double(), None if mask is None else mask.double(), 0.0)
    torch.testing.assert_close(found.double(), expected, rtol=0.03, atol=0.03)


def test_long_samples_take_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention",
        lambda *given, **named: calls.append(given[0].size(2)) or original(*given, **named),
    )  # fmt: skip
    for length in (512, 513):
        query, key, value = torch.randn(3, 1, 1, length, 4).bfloat16()
        attend(query, key, value, None, 0.0)
    assert calls == [513]


@pytest.mark.parametrize("size", SIZES, ids=NAMES)
@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout"])
def test_dropout_is_for_training_only(name: str, size: ModernSize) -> None:
    tokens = tokens_of([8, 8])
    model = transformer(dataclasses.replace(size, **{name: 0.3}))
    assert torch.equal(model(tokens)["encoder_out"][0], model(tokens)["encoder_out"][0])
    model.train()
    assert not torch.equal(model(tokens)["encoder_out"][0], model(tokens)["encoder_out"][0])


@given(st.integers(2, 64).map(lambda number: 64 * number))
def test_geglu_has_the_parameters_of_a_four_times_wider_mlp(dim: int) -> None:
    assert 3 * dim * geglu_dim(dim) == pytest.approx(8 * dim * dim, rel=0.05)
