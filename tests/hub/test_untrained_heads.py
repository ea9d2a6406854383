"""A masked-LM head that was never trained is not exported, so that nothing can use it without a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM

from mlsm_plugin import hub
from mlsm_plugin.hub.hf_import import import_model
from mlsm_plugin.huggingface import LatentSemanticModel
from tests.conftest import failing_mlsm, mlsm
from tests.hub.modern_models import NPM, save_modern
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]
ARCHITECTURES = {"mlsm_roberta_tiny": "Roberta", "mlsm_modern_tiny": "ModernBert", "mlsm_deberta_tiny": "DebertaV2"}
MLSM = {"task": "masked_latent_semantic", "criterion": "latent_semantic_kl"}
OBJECTIVES = {
    "mlsm alone": (("--num-atoms", 12), MLSM, "--mlm-weight was 0"),
    "npm": ((), NPM, "--task nonparametric_masked_lm has no loss on it"),
}


def exported(name: str, arch: str, tiny: TinyData, folder: Path) -> Path:
    """The export of a model that was trained, it says, without a loss on its head."""
    flags, options, _ = OBJECTIVES[name]
    checkpoint = save_modern(tiny.data_bin, folder / "run", *flags, arch=arch, **options)
    mlsm("convert", checkpoint, folder / "out", "--text", tiny.text, "--lines", 20)
    return folder / "out"


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_export_has_the_encoder_alone(
    name: str, arch: str, tiny: TinyData, tmp_path: Path, capsys: Capture
) -> None:
    folder = exported(name, arch, tiny, tmp_path)
    printed = capsys.readouterr().out
    assert f"was not trained ({OBJECTIVES[name][2]}), and was left out; AutoModel opens the folder" in printed
    assert "hidden states of" in printed
    architecture = json.loads((folder / "config.json").read_text())["architectures"]
    assert architecture == [f"{ARCHITECTURES[arch]}Model"]
    _, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert info["missing_keys"]  # of which the library says that they are newly initialized
    ours, theirs = hub.from_pretrained(tmp_path / "run"), AutoModel.from_pretrained(folder).eval()
    ids = ours.encode("The name is bound, and the value is a list.")
    with torch.no_grad():
        hidden = theirs(input_ids=ids[None]).last_hidden_state
        torch.testing.assert_close(hidden, ours.model(ids[None], features_only=True)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_latent_head_keeps_what_it_needs(arch: str, tiny: TinyData, tmp_path: Path) -> None:
    folder = exported("mlsm alone", arch, tiny, tmp_path)
    ours, model = hub.from_pretrained(tmp_path / "run"), LatentSemanticModel.from_pretrained(folder, mlm_weight=0.0)
    ids = ours.encode("The name is bound, and the value is a list.")
    wanted = ours.latent_distribution(ids)
    assert float(wanted.std()) > 0.01
    assert wanted.shape[-1] == 12
    torch.testing.assert_close(distribution(model, ids), wanted, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "again")
    again = LatentSemanticModel.from_pretrained(tmp_path / "again", mlm_weight=0.0)
    torch.testing.assert_close(distribution(again, ids), wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def distribution(model: LatentSemanticModel, ids: torch.Tensor) -> torch.Tensor:
    from mlsm_plugin.huggingface.pretraining_model import head_of

    hidden = model.eval().base_model(input_ids=ids[None]).last_hidden_state  # type: ignore[attr-defined]
    return model.latent_head(head_of(model).transform(hidden)).softmax(dim=-1)


def test_no_loader_takes_a_head_that_is_not_there(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    folder = exported("npm", "mlsm_roberta_tiny", tiny, tmp_path)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"sentence_good": "a name", "sentence_bad": "name a"}\n', encoding="utf-8")
    for words in (("evaluate", "pairs", "--checkpoint", folder, "--input", pairs),
                  ("convert", folder, tmp_path / "imported", "--text", tiny.text)):  # fmt: skip
        assert "was saved without a masked-LM head" in failing_mlsm(capsys, *words)
    imported = import_model(folder, tmp_path / "npm", ["The name is bound."], npm="phrase")
    assert imported.largest_difference <= 1e-4
    with pytest.raises(ValueError, match="was not trained"):
        hub.from_pretrained(tmp_path / "npm").fill_mask("The <mask> is bound.")


def test_an_export_with_a_head_is_read_as_before(tiny: TinyData, tmp_path: Path) -> None:
    checkpoint = save_modern(tiny.data_bin, tmp_path / "run")
    mlsm("convert", checkpoint, tmp_path / "out", "--text", tiny.text, "--lines", 5)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"sentence_good": "a name", "sentence_bad": "name a"}\n', encoding="utf-8")
    mlsm("evaluate", "pairs", "--checkpoint", tmp_path / "out", "--input", pairs)
