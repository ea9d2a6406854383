"""Checkpoints of ``mlsm_modern`` and ``mlsm_deberta`` as stock models of the library, also in padded batches."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer, FillMaskPipeline

from mlsm_plugin import hub
from mlsm_plugin.hub import hf_export, stock_models
from tests.conftest import failing_mlsm, mlsm
from tests.hub.modern_models import BUCKETS, NPM, POSITIONS, WINDOW, save_modern
from tests.tiny_hf_models import make_tokenizer
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]


def logits_of_both(ours: Any, exported: Path) -> tuple[Tensor, Tensor]:
    """Logits of our model and of the export for a padded batch, ``(n, V)`` without padding, in the order of our ids.

    Of an export without a head, they are the hidden states.
    """
    ids, dictionary = hf_export.exported_ids(ours), ours.task.source_dictionary
    random = torch.Generator().manual_seed(3)
    batch = torch.randint(dictionary.nspecial, len(dictionary), (3, POSITIONS), generator=random)
    for row, length in enumerate((POSITIONS, 30, 5)):
        batch[row, length:] = dictionary.pad()
    seen = batch.ne(dictionary.pad())
    has_head = json.loads((exported / "config.json").read_text())["architectures"][0].endswith("ForMaskedLM")
    model = (AutoModelForMaskedLM if has_head else AutoModel).from_pretrained(exported).eval()
    with torch.no_grad():
        theirs = model(input_ids=ids[batch], attention_mask=seen.long())
        if has_head:
            return ours.model(batch)[0][seen], theirs.logits[seen][:, ids]
        return ours.model(batch, features_only=True)[0][seen], theirs.last_hidden_state[seen]


DEBERTA = "mlsm_deberta_tiny"


@pytest.mark.parametrize(
    ("arch", "flags"),
    [("mlsm_modern_tiny", ()), ("mlsm_modern_tiny", WINDOW), (DEBERTA, ()), (DEBERTA, BUCKETS),
     (DEBERTA, ("--position-buckets", 0, "--max-relative-positions", 9))],
    ids=["all layers global", "local layers", "deberta", "few buckets", "no buckets"],
)  # fmt: skip
def test_stock_classes_compute_what_the_model_computes(arch: str, flags: Any, tiny: TinyData, tmp_path: Path) -> None:
    checkpoint = save_modern(tiny.data_bin, tmp_path / "run", *flags, arch=arch)
    mlsm("convert", checkpoint, tmp_path / "out", "--text", tiny.text, "--lines", 40)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    modern = arch == "mlsm_modern_tiny"
    assert config["architectures"] == ["ModernBertForMaskedLM" if modern else "DebertaV2ForMaskedLM"]
    assert not list((tmp_path / "out").glob("*.py"))
    ours = hub.from_pretrained(checkpoint)
    found, expected = logits_of_both(ours, tmp_path / "out")
    assert found.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.model_max_length == config["max_position_embeddings"] == POSITIONS
    names = ("cls_token_id", "bos_token_id", "pad_token_id", "eos_token_id", "sep_token_id")
    assert [config[name] for name in names] == [0, 0, 1, 2, 2]
    if modern:
        names = ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta")  # of version 4 of the library
        assert [config[name] for name in names] == ([3, 160_000, 500] if flags else [1, 10_000, 10_000])
    filled = FillMaskPipeline(AutoModelForMaskedLM.from_pretrained(tmp_path / "out"), tokenizer, top_k=6)
    expected_scores = [score for _, score, _ in ours.fill_mask("The <mask> is bound.", topk=2)]
    guesses = filled("The <mask> is bound.")
    # random weights may predict special tokens, too, which fill_mask leaves out
    scores = [guess["score"] for guess in guesses if guess["token"] not in tokenizer.all_special_ids]
    assert scores[:2] == pytest.approx(expected_scores, rel=1e-4)


@pytest.mark.parametrize(
    ("arch", "name", "value"),
    [
        ("mlsm_modern_tiny", "local_attention", 10),
        ("mlsm_modern_tiny", "layer_types", ["full_attention"] * 4),
        ("mlsm_modern_tiny", "rope_parameters", {kind: {"rope_type": "default", "rope_theta": 500.0} for kind in
                             ("full_attention", "sliding_attention")}),
        (DEBERTA, "max_relative_positions", 12),
        (DEBERTA, "pos_att_type", ["c2p"]),
        (DEBERTA, "norm_rel_ebd", "none"),
    ],
)  # fmt: skip
def test_positions_matter(arch: str, name: str, value: Any, tiny: TinyData, tmp_path: Path) -> None:
    checkpoint = save_modern(tiny.data_bin, tmp_path / "run", *(BUCKETS if arch == DEBERTA else WINDOW), arch=arch)
    ours = hub.from_pretrained(checkpoint)
    hf_export.export(ours, tmp_path / "out", ["The name is bound."])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config[name] != value
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, name: value}))
    found, expected = logits_of_both(ours, tmp_path / "out")
    assert (found - expected).abs().max() > 0.05


@pytest.mark.parametrize(("npm", "arch"), [(False, "mlsm_modern_tiny"), (True, "mlsm_modern_tiny"), (True, DEBERTA)])
def test_a_hugging_face_tokenizer_keeps_its_ids(
    npm: bool, arch: str, tiny: TinyData, tmp_path: Path, capsys: Capture
) -> None:
    make_tokenizer("modern_byte_level", tiny.text, tmp_path / "tokenizer")
    texts = ("--train", tiny.text, "--valid", tiny.text)
    tokenizer = f"hf:{tmp_path}/tokenizer"
    mlsm("binarize", "--tokenizer", tokenizer, *texts, "--output", tmp_path / "data", "--workers", 1)
    flags = BUCKETS if arch == DEBERTA else WINDOW
    checkpoint = save_modern(tmp_path / "data", tmp_path / "run", *flags, arch=arch, **(NPM if npm else {}))
    mlsm("convert", checkpoint, tmp_path / "out", "--text", tiny.text, "--lines", 40)
    assert "ids are the same on 40 lines" in capsys.readouterr().out
    own, theirs = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("tokenizer", "out"))
    assert theirs("[MASK] is bound.")["input_ids"] == own("[MASK] is bound.")["input_ids"]
    assert len(theirs) == len(own) + 2 * npm
    ours = hub.from_pretrained(checkpoint)
    assert not torch.equal(hf_export.exported_ids(ours), torch.arange(len(theirs)))
    found, expected = logits_of_both(ours, tmp_path / "out")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.cls_token_id, config.sep_token_id, config.pad_token_id) == (
        own.cls_token_id, own.sep_token_id, own.pad_token_id,
    )  # fmt: skip


def test_span_masks_of_npm_are_kept(tiny: TinyData, tmp_path: Path) -> None:
    checkpoint = save_modern(tiny.data_bin, tmp_path / "run", **NPM)
    mlsm("convert", checkpoint, tmp_path / "out", "--text", tiny.text, "--lines", 5)
    ours = hub.from_pretrained(checkpoint)
    end = AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids("<mask_e>")
    assert end == ours.task.source_dictionary.index("<mask_e>") == len(ours.task.source_dictionary) - 1
    found, expected = logits_of_both(ours, tmp_path / "out")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", ["mlsm_modern_tiny", DEBERTA])
def test_latent_head_follows_the_head_of_the_library(
    arch: str, tiny: TinyData, tmp_path: Path, capsys: Capture
) -> None:
    checkpoint = save_modern(tiny.data_bin, tmp_path / "run", "--num-atoms", 12, arch=arch)
    mlsm("convert", checkpoint, tmp_path / "out", "--text", tiny.text, "--lines", 5)
    assert "the projection to 12 atoms" in capsys.readouterr().out
    ours, theirs = hub.from_pretrained(checkpoint), AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    head = load_file(tmp_path / "out" / "latent_head.safetensors")
    tokens = ours.encode("The name is bound, and it is bound to the value of an expression.")
    with torch.no_grad():
        hidden = theirs.base_model(input_ids=tokens[None]).last_hidden_state
        transformed = (theirs.cls.predictions.transform if arch == DEBERTA else theirs.head)(hidden)
        latent = torch.nn.functional.linear(transformed, head["weight"], head["bias"]).softmax(dim=-1)
    torch.testing.assert_close(latent, ours.latent_distribution(tokens), rtol=1e-4, atol=1e-6)


def test_files_that_do_not_prove_themselves_are_not_written(
    tiny: TinyData, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_modern(tiny.data_bin, tmp_path / "run", *WINDOW)
    words = ("convert", checkpoint, tmp_path / "out", "--text", tiny.text, "--lines", 5)
    weights = stock_models.modernbert_weights

    def exchanged(*args: Any) -> dict[str, Tensor]:
        found = weights(*args)
        name = "model.layers.2.mlp.Wi.weight"
        return found | {name: found[name].roll(len(found[name]) // 2, dims=0)}  # the halves of the GeGLU

    monkeypatch.setattr(stock_models, "modernbert_weights", exchanged)
    assert "the exported model's logits differ by" in failing_mlsm(capsys, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("knows_modernbert", [False, True])
def test_an_old_library_is_named(knows_modernbert: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("transformers")
    if knows_modernbert:  # of version 4, without types of layers
        vars(old).update(ModernBertConfig=object, ModernBertForMaskedLM=object)
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(ValueError, match="needs version 5 or newer"):
        stock_models.library_classes()


@pytest.mark.parametrize("arch", ["mlsm_modern_tiny", DEBERTA])
def test_every_weight_has_its_counterpart(arch: str, tiny: TinyData, tmp_path: Path) -> None:
    ours = hub.from_pretrained(save_modern(tiny.data_bin, tmp_path / "run", arch=arch))
    state = stock_models.divided(ours.model.state_dict()) if arch == DEBERTA else ours.model.state_dict()
    names = (stock_models.deberta_names if arch == DEBERTA else stock_models.modernbert_names)(2)
    assert {*names.values()} == {*state}
    theirs = stock_models.stock_model(ours, hf_export.exported_ids(ours))
    assert sorted(names) == sorted(theirs.state_dict())
