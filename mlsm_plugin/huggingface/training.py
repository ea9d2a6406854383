"""Train a model with an objective of this package in the Trainer of ``transformers``; resumes after a stop."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import first_line, import_transformers
from mlsm_plugin.core.files.settings import check, option, seed
from mlsm_plugin.core.machine.devices import has_fast_bf16
from mlsm_plugin.core.optimizers.muon import MuonAdamW, matrices_of_layers

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

SECONDS_TO_WAIT = 7 * 24 * 3600  # for the other ranks, which may code for days
SAMPLES = 32  # in an update
LEARNING_RATE = 2e-4
IDS_OF_BATCH = 4096  # at most, unless a batch size is chosen
TRAINER_STATE = "trainer_state.json"  # the last file that the Trainer writes to a checkpoint


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training with AdamW (betas 0.9, 0.98) and rates that fall linearly to 0; checks its values."""

    updates: int = option(1000, least=1, help="number of updates, instead of --epochs")
    batch_size: int | None = option(
        None,
        least=1,
        help="sequences (npm: groups of 16 sequences) per batch on each device (default: 32 sequences; of more than "
        "128 ids, fewer, which saves memory)",
    )
    accumulate: int | None = option(
        None, least=1, help="batches per update (default: as many as make 32 sequences; 1 with --batch-size)"
    )
    learning_rate: float | None = option(None, above=0, help="largest learning rate")  # None: LEARNING_RATE
    warmup: float = option(0.06, least=0, most=1, help="share of updates in which the learning rate rises")
    weight_decay: float = option(0.01, least=0, help="weight decay of AdamW")
    attention_dropout: float | None = option(
        None,
        least=0,
        most=1,
        metavar="P",
        help="dropout of attention weights in the training (default: 0, whatever MODEL has, since it makes an update "
        "take up to three times as long on a CPU)",
    )
    optimizer: str = option(
        "adamw",
        choices=("adamw", "muon"),
        help="muon: Muon for the matrices of the layers, AdamW for the other weights",
    )
    muon_learning_rate: float | None = option(None, above=0, help="largest learning rate of Muon")
    lora: int | None = option(
        None,
        least=1,
        metavar="RANK",
        help="train only updates of this rank of the matrices of the layers (LoRA), which are merged at the end; needs "
        "peft",
    )
    bf16: str = option(
        "auto",
        choices=("auto", "on", "off"),
        help="bfloat16, and codes in half precision; auto: if the machine is fast in bfloat16",
    )
    compile: str = option("off", choices=("on", "off"), help="compile the model, which takes a minute", decides=False)
    evaluate_every: int = option(500, least=1, help="updates between evaluations and checkpoints")
    seed: int = seed("of everything")
    workers: int = option(0, least=0, help="processes that load batches", decides=False)
    cpu: bool = option(False, help="do not use a GPU", decides=False)
    report_to: list[str] = option(
        [], metavar="NAME", help="log to tensorboard, wandb, trackio, ... (default: nowhere)", decides=False
    )

    def __post_init__(self) -> None:
        check(self)
        if self.muon_learning_rate is not None and self.optimizer != "muon":
            raise ValueError("muon_learning_rate needs --optimizer muon")
        if self.lora is not None and self.optimizer == "muon":
            raise ValueError("lora is trained with --optimizer adamw")

    @property
    def on_cpu(self) -> bool:
        """Whether no GPU is used."""
        return self.cpu or not torch.cuda.is_available()

    @property
    def in_bf16(self) -> bool:
        """Whether matrix products are in bfloat16."""
        device = torch.device("cpu" if self.on_cpu else "cuda")
        return has_fast_bf16(device) if self.bf16 == "auto" else self.bf16 == "on"

    @property
    def largest_rate(self) -> float:
        """The largest learning rate of AdamW."""
        return LEARNING_RATE if self.learning_rate is None else self.learning_rate

    @property
    def samples_per_batch(self) -> int:
        """The size of a batch on each device."""
        return SAMPLES if self.batch_size is None else self.batch_size

    @property
    def batches_per_update(self) -> int:
        """The number of batches whose gradients are added up for an update."""
        return 1 if self.accumulate is None else self.accumulate

    def for_length(self, length: int, group: int = 1) -> "TrainingSettings":
        """The settings for samples of ``group`` sequences of ``length`` ids each.

        If no size was chosen, an update has 32 sequences, in batches of one sample or at most 4,096 ids; with
        ``accumulate`` alone, a batch has 32. With 32 x 512 ids at once, the attention weights of a model with 6 layers
        would take 10 GB.
        """
        if self.batch_size is not None:
            return self
        samples = max(1, SAMPLES // group)
        if self.accumulate is not None:
            return replace(self, batch_size=samples)
        size = samples
        while size > 1 and size * group * length > IDS_OF_BATCH:
            size //= 2
        return replace(self, batch_size=size, accumulate=samples // size)

    def updates_of_epochs(self, epochs: float, number: int, processes: int) -> int:
        """The number of updates in ``epochs`` passes over ``number`` samples; the last of a pass may be smaller."""
        batches = math.ceil(number / (self.samples_per_batch * processes))
        return max(1, round(epochs * math.ceil(batches / self.batches_per_update)))

    def arguments(self, checkpoints: PathLike) -> "TrainingArguments":
        """Hugging Face's ``TrainingArguments``; ValueError if this process sees several GPUs, or cannot log."""
        import_transformers()
        from transformers import TrainingArguments
        from transformers.integrations import get_reporting_integration_callbacks

        from mlsm_plugin.huggingface.trainer_callback import check_gpus

        arguments = TrainingArguments(
            output_dir=str(checkpoints),
            max_steps=self.updates,
            per_device_train_batch_size=self.samples_per_batch,
            per_device_eval_batch_size=self.samples_per_batch,
            gradient_accumulation_steps=self.batches_per_update,
            learning_rate=self.largest_rate,
            warmup_steps=round(self.warmup * self.updates),
            weight_decay=self.weight_decay,
            adam_beta2=0.98,
            bf16=self.in_bf16,
            torch_compile=self.compile == "on",
            eval_strategy="steps",
            eval_steps=self.evaluate_every,
            save_steps=self.evaluate_every,
            save_total_limit=1,
            logging_steps=min(100, self.evaluate_every, max(1, self.updates // 20)),
            seed=self.seed,
            dataloader_num_workers=self.workers,
            use_cpu=self.on_cpu,
            report_to=self.report_to,
            ddp_timeout=SECONDS_TO_WAIT,
            average_tokens_across_devices=True,
        )
        for callback in get_reporting_integration_callbacks(self.report_to):
            try:
                callback()  # the Trainer would only call it when everything is prepared
            except RuntimeError as error:
                raise ValueError(f"report_to names what is not installed: {first_line(error)}") from None
        check_gpus(arguments)
        arguments.dataloader_pin_memory = arguments.device.type == "cuda"  # elsewhere torch warns of it
        return arguments

    def optimizer_of(self, model: nn.Module) -> MuonAdamW | None:
        """The optimizer for a Trainer of ``model``; None: the Trainer's default, AdamW."""
        if self.optimizer == "adamw":
            return None
        return muon_adamw(
            model,
            learning_rate=self.largest_rate,
            muon_learning_rate=self.muon_learning_rate,
            weight_decay=self.weight_decay,
        )


def muon_adamw(
    model: nn.Module, *, learning_rate: float, muon_learning_rate: float | None = None, weight_decay: float = 0.01
) -> MuonAdamW:
    """Muon for the matrices of the layers, AdamW for the other weights, for ``Trainer(..., optimizers=(this, None))``.

    ``learning_rate`` and ``weight_decay`` are for AdamW, which does not decay vectors. Muon has no weight decay; its
    default rate is 10 times AdamW's. ValueError if ``model`` has no layers.
    """
    matrices = matrices_of_layers(model)
    ids_of_matrices = {id(matrix) for matrix in matrices}
    adamw_weights = [
        weight for weight in model.parameters() if id(weight) not in ids_of_matrices and weight.requires_grad
    ]
    groups = [
        {"params": [weight for weight in adamw_weights if weight.dim() > 1], "weight_decay": weight_decay},
        {"params": [weight for weight in adamw_weights if weight.dim() <= 1], "weight_decay": 0.0},
    ]
    muon_weights = [matrix for matrix in matrices if matrix.requires_grad]
    return MuonAdamW(muon_weights, groups, lr=learning_rate, muon_lr=muon_learning_rate)


def train(trainer: "Trainer") -> dict[str, float]:
    """Train, or resume from the last complete checkpoint; then evaluate, in nats. Errors as in :func:`resume`."""
    resume(trainer)
    return {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}


def resume(trainer: "Trainer") -> None:
    """Train, from the last complete checkpoint if there is one; a checkpoint of the last update is only loaded.

    ValueError if the loss of an evaluation is not finite, OSError if a checkpoint cannot be written.
    """
    from transformers import TrainerState, set_seed

    checkpoints = Path(str(trainer.args.output_dir))
    set_seed(trainer.args.seed)  # an evaluation before the training may have drawn random numbers
    checkpoint = last_checkpoint(checkpoints, tidy=trainer.is_world_process_zero())
    if checkpoint is not None:
        state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE)))
        if 0 < trainer.args.max_steps <= state.global_step:  # the Trainer would make one more update
            trainer._load_from_checkpoint(checkpoint)
            trainer.state = state
            return
    with _disk_errors(checkpoints):
        trainer.train(resume_from_checkpoint=checkpoint)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn the errors of torch and safetensors for files that cannot be written into OSError."""
    from safetensors import SafetensorError

    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        if isinstance(error, SafetensorError) or "PytorchStreamWriter" in str(error):
            raise OSError(f"{folder} cannot be written: {first_line(error)}") from error
        raise


def last_checkpoint(folder: Path, *, tidy: bool = True) -> str | None:
    """The newest complete checkpoint, with a ``trainer_state.json``; ``tidy`` removes newer, incomplete checkpoints."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name[len("checkpoint-") :].isdecimal()]
    for newest in sorted(checkpoints, key=lambda path: int(path.name[len("checkpoint-") :]), reverse=True):
        try:
            json.loads((newest / TRAINER_STATE).read_text(encoding="utf-8"))
            return str(newest)
        except (OSError, ValueError):
            if tidy:
                shutil.rmtree(newest, ignore_errors=True)
    return None
