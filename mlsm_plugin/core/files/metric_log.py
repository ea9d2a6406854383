"""Log the figures of a training to TensorBoard and Weights & Biases, as ``fairseq-train`` does."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from mlsm_plugin.core.files.settings import option

Sink = Callable[[Mapping[str, float], int], None]  # takes figures by name, and the number of the update


@dataclass(frozen=True)
class MetricLog:
    """Where figures are logged; by default nowhere."""

    tensorboard_logdir: str | None = option(None, metavar="DIR", help="SAE: folder of a log for TensorBoard")
    wandb_project: str | None = option(None, metavar="NAME", help="SAE: project of Weights & Biases to log to")

    @contextmanager
    def opened(self) -> Iterator[Sink]:
        """Yield a function that logs the figures of an update; ValueError if a package is missing."""
        sinks: list[Sink] = []
        with ExitStack() as stack:
            if self.tensorboard_logdir is not None:
                board = stack.enter_context(_package("tensorboardX").SummaryWriter(self.tensorboard_logdir))

                def add(figures: Mapping[str, float], update: int) -> None:
                    for name, value in figures.items():
                        board.add_scalar(name, value, update)

                sinks.append(add)
            if self.wandb_project is not None:
                run = stack.enter_context(_package("wandb").init(project=self.wandb_project))
                sinks.append(lambda figures, update: run.log(dict(figures), step=update))

            def write(figures: Mapping[str, float], update: int) -> None:
                for sink in sinks:
                    sink(figures, update)

            yield write


def _package(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise ValueError(f"this log needs the package {name}: pip install {name}") from None
