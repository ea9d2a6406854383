"""The one recipe of a training command: what commands print, the demo runs, and README and tutorial show."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq.data import data_utils

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.fairseq_plugin.compat.binarized_files import flat_tokens
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import architecture_options, names_in, read_contents
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import configuration_of
from mlsm_plugin.fairseq_plugin.compat.version_shims import PACKAGE_DIR
from mlsm_plugin.fairseq_plugin.data.token_blocks import folders_of, load_dictionary
from mlsm_plugin.fairseq_plugin.pipelines.pretraining import (
    DEFAULT_ARCHITECTURE,
    MASKS,
    SIZES,
    as_flags,
    block_flags,
    default_flags,
    separate_words,
)

PLAIN = ("--task", "plain_masked_lm", "--criterion", "masked_lm")
WITH_TOKENS = ("--task", "masked_latent_semantic", "--criterion", "latent_semantic_kl", "--mlm-weight", "1")
# A text of fewer tokens is learned by a small model, in many small updates, in minutes.
SHORT_TEXT = 10_000_000
SMALL_MODEL = ("--encoder-embed-dim", "256")
TOKENS_OF_AN_UPDATE = 1024
LOG_INTERVAL = 10
FEWEST_UPDATES = 300
MOST_UPDATES = 100_000
PASSES = 2  # over the text, of a model that begins with random weights; one that continues makes one pass
SAME_AS_DEFAULT = {"--seed", "--initialization", "--mask-updates"}  # of the flags of `mlsm auxiliary`
COLUMNS = 116


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained, and on how much."""

    tokens: int  # of the training split
    blocks: BlockSettings
    objective: tuple[str, ...] = WITH_TOKENS  # flags of the task and the criterion
    model: tuple[str, ...] = ()  # flags of the architecture; empty: the default one, small for a short text
    start: str | None = None  # the checkpoint with whose weights it begins
    coverage: float = 1.0  # share of the tokens that have codes
    codes: str | None = None  # the folder of the codes, if that is not the dataset
    updates: int | None = None  # None: by the number of tokens

    @property
    def is_short(self) -> bool:
        """Whether the text is a short one."""
        return self.tokens < SHORT_TEXT


def continued(auxiliary: str, blocks: BlockSettings) -> tuple[tuple[str, ...], str | None]:
    """The flags of the architecture of an auxiliary model, and its checkpoint, if a training can begin with it.

    That is an encoder of this package that learned plain masked LM. Of any other: no flags, and None.
    """
    if not Path(auxiliary).is_file():
        return (), None
    contents = read_contents(auxiliary)
    names = names_in(contents)
    architecture = str(names["model"])
    if not architecture.startswith("mlsm_") or names["task"] != "plain_masked_lm":
        return (), None
    trained = architecture_options(contents)
    flags = ["--arch", architecture]
    for name in SIZES:
        usual = configuration_of(["DATA_BIN", *PLAIN, *block_flags(blocks), *flags]).model
        value = trained.get(name)
        if value is not None and value != getattr(usual, name, value):
            flags += as_flags({name: value})
    return tuple(flags), auxiliary


def tokens_in(data_bin: PathLike) -> int:
    """The number of tokens of the training split of a dataset, or of the first of several."""
    folder = folders_of(data_bin)[0]
    return len(flat_tokens(data_utils.load_indexed_dataset(f"{folder}/train", load_dictionary(folder))))


def training_words(
    data_bin: PathLike, save_dir: PathLike, plan: TrainingPlan, *, user_dir: str | None = None
) -> list[str]:
    """The words of a complete ``fairseq-train`` command that ends by itself.

    Its settings are those of ``mlsm auxiliary`` (:func:`.default_flags`), its length follows from the text: two
    passes, or one if it continues a model.
    """
    chosen = list(plan.objective)
    chosen += plan.model or ["--arch", DEFAULT_ARCHITECTURE, *(SMALL_MODEL if plan.is_short else ())]
    if plan.start is not None:
        chosen += ["--finetune-from-model", plan.start]
    if plan.codes is not None:
        chosen += ["--latent-codes", plan.codes]
    chosen += block_flags(plan.blocks)
    if plan.is_short:
        batch = max(2, TOKENS_OF_AN_UPDATE // plan.blocks.tokens_per_sample)
        chosen += ["--batch-size", str(batch), "--log-interval", str(LOG_INTERVAL)]
    if plan.coverage < MASKS["mask_prob"]:  # no more is masked than has codes
        share = f"{min(plan.coverage, MASKS['mask_prob_end']):g}"
        chosen += ["--mask-prob", share]
    updates = plan.updates or _updates(plan, chosen)
    defaults = default_flags(updates, _value(chosen, "--arch"), _without_task(chosen))
    flags = _merged(defaults, chosen)
    words = ["fairseq-train", str(data_bin), "--user-dir", user_dir or PACKAGE_DIR, *flags]
    return [*words, "--max-update", str(updates), "--save-dir", str(save_dir)]


def shell_command(words: Sequence[str]) -> str:
    """A command as a shell reads it, in lines of at most 116 characters that end between two options."""
    options: list[str] = []
    for word in map(shlex.quote, words):
        if options and not word.startswith("--") and (options[-1].startswith("--") or len(options) == 1):
            options[-1] += f" {word}"
        else:
            options.append(word)
    lines = [options[0]]
    for option in options[1:]:
        if len(lines[-1]) + len(option) + 3 > COLUMNS:
            lines.append(f"    {option}")
        else:
            lines[-1] += f" {option}"
    return " \\\n".join(lines)


def _updates(plan: TrainingPlan, flags: Sequence[str]) -> int:
    """The number of updates of a training, in whole hundreds."""
    batch = int(_value([*flags, "--batch-size", "32"], "--batch-size"))
    passes = PASSES if plan.start is None else 1
    updates = passes * plan.tokens / (batch * plan.blocks.tokens_per_sample)
    return min(MOST_UPDATES, max(FEWEST_UPDATES, 100 * math.floor(updates / 100)))


def _value(flags: Sequence[str], flag: str) -> str:
    return flags[flags.index(flag) + 1]


def _without_task(flags: list[str]) -> list[str]:
    """The flags without that of the task, which masks as the recipe says."""
    where = flags.index("--task")
    return flags[:where] + flags[where + 2 :]


def _merged(defaults: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """The chosen flags, and the default flags that they do not replace."""
    replaced = {word for word in chosen if word.startswith("--")} | SAME_AS_DEFAULT
    kept = []
    for words in _options(separate_words(defaults)):
        if words[0] not in replaced:
            kept += words
    return [*chosen, *kept]


def _options(words: Sequence[str]) -> list[list[str]]:
    """The words of each flag."""
    options: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            options.append([word])
        else:
            options[-1].append(word)
    return options
