"""A stock ModernBERT or DeBERTa-v2 becomes a checkpoint that computes the same, and that training starts from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, ElectraConfig, ModernBertConfig

from mlsm_plugin import hub
from mlsm_plugin.core.files.hf_files import global_every
from mlsm_plugin.fairseq_plugin.compat.model_parts import OUTPUT_BIAS
from mlsm_plugin.hub import deberta_import, modernbert_import
from mlsm_plugin.hub.hf_import import import_model
from mlsm_plugin.hub.modernbert_import import architecture_flags
from tests.conftest import mlsm
from tests.hub.modern_models import POSITIONS, make_stock
from tests.tiny_models import TinyData

LINES = ["The name is bound to the value of an expression.", "(a) 1,000.5%", "Ünïcödé — 雪"]
ALL_GLOBAL = {"layer_types": ["full_attention"] * 4}


@pytest.fixture(scope="module")
def library(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library") / "modernbert"
    make_stock("modernbert", tiny.text, folder, rows=8)
    return folder


@pytest.fixture(scope="module")
def deberta(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library") / "deberta"
    make_stock("deberta-v2", tiny.text, folder, rows=8)
    return folder


@pytest.fixture(scope="module")
def imported(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported") / "model"
    import_model(library, folder, LINES)
    return folder


def padded(ours: Any) -> tuple[Tensor, Tensor]:
    """A batch of our ids ``(3, POSITIONS)`` and which of them are no padding."""
    dictionary = ours.task.source_dictionary
    random = torch.Generator().manual_seed(4)
    batch = torch.randint(dictionary.nspecial, len(dictionary), (3, POSITIONS), generator=random)
    for row, length in enumerate((POSITIONS, 20, 3)):
        batch[row, length:] = dictionary.pad()
    return batch, batch.ne(dictionary.pad())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("modernbert", {"rows": 8}),
        ("modernbert", ALL_GLOBAL),
        ("modernbert", {"decoder_bias": False, "local_attention": 7}),
        ("modernbert", {"layer_types": ["full_attention", "sliding_attention"] * 2, "max_position_embeddings": 2048}),
        (
            "modernbert",
            {
                "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
                "embedding_dropout": 0.1,
                "mlp_dropout": 0.2,
            },
        ),
        ("deberta-v2", {"rows": 8}),
        ("deberta-v2", {"legacy": False, "max_relative_positions": 12, "hidden_dropout_prob": 0.1}),
        ("deberta-v2", {"position_buckets": -1, "pos_att_type": ["c2p", "p2c"]}),
    ],
)
def test_logits_are_those_of_the_library(kind: str, settings: dict[str, Any], tiny: TinyData, tmp_path: Path) -> None:
    theirs = make_stock(kind, tiny.text, tmp_path / "library", **settings)
    proof = import_model(f"hf:{tmp_path}/library", tmp_path / "model", LINES)
    assert (proof.lines, proof.reordered) == (3, 0)
    assert 0 < proof.largest_difference <= 1e-4
    ours = hub.from_pretrained(tmp_path / "model")
    ids = torch.from_numpy(ours.bpe.tokenizer.hf_ids)
    assert not torch.equal(ids, torch.arange(len(ids)))
    batch, seen = padded(ours)
    with torch.no_grad():
        expected = theirs(input_ids=ids[batch], attention_mask=seen.long()).logits[seen][:, ids]
        found = ours.model(batch)[0][seen]
    assert found.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert ours.model.max_positions() == theirs.config.max_position_embeddings
    size, config = ours.model.encoder.sentence_encoder.size, theirs.config
    if kind == "modernbert":
        assert (size.dropout, size.activation_dropout) == (config.embedding_dropout, config.mlp_dropout)
    else:
        assert (size.dropout, size.attention_dropout) == (
            config.hidden_dropout_prob, config.attention_probs_dropout_prob,
        )  # fmt: skip


def test_half_precision_weights_are_read(library: Path, tmp_path: Path) -> None:
    AutoModelForMaskedLM.from_pretrained(library).bfloat16().save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(library).save_pretrained(tmp_path / "half")
    proof = import_model(tmp_path / "half", tmp_path / "model", LINES)
    assert 0 < proof.largest_difference <= 1e-4
    assert hub.from_pretrained(tmp_path / "model").model.encoder.lm_head.bias.dtype == torch.float32


OF_LAYERS = {
    "modernbert": ("local_attention", "layer_types", "rope_parameters"),
    "deberta-v2": ("position_buckets", "pos_att_type", "share_att_key", "norm_rel_ebd", "position_biased_input"),
}


@pytest.mark.parametrize("kind", OF_LAYERS)
def test_export_of_the_import_is_the_original(
    kind: str, library: Path, imported: Path, deberta: Path, tiny: TinyData, tmp_path: Path
) -> None:
    if kind == "deberta-v2":
        library, imported = deberta, tmp_path / "imported"
        import_model(library, imported, LINES)
    mlsm("convert", imported, tmp_path / "out", "--text", tiny.text, "--lines", 30)
    first, second = (AutoModelForMaskedLM.from_pretrained(path).eval() for path in (library, tmp_path / "out"))
    tokenizer = AutoTokenizer.from_pretrained(library)
    assert second.config.vocab_size == len(tokenizer) == first.config.vocab_size - 8
    batch = tokenizer(["The [MASK] is bound.", "A much longer sentence of names, and more of it."], padding=True)
    with torch.no_grad():
        logits = [model(**batch.convert_to_tensors("pt")).logits for model in (first, second)]
    seen = torch.as_tensor(batch["attention_mask"]).bool()
    torch.testing.assert_close(logits[1][seen], logits[0][seen][:, : len(tokenizer)], rtol=0, atol=1e-6)
    for name in (*OF_LAYERS[kind], "cls_token_id", "pad_token_id", "sep_token_id"):
        assert getattr(first.config, name) == getattr(second.config, name)


def test_files_are_those_of_binarize(imported: Path, library: Path, tiny: TinyData, tmp_path: Path) -> None:
    texts = ("--train", tiny.text, "--valid", tiny.text)
    mlsm("binarize", "--tokenizer", f"hf:{library}", *texts, "--output", tmp_path / "data", "--workers", 1)
    assert (imported / "dict.txt").read_bytes() == (tmp_path / "data" / "dict.txt").read_bytes()
    inside = {path.name: path.read_bytes() for path in (tmp_path / "data" / "hf_tokenizer").iterdir()}
    assert inside == {path.name: path.read_bytes() for path in (imported / "hf_tokenizer").iterdir()}
    assert {path.name for path in imported.iterdir()} == {"dict.txt", "hf_tokenizer", "model.pt"}
    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(imported / "model.pt")])
    assert (cfg.task._name, cfg.criterion._name, cfg.model._name) == ("plain_masked_lm", "masked_lm", "mlsm_modern")
    assert len(task.source_dictionary) == len(models[0].encoder.lm_head.bias)


def test_flags_are_those_of_the_configuration(library: Path) -> None:
    config = AutoConfig.from_pretrained(library)
    assert " ".join(architecture_flags(config)) == (
        "--encoder-layers 4 --encoder-embed-dim 32 --encoder-ffn-embed-dim 48 --encoder-attention-heads 2 "
        "--max-positions 48 --attention-window 8 --global-attention-every 3 --dropout 0.0 --attention-dropout 0.0 "
        "--activation-dropout 0.0 --rope-theta 160000.0 --local-rope-theta 500.0 --tokens-per-sample 48"
    )
    sizes = {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
    every_layer = ModernBertConfig(**sizes, layer_types=["full_attention"] * 12, attention_dropout=0.1)
    assert " ".join(architecture_flags(every_layer)) == (
        "--encoder-layers 12 --encoder-embed-dim 768 --encoder-ffn-embed-dim 2048 --encoder-attention-heads 12 "
        "--max-positions 8192 --attention-window 0 --dropout 0.0 --attention-dropout 0.1 --activation-dropout 0.0 "
        "--rope-theta 160000.0 --tokens-per-sample 1024"
    )


def test_flags_of_a_deberta_are_those_of_its_configuration(deberta: Path) -> None:
    config = AutoConfig.from_pretrained(deberta)
    expected = (
        "--encoder-layers 4 --encoder-embed-dim 32 --encoder-ffn-embed-dim 48 --encoder-attention-heads 2 "
        "--max-positions 48 --position-buckets 8 --max-relative-positions 48 --dropout 0.1 --attention-dropout 0.1 "
        "--tokens-per-sample 48"
    )
    assert " ".join(deberta_import.architecture_flags(config)) == expected
    config.max_relative_positions, config.position_buckets = 70, -1
    changed = expected.replace("buckets 8 --max-relative-positions 48", "buckets 0 --max-relative-positions 70")
    assert " ".join(deberta_import.architecture_flags(config)) == changed


def test_number_of_layers_between_global_ones() -> None:
    def of(pattern: str) -> int | None:
        return global_every([{"g": "full_attention", "l": "sliding_attention"}[kind] for kind in pattern])

    assert [of("gllgllg"), of("gl"), of("g"), of("gll")] == [3, 3, 3, 3]
    assert [of("glglg"), of("gggg"), of("glll"), of("gllllg")] == [2, 1, 4, 5]
    assert [of("lg"), of("ggl"), of("gllgl" + "g")] == [None, None, None]


def refused(folder: Path, tmp_path: Path, lines: list[str] = LINES) -> str:
    """The message of an import that fails and leaves nothing."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        import_model(folder, tmp_path / "model", lines)
    assert sorted(tmp_path.iterdir()) == before
    return str(error.value)


def changed(library: Path, folder: Path, **values: object) -> Path:
    shutil.copytree(library, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 24}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"norm_bias": True}, "has norm_bias True; only False can be imported"),
        ({"attention_bias": True}, "has attention_bias True"),
        ({"mlp_bias": True}, "has mlp_bias True"),
        ({"classifier_bias": True}, "has classifier_bias True"),
        ({"hidden_activation": "silu"}, "has hidden_activation silu; only gelu can be imported"),
        ({"classifier_activation": "relu"}, "has classifier_activation relu"),
        ({"tie_word_embeddings": False}, "has tie_word_embeddings False; only True can be imported"),
        ({"norm_eps": 1e-6}, "has norm_eps 1e-06; only 1e-05 can be imported"),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN | {"rope_type": "default"}}},
         "has rotary positions of type yarn"),
        ({"local_attention": 1}, "has local_attention 1; it must be at least 2"),
        ({"layer_types": ["sliding_attention"] * 4}, "has other layer_types than every N-th layer global"),
        ({"vocab_size": 2000}, "the tokenizer's ids need 600 embeddings, the model has 2000"),
        ({"intermediate_size": 64}, "cannot be read"),
    ],
)  # fmt: skip
def test_models_that_ours_cannot_be_are_refused(
    values: dict[str, object], message: str, library: Path, tmp_path: Path
) -> None:
    assert message in refused(changed(library, tmp_path / "changed", **values), tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"relative_attention": False}, "has relative_attention False; only True can be imported"),
        ({"position_biased_input": True}, "has position_biased_input True; only False can be imported"),
        ({"share_att_key": False}, "has share_att_key False"),
        ({"pos_att_type": ["p2c"]}, r"has pos_att_type ['p2c']; only ['p2c', 'c2p'] can be imported"),
        ({"norm_rel_ebd": "none"}, "has norm_rel_ebd none; only layer_norm"),
        ({"type_vocab_size": 2}, "has type_vocab_size 2; only 0"),
        ({"hidden_act": "relu"}, "has hidden_act relu; only gelu"),
        ({"layer_norm_eps": 1e-5}, "has layer_norm_eps 1e-05; only 1e-07"),
        ({"tie_word_embeddings": False}, "has tie_word_embeddings False"),
        ({"conv_kernel_size": 3}, "has conv_kernel_size 3; only 0"),
        ({"embedding_size": 16}, "has embedding_size 16; only 32"),
        ({"attention_head_size": 8}, "has attention_head_size 8; only 16"),
        ({"legacy": False}, "lacks"),
        ({"max_relative_positions": 5}, "--max-relative-positions must be at least 6 with --position-buckets 8, got 5"),
    ],
)  # fmt: skip
def test_a_deberta_that_ours_cannot_be_is_refused(
    values: dict[str, object], message: str, deberta: Path, tmp_path: Path
) -> None:
    assert message in refused(changed(deberta, tmp_path / "changed", **values), tmp_path)


def test_folders_without_a_whole_model_are_refused(library: Path, imported: Path, tmp_path: Path) -> None:
    electra = shutil.copytree(library, tmp_path / "electra")
    ElectraConfig().save_pretrained(electra)
    supported = "bert, camembert, deberta-v2, modernbert, roberta, xlm-roberta"
    assert f"is a model of type electra; supported types: {supported}" in refused(electra, tmp_path)
    headless = shutil.copytree(library, tmp_path / "headless")
    weights = load_file(headless / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.startswith(("head", "decoder"))}
    save_file(kept, headless / "model.safetensors", metadata={"format": "pt"})
    assert "without a masked-LM head (it lacks weights such as decoder.bias)" in refused(headless, tmp_path)
    (headless / "model.safetensors").write_bytes(b"no weights")
    assert "cannot be read" in refused(headless, tmp_path)
    (headless / "tokenizer.json").unlink()
    (headless / "tokenizer_config.json").unlink()
    assert "has no readable tokenizer" in refused(headless, tmp_path)
    assert "is not a folder of a Hugging Face model" in refused(tmp_path / "nowhere", tmp_path)
    with pytest.raises(ValueError, match="exists already; an import needs a new folder"):
        import_model(library, imported, LINES)


def test_files_that_do_not_prove_themselves_are_not_written(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = modernbert_import.imported_weights

    def shifted(*args: Any) -> dict[str, Tensor]:
        found = weights(*args)
        return found | {OUTPUT_BIAS: found[OUTPUT_BIAS].roll(1)}

    monkeypatch.setattr(modernbert_import, "imported_weights", shifted)
    assert "the imported model's logits differ by" in refused(library, tmp_path)


def test_a_latent_head_that_is_not_imported_is_named(
    library: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(library, tmp_path / "with_head")
    (tmp_path / "with_head" / "latent_head.safetensors").write_bytes(b"")
    import_model(tmp_path / "with_head", tmp_path / "model", LINES)
    assert "latent_head.safetensors is not imported; training with codes makes a new latent head" in caplog.text
