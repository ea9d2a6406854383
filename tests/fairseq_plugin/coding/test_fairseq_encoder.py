"""Hidden states of a fairseq checkpoint, and files that are not one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from torch.utils.flop_counter import FlopCounterMode

from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import FairseqEncoder
from tests.tiny_models import MASKED_LM, POSITIONS, TRAINED_TOKENS, TinyData, save_untrained

TOKENS = torch.tensor([[0, 5, 9, 30, 2], [0, 7, 2, 1, 1]])


def states_of_fairseq(tiny: TinyData) -> list[torch.Tensor]:
    """All hidden states ``(B, T, dim)``, by fairseq's own means."""
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tiny.model)], {"data": str(tiny.data_bin)})
    with torch.no_grad():
        _, extra = models[0].eval().extract_features(TOKENS, return_all_hiddens=True)
    return [state.transpose(0, 1) for state in extra["inner_states"]]


def test_each_layer_is_fairseqs(tiny: TinyData) -> None:
    expected = states_of_fairseq(tiny)
    assert len(expected) == 3
    content = TOKENS != 1
    for layer, states in enumerate(expected):
        encoder = FairseqEncoder(tiny.model, tiny.data_bin, layer=layer, device="cpu")
        assert (encoder.layer, encoder.num_layers, encoder.dim, encoder.max_tokens) == (layer, 2, 32, POSITIONS)
        assert len(encoder.dictionary) == len(FairseqEncoder(tiny.model, tiny.data_bin, layer=0).dictionary)
        found = encoder.hidden_states(TOKENS)
        assert (found.shape, found.dtype, found.requires_grad) == ((2, 5, 32), torch.float32, False)
        torch.testing.assert_close(found[content], states[content], rtol=1e-5, atol=1e-6)
    assert (expected[1] - expected[2])[content].abs().max() > 0.01


def test_half_precision_comes_out_as_float32(tiny: TinyData) -> None:
    exact, half = (
        FairseqEncoder(tiny.model, tiny.data_bin, layer=2, device="cpu", fp16=fp16).hidden_states(TOKENS)
        for fp16 in (False, True)
    )
    assert half.dtype == torch.float32
    distance = (exact - half)[TOKENS != 1].abs().max()
    assert 0 < float(distance) < 0.05


@pytest.mark.parametrize("arch", ["roberta", "mlsm_modern", "mlsm_deberta"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_hidden_states_of_chosen_tokens_are_those_of_the_batch(
    tiny: TinyData, tmp_path: Path, arch: str, layer: int
) -> None:
    size = ("--encoder-layers", 2, "--encoder-embed-dim", 32, "--encoder-attention-heads", 2, "--max-positions", 32)
    model = tiny.model if arch == "roberta" else save_untrained(tiny.data_bin, tmp_path, *size, arch=arch, **MASKED_LM)
    encoder = FairseqEncoder(model, tiny.data_bin, layer=layer, device="cpu")
    tokens = TOKENS.repeat(8, 1)
    chosen = torch.zeros_like(tokens, dtype=torch.bool)
    chosen[[0, 0, 3, 14], [1, 4, 2, 0]] = True
    with FlopCounterMode(display=False) as whole:
        expected = encoder.hidden_states(tokens)[chosen]
    with FlopCounterMode(display=False) as counter:
        found = encoder.hidden_states_of(tokens, chosen)
    assert (found.shape, found.dtype, found.requires_grad) == ((4, 32), torch.float32, False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    saved = 1 - counter.get_total_flops() / max(1, whole.get_total_flops())
    assert layer == 0 or (saved > 0.1) == (arch != "roberta")
    assert encoder.hidden_states_of(tokens, torch.zeros_like(chosen)).shape == (0, 32)


def test_what_the_checkpoint_says_before_it_is_a_model(tiny: TinyData, tmp_path: Path) -> None:
    assert FairseqEncoder.files_of(tiny.model) == [tiny.model]
    assert FairseqEncoder.layers_of(tiny.model) == 2
    assert FairseqEncoder.width_of(tiny.model) == 32
    assert FairseqEncoder.usual_tokens_of(tiny.model) == TRAINED_TOKENS
    assert FairseqEncoder.tokenizer_of(tiny.model) == str(tiny.model.parent)
    encoder = FairseqEncoder(str(tiny.model), str(tiny.data_bin), layer=1, device="cpu")
    other = save_untrained(tiny.data_bin, tmp_path, seed=2, **MASKED_LM)
    assert FairseqEncoder.fingerprint_of(other) != FairseqEncoder.fingerprint_of(tiny.model)
    encoder.to("cpu")
    assert encoder.device == torch.device("cpu")


@pytest.mark.parametrize("layer", [-1, 3])
def test_layer_that_the_model_does_not_have_is_refused(tiny: TinyData, layer: int) -> None:
    with pytest.raises(ValueError, match=rf"--layer {layer} is out of range: .* 0 \(embeddings\) to 2 \(last layer\)"):
        FairseqEncoder(tiny.model, tiny.data_bin, layer=layer)


def broken_checkpoint(kind: str, path: Path) -> Path:
    if kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("this is no checkpoint\n" * 10)
    elif kind == "other dict":
        torch.save({"weights": torch.zeros(3)}, path)
    elif kind == "tensor":
        torch.save(torch.zeros(3), path)
    elif kind == "list":
        torch.save([1, 2], path)
    elif kind == "zip":
        shutil.make_archive(str(path.with_suffix("")), "zip", Path(__file__).parent)
        path.with_suffix(".zip").rename(path)
    return path


def test_a_folder_stands_for_its_only_checkpoint(tiny: TinyData, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny.model.parent, tmp_path / "run")
    for name in ("averaged.pt", "checkpoint_2_6.pt"):
        next(folder.glob("*.pt")).rename(folder / name)
        assert FairseqEncoder.files_of(folder) == [folder / name]
        assert FairseqEncoder.tokenizer_of(folder) == str(folder)
        for says in (FairseqEncoder.layers_of, FairseqEncoder.usual_tokens_of, FairseqEncoder.fingerprint_of):
            assert says(folder) == says(tiny.model)
        tokens = torch.tensor([[0, 5, 6, 2]])
        states = [FairseqEncoder(where, tiny.data_bin, layer=2).hidden_states(tokens) for where in (folder, tiny.model)]
        torch.testing.assert_close(*states, rtol=0, atol=0)
    shutil.copy(tiny.model, folder)
    with pytest.raises(FileNotFoundError, match=r"has several checkpoints \(checkpoint_2_6.pt, checkpoint_last.pt\)"):
        FairseqEncoder(folder, tiny.data_bin, layer=2)


@pytest.mark.parametrize("kind", ["absent", "empty", "text", "other dict", "tensor", "list", "zip", "truncated"])
def test_file_that_is_no_checkpoint_is_named(tiny: TinyData, tmp_path: Path, kind: str) -> None:
    checkpoint = broken_checkpoint(kind, tmp_path / "model.pt")
    if kind == "truncated":
        checkpoint.write_bytes(tiny.model.read_bytes()[:100_000])
    with pytest.raises(FileNotFoundError if kind == "absent" else ValueError) as error:
        FairseqEncoder(checkpoint, tiny.data_bin, layer=2)
    assert str(checkpoint) in str(error.value)
    assert ("does not exist" if kind == "absent" else "checkpoint") in str(error.value)


def test_model_without_an_encoder_is_refused(tiny: TinyData, tmp_path: Path) -> None:
    state = torch.load(tiny.model)
    state["model"] = {name: weight for name, weight in state["model"].items() if "embed_tokens" not in name}
    torch.save(state, tmp_path / "model.pt")
    for asked in (FairseqEncoder.layers_of, FairseqEncoder.usual_tokens_of):
        with pytest.raises(ValueError, match=r"model\.pt does not hold a RoBERTa-like encoder"):
            asked(tmp_path / "model.pt")


def test_checkpoint_of_another_vocabulary_is_refused(tiny: TinyData, tmp_path: Path) -> None:
    data = tiny.copy(tmp_path / "data-bin")
    symbols = (data / "dict.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (data / "dict.txt").write_text("".join(symbols[:-8]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"was trained with \d+ symbols, .*dict\.txt has \d+ \(with <mask>\)"):
        FairseqEncoder(tiny.model, data, layer=2)
    (data / "dict.txt").write_text("".join([symbols[1], symbols[0], *symbols[2:]]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"dict\.txt .*of the auxiliary model.* and .*dict\.txt differ"):
        FairseqEncoder(tiny.model, data, layer=2)


def test_the_fingerprint_is_that_of_weights_and_options(tiny: TinyData, tmp_path: Path) -> None:
    own = FairseqEncoder.fingerprint_of(tiny.model)
    state = torch.load(tiny.model, weights_only=True)
    path = tmp_path / "checkpoint.pt"

    def changed(change: Callable[[Any], object]) -> str:
        state = torch.load(tiny.model, weights_only=True)
        change(state)
        torch.save(state, path)
        return FairseqEncoder.fingerprint_of(path)

    name = next(name for name in state["model"] if name.endswith("layers.0.fc1.weight"))
    assert changed(lambda state: None) == own
    assert changed(lambda state: state["extra_state"].update(previous_training_time=17.0)) == own
    assert changed(lambda state: state["optimizer_history"][-1].update(num_updates=17)) == own
    assert changed(lambda state: setattr(state["cfg"]["model"], "dropout", 0.7)) == own
    assert changed(lambda state: state["model"][name].add_(1e-3)) != own
    assert changed(lambda state: setattr(state["cfg"]["model"], "activation_fn", "relu")) != own
