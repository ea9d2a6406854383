"""The configuration that fairseq makes of its options, without hydra composing it anew each time.

Composing takes most of a second, and depends on the choices of groups alone (task, model, optimizer, ...). It is done
once for each choice; the values of options are then set by hydra's own function, as hydra does.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import fairseq
import pytest
from fairseq.dataclass import utils
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from mlsm_plugin.fairseq_plugin.compat import checkpoint_states


def configuration_of(words: Sequence[str]) -> Any:
    """What :func:`.checkpoint_states.configuration_of` gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "initialize", lambda config_path: nullcontext())
        patch.setattr(utils, "compose", _composed)
        return checkpoint_states.configuration_of(words)


def _composed(name: str, overrides: list[str], strict: bool) -> DictConfig:
    groups = tuple(override for override in overrides if "." not in override.partition("=")[0])
    cfg = copy.deepcopy(_of_groups(name, groups))
    ConfigLoaderImpl._apply_overrides_to_config([_parsed(it) for it in overrides if it not in groups], cfg)
    OmegaConf.set_struct(cfg, strict)
    return cfg


@cache
def _of_groups(name: str, groups: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(Path(fairseq.__file__).parent / "config")):
        return compose(name, overrides=list(groups))


@cache
def _parsed(override: str) -> Override:
    return OverridesParser.create().parse_override(override)
