"""The device on which models run by default, and whether it is fast in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mlsm_plugin.core.machine import devices
from mlsm_plugin.core.machine.devices import bf16_instructions, default_device, half_products, has_fast_bf16, placed


def test_the_device_that_is_asked_for_or_the_gpu_if_there_is_one() -> None:
    for device in ("nonsense", "meta", "cuda:99"):
        with pytest.raises(ValueError, match=f"device {device} is not on this machine, which has cpu"):
            default_device(device)
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert default_device().type == default_device(None).type == default_device("").type == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nflags : fpu avx512_bf16 amx_bf16 amx_tile\n", ("amx_bf16", "avx512_bf16")),
        ("flags : fpu avx512_bf16\n", ("avx512_bf16",)),
        ("flags : fpu avx512f avx512_bf16x\n", ()),
        ("Features : fp asimd\n", ()),
        (None, ()),
    ],
)
def test_processor_says_what_it_is_fast_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: tuple[str, ...]
) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(devices, "PROCESSORS", file)
    bf16_instructions.cache_clear()
    try:
        assert bf16_instructions() == expected
        assert has_fast_bf16(torch.device("cpu")) == bool(expected)
        assert not has_fast_bf16(torch.device("meta"))
    finally:
        monkeypatch.undo()
        bf16_instructions.cache_clear()


@pytest.mark.parametrize(("capability", "fast"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_are_fast_in_it_from_ampere_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fast: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_fast_bf16(torch.device("cuda")) == fast


def test_half_precision_is_bfloat16_products_on_a_cpu() -> None:
    cpu, model = torch.device("cpu"), torch.nn.Linear(3, 2)
    assert placed(model.half(), cpu, half=True).weight.dtype == torch.float32
    for half, expected in ((True, torch.bfloat16), (False, torch.float32)):
        with half_products(cpu, half=half):
            assert model(torch.zeros(1, 3)).dtype == expected
    meta = torch.device("meta")
    assert placed(torch.nn.Linear(3, 2), meta, half=True).weight.dtype == torch.float16
    assert placed(torch.nn.Linear(3, 2), meta, half=False).weight.dtype == torch.float32


@pytest.mark.parametrize("fast", [True, False])
def test_half_precision_on_a_cpu_that_is_slow_in_it_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fast: bool
) -> None:
    monkeypatch.setattr(devices, "has_fast_bf16", lambda device: fast)
    for half in (True, False, None):
        placed(torch.nn.Linear(3, 2), torch.device("cpu"), half=half)
    warning = "this CPU has no bfloat16 instructions, so half precision slows it down; leave --fp16 out"
    assert caplog.messages == ([] if fast else [warning])
