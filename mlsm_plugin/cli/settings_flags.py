"""Settings on the command line: flags from the fields of a dataclass, and the dataclass from parsed arguments."""

import argparse
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mlsm_plugin.core.files.settings import flag_of, options_of, plain_type

if TYPE_CHECKING:
    from mlsm_plugin.core.sparse_coding.coder import SparseCoder

Settings = TypeVar("Settings")
Parser = argparse._ActionsContainer  # a parser or an argument group; argparse has no public name for both
PREFIX = "coder_option_"


@dataclasses.dataclass(frozen=True)
class Depends:
    """A default that is set later; without its flag, the parsed arguments have no attribute for the option."""

    on: object


def add_settings(
    parser: Parser,
    cls: type,
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    defaults: Mapping[str, object] | None = None,
) -> None:
    """Add a flag for each field of a dataclass that has a help text.

    ``only`` limits the fields, ``without`` leaves fields out, and ``defaults`` replaces defaults of fields.
    """
    types = typing.get_type_hints(cls)
    for name, field in options_of(cls).items():
        if (not only or name in only) and name not in without:
            default = (defaults or {}).get(name, _default_of(field))
            _add_flag(parser, name, field, types[name], default)


def settings_of(cls: type[Settings], args: argparse.Namespace, **further: object) -> Settings:
    """The dataclass with the values of the command line; a field that is not set keeps its default.

    ``further`` sets fields without a flag, or overrides values of the command line. Raises the ValueError of the
    dataclass, with flags for the names of fields.
    """
    values = {name: getattr(args, name) for name in options_of(cls) if hasattr(args, name)} | further
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(with_flags(str(error), cls)) from None


def with_flags(message: str, *classes: type) -> str:
    """The message, with the name of a field at its beginning replaced by the field's flag."""
    name, _, rest = message.partition(" ")
    for field in (options_of(cls).get(name) for cls in classes):
        if field is not None:
            return f"{flag_of(field)} {rest}"
    return message


def fill_in(args: argparse.Namespace, defaults: Mapping[str, object]) -> None:
    """Set the options with a :class:`Depends` default that the command line does not set."""
    for name, value in defaults.items():
        if not hasattr(args, name):
            setattr(args, name, value)


def refuse_changed(args: argparse.Namespace, defaults: Mapping[str, object], why: str) -> None:
    """Raise ValueError, with the reason ``why``, if options differ from their ``defaults``."""
    changed = [name for name, value in defaults.items() if getattr(args, name, value) != value]
    if changed:
        raise ValueError(f"{', '.join('--' + name.strip('_').replace('_', '-') for name in changed)}: {why}")


def _default_of(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def add_coder_flags(parser: Parser) -> None:
    """Add a group of flags for each kind of coder; a flag that several kinds share is listed once."""
    from mlsm_plugin.core.sparse_coding.coder import coder_kinds

    added: set[str] = set()
    for kind, coder in coder_kinds().items():
        group = parser.add_argument_group(f"options of the {kind} coder")
        types = typing.get_type_hints(coder.options_type)
        for name, field in options_of(coder.options_type).items():
            if name not in added:
                added.add(name)
                # unset without its flag, so that kinds of coders without this option do not get its default
                _add_flag(group, PREFIX + name, field, types[name], Depends(field.default))


def given_coder_options(args: argparse.Namespace) -> dict[str, object]:
    """The options of :func:`add_coder_flags` that the command line sets."""
    return {name.removeprefix(PREFIX): value for name, value in vars(args).items() if name.startswith(PREFIX)}


def coder_of(args: argparse.Namespace) -> "SparseCoder":
    """The coder in the folder ``args.dictionary``, with the options of the command line; errors name the flags."""
    from mlsm_plugin.core.sparse_coding.coder import coder_kinds, load_coder

    try:
        return load_coder(args.dictionary, **given_coder_options(args))
    except ValueError as error:
        raise ValueError(with_flags(str(error), *(kind.options_type for kind in coder_kinds().values()))) from None


def _add_flag(parser: Parser, dest: str, field: dataclasses.Field[Any], declared: object, default: object) -> None:
    value_type, takes_several = plain_type(declared)
    text = str(field.metadata["help"])
    shown = default.on if isinstance(default, Depends) else None
    if shown is not None and not isinstance(shown, bool):
        text = f"{text} (default: {shown})"
    required = default is dataclasses.MISSING
    if required:
        default = None
    elif isinstance(default, Depends):
        default = argparse.SUPPRESS
    if value_type is bool:
        action = argparse.BooleanOptionalAction if shown is not None else "store_true"
        parser.add_argument(flag_of(field), action=action, dest=dest, default=default, required=required, help=text)
        return
    choices = field.metadata.get("choices") or None
    parser.add_argument(
        flag_of(field),
        type=value_type,
        dest=dest,
        nargs="+" if takes_several else None,
        default=default,
        choices=choices,
        required=required,
        metavar=None if choices else _metavar(field, value_type),
        help=text,
    )


def _metavar(field: dataclasses.Field[Any], value_type: type) -> str:
    if field.metadata.get("metavar"):
        return str(field.metadata["metavar"])
    if value_type is int:
        return "N"
    return "X" if value_type is float else field.name.strip("_").upper()
