"""Settings as flags of a command; two kinds of coders with options of their own, and one in common."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from mlsm_plugin.cli.settings_flags import Depends, add_coder_flags, add_settings, given_coder_options, settings_of
from mlsm_plugin.core.files.settings import check, option
from mlsm_plugin.core.sparse_coding import coder
from mlsm_plugin.core.sparse_coding.coder import NoOptions, SparseCoder


@dataclass(frozen=True)
class FirstOptions:
    """A number, a choice, and a flag of another name."""

    strength: float | None = field(default=None, metadata={"help": "weight of the first"})
    solver: str = field(default="auto", metadata={"help": "how", "choices": ("auto", "slow")})
    lambda_: float = field(default=0.5, metadata={"help": "the penalty", "flag": "--penalty", "metavar": "P"})


@dataclass(frozen=True)
class SecondOptions:
    """Whole numbers, a switch, and the solver of the first."""

    rounds_of_it: int = field(default=3, metadata={"help": "times to go"})
    rescale: bool = field(default=True, metadata={"help": "scale the codes"})
    solver: str = field(default="quick", metadata={"help": "how"})


class FirstCoder(SparseCoder):
    """A kind."""

    kind = "first"
    options_type = FirstOptions


class SecondCoder(SparseCoder):
    """Another kind."""

    kind = "second"
    options_type = SecondOptions


class PlainCoder(SparseCoder):
    """A kind without options."""

    kind = "plain"
    options_type = NoOptions


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    monkeypatch.setattr(coder, "_KINDS", {})
    for kind in (FirstCoder, PlainCoder, SecondCoder):
        coder.register_coder(kind)
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--seed", type=int, default=1)
    add_coder_flags(parser)
    return parser


def given(parser: argparse.ArgumentParser, *words: str) -> dict[str, Any]:
    return given_coder_options(parser.parse_args(words))


def test_only_given_options_are_passed_on(parser: argparse.ArgumentParser) -> None:
    assert given(parser) == given(parser, "--seed", "3") == {}
    words = ("--strength", "2", "--penalty", "0.25", "--rounds-of-it", "7", "--no-rescale", "--solver", "slow")
    expected = {"strength": 2.0, "lambda_": 0.25, "rounds_of_it": 7, "rescale": False, "solver": "slow"}
    found = given(parser, *words)
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in expected.items()
    }
    assert given(parser, "--rescale") == {"rescale": True}


@pytest.mark.parametrize("words", [("--solver", "quick"), ("--rounds-of-it", "1.5"), ("--strength", "x")])
def test_values_of_another_form_are_refused(parser: argparse.ArgumentParser, words: tuple[str, str]) -> None:
    with pytest.raises(argparse.ArgumentError, match=f"argument {words[0]}: invalid"):
        parser.parse_args(words)


def test_help_has_a_group_for_each_kind_and_says_defaults(parser: argparse.ArgumentParser) -> None:
    text = " ".join(parser.format_help().split())
    groups = re.findall(r"^options of .*\b(first|plain|second)\b.*:$", parser.format_help(), flags=re.MULTILINE)
    assert groups == ["first", "second"]  # argparse leaves out the group of a kind without options
    assert text.count("--solver {auto,slow}") == 2  # in the usage, and in the first group only
    assert "--penalty P the penalty (default: 0.5)" in text
    assert "weight of the first --" in text  # without a default
    assert "times to go (default: 3)" in text


@dataclass(frozen=True)
class Settings:
    """A number with bounds, a switch, several numbers, a choice, and a field that is no option."""

    rate: float = option(0.5, above=0, most=1, help="how fast")
    count_: int | None = option(None, least=1, flag="--number", help="how many")
    loud: bool = option(False, help="say more")
    sizes: list[int] = option([], least=2, help="how large")
    kind: str = option("a", choices=("a", "b"), help="of which kind")
    inner: int = 7

    def __post_init__(self) -> None:
        check(self)


def settings(*words: str) -> Settings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_settings(parser, Settings, defaults={"rate": Depends("the machine")})
    found: Settings = settings_of(Settings, parser.parse_args(words), inner=8)
    return found


def test_settings_are_made_from_what_was_given() -> None:
    assert settings() == Settings(inner=8)
    words = ("--rate", "1", "--number", "3", "--loud", "--sizes", "2", "5", "--kind", "b")
    assert settings(*words) == Settings(1, 3, True, [2, 5], "b", 8)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--rate", "0"), "--rate must be above 0 and at most 1, got 0"),
        (("--rate", "nan"), "--rate must be a finite number, got nan"),
        (("--number", "0"), "--number must be positive, got 0"),
        (("--sizes", "2", "1"), "--sizes must be at least 2, got 1"),
    ],
)
def test_a_command_names_the_flag_and_python_the_field(words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        settings(*words)
    with pytest.raises(ValueError, match=r"^count_ must be positive, got -1"):
        Settings(count_=-1)
    with pytest.raises(ValueError, match=r"^kind must be one of a, b, got 'c'"):
        Settings(kind="c")
