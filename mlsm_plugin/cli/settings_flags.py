"""The command line of settings: flags from the fields of a dataclass, and the dataclass from what was given."""

import argparse
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlsm_plugin.core.files.settings import flag_of, options_of, plain_type

if TYPE_CHECKING:
    from mlsm_plugin.core.sparse_coding.coder import SparseCoder

Parser = Any  # a parser, or a group of one
PREFIX = "coder_option_"


@dataclasses.dataclass(frozen=True)
class Depends:
    """A default that is known later; the option is left out of what was given if the command line does not say it."""

    on: Any


def add_settings(
    parser: Parser,
    cls: type,
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add the flags of a dataclass, whose fields without a help are no flags.

    All are added, ``only`` those that are named, or all ``without`` those; ``defaults`` are this command's own.
    """
    declared = typing.get_type_hints(cls)
    for name, field in options_of(cls).items():
        if (not only or name in only) and name not in without:
            default = (defaults or {}).get(name, _default_of(field))
            _add_flag(parser, name, field, declared[name], default)


def settings_of(cls: Any, args: argparse.Namespace, **more: Any) -> Any:
    """The dataclass with the values of the command line; a field that it lacks keeps its default.

    ``more`` has values of fields that are no flags, or that override those of the command line. ValueError as of the
    dataclass, with the names of flags.
    """
    given = {name: getattr(args, name) for name in options_of(cls) if hasattr(args, name)}
    try:
        return cls(**{**given, **more})
    except ValueError as error:
        raise ValueError(with_flags(str(error), cls)) from None


def with_flags(message: str, *classes: type) -> str:
    """A message that begins with the name of a field, with its flag in that place."""
    name, _, rest = message.partition(" ")
    for field in (options_of(cls).get(name) for cls in classes):
        if field is not None:
            return f"{flag_of(field)} {rest}"
    return message


def refuse_changed(args: argparse.Namespace, usual: Mapping[str, Any], why: str) -> None:
    """Raise ValueError, with ``why``, for options of the command line that have other values than the ``usual``."""
    changed = [name for name, value in usual.items() if getattr(args, name, value) != value]
    if changed:
        raise ValueError(f"{', '.join('--' + name.strip('_').replace('_', '-') for name in changed)}: {why}")


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def add_coder_flags(parser: Parser) -> None:
    """Add a group of flags for each kind of coder; a flag that several kinds share is listed once."""
    from mlsm_plugin.core.sparse_coding.coder import coder_kinds

    seen: set[str] = set()
    for kind, coder in coder_kinds().items():
        group = parser.add_argument_group(f"options of the {kind} coder")
        declared = typing.get_type_hints(coder.options_type)
        for name, field in options_of(coder.options_type).items():
            if name not in seen:
                seen.add(name)
                # set only if it is given, so that a kind of coder without this option does not receive its default
                _add_flag(group, PREFIX + name, field, declared[name], Depends(field.default))


def given_coder_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of :func:`add_coder_flags` that the command line gives."""
    return {name.removeprefix(PREFIX): value for name, value in vars(args).items() if name.startswith(PREFIX)}


def coder_of(args: argparse.Namespace) -> "SparseCoder":
    """The coder in the folder ``args.dictionary``, with the options of the command line; errors name their flags."""
    from mlsm_plugin.core.sparse_coding.coder import coder_kinds, load_coder

    try:
        return load_coder(args.dictionary, **given_coder_options(args))
    except ValueError as error:
        raise ValueError(with_flags(str(error), *(kind.options_type for kind in coder_kinds().values()))) from None


def _add_flag(parser: Parser, dest: str, field: dataclasses.Field[Any], declared: Any, default: Any) -> None:
    one, several = plain_type(declared)
    text = str(field.metadata["help"])
    shown = default.on if isinstance(default, Depends) else None
    if shown is not None and not isinstance(shown, bool):
        text = f"{text} (default: {shown})"
    keywords: dict[str, Any] = {"dest": dest, "help": text}
    if default is dataclasses.MISSING:
        keywords["required"] = True
    else:
        keywords["default"] = argparse.SUPPRESS if isinstance(default, Depends) else default
    if one is bool:
        action = argparse.BooleanOptionalAction if shown is not None else "store_true"
        parser.add_argument(flag_of(field), action=action, **keywords)
        return
    if several:
        keywords["nargs"] = "+"
    if field.metadata.get("choices"):
        keywords["choices"] = field.metadata["choices"]
    else:
        usual = "N" if one is int else "X" if one is float else field.name.strip("_").upper()
        keywords["metavar"] = field.metadata.get("metavar") or usual
    parser.add_argument(flag_of(field), type=one, **keywords)
