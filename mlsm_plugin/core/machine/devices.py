"""The device on which models run, and the precision in which it is fast."""

import logging
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

# Linux's names of instructions for bfloat16 products: Intel since Sapphire Rapids, AMD since Zen 4
BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
PROCESSORS = Path("/proc/cpuinfo")  # where Linux lists the processors' features
Device = str | torch.device | None  # None: the GPU if there is one
logger = logging.getLogger(__name__)


def default_device(device: Device = None) -> torch.device:
    """``device``; if it is None or empty, the GPU if there is one, else the CPU.

    ValueError if this machine has no such device.
    """
    if not device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen).cpu()  # fails if there is no such device, or it has no memory
    except (RuntimeError, AssertionError, NotImplementedError):
        gpus = torch.cuda.device_count()
        available = f"cpu, cuda:0 to cuda:{gpus - 1}" if gpus else "cpu"
        raise ValueError(
            f"device {device} is not on this machine, which has {available}; pass one with --device"
        ) from None
    return chosen


def has_fast_bf16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are faster than in float32 on ``device``."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and bool(bf16_instructions())


Model = TypeVar("Model", bound=nn.Module)


def placed(model: Model, device: torch.device, *, half: bool | None) -> Model:
    """Move ``model`` to ``device``; in float16 if ``half``, but on a CPU always in float32.

    Warns of ``half`` on a CPU that is slow in bfloat16.
    """
    if half and device.type == "cpu" and not has_fast_bf16(device):
        logger.warning("this CPU has no bfloat16 instructions, so half precision slows it down; leave --fp16 out")
    return model.to(device=device, dtype=torch.float16 if half and device.type != "cpu" else torch.float32)


def half_products(device: torch.device, *, half: bool | None) -> torch.autocast:
    """A context with matrix products in bfloat16, if a model that :func:`placed` has moved needs it.

    It does with ``half`` on a CPU, and with ``half`` None on a device that is fast in bfloat16. Otherwise, products are
    in the precision of the weights, also within a training in bfloat16.
    """
    enabled = has_fast_bf16(device) if half is None else half and device.type == "cpu"
    kind = device.type if torch.amp.is_autocast_available(device.type) else "cpu"
    return torch.autocast(kind, torch.bfloat16, enabled=enabled)


@cache
def bf16_instructions() -> tuple[str, ...]:
    """The :data:`BF16_INSTRUCTIONS` that this CPU has; empty if Linux does not list them."""
    try:
        lines = PROCESSORS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return tuple(name for name in BF16_INSTRUCTIONS if name in flags)
