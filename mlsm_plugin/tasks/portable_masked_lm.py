"""What the masked-LM tasks of this package share: fresh masks each epoch, checkpoints that load from anywhere."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
import argparse
import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from omegaconf import II

from mlsm_plugin.atomic_files import atomic_open
from mlsm_plugin.data.token_blocks import load_dictionary

logger = logging.getLogger(__name__)

# what hub loading finds beside a checkpoint
PORTABLE_FILES = ("dict.txt", "sentencepiece.bpe.model")


@dataclass
class PortableMaskedLMConfig(MaskedLMConfig):
    """All options of ``masked_lm``, and where the run is saved."""

    save_dir: str = II("checkpoint.save_dir")
    no_save: bool = II("checkpoint.no_save")
    reuse_dataloader: bool = field(
        default=False,
        metadata={
            "help": "keep loader processes from epoch to epoch, as fairseq does otherwise: they know only the first "
            "epoch's number, so that every epoch masks the same tokens"
        },
    )


class PortableMaskedLMTask(MaskedLMTask):
    """``masked_lm`` that puts the dictionary and the tokenizer beside its checkpoints."""

    cfg: PortableMaskedLMConfig

    @classmethod
    def setup_task(cls, cfg: PortableMaskedLMConfig, **kwargs: Any) -> "PortableMaskedLMTask":
        """Load the dictionary only, so that a checkpoint loads where there is no data."""
        dictionary = load_dictionary(utils.split_paths(cfg.data)[0])
        logger.info("dictionary: %d types", len(dictionary))
        return cls(cfg, dictionary)

    @property
    def args(self) -> argparse.Namespace:
        """What fairseq's ``--mask-whole-words`` reads: the tokenizer of the data."""
        model = os.path.join(utils.split_paths(self.cfg.data)[0], "sentencepiece.bpe.model")
        return argparse.Namespace(bpe="sentencepiece", sentencepiece_model=model)

    def begin_epoch(self, epoch: int, model: Any) -> None:
        """Put the dictionary and the tokenizer beside the checkpoints, which then load from anywhere."""
        super().begin_epoch(epoch, model)
        put_beside_checkpoints(self.cfg)


def put_beside_checkpoints(cfg: Any) -> None:
    """Copy what loading needs to the checkpoints of a task with this configuration; the first rank does it."""
    first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if first_rank and not cfg.no_save:
        copy_portable_files(utils.split_paths(cfg.data)[0], cfg.save_dir)


def copy_portable_files(data_bin: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Copy what a checkpoint needs to be loaded without its dataset: dictionary and tokenizer."""
    os.makedirs(directory, exist_ok=True)
    for name in PORTABLE_FILES:
        source = Path(data_bin) / name
        if source.exists():
            with open(source, "rb") as reader, atomic_open(Path(directory) / name) as writer:
                shutil.copyfileobj(reader, writer)
