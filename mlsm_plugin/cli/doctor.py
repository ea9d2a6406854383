"""``mlsm doctor``: list the installed versions and problems with them."""

import argparse
import os
import platform
from collections.abc import Iterator

from mlsm_plugin.core.machine.processors import CHOICES, cores_busy_with_others, usable_cores
from mlsm_plugin.fairseq_plugin.compat.installation import (
    INSTALL,
    WITHOUT_FAIRSEQ,
    conflicts,
    fairseq_problem,
    import_compiled_parts,
    requires_fairseq,
    versions,
)

Row = tuple[str, str, str, str]  # mark, component, version, remark


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``mlsm doctor`` has no options."""


def needs_fairseq(args: argparse.Namespace) -> bool:
    """The command runs without fairseq, and reports whether fairseq works."""
    return False


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Print the table; returns 1 if something is wrong."""
    problem = fairseq_problem()
    rows = [("ok", "Python", platform.python_version(), "")]
    rows += [("ok" if version else "--", name, version or "missing", "") for name, version in versions().items()]
    if problem:
        rows.append(("BAD" if requires_fairseq() else "--", "fairseq", "", problem))
    for line in conflicts():
        name, _, reason = line.partition(" ")
        rows.append(("BAD", name, reason, ""))
    bad = sum(mark == "BAD" for mark, *_ in rows)
    if not bad:
        rows += _imported(with_fairseq=problem is None)
        bad = sum(mark == "BAD" for mark, *_ in rows)
    for mark, component, version, remark in rows:
        print(f"{mark:>4}  {component:<15} {version:<18} {remark}".rstrip())
    if problem:
        print(f"these need no fairseq: {', '.join(f'mlsm {name}' for name in WITHOUT_FAIRSEQ)}")
    print(f"{bad} to fix" if bad else "everything is fine")
    return int(bad > 0)


def _cores() -> Row:
    """The cores, how busy they are with other processes, and how long threads spin while they wait."""
    busy = cores_busy_with_others()
    waiting = " ".join(f"{name}={os.environ[name]}" for name in CHOICES if name in os.environ)
    return "ok", "cores", str(usable_cores()), f"others keep {busy:.1f} of them busy; threads wait with {waiting}"


def _imported(*, with_fairseq: bool) -> Iterator[Row]:
    """Rows that need an import: compiled extensions and devices."""
    import torch

    from mlsm_plugin.core.machine.devices import bf16_instructions, default_device, has_fast_bf16

    try:
        if with_fairseq:
            import_compiled_parts()
            yield "ok", "fairseq C code", "compiled", ""
    except ImportError as error:
        fix = f"fix: {INSTALL} --force-reinstall --no-deps fairseq-fixed"
        yield "BAD", "fairseq C code", "missing", f"{error}; {fix}"
    try:
        import numba  # noqa: F401
    except ImportError as error:
        fix = f"fix: {INSTALL} --force-reinstall numba"
        yield "BAD", "numba", "unusable", f"{error}; coding is several times slower; {fix}"
    if torch.cuda.is_available():
        yield "ok", "device", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}", ""
    else:
        yield "ok", "device", f"CPU, {torch.get_num_threads()} threads", ""
    yield _cores()
    device = default_device()
    if not has_fast_bf16(device):
        yield "--", "bfloat16", "not fast", "--autocast auto trains in float32"
    else:
        yield "ok", "bfloat16", f"fast: {bf16_instructions()[0]}" if device.type == "cpu" else "fast", ""
