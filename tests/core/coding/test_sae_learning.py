"""The checkpoints of a training: when they are read, refused and passed over. tests/cli runs whole trainings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mlsm_plugin.core.coding import coder_learning
from mlsm_plugin.core.coding.coder_learning import CHECKPOINT_FILE, learn_sae
from mlsm_plugin.core.hidden_states.stream import HiddenStateStream
from mlsm_plugin.core.sparse_coding.sae_training import SaeSettings
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings
from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import FairseqEncoder
from tests.tiny_models import TinyData

SETTINGS = SaeSettings(num_atoms=24, k=4, updates=6)


@pytest.fixture(scope="module")
def stream(tiny: TinyData) -> HiddenStateStream:
    reader = BlockReader(tiny.data_bin, "train", BlockSettings(24))
    encoder = FairseqEncoder(tiny.model, tiny.data_bin, layer=1, device="cpu")
    return HiddenStateStream(reader, encoder, batch_size=50, max_batch_tokens=4000, buffer_rows=500)


@pytest.fixture
def begun(stream: HiddenStateStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the checkpoint of the last update but one."""
    monkeypatch.setattr(coder_learning, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    learn_sae(stream, SETTINGS, output=tmp_path, plan={"seed": 1})
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT_FILE]
    return tmp_path


def test_checkpoint_of_the_plan_is_resumed(
    stream: HiddenStateStream, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learn_sae(stream, SETTINGS, output=begun, plan={"seed": 1})
    learn_sae(stream, SETTINGS, output=begun, plan={"seed": 1}, overwrite=True)
    assert capsys.readouterr().out.count("resuming after 5 of 6 updates") == 2


def test_checkpoint_is_resumed_with_other_threads_and_batches(
    stream: HiddenStateStream, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learn_sae(stream, SETTINGS, output=begun, plan={"seed": 1, "threads": 2, "batch_tokens": 4096})
    learn_sae(stream, SETTINGS, output=begun, plan={"seed": 1, "batch_tokens": 512})
    assert capsys.readouterr().out.count("resuming after 5 of 6 updates") == 2


def test_more_latents_than_half_a_buffer_begin_with_a_larger_sample(
    stream: HiddenStateStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def sample(most: int) -> torch.Tensor:
        sizes.append(most)
        return HiddenStateStream.sample(stream, most)

    monkeypatch.setattr(stream, "sample", sample)
    for atoms in (24, 250, 700):
        settings = SaeSettings(num_atoms=atoms, k=4, updates=1)
        assert learn_sae(stream, settings, output=tmp_path, plan={}).num_atoms == atoms
    assert sizes == [500, 500, 1400]


def test_checkpoint_of_another_plan_is_refused(
    stream: HiddenStateStream, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"seed is 1 there and 2 now.*--overwrite"):
        learn_sae(stream, SETTINGS, output=begun, plan={"seed": 2})
    learn_sae(stream, SETTINGS, output=begun, plan={"seed": 2}, overwrite=True)
    assert "resuming" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        b"no checkpoint",
        {"plan": "{", "state": {}},
        {"plan": json.dumps({"seed": 1}), "state": {"encoder": 3}},
        {"plan": json.dumps({"seed": 1}), "state": {"encoder": torch.zeros(2)}},
        {"state": {}},
        [],
    ],
)
def test_damaged_checkpoint_is_one_line(stream: HiddenStateStream, content: object, tmp_path: Path) -> None:
    path = tmp_path / CHECKPOINT_FILE
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=r"is not a checkpoint of this training .*delete it") as caught:
        learn_sae(stream, SETTINGS, output=tmp_path, plan={"seed": 1})
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
