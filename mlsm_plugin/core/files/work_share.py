"""The share of the work of this process, from the command line, torchrun or SLURM; processes do not communicate."""

from collections.abc import Mapping
from dataclasses import dataclass

# with the number of this process, the number of processes, and the number of this process on its machine
VARIABLES = (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))


@dataclass(frozen=True)
class WorkShare:
    """Every ``count``-th piece of work, beginning with piece ``index``."""

    index: int = 0  # number of this process
    count: int = 1  # number of processes that share the work
    local_index: int | None = None  # number of this process on its machine, None if unknown

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"--num-processes must be at least 1, got {self.count}")
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"--process-index must be one of 0 to {self.count - 1} with --num-processes {self.count}, got "
                f"{self.index}"
            )

    def owns(self, piece: int) -> bool:
        """Whether the piece with this number belongs to this process."""
        return piece % self.count == self.index

    def device(self, num_gpus: int) -> str | None:
        """The GPU of this process if its machine has several, else None (no preference)."""
        return None if self.local_index is None or num_gpus < 2 else f"cuda:{self.local_index % num_gpus}"


ALL_OF_IT = WorkShare()


def work_share(process_index: int | None, num_processes: int | None, environment: Mapping[str, str]) -> WorkShare:
    """The share of this process, from the two options, or else from its environment; with neither, it does everything.

    torchrun's variables come before srun's, each only if there are several processes. ValueError if only one of the two
    options is given, the number is out of range, or a variable is not a number.
    """
    if (process_index is None) != (num_processes is None):
        raise ValueError("--process-index and --num-processes belong together: process I of N has both")
    local_index = None
    for name, count_name, local_name in VARIABLES:
        if environment.get(name) and environment.get(count_name) and _number(environment, count_name) > 1:
            local_index = _number(environment, local_name) if environment.get(local_name) else None
            if process_index is None:
                return WorkShare(_number(environment, name), _number(environment, count_name), local_index)
            break
    if process_index is not None and num_processes is not None:
        return WorkShare(process_index, num_processes, local_index)
    return WorkShare()


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ValueError(f"the environment variable {name} must be a number, got {environment[name]!r}") from None
