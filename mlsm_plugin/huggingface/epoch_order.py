"""The order of the samples in the Trainer of ``transformers``, which a resumed run must repeat.

The Trainer leaves the order to ``accelerate``. Most of its versions resume an epoch with the order or the masks of
another epoch.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, Sampler
from transformers import Trainer, TrainerState, TrainingArguments

from mlsm_plugin.core.masking.masked_share import samples_to_look_at
from mlsm_plugin.huggingface.checked_parts import with_inner
from mlsm_plugin.huggingface.pretraining_model import objective_name
from mlsm_plugin.huggingface.pretraining_sequences import Samples, order_of_epoch
from mlsm_plugin.huggingface.sentence_vectors import SentenceVectors

BATCHES_OF_GROUP = 50  # whose samples are sorted by length together
ORDER = "order of the samples"
RANDOM = "random"  # also that of checkpoints that do not record it
SAMPLES = "samples of mlsm_plugin"  # key in the state of the Trainer, next to names of callbacks
TARGETS = "targets of mlsm_plugin"
logger = logging.getLogger(__name__)

RESUMES_SMALLER_UPDATES = "4.57"  # first version of transformers that resumes them correctly


class EpochOrder(Sampler[int]):
    """A random order of ``number`` samples that depends only on the seed and the epoch.

    Args:
        number: the number of samples.
        seed: seed of the order.
        epoch: called at the start of each pass over the samples; returns the epoch.
        lengths: lengths ``(number,)`` of the samples; with these, batches have samples of similar lengths, which saves
            padding. None: they are not regarded.
        batch_size: number of samples of a batch on a device.
    """

    def __init__(
        self, number: int, *, seed: int, epoch: Callable[[], int], lengths: Tensor | None = None, batch_size: int = 1
    ) -> None:
        self.number = number
        self.seed = seed
        self.epoch = epoch
        self.lengths = lengths
        self.batch_size = batch_size

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch()
        order = order_of_epoch(self.number, self.seed, epoch)
        if self.lengths is not None:
            order = grouped_by_length(order, self.lengths, self.batch_size, seed=self.seed + epoch)
        yield from order.tolist()


def grouped_by_length(order: Tensor, lengths: Tensor, batch_size: int, *, seed: int) -> Tensor:
    """An order ``(n,)`` of samples with the given ``lengths`` ``(n,)``, whose batches have samples of similar lengths.

    Samples are sorted within groups of 50 batches, and the batches of a group are in random order. A last batch that
    is smaller stays the last.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for group in order.split(batch_size * BATCHES_OF_GROUP):
        batches = group[lengths[group].argsort(stable=True)].split(batch_size)
        whole = len(group) // batch_size
        numbers = [*torch.randperm(whole, generator=generator).tolist(), *range(whole, len(batches))]
        parts += [batches[number] for number in numbers]
    return torch.cat(parts) if parts else order


def order_by_epoch(trainer: Trainer) -> None:
    """Replace the random order of a Trainer's training samples with an :class:`EpochOrder`; keep other orders.

    ValueError if the share of masks changes during the training, and the order is not random or the dataset is not
    :class:`Samples` itself.
    """
    stock_dataloader = trainer.get_train_dataloader
    masks_change = getattr(getattr(trainer.data_collator, "masking", None), "mask_prob_end", None) is not None
    if masks_change and not isinstance(trainer.train_dataset, Samples):
        raise ValueError(
            "with mask_prob_end, train_dataset must be PretrainingSequences itself: a subset or a concatenation of "
            "several does not know when in the training a sample comes"
        )

    def get_train_dataloader() -> DataLoader[Any]:
        loader = stock_dataloader()
        batches: Any = getattr(loader, "batch_sampler", None)
        while hasattr(batches, "batch_sampler"):  # batches of all ranks, before accelerate selects
            batches = batches.batch_sampler
        sampler = getattr(batches, "sampler", None)
        if batches is not None and isinstance(sampler, RandomSampler):
            batches.sampler = EpochOrder(
                len(sampler),
                seed=seed_of_order(trainer.args),
                epoch=lambda: epoch_of(trainer.state),
                lengths=lengths_of(trainer.train_dataset),
                batch_size=batches.batch_size,
            )
        elif masks_change:
            raise ValueError("with mask_prob_end, the Trainer must take the samples in its usual random order")
        return loader

    trainer.get_train_dataloader = get_train_dataloader  # type: ignore[method-assign]


def lengths_of(dataset: object) -> Tensor | None:
    """The lengths ``(n,)`` of sentences, by which a Trainer groups them; None for other samples, which are packed."""
    if not isinstance(dataset, SentenceVectors):
        return None
    return torch.from_numpy(np.diff(dataset.sequences.starts))


def epoch_of(state: TrainerState) -> int:
    """The number, from 0, of the epoch that a Trainer with this state is in or about to begin."""
    return int(state.epoch or 0)


def seed_of_order(arguments: TrainingArguments) -> int:
    """The seed of the order of the samples."""
    return arguments.seed if arguments.data_seed is None else arguments.data_seed


def samples_of_update(arguments: TrainingArguments) -> int:
    """The number of samples per update, over all devices."""
    return arguments.train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps


def samples_of_training(arguments: TrainingArguments, updates: int, samples: int, batches: int) -> int:
    """The number of samples in all ``updates``, over all devices; the last update of an epoch may be smaller.

    ``samples`` is the number of samples per epoch, ``batches`` the number of batches per epoch on each device.
    """
    epochs, further_updates = divmod(updates, math.ceil(batches / arguments.gradient_accumulation_steps))
    return epochs * samples + min(samples, further_updates * samples_of_update(arguments))


def samples_record(arguments: TrainingArguments, dataset: object, model: object) -> dict[str, object]:
    """The values that decide which samples an update sees, as JSON; only part of the text is read."""
    text = hashlib.sha256()
    for inner in with_inner(dataset):
        if hasattr(inner, "__len__"):
            text.update(f"{len(inner)} ".encode())
        if isinstance(inner, Samples):
            text.update(f"{inner.sequences.num_tokens} ".encode())
            for index in samples_to_look_at(len(inner.sequences)):
                text.update(inner.sequences[index].tobytes())
    return {
        "number of samples of an update": samples_of_update(arguments),
        "seed of the order": seed_of_order(arguments),
        ORDER: RANDOM if lengths_of(dataset) is None else "random, in batches of similar lengths",
        "objective of the model": objective_name(model),  # in earlier checkpoints, "objective" was the stock class
        "text": text.hexdigest()[:12],
    }


def check_same_samples(state: TrainerState, record: dict[str, object], updates: int) -> None:
    """Check that a training that resumes within an epoch sees the remaining samples of that epoch.

    The record is part of the state, which the Trainer saves with each checkpoint. Checkpoints without a record are
    accepted.

    Args:
        state: state of the Trainer; the ``record`` is added to it.
        record: result of :func:`samples_record`.
        updates: current number of updates per epoch.

    Raises:
        ValueError: the checkpoint was written within an epoch over other samples.
    """
    records = cast(dict[str, dict[str, object]], state.stateful_callbacks)  # as the Trainer saves it
    saved = records.get(SAMPLES, {})
    within_epoch = (state.epoch or 0) % 1 > 0 or state.global_step % max(1, updates) > 0
    for name, now in record.items():
        before = saved.get(name, RANDOM if name == ORDER else now)
        if within_epoch and state.global_step and before != now:
            raise ValueError(
                f"the {name} was {before} and is {now} now, but the training was stopped within an epoch, so its "
                "place in the text is not known; resume it as it was begun, or begin a new training with the model of "
                "the checkpoint"
            )
    records[SAMPLES] = record


def check_same_targets(state: TrainerState, record: dict[str, object]) -> None:
    """Check that a training that resumes predicts what it predicted before.

    The record of the model is part of the state, which the Trainer saves with each checkpoint; it is added to it.
    Checkpoints without a record are accepted. ValueError if the records differ.
    """
    records = cast(dict[str, dict[str, object]], state.stateful_callbacks)
    saved = records.get(TARGETS, {})
    for name, now in record.items():
        if state.global_step and saved.get(name, now) != now:
            raise ValueError(
                f"the {name} was {saved[name]} and is {now} now; resume the training as it was begun, or begin a new "
                "training with the model of the checkpoint"
            )
    records[TARGETS] = record


def check_resumable(arguments: TrainingArguments, state: TrainerState, batches: int) -> None:
    """Check at the start of a training that the Trainer can resume an epoch of ``batches`` batches correctly.

    transformers before 4.57 cannot, if the last update of an epoch has fewer batches than the others: ValueError if
    this training is resumed, else a warning.
    """
    accumulated = arguments.gradient_accumulation_steps
    if batches % accumulated == 0 or Version(transformers.__version__) >= Version(RESUMES_SMALLER_UPDATES):
        return
    reason = (
        f"transformers {transformers.__version__} resumes at the wrong place if an epoch of {batches} batches ends "
        f"with an update of fewer than {accumulated}"
    )
    remedy = f"install transformers {RESUMES_SMALLER_UPDATES} or newer"
    if state.global_step:
        raise ValueError(f"{reason}; {remedy}, and resume")
    logger.warning("%s: if this training stops, %s before you resume it", reason, remedy)
