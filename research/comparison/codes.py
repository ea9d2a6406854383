"""Dictionaries and codes of a comparison and of its controls."""

from __future__ import annotations

import argparse
from pathlib import Path

from comparison.commands import REPOSITORY, Commands
from comparison.rows import RANDOM
from mlsm_plugin.core.files.atomic_files import read_json
from mlsm_plugin.core.hidden_states.sources import source_of

CONTROL_SCRIPT = REPOSITORY / "research" / "control_codes.py"


def blocks_of(args: argparse.Namespace) -> list[object]:
    """The options for cutting the text into blocks."""
    return ["--tokens-per-sample", args.tokens_per_sample, "--sample-break-mode", "none"]


class Codes:
    """Learns dictionaries, codes the dataset with them, and makes the codes of controls.

    Args:
        args: of the command line.
        commands: runs the commands.
        data_bin: the dataset.

    Attributes:
        seconds_of_dictionary: the seconds to learn each dictionary.
        seconds_of_codes: the seconds to code the dataset, by the name of the codes.
    """

    def __init__(self, args: argparse.Namespace, commands: Commands, data_bin: Path) -> None:
        self.args = args
        self.commands = commands
        self.data_bin = data_bin
        self.seconds_of_dictionary: dict[str, float] = {}
        self.seconds_of_codes: dict[str, float] = {}
        cpu = ["--device", "cpu"] if "--cpu" in args.fairseq_flags.split() else []
        self.how = [*blocks_of(args), "--threads", args.threads, "--fp16", *cpu]

    def folder(self, name: str) -> Path:
        """The folder of some codes."""
        return Path(self.args.output) / f"codes-{name}"

    def dictionary(self, name: str) -> Path:
        """The folder of a dictionary."""
        return Path(self.args.output) / f"dictionary-{name}"

    def seconds_of(self, coder: str) -> float:
        """Seconds of a dictionary and the codes over it."""
        return self.seconds_of_dictionary[coder] + self.seconds_of_codes[coder]

    def training_tokens(self, name: str) -> int:
        """The number of tokens in the code store of the training text."""
        return int(read_json(self.folder(name) / "train.codes" / "meta.json")["token_count"])

    def learn(self, coder: str, auxiliary: object) -> None:
        """Learn a dictionary from the hidden states of a model."""
        args = self.args
        folder = self.dictionary(coder)
        words = ["mlsm", "dictionary", self.data_bin, "--auxiliary", auxiliary]
        words += ["--layer", args.layer or self._last_layer(), "--output", folder]
        words += ["--coder", coder, "--atoms", args.atoms, "--tokens", args.dictionary_tokens, *self.how]
        words += ["--k", args.k] if coder != "lasso" else []
        self.seconds_of_dictionary[coder] = self.commands.run(f"dictionary-{coder}", words, made=folder).seconds

    def _last_layer(self) -> int:
        ready = self.args.auxiliary
        return int(source_of(ready).layers_of(ready) if ready else self.args.auxiliary_size[0])

    def encode(self, name: str, auxiliary: object, dictionary: Path) -> None:
        """Code the dataset."""
        words = ["mlsm", "encode", self.data_bin, "--auxiliary", auxiliary, "--dictionary", dictionary]
        words += ["--output", self.folder(name), *self.how]
        self.seconds_of_codes[name] = self.commands.run(f"codes-{name}", words, made=self.folder(name)).seconds

    def make_control(self, kind: str, name: str, codes: Path) -> None:
        """Make the codes of a control from other codes."""
        words = [CONTROL_SCRIPT, self.data_bin, "--kind", kind, "--codes", codes, "--output", self.folder(name)]
        self.commands.run(f"codes-{name}", words)

    def make_random(self, name: str, auxiliary: object, dictionary: Path) -> None:
        """Code the dataset over as many random directions as ``dictionary`` has atoms."""
        random = self.dictionary(name)
        words = [CONTROL_SCRIPT, "--kind", RANDOM, "--dictionary", dictionary, "--output", random]
        self.commands.run(f"dictionary-{name}", words)
        self.encode(name, auxiliary, random)
