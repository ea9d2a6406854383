"""Check the types and ranges of JSON values when a file is read, before anything is built from them.

A check is a function that takes a value and returns None, or what is wrong with the value.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

JsonObject = dict[str, Any]  # a JSON object, or a configuration of JSON values
Check = Callable[[object], str | None]
LARGEST = 1 << 48  # of counts of tokens, atoms or bytes
MAKE_AGAIN = "if a step of mlsm wrote it, delete it and run that step again"


def check_json(value: object, check: Check, where: object, *, advice: str = MAKE_AGAIN) -> Any:
    """Return ``value`` if it passes ``check``.

    Otherwise raise ValueError with the file ``where``, the place in it, and the ``advice`` on what to do.
    """
    problem = check(value)
    if problem is not None:
        raise ValueError(f"{where} is not valid: {problem}; {advice}")
    return value


def whole(least: int = 0, most: int = LARGEST) -> Check:
    """A whole number from ``least`` to ``most``."""

    def check(value: object) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return None if good else f"{shown(value)} is not a whole number from {least} to {most}"

    return check


def number(value: object) -> str | None:
    """A finite number."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
    return None if good else f"{shown(value)} is not a finite number"


def text(value: object) -> str | None:
    """Text."""
    return None if isinstance(value, str) else f"{shown(value)} is not text"


def anything(value: object) -> str | None:
    """Any value."""
    return None


def optional(check: Check) -> Check:
    """null, or a value that passes ``check``."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check) -> Check:
    """A list whose items pass ``check``."""

    def check_all(value: object) -> str | None:
        if not isinstance(value, list):
            return f"{shown(value)} is not a list"
        problems = ((place, check(item)) for place, item in enumerate(value))
        return next((f"[{place}]: {problem}" for place, problem in problems if problem), None)

    return check_all


def fields(needed: Mapping[str, Check] = {}, known: Mapping[str, Check] = {}) -> Check:
    """A dictionary with the ``needed`` keys; the values of ``known`` keys are checked if they are present."""

    def check_all(value: object) -> str | None:
        if not isinstance(value, dict):
            return f"{shown(value)} is not a dictionary"
        for name, check in {**needed, **known}.items():
            if name not in value:
                if name in needed:
                    return f"{name} is missing"
                continue
            problem = check(value[name])
            if problem:
                return f"{name}: {problem}"
        return None

    return check_all


def values(check: Check) -> Check:
    """A dictionary whose values pass ``check``."""
    return lambda value: fields(dict.fromkeys(value, check) if isinstance(value, dict) else {})(value)


def shown(value: object, most: int = 40) -> str:
    """A value for an error message, cut to ``most`` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
