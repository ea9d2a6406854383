"""Let a run that was killed, or ran out of disk space, end like one that never stopped after it is started again.

fairseq alone copies checkpoints in place, trains a finished run for one more update, and forgets how long the
validation has not improved.
"""

import functools
import hashlib
import logging
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from fairseq import checkpoint_utils, utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass.configs import CheckpointConfig, FairseqConfig
from fairseq.file_io import PathManager
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from torch import distributed

from mlsm_plugin.core.files.atomic_files import link_file, sampled_sha256
from mlsm_plugin.core.files.output_lock import hold_lock
from mlsm_plugin.core.text.vocabulary_record import check_vocabulary_record, vocabulary_record
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import CheckpointState, read_contents
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import save_whole
from mlsm_plugin.fairseq_plugin.compat.version_shims import open_config

logger = logging.getLogger(__name__)

LAST = "checkpoint_last.pt"  # fairseq's default of --restore-file
# keys in the extra_state of a checkpoint
PATIENCE_STATE = "patience"
TRAIN_SPLIT = "train_split"
ANOTHER_FOLDER = "make the data with the files beside the checkpoint, or pass another --save-dir to start anew"
# options that decide which samples are in a batch, by the group of their configuration
BATCHES = {
    "common": ("seed",),
    "dataset": ("batch_size", "max_tokens", "required_batch_size_multiple", "grouped_shuffling"),
    "task": (
        "tokens_per_sample",
        "sample_break_mode",
        "shorten_method",
        # of NPM
        "group_size",
        "group_by",
        # of span denoising
        "noise_density",
        "mean_span_length",
        "sentinels",
        "closing_sentinel",
        "rotate",
    ),
}
COUNTERS = ("best", "num_runs")  # attributes of fairseq's function should_stop_early


def apply() -> None:
    """Replace fairseq's functions that save a checkpoint, and that load it before training (idempotent)."""
    if getattr(checkpoint_utils.load_checkpoint, "resumes", False):
        return
    checkpoint_utils.torch_persistent_save = _saving_whole(checkpoint_utils.torch_persistent_save)
    PathManager.copy = staticmethod(_linking(PathManager.copy))
    Trainer.save_checkpoint = _with_train_split(_with_patience(Trainer.save_checkpoint))
    checkpoint_utils.load_checkpoint = _resuming(checkpoint_utils.load_checkpoint)


def newest_whole(folder: Path) -> tuple[Path, int] | None:
    """The readable checkpoint in a folder with the most updates, and its number of updates; None if there is none."""
    readable = []
    for path in sorted(folder.glob("checkpoint*.pt")):
        with suppress(OSError, ValueError):
            history = read_contents(path).get("optimizer_history") or [{}]
            readable.append((int(history[-1].get("num_updates", 0)), path.stat().st_mtime, path))
    if not readable:
        return None
    updates, _, path = max(readable)
    return path, updates


def repair_last(last: Path) -> None:
    """Replace a damaged last checkpoint by the newest whole checkpoint beside it, and keep it under another name.

    ValueError if there is no whole checkpoint.
    """
    if not last.is_file():
        return
    try:
        read_contents(last)
        return
    except ValueError as error:
        whole = newest_whole(last.parent)
        if whole is None:
            raise ValueError(f"{error}, and {last.parent} has no other one; delete it to start anew") from None
        damaged = last.with_name(f"{last.name}.damaged")
        link_file(last, damaged)
        link_file(whole[0], last)
        logger.warning("%s is damaged, it is now %s; resuming from %s, update %d", last, damaged.name, *whole)


def save_weights(trainer: Trainer, path: Path) -> None:
    """Save a checkpoint without the optimizer state, on the first rank; it can be loaded, but not resumed.

    OSError if it cannot be written.
    """
    cfg = trainer.cfg.checkpoint
    setting_before = cfg.no_save_optimizer_state
    with open_config(cfg):
        cfg.no_save_optimizer_state = True
    try:
        trainer.save_checkpoint(str(path), {"train_iterator": {"epoch": 1}})
    finally:
        with open_config(cfg):
            cfg.no_save_optimizer_state = setting_before


def _saving_whole(original: Callable[..., None]) -> Callable[..., None]:
    """Save under another name, then rename."""

    @functools.wraps(original)
    def torch_persistent_save(obj: CheckpointState, filename: str, async_write: bool = False) -> None:
        if async_write or PathManager.path_requires_pathmanager(filename):
            original(obj, filename, async_write=async_write)
            return
        try:
            save_whole(obj, filename)
        except OSError as error:
            raise OSError(
                f"{error}; the checkpoints before it are whole: make room, and run the same command again to resume"
            ) from error

    return torch_persistent_save


def _linking(original: Callable[..., bool | None]) -> Callable[..., bool | None]:
    """Copy a checkpoint by a hard link."""

    @functools.wraps(original)
    def copy(src_path: str, dst_path: str, overwrite: bool = False) -> bool | None:
        if any(PathManager.path_requires_pathmanager(path) for path in (src_path, dst_path)):
            return original(src_path, dst_path, overwrite=overwrite)
        link_file(src_path, dst_path)
        return True

    return copy


def _with_patience(original: Callable[..., str | None]) -> Callable[..., str | None]:
    """Save the number of validations without a better result."""

    @functools.wraps(original)
    def save_checkpoint(self: Trainer, filename: str, extra_state: CheckpointState) -> str | None:
        for function in _functions_that_stop_early():
            if hasattr(function, COUNTERS[0]):
                counted = {name: getattr(function, name) for name in COUNTERS}
                extra_state = {**extra_state, PATIENCE_STATE: counted}
        return original(self, filename, extra_state)

    return save_checkpoint


SaveCheckpoint = Callable[[Trainer, str, dict[str, object]], object]


def _with_train_split(original: SaveCheckpoint) -> SaveCheckpoint:
    """Save the fingerprint of the training text, since a saved place only has a meaning in the same text."""

    @functools.wraps(original)
    def save_checkpoint(self: Trainer, filename: str, extra_state: dict[str, object]) -> object:
        return original(self, filename, {**extra_state, TRAIN_SPLIT: split_fingerprint(self.cfg)})

    return save_checkpoint


def split_fingerprint(cfg: FairseqConfig) -> str | None:
    """SHA-256 of the training split's files in all folders of a configuration; None if it has none."""
    data = getattr(cfg.task, "data", None)
    subset = getattr(cfg.dataset, "train_subset", None)
    if not isinstance(data, str) or not subset:
        return None
    folders = [Path(folder) for folder in utils.split_paths(data)]
    patterns = (f"{subset}*.bin", f"{subset}*.idx")
    files = [file for folder in folders for pattern in patterns for file in sorted(folder.glob(pattern))]
    hashes = [_file_fingerprint(file, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256("".join(hashes).encode()).hexdigest() if hashes else None


@functools.cache
def _file_fingerprint(file: Path, _time: int) -> str:
    return sampled_sha256(file)


LoadCheckpoint = Callable[..., tuple[CheckpointState | None, EpochBatchIterator]]


def _resuming(original: LoadCheckpoint) -> LoadCheckpoint:
    """Load the newest whole checkpoint; a finished run is not trained.

    A task may have three methods. ``check_starts_from`` gets the checkpoint whose weights are loaded and the state of
    its task; it may raise ValueError. (For fairseq's tasks, the vocabulary is checked and recorded instead.)
    ``check_resumes`` gets that state if the run continues, after the data are loaded; it may raise ValueError. Then
    ``begin_run`` gets the trainer, and that state if the run continues, since fairseq does not restore it.
    """

    @functools.wraps(original)
    def load_checkpoint(
        cfg: CheckpointConfig, trainer: Trainer, **passthrough_args: object
    ) -> tuple[CheckpointState | None, EpochBatchIterator]:
        if trainer.is_data_parallel_master and not cfg.no_save:
            hold_lock(cfg.save_dir)
        last = Path(cfg.save_dir, f"checkpoint_last{trainer.checkpoint_suffix or ''}.pt")
        if cfg.restore_file == LAST and trainer.is_data_parallel_master and last.is_file():
            repair_last(last)
        if distributed.is_available() and distributed.is_initialized():
            distributed.barrier()  # the other ranks read what was repaired
        resumes = cfg.restore_file == LAST and last.is_file()  # not a checkpoint of another run
        start = last if cfg.restore_file == LAST else Path(cfg.restore_file)
        if cfg.restore_file == LAST and not resumes:
            start = Path(getattr(cfg, "continue_once", None) or cfg.finetune_from_model or last)
        contents = read_contents(start) if start.is_file() else {}
        saved = contents.get("task_state") or {}
        if start.is_file() and hasattr(trainer.task, "check_starts_from"):
            trainer.task.check_starts_from(start, saved)
        data_folder = None if hasattr(trainer.task, "check_starts_from") else _data_folder(trainer.task)
        if data_folder is not None:
            check_vocabulary_record(saved, data_folder, str(start), ANOTHER_FOLDER)
        if resumes and not cfg.reset_dataloader:
            check_same_batches(contents, trainer.cfg)
        extra_state, epoch_itr = original(cfg, trainer, **passthrough_args)
        if data_folder is not None:
            trainer.task.state.merge_state_dict(vocabulary_record(data_folder))
        if resumes and trainer.is_data_parallel_master and hasattr(trainer.task, "check_resumes"):
            trainer.task.check_resumes(saved)
        if hasattr(trainer.task, "begin_run"):
            trainer.task.begin_run(trainer, saved if resumes else {})
        counted = (extra_state or {}).get(PATIENCE_STATE) if not cfg.reset_meters else None
        if counted is not None:
            for function in _functions_that_stop_early():
                vars(function).update({name: counted[name] for name in COUNTERS})
        updates = trainer.get_num_updates()
        limit = trainer.cfg.optimization.max_update or math.inf
        stopped_early = counted is not None and 0 < cfg.patience <= counted["num_runs"]
        if resumes and extra_state is not None and (updates >= limit or stopped_early):
            logger.info("this run is finished after %d updates; there is nothing to train", updates)
            # NaN: no comparison with the largest epoch, which may be infinite, lets the training begin
            epoch_itr = SimpleNamespace(next_epoch_idx=math.nan)
        return extra_state, epoch_itr

    load_checkpoint.resumes = True  # type: ignore[attr-defined]
    return load_checkpoint


def check_same_batches(contents: CheckpointState, cfg: FairseqConfig) -> None:
    """Raise ValueError if a run was stopped within an epoch, and ``cfg`` would divide the epoch into other batches.

    fairseq saves the number of batches, not the place in the text. ``contents`` is the content of the checkpoint.
    """
    extra_state = contents.get("extra_state") or {}
    place = (extra_state.get("train_iterator") or {}).get("iterations_in_epoch", 0)
    saved = contents.get("cfg") or {}
    for group, names in BATCHES.items():
        before = saved.get(group) or {}
        now = cfg[group]
        for name in names:
            is_recorded = name in now and before.get(name) is not None
            if place and is_recorded and before[name] != now[name]:
                flag = f"--{name.replace('_', '-')}"
                advice = f"pass {flag} {before[name]}"
                if isinstance(before[name], bool):
                    advice = f"pass {flag}" if before[name] else f"leave {flag} out"
                raise ValueError(
                    f"{flag} is {now[name]}, but the run was stopped within an epoch with {before[name]}, so its "
                    f"place in the text is not known; {advice}, or --reset-dataloader to begin with the first epoch"
                )
    trained = extra_state.get(TRAIN_SPLIT)
    if place and trained is not None and trained != split_fingerprint(cfg):
        raise ValueError(
            f"the text of {cfg.task.data} is not that of the run, which was stopped within an epoch, so its place in "
            "the text is not known; pass the dataset of the run, or --reset-dataloader to begin with the first epoch"
        )


def _data_folder(task: FairseqTask) -> str | None:
    """The folder of the first binarized dataset of a fairseq task; None if it has none."""
    data = getattr(getattr(task, "cfg", None), "data", None)
    return utils.split_paths(data)[0] if isinstance(data, str) and data else None


def _functions_that_stop_early() -> list[Callable[..., bool]]:
    """fairseq's ``should_stop_early``, which counts in its attributes; the module of a command is ``__main__``."""
    modules = [sys.modules.get(name) for name in ("__main__", "fairseq_cli.train")]
    functions = [getattr(module, "should_stop_early", None) for module in modules]
    return [function for function in functions if function is not None]
