"""The commands of examples/denoising/README.md run in a clean folder; only their numbers are made smaller."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.documented import bash_blocks, clean_folder, run_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_python_in_module")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> Path:
    return clean_folder(tmp_path_factory.mktemp("readme"), english_text[0])


def test_the_denoising_example_trains_and_fills_gaps(folder: Path) -> None:
    text = (REPOSITORY / "examples" / "denoising" / "README.md").read_text("utf-8")
    small, training, hydra, infill = bash_blocks(text)
    size = "--encoder-layers 1 --encoder-embed-dim 32 --encoder-attention-heads 2 --decoder-attention-heads 2"
    tiny = f"{size} --cpu --num-workers 0"
    printed = run_in(folder, f"{small.strip()} {tiny} --batch-size 4", UPDATES="3", VOCAB="400")
    assert len(re.findall(r"^  <extra_id_\d>  ", printed, flags=re.M)) == 3

    assert "--max-update 100000" in training
    run_in(folder, f"{training.strip()} {tiny} --tokens-per-sample 64 --max-update 2 --save-dir denoising-model")
    tiny_hydra = (
        "model._name=denoising_small +model.encoder_layers=1 +model.encoder_embed_dim=32 task.tokens_per_sample=64 "
        "optimization.max_update=2 dataset.num_workers=0 common.cpu=true optimization.update_freq=[1]"
    )
    run_in(folder, f"{hydra.strip()} {tiny_hydra} checkpoint.save_dir=denoising-hydra")
    for name in ("denoising-model", "denoising-hydra"):
        assert (folder / name / "checkpoint_best.pt").exists()

    assert "walks in" in run_in(folder, infill)
    in_python, plain = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert "walks in" in run_in(folder, f"{sys.executable} - <<'END'\n{in_python}\nEND")
    shapes = run_in(folder, f"{sys.executable} - <<'END'\n{plain}\nEND")
    assert shapes.strip() == "{'source': (2, 46), 'target': (2, 12), 'decoder_input': (2, 12)}"
