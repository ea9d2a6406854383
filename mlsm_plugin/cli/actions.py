"""Commands that have actions, such as ``mlsm npm fill``, and how help is shown."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlsm_plugin.cli.settings_flags import Parser

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default of an option to its help, unless the help already describes it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_off = action.default is None or action.default is False or action.default == []
        if is_off or "(default" in (action.help or ""):
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


def add_described(commands: "Commands", name: str, summary: str) -> argparse.ArgumentParser:
    """Add a command or an action, with one line of help, to ``commands``."""
    text = f"{summary[0].upper()}{summary[1:]}."
    return commands.add_parser(name, help=summary, description=text, formatter_class=HelpFormatter, allow_abbrev=False)


def actions_of(parser: argparse.ArgumentParser) -> Callable[..., argparse.ArgumentParser]:
    """A function that adds an action from its name, one line of help and the function to run; returns its parser."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, summary: str, run: Callable[[argparse.Namespace, list[str]], int]) -> argparse.ArgumentParser:
        action = add_described(actions, name, summary)
        action.set_defaults(run=run)
        return action

    return add


def add_push_options(parser: "Parser") -> None:
    """Add the options for pushing to the hub."""
    parser.add_argument("--dry-run", action="store_true", help="print what would be pushed, and push nothing")
    parser.add_argument("--private", action="store_true", help="create a private repository")
