#!/usr/bin/env python3
"""Adapt a Hugging Face model to a text with MLM, MLSM + MLM and TACO at equal time, and compare the results.

    python research/compare_adaptation.py MODEL --text reviews.txt --valid held_out.txt \
        --train sst2/train.tsv --test sst2/dev.tsv --output DIR [--minutes 10] [--seeds 1 2]

Each objective gets ``--minutes`` on the machine. The preparation (dictionary, codes) is timed in its first run and
subtracted. The number of updates follows from the seconds of an update in short runs of all objectives, which run one
after the other. Measured before and after:

- MLM loss on the held-out text, with the same masks for all models, in bits per token;
- accuracy on labelled sentences: after fine-tuning on the first ``--labelled`` lines, and of a linear probe on the
  frozen means of the last hidden states.

Each figure is a mean over the seeds of the adaptation.

Writes ``adaptation.json`` and ``adaptation.md``. Run the same command again to resume: a finished part is not repeated.
A later command may add seeds; other settings need another --output.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import kept_results
import numpy as np
import torch
import torch.nn.functional as F
from kept_results import KeptResults
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging, set_seed

from mlsm_plugin.cli.actions import HelpFormatter
from mlsm_plugin.cli.coding_options import check_positive
from mlsm_plugin.core.files.atomic_files import atomic_open, write_json
from mlsm_plugin.core.files.planned_folder import PlannedFolder
from mlsm_plugin.core.files.step_record import RECORD, StepRecord
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceSource
from mlsm_plugin.core.machine.devices import default_device, has_fast_bf16
from mlsm_plugin.evaluation.encoder_quality import linear_probe
from mlsm_plugin.evaluation.labelled_texts import LabelledTexts, check_same_kind, read_labelled_texts
from mlsm_plugin.evaluation.sentence_encoders import open_sentence_encoder
from mlsm_plugin.huggingface import MaskedLmCollator, MaskedLmModel, PretrainingSequences, write_text_sequences

OBJECTIVES = ("mlm", "mlsm+mlm", "taco")
START = "start"
EPOCHS = 3
BATCH = 32
FILES = ("text", "valid", "train", "test")
MAY_CHANGE = ("seeds", "quiet", "output")  # options that no figure depends on
POSITIVE = (
    "minutes",
    "labelled",
    "finetuning_rate",
    "max_length",
    "batch_size",
    "learning_rate",
    "atoms",
    "dictionary_tokens",
)


class Comparison(KeptResults):
    """The parts of the comparison; the result of each is kept in a JSON file, and not computed again."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.device = default_device(None)

    def adapt(self, objective: str, seed: int, updates: int, folder: Path) -> tuple[float, float]:
        """Run ``mlsm adapt``; returns its seconds, and the seconds of its training."""
        args = self.args
        words = ["adapt", args.model, "--text", args.text, "--valid", args.valid, "--objective", objective]
        words += ["--output", folder, "--updates", updates, "--seed", seed, "--max-length", args.max_length]
        words += ["--batch-size", args.batch_size, "--learning-rate", args.learning_rate, "--evaluate-every", updates]
        if objective == "mlm":
            words += ["--keep-vectors", 0]
        if "mlsm" in objective:
            words += ["--coder", args.coder, "--atoms", args.atoms, "--tokens", args.dictionary_tokens]
        start = time.perf_counter()
        command = [sys.executable, "-m", "mlsm_plugin.cli.main", *map(str, words)]
        process = subprocess.run(command, stdout=subprocess.DEVNULL if args.quiet else None, check=False)
        if process.returncode != 0:
            raise SystemExit(f"mlsm adapt failed with exit status {process.returncode}")
        seconds = StepRecord(folder / RECORD).seconds_of("training")
        return time.perf_counter() - start, seconds

    def speeds(self) -> dict[str, dict[str, float]]:
        """For each objective, the seconds of an update, and of the preparation before the first update."""
        few, many = self.args.timing_updates
        folder = self.output / "timing"
        if folder.exists():  # from a stopped command; a resumed or finished run would take no time
            shutil.rmtree(folder)
        measured: dict[str, dict[str, float]] = {}
        for objective in self.args.objectives:
            runs = [self.adapt(objective, 1, updates, folder / f"{objective}-{updates}") for updates in (few, many)]
            update = (runs[1][1] - runs[0][1]) / (many - few)
            if update <= 0:  # few updates on a busy machine: then count everything else in the run, too
                update = runs[1][1] / many
            measured[objective] = {"update": update, "start": runs[1][0] - many * update}
        plain = min(times["start"] for times in measured.values())
        return {name: {**times, "extra": times["start"] - plain} for name, times in measured.items()}

    def run(self) -> dict[str, Any]:
        """All figures."""
        args = self.args
        speeds = self.once("speeds", self.speeds)
        rows: dict[str, Any] = {START: [self.once("start", lambda: self.measure(Path(args.model), 1))]}
        updates = {}
        for objective in args.objectives:
            budget = 60 * args.minutes - speeds[objective]["extra"]
            if budget <= 0:
                needed = speeds[objective]["extra"] / 60
                print(
                    f"{objective} takes {needed:.1f} minutes before its first update; it gets one update all the same"
                )
            updates[objective] = max(1, int(budget / speeds[objective]["update"]))
            rows[objective] = [self.adapted(objective, seed, updates[objective]) for seed in args.seeds]
        return {"minutes": args.minutes, "speeds": speeds, "updates": updates, "rows": rows}

    def adapted(self, objective: str, seed: int, updates: int) -> dict[str, float]:
        """The figures of an adapted model."""
        folder = self.output / f"{objective}-seed-{seed}"

        def compute() -> dict[str, float]:
            self.adapt(objective, seed, updates, folder)
            return self.measure(folder / "model", seed)

        figures: dict[str, float] = self.once(folder.name, compute)
        return figures

    def measure(self, model: Path, seed: int) -> dict[str, float]:
        """MLM loss in bits, and accuracies in %."""
        args = self.args
        train = _first(read_labelled_texts(args.train), args.labelled)
        test = read_labelled_texts(args.test)
        labels = sorted(set(train.labels))
        return {
            "mlm_bits": self.mlm_bits(model),
            "probe": self.probe(model, train, test),
            "finetuned": self.finetuned(model, train, test, labels, seed),
        }

    @torch.no_grad()
    def mlm_bits(self, model: Path) -> float:
        """Mean loss of the masked tokens of the held-out text, in bits."""
        tokenizer = AutoTokenizer.from_pretrained(model)
        held_out = self.output / "held-out"
        sequences, _ = write_text_sequences([self.args.valid], model, held_out, max_length=self.args.max_length)
        data = PretrainingSequences(sequences)
        collator = MaskedLmCollator(tokenizer)
        network = MaskedLmModel.from_pretrained(model).to(self.device).eval()
        sums = np.zeros(2 * len(network.figures))
        for first in range(0, len(data), BATCH):
            batch = collator([data[index] for index in range(first, min(first + BATCH, len(data)))])
            output = network(**{name: values.to(self.device) for name, values in batch.items()})
            sums += output["parts"].sum(dim=0).cpu().numpy()
        return float(sums[0] / sums[1] / math.log(2))

    def probe(self, model: Path, train: LabelledTexts, test: LabelledTexts) -> float:
        """Accuracy in % of logistic regression on frozen means."""
        encoder = open_sentence_encoder(model)
        train_vectors = encoder.vectors([" ".join(text) for text in train.texts])
        test_vectors = encoder.vectors([" ".join(text) for text in test.texts])
        predicted = linear_probe(train_vectors, train.labels, test_vectors)
        return 100 * float((predicted == np.array(test.labels)).mean())

    def finetuned(
        self, model: Path, train: LabelledTexts, test: LabelledTexts, labels: Sequence[str], seed: int
    ) -> float:
        """Accuracy in % of a fine-tuned classifier, after the last epoch."""
        set_seed(seed)
        tokenizer = AutoTokenizer.from_pretrained(model)
        network = AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(labels)).to(self.device)
        optimizer = torch.optim.AdamW(network.parameters(), lr=self.args.finetuning_rate, weight_decay=0.01)
        targets = _targets(train, labels)
        total = EPOCHS * math.ceil(len(train) / BATCH)
        warmup = max(1, round(0.06 * total))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, (total - step) / max(1, total - warmup))
        )
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=has_fast_bf16(self.device))
        rng = np.random.default_rng(seed)
        network.train()
        for _ in range(EPOCHS):
            order = rng.permutation(len(train))
            for first in range(0, len(order), BATCH):
                rows = order[first : first + BATCH]
                inputs = _inputs(tokenizer, [train.texts[row] for row in rows], self.args.max_length).to(self.device)
                with autocast:
                    logits = network(**inputs).logits
                F.cross_entropy(logits.float(), targets[rows].to(self.device)).backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        network.eval()
        predictions = []
        with torch.no_grad():
            for batch in _batches(test):
                inputs = _inputs(tokenizer, batch, self.args.max_length).to(self.device)
                predictions.append(network(**inputs).logits.argmax(dim=1).cpu())
        return 100 * float((torch.cat(predictions) == _targets(test, labels)).double().mean())


def _first(texts: LabelledTexts, number: int) -> LabelledTexts:
    return LabelledTexts(texts.path, texts.labels[:number], texts.texts[:number], texts.lines[:number])


def _targets(texts: LabelledTexts, labels: Sequence[str]) -> Tensor:
    return torch.tensor([labels.index(label) for label in texts.labels])


def _batches(texts: LabelledTexts) -> list[Sequence[tuple[str, ...]]]:
    return [texts.texts[first : first + BATCH] for first in range(0, len(texts), BATCH)]


def _inputs(tokenizer: Any, texts: Sequence[tuple[str, ...]], max_length: int) -> Any:
    columns = [list(column) for column in zip(*texts, strict=True)]
    return tokenizer(*columns, padding=True, truncation=True, max_length=max_length, return_tensors="pt")


def table(figures: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    lines = [
        f"{figures['minutes']:g} minutes each, codes and dictionary included.\n",
        "| model | updates | MLM on held-out text, bits | fine-tuned, % | linear probe, % |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, runs in figures["rows"].items():
        cells = [_mean([run[key] for run in runs]) for key in ("mlm_bits", "finetuned", "probe")]
        lines.append(f"| {name} | {figures['updates'].get(name, 0):,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=HelpFormatter)
    parser.add_argument("model", help="folder of a masked LM with its tokenizer")
    parser.add_argument("--text", required=True, help="text to adapt to")
    parser.add_argument("--valid", required=True, help="held-out text of the same kind")
    parser.add_argument("--train", required=True, help="labelled sentences, label TAB text")
    parser.add_argument("--test", required=True, help="labelled sentences to measure the accuracy on")
    parser.add_argument("--output", required=True, help="folder for everything that is made")
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), choices=OBJECTIVES)
    parser.add_argument("--minutes", type=float, default=10.0, help="time of each adaptation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--labelled", type=int, default=2000, help="lines of --train to use")
    parser.add_argument("--finetuning-rate", type=float, default=5e-4, help="largest learning rate of fine-tuning")
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--coder", default="topk", choices=["topk", "batchtopk", "lasso"])
    parser.add_argument("--atoms", type=int, default=3000)
    parser.add_argument("--dictionary-tokens", type=int, default=250_000, help="hidden states to learn from")
    parser.add_argument("--timing-updates", type=int, nargs=2, default=[10, 60], help="of the two runs that are timed")
    parser.add_argument("--quiet", action="store_true", help="do not show what `mlsm adapt` prints")
    return parser.parse_args()


def check(args: argparse.Namespace) -> None:
    """Check the options and the evaluation data before hours of training, not after.

    Raises:
        ValueError: an option or the data is wrong.
        OSError: a file cannot be read.
    """
    check_positive(args, *POSITIVE)
    few, many = args.timing_updates
    if not 0 < few < many:
        raise ValueError(f"--timing-updates must be positive and ascending, got {few} {many}")
    if len(set(args.seeds)) < len(args.seeds):
        raise ValueError(f"--seeds has a number twice: {' '.join(map(str, args.seeds))}")
    train, test = (read_labelled_texts(file) for file in (args.train, args.test))
    check_same_kind(_first(train, args.labelled), [test], regression=False)


def planned_folder(args: argparse.Namespace) -> PlannedFolder:
    """The folder of a comparison, with fixed settings and inputs; a later command may add seeds.

    Raises:
        ValueError: an option or the data is wrong, or the model is not a Hugging Face model.
        OSError: a file cannot be read.
    """
    check(args)
    inputs = {name: [getattr(args, name)] for name in FILES}
    inputs["model"] = HuggingFaceSource.files_of(args.model)
    return kept_results.planned_folder(args, inputs, may_change=MAY_CHANGE, seal_file="adaptation.json")


def main() -> int:
    """Run the missing parts, and write the table."""
    args = parse_arguments()
    logging.set_verbosity_error()
    kept_results.begin(partial(planned_folder, args))
    comparison = Comparison(args)
    figures = comparison.run()
    write_json(comparison.output / "adaptation.json", figures)
    with atomic_open(comparison.output / "adaptation.md", "w") as file:
        file.write(table(figures))
    print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
