"""Masked latent semantic modeling (Berend, ACL Findings 2023) as a fairseq task."""

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
from fairseq.tasks import register_task
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from omegaconf import II

from mlsm_plugin import compat
from mlsm_plugin.atomic_files import atomic_open
from mlsm_plugin.data.masked_codes_dataset import MaskedCodesDataset
from mlsm_plugin.data.token_blocks import (
    combined_splits,
    load_dictionary,
    load_split,
    split_fingerprint,
    training_samples,
)
from mlsm_plugin.data.token_positions_dataset import NO_POSITION, TokenPositionsDataset
from mlsm_plugin.sparse_coding.code_store import CodeStore

logger = logging.getLogger(__name__)

# what hub loading finds beside a checkpoint
PORTABLE_FILES = ("dict.txt", "sentencepiece.bpe.model")


@dataclass
class MaskedLatentSemanticConfig(MaskedLMConfig):
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


@register_task("masked_latent_semantic", dataclass=MaskedLatentSemanticConfig)
class MaskedLatentSemanticTask(MaskedLMTask):
    """Masked LM whose batches also carry the sparse codes of the masked tokens.

    A batch is that of ``masked_lm`` plus ``codes``: ``atoms`` (n_masked, m) and ``weights``
    (n_masked, m), see :class:`MaskedCodesDataset`. The codes are read from
    ``DATA/<split>.codes``, written by ``mlsm encode``.
    """

    cfg: MaskedLatentSemanticConfig

    def __init__(self, cfg: MaskedLatentSemanticConfig, dictionary: Any) -> None:
        super().__init__(cfg, dictionary)
        self._checked_codes: set[str] = set()
        self._codes_over: tuple[str, str] | None = None  # a split, and the dictionary of its codes

    @classmethod
    def setup_task(cls, cfg: MaskedLatentSemanticConfig, **kwargs: Any) -> "MaskedLatentSemanticTask":
        """Load the dictionary only, so that a checkpoint loads where there are no codes."""
        dictionary = load_dictionary(utils.split_paths(cfg.data)[0])
        logger.info("dictionary: %d types", len(dictionary))
        return cls(cfg, dictionary)

    @property
    def args(self) -> argparse.Namespace:
        """What fairseq's ``--mask-whole-words`` reads: the tokenizer of the data."""
        model = os.path.join(utils.split_paths(self.cfg.data)[0], "sentencepiece.bpe.model")
        return argparse.Namespace(bpe="sentencepiece", sentencepiece_model=model)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the model, with an atom logit for each atom of the codes unless ``cfg`` says how many."""
        if getattr(cfg, "num_atoms", None) is None:
            with compat.open_config(cfg):
                cfg.num_atoms = self._num_atoms()
        return super().build_model(cfg, from_checkpoint)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """The samples, masks and order of ``masked_lm``, plus the codes of the masked tokens."""
        paths = utils.split_paths(self.cfg.data)
        split_path = os.path.join(paths[(epoch - 1) % len(paths)], split)
        tokens = load_split(split_path, self.source_dictionary, combine=combine)
        store = self._open_codes(combined_splits(split_path) if combine else [split_path])

        super().load_dataset(split, epoch=epoch, combine=combine, **kwargs)
        batches = self.datasets[split].dataset  # a NestedDictionaryDataset inside a SortDataset
        positions = training_samples(
            TokenPositionsDataset(tokens.sizes),  # `tokens` is still alive: its sizes are a memory map
            split=split,
            cfg=self.cfg,
            dictionary=self.source_dictionary,
            bos=NO_POSITION,
        )
        targets = batches.defn["target"].dataset  # without its right padding
        batches.defn["codes"] = MaskedCodesDataset(positions, targets, store, self.source_dictionary.pad())

    def _open_codes(self, splits: list[str]) -> CodeStore:
        for split in splits:
            if split not in self._checked_codes:
                store = CodeStore(f"{split}.codes")
                check_codes_belong_to(split, store)
                self._check_same_dictionary(split, store)
                self._checked_codes.add(split)
        return CodeStore([f"{split}.codes" for split in splits])

    def _check_same_dictionary(self, split: str, store: CodeStore) -> None:
        found = store.meta["fingerprints"]["dictionary"]
        first_split, expected = self._codes_over = self._codes_over or (split, found)
        if found != expected:
            raise ValueError(
                f"{first_split}.codes and {split}.codes are codes over different dictionaries (SHA-256 "
                f"{expected[:12]} and {found[:12]}); encode both with the same one"
            )

    def _num_atoms(self) -> int:
        for split in ("train", "valid"):
            directory = os.path.join(utils.split_paths(self.cfg.data)[0], f"{split}.codes")
            if os.path.isdir(directory):
                return CodeStore(directory).num_atoms
        raise FileNotFoundError(f"{self.cfg.data} has no codes; write them with `mlsm encode`")

    def begin_epoch(self, epoch: int, model: Any) -> None:
        """Put the dictionary and the tokenizer beside the checkpoints, which then load from anywhere."""
        super().begin_epoch(epoch, model)
        first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if self.cfg.no_save or not first_rank:
            return
        copy_portable_files(utils.split_paths(self.cfg.data)[0], self.cfg.save_dir)


def copy_portable_files(data_bin: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Copy what a checkpoint needs to be loaded without its dataset: dictionary and tokenizer."""
    os.makedirs(directory, exist_ok=True)
    for name in PORTABLE_FILES:
        source = Path(data_bin) / name
        if source.exists():
            with open(source, "rb") as reader, atomic_open(Path(directory) / name) as writer:
                shutil.copyfileobj(reader, writer)


def check_codes_belong_to(split: str, store: CodeStore) -> None:
    """Raise ValueError unless ``store`` was made from the binarized split at ``split``."""
    expected = store.meta["fingerprints"]["split"]
    found = split_fingerprint(split)
    if found != expected:
        raise ValueError(
            f"the codes in {split}.codes were made from another dataset (SHA-256 {expected[:12]}) than "
            f"{split}.bin ({found[:12]}); run `mlsm encode` again"
        )
