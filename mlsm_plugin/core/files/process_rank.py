"""Rank and world size of this process, from the command line, torchrun or SLURM; processes do not communicate."""

from collections.abc import Mapping
from dataclasses import dataclass

# variables with the number of this process, the number of processes, and the number of this process on its machine
VARIABLES = (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))


@dataclass(frozen=True)
class ProcessRank:
    """Rank and world size; the process does every ``world_size``-th piece of work, beginning with ``rank``."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None  # number of this process on its machine, None if unknown

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"--num-processes must be at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"--process-index must be one of 0 to {self.world_size - 1} with --num-processes {self.world_size}, "
                f"got {self.rank}"
            )

    def owns(self, piece: int) -> bool:
        """Whether the piece with this number belongs to this process."""
        return piece % self.world_size == self.rank

    def device(self, num_gpus: int) -> str | None:
        """The GPU of this process if its machine has several, else None (no preference)."""
        return None if self.local_rank is None or num_gpus < 2 else f"cuda:{self.local_rank % num_gpus}"


SINGLE_PROCESS = ProcessRank()


def process_rank(process_index: int | None, num_processes: int | None, environment: Mapping[str, str]) -> ProcessRank:
    """Rank and world size from the two options, or else from the environment, or else of a single process.

    torchrun's variables take precedence over srun's; both count only if there are several processes. ValueError if only
    one of the two options is passed, the number is out of range, or a variable is not a number.
    """
    if (process_index is None) != (num_processes is None):
        raise ValueError("--process-index and --num-processes belong together: process I of N has both")
    local_rank = None
    for name, count_name, local_name in VARIABLES:
        if environment.get(name) and environment.get(count_name) and _number(environment, count_name) > 1:
            local_rank = _number(environment, local_name) if environment.get(local_name) else None
            if process_index is None:
                return ProcessRank(_number(environment, name), _number(environment, count_name), local_rank)
            break
    if process_index is not None and num_processes is not None:
        return ProcessRank(process_index, num_processes, local_rank)
    return ProcessRank()


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ValueError(f"the environment variable {name} must be a number, got {environment[name]!r}") from None
