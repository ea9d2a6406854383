"""Gradients of the auxiliary model's own loss, compared with differences of losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mlsm_plugin.auxiliary.attribution import LossGradients, open_loss_gradients
from mlsm_plugin.auxiliary.online_codes import OnlineCodes
from mlsm_plugin.auxiliary.split_coder import CodingSettings, SplitCoder
from mlsm_plugin.data.token_blocks import is_content
from mlsm_plugin.hidden_states.block_reader import BlockReader, BlockSettings, hidden_states_of
from mlsm_plugin.hidden_states.fairseq_encoder import FairseqEncoder
from mlsm_plugin.hidden_states.masked_lms import MaskedLm, open_masked_lm
from mlsm_plugin.sparse_coding.code_selection import CodeSelection
from mlsm_plugin.sparse_coding.code_store import CodeStore
from mlsm_plugin.sparse_coding.coder import SparseCoder
from mlsm_plugin.sparse_coding.dictionary import Dictionary
from mlsm_plugin.sparse_coding.lasso import LassoCoder, LassoOptions
from tests.auxiliary.toy_coder import ToyCoder
from tests.conftest import failing_mlsm, mlsm
from tests.tiny_models import TinyData, save_untrained_npm

BLOCKS = BlockSettings(16)
DIM = 32


def lasso_coder() -> LassoCoder:
    atoms = np.random.default_rng(0).normal(size=(24, DIM))
    return LassoCoder(Dictionary(atoms / np.linalg.norm(atoms, axis=1, keepdims=True)), LassoOptions(lambda_=0.1))


def own_loss(model: MaskedLm, tokens: torch.Tensor, layer: int, shift: torch.Tensor) -> float:
    """The summed loss of the content tokens after ``shift`` is added to a hidden state."""
    content = is_content(tokens, model.dictionary)
    with model.changed(layer, lambda hidden: hidden + shift.to(hidden)):
        return float(model.losses(tokens, content, tokens).sum())


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_gradients_are_the_slopes_of_the_loss(tiny: TinyData, layer: int) -> None:
    model = open_masked_lm(tiny.model, tiny.data_bin, device="cpu")
    model._model.double()
    tokens = torch.tensor([[0, 8, 9, 10, 2], [0, 11, 12, 2, 1]])
    found = LossGradients(model, layer, DIM).hidden_states(tokens)
    assert found.shape == (2, 5, DIM)
    rng = np.random.default_rng(layer)
    for row, column in ((0, 2), (1, 1), (0, 0)):
        direction = torch.zeros(2, 5, DIM, dtype=torch.float64)
        direction[row, column] = torch.from_numpy(rng.normal(size=DIM))
        losses = [own_loss(model, tokens, layer, step * direction) for step in (-3e-2, 3e-2)]
        slope = (losses[1] - losses[0]) / 6e-2
        assert slope == pytest.approx(float((found.double() * direction).sum()), rel=2e-2, abs=2e-3)


def test_the_atoms_with_the_largest_products_are_kept(tiny: TinyData) -> None:
    reader = BlockReader(tiny.data_bin, "valid", BLOCKS)
    encoder = FairseqEncoder(tiny.model, tiny.data_bin, layer=1, device="cpu")
    coder, selection = lasso_coder(), CodeSelection(2, "attribution")
    gradients = open_loss_gradients(*(selection, tiny.model, tiny.data_bin, coder), layer=1, device="cpu", fp16=False)
    assert gradients is not None
    settings = CodingSettings(layer=1, blocks=BLOCKS, selection=selection, batch_tokens=500)
    chunks = list(SplitCoder("valid", reader, encoder, coder, settings, gradients).coded_chunks(range(20)))
    blocks = [block for index in range(20) for block in reader.block(index)]
    positions, hidden = hidden_states_of(blocks, reader, encoder, max_tokens=10**6)
    _, slopes = hidden_states_of(blocks, reader, gradients, max_tokens=10**6)
    whole = coder.encode(hidden).codes.toarray()
    products = slopes.numpy() @ coder.dictionary.atoms.T * whole
    assert np.array_equal(np.concatenate([chunk.positions for chunk in chunks]), positions)
    found = np.concatenate([chunk.coded.codes.toarray() for chunk in chunks])
    for own, code, scores in zip(found, whole, products, strict=True):
        kept = np.flatnonzero(own)
        assert len(kept) == min(2, np.count_nonzero(code))
        others = np.setdiff1d(np.flatnonzero(code), kept)
        assert not len(others) or scores[kept].min() >= scores[others].max() - 1e-5
    by_weight = [CodeSelection(2).select(coder.encode(hidden).codes).toarray()]
    assert not np.array_equal(found > 0, by_weight[0] > 0)


def test_what_attribution_cannot_do_without(tiny: TinyData, tmp_path: Path) -> None:
    selection = CodeSelection(2, "absolute-attribution")

    def open_with(model: Path, coder: SparseCoder) -> object:
        return open_loss_gradients(selection, model, tiny.data_bin, coder, layer=1, device="cpu", fp16=False)

    with pytest.raises(ValueError, match="'toy' does not reconstruct"):
        open_with(tiny.model, ToyCoder())
    npm = save_untrained_npm(tiny, tmp_path / "npm")
    with pytest.raises(ValueError, match=r"--latent-select absolute-attribution needs the loss .* was not trained"):
        open_with(npm, lasso_coder())
    assert (
        open_loss_gradients(*(CodeSelection(2), npm, tiny.data_bin, ToyCoder()), layer=1, device="cpu", fp16=False)
        is None
    )


def test_store_and_online_codes_are_the_same(
    tiny: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_bin = tiny.copy(tmp_path / "data-bin")
    small = ("--atoms", 8, "--tokens", 400, "--iterations", 2, "--batch-size", 50, "--threads", 1)
    models = ("--auxiliary", tiny.model)
    mlsm("dictionary", data_bin, *models, "--layer", 1, "--output", tmp_path / "dict", *small)
    encode = ("encode", data_bin, *models, "--dictionary", tmp_path / "dict", "--splits", "valid", "--threads", 1)
    assert "needs --latent-top" in failing_mlsm(capsys, *encode, "--latent-select", "attribution")
    mlsm(*encode, "--latent-top", 2, "--latent-select", "attribution")
    store = CodeStore(data_bin / "valid.codes")
    assert (store.meta["latent_top"], store.meta["latent_select"]) == (2, "attribution")
    assert "latent_top is 2 there and 3 now" in failing_mlsm(
        capsys, *encode, "--latent-top", 3, "--latent-select", "attribution"
    )
    online = OnlineCodes(
        data_bin,
        checkpoint=tiny.model,
        dictionary=tmp_path / "dict",
        tokens_per_sample=24,
        selection=CodeSelection(2, "attribution"),
    )
    blocks = [block for index in range(6) for block in BlockReader(data_bin, "valid", BlockSettings(24)).block(index)]
    for block in blocks:
        target = torch.where(block.positions >= 0, block.tokens, torch.ones_like(block.tokens))[None]
        found = online.codes_of_masked(block.tokens[None], target)
        atoms, weights = store.lookup(block.positions[block.positions >= 0].numpy())
        width = max(atoms.shape[1], found["atoms"].shape[1])
        for own, wanted in ((found["atoms"].numpy(), atoms), (found["weights"].numpy(), weights)):
            padding = -1 if own.dtype == np.int32 else 0
            padded = [
                np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=padding) for part in (own, wanted)
            ]
            assert np.allclose(*padded, atol=2e-3)
