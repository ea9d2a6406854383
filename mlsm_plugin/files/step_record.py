"""A record of the finished steps of a chain, so that a repeated run does only the rest."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlsm_plugin.files.atomic_files import read_json, sha256_of_files, write_json
from mlsm_plugin.files.fingerprints import fingerprints_of, first_change
from mlsm_plugin.files.json_checks import check_json, fields, number, text, values
from mlsm_plugin.files.planned_folder import Standing, standing

STEPS = values(
    fields({"signature": fields()}, {"seconds": number, "outputs": values(fields({"sha256": text}))}),
)
# options, each with a value, that say how a step computes and not what: other ones leave it up to date
NEUTRAL = ("--workers", "--threads", "--device", "--batch-tokens")
NEUTRAL_TEXT = re.compile(rf" (?:{'|'.join(NEUTRAL)}) \S+")


@dataclass(frozen=True)
class Step:
    """One command of a chain.

    Attributes:
        name: name of the step, unique in the chain.
        command: the command that the step runs; if it changes, except for :data:`NEUTRAL` options, the step runs
            again.
        inputs: files whose contents decide the result.
        outputs: files and folders that the step makes; renamed to ``*.old`` before it runs on other inputs.
        uses: further files whose contents decide the result.
        checked: the outputs whose contents must stay; None: all.
    """

    name: str
    command: Sequence[str]
    inputs: Sequence[Path]
    outputs: Sequence[Path]
    uses: Sequence[Path] = ()
    checked: Sequence[Path] | None = None


@dataclass
class StepRecord:
    """The finished steps of a folder, kept in its ``steps.json``.

    The plan of a step is its command, the contents of its inputs and all steps before it. A step is current when its
    last run had the same plan and was complete, and its outputs are what it made. An interrupted step with the same
    plan runs again, and resumes if its command can. A step with another plan, or with other outputs, is not refused:
    its outputs are renamed, and it starts from the beginning.
    """

    path: Path
    rows: list[tuple[str, str, float, int, Path]] = field(default_factory=list)
    _before: str = ""

    def run(self, step: Step, action: Callable[[Sequence[str]], int]) -> int:
        """Run ``action(step.command)`` unless the step is current; returns its exit status."""
        steps: dict[str, Any] = check_json(read_json(self.path), STEPS, self.path) if self.path.exists() else {}
        known = steps.get(step.name, {})
        signature = self._signature(step)
        found = self._standing(step, known, signature)
        self._before = f"{step.name}:{' '.join(step.command)}:{signature['inputs']}:{self._before}"
        if found is Standing.COMPLETE:
            self.rows.append((step.name, "current", known["seconds"], _size(step.outputs), step.outputs[0]))
            return 0
        if found is not Standing.BEGUN:
            for output in step.outputs:
                _set_aside(output)
        # invalidate later steps: they used the old result of this one
        steps = {name: steps[name] for name, *_ in self.rows}
        steps[step.name] = {"signature": signature, "done": False}
        write_json(self.path, steps)
        start = time.perf_counter()
        status = action(step.command)
        if status != 0:
            return status
        seconds = time.perf_counter() - start
        steps[step.name] = {
            "signature": signature,
            "done": True,
            "seconds": round(seconds, 1),
            "outputs": fingerprints_of(_checked(step)),
        }
        write_json(self.path, steps)
        self.rows.append((step.name, "done", seconds, _size(step.outputs), step.outputs[0]))
        return 0

    def _signature(self, step: Step) -> dict[str, Any]:
        signature = {
            "command": list(step.command),
            "inputs": sha256_of_files(*step.inputs),
            # lines that move from one file to the next leave the contents as they are
            "input_sizes": [path.stat().st_size for path in step.inputs],
            "after": self._before,
        }
        return {**signature, "uses": sha256_of_files(*step.uses)} if step.uses else signature

    def _standing(self, step: Step, known: dict[str, Any], signature: dict[str, Any]) -> Standing:
        """How far the step has come; with changed outputs, as with another plan."""
        recorded = known.get("signature")
        wanted = _deciding(signature)
        if recorded is not None:
            recorded = _deciding(recorded)
        done = bool(known.get("done")) and all(output.exists() for output in step.outputs)
        found = standing(recorded, wanted, sealed=done)
        if found is Standing.COMPLETE:
            made = known.get("outputs", {})
            changed = first_change(made, fingerprints_of(_checked(step), made))
            if changed is not None:
                print(f"{changed} is not what the step {step.name} made; the step runs again", flush=True)
                return Standing.OTHER
        return found

    def table(self) -> str:
        """A table of the steps with state, time, size and path."""
        lines = [f"{'step':<12}{'state':<9}{'time':>9}{'size':>12}  path"]
        for name, state, seconds, size, path in self.rows:
            lines.append(f"{name:<12}{state:<9}{seconds:>7.1f} s{size / 1e6:>9.1f} MB  {path}")
        return "\n".join(lines)


def _deciding(signature: dict[str, Any]) -> dict[str, Any]:
    """A signature without the options that do not decide the result."""
    words = signature.get("command")
    command = " ".join(map(str, words)) if isinstance(words, list) else str(words)  # a record may be damaged
    after = str(signature.get("after"))
    return {**signature, "command": NEUTRAL_TEXT.sub("", command), "after": NEUTRAL_TEXT.sub("", after)}


def _size(outputs: Sequence[Path]) -> int:
    files = [file for output in outputs for file in ([output] if output.is_file() else output.rglob("*"))]
    return sum(file.stat().st_size for file in files if file.is_file())


def _checked(step: Step) -> Sequence[Path]:
    return step.outputs if step.checked is None else step.checked


def _set_aside(path: Path) -> None:
    """Rename ``path`` to ``path.old``, or ``path.old2``, ..., so that a changed option does not destroy anything."""
    if not os.path.lexists(path):
        return
    number = 1
    while os.path.lexists(old := path.with_name(f"{path.name}.old{number if number > 1 else ''}")):
        number += 1
    os.replace(path, old)
    print(f"{path} was made with other settings or inputs, or was changed; it is now {old}", flush=True)
