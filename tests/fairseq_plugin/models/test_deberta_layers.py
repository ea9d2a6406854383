"""Disentangled attention against Hugging Face's, in float64: hidden states, gradients, and the buckets of distances.

What holds for every encoder is in ``test_modern_layers``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DebertaV2Config, DebertaV2Model
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from mlsm_plugin.core.masking.chosen_tokens import ChosenTokens
from mlsm_plugin.fairseq_plugin.models import deberta_layers
from mlsm_plugin.fairseq_plugin.models.deberta_layers import DebertaSize, DebertaTransformer, embeddings_of_distances
from mlsm_plugin.hub.stock_models import OF_MLSM_DEBERTA, deberta_names, joined

PAD, SYMBOLS, LENGTHS = 1, 40, [23, 9, 1]
DIM, HEADS = 24, 2  # the library takes the root of 3 times the width of a head in float32: of 36 it is exact
OF_MODEL = "encoder.sentence_encoder."


def size_with(buckets: int, longest: int) -> DebertaSize:
    return DebertaSize(SYMBOLS, PAD, layers=3, dim=DIM, ffn_dim=40, heads=HEADS, buckets=buckets, longest=longest)


def both(buckets: int, longest: int) -> tuple[DebertaTransformer, Any, dict[str, str]]:
    """The library's model with large random weights, ours with the same, and the names of ours by the other's."""
    torch.manual_seed(1)
    size = size_with(buckets, longest)
    settings = {"position_buckets": buckets or -1, "max_relative_positions": longest, "pad_token_id": PAD}
    sizes = {"vocab_size": SYMBOLS, "hidden_size": DIM, "num_hidden_layers": 3, "num_attention_heads": HEADS}
    theirs = DebertaV2Model(DebertaV2Config(**sizes, intermediate_size=40, **settings, **OF_MLSM_DEBERTA))
    theirs = theirs.double().eval()
    for values in theirs.parameters():
        nn.init.normal_(values, std=0.4)
    names = {name.removeprefix("deberta."): ours.removeprefix(OF_MODEL) for name, ours in deberta_names(3).items()
             if name.startswith("deberta.")}  # fmt: skip
    assert sorted(names) == sorted(theirs.state_dict())
    model = DebertaTransformer(size, nn.Embedding(SYMBOLS, DIM, PAD)).double().eval()
    model.load_state_dict(joined({ours: theirs.state_dict()[name] for name, ours in names.items()}))
    return model, theirs, names


def batch() -> Tensor:
    torch.manual_seed(2)
    tokens = torch.randint(2, SYMBOLS, (len(LENGTHS), max(LENGTHS)))
    for row, length in zip(tokens, LENGTHS, strict=True):
        row[length:] = PAD
    return tokens


@pytest.mark.parametrize(("buckets", "longest"), [(8, 16), (0, 5), (6, 400)])
@pytest.mark.parametrize("chooses", [False, True])
def test_hidden_states_and_gradients_are_those_of_the_library(buckets: int, longest: int, chooses: bool) -> None:
    model, theirs, names = both(buckets, longest)
    tokens = batch()
    seen = tokens.ne(PAD)
    expected = theirs(input_ids=tokens, attention_mask=seen.long(), output_hidden_states=True).hidden_states
    found = model(tokens, return_all_hiddens=True)
    for ours, other in zip(found["encoder_states"], expected, strict=True):
        torch.testing.assert_close(ours.transpose(0, 1)[seen], other[seen], rtol=0, atol=1e-10)
    chosen = seen & (torch.rand(seen.shape) < 0.4) if chooses else seen
    weights = torch.randn(DIM, dtype=torch.float64)
    ours = model(tokens, only=ChosenTokens.of(chosen))["encoder_out"][0].squeeze(1) if chooses else (
        found["encoder_out"][0].transpose(0, 1)[chosen]
    )  # fmt: skip
    for states in (ours, expected[-1][chosen]):
        (states @ weights).square().sum().backward()
    gradients = {ours: theirs.get_parameter(name).grad for name, ours in names.items()}
    for name, gradient in joined(gradients).items():
        own = model.get_parameter(name).grad
        assert gradient.norm() > 1e-3, name
        assert (own - gradient).norm() <= 1e-9 * gradient.norm(), name


@pytest.mark.parametrize(
    ("buckets", "longest"), [(256, 512), (32, 512), (32, 128), (8, 70), (7, 20), (2, 3), (2, 512), (512, 1024)]
)
def test_distances_have_the_buckets_of_the_library(buckets: int, longest: int) -> None:
    length = 1100
    distances = torch.arange(length, -length - 1, -1)
    expected = make_log_bucket_position(distances, buckets, longest).long() + buckets
    found = embeddings_of_distances(length, size_with(buckets, longest), torch.device("cpu"))
    assert torch.equal(found, expected.clamp(0, 2 * buckets - 1))


def test_without_buckets_each_distance_has_its_own_embedding_up_to_the_longest() -> None:
    found = embeddings_of_distances(5, size_with(0, 3), torch.device("cpu"))
    assert found.tolist() == [5, 5, 5, 5, 4, 3, 2, 1, 0, 0, 0]


@pytest.mark.parametrize("length", [1, 2, 7])
def test_head_by_head_is_as_all_at_once(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """A GPU and a compiled model compute position scores with torch's own operations."""
    torch.manual_seed(3)
    given = [torch.randn(2, 3, length, 4, dtype=torch.float64) for _ in range(2)]
    given += [torch.randn(2, 2 * length + 1, 4, dtype=torch.float64) for _ in range(2)]
    weights, results = torch.randn(2, 3, length, length, dtype=torch.float64), []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        own = [copy.deepcopy(values).requires_grad_() for values in given]
        scores = deberta_layers.position_scores(*own)
        (scores * weights).sum().backward()
        results.append([scores, *(values.grad for values in own)])
    query, key, of_keys, of_queries = given
    for q in range(length):
        for k in range(length):
            row = length - (q - k)
            expected = (query[:, :, q] * of_keys[:, row, None]).sum(-1) + (key[:, :, k] * of_queries[:, row, None]).sum(
                -1
            )
            torch.testing.assert_close(results[0][0][:, :, q, k], expected)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
