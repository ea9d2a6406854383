"""``mlsm doctor``: list the installed versions, and a fix for each that does not work."""

from __future__ import annotations

import argparse

from mlsm_plugin.fairseq_seams.installation import (
    CONSEQUENCES,
    INSTALL,
    WITHOUT_FAIRSEQ,
    Finding,
    check_extras,
    check_installation,
    first_problem,
    lane,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``mlsm doctor`` has no options."""


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Print the table; returns 1 if something is wrong."""
    by_component = {finding.component: finding for finding in check_installation()}
    good = not any(finding.problem for finding in by_component.values())
    by_component.update({finding.component: finding for finding in check_extras()})
    if good:
        by_component.update({finding.component: finding for finding in _check_imports()})
    for finding in by_component.values():
        mark = "BAD" if finding.problem else "--" if finding.note else "ok"
        remark = finding.problem or finding.note or ""
        print(f"{mark:>4}  {finding.component:<15} {finding.version:<18} {remark}".rstrip())
    if first_problem() and first_problem(without_fairseq=True) is None:
        print(f"what needs no fairseq works: {', '.join(f'mlsm {name}' for name in WITHOUT_FAIRSEQ)}")
    bad = sum(finding.problem is not None for finding in by_component.values())
    print(f"{lane()}: {'everything is fine' if not bad else f'{bad} to fix'}")
    return int(bad > 0)


def _check_imports() -> list[Finding]:
    """Check what only an import can show: compiled extensions and devices."""
    import torch

    from mlsm_plugin.fairseq_seams.compiled_parts import import_compiled_parts

    findings = []
    try:
        import_compiled_parts()
        findings.append(Finding("fairseq C code", "compiled"))
    except ImportError as error:
        fix = f"fix: {INSTALL} --force-reinstall --no-deps fairseq-fixed"
        findings.append(Finding("fairseq C code", "missing", f"{error}; {fix}"))
    try:
        import numba  # noqa: F401
    except ImportError as error:
        consequence = f"{CONSEQUENCES['numba']}; fix: {INSTALL} --force-reinstall numba"
        findings.append(Finding("numba", "unusable", f"{error}; {consequence}"))
    if torch.cuda.is_available():
        findings.append(Finding("device", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"))
    else:
        findings.append(Finding("device", f"CPU, {torch.get_num_threads()} threads"))
    return [*findings, _bf16_finding()]


def _bf16_finding() -> Finding:
    """Whether ``--autocast auto`` chooses bfloat16 on the device that training uses."""
    from mlsm_plugin.hidden_states.devices import bf16_instructions, default_device, has_fast_bf16

    device = default_device()
    if not has_fast_bf16(device):
        return Finding("bfloat16", "not fast", note="--autocast auto trains in float32")
    return Finding("bfloat16", f"fast: {bf16_instructions()[0]}" if device.type == "cpu" else "fast")
