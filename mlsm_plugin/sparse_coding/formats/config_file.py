"""The configuration file of another program: each of its keys must be understood, or be known not to matter.

A key that nobody asked for may change what the weights mean, so it is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlsm_plugin.files.atomic_files import parse_json
from mlsm_plugin.files.json_checks import Check, anything

LARGEST_FACT = 1000  # characters of JSON


class ConfigFile:
    """A JSON dictionary whose keys are taken one after the other.

    Args:
        path: the file, for errors.
        values: what it holds.
    """

    def __init__(self, path: str | os.PathLike[str], values: dict[str, Any]) -> None:
        self.path = Path(path)
        self._values = dict(values)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ConfigFile:
        """Read a file.

        Raises:
            ValueError: it is missing, is not JSON, or is not a dictionary.
        """
        if not os.path.isfile(path):
            raise ValueError(f"{path} does not exist, or is not a file")
        try:
            values = parse_json(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON ({error})") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} is not a dictionary of settings")
        return cls(path, values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def take(self, name: str, check: Check = anything, default: Any = ...) -> Any:
        """The value of a key, which then counts as understood.

        Args:
            name: the key.
            check: what the value must be.
            default: the value of a key that is absent; by default, the key must be there.

        Raises:
            ValueError: the key is absent, or its value is something else.
        """
        if name not in self._values:
            if default is ...:
                raise ValueError(f"{self.path} lacks {name!r}")
            return default
        value = self._values.pop(name)
        problem = check(value)
        if problem is not None:
            raise ValueError(f"{self.path}: {name}: {problem}")
        return value

    def part(self, name: str) -> ConfigFile:
        """The dictionary below a key, which is empty if the key is absent or null."""
        value = self.take(name, default=None)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{self.path}: {name}: it is not a dictionary")
        return ConfigFile(self.path, value or {})

    def facts(self, names: Iterable[str]) -> dict[str, Any]:
        """The values of some keys that are there, not null and short: what is good to know and decides nothing."""
        found = {name: self._values.pop(name, None) for name in names}
        return {name: value for name, value in found.items() if value is not None and _is_short(value)}

    def rename(self, old: str, new: str) -> None:
        """Take an older name of a key for the newer one.

        Raises:
            ValueError: both are there, with different values.
        """
        if old in self._values:
            value = self._values.pop(old)
            if self._values.setdefault(new, value) != value:
                raise ValueError(f"{self.path} has {old!r} and {new!r}, which contradict each other")

    def finish(self, known: Iterable[str] = ()) -> None:
        """Check that nothing is left but keys that are known not to matter.

        Raises:
            ValueError: a key is left (names it).
        """
        left = sorted(set(self._values) - set(known))
        if left:
            named = ", ".join(repr(name[:60]) for name in left[:4]) + (", ..." if len(left) > 4 else "")
            raise ValueError(
                f"{self.path} has settings that this program does not know ({named}); they may change the codes, so "
                "that nothing is converted"
            )


def one_of(*wanted: Any) -> Check:
    """A check: the value is one of these, and of the same type."""

    def check(value: Any) -> str | None:
        if any(value == one and type(value) is type(one) for one in wanted):
            return None
        return f"{_shown(value)} is not one of {', '.join(map(_shown, wanted))}"

    return check


def yes_or_no(value: Any) -> str | None:
    """A check: true or false."""
    return None if isinstance(value, bool) else f"{_shown(value)} is neither true nor false"


def _shown(value: Any) -> str:
    try:
        shown = json.dumps(value)
    except ValueError:
        shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}..."


def _is_short(value: Any) -> bool:
    try:
        return len(json.dumps(value, allow_nan=False)) <= LARGEST_FACT
    except (ValueError, RecursionError):
        return False
