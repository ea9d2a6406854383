"""Count the words that a run has seen, and keep models at certain numbers of words."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from fairseq.trainer import Trainer
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike, read_json, write_json
from mlsm_plugin.core.files.json_checks import check_json, fields, values, whole
from mlsm_plugin.core.masking.word_boundaries import PieceClasses
from mlsm_plugin.fairseq_plugin.compat.rank_gather import sum_over_ranks
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import save_weights

SEVERAL = 10  # updates, after which the largest number of words is known
KEPT = "words"  # subfolder of --save-dir for the kept models
PLAN = fields({"limit": whole(1), "keep": values(whole(1))})


def write_word_plan(path: PathLike, limit: int, keep: Mapping[str, int]) -> None:
    """Write the file for ``--count-words``: the word limit of a run, and the kept models' names with their words."""
    write_json(path, {"limit": limit, "keep": dict(keep)})


def begins_word(symbols: Iterable[str], special: Iterable[int]) -> Tensor:
    """Whether each symbol of a dictionary begins a word, bool ``(V,)``; ValueError if nothing marks words."""
    return torch.from_numpy(PieceClasses.of_vocabulary(symbols, special).begins_word)


class WordCount:
    """Counts the words of a run: the tokens in its batches that begin a word.

    The rank that trains on a batch counts it; a batch that replaces a missing batch is not counted. An epoch therefore
    has the words of the text for any blocks, ranks and accumulation. Nothing waits for a GPU, since the numbers are
    read after the trainer has read its loss.

    fairseq's logs cannot carry the numbers: on a rank whose last batch is missing, fairseq drops the logs of all
    batches of the update.

    Args:
        plan: file of :func:`write_word_plan`; ValueError if it is damaged.
        begins: :func:`begins_word` of the dictionary.
    """

    def __init__(self, plan: PathLike, begins: Tensor) -> None:
        content = check_json(read_json(plan), PLAN, plan)
        self.limit = content["limit"]
        self.keep = content["keep"]
        self.begins = begins
        self._updates = 0  # of this process
        self._largest = 0
        self._words_of_rank: int | Tensor = 0  # in the present update
        self._update: Tensor | None = None

    def add(self, tokens: Tensor) -> None:
        """Count a batch of this rank; ``tokens`` are the ids ``(B, T)`` before masking."""
        self.begins = self.begins.to(tokens.device)
        self._words_of_rank = self._words_of_rank + self.begins[tokens].sum()

    def end_update(self, words_before: int, device: torch.device) -> None:
        """Sum over the ranks, before the weights change; every rank has to call this.

        ``words_before`` is the number of words before this update.

        ValueError if the update would exceed the limit.
        """
        words_of_rank = torch.as_tensor(self._words_of_rank, dtype=torch.long, device=device)
        self._words_of_rank = 0
        self._update = sum_over_ranks(words_of_rank)
        is_near = self._updates < SEVERAL or words_before + 4 * self._largest > self.limit  # only then wait for it
        self._updates += 1
        if is_near and (now := words_before + int(self._update)) > self.limit:
            raise ValueError(
                f"this update would bring the words that the run has seen to {now:,}, and its limit is "
                f"{self.limit:,}; the last checkpoint is within it"
            )

    def take(self) -> int:
        """The words of the finished update; 0 if there is none."""
        words = 0 if self._update is None else int(self._update)
        self._update = None
        self._largest = max(self._largest, words)
        return words

    def save_reached(self, trainer: Trainer, before: int, now: int) -> None:
        """Keep the weights under each name whose number of words the last update has reached."""
        for name, words in self.keep.items():
            if before < words <= now:
                folder = Path(trainer.cfg.checkpoint.save_dir, KEPT)
                folder.mkdir(parents=True, exist_ok=True)
                save_weights(trainer, folder / f"{name}.pt")
