"""Learn a sparse autoencoder from a corpus, so that a stopped training can be resumed."""

from __future__ import annotations

import json
import pickle
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlsm_plugin.files.atomic_files import write_file
from mlsm_plugin.files.planned_folder import differences
from mlsm_plugin.files.progress import Progress
from mlsm_plugin.hidden_states.devices import has_fast_bf16
from mlsm_plugin.hidden_states.stream import HiddenStateStream
from mlsm_plugin.sparse_coding.sae_training import SaeSettings, SaeTrainer, train_sae
from mlsm_plugin.sparse_coding.sparse_autoencoder import SparseAutoencoder

CHECKPOINT_FILE = "training.pt"
SECONDS_BETWEEN_CHECKPOINTS = 60.0
# parts of a plan that decide only how sums are rounded: a training resumes with other ones
NEUTRAL = ("threads", "batch_tokens")


def learn_sae(
    stream: HiddenStateStream, settings: SaeSettings, *, output: Path, plan: dict[str, Any], overwrite: bool = False
) -> SparseAutoencoder:
    """Train on the device of the stream's encoder; the caller removes the checkpoint when the result is saved.

    The state is saved to ``training.pt`` in ``output`` about once a minute. On one thread, a resumed training ends in
    the same bytes as one that never stopped.

    Args:
        stream: the hidden states.
        settings: what is trained.
        output: folder of the checkpoint.
        plan: everything that decides the result, as values that JSON can hold; a resumed training may have other
            :data:`NEUTRAL` ones.
        overwrite: start anew if the checkpoint was begun with another plan.

    Raises:
        ValueError: the checkpoint is damaged, or was begun with another plan; the sample has too few different rows.
    """
    path = output / CHECKPOINT_FILE
    device = stream.encoder.device
    # a GPU chooses by products in full precision, since those are no bottleneck there
    fast_bf16 = device.type == "cpu" and has_fast_bf16(device)
    state = _checkpoint(path, plan, device, overwrite=overwrite)
    if state is None:
        # more than a buffer where that may have too few different rows
        with Progress(desc="first hidden states"):
            sample = stream.sample(max(stream.buffer_rows, 2 * settings.num_atoms))
        trainer = SaeTrainer.begin(settings, sample, fast_bf16=fast_bf16)
    else:
        try:
            trainer = SaeTrainer.resume(settings, state, fast_bf16=fast_bf16)
        except ValueError as error:
            raise _damaged(path, error) from None
        print(f"resuming after {trainer.updates} of {settings.updates} updates", flush=True)
    saved = time.monotonic()

    def save() -> None:
        nonlocal saved
        if time.monotonic() - saved >= SECONDS_BETWEEN_CHECKPOINTS and trainer.updates < settings.updates:
            content = {"plan": json.dumps(plan), "state": trainer.state()}
            write_file(path, lambda file: torch.save(content, file))
            saved = time.monotonic()

    # closed also after an error or Ctrl-C, so that the thread of the stream ends
    with closing(stream.batches(trainer.updates, settings.updates)) as batches:
        return train_sae(trainer, lambda done: batches, after_update=save)


def _checkpoint(path: Path, plan: dict[str, Any], device: torch.device, *, overwrite: bool) -> dict[str, Tensor] | None:
    """The state in a checkpoint of this plan, or None."""
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        found, state = json.loads(content["plan"]), content["state"]
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError("its state does not consist of tensors")
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        if overwrite:
            return None
        raise _damaged(path, error) from None
    wanted = json.loads(json.dumps(plan))
    if isinstance(found, dict):
        found |= {name: wanted.get(name) for name in NEUTRAL}
    named = differences(found, wanted)
    if named and not overwrite:
        raise ValueError(
            f"{path} belongs to a training that was begun with other settings: {'; '.join(named[:4])}. "
            "Pass --overwrite to start anew, or the settings that it was begun with"
        )
    return None if named else state


def _damaged(path: Path, error: Exception) -> ValueError:
    reason = str(error).split("\n", 1)[0]
    return ValueError(f"{path} is not a checkpoint of this training ({reason}); delete it to start anew")
