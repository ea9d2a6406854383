"""A record of the finished steps of a chain, so that a repeated run does only the rest."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import read_json, sha256_of_files, write_json
from mlsm_plugin.core.files.json_checks import JsonObject, check_json, fields, number, text, values
from mlsm_plugin.core.files.planned_folder import differences

STEPS = values(fields({"signature": fields()}, {"seconds": number, "outputs": values(fields({"sha256": text}))}))


@dataclass(frozen=True)
class Step:
    """One step of a chain."""

    name: str  # unique in the chain
    run: Callable[[], object]  # makes the outputs; it raises where it fails
    settings: JsonObject  # decide the result, as values that JSON can hold; if they change, the step runs again
    inputs: Sequence[Path]  # files whose contents, each for itself, decide the result
    outputs: Sequence[Path]  # files and folders that the step makes; renamed to *.old before it runs on other inputs
    checked: Sequence[Path] | None = None  # the outputs whose contents must stay; None: all


@dataclass
class StepRecord:
    """The finished steps of a folder, kept in its ``steps.json``.

    The plan of a step is its settings, the contents of its inputs and all steps before it. A step is current when its
    last run had the same plan and was complete, and its outputs are what it made. An interrupted step with the same
    plan runs again, and resumes if it can. A step with another plan, or with other outputs, is not refused:
    its outputs are renamed, and it starts from the beginning.
    """

    path: Path
    rows: list[tuple[str, str, float, int, Path]] = field(default_factory=list)
    _before: str = ""

    def run(self, step: Step) -> None:
        """Run the step unless it is current; ValueError if the record is damaged."""
        steps: JsonObject = check_json(read_json(self.path), STEPS, self.path) if self.path.exists() else {}
        known = steps.get(step.name, {})
        inputs = [sha256_of_files(path) for path in step.inputs]
        plan = json.loads(json.dumps({"settings": step.settings, "inputs": inputs, "after": self._before}))
        same = "signature" in known and not differences(known["signature"], plan)
        complete = same and bool(known.get("done")) and all(output.exists() for output in step.outputs)
        checked = step.outputs if step.checked is None else step.checked
        if complete and (changed := changed_file(known.get("outputs", {}))):
            print(f"{changed} is not what the step {step.name} made; the step runs again", flush=True)
            same = complete = False
        self._before = hashlib.sha256(json.dumps([step.name, plan]).encode()).hexdigest()
        if complete:
            self.rows.append((step.name, "current", known["seconds"], _size(step.outputs), step.outputs[0]))
            return
        if not same:
            for output in step.outputs:
                _set_aside(output)
        # invalidate later steps: they used the old result of this one
        steps = {name: steps[name] for name, *_ in self.rows}
        steps[step.name] = {"signature": plan, "done": False}
        write_json(self.path, steps)
        start = time.perf_counter()
        print(f"\n{step.name}:", flush=True)
        step.run()
        seconds = time.perf_counter() - start
        fingerprints = fingerprints_of(checked)
        steps[step.name] = {"signature": plan, "done": True, "seconds": round(seconds, 1), "outputs": fingerprints}
        write_json(self.path, steps)
        self.rows.append((step.name, "done", seconds, _size(step.outputs), step.outputs[0]))

    def table(self) -> str:
        """A table of the steps with state, time, size and path."""
        lines = [f"{'step':<12}{'state':<9}{'time':>9}{'size':>12}  path"]
        for name, state, seconds, size, path in self.rows:
            lines.append(f"{name:<12}{state:<9}{seconds:>7.1f} s{size / 1e6:>9.1f} MB  {path}")
        return "\n".join(lines)


def _size(outputs: Sequence[Path]) -> int:
    files = [file for output in outputs for file in ([output] if output.is_file() else output.rglob("*"))]
    return sum(file.stat().st_size for file in files if file.is_file())


def fingerprints_of(paths: Iterable[Path]) -> dict[str, JsonObject]:
    """Size, time of change (ns) and SHA-256 of each file that exists, by its path; also of those below folders.

    Hidden files do not count.
    """
    fingerprints = {}
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and not file.name.startswith("."):
                status = file.stat()
                content = sha256_of_files(file)
                fingerprints[str(file)] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": content}
    return fingerprints


def changed_file(recorded: Mapping[str, JsonObject]) -> str | None:
    """The first recorded file that is missing or has changed; a file with the same size and time is not read."""
    for path, fingerprint in recorded.items():
        if not os.path.isfile(path):
            return path
        status = os.stat(path)
        same = (fingerprint.get("size"), fingerprint.get("mtime_ns")) == (status.st_size, status.st_mtime_ns)
        if not same and sha256_of_files(path) != fingerprint["sha256"]:
            return path
    return None


def _set_aside(path: Path) -> None:
    """Rename ``path`` to ``path.old``, or ``path.old2``, ..., so that a changed option does not destroy anything."""
    if not os.path.lexists(path):
        return
    number = 1
    while os.path.lexists(old := path.with_name(f"{path.name}.old{number if number > 1 else ''}")):
        number += 1
    os.replace(path, old)
    print(f"{path} was made with other settings or inputs, or was changed; it is now {old}", flush=True)
