"""``mlsm encode`` and ``mlsm search index`` as steps of datatrove, for one machine, Slurm or Ray.

Importing this module needs datatrove: ``pip install 'mlsm_plugin[datatrove]'``.
"""

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from datatrove.pipeline.base import PipelineStep

from mlsm_plugin.cli.main import run_command

if TYPE_CHECKING:
    from datatrove.data import Document

CHOSEN_HERE = ("--process-index", "--num-processes")


class CommandInTasks(PipelineStep):
    """Runs an ``mlsm`` command in as many tasks as the executor has; task I of N does every N-th piece of the work.

    A task that fails or is killed is repeated by the executor, and does only what is missing. The last task completes
    the folder, whose bytes do not depend on the number of tasks. Documents of earlier steps are handed on.

    Args:
        words: the arguments of the command, without ``--process-index`` and ``--num-processes``. ``--threads`` is the
            number of cores of a task.

    Raises:
        ValueError: the words hold an option that the executor decides.
    """

    command: tuple[str, ...]

    def __init__(self, *words: str) -> None:
        super().__init__()
        for option in CHOSEN_HERE:
            if any(word.split("=")[0] == option for word in words):
                raise ValueError(f"{option} is decided by the executor; leave it out")
        self.words = words

    def run(self, data: "Iterator[Document] | None" = None, rank: int = 0, world_size: int = 1) -> "Iterator[Document]":
        """Do the share of a task; the log of the task gets the error of the command.

        ValueError, OSError or ImportError if the command fails, ValueError if it does not take the words, RuntimeError
        if its status is not 0.
        """
        yield from data or ()
        share = ["--process-index", str(rank), "--num-processes", str(world_size)]
        shown = shlex.join(["mlsm", *self.command, *self.words])
        with self.track_time():
            try:
                status = run_command([*self.command, *self.words, *share])
            except SystemExit:  # it would end the process of the task, for which datatrove would wait forever
                raise ValueError(f"`{shown}` is wrong usage; the output of the process says why") from None
        if status != 0:
            raise RuntimeError(f"`{shown}` ended with status {status} in task {rank} of {world_size}")


class EncodeCorpus(CommandInTasks):
    """``mlsm encode``: the codes of a corpus, by shards of ``--shard-tokens``."""

    name = "mlsm encode"
    type = "sparse codes"
    command = ("encode",)


class IndexDocuments(CommandInTasks):
    """``mlsm search index``: an index of documents, by batches of ``--shard-documents``.

    Every task reads all files, and the last one merges the batches.
    """

    name = "mlsm search index"
    type = "search index"
    command = ("search", "index")
