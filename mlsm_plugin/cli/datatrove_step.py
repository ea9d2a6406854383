"""``mlsm encode`` as a step of datatrove, whose executors run it on one machine, under Slurm or on Ray.

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


class EncodeCorpus(PipelineStep):
    """Codes a corpus in as many tasks as the executor has; task I of N codes the shards I, I + N, I + 2N, ...

    A task that fails or is killed is repeated by the executor, and codes only what is missing. The last task completes
    the store, whose bytes do not depend on the number of tasks. Documents of earlier steps are handed on.

    Args:
        words: the arguments of ``mlsm encode``, without ``--process-index`` and ``--num-processes``. ``--threads`` is
            the number of cores of a task.

    Raises:
        ValueError: the words hold an option that the executor decides.
    """

    name = "mlsm encode"
    type = "sparse codes"

    def __init__(self, *words: str) -> None:
        super().__init__()
        for option in CHOSEN_HERE:
            if any(word.split("=")[0] == option for word in words):
                raise ValueError(f"{option} is decided by the executor; leave it out")
        self.words = words

    def run(self, data: "Iterator[Document] | None" = None, rank: int = 0, world_size: int = 1) -> "Iterator[Document]":
        """Code the shards of a task; the log of the task gets the error of ``mlsm encode``.

        ValueError, OSError or ImportError if ``mlsm encode`` fails, ValueError if it does not take the words,
        RuntimeError if its status is not 0.
        """
        yield from data or ()
        share = ["--process-index", str(rank), "--num-processes", str(world_size)]
        with self.track_time():
            try:
                status = run_command(["encode", *self.words, *share])
            except SystemExit:  # it would end the process of the task, for which datatrove would wait forever
                words = shlex.join(self.words)
                raise ValueError(f"`mlsm encode {words}` is wrong usage; the output of the process says why") from None
        if status != 0:
            raise RuntimeError(f"mlsm encode ended with status {status} in task {rank} of {world_size}")
