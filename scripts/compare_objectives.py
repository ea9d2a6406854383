#!/usr/bin/env python3
"""Pre-train with each objective at equal total cost, with controls and several seeds, and compare.

Writes ``comparison.json``, ``comparison.md`` and ``comparison.png`` to --output, anew after each run. Run the same
command again to resume after a stop. docs/comparison.md explains the protocol.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison.commands import PLUGIN, REPOSITORY, Commands
from comparison.costs import MASKED_SHARE, ModelSize, Phase, Schedule, schedule_of_phases, updates_within
from comparison.measures import Measures, Task
from comparison.report import draw, page
from comparison.rows import AUXILIARY, CODERS, CONTROLS, RANDOM, ROWS, SELF, ordered
from tqdm import tqdm

from mlsm_plugin.files.atomic_files import atomic_open, read_json, write_json
from mlsm_plugin.models.mlsm_modern import geglu_dim
from mlsm_plugin.reports.training_log import read_training_log

SPEED_UPDATES = 60
FILES = ("train", "valid", "held_out", "pairs", "tasks", "auxiliary", "output")  # arguments that are paths


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def percentage(most: int) -> Callable[[str], int]:
    """What reads a whole number from 1 to ``most``."""

    def read(text: str) -> int:
        number = int(text)
        if not 1 <= number <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from 1 to {most}")
        return number

    return read


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--train", nargs="+", required=True, metavar="FILE", help="training text")
    parser.add_argument("--valid", nargs="+", required=True, metavar="FILE", help="validation text, of another source")
    parser.add_argument("--held-out", nargs="+", required=True, metavar="FILE", help="text of the training sources")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for all files")
    parser.add_argument("--objectives", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW",
                        help=f"rows to compare: {', '.join(ROWS)} (default: all)")  # fmt: skip
    parser.add_argument(
        "--task", dest="tasks", action="append", default=[], type=Task.parse, metavar="NAME=TRAIN.tsv,TEST.tsv",
        help="texts (label TAB text) to fine-tune on and to probe; may be given several times",
    )  # fmt: skip
    parser.add_argument("--pairs", nargs="+", default=[], metavar="JSONL", help="minimal pairs in BLiMP's format")
    parser.add_argument("--arch", default="mlsm_modern", help="architecture (default: mlsm_modern)")
    parser.add_argument("--coder", default="topk", choices=CODERS, help="coder of MLSM's codes (default: topk)")
    parser.add_argument("--auxiliary", metavar="PT", help="a ready auxiliary model, whose cost does not count")
    parser.add_argument("--layer", type=positive, metavar="L", help="hidden state to code (default: the last)")
    numbers = {
        "vocab-size": (8000, "pieces of the tokenizer"), "layers": (4, "layers of every model"),
        "width": (256, "width of every model"), "heads": (4, "attention heads of every model"),
        "updates": (7000, "updates of plain masked LM, whose cost is the budget of each row"),
        "search-updates": (1500, "updates of a run that searches the learning rate"),
        "batch-size": (32, "blocks in an update"), "tokens-per-sample": (128, "tokens in a block"),
        "group-size": (16, "blocks in a group of NPM"), "atoms": (3000, "atoms of the dictionaries"),
        "k": (32, "active latents of an autoencoder"),
        "dictionary-tokens": (300_000, "hidden states to learn a dictionary from"),
        "labelled": (2000, "training lines of each classification set"), "finetune-epochs": (3, "of fine-tuning"),
        "threads": (1, "threads of each run"),
    }  # fmt: skip
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=f"{text} ({default})")
    parser.add_argument(
        "--share", type=percentage(90), default=20, metavar="PERCENT",
        help="of the budget for the auxiliary model, of the updates for the first stage of self (20)",
    )  # fmt: skip
    parser.add_argument("--latent-weight", type=float, default=1.0, metavar="W", help="weight of the KL (1)")
    parser.add_argument(
        "--latent-until", type=percentage(100), default=100, metavar="PERCENT",
        help="of the updates: there the weight of the KL is 0, and masked LM follows; 100: the weight stays (100)",
    )  # fmt: skip
    parser.add_argument(
        "--self-source", default="store", choices=["store", "online"],
        help="self: code the dataset once, or the masked tokens in every update (store)",
    )  # fmt: skip
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 2e-3, 3e-3], metavar="LR",
                        help="learning rates to choose from (0.001 0.002 0.003)")  # fmt: skip
    parser.add_argument("--finetune-lr", type=float, default=5e-4, metavar="LR", help="of fine-tuning (0.0005)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N", help="of pre-training (1 2 3)")
    parser.add_argument("--finetune-seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N",
                        help="of fine-tuning (1 2 3)")  # fmt: skip
    parser.add_argument("--fairseq-flags", default="", metavar="TEXT", help="more flags for every fairseq-train")
    args = parser.parse_args()
    if args.batch_size % args.group_size:
        parser.error(f"--batch-size {args.batch_size} is not a multiple of --group-size {args.group_size}")
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    if args.latent_until <= args.share and SELF in args.objectives:
        parser.error(f"--latent-until {args.latent_until} is not after --share {args.share}, where {SELF} has codes")
    args.objectives = ordered(["mlm", *args.objectives])
    return args


class Comparison:
    """The runs of one comparison, and what is read from them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.output = args, args.output
        self.commands = Commands(args.output, args.threads)
        self.measures = Measures(args, self.commands)
        self.data_bin = args.output / "data-bin"
        self.extra = shlex.split(args.fairseq_flags)
        self.kinds = {ROWS[name].codes for name in args.objectives} - {None}
        self.blocks = ["--tokens-per-sample", args.tokens_per_sample, "--sample-break-mode", "none"]
        self.model = ["--arch", args.arch, "--encoder-layers", args.layers, "--encoder-embed-dim", args.width]
        self.model += ["--encoder-attention-heads", args.heads, "--max-positions", 2 * args.tokens_per_sample]
        self.seconds: dict[str, float] = {}  # of an update of each row
        self.rates: dict[str, float] = {}
        self.costs_of_dictionary: dict[str, float] = {}  # seconds, by coder
        self.costs_of_codes: dict[str, float] = {}

    # what all rows share

    def prepare(self) -> None:
        """Make the tokenizer and the dataset; the held-out text is its split ``test``."""
        args, texts = self.args, [*self.args.train, *self.args.valid, *self.args.held_out]
        tokenizer = self.output / "tokenizer"
        if args.auxiliary:
            hf = args.auxiliary.startswith("hf:")
            tokenizer = args.auxiliary if hf else Path(args.auxiliary).parent
        else:
            words = ["mlsm", "tokenizer", "--input", *args.train, "--vocab-size", args.vocab_size]
            self.commands.run("tokenizer", [*words, "--output", tokenizer], inputs=texts)
        splits = ["--train", *args.train, "--valid", *args.valid, "--test", *args.held_out]
        words = ["mlsm", "binarize", "--tokenizer", tokenizer, *splits, "--output", self.data_bin]
        self.commands.run("binarize", words, inputs=texts)

    def make_codes(self) -> None:
        """Train the auxiliary model, and make its dictionaries and codes, and those of the controls."""
        args = self.args
        if not self.kinds:
            return
        auxiliary = self.auxiliary
        if args.auxiliary is None:
            self.train("auxiliary", ROWS["mlm"].flags, self.auxiliary_updates, self.rates["mlm"], 1)
        used = {args.coder} | ({"lasso"} & self.kinds)
        for coder in sorted(used):
            dictionary = self.output / f"dictionary-{coder}"
            words = ["mlsm", "dictionary", self.data_bin, "--auxiliary", auxiliary]
            words += ["--layer", args.layer or args.layers, "--output", dictionary, "--coder", coder]
            words += ["--atoms", args.atoms, "--tokens", args.dictionary_tokens, *self.coded_with()]
            words += ["--k", args.k] if coder != "lasso" else []
            self.costs_of_dictionary[coder] = self.commands.run(f"dictionary-{coder}", words).seconds
            self.costs_of_codes[coder] = self.encode(coder, auxiliary, dictionary)
        own = self.output / f"dictionary-{args.coder}"
        if RANDOM in self.kinds:
            random = self.output / "dictionary-random"
            script = REPOSITORY / "scripts" / "control_codes.py"
            words = [script, "--kind", RANDOM, "--dictionary", own, "--output", random]
            self.commands.run("dictionary-random", words)
            self.encode(RANDOM, auxiliary, random)
        for kind in sorted((self.kinds & set(CONTROLS)) - {RANDOM}):
            words = [REPOSITORY / "scripts" / "control_codes.py", self.data_bin, "--kind", kind]
            words += ["--codes", self.codes_of(args.coder), "--output", self.codes_of(kind)]
            self.commands.run(f"codes-{kind}", words)

    def coded_with(self) -> list[object]:
        """The options of the commands that code."""
        cpu = ["--device", "cpu"] if "--cpu" in self.extra else []
        return [*self.blocks, "--threads", self.args.threads, "--fp16", *cpu]

    def encode(self, name: str, auxiliary: object, dictionary: Path) -> float:
        """Code the dataset; returns the seconds."""
        words = ["mlsm", "encode", self.data_bin, "--auxiliary", auxiliary, "--dictionary", dictionary]
        words += ["--output", self.codes_of(name), *self.coded_with()]
        return self.commands.run(f"codes-{name}", words).seconds

    def codes_of(self, name: str) -> Path:
        """The folder of some codes."""
        return self.output / f"codes-{name}"

    @property
    def auxiliary(self) -> str | Path:
        """The auxiliary model."""
        return self.args.auxiliary or self.output / "auxiliary" / "checkpoint_last.pt"

    def cost_of_coder(self, coder: str) -> float:
        """Seconds of a dictionary and the codes over it."""
        return self.costs_of_dictionary[coder] + self.costs_of_codes[coder]

    @property
    def auxiliary_updates(self) -> int:
        """The updates that the auxiliary model's share of the budget pays."""
        return max(1, self.args.updates * self.args.share // 100)

    # training

    def train(self, name: str, flags: tuple[str, ...], updates: int, rate: float, seed: int, *more: object) -> None:
        """Train once."""
        args = self.args
        batch = ["--batch-size", args.batch_size]
        if "nonparametric_masked_lm" in flags:  # a sample of NPM is a group
            batch = ["--batch-size", args.batch_size // args.group_size, "--group-size", args.group_size]
        words = ["fairseq-train", self.data_bin, "--user-dir", PLUGIN, "--save-dir", self.output / name]
        words += [*flags, "--max-update", updates, *batch, *self.training_flags(updates, rate), "--seed", seed, *more]
        self.commands.run(name.replace("/", "-"), words)

    def training_flags(self, updates: int, rate: float) -> list[object]:
        """The flags of every training."""
        return [
            *(*self.model, *self.blocks, "--autocast", "auto", "--required-batch-size-multiple", 1),
            *("--optimizer", "fused_adamw", "--adam-betas", "(0.9, 0.98)", "--weight-decay", 0.01, "--clip-norm", 1.0),
            *("--lr", rate, "--lr-scheduler", "polynomial_decay", "--total-num-update", updates),
            *("--warmup-updates", max(1, updates * 6 // 100), "--num-workers", 0, "--no-epoch-checkpoints"),
            *("--save-interval-updates", 500, "--keep-interval-updates", 1, "--log-format", "simple"),
            *("--validate-interval-updates", max(1, updates // 25), "--log-interval", max(1, updates // 50)),
            *self.extra,
        ]

    def flags_of(self, name: str) -> tuple[str, ...]:
        """Task, criterion and codes of a row."""
        row = ROWS[name]
        if row.codes is None:
            return row.flags
        args = self.args
        flags = [*row.flags, "--latent-weight", str(args.latent_weight)]
        if row.codes == SELF and args.self_source == "online":  # for its speed: any model and dictionary of the size
            flags += ["--latent-source", "online", "--auxiliary-checkpoint", str(self.auxiliary), "--auxiliary-fp16"]
            return (*flags, "--latent-dictionary", str(self.output / f"dictionary-{args.coder}"))
        codes = {AUXILIARY: args.coder, SELF: args.coder}.get(row.codes, row.codes)
        return (*flags, "--latent-codes", str(self.codes_of(codes)))

    def falling_weight(self, name: str, updates: int) -> list[object]:
        """The flags that end the latent loss before the run ends."""
        if self.args.latent_until == 100 or ROWS[name].codes is None or not ROWS[name].with_mlm:
            return []
        return ["--latent-updates", max(1, updates * self.args.latent_until // 100)]

    def measure_speed(self, name: str) -> None:
        """Seconds of an update of a row, from a short run."""
        run = f"speed/{name}"
        self.train(run, self.flags_of(name), SPEED_UPDATES, self.args.rates[0], 1, "--no-save", "--disable-validation")
        ups = read_training_log(self.commands.log_of(run.replace("/", "-"))).train["ups"]
        self.seconds[name] = 1 / statistics.median(value for _, value in ups[len(ups) // 5 :] if value > 0)

    def search_rate(self, name: str) -> None:
        """The learning rate of a row, by the last validation of short runs."""
        args, row = self.args, ROWS[name]
        if row.rate_of is not None:
            self.rates[name] = self.rates[row.rate_of]
            return
        if len(args.rates) == 1:
            self.rates[name] = args.rates[0]
            return
        found = {}
        for rate in args.rates:
            run = f"search/{name}-{rate:g}"
            falling = self.falling_weight(name, args.search_updates)
            self.train(run, self.flags_of(name), args.search_updates, rate, args.seeds[0], *falling)
            found[rate] = read_training_log(self.commands.log_of(run.replace("/", "-"))).valid[row.metric][-1][1]
        self.rates[name] = min(found, key=found.__getitem__)

    def phases_of(self, name: str) -> tuple[float, list[Phase]]:
        """Seconds before a row's first update, and its phases."""
        args, row, each, plain = self.args, ROWS[name], self.seconds[name], self.seconds["mlm"]
        if row.codes is None:
            return 0.0, [Phase(0, each)]
        end = [Phase(args.latent_until, plain)] if self.falling_weight(name, args.updates) else []
        if row.codes == SELF:
            online = args.self_source == "online"
            once = self.costs_of_dictionary[args.coder] if online else self.cost_of_coder(args.coder)
            return 0.0, [Phase(0, plain), Phase(args.share, each, once), *end]
        before = 0.0 if args.auxiliary else self.auxiliary_updates * plain
        before += self.cost_of_coder(row.codes if row.codes in CODERS else args.coder)
        return before, [Phase(0, each), *end]

    def schedule_of(self, name: str) -> Schedule:
        """What the updates of a row cost in seconds."""
        before, phases = self.phases_of(name)
        return schedule_of_phases(before, phases, self.updates_of(name))

    def updates_of(self, name: str) -> int:
        """How many updates of a row the budget pays."""
        if name == "mlm":
            return int(self.args.updates)  # the budget is their cost; a division would round
        before, phases = self.phases_of(name)
        return updates_within(self.budget - before, phases)

    @property
    def budget(self) -> float:
        """Seconds of each row."""
        return self.args.updates * self.seconds["mlm"]

    def pretrain(self, name: str, seed: int) -> None:
        """Pre-train a row with a seed."""
        args, row, updates = self.args, ROWS[name], self.updates_of(name)
        if updates < args.updates / 2:
            tqdm.write(f"warning: the budget pays for {updates:,} updates of {name} and {args.updates:,} of mlm")
        if row.codes != SELF:
            begin = self.checkpoint(row.begins_from, seed) if row.begins_from else None
            more = ["--finetune-from-model", begin] if begin else []
            more += self.falling_weight(name, updates)
            self.train(f"runs/{name}-{seed}", self.flags_of(name), updates, self.rates[name], seed, *more)
            return
        words = ["mlsm", "pretrain", self.data_bin, "--save-dir", self.output / f"runs/{name}-{seed}", "--seed", seed]
        words += ["--max-update", updates, "--stages", args.share, "--atoms", args.atoms, "--coder", args.coder]
        words += ["--tokens", args.dictionary_tokens, *(["--k", args.k] if args.coder != "lasso" else [])]
        words += ["--latent-weight", args.latent_weight, "--threads", args.threads, "--latent-source", args.self_source]
        words += ["--layer", args.layer or args.layers, "--batch-size", args.batch_size]
        words += [*self.falling_weight(name, updates), *self.training_flags(updates, self.rates[name])]
        self.commands.run(f"runs-{name}-{seed}", words)

    def checkpoint(self, name: str, seed: int) -> Path:
        """The last checkpoint of a run."""
        return Path(self.output) / f"runs/{name}-{seed}" / "checkpoint_last.pt"

    # the whole

    def run(self) -> None:
        """Run everything that is missing; the tables are written after each run."""
        args = self.args
        self.prepare()
        self.search_rate("mlm")
        self.make_codes()
        for name in args.objectives:
            self.search_rate(name)
        speeds = self.output / "seconds.json"
        if not speeds.exists() or not set(args.objectives) <= set(read_json(speeds)):
            for name in tqdm(args.objectives, desc="speeds", unit="row"):
                self.measure_speed(name)
            write_json(speeds, self.seconds)
        self.seconds = read_json(speeds)
        runs = [  # a seed at a time, so that the tables soon have all rows
            (name, seed)
            for seed in args.seeds
            for name in args.objectives
            if seed == args.seeds[0] or ROWS[name].all_seeds
        ]
        finished: list[dict[str, Any]] = []
        for name, seed in tqdm(runs, desc="pre-training", unit="run"):
            self.pretrain(name, seed)
            finished.append(self.figures_of(name, seed))
            self.write(finished)

    def write(self, runs: list[dict[str, Any]]) -> None:
        """Write the figures, tables and plots of the runs that are finished."""
        args = self.args
        rows = [name for name in args.objectives if any(run["row"] == name for run in runs)]
        first = self.checkpoint("mlm", args.seeds[0])
        figures = {
            "settings": {name: value for name, value in vars(args).items() if name not in FILES},
            "rows": rows,
            "tasks": [task.name for task in args.tasks],
            "pair_sets": [Path(file).stem for file in args.pairs],
            "costs": {name: self.cost_of(name) for name in rows},
            "baseline": self.measures.of("random", first, has_mlm_head=False, from_scratch=True),
            "runs": runs,
        }
        write_json(self.output / "comparison.json", figures)
        with atomic_open(self.output / "comparison.md", "w") as file:
            file.write(page(figures))
        draw(figures, self.output / "comparison.png")

    def cost_of(self, name: str) -> dict[str, float]:
        """Seconds and operations of a row."""
        schedule, updates = self.schedule_of(name), self.updates_of(name)
        extra = schedule.before + sum(once for _, once, _ in schedule.parts)
        return {
            "updates": updates,
            "seconds_per_update": self.seconds[name],
            "extra_seconds": extra,
            "seconds": schedule.at(updates),
            "operations": self.operations_of(name, updates),
            "learning_rate": self.rates[name],
        }

    def operations_of(self, name: str, updates: int) -> float:
        """Floating-point operations of a row, everything included."""
        args, row = self.args, ROWS[name]
        with open(self.data_bin / "dict.txt", encoding="utf-8") as file:
            vocabulary = sum(1 for _ in file) + 5
        size = ModelSize(args.layers, args.width, geglu_dim(args.width), vocabulary, args.tokens_per_sample)
        tokens = args.batch_size * args.tokens_per_sample
        of_masked = args.arch.startswith("mlsm_modern")
        plain = size.update(tokens, last_layer_of_masked=of_masked)
        if name in ("taco", "npm"):  # they compare the hidden states of all tokens
            return updates * size.update(tokens, last_layer_of_masked=False)
        if row.codes is None:
            return updates * plain
        both = size.update(tokens, atoms=args.atoms, vocabulary=row.with_mlm, last_layer_of_masked=of_masked)
        layer = args.layer or args.layers
        corpus = read_json(self.codes_of(args.coder) / "train.codes" / "meta.json")["token_count"]
        end = updates * args.latent_until // 100 if self.falling_weight(name, updates) else updates
        if row.codes != SELF:
            before = (0 if args.auxiliary else self.auxiliary_updates) * plain
            before += size.coding(corpus, args.atoms, args.dictionary_tokens, layer)
            return before + end * both + (updates - end) * plain
        begin = updates * args.share // 100
        seen = corpus if args.self_source == "store" else (end - begin) * tokens
        coded = corpus if args.self_source == "store" else MASKED_SHARE * seen
        coding = size.coding(seen, args.atoms, args.dictionary_tokens, layer, coded=coded)
        return coding + (end - begin) * both + (begin + updates - end) * plain

    def figures_of(self, name: str, seed: int) -> dict[str, Any]:
        """The figures of a run."""
        row, schedule = ROWS[name], self.schedule_of(name)
        log = read_training_log(self.commands.log_of(f"runs-{name}-{seed}"))
        curve = []
        if row.has_mlm_head:
            for update, bits in log.valid[row.metric]:
                curve.append({"update": update, "seconds": schedule.at(update), "bits": bits})
        found = {"row": name, "seed": seed, "curve": curve}
        if name == "npm":
            found["retrieval_accuracy"] = log.valid["accuracy"][-1][1]
        return {**found, **self.measures.of(f"{name}-{seed}", self.checkpoint(name, seed), has_mlm_head=bool(curve))}


def main() -> int:
    """Run what is missing and write the comparison."""
    args = parse_arguments()
    for file in (*args.train, *args.valid, *args.held_out, *args.pairs):
        if not os.path.isfile(file):
            raise SystemExit(f"{file} does not exist")
    Comparison(args).run()
    print((args.output / "comparison.md").read_text(encoding="utf-8"))
    print(*sorted(str(path) for path in args.output.glob("comparison.*")), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
