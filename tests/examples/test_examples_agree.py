"""The YAML file, the scripts and the README of an example give the same numbers.

Options are compared by name, as fairseq's own parser reads them, with its defaults for options that one side leaves
out. ``COMPARISONS`` lists the differences that are intended, with their reasons; a listed difference that no longer
exists fails too.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fairseq import options
from omegaconf import OmegaConf

import mlsm_plugin  # noqa: F401  (registers)
from tests.conftest import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
NAMES = ("mlsm", "taco", "npm", "denoising")

# where files are, and how a machine runs the training: no hyper-parameters
PLACES = {"data", "save_dir", "user_dir", "restore_file", "finetune_from_model", "num_workers", "reset_logging"}
SIZE_AND_LENGTH = {
    *("arch", "encoder_layers", "encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_attention_heads"),
    *("max_positions", "tokens_per_sample", "batch_size", "required_batch_size_multiple", "update_freq"),
    *("max_update", "total_num_update", "warmup_updates", "log_interval", "save_interval_updates"),
}
# options that only one optimizer or schedule has
OF_THE_OPTIMIZER = {
    *("adam_betas", "adam_eps", "adafactor_eps", "clip_threshold", "decay_rate", "beta1", "scale_parameter"),
    *("relative_step", "warmup_init", "warmup_init_lr"),
}

FASTER = "a short run learns more with a higher learning rate"
NO_OVERFITTING = "a short run cannot overfit"
SHORT_MEMORY = "averages over 1,000 updates are too long for a short run; as `mlsm auxiliary` has it"
SHORT_RUN = {"lr": FASTER, "adam_betas": SHORT_MEMORY, "adam_eps": SHORT_MEMORY}
NO_DROPOUT = {"dropout": NO_OVERFITTING, "attention_dropout": NO_OVERFITTING}
FILLS_MASKS = {"mlm_weight": "it fills masks at the end"}


@dataclass(frozen=True)
class Comparison:
    """Two places that give the options of one training.

    Attributes:
        example: folder in ``examples``.
        left: ``README: FOLDER`` is the README's command with ``--save-dir FOLDER``; otherwise the name of a script.
        right: the same, or the name of the YAML file.
        ignored: options that are not compared.
        on_purpose: for each option that differs on purpose, why.
    """

    example: str
    left: str
    right: str
    ignored: set[str] = field(default_factory=set)
    on_purpose: dict[str, str] = field(default_factory=dict)


COMPARISONS = [
    Comparison("mlsm", "pretrain.sh", "mlsm.yaml"),
    Comparison(
        "mlsm",
        "demo.py",
        "mlsm.yaml",
        SIZE_AND_LENGTH | {"keep_interval_updates"},
        {
            **SHORT_RUN,
            **NO_DROPOUT,
            **FILLS_MASKS,
            "optimizer": "Muon learns more per update",
            "mask_prob": "a run learns more if it masks more at first",
            "mask_prob_end": "a run learns more if it masks more at first",
            "sample_break_mode": "full blocks take less time",
            "skip_invalid_size_inputs_valid_test": "as `mlsm auxiliary` has it",
        },
    ),
    Comparison("taco", "README: model", "taco.yaml"),
    Comparison("taco", "quick.sh", "taco.yaml", SIZE_AND_LENGTH, SHORT_RUN),
    Comparison(
        "npm",
        "quick.sh",
        "npm.yaml",
        SIZE_AND_LENGTH,
        {**SHORT_RUN, **NO_DROPOUT, "clip_norm": "as in the other short runs"},
    ),
    Comparison(
        "npm",
        "README: model",
        "quick.sh",
        {"log_format", "log_interval", "no_epoch_checkpoints", "save_interval_updates", "keep_interval_updates"},
    ),
    Comparison(
        "denoising",
        "quick.sh",
        "denoising.yaml",
        SIZE_AND_LENGTH | OF_THE_OPTIMIZER,
        {
            "optimizer": "Adam learns faster in a short run",
            "lr_scheduler": "the published schedule is constant for 10,000 updates",
            "lr": "of another optimizer",
            "clip_norm": "Adafactor clips by itself, Adam does not",
        },
    ),
    Comparison(
        "denoising",
        "README: model",
        "denoising.yaml",
        {"log_format", "no_epoch_checkpoints", "save_interval_updates", "keep_interval_updates"},
        {
            "arch": "the README trains the small model",
            "update_freq": "with a quarter of the batch",
            "max_update": "for a fifth of the updates",
        },
    ),
]


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """All options of a ``fairseq-train`` command, by name, with fairseq's defaults."""
    words = list(words)
    if "--user-dir" in words:  # the plugin is imported already
        at = words.index("--user-dir")
        del words[at : at + 2]
    arguments: argparse.Namespace = options.parse_args_and_arch(options.get_training_parser(), words)
    return {name: plain(value) for name, value in vars(arguments).items()}


def plain(value: Any) -> Any:
    """A value in one form: ``"(0.9, 0.98)"`` as a list of numbers, ``[16]`` as 16."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            return str(value)
    if isinstance(value, (list, tuple)):
        values = [plain(item) for item in value]
        return values[0] if len(values) == 1 else values
    return value


def command_of_yaml(settings: dict[str, Any]) -> dict[str, str]:
    """The choices of a YAML file that have options of their own."""
    sections = ("task", "criterion", "model", "optimizer", "lr_scheduler")
    return {("arch" if section == "model" else section): settings[section]["_name"] for section in sections}


def yaml_options(example: str, *overrides: str) -> tuple[dict[str, Any], set[str]]:
    """Options of the example's YAML file by name, whatever their section; and which of them it sets itself."""
    config = OmegaConf.load(EXAMPLES / example / f"{example}.yaml")
    config = OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides)))
    del config["hydra"]
    config.task.data = "data-bin"
    settings: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    choices = command_of_yaml(settings)
    given = dict(choices)
    for section in settings.values():
        for name, value in section.items():
            if name != "_name":
                assert name not in given or plain(given[name]) == plain(value), f"{name} stands twice"
                given[name] = value
    words = [word for name, value in choices.items() for word in (f"--{name.replace('_', '-')}", value)]
    defaults = parsed(["data-bin", *words])
    return {**defaults, **{name: plain(value) for name, value in given.items()}}, set(given)


def names_in(words: Sequence[str]) -> set[str]:
    return {word[2:].replace("-", "_") for word in words if word.startswith("--")}


def readme(example: str) -> str:
    return (EXAMPLES / example / "README.md").read_text(encoding="utf-8")


def readme_commands(example: str, program: str) -> list[list[str]]:
    """Words after ``program`` of each of its commands in the README's blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", readme(example), flags=re.S)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(f"{program} ")]


RECORDER = """
mlsm() { :; }
python() { :; }
fairseq-train() { "$PYTHON" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >> "$COMMANDS"; }
script=$1; shift
source "$script" "$@"
"""


def script_commands(script: Path, folder: Path) -> list[list[str]]:
    """The words of each ``fairseq-train`` that ``script`` runs, with its own defaults; nothing else is run."""
    (folder / "out" / "phase1").mkdir(parents=True)
    arguments = ["data-bin", "out"] if script.name == "pretrain.sh" else ["train.txt", "valid.txt", "out"]
    variables = {
        **{name: os.environ[name] for name in ("PATH",)},
        **{"PYTHON": sys.executable, "COMMANDS": str(folder / "commands"), "AUXILIARY": "hf:encoder"},
    }
    subprocess.run(
        ["bash", "-c", RECORDER, "record", str(script), *arguments], cwd=folder, env=variables, check=True, timeout=60
    )
    return [json.loads(line) for line in (folder / "commands").read_text(encoding="utf-8").splitlines()]


def demo_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of the ``fairseq-train`` that the demo runs."""
    spec = importlib.util.spec_from_file_location("demo_of_the_example", EXAMPLES / "mlsm" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    commands: list[list[str]] = []

    def record(command: Sequence[str]) -> int:
        commands.append(list(command))
        return 0

    monkeypatch.setattr(demo, "run", record)
    (folder / "corpus").mkdir(parents=True)
    (folder / "corpus" / "train.txt").write_text("Some text.\n", encoding="utf-8")
    for split in ("train", "valid"):
        codes = folder / "run" / "data-bin" / f"{split}.codes"
        codes.mkdir(parents=True)
        (codes / "meta.json").write_text("{}", encoding="utf-8")
    demo.make_everything(argparse.Namespace(corpus=None, updates=2200, auxiliary_updates=800), folder)
    (train,) = [command for command in commands if "fairseq_cli.train" in command]
    return train[train.index("fairseq_cli.train") + 1 :]


def options_at(
    example: str, place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], set[str]]:
    """Options that ``place`` of ``example`` gives (see ``Comparison``), and which of them it sets itself."""
    if place.endswith(".yaml"):
        return yaml_options(example)
    if place.startswith("README: "):
        save_dir = place.removeprefix("README: ")
        (words,) = [
            words
            for words in readme_commands(example, "fairseq-train")
            if words[words.index("--save-dir") + 1] == save_dir
        ]
    elif place.endswith(".py"):
        words = demo_command(folder, monkeypatch)
    else:
        words = script_commands(EXAMPLES / example / place, folder)[0]
    return parsed(words), names_in(words)


def differences(
    left: tuple[dict[str, Any], set[str]], right: tuple[dict[str, Any], set[str]], ignored: set[str]
) -> dict[str, tuple[Any, Any]]:
    """Options that one side sets and the other has otherwise, by name."""
    names = (left[1] | right[1]) - ignored - PLACES
    pairs = {name: (left[0].get(name, "unknown"), right[0].get(name, "unknown")) for name in sorted(names)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("case", COMPARISONS, ids=lambda case: f"{case.example}: {case.left}, {case.right}")
def test_two_places_agree(case: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = options_at(case.example, case.left, tmp_path / "left", monkeypatch)
    right = options_at(case.example, case.right, tmp_path / "right", monkeypatch)
    found = differences(left, right, case.ignored)
    unexplained = {name: pair for name, pair in found.items() if name not in case.on_purpose}
    assert unexplained == {}, f"{case.left} and {case.right} of examples/{case.example} differ"
    assert sorted(case.on_purpose) == sorted(found), "no longer differs: take it from the list"


def test_phase_2_of_the_script_is_what_the_comment_in_the_yaml_says(tmp_path: Path) -> None:
    text = (EXAMPLES / "mlsm" / "mlsm.yaml").read_text(encoding="utf-8")
    comment = text[text.index("append for phase 2:") :].split("tokens_per_sample: ")[0]
    overrides = re.findall(r"\b\w+\.\w+=\S+", comment)
    assert len(overrides) == 8
    _, phase2 = script_commands(EXAMPLES / "mlsm" / "pretrain.sh", tmp_path)
    assert differences((parsed(phase2), names_in(phase2)), yaml_options("mlsm", *overrides), set()) == {}


@pytest.mark.parametrize("script", sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.sh")))
def test_defaults_in_the_header_of_a_script_are_its_defaults(script: str) -> None:
    text = (EXAMPLES / script).read_text(encoding="utf-8")
    header = re.sub(r"\n# ?", " ", text[: text.index("set -euo")])
    stated = dict(re.findall(r"\b([A-Z_]{3,}) \(([\w.]+)", header[header.index("Environment:") :]))
    used = dict(re.findall(r"\$\{([A-Z_]+):-(\w+)\}", text))
    assert len(used) > 1
    assert {name: stated.get(name) for name in used} == used


def tables(example: str, first_column: str) -> list[list[str]]:
    """Cells of all rows of the README's tables whose first column has this heading."""
    rows: list[list[str]] = []
    inside = False
    for line in readme(example).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if not cells:
            inside = False
        elif cells[0] == first_column:
            inside = True
        elif inside and not cells[0].startswith("---"):
            rows.append(cells)
    return rows


def flags_in(cell: str) -> list[str]:
    return [name.replace("-", "_") for name in re.findall(r"`--([\w-]+)`", cell)]


@pytest.mark.parametrize("example", NAMES)
def test_each_number_of_the_yaml_stands_in_the_readme_with_its_source(example: str) -> None:
    expected, given = yaml_options(example)
    for words in readme_commands(example, "mlsm preprocess"):
        values = {name[2:]: plain(value) for name, value in pairwise(words)}
        expected |= {name: values[name] for name in ("atoms", "lambda")}
    stated = {}
    for flags, value, source in tables(example, "number"):
        assert len(source) > 2
        stated |= {name: plain(value.strip("`")) for name in flags_in(flags)}
    assert {name: expected.get(name) for name in stated} == stated

    numbers = {name for name in given if isinstance(expected[name], (float, int, list))}
    numbers -= {name for name in numbers if isinstance(expected[name], bool)}
    of_the_run = {"seed", "log_interval", "save_interval_updates", "keep_interval_updates", "num_workers"}
    assert numbers - of_the_run - stated.keys() == set()
    assert "arch" in stated


@pytest.mark.parametrize("example", NAMES)
def test_defaults_in_the_tables_of_options_are_the_defaults(example: str) -> None:
    settings = OmegaConf.to_container(OmegaConf.load(EXAMPLES / example / f"{example}.yaml"))
    choices = command_of_yaml(settings)  # type: ignore[arg-type]
    words = [word for name in ("task", "criterion", "arch") for word in (f"--{name}", choices[name])]
    defaults = parsed(["data-bin", *words])
    in_words = {"off": False, "all": None, "sqrt(d)": None}
    rows = tables(example, "flag")
    assert len(rows) >= 4
    for flags, default, _ in rows:
        values = [in_words.get(value, plain(value.strip("`"))) for value in default.split(", ")]
        names = flags_in(flags)
        assert dict(zip(names, values, strict=True)) == {name: defaults[name] for name in names}
