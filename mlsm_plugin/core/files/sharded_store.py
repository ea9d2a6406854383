"""The common part of the code store and the phrase datastore: a planned folder of shards, each with several npy files.

Several processes, on several machines that share a disk, may write different shards of a store at the same time, and
any of them may seal it. A shard is whole if the headers of its files agree and each file has the length in its header.
Nothing else is read to check this. A whole shard is never written again.
"""

import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mlsm_plugin.core.files.atomic_files import write_json, write_npy
from mlsm_plugin.core.files.output_lock import in_turn
from mlsm_plugin.core.files.planned_folder import PlannedFolder, shorten
from mlsm_plugin.core.files.process_rank import SINGLE_PROCESS, ProcessRank

logger = logging.getLogger(__name__)


class MissingShardsError(ValueError):
    """A store cannot be sealed yet; if several processes write it, the last of them can."""


def shard_path(directory: Path, index: int, part: str, ending: str = "npy") -> Path:
    """The file of one part of a shard."""
    return directory / f"shard-{index:05d}.{part}.{ending}"


def warn_of_full_disk(directory: Path, needed: float) -> None:
    """Log a warning if the disk has fewer than ``needed`` bytes free."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        logger.warning("%s needs about %.2g GB more, but only %.2g GB are free", directory, needed / 1e9, free / 1e9)


class ShardedStoreWriter(ABC):
    """Writes the shards of a planned folder, in any order, in any number of runs and processes.

    A subclass defines the parts of a shard and when a shard is whole. Nothing is written before :meth:`_write_parts`.
    ValueError if the folder was begun with another plan.
    """

    parts: ClassVar[tuple[str, ...]]
    """npy files of a shard in the order of writing; if the last file exists, the others are complete."""

    def __init__(self, folder: PlannedFolder, num_shards: int) -> None:
        self.folder = folder
        self.num_shards = num_shards
        self.directory = folder.directory
        self._begun = False
        folder.check()

    @property
    def is_sealed(self) -> bool:
        """Whether ``meta.json`` exists; files may have been damaged since it was written."""
        return self.folder.is_sealed

    @property
    def is_complete(self) -> bool:
        """Whether the store is finished with this plan (the constructor fails with another plan)."""
        return self.is_sealed and not self.missing()

    @abstractmethod
    def whole_shard(self, index: int) -> Any:
        """The facts about shard ``index`` that the seal records, or None if its files are not whole."""

    def has_shard(self, index: int) -> bool:
        """Whether the files of shard ``index`` are whole."""
        return self.whole_shard(index) is not None

    def missing(self, process: ProcessRank = SINGLE_PROCESS) -> list[int]:
        """Numbers of the process's shards whose files are missing, truncated or do not fit together."""
        return [index for index in range(self.num_shards) if process.owns(index) and not self.has_shard(index)]

    def _path(self, index: int, part: str) -> Path:
        return shard_path(self.directory, index, part)

    def _begin(self) -> None:
        """Write the plan before the first shard of this process."""
        if not self._begun:
            self.folder.begin()
            self._begun = True

    def _write_parts(
        self, index: int, arrays: Mapping[str, np.ndarray], figures: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Write the files of a shard one by one, unless another process has written the shard meanwhile.

        ``figures`` become JSON files, written before the arrays. If a file cannot be written, the shard still counts as
        missing. ValueError if another process began the store with another plan.
        """
        self._begin()
        with in_turn(self.directory):  # no file may vanish while another process seals or reads the store
            if self.has_shard(index):
                return
            # Remove the seal first: a store must not look complete while a shard is replaced.
            self.folder.unseal()
            self._path(index, self.parts[-1]).unlink(missing_ok=True)
            for part, values in (figures or {}).items():
                write_json(shard_path(self.directory, index, part, "json"), values)
            for part in self.parts:
                write_npy(self._path(index, part), arrays[part])

    def _whole_shards(self) -> list[Any]:
        """The result of :meth:`whole_shard` for every shard; MissingShardsError names the missing shards."""
        whole = [self.whole_shard(index) for index in range(self.num_shards)]
        missing = [index for index, shard in enumerate(whole) if shard is None]
        if missing:
            raise MissingShardsError(
                f"{self.directory} lacks {len(missing)} of {self.num_shards} shards ({shorten(missing)}); "
                "write them before finishing the store"
            )
        return whole
