"""Replaced hidden states are those of the encoder, at each layer of each kind of model; and models without a head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM

from mlsm_plugin.core.hidden_states.hf_encoder import SUPPORTED
from mlsm_plugin.core.hidden_states.sources import open_encoder
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.evaluation.masked_lms import NoMaskedLmError, open_masked_lm
from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary
from tests.conftest import mlsm
from tests.hub.modern_models import NPM, WINDOW, save_modern
from tests.tiny_hf_models import make_model
from tests.tiny_models import TinyData, positions, save_untrained

LENGTHS = (20, 13, 4)  # right-padded; the window of a ModernBERT is shorter
CONVOLUTION = {"conv_kernel_size": 3, "conv_act": "gelu", "embedding_size": 16}
KINDS = ["roberta", "mlsm_modern", *(f"hf:{kind}" for kind in SUPPORTED), "hf:deberta-v2 with a convolution"]


@dataclass(frozen=True)
class Batch:
    """A masked LM and a batch: ids without and with masks, and which are masked and special, ``(3, 20)``."""

    name: Any
    data_bin: Path
    tokens: torch.Tensor
    inputs: torch.Tensor
    masked: torch.Tensor
    content: torch.Tensor


@pytest.fixture(scope="module", params=KINDS)
def batch(request: pytest.FixtureRequest, tiny: TinyData, tmp_path_factory: Any) -> Batch:
    root, data_bin, name = tmp_path_factory.mktemp("masked_lm"), tiny.data_bin, tiny.model
    if request.param == "mlsm_modern":
        name = save_modern(data_bin, root, *WINDOW)
    elif request.param.startswith("hf:"):
        kind, _, more = request.param.removeprefix("hf:").partition(" ")
        settings = CONVOLUTION if more else {}
        folder = make_model(kind, tiny.text, root / "model", kind=AutoModelForMaskedLM, **settings)
        name, data_bin = f"hf:{folder}", root / "data-bin"
        texts = ("--train", tiny.text, "--valid", tiny.text)
        mlsm("binarize", "--tokenizer", name, *texts, "--output", data_bin, "--workers", 1)
    return random_batch(name, data_bin)


def random_batch(name: Any, data_bin: Path) -> Batch:
    dictionary = load_dictionary(data_bin)
    torch.manual_seed(3)
    tokens = torch.randint(4, len(dictionary) - 1, (len(LENGTHS), max(LENGTHS)))
    place = torch.arange(max(LENGTHS))
    length = torch.tensor(LENGTHS)[:, None]
    tokens[:, 0] = dictionary.bos()
    tokens[place == length - 1] = dictionary.eos()
    tokens[place >= length] = dictionary.pad()
    content = (place > 0) & (place < length - 1)
    masked = content & (torch.rand(tokens.shape) < 0.3)
    masked[:, 2] = True
    return Batch(name, data_bin, tokens, tokens.masked_fill(masked, dictionary.index("<mask>")), masked, content)


def test_each_layer_is_replaced_where_the_encoder_reads_it(batch: Batch) -> None:
    model = open_masked_lm(batch.name, batch.data_bin, device="cpu")
    clean = model.losses(batch.inputs, batch.masked, batch.tokens)
    assert (clean.shape, clean.dtype) == ((int(batch.masked.sum()),), torch.float64)
    layers = open_encoder(batch.name, batch.data_bin, layer=0, device="cpu").num_layers
    attended = batch.tokens != model.dictionary.pad()
    for layer in range(layers + 1):
        states = open_encoder(batch.name, batch.data_bin, layer=layer, device="cpu").hidden_states(batch.inputs)
        seen = []

        def by_the_encoders(hidden: torch.Tensor, states: Any = states, seen: Any = seen) -> torch.Tensor:
            seen.append(hidden)
            return torch.where(attended[:, :, None], states, hidden)

        with model.changed(layer, by_the_encoders):
            same = model.losses(batch.inputs, batch.masked, batch.tokens)
        assert (len(seen), seen[0].dtype) == (1, torch.float32)
        torch.testing.assert_close(seen[0][attended], states[attended], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(same, clean, rtol=0, atol=1e-6)
        with model.changed(layer, torch.zeros_like):
            ablated = model.losses(batch.inputs, batch.masked, batch.tokens)
        assert (ablated - clean).abs().max() > 1e-3
        with model.changed(layer, torch.zeros_like):
            unseen = batch.inputs.clone()
            unseen[batch.content & ~batch.masked] = 5
            again = model.losses(unseen, batch.masked, batch.tokens)
        torch.testing.assert_close(again, ablated, rtol=0, atol=1e-6)  # no way around the replaced hidden states
    assert torch.equal(model.losses(batch.inputs, batch.masked, batch.tokens), clean)  # the hooks are gone


def test_losses_of_a_library_model_are_the_librarys(english_text: tuple[Path, Path], tmp_path: Path) -> None:
    folder = make_model("bert", english_text[0], tmp_path / "model", kind=AutoModelForMaskedLM)
    texts = ("--train", english_text[1], "--valid", english_text[1], "--output", tmp_path / "data", "--workers", 1)
    mlsm("binarize", "--tokenizer", f"hf:{folder}", *texts)
    batch = random_batch(f"hf:{folder}", tmp_path / "data")
    found = open_masked_lm(batch.name, batch.data_bin, device="cpu").losses(batch.inputs, batch.masked, batch.tokens)
    ids = torch.from_numpy(HuggingFaceTokenizer(folder).hf_ids)
    library = AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        mean = library(
            input_ids=ids[batch.inputs],
            attention_mask=(batch.tokens != 1).long(),
            labels=torch.where(batch.masked, ids[batch.tokens], -100),
        ).loss
    assert float(found.mean()) == pytest.approx(float(mean), rel=1e-5)


def test_losses_of_a_fairseq_model_are_fairseqs(tiny: TinyData) -> None:
    from fairseq import checkpoint_utils

    batch = random_batch(tiny.model, tiny.data_bin)
    found = open_masked_lm(batch.name, batch.data_bin, device="cpu").losses(batch.inputs, batch.masked, batch.tokens)
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tiny.model)], {"data": str(tiny.data_bin)})
    with torch.no_grad():
        logits = models[0].eval()(batch.inputs)[0]
    for loss, row, column in zip(found, *torch.nonzero(batch.masked, as_tuple=True), strict=True):
        expected = logits[row, column].double().logsumexp(0) - logits[row, column, batch.tokens[row, column]].double()
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_half_precision_is_close(tiny: TinyData) -> None:
    batch = random_batch(tiny.model, tiny.data_bin)
    losses = []
    for fp16 in (False, True):
        model = open_masked_lm(batch.name, batch.data_bin, device="cpu", fp16=fp16)
        with model.changed(1, lambda hidden: hidden * (hidden.dtype == torch.float32)):
            losses.append(model.losses(batch.inputs, batch.masked, batch.tokens))
    assert 0 < float((losses[0] - losses[1]).abs().max()) < 0.05


def test_models_that_are_no_masked_lm_say_why(tiny: TinyData, english_text: tuple[Path, Path], tmp_path: Path) -> None:
    npm = save_untrained(tiny.data_bin, tmp_path / "npm", *positions(40), **NPM)
    with pytest.raises(NoMaskedLmError, match=r"was not trained \(--task nonparametric_masked_lm has no loss on it"):
        open_masked_lm(npm, tiny.data_bin)
    folder = make_model("bert", english_text[0], tmp_path / "headless", kind=AutoModel)
    with pytest.raises(NoMaskedLmError, match=r"headless was saved without a masked-LM head .*such as cls.predictions"):
        open_masked_lm(f"hf:{folder}", tiny.data_bin)
