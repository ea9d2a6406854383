"""A model whose training has diverged is refused in one line wherever a model enters."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

from mlsm_plugin import hub
from mlsm_plugin.core.files.hf_files import LATENT_HEAD
from mlsm_plugin.huggingface import LatentSemanticModel
from tests.conftest import failing_mlsm, fairseq_train
from tests.denoising_flags import TINY
from tests.huggingface.test_t5_infilling import make_t5
from tests.tiny_hf_models import make_model
from tests.tiny_models import TinyData, save_untrained, save_untrained_npm

Capture = pytest.CaptureFixture[str]
MESSAGE = "has weights that are not finite ("


@pytest.fixture(scope="module")
def broken(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of every kind with NaN in one weight, and what commands need beside them."""
    root = tmp_path_factory.mktemp("broken")
    shutil.copytree(tiny.model.parent, root / "lm")
    save_untrained_npm(tiny, root / "npm")
    options = {"task": "span_denoising", "criterion": "cross_entropy", "arch": "denoising_small"}
    save_untrained(tiny.data_bin, root / "denoising", *TINY, **options)
    for name in ("lm", "npm", "denoising"):
        checkpoint = root / name / "checkpoint_last.pt"
        state = torch.load(checkpoint, weights_only=True)
        damage(state["model"])
        torch.save(state, checkpoint)
    make_model("bert", tiny.text, root / "bert", kind=AutoModelForMaskedLM)
    make_t5(tiny.text, root / "t5")
    for name in ("bert", "t5"):
        weights = load_file(root / name / "model.safetensors")
        damage(weights)
        save_file(weights, root / name / "model.safetensors", metadata={"format": "pt"})
    (root / "labels.tsv").write_text("a\tone text\nb\tanother text\n" * 2, encoding="utf-8")
    (root / "words.txt").write_text("a\tone\nb\tanother\n", encoding="utf-8")
    (root / "pairs.jsonl").write_text('{"sentence_good": "a b", "sentence_bad": "b a"}\n', encoding="utf-8")
    return root


def damage(weights: dict[str, torch.Tensor]) -> None:
    name = next(name for name, values in weights.items() if name.endswith("weight") and values.dim() == 2)
    weights[name][1, 1] = float("nan")


COMMANDS = {
    "finetune": "finetune --checkpoint {root}/lm --train {root}/labels.tsv --valid {root}/labels.tsv --output {out}",
    "pairs": "evaluate pairs --checkpoint {root}/lm --input {root}/pairs.jsonl",
    "pairs of the library": "evaluate pairs --checkpoint {root}/bert --input {root}/pairs.jsonl",
    "parametric": "npm classify --checkpoint {root}/lm --parametric --verbalizer {root}/words.txt "
    "--input {root}/labels.tsv --template {}<mask>",
    "datastore": "npm datastore {data} --checkpoint {root}/npm --output {out} --tokens-per-sample 24",
    "auxiliary": "dictionary {data} --auxiliary {root}/lm --layer 1 --output {out} --tokens-per-sample 24",
    "export": "convert {root}/lm {out} --text {text}",
    "import": "convert {root}/bert {out} --text {text}",
    "adapt": "adapt {root}/bert --text {text} --output {out} --objective mlm --max-length 32 --cpu",
    "infill": "infill --checkpoint {root}/denoising a<extra_id_0>",
    "infill of the library": "infill --checkpoint hf:{root}/t5 a<extra_id_0>",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_so(name: str, broken: Path, tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    places = {"root": str(broken), "out": str(tmp_path / "out"), "data": str(tiny.data_bin), "text": str(tiny.text)}
    command = COMMANDS[name]
    for place, path in places.items():
        command = command.replace(f"{{{place}}}", path)
    assert MESSAGE in failing_mlsm(capsys, *command.split())
    assert not (tmp_path / "out" / "model").exists()


def test_the_hub_says_so(broken: Path) -> None:
    with pytest.raises(ValueError, match=r"has weights that are not finite \("):
        hub.from_pretrained(broken / "lm")


def test_a_latent_head_is_a_weight(tiny: TinyData, tmp_path: Path) -> None:
    folder = make_model("bert", tiny.text, tmp_path / "model", kind=AutoModelForMaskedLM)
    head = {"weight": torch.zeros(4, 32), "bias": torch.full((4,), float("inf"))}
    save_file(head, folder / LATENT_HEAD)
    with pytest.raises(ValueError, match=rf"{LATENT_HEAD} has weights that are not finite \(bias\)"):
        LatentSemanticModel.from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--finetune-from-model", "--restore-file"])
def test_no_training_begins_with_it(flag: str, broken: Path, tiny: TinyData, tmp_path: Path) -> None:
    words = ("--max-positions", 32, "--tokens-per-sample", 24, "--max-update", 2)
    checkpoint = broken / "lm" / "checkpoint_last.pt"
    done = fairseq_train(tiny.data_bin, tmp_path / "run", *words, flag, checkpoint, task="plain_masked_lm", check=False)
    assert done.returncode != 0
    assert MESSAGE in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
