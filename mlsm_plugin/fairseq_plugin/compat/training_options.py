"""Report options that ``fairseq-train`` cannot run with in one line, before it begins.

fairseq alone ends with a traceback, sometimes after an epoch, or trains something else.
"""

import argparse
import ast
import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from fairseq import optim, options
from fairseq import utils as fairseq_utils
from fairseq.data import data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.configs import CommonConfig, DistributedTrainingConfig, FairseqConfig
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.optim import lr_scheduler
from fairseq.tasks import TASK_REGISTRY

from mlsm_plugin.fairseq_plugin.compat.resumed_runs import LAST
from mlsm_plugin.fairseq_plugin.compat.version_shims import is_fairseq_command

Built = TypeVar("Built")  # what a function of fairseq builds

PACKAGE = __name__.partition(".")[0]
LARGEST_SEED = 2**32 - 1  # of numpy
SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")  # where fairseq finds the machines of a Slurm job

POSITIVE = (
    "batch_size",
    "batch_size_valid",
    "max_tokens",
    "max_tokens_valid",
    "required_batch_size_multiple",
    "required_seq_len_multiple",
    "update_freq",
    "log_interval",
    "save_interval",
    "validate_interval",
    "total_num_update",
    "encoder_embed_dim",
    "encoder_ffn_embed_dim",
    "encoder_attention_heads",
    "max_source_positions",
    "decoder_embed_dim",
    "decoder_ffn_embed_dim",
    "decoder_attention_heads",
    "max_target_positions",
)
NOT_NEGATIVE = (
    "seed",
    "num_workers",
    "max_epoch",
    "max_update",
    "warmup_updates",
    "save_interval_updates",
    "validate_interval_updates",
    "validate_after_updates",
    "encoder_layers",
    "decoder_layers",
    "max_positions",
)
SHARES = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "pooler_dropout",
    "encoder_layerdrop",
    "decoder_layerdrop",
    "leave_unmasked_prob",
    "random_token_prob",
)
# the smallest and the largest value of numeric options
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(POSITIVE, (1, math.inf)),
    **dict.fromkeys(NOT_NEGATIVE, (0, math.inf)),
    **dict.fromkeys(SHARES, (0, 1)),
    "seed": (0, LARGEST_SEED),
    "tokens_per_sample": (2, math.inf),  # the first token is BOS
    "model_parallel_size": (1, 1),
}
NO_LATENT_HEAD = (
    "--criterion latent_semantic_kl needs a model with a latent head: pass --arch mlsm_modern_base, mlsm_roberta_base, "
    "or another size of these"
)
RESETS = ("reset_optimizer", "reset_lr_scheduler", "reset_meters", "reset_dataloader")


def apply() -> None:
    """Check the options of a run before it begins (idempotent)."""
    if getattr(options.parse_args_and_arch, "checks_options", False):
        return
    _stay_on_cpu()
    options.parse_args_and_arch = _checking(options.parse_args_and_arch)
    name = "raise_if_valid_subsets_unintentionally_ignored"
    setattr(data_utils, name, _naming_splits(getattr(data_utils, name)))
    optim.build_optimizer = _naming_option(optim.build_optimizer, "--optimizer")
    lr_scheduler.build_lr_scheduler = _naming_option(lr_scheduler.build_lr_scheduler, "--lr-scheduler")


def registered_name(cfg: FairseqDataclass) -> str:
    """The registered name of the task, model or criterion with these options; empty if it is missing."""
    return str(getattr(cfg, "_name", None) or getattr(cfg, "arch", None) or "")


def check_options(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Raise ValueError if an option is missing, out of range, or excludes another; ``args`` come from ``words``."""
    _check_missing(args, words)
    for name, (least, most) in RANGES.items():
        for value in _numbers(getattr(args, name, None)):
            if not least <= value <= most:
                allowed = f"at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:.0f}"
                raise ValueError(f"{_flag(name)} must be {allowed}, got {value:g}")
    for value in _numbers(args.lr):
        if not 0 <= value < math.inf:
            raise ValueError(f"--lr must be a number from 0, got {value:g}")
    _check_together(args)
    _check_beginning(args)
    for folder in fairseq_utils.split_paths(args.data)[1:]:
        if not os.path.exists(os.path.join(folder, f"{args.train_subset}.idx")):
            raise ValueError(
                f"{folder} has no split {args.train_subset}, and epochs alternate between the folders; binarize it "
                "there, or leave that folder out"
            )


def _check_missing(args: argparse.Namespace, words: Sequence[str]) -> None:
    if args.max_tokens is None and args.batch_size is None:
        raise ValueError("a batch has no size; pass --batch-size with samples, or --max-tokens with tokens")
    if args.optimizer is None:
        raise ValueError("--optimizer is missing; pass one, such as --optimizer fused_adamw")
    if not any(word.partition("=")[0] == "--lr" for word in words):
        raise ValueError("--lr is missing, and fairseq would use 0.25; pass one, such as --lr 1e-3")
    if args.lr_scheduler == "polynomial_decay" and args.total_num_update is None:
        number = args.max_update if args.max_update and args.max_update > 0 else "N"
        raise ValueError(f"--lr-scheduler polynomial_decay needs --total-num-update; pass --total-num-update {number}")
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if ranks > 1 and args.distributed_world_size == 1 and "--distributed-world-size" not in words:
        alone = f"WORLD_SIZE is {ranks}, and fairseq would train alone in each process that sees one GPU"
        raise ValueError(f"{alone}; pass --distributed-world-size {ranks}")
    if not all(split.strip() and split == split.strip() for split in args.valid_subset.split(",")):
        flag = f"--valid-subset {args.valid_subset!r}"
        raise ValueError(f"{flag} names an empty split; pass names joined by commas, without spaces")


def _check_together(args: argparse.Namespace) -> None:
    for side in ("encoder", "decoder"):
        dim = getattr(args, f"{side}_embed_dim", None)
        heads = getattr(args, f"{side}_attention_heads", None)
        if dim and heads and dim % heads:
            raise ValueError(f"--{side}-embed-dim {dim} is not a multiple of --{side}-attention-heads {heads}")
    warmup = _numbers(getattr(args, "warmup_updates", None))
    total = _numbers(getattr(args, "total_num_update", None))
    if warmup and total and warmup > total:
        raise ValueError(f"--warmup-updates {warmup[0]:g} are more than --total-num-update {total[0]:g}")
    shares = [getattr(args, name, None) or 0 for name in ("leave_unmasked_prob", "random_token_prob")]
    if sum(shares) > 1:
        raise ValueError(f"--leave-unmasked-prob {shares[0]:g} and --random-token-prob {shares[1]:g} are more than 1")


def _check_beginning(args: argparse.Namespace) -> None:
    start = args.finetune_from_model
    if start is None:
        return
    if args.restore_file != LAST:
        raise ValueError(
            "--finetune-from-model begins a run with the weights of a checkpoint, --restore-file continues one; pass "
            "only one of them"
        )
    resets = [_flag(name) for name in RESETS if getattr(args, name)]
    if resets:
        raise ValueError(f"--finetune-from-model resets everything but the weights; leave out {', '.join(resets)}")
    if not PathManager.exists(os.path.join(args.save_dir, LAST)) and not PathManager.isfile(start):
        raise ValueError(f"--finetune-from-model {start} does not exist")


def _checking(original: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    @functools.wraps(original)
    def parse_args_and_arch(
        parser: argparse.ArgumentParser, input_args: list[str] | None = None, *args: object, **kwargs: object
    ) -> argparse.Namespace:
        words = sys.argv[1:] if input_args is None else input_args
        try:
            parsed = original(parser, input_args, *args, **kwargs)
        except RuntimeError as error:
            if str(error):
                raise
            raise ValueError(  # fairseq's error has no text
                "--arch is missing; pass one, such as --arch mlsm_modern_small, or --arch denoising_small for --task "
                "span_denoising"
            ) from error
        # with input_args, other code, such as `mlsm convert`, parses options that it has made
        if input_args is None and hasattr(parsed, "max_update") and _is_from_plugin(parsed.task):
            check_options(parsed, words)
        return parsed

    parse_args_and_arch.checks_options = True  # type: ignore[attr-defined]
    return parse_args_and_arch


def _naming_splits(original: Callable[[FairseqConfig], None]) -> Callable[[FairseqConfig], None]:
    @functools.wraps(original)
    def raise_if_ignored(cfg: FairseqConfig) -> None:
        try:
            original(cfg)
        except OSError as error:
            raise ValueError(f"the binarized dataset {error.filename} does not exist") from error
        except ValueError as error:
            subsets = cfg.dataset.valid_subset.split(",")
            if unused := sorted(data_utils._find_extra_valid_paths(cfg.task.data) - set(subsets)):
                every_subset = ",".join([*subsets, *unused])
                raise ValueError(
                    f"{cfg.task.data} also has {', '.join(unused)}; pass --valid-subset {every_subset} to validate on "
                    "each, --combine-valid-subsets on all as one, or --ignore-unused-valid-subsets"
                ) from error

    return raise_if_ignored


def _naming_option(original: Callable[..., Built], flag: str) -> Callable[..., Built]:
    @functools.wraps(original)
    def build(cfg: FairseqDataclass, *args: object, **kwargs: object) -> Built:
        try:
            return original(cfg, *args, **kwargs)
        except (AssertionError, ImportError, NotImplementedError, SyntaxError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split()) or "one of its options is out of range"
            name = registered_name(cfg) or getattr(cfg, flag[2:].replace("-", "_"), "")
            raise ValueError(f"{flag} {name}: {reason}") from error

    return build


def _is_from_plugin(task: str) -> bool:
    """Whether a task, perhaps of a user's plugin, inherits from a task of this package."""
    return any(base.__module__.partition(".")[0] == PACKAGE for base in TASK_REGISTRY[task].__mro__)


def _numbers(value: object) -> list[float]:
    """The numbers in the value of an option, which may be a list, text, or unset."""
    numbers = []
    for part in value if isinstance(value, (list, tuple)) else [value]:
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):  # fairseq cannot read it either
            number = ast.literal_eval(part) if isinstance(part, str) else part
            if isinstance(number, (int, float)):
                numbers.append(float(number))
    return numbers


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _stay_on_cpu() -> None:
    """Keep a run with ``--cpu`` off the GPU; fairseq asks ``torch.cuda.is_available()`` in many places."""
    if is_fairseq_command() and "--cpu" in sys.argv:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fairseq would keep random states on GPUs, and start more processes
    fairseq_utils.clip_grad_norm_ = _together(fairseq_utils.clip_grad_norm_)
    distributed_utils.call_main = _checking_device(distributed_utils.call_main)  # before any data are loaded


def _together(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compute the norm of all gradients in a few kernels on their device; fairseq moves it to the current GPU."""

    @functools.wraps(original)
    def clip_grad_norm_(
        params: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        aggregate_norm_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        gradients = [(p, p.grad.detach()) for p in params if p is not None and p.grad is not None]
        grads = [grad for p, grad in gradients if not hasattr(p, "expert")]  # as in fairseq: without experts
        if len(grads) < 2 or len({grad.device for grad in grads}) > 1:
            return original(params, max_norm, aggregate_norm_fn)
        norm = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).norm()
        if aggregate_norm_fn is not None:
            norm = aggregate_norm_fn(norm)
        if max_norm > 0:
            torch._foreach_mul_([grad for _, grad in gradients], (max_norm / (norm + 1e-6)).clamp_(max=1))
        return norm

    return clip_grad_norm_


def _checking_device(original: Callable[..., Built]) -> Callable[..., Built]:
    @functools.wraps(original)
    def call_main(cfg: FairseqConfig, main: Callable[..., Built], **kwargs: object) -> Built:
        if getattr(cfg, "optimizer", None) is not None:  # fairseq-validate has none
            check_precision(cfg.common)
        check_number_of_processes(cfg.distributed_training)
        return original(cfg, main, **kwargs)

    return call_main


def check_precision(common: CommonConfig) -> None:
    """Raise ValueError if the device of a run cannot train in the precision that its options ``common`` set."""
    instead = "leave it out, or pass --autocast bf16 in its place (in the tasks of mlsm_plugin)"
    if common.bf16 and common.tpu and fairseq_utils.xm is None:  # the flag turns on --tpu; Hydra's common.bf16 does not
        raise ValueError(f"fairseq's --bf16 trains on a TPU, with torch_xla; {instead}")
    on_cpu = common.cpu or not torch.cuda.is_available()
    if common.fp16 and on_cpu and not (common.memory_efficient_fp16 or common.fp16_no_flatten_grads):
        raise ValueError(f"--fp16 trains on a GPU, and this run is on the CPU; {instead}")


def check_number_of_processes(distributed: DistributedTrainingConfig) -> None:
    """Raise ValueError if fairseq cannot start the processes of a run: it starts one for each GPU of this machine.

    In a Slurm job, srun starts them, also without GPUs.
    """
    processes = distributed.distributed_world_size
    gpus = torch.cuda.device_count()
    if processes == 1 or distributed.tpu or distributed.distributed_init_method is not None:
        return
    if any(name in os.environ for name in SLURM_NODES):
        return
    if gpus == 0:
        raise ValueError(
            f"--distributed-world-size is {processes}, and there is no GPU; start each process yourself, with "
            "--distributed-init-method tcp://HOST:PORT, --distributed-rank, --distributed-no-spawn and "
            "--distributed-backend gloo"
        )
    launched = distributed.distributed_port > 0 or "MASTER_ADDR" in os.environ  # by torchrun
    if processes > gpus and not launched:
        raise ValueError(
            f"--distributed-world-size is {processes}, and there are {gpus} GPUs; pass {gpus}, or start the run with "
            "torchrun or srun"
        )


def learns_vectors(cfg: FairseqConfig) -> bool:
    """Whether a model with this whole configuration learned vectors of texts, the means of its last hidden states."""
    return registered_name(cfg.task) == "sentence_vectors"


def why_untrained(cfg: FairseqConfig) -> str | None:
    """Why a model with this whole configuration has no trained masked-LM head; None if it has one."""
    task = registered_name(cfg.task)
    why = None
    if getattr(cfg.criterion, "mlm_weight", None) == 0:
        why = "--mlm-weight was 0"
    elif task == "nonparametric_masked_lm" or learns_vectors(cfg):
        why = f"--task {task} has no loss on it"
    if why is not None:
        return f"the masked-LM head of this model was not trained ({why})"
    if task in ("span_denoising", "sentence_prediction"):
        return f"a model of --task {task} is not a masked LM"
    return None
