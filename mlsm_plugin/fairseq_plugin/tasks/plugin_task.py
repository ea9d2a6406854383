"""The base of this package's tasks: precision, checks of criterion and model, and checkpoints that load anywhere."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from fairseq import utils
from fairseq.criterions import CRITERION_REGISTRY, FairseqCriterion
from fairseq.data import FairseqDataset
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from fairseq.models import (
    ARCH_MODEL_REGISTRY,
    BaseFairseqModel,
    FairseqEncoderDecoderModel,
    FairseqEncoderModel,
    FairseqLanguageModel,
)
from fairseq.optim import FairseqOptimizer
from omegaconf import II, MISSING
from torch import Tensor

from mlsm_plugin.core.files.model_files import copy_tokenizer
from mlsm_plugin.core.files.settings import option
from mlsm_plugin.core.machine.devices import has_fast_bf16
from mlsm_plugin.core.machine.memory import keep_freed_memory
from mlsm_plugin.core.machine.processors import BUSY, SPINS, cores_busy_with_others, usable_cores, waits_as_chosen
from mlsm_plugin.core.text.vocabulary_record import (
    VOCABULARY,
    check_vocabulary_record,
    symbols_record,
    vocabulary_record,
)
from mlsm_plugin.fairseq_plugin.compat.batches import LoggingOutput, Sample
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import CheckpointState
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import PUT_BACK
from mlsm_plugin.fairseq_plugin.compat.compiled_steps import (
    compile_parts,
    forget_compiled,
    is_compile_error,
    is_one_graph,
)
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import ANOTHER_FOLDER
from mlsm_plugin.fairseq_plugin.compat.training_options import registered_name
from mlsm_plugin.fairseq_plugin.data.token_blocks import folders_of
from mlsm_plugin.fairseq_plugin.optimizers.fused_adamw import mark_weights

logger = logging.getLogger(__name__)

StepResult = tuple[Tensor, int | Tensor, LoggingOutput]  # loss, sample size, figures

STRUCTURES = {
    "a decoder": FairseqLanguageModel,
    "an encoder": FairseqEncoderModel,
    "an encoder-decoder": FairseqEncoderDecoderModel,
}
PACKAGES = (__name__.partition(".")[0], "fairseq")
LONG_RUN = 3000  # updates after which compiling pays off: it takes a minute and saves about 30 ms per large update
# keys in the logging outputs
MASKED = "num_masked_content"
ALL = "num_all_content"
SAMPLE_BREAK_MODES = ChoiceEnum(["none", "complete", "complete_doc", "eos"])
SAMPLE_BREAK_MODE_HELP = (
    "where samples end (none: anywhere; complete: after a sentence; complete_doc: after a sentence or a document; eos: "
    "after each sentence); a sentence that is too long for a sample is cut into pieces"
)


@dataclass
class SavedRunConfig(FairseqDataclass):
    """Options for the precision of a step, the seed, saving a run, and its loader processes."""

    autocast: ChoiceEnum(["auto", "bf16", "off"]) = option(  # type: ignore[valid-type]
        "off",
        help="bf16: matrix products in bfloat16, weights, optimizer and losses in float32; auto: bf16 where the "
        "machine is fast in it (see `mlsm doctor`); off: everything in the precision of the weights",
    )
    compile: ChoiceEnum(["auto", "on", "off"]) = option(  # type: ignore[valid-type]
        "auto",
        help="compile the encoder, which takes a minute: auto: mlsm_modern on a GPU, in a run of at least "
        f"{LONG_RUN} updates; on: every model, everywhere; off: none",
    )
    fp16: bool = II("common.fp16")
    bf16: bool = II("common.bf16")
    amp: bool = II("common.amp")
    cpu: bool = II("common.cpu")
    max_update: int = II("optimization.max_update")
    seed: int = II("common.seed")
    save_dir: str = II("checkpoint.save_dir")
    no_save: bool = II("checkpoint.no_save")
    reuse_dataloader: bool = option(
        False,
        help="keep loader processes between epochs, as fairseq does by default; they only know the number of the "
        "first epoch, so every epoch draws the same masks or spans",
    )


@dataclass
class TextBlocksConfig(SavedRunConfig):
    """Options for cutting a binarized dataset into samples, for tasks that are not based on masked LM."""

    data: str = option(
        MISSING, help="binarized dataset, or several joined by colons, between which the epochs alternate"
    )
    sample_break_mode: SAMPLE_BREAK_MODES = option("complete", help=SAMPLE_BREAK_MODE_HELP)  # type: ignore[valid-type]
    tokens_per_sample: int = option(256, help="maximum number of tokens of a sample, BOS included")


class PluginTask(ABC):
    """A mixin for tasks.

    Criterions run under ``torch.autocast`` if ``--autocast`` is on, and their loss functions compute in float32. The
    task rejects criterions and models of other tasks, which fairseq accepts silently; it accepts all classes of a
    user's plugin. If batches have content tokens, it logs ``masked_share``, the share of these that is masked, over
    all workers. Checkpoints load from anywhere, but only with the vocabulary that they were trained with. The
    configuration names the data (``data``), whose first folder has the dictionary. ValueError for ``--autocast bf16``
    with another kind of reduced precision.
    """

    criterions: ClassVar[tuple[str, ...]]  # criterions of this package and of fairseq that this task can train with
    encoder_decoder: ClassVar[bool] = False  # whether it trains an encoder-decoder instead of an encoder
    usual_arch: ClassVar[str] = "mlsm_modern_small"  # an example for errors
    cfg: FairseqDataclass

    def __init__(self, cfg: SavedRunConfig, *args: object, **kwargs: object) -> None:
        super().__init__(cfg, *args, **kwargs)  # type: ignore[call-arg]
        self._precision_flags = [f"--{name}" for name in ("fp16", "bf16", "amp") if getattr(cfg, name, False)]
        if str(cfg.autocast) == "bf16" and self._precision_flags:
            flags = " and ".join(self._precision_flags)
            raise ValueError(f"--autocast bf16 keeps the weights in float32; leave out {flags}")
        self._logged = False
        self._one_graph = False
        self._compiled: list[torch.nn.Module] = []
        self._has_run = False  # whether a step, perhaps compiled, has run

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False) -> BaseFairseqModel:
        """Build the model, with marks that the optimizer reads; ValueError if it is of another kind than needed."""
        name = registered_name(cfg)
        needed = "an encoder-decoder" if self.encoder_decoder else "an encoder"
        for structure, kind in STRUCTURES.items():
            if structure != needed and issubclass(ARCH_MODEL_REGISTRY.get(name, object), kind):
                raise ValueError(
                    f"--arch {name} is {structure}, and --task {registered_name(self.cfg)} trains {needed}; pass one, "
                    f"such as --arch {self.usual_arch}"
                )
        model = super().build_model(cfg, from_checkpoint)  # type: ignore[misc]
        mark_weights(model)
        self._one_graph = is_one_graph(model)
        return model

    def build_criterion(self, cfg: FairseqDataclass, *args: object, **kwargs: object) -> FairseqCriterion:
        """Build the criterion, in a process that trains; ValueError if it belongs to another task."""
        keep_freed_memory()
        self._warn_of_busy_cores()
        name = registered_name(cfg)
        known = CRITERION_REGISTRY.get(name)
        if known is not None and known.__module__.partition(".")[0] in PACKAGES and name not in self.criterions:
            raise ValueError(
                f"--criterion {name} does not compute the loss of --task {registered_name(self.cfg)}; pass --criterion "
                f"{' or '.join(self.criterions)}"
            )
        return super().build_criterion(cfg, *args, **kwargs)  # type: ignore[misc]

    def _warn_of_busy_cores(self) -> None:
        """Log a remedy if other processes use the cores; torch is already loaded, so its threads spin."""
        if waits_as_chosen() or torch.get_num_threads() == 1:
            return
        busy = cores_busy_with_others()
        if busy >= BUSY:
            logger.warning(
                "other processes keep %.1f of %d cores busy, which makes threads that wait for each other slow; start "
                "again with GOMP_SPINCOUNT=%s in the environment, or with OMP_NUM_THREADS=1",
                busy,
                usable_cores(),
                SPINS,
            )

    @abstractmethod
    def masked_counts(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """The numbers of masked content tokens and of all content tokens of a batch; zeros if nothing is masked."""

    def train_step(
        self,
        sample: Sample,
        model: BaseFairseqModel,
        criterion: FairseqCriterion,
        optimizer: FairseqOptimizer,
        update_num: int,
        ignore_grad: bool = False,
    ) -> StepResult:
        """See :class:`FairseqTask`; a batch that replaces a missing batch is marked as ``is_dummy``."""
        if ignore_grad:
            sample = {**sample, "is_dummy": True}
        compute = self._compute_of(criterion)
        result = super().train_step(sample, model, compute, optimizer, update_num, ignore_grad)  # type: ignore[misc]
        self._count(sample, result[-1])
        return result

    def valid_step(self, sample: Sample, model: BaseFairseqModel, criterion: FairseqCriterion) -> StepResult:
        result = super().valid_step(sample, model, self._compute_of(criterion))  # type: ignore[misc]
        self._count(sample, result[-1])
        return result

    def _compute_of(self, criterion: FairseqCriterion) -> Callable[[BaseFairseqModel, Sample], StepResult]:
        """The function that computes the loss: ``criterion``, in the precision of a step, with a compiled model."""

        def compute(model: BaseFairseqModel, sample: Sample) -> StepResult:
            off = str(self.cfg.autocast) == "off"
            with contextlib.nullcontext() if off else self.precision(next(model.parameters()).device):
                self._compile_once(model)
                try:
                    result = criterion(model, sample)
                except Exception as error:
                    if not is_compile_error(error):
                        raise
                    self._give_up_compiling(error)
                    return criterion(model, sample)
                self._has_run = True
                return result

        return compute

    @property
    def compiles(self) -> bool:
        """Whether steps are compiled, unless the compiler fails; the shapes of batches are then rounded."""
        choice = str(self.cfg.compile)
        is_long = not 0 < self.cfg.max_update < LONG_RUN
        gains = self._one_graph and is_long and torch.cuda.is_available() and not self.cfg.cpu
        return choice == "on" or (choice == "auto" and gains)

    def _compile_once(self, model: BaseFairseqModel) -> None:
        """Compile a model at its first call; with samples of one length, each shape gets its own graph.

        ValueError in bfloat16 on a CPU, where torch 2.13 compiles wrong gradients for encoders that are not one graph.
        """
        if self.compiles and not self._compiled:
            if torch.is_autocast_enabled("cpu") and not is_one_graph(model):
                raise ValueError(
                    "--compile on: for this model, the compiler makes wrong gradients in bfloat16 on a CPU; pass "
                    "--autocast off or --compile off"
                )
            self._compiled = compile_parts(model, one_length=str(self.cfg.sample_break_mode) == "none")

    def _give_up_compiling(self, error: Exception) -> None:
        """Warn and continue without compiling; with ``--compile on``, ValueError if it has never worked.

        After a step with NaNs, fairseq repeats it to find their origin, with hooks that cannot be compiled.
        """
        reason = str(error).strip().splitlines()[0]
        if str(self.cfg.compile) == "on" and not self._has_run:
            raise ValueError(f"--compile on: {reason}; pass --compile off") from error
        logger.warning("the model is not compiled: %s", reason)
        forget_compiled(self._compiled)

    def precision(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """The context of a step on ``device``, unless ``--autocast`` is off."""
        in_bf16 = str(self.cfg.autocast) == "bf16" or (not self._precision_flags and has_fast_bf16(device))
        if not self._logged:
            self._logged = True
            logger.info("--autocast %s: %s", self.cfg.autocast, "bf16" if in_bf16 else "off")
        return torch.autocast(device.type, torch.bfloat16) if in_bf16 else contextlib.nullcontext()

    def _count(self, sample: Sample, logging_output: LoggingOutput) -> None:
        logging_output[MASKED] = 0
        logging_output[ALL] = 0
        if sample:
            logging_output[MASKED], logging_output[ALL] = self.masked_counts(sample)

    def reduce_metrics(self, logging_outputs: list[LoggingOutput], criterion: FairseqCriterion) -> None:
        logging_outputs = _as_numbers(logging_outputs)
        super().reduce_metrics(logging_outputs, criterion)  # type: ignore[misc]
        masked = sum(log.get(MASKED, 0) for log in logging_outputs)
        content = sum(log.get(ALL, 0) for log in logging_outputs)
        if content > 0:
            metrics.log_scalar("masked_share", masked / content, content, round=3)

    @property
    def _data_folder(self) -> str:
        return str(utils.split_paths(self.cfg.data)[0])

    @cached_property
    def _vocabulary_record(self) -> dict[str, str]:
        return vocabulary_record(self._data_folder)

    def load_state_dict(self, state_dict: CheckpointState) -> None:
        """Load the state of a task; ValueError if it belongs to another vocabulary or tokenizer."""
        check_vocabulary_record(state_dict, self._data_folder, "the checkpoint", PUT_BACK)
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def check_starts_from(self, checkpoint: Path, saved: CheckpointState) -> None:
        """Raise ValueError if a run cannot start or resume from a checkpoint, since vocabulary or tokenizer differ.

        If ``saved``, the state of its task, lacks the vocabulary, it is read from the ``dict.txt`` beside it.
        """
        if VOCABULARY not in saved:
            saved = {**saved, VOCABULARY: symbols_record(checkpoint.parent).get(VOCABULARY)}
        check_vocabulary_record(saved, self._data_folder, str(checkpoint), ANOTHER_FOLDER)

    def begin_epoch(self, epoch: int, model: BaseFairseqModel) -> None:
        """Record the vocabulary and tokenizer, and copy them next to the checkpoints; only the first rank copies.

        ValueError if the folder has checkpoints of another vocabulary, or the data folders differ in vocabulary.
        """
        super().begin_epoch(epoch, model)  # type: ignore[misc]
        folders_of(self.cfg.data)  # a later folder must not stop the run in its epoch
        self.state.merge_state_dict(self._vocabulary_record)  # type: ignore[attr-defined]
        first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if first_rank and not self.cfg.no_save:
            copy_tokenizer(self._data_folder, self.cfg.save_dir)

    def filter_indices_by_size(
        self,
        indices: np.ndarray,
        dataset: FairseqDataset,
        max_positions: int | tuple[int, ...] | None = None,
        ignore_invalid_inputs: bool = False,
    ) -> np.ndarray:
        """All ``indices``; ValueError for a sample longer than ``max_positions``, which fairseq would drop."""
        _, too_long = dataset.filter_indices_by_size(indices, max_positions)
        if len(too_long):
            raise ValueError(
                f"{len(too_long)} of {len(indices)} samples are longer than --max-positions or --max-tokens allow "
                f"({max_positions}), and no text is left out; raise these options, or lower --tokens-per-sample"
            )
        return indices


def _as_numbers(logging_outputs: list[LoggingOutput]) -> list[LoggingOutput]:
    """The same logs with numbers instead of tensors of one element, all copied from a GPU at once."""
    places = [(log, key) for log in logging_outputs for key, value in log.items() if torch.is_tensor(value)]
    scalars = [(log, key) for log, key in places if log[key].numel() == 1]
    if not scalars:
        return logging_outputs
    values = torch.stack([log[key].detach().double().reshape(()) for log, key in scalars]).tolist()
    numbers = {(id(log), key): value for (log, key), value in zip(scalars, values, strict=True)}
    return [{key: numbers.get((id(log), key), value) for key, value in log.items()} for log in logging_outputs]
