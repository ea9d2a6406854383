"""The options of fairseq's models as flags of ``fairseq-train``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from typing import Any

# options of RoBERTa that say how it is trained and loaded, not what it is
TRAINING_OPTIONS = frozenset(
    {"dropout", "attention_dropout", "activation_dropout", "pooler_dropout", "load_checkpoint_heads",
     "min_params_to_wrap"}
)  # fmt: skip


def flags_of(add_args: Callable[[argparse.ArgumentParser], Any], cfg: Any, *, without: Collection[str]) -> list[str]:
    """The flags that give options of a model the values in ``cfg``; those with their default are left out.

    Args:
        add_args: of the model's class; what it adds to a parser says which options there are.
        cfg: the model's configuration.
        without: names of options to leave out.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_args(parser)
    flags = []
    for action in parser._actions:
        value = getattr(cfg, action.dest, None)
        if action.dest in without or value is None or value is False or value in ("", action.default):
            continue
        flags.append(action.option_strings[0])
        if action.nargs != 0:
            flags.append(str(value))
    return flags
