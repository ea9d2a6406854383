"""``--user-dir``: the folder of a user's plugin, whose import registers coders, sources or objectives."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

HELP = "folder of your own plugin; its import registers coders, sources of hidden states or objectives"


def user_dir_of(arguments: Sequence[str]) -> str | None:
    """The value of ``--user-dir`` or None; it is read before the parser is built, as a plugin adds flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--user-dir")
    try:
        args, _ = parser.parse_known_args(list(arguments))
    except SystemExit:  # the flag has no value; the real parser reports it
        return None
    return args.user_dir


def import_plugin(folder: str) -> None:
    """Import the package in ``folder`` as fairseq does; ValueError if it does not exist or its import fails."""
    try:
        from fairseq.utils import import_user_module
    except ImportError:
        import_user_module = _import_user_module

    if os.path.isdir(folder) and not os.path.isfile(os.path.join(folder, "__init__.py")):
        raise ValueError(f"--user-dir {folder} is not a Python package: it has no __init__.py")
    try:
        import_user_module(argparse.Namespace(user_dir=folder))
    except FileNotFoundError:
        raise ValueError(f"--user-dir {folder} does not exist") from None
    except Exception as error:  # the user's code can raise anything
        raise ValueError(f"--user-dir {folder} cannot be imported: {type(error).__name__}: {error}") from error


def _import_user_module(args: argparse.Namespace) -> None:
    """Replaces fairseq's function of this name if fairseq is not installed."""
    parent, name = os.path.split(os.path.abspath(args.user_dir))
    if not os.path.isdir(args.user_dir):
        raise FileNotFoundError(args.user_dir)
    if name not in sys.modules:
        sys.path.insert(0, parent)
        importlib.import_module(name)
