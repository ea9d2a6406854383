"""What makes a run portable: its checkpoints know their vocabulary, and the tokenizer lies beside them."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from fairseq import utils

from mlsm_plugin.data.token_blocks import folders_of
from mlsm_plugin.fairseq_seams.checkpoint_states import VOCABULARY
from mlsm_plugin.files.model_files import DICTIONARY_NAME, copy_tokenizer
from mlsm_plugin.tasks.autocast import AutocastSteps
from mlsm_plugin.tasks.shared_options import SavedRunConfig
from mlsm_plugin.tokenization.symbol_files import symbols_fingerprint, symbols_of_dataset


class PortableRuns(AutocastSteps):
    """A mixin for tasks whose checkpoints load from anywhere, and only with the vocabulary that they were trained with.

    The configuration names the data (``data``), the first folder of which has the dictionary.
    """

    cfg: SavedRunConfig

    @property
    def _data_folder(self) -> str:
        return str(utils.split_paths(self.cfg.data)[0])

    @cached_property
    def _vocabulary(self) -> str:
        return symbols_fingerprint(symbols_of_dataset(self._data_folder))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`FairseqTask.load_state_dict`.

        Raises:
            ValueError: the state is that of another vocabulary.
        """
        self._check_vocabulary(state_dict.get(VOCABULARY), "the checkpoint", "pass the dict.txt that lies beside it")
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def check_starts_from(self, checkpoint: Path, saved: dict[str, Any]) -> None:
        """Check that a run may start from a checkpoint, or resume from it.

        Args:
            checkpoint: the file. Where its state lacks the vocabulary, the ``dict.txt`` beside it says which it is.
            saved: the state of its task.

        Raises:
            ValueError: it was trained with another vocabulary.
        """
        recorded = saved.get(VOCABULARY)
        if recorded is None and (checkpoint.parent / DICTIONARY_NAME).is_file():
            recorded = symbols_fingerprint(symbols_of_dataset(checkpoint.parent))
        remedy = "binarize the text with the tokenizer of the checkpoint, or pass another --save-dir to start anew"
        self._check_vocabulary(recorded, str(checkpoint), remedy)

    def _check_vocabulary(self, recorded: str | None, where: str, remedy: str) -> None:
        if recorded not in (None, self._vocabulary):
            raise ValueError(
                f"{where} was trained with another vocabulary (SHA-256 of its symbols {recorded[:12]}) than that of "
                f"{self._data_folder}/{DICTIONARY_NAME} ({self._vocabulary[:12]}): the same ids mean other pieces; "
                f"{remedy}"
            )

    def begin_epoch(self, epoch: int, model: Any) -> None:
        """Record the vocabulary, and copy the tokenizer next to the checkpoints; only the first rank copies.

        Raises:
            ValueError: the folder has checkpoints of another vocabulary, or the folders of the data do not have one.
        """
        super().begin_epoch(epoch, model)  # type: ignore[misc]
        folders_of(self.cfg.data)  # a later one must not stop the run in its epoch
        self.state.merge_state_dict({VOCABULARY: self._vocabulary})  # type: ignore[attr-defined]
        first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if first_rank and not self.cfg.no_save:
            copy_tokenizer(self._data_folder, self.cfg.save_dir)
