"""The next command of the pipeline, ready to paste; a command prints it at its end."""

import shlex
from typing import TYPE_CHECKING

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.hidden_states.settings import BlockSettings

if TYPE_CHECKING:
    from mlsm_plugin.core.coding.split_coder import CodingSettings

BLOCKS = BlockSettings(128, "none")  # of plain masked LM: full sequences, without padding


def print_next(purpose: str, command: str) -> None:
    """Print ``command``, introduced by its ``purpose``."""
    print(f"\n{purpose}:\n\n{command}")


def encode_command(data_bin: PathLike, auxiliary: str, dictionary: PathLike, user_dir: str | None = None) -> str:
    """The ``mlsm encode`` command for the arguments of ``mlsm dictionary``."""
    words = ["mlsm", "encode", str(data_bin), "--auxiliary", auxiliary, "--dictionary", str(dictionary)]
    return shlex.join(words + (["--user-dir", user_dir] if user_dir else []))


def masked_lm_command(data_bin: PathLike, save_dir: PathLike) -> str:
    """The ``fairseq-train`` command that trains plain masked LM on a dataset."""
    from mlsm_plugin.fairseq_plugin.pipelines.training_recipe import (
        PLAIN,
        TrainingPlan,
        shell_command,
        tokens_in,
        training_words,
    )

    plan = TrainingPlan(tokens_in(data_bin), BLOCKS, PLAIN)
    return shell_command(training_words(data_bin, save_dir, plan))


def training_command(
    data_bin: PathLike,
    save_dir: PathLike,
    coding: "CodingSettings",
    auxiliary: str,
    user_dir: str | None = None,
    *,
    codes: str | None = None,
) -> str:
    """The ``fairseq-train`` command that trains MLSM and MLM together on a dataset with these codes.

    The model has the size and the weights of the ``auxiliary`` one, if it is an encoder of this package. ``codes`` is
    the folder of the codes, if that is not the dataset.
    """
    from mlsm_plugin.fairseq_plugin.pipelines.training_recipe import (
        TrainingPlan,
        continued,
        shell_command,
        tokens_in,
        training_words,
    )

    model, start = continued(auxiliary, coding.blocks)
    plan = TrainingPlan(
        tokens_in(data_bin), coding.blocks, model=model, start=start, coverage=coding.coverage, codes=codes
    )
    return shell_command(training_words(data_bin, save_dir, plan, user_dir=user_dir))
