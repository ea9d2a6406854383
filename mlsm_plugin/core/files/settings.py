"""Settings that are declared once, as fields of a dataclass; the command line is generated from them."""

import dataclasses
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LARGEST_SEED = 2**63 - 1
DECIDES = "decides"  # key of the metadata of a field


def option(
    default: Any = MISSING,
    *,
    help: str,
    flag: str | None = None,
    metavar: str | None = None,
    choices: Sequence[str] = (),
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    decides: bool = True,
) -> Any:
    """A field of a dataclass of settings.

    Args:
        default: a list is copied for each object; the value is required if this is missing.
        help: description for the command line and for readers of the class.
        flag: name on the command line; None: ``--`` and the name of the field.
        metavar: placeholder of the value in the help.
        choices: the values that are allowed.
        above, least, most: bounds of a number, which must be finite; the value None is always allowed.
        decides: whether the result depends on the value; False if only speed, memory, rounding or logs do.
    """
    bounds = {"above": above, "least": least, "most": most}
    metadata = {"help": help, "flag": flag, "metavar": metavar, "choices": tuple(choices), DECIDES: decides, **bounds}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def seed(help: str, *, flag: str | None = None) -> Any:
    """A field that holds a random seed."""
    return option(1, least=0, most=LARGEST_SEED, help=f"random seed {help}", flag=flag)


def options_of(cls: type) -> dict[str, Field[Any]]:
    """The fields that are options, by their names."""
    return {field.name: field for field in dataclasses.fields(cls) if "help" in field.metadata}


def undeciding(default: Any = MISSING, *, default_factory: Any = MISSING) -> Any:
    """A field that is not an option. The result does not depend on it, except through other recorded values."""
    return dataclasses.field(default=default, default_factory=default_factory, metadata={DECIDES: False})


def identity(settings: "DataclassInstance") -> dict[str, object]:
    """The values of a dataclass that decide a result, by field name, as JSON values; nested dataclasses included."""
    undecided = names_that_decide_nothing(type(settings))
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {
        name: identity(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
        for name, value in values.items()
        if name not in undecided
    }


def names_that_decide_nothing(cls: type["DataclassInstance"]) -> set[str]:
    """The names of the fields on which a result does not depend."""
    return {field.name for field in dataclasses.fields(cls) if not field.metadata.get(DECIDES, True)}


def flag_of(field: Field[Any]) -> str:
    """The flag of an option on the command line."""
    return field.metadata.get("flag") or "--" + field.name.strip("_").replace("_", "-")


def check(settings: object) -> None:
    """Raise ValueError if an option of a dataclass is not one of its choices, or out of its bounds."""
    for name, field in options_of(type(settings)).items():
        if (value := getattr(settings, name)) is None:
            continue
        if (choices := field.metadata.get("choices")) and value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        has_bounds = any(field.metadata.get(bound) is not None for bound in ("above", "least", "most"))
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if has_bounds and isinstance(number, str):
                raise ValueError(f"{name} must be a number, got the text {number!r}")
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                continue
            bounds = _violated_bounds(field, number)
            if bounds is not None:
                raise ValueError(f"{name} must be {bounds}, got {number:,}")


def plain_type(declared: Any) -> tuple[type, bool]:
    """The type of a single value, and whether there are several: ``(int, True)`` for ``list[int] | None``."""
    if isinstance(declared, types.UnionType) or typing.get_origin(declared) is typing.Union:
        declared = next(part for part in typing.get_args(declared) if part is not types.NoneType)
    if typing.get_origin(declared) in (list, tuple):
        return typing.get_args(declared)[0], True
    return (declared if declared in (int, float, bool) else str), False


def _violated_bounds(field: Field[Any], value: float) -> str | None:
    """The bounds of an option, for an error, if a value violates them; else None."""
    above = field.metadata.get("above")
    least = field.metadata.get("least")
    most = field.metadata.get("most")
    if not math.isfinite(value):
        return "a finite number"
    if (above is None or value > above) and (least is None or value >= least) and (most is None or value <= most):
        return None
    if most == LARGEST_SEED:
        return "at least 0 and below 2^63"
    if most is not None:
        return f"above {above:g} and at most {most:g}" if above is not None else f"from {least:,} to {most:,}"
    if above == 0 or least == 1:
        return "positive"
    return f"above {above:g}" if above is not None else f"at least {least:,}"
