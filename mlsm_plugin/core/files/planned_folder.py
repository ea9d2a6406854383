"""Record whether work is done: one mechanism for all long work that may be interrupted.

A plan holds everything that decides the result, as JSON values. The plan is written first (``plan.json``) and the seal
last (``meta.json``, or another file). A folder without its seal is incomplete. A run with the same plan resumes, or
finds the work complete. A run with another plan fails with an error that lists the differences and says what to do.

A folder that has only a seal (``resumable=False``) cannot be resumed: either it is complete, or the work starts over.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike, parse_json, read_json, remove_leftovers, write_json
from mlsm_plugin.core.files.json_checks import JsonObject, check_json, fields

PLAN_FILE = "plan.json"
META_FILE = "meta.json"
RESTORE = "restore it, or begin in an empty folder"
START_ANEW = "Delete the folder to start anew, or pass the settings that it was begun with"
SHOWN_VALUES = 6  # longer lists are shown by their length and their ends
SHOWN_DIFFERENCES = 4


def differences(recorded: object, requested: object) -> list[str]:
    """The differences between a recorded and a requested plan; a missing key counts as None.

    Keys below ``meta`` are shown without this prefix, since users know them that way.
    """
    pairs = {_name(keys): (before, now) for keys, before, now in _differing(recorded, requested)}
    return [
        f"{name} is {shorten(before)} there and {shorten(now)} now" for name, (before, now) in sorted(pairs.items())
    ]


def check_same(folder: Path, recorded: object, requested: object, advice: str) -> None:
    """Raise ValueError, with the differences and the ``advice``, if a folder was begun with another plan."""
    all_differences = differences(recorded, requested)
    if all_differences:
        shown = all_differences[:SHOWN_DIFFERENCES]
        if len(all_differences) > len(shown):
            shown.append(f"and {len(all_differences) - len(shown)} more differences")
        raise ValueError(f"{folder} was begun with other settings: {'; '.join(shown)}. {advice}")


def shorten(value: object) -> str:
    """``value`` for an error message; a long list shows its length and ends."""
    if isinstance(value, list) and len(value) > SHOWN_VALUES:
        return f"[{', '.join(map(repr, value[:3]))}, ..., {value[-1]!r}] ({len(value)} values)"
    return repr(value)


def _differing(
    recorded: object, requested: object, keys: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], object, object]]:
    """(keys, recorded value, requested value) of each difference; only the first in two long lists of equal length."""
    if isinstance(recorded, dict) and requested is None:
        requested = {}
    if isinstance(requested, dict) and recorded is None:
        recorded = {}
    if isinstance(recorded, dict) and isinstance(requested, dict):
        for key in {**recorded, **requested}:
            yield from _differing(recorded.get(key), requested.get(key), (*keys, key))
    elif isinstance(recorded, list) and isinstance(requested, list) and len(recorded) == len(requested) > SHOWN_VALUES:
        for place, (before, now) in enumerate(zip(recorded, requested, strict=True)):
            if before != now:
                yield from _differing(before, now, (*keys, place))
                break
    elif recorded != requested:
        yield keys, recorded, requested


def _name(keys: tuple[str | int, ...]) -> str:
    keys = keys[1:] if len(keys) > 1 and keys[0] == "meta" else keys
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".") or "the plan"


class PlannedFolder:
    """A folder that is filled according to a plan. Constructing this object writes nothing.

    If it is not ``resumable``, the plan is part of the seal. ``advice`` is the end of the error about another plan.
    """

    def __init__(
        self,
        directory: PathLike,
        plan: JsonObject,
        *,
        resumable: bool = True,
        seal_file: str = META_FILE,
        advice: str = START_ANEW,
    ) -> None:
        self.directory = Path(directory)
        self.plan: JsonObject = json.loads(json.dumps(plan))
        self._plan_path = self.directory / PLAN_FILE if resumable else None
        self.seal_path = self.directory / seal_file
        self._advice = advice

    @property
    def is_sealed(self) -> bool:
        """Whether the seal exists; files may have been damaged since it was written."""
        return self.seal_path.is_file()

    @property
    def recorded_plan(self) -> JsonObject | None:
        """The plan that the folder was begun with, or None. ValueError names a damaged or missing file."""
        if self._plan_path is not None:
            plan = read_record(self._plan_path)
            if plan is None and self.is_sealed:
                raise ValueError(f"{self._plan_path} is missing; {RESTORE}")
            return plan
        sealed = read_record(self.seal_path)
        return None if sealed is None else {key: sealed.get(key) for key in self.plan}

    def is_complete(self) -> bool:
        """Whether the work is done with this plan; errors are those of :meth:`check`."""
        self.check()
        return self.is_sealed

    def check(self) -> None:
        """Raise ValueError, with the differences and what to do, if the folder was begun with another plan."""
        recorded = self.recorded_plan
        if recorded is not None:
            check_same(self.directory, recorded, self.plan, self._advice)

    def begin(self) -> None:
        """Create the folder and write the plan; errors are those of :meth:`check`."""
        assert self._plan_path is not None, "a folder without a plan file cannot be begun, only sealed"
        self.check()
        if not self._plan_path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            write_json(self._plan_path, self.plan, keep_existing=True)
        self.check()  # another process may have been faster

    def forget(self) -> None:
        """Remove plan and seal, so that the folder can be begun with another plan."""
        self.unseal()
        if self._plan_path is not None:
            self._plan_path.unlink(missing_ok=True)

    def unseal(self) -> None:
        """Remove the seal, since a folder must not look complete while a part of it is replaced."""
        self.seal_path.unlink(missing_ok=True)

    def seal(self, content: JsonObject) -> None:
        """Remove the leftovers of interrupted runs, and write the seal; several processes may do so at once."""
        remove_leftovers(self.directory)
        write_json(self.seal_path, content)

    def sealed_content(self) -> JsonObject:
        """The content of an existing seal; ValueError if it is damaged."""
        content: JsonObject = check_json(read_json(self.seal_path), fields(), self.seal_path)
        return content


def read_record(path: Path) -> JsonObject | None:
    """A plan, a seal or another record of a folder; None if there is none.

    An error never advises to delete it, since nothing else describes the folder.
    """
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {RESTORE}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a dictionary; {RESTORE}")
    return content
