"""A record of the finished steps of a chain, so that a repeated run does only the remaining steps."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import sha256_of_files, write_json
from mlsm_plugin.core.files.json_checks import JsonObject, check_json, fields, number, text, values
from mlsm_plugin.core.files.planned_folder import RESTORE, check_same, differences, read_record
from mlsm_plugin.core.files.process_rank import SINGLE_PROCESS, ProcessRank
from mlsm_plugin.core.files.progress import still_running

RECORD = "steps.json"
EVALUATED = "evaluated"  # key of a plan
EARLIER_FILES = ("data", "stages", "run")  # earlier versions kept these settings in data.json, stages.json, run.json
EARLIER_SECONDS = "seconds.json"
STEPS = values(
    fields(
        {"signature": fields()}, {"seconds": number, "outputs": values(fields({"sha256": text})), "figures": fields()}
    )
)


@dataclass(frozen=True)
class Step:
    """One step of a chain."""

    name: str  # unique in the chain
    run: Callable[[], object]  # makes the outputs; raises if it fails; a dictionary that it returns is recorded
    settings: JsonObject  # JSON values that decide the result; if they change, the step runs again
    inputs: Sequence[Path]  # files whose contents decide the result
    outputs: Sequence[Path]  # files and folders that the step makes; renamed to *.old before it runs on other inputs
    checked: Sequence[Path] | None = None  # outputs that must not change; None: all
    by_all: bool = False  # whether all processes run it together, such as a training; else only the first does
    editable: Sequence[Path] = ()  # checked files that may change later, such as a model card
    evaluated: Sequence[Path] = ()  # files whose contents decide only what is evaluated, not what later steps get
    of_evaluation: Sequence[Path] = ()  # the outputs that depend on ``evaluated``; no later step may depend on them


@dataclass
class StepRecord:
    """The finished steps of a folder, kept in its ``steps.json``.

    The plan of a step is its settings, the contents of its inputs, and all earlier steps. A step is current if its last
    run had the same plan and was complete, and its outputs have not changed since. An interrupted step with the same
    plan runs again, and resumes if it can. If the plan or the outputs have changed, the outputs are renamed, and the
    step starts from the beginning. If only the files to evaluate on have changed, just the outputs of the evaluation
    are renamed, the step resumes with the others, and later steps stay as they are.

    A training is not done again step by step, but resumed. The record holds the settings that it must be resumed with
    (:meth:`keep_settings`), and the seconds of its parts (:meth:`add_seconds`).

    Only the first of several processes writes the record. In the context ``first``, the others wait for it.
    """

    path: Path
    process: ProcessRank = SINGLE_PROCESS
    first: Callable[[], AbstractContextManager[object]] = nullcontext
    rows: list[tuple[str, str, float, int, Path]] = field(default_factory=list)
    _before: str = ""

    def run(self, step: Step) -> None:
        """Run the step unless it is current; ValueError if the record is damaged."""
        with self.first():
            current = self._begin(step)
            if not current and not step.by_all:
                self._carry_out(step)
        if not current and step.by_all:
            self._carry_out(step)

    def is_complete(self, steps: Sequence[Step]) -> bool:
        """Whether all steps were done with these plans, and the outputs of the last step have not changed since.

        Outputs of earlier steps may have been deleted to save space.
        """
        recorded = self._recorded()
        before = ""
        for step in steps:
            known = recorded.get(step.name, {})
            if not all(path.exists() for path in [*step.inputs, *step.evaluated]):  # an earlier step made it
                return False
            plan = self._plan(step, before)
            if not known.get("done") or differences(known["signature"], plan):
                return False
            before = _hash_of(step, plan)
        return _is_whole(steps[-1]) and self._changed_output(steps[-1], recorded[steps[-1].name]) is None

    def skip(self, steps: Sequence[Step]) -> None:
        """Take steps of which :meth:`is_complete` is true as current, although some outputs may have been deleted."""
        for step in steps:
            self._before = _hash_of(step, self._plan(step, self._before))
            self.rows.append(self._row(step, "current", self.seconds_of(step.name)))

    def keep_settings(
        self, name: str, settings: JsonObject, advice: str, *, fixed: Collection[str] | None = None
    ) -> None:
        """Record settings that a training must be resumed with.

        Only those in ``fixed`` must be the recorded ones; None: all. Settings that an earlier version did not record
        are recorded now. ValueError lists the differences and ends with the ``advice``, or says that the record is
        damaged.
        """
        settings = json.loads(json.dumps(settings))
        before = self.settings_of(name)
        if not before and name in self._recorded():
            raise ValueError(f"{self.path} is not valid: {name} has no settings; {RESTORE}")
        kept = {key: value for key, value in before.items() if fixed is None or key in fixed}
        check_same(self.path.parent, kept, {key: settings.get(key) for key in kept}, advice)
        self._write_entry(name, {"signature": {"settings": settings}})

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add seconds to those that the part of a training took before it was stopped."""
        self._write_entry(name, {"signature": {}, "seconds": round(self.seconds_of(name) + seconds, 2)})

    def invalidate(self, name: str) -> None:
        """Let a step run again, since an earlier one replaces what it wrote to."""
        steps = self._recorded()
        if self.process.rank == 0 and steps.pop(name, None) is not None:
            write_json(self.path, steps)

    def _write_entry(self, name: str, entry: JsonObject) -> None:
        if self.process.rank == 0:
            write_json(self.path, {**self._recorded(), name: entry})

    def settings_of(self, name: str) -> JsonObject:
        """The settings with which a step or a training was last begun; empty if it was never begun."""
        steps = self._recorded()
        if name in EARLIER_FILES and name not in steps:
            settings = read_record(self.path.with_name(f"{name}.json")) or {}
            return {"lambda_" if key == "lambda" else key: value for key, value in settings.items()}
        settings = steps.get(name, {}).get("signature", {}).get("settings")
        return settings if isinstance(settings, dict) else {}

    def figures_of(self, name: str) -> JsonObject:
        """The figures that a finished step returned; empty if it is not finished, or returned nothing."""
        figures: JsonObject = self._recorded().get(name, {}).get("figures", {})
        return figures

    def folders_of(self, name: str) -> set[str]:
        """The names of the folders that a finished step wrote files to; other folders may come from earlier runs."""
        outputs: JsonObject = self._recorded().get(name, {}).get("outputs", {})
        return {Path(path).parent.name for path in outputs}

    def seconds_of(self, name: str) -> float:
        """The seconds that a finished step, or the part of a training, took; 0 if there are none."""
        steps = self._recorded()
        if name in steps:
            return float(steps[name].get("seconds", 0))
        seconds = read_record(self.path.with_name(EARLIER_SECONDS)) or {}
        return float(seconds.get(name, 0))

    def _name_of(self, path: str) -> str:
        """The name of an output in the record, relative to its folder, so that the whole folder can be moved."""
        folder = self.path.parent
        return str(Path(path).relative_to(folder)) if Path(path).is_relative_to(folder) else os.path.abspath(path)

    def _outputs_of(self, entry: JsonObject) -> dict[str, JsonObject]:
        """The fingerprints of a step's outputs, by path. Earlier versions recorded paths as the user passed them."""
        paths = {}
        for name, fingerprint in entry.get("outputs", {}).items():
            path = os.path.join(self.path.parent, name)
            paths[path if os.path.lexists(path) or not os.path.lexists(name) else name] = fingerprint
        return paths

    def _changed_output(self, step: Step, entry: JsonObject) -> str | None:
        """The first output that is not what the step made."""
        editable = set(map(str, step.editable))
        outputs = self._outputs_of(entry)
        return changed_file({path: outputs[path] for path in outputs if path not in editable})

    def _recorded(self) -> JsonObject:
        return check_json(read_record(self.path) or {}, STEPS, self.path, advice=RESTORE)

    def _plan(self, step: Step, before: str) -> JsonObject:
        inputs = [sha256_of_files(path) for path in step.inputs]
        plan: JsonObject = json.loads(json.dumps({"settings": step.settings, "inputs": inputs, "after": before}))
        if step.evaluated:
            plan[EVALUATED] = [sha256_of_files(path) for path in step.evaluated]
        return plan

    def _begin(self, step: Step) -> bool:
        """Whether the step is current; if not, rename the outputs of another plan, and record the plan."""
        steps = self._recorded()
        known = steps.get(step.name, {})
        plan = self._plan(step, self._before)
        same = "signature" in known and not differences(known["signature"], plan)
        evaluates_anew = "signature" in known and not same and _differ_in_evaluation(known["signature"], plan)
        is_whole = bool(known.get("done")) and _is_whole(step)
        complete = same and is_whole
        changed = self._changed_output(step, known) if is_whole and (same or evaluates_anew) else None
        if changed:
            print(f"{changed} is not what the step {step.name} made; the step runs again", flush=True)
            same = False
            evaluates_anew = False
            complete = False
        self._before = _hash_of(step, plan)
        if complete:
            self.rows.append(self._row(step, "current", self.seconds_of(step.name)))
        elif self.process.rank == 0:
            if not same:
                for output in step.of_evaluation if evaluates_anew else step.outputs:
                    _set_aside(output)
            was_interrupted = same and not known.get("done")  # when it began, it invalidated what it had to
            if not evaluates_anew and not was_interrupted:
                # invalidate later steps, since they used the old result of this step; a training is no step
                current = {name for name, *_ in self.rows}
                steps = {name: entry for name, entry in steps.items() if name in current or "done" not in entry}
            steps[step.name] = {"signature": plan, "done": False}
            write_json(self.path, steps)
        return complete

    def _carry_out(self, step: Step) -> None:
        start = time.perf_counter()
        if self.process.rank == 0:
            print(f"\n{step.name}:", flush=True)
        try:
            with still_running(step.name):
                result = step.run()
        except ValueError:
            self._forget(step)
            raise
        seconds = time.perf_counter() - start
        if self.process.rank == 0:
            steps = self._recorded()
            made = fingerprints_of(_checked(step))
            outputs = {self._name_of(path): fingerprint for path, fingerprint in made.items()}
            entry = {**steps[step.name], "done": True, "seconds": round(seconds, 3), "outputs": outputs}
            if isinstance(result, dict):
                entry["figures"] = result
            write_json(self.path, {**steps, step.name: entry})
        self.rows.append(self._row(step, "done", seconds))

    def _forget(self, step: Step) -> None:
        """Remove a step that failed and made nothing, and the whole record if it has no other step."""
        if self.process.rank > 0 or any(output.exists() for output in step.outputs):
            return
        steps = self._recorded()
        steps.pop(step.name, None)
        if steps:
            write_json(self.path, steps)
        else:
            self.path.unlink(missing_ok=True)

    def _row(self, step: Step, state: str, seconds: float) -> tuple[str, str, float, int, Path]:
        path = step.outputs[0] if step.outputs else self.path
        return step.name, state, seconds, _size(step.outputs), path

    def table(self) -> str:
        """A table of the steps with state, time, size and path."""
        lines = [f"{'step':<12}{'state':<9}{'time':>9}{'size':>12}  path"]
        for name, state, seconds, size, path in self.rows:
            lines.append(f"{name:<12}{state:<9}{seconds:>7.1f} s{size / 1e6:>9.1f} MB  {path}")
        return "\n".join(lines)


def _hash_of(step: Step, plan: JsonObject) -> str:
    """The hash of this step and all earlier steps, without what they evaluate on, which the next step records."""
    return hashlib.sha256(json.dumps([step.name, _without_evaluation(plan)]).encode()).hexdigest()


def _without_evaluation(plan: JsonObject) -> JsonObject:
    return {name: value for name, value in plan.items() if name != EVALUATED}


def _differ_in_evaluation(recorded: JsonObject, plan: JsonObject) -> bool:
    """Whether two plans differ in nothing but the files to evaluate on."""
    return not differences(_without_evaluation(recorded), _without_evaluation(plan))


def _checked(step: Step) -> Sequence[Path]:
    return step.outputs if step.checked is None else step.checked


def _is_whole(step: Step) -> bool:
    return all(output.exists() for output in _checked(step))


def _size(outputs: Sequence[Path]) -> int:
    files = [file for output in outputs for file in ([output] if output.is_file() else output.rglob("*"))]
    return sum(file.stat().st_size for file in files if file.is_file())


def fingerprints_of(paths: Iterable[Path]) -> dict[str, JsonObject]:
    """Size, time of change (ns) and SHA-256 of each existing file, by path; folders stand for the files below them.

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
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
        return
    number = 1
    while os.path.lexists(old := path.with_name(f"{path.name}.old{number if number > 1 else ''}")):
        number += 1
    os.replace(path, old)
    print(f"{path} was made with other settings or inputs, or was changed; it is now {old}", flush=True)
