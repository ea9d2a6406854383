"""Whether work is already done: one mechanism for everything that takes long and may be interrupted.

A plan holds everything that decides the result, as values that JSON can hold. The plan is written first
(``plan.json``) and the seal last (``meta.json``, or another file); a folder without its seal is incomplete. A run with
the same plan resumes, or finds the work complete. A run with another plan is refused, with an error that names the
differences and what to do.

A folder that has only a seal (``plan_file=None``) cannot be resumed: it is complete, or it is made again.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlsm_plugin.core.files.atomic_files import PathLike, parse_json, read_json, remove_leftovers, write_json
from mlsm_plugin.core.files.json_checks import check_json, fields

PLAN_FILE = "plan.json"
META_FILE = "meta.json"
RESTORE = "restore it, or begin in an empty folder"
START_ANEW = "Delete the folder to start anew, or pass the settings that it was begun with"
SHOWN_VALUES = 6  # longer lists are shown by their length and their ends
SHOWN_DIFFERENCES = 4


def differences(found: Any, wanted: Any) -> list[str]:
    """The differences between the plan that was found and the one that is wanted; a key that is missing is None.

    Keys of ``meta`` are shown without this prefix, as users know them.
    """
    pairs = {_name(keys): values for keys, *values in _differing(found, wanted)}
    return [f"{name} is {shorten(there)} there and {shorten(now)} now" for name, (there, now) in sorted(pairs.items())]


def shorten(value: Any) -> str:
    """``value`` for an error message; a long list shows its length and ends."""
    if isinstance(value, list) and len(value) > SHOWN_VALUES:
        return f"[{', '.join(map(repr, value[:3]))}, ..., {value[-1]!r}] ({len(value)} values)"
    return repr(value)


def _differing(found: Any, wanted: Any, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """(keys, value found, value wanted) of each difference; for two long lists of equal length, only the first."""
    if isinstance(found, dict) and wanted is None:
        wanted = {}
    if isinstance(wanted, dict) and found is None:
        found = {}
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in {**found, **wanted}:
            yield from _differing(found.get(key), wanted.get(key), (*keys, key))
    elif found != wanted:
        if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted) > SHOWN_VALUES:
            place = next(i for i, (there, now) in enumerate(zip(found, wanted, strict=True)) if there != now)
            yield from _differing(found[place], wanted[place], (*keys, place))
        else:
            yield keys, found, wanted


def _name(keys: tuple[str | int, ...]) -> str:
    keys = keys[1:] if len(keys) > 1 and keys[0] == "meta" else keys
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".") or "the plan"


class PlannedFolder:
    """A folder that is filled according to a plan. Constructing this object writes nothing.

    Without a ``plan_file``, only the seal holds the plan, among other things. ``advice`` is what the error message says
    to do about another plan.
    """

    def __init__(
        self,
        directory: PathLike,
        plan: dict[str, Any],
        *,
        plan_file: str | None = PLAN_FILE,
        seal_file: str = META_FILE,
        advice: str = START_ANEW,
    ) -> None:
        self.directory = Path(directory)
        self.plan: dict[str, Any] = json.loads(json.dumps(plan))
        self._plan_path = None if plan_file is None else self.directory / plan_file
        self.seal_path = self.directory / seal_file
        self._advice = advice

    @property
    def is_sealed(self) -> bool:
        """Whether the seal exists; files may have been damaged since it was written."""
        return self.seal_path.is_file()

    @property
    def found(self) -> dict[str, Any] | None:
        """The plan that the folder was begun with; None: it was not begun. ValueError names a damaged or lost file."""
        if self._plan_path is not None:
            plan = _read_if_there(self._plan_path)
            if plan is None and self.is_sealed:
                raise ValueError(f"{self._plan_path} is missing; {RESTORE}")
            return plan
        sealed = _read_if_there(self.seal_path)
        return None if sealed is None else {key: sealed.get(key) for key in self.plan}

    def differences(self) -> list[str]:
        """How the plan that the folder was begun with differs from this one; empty where it was not begun."""
        return [] if (found := self.found) is None else differences(found, self.plan)

    def is_complete(self) -> bool:
        """Whether the work is done with this plan; raises as :meth:`check`."""
        self.check()
        return self.is_sealed

    def check(self) -> None:
        """Raise ValueError if the folder was begun with another plan; it names the differences, and what to do."""
        if named := self.differences():
            shown = named[:SHOWN_DIFFERENCES]
            if len(named) > len(shown):
                shown.append(f"and {len(named) - len(shown)} more differences")
            raise ValueError(f"{self.directory} was begun with other settings: {'; '.join(shown)}. {self._advice}")

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
        """Remove the seal: a folder must not look complete while a part of it is replaced."""
        self.seal_path.unlink(missing_ok=True)

    def seal(self, content: dict[str, Any]) -> None:
        """Remove the leftovers of interrupted runs, and write the seal; several processes may do so at once."""
        remove_leftovers(self.directory)
        write_json(self.seal_path, content)

    def sealed_content(self) -> dict[str, Any]:
        """The content of the seal, which exists; ValueError if it is damaged."""
        content: dict[str, Any] = check_json(read_json(self.seal_path), fields(), self.seal_path)
        return content


def _read_if_there(path: Path) -> dict[str, Any] | None:
    """A plan or a seal. Deleting a damaged one would not help: nothing else says what the folder holds."""
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {RESTORE}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a dictionary; {RESTORE}")
    return content
