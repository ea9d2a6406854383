"""Measures of a trained model; each figure is computed once and kept."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from comparison.commands import Commands
from comparison.masked_lm_loss import evaluate_masked_lm
from mlsm_plugin.core.files.atomic_files import atomic_open, read_json, write_json
from mlsm_plugin.evaluation.encoder_quality import linear_probe
from mlsm_plugin.evaluation.labelled_texts import check_same_kind, read_labelled_texts
from mlsm_plugin.evaluation.minimal_pairs import read_pairs
from mlsm_plugin.evaluation.sentence_encoders import open_sentence_encoder
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockSettings


@dataclass(frozen=True)
class Task:
    """A classification set: name, training and test file."""

    name: str
    train: str
    test: str

    @classmethod
    def parse(cls, text: str) -> Task:
        """Read ``NAME=TRAIN.tsv,TEST.tsv``."""
        name, _, files = text.partition("=")
        train, _, test = files.partition(",")
        if not (name and train and test):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=TRAIN.tsv,TEST.tsv")
        for file in (train, test):
            if not os.path.isfile(file):
                raise argparse.ArgumentTypeError(f"{file} does not exist")
        return cls(name, train, test)


class Measures:
    """Measures checkpoints.

    Args:
        args: of the command line.
        commands: runs and records commands.
    """

    def __init__(self, args: argparse.Namespace, commands: Commands) -> None:
        self.args = args
        self.commands = commands
        self.output = Path(args.output)

    def check_files(self) -> None:
        """Read the evaluation data, so that a wrong file fails before hours of training, not after.

        Raises:
            ValueError: a line is wrong, or other lines have a label that the training lines lack.
        """
        for task in self.args.tasks:
            read_labelled_texts(task.train)  # all of it: the message names the file and its line
            self.hold_out(task)
            train, valid = (read_labelled_texts(self._lines(task, split)) for split in ("train", "valid"))
            check_same_kind(train, [valid, read_labelled_texts(task.test)], regression=False)
        for file in self.args.pairs:
            read_pairs(file)

    def of(self, name: str, checkpoint: Path, *, has_mlm_head: bool, from_scratch: bool = False) -> dict[str, Any]:
        """All figures of a checkpoint; accuracies are shares, losses bits.

        Args:
            name: of the run, and of its files.
            checkpoint: the model.
            has_mlm_head: whether it predicts masked tokens.
            from_scratch: random weights replace the checkpoint's; only fine-tuned accuracies are measured.
        """
        figures: dict[str, Any] = {"finetuned": {}, "probe": {}}
        for task in self.args.tasks:
            self.hold_out(task)
            finetuned = partial(self.finetuned, task, checkpoint, name, from_scratch=from_scratch)
            # random weights do not depend on the checkpoint; a later command may begin with another one
            accuracy = self._once(f"{name}-finetuned-{task.name}", finetuned) if from_scratch else finetuned()
            figures["finetuned"][task.name] = accuracy
            if not from_scratch:
                figures["probe"][task.name] = self._once(f"{name}-probe-{task.name}", self._probe, task, checkpoint)
        if has_mlm_head and not from_scratch:
            for split in ("valid", "test"):
                loss = self._once(f"{name}-loss-{split}", self._loss, checkpoint, split)
                figures |= {f"{split}_{part}": loss[part] for part in ("bits", "repeated_bits", "new_bits")}
            figures["pairs"] = {Path(file).stem: self.pairs(file, checkpoint, name) for file in self.args.pairs}
        return figures

    def _once(self, name: str, compute: Callable[..., Any], *arguments: Any) -> Any:
        path = self.output / "measures" / f"{name}.json"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_json(path, compute(*arguments))
        return read_json(path)

    def _loss(self, checkpoint: Path, split: str) -> dict[str, Any]:
        blocks = BlockSettings(self.args.tokens_per_sample, "none")
        return vars(evaluate_masked_lm(checkpoint, self.output / "data-bin", split, blocks))

    def _probe(self, task: Task, checkpoint: Path) -> float:
        """Accuracy of logistic regression on frozen means, trained on the same lines as fine-tuning."""
        encoder = open_sentence_encoder(checkpoint)
        train = read_labelled_texts(self._lines(task, "train"))
        test = read_labelled_texts(task.test)
        train_vectors = encoder.vectors([" ".join(text) for text in train.texts])
        test_vectors = encoder.vectors([" ".join(text) for text in test.texts])
        predicted = linear_probe(train_vectors, train.labels, test_vectors)
        return float((predicted == np.array(test.labels)).mean())

    def _lines(self, task: Task, split: str) -> Path:
        return self.output / "tasks" / task.name / f"{split}.tsv"

    def hold_out(self, task: Task) -> None:
        """Split the first lines: every tenth goes to ``valid``, which chooses the epoch; the others to ``train``."""
        with open(task.train, encoding="utf-8") as file:
            lines = [line for line, _ in zip(file, range(self.args.labelled), strict=False)]
        for split, split_lines in (("train", [line for i, line in enumerate(lines) if i % 10]), ("valid", lines[::10])):
            path = self._lines(task, split)
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_open(path, "w") as file:
                file.writelines(split_lines)

    def finetuned(self, task: Task, checkpoint: Path, name: str, *, from_scratch: bool) -> dict[str, float]:
        """Mean and standard deviation over the seeds of fine-tuning."""
        args = self.args
        folder = self.output / "finetuned" / f"{name}-{task.name}"
        train = self._lines(task, "train")
        valid = self._lines(task, "valid")
        words: list[object] = ["mlsm", "finetune", "--model", checkpoint, "--train", train, "--valid", valid]
        words += ["--test", task.test, "--output", folder, "--seeds", *args.finetune_seeds]
        words += ["--max-epoch", args.finetune_epochs, "--lr", args.finetune_lr]
        words += ["--from-scratch"] if from_scratch else []
        flags = args.fairseq_flags.split()
        words += ["--cpu"] if "--cpu" in flags else []
        words += ["--bf16", "on"] if {"--fp16", "--bf16"} & {*flags} else []
        self.commands.run(f"finetune-{name}-{task.name}", words, inputs=(train, valid, task.test))
        scores = [run["test_accuracy"] for run in read_json(folder / "results.json")["seeds"]]
        for heavy in [*folder.glob("seed-*/model"), folder / "model", folder / "exported"]:
            shutil.rmtree(heavy, ignore_errors=True)  # keep only the figures; many classifiers would fill the disk
        return {"mean": statistics.fmean(scores), "deviation": statistics.stdev(scores) if len(scores) > 1 else 0.0}

    def pairs(self, file: str, checkpoint: Path, name: str) -> float:
        """Accuracy on a file of minimal pairs."""
        name = f"pairs-{name}-{Path(file).stem}"
        result = self.output / "measures" / f"{name}.json"
        words = ["mlsm", "evaluate", "pairs", "--checkpoint", checkpoint, "--input", file, "--output", result]
        self.commands.run(name, words, inputs=(file,))
        return float(read_json(result)["accuracy"])
