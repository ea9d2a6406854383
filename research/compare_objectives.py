#!/usr/bin/env python3
"""Pre-train with each objective at equal total cost, with controls and several seeds, and compare.

Writes ``comparison.json``, ``comparison.md`` and ``comparison.png`` to --output after each run. To resume, run the same
command again. A later command may add rows, seeds, tasks and pairs; it must also name the earlier ones, since the files
contain only what the last command names. docs/research/comparison.md explains the protocol.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison.arguments import FILES, parse_arguments
from comparison.codes import Codes, blocks_of
from comparison.commands import PLUGIN, Commands
from comparison.costs import ModelSize, Phase, Schedule, schedule_of_phases, updates_within
from comparison.measures import Measures
from comparison.report import OF_A_FOLDER, write_report
from comparison.rows import AUXILIARY, CODERS, CONTROLS, CONTROLS_OF_SELF, RANDOM, ROWS, SELF, Row

from mlsm_plugin.core.files.atomic_files import read_json, sha256_of_files, write_json
from mlsm_plugin.core.files.output_lock import hold_lock
from mlsm_plugin.core.files.planned_folder import PlannedFolder
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.files.step_record import RECORD, StepRecord
from mlsm_plugin.core.hidden_states.sources import source_of
from mlsm_plugin.evaluation.masked_batches import MASKED_SHARE
from mlsm_plugin.fairseq_plugin.models.mlsm_modern import geglu_dim
from mlsm_plugin.fairseq_plugin.pipelines.staged_pretraining import TEACHER
from mlsm_plugin.reports.training_log import read_training_log

SPEED_UPDATES = 60
MAY_CHANGE = (*OF_A_FOLDER, "rates", "search_updates")  # settings that a later command may change; runs keep theirs
ADVICE = "Give another --output, or the settings that it was begun with"


class Comparison:
    """The runs of one comparison, and the figures read from them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.output = args.output
        self.commands = Commands(args.output, args.threads)
        self.measures = Measures(args, self.commands)
        self.data_bin = args.output / "data-bin"
        self.extra = shlex.split(args.fairseq_flags)
        self.kinds = {ROWS[name].codes for name in args.objectives} - {None}
        self.online = args.latent_source == "online"
        self.model = ["--arch", args.arch, "--max-positions", 2 * args.tokens_per_sample]
        self.seconds: dict[str, float] = {}  # of an update of each row
        self.rates: dict[str, float] = {}
        self.searched: dict[str, dict[str, float]] = {}  # last loss of the short run with each rate
        self.codes = Codes(args, self.commands, self.data_bin)

    # what all rows share

    def prepare(self) -> None:
        """Make the tokenizer and the dataset; the held-out text is its split ``test``."""
        args = self.args
        texts = [*self.args.train, *self.args.valid, *self.args.held_out]
        tokenizer = self.output / "tokenizer"
        if args.auxiliary:
            tokenizer = source_of(args.auxiliary).tokenizer_of(args.auxiliary)
        else:
            words = ["mlsm", "tokenizer", "--input", *args.train, "--vocab-size", args.vocab_size]
            self.commands.run("tokenizer", [*words, "--output", tokenizer], inputs=texts)
        splits = ["--train", *args.train, "--valid", *args.valid, "--test", *args.held_out]
        words = ["mlsm", "binarize", "--tokenizer", tokenizer, *splits, "--output", self.data_bin]
        self.commands.run("binarize", words, inputs=texts)

    def make_codes(self) -> None:
        """Train the auxiliary model, and make its dictionaries and codes, and the codes of the controls."""
        args = self.args
        if not self.needs_auxiliary:
            return
        auxiliary = self.auxiliary
        if args.auxiliary is None:
            self.train(
                "auxiliary", ROWS["mlm"].flags, self.auxiliary_updates, self.rates["mlm"], 1, size=args.auxiliary_size
            )  # fmt: skip
        for coder in sorted({args.coder} | ({"lasso"} & self.kinds)):
            self.codes.learn(coder, auxiliary)
            if coder in self.stored:
                self.codes.encode(coder, auxiliary, self.codes.dictionary(coder))
        for kind in sorted(self.kinds & set(CONTROLS)):
            if kind == RANDOM:
                self.codes.make_random(kind, auxiliary, self.codes.dictionary(args.coder))
            else:
                self.codes.make_control(kind, kind, self.codes.folder(args.coder))

    @property
    def stored(self) -> set[str]:
        """The coders for which all tokens are coded, since a row reads these codes or a control changes them."""
        changed = self.kinds & set(CONTROLS) - {RANDOM}
        return (self.kinds & {"lasso"}) | ({self.args.coder} if changed or not self.online else set())

    def codes_online(self, row: Row) -> bool:
        """Whether a row's codes are made while it trains; the codes of a lasso never are."""
        return self.online and row.codes != "lasso"

    def coder_of(self, row: Row) -> str:
        """The coder of the codes that a row reads, or that its control changes."""
        return row.codes if row.codes in CODERS else self.args.coder

    @property
    def needs_auxiliary(self) -> bool:
        """Whether a row uses an auxiliary model's codes, or their cost, as ``self`` does with a store."""
        return bool(self.kinds - ({SELF} if self.online else set()))

    @property
    def auxiliary(self) -> str | Path:
        """The auxiliary model."""
        return self.args.auxiliary or self.output / "auxiliary" / "checkpoint_last.pt"

    @property
    def auxiliary_updates(self) -> int:
        """The number of updates of the auxiliary model, from its share of the budget."""
        budget = self.args.updates * self.args.share / 100 * self.seconds["mlm"]
        return max(1, round(budget / self.seconds[AUXILIARY]))

    # training

    def train(
        self, name: str, flags: tuple[str, ...], updates: int, rate: float, seed: int, *more: object,
        size: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Train a model once; ``size`` is (layers, width, heads), None for the size of all rows."""
        args = self.args
        batch = ["--batch-size", args.batch_size, *self.masking_flags()]
        if "nonparametric_masked_lm" in flags:  # a sample of NPM is a group, and NPM masks spans
            batch = ["--batch-size", args.batch_size // args.group_size, "--group-size", args.group_size]
        words = ["fairseq-train", self.data_bin, "--user-dir", PLUGIN, "--save-dir", self.output / name]
        words += [*flags, "--max-update", updates, *batch, *self.training_flags(updates, rate, size)]
        words += ["--seed", seed, *more]
        self.begin_run(name, updates, rate)
        self.commands.run(name.replace("/", "-"), words)

    def begin_run(self, name: str, updates: int, rate: float) -> None:
        """Exit with an error if the run had another rate: fairseq would resume it, and treat it as complete."""
        try:
            PlannedFolder(self.output / name, {"learning_rate": rate, "updates": updates}, advice=ADVICE).begin()
        except ValueError as error:
            raise SystemExit(str(error)) from None

    def masking_flags(self) -> list[object]:
        """The flags for another share of masked tokens; the share in validation is the same in all comparisons."""
        share = self.args.mask_prob
        return [] if share == MASKED_SHARE else ["--mask-prob", share, "--valid-mask-prob", MASKED_SHARE]

    def training_flags(self, updates: int, rate: float, size: Sequence[int] | None = None) -> list[object]:
        """The flags of every training."""
        layers, width, heads = size or (self.args.layers, self.args.width, self.args.heads)
        return [
            *(*self.model, "--encoder-layers", layers, "--encoder-embed-dim", width),
            *(
                "--encoder-attention-heads",
                heads,
                *blocks_of(self.args),
                "--autocast",
                "auto",
                "--required-batch-size-multiple",
                1,
            ),
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
        flags = (*row.flags, "--latent-weight", str(args.latent_weight))
        if row.control_of == SELF:
            return flags  # its codes are made when ``self`` has been trained
        if row.codes == AUXILIARY and self.online:
            flags += ("--latent-source", "online", "--auxiliary-checkpoint", str(self.auxiliary), "--auxiliary-fp16")
            return (*flags, "--latent-dictionary", str(self.codes.dictionary(args.coder)))
        codes = {AUXILIARY: args.coder, SELF: args.coder}.get(row.codes, row.codes)
        return (*flags, "--latent-codes", str(self.codes.folder(codes)))

    def falling_weight(self, name: str, updates: int) -> list[object]:
        """The flags that let the weight of the latent loss fall to 0 before the run ends."""
        if self.args.latent_until == 100 or ROWS[name].codes is None or not ROWS[name].with_mlm:
            return []
        return ["--latent-updates", max(1, updates * self.args.latent_until // 100)]

    def measure_speed(self, name: str) -> None:
        """Measure the seconds of an update of a row, or of the auxiliary model, in a short run; they are kept.

        A control has the seconds of its row, and thus as many updates, even if only that row codes online.
        """
        args = self.args
        file = self.output / "seconds.json"
        if not self.seconds and file.exists():
            self.seconds = read_json(file)
        controlled = ROWS[name].control_of if name in ROWS else None
        if controlled:
            self.measure_speed(controlled)
            self.seconds[name] = self.seconds[controlled]
        if name in self.seconds:
            return
        run = f"speed/{name}"
        begin = SPEED_UPDATES // 5
        rate = args.rates[0]
        if name == SELF and self.online:  # the second half of a run in two stages
            self.train_in_stages(run, 2 * SPEED_UPDATES, rate, 1, begin=50)
            begin += SPEED_UPDATES
        else:
            size = args.auxiliary_size if name == AUXILIARY else None
            flags = ROWS["mlm"].flags if name == AUXILIARY else self.flags_of(name)
            self.train(run, flags, SPEED_UPDATES, rate, 1, "--no-save", "--disable-validation", size=size)
        ups = read_training_log(self.commands.log_of(run.replace("/", "-"))).train["ups"]
        self.seconds[name] = 1 / statistics.median(value for update, value in ups if update > begin and value > 0)
        write_json(file, self.seconds)

    def search_rate(self, name: str) -> None:
        """Choose the learning rate of a row, by the last validation of short runs."""
        args = self.args
        row = ROWS[name]
        if len(args.rates) == 1:
            self.rates[name] = args.rates[0]
            return
        if row.rate_of is not None:
            self.rates[name] = self.rates[row.rate_of]
            return
        losses = {}
        for rate in args.rates:
            run = f"search/{name}-{rate:g}-{args.search_updates}"
            more = ["--validate-interval-updates", args.search_updates]  # only the last loss is read
            more += [*self.falling_weight(name, args.search_updates), *self.begin_of(name, args.seeds[0])]
            self.train(run, self.flags_of(name), args.search_updates, rate, args.seeds[0], *more)
            losses[rate] = read_training_log(self.commands.log_of(run.replace("/", "-"))).valid[row.metric][-1][1]
        self.rates[name] = min(losses, key=losses.__getitem__)
        self.searched[name] = {f"{rate:g}": loss for rate, loss in losses.items()}

    def phases_of(self, name: str) -> tuple[float, list[Phase]]:
        """Seconds before a row's first update, and its phases."""
        args = self.args
        row = ROWS[name]
        each = self.seconds[name]
        plain = self.seconds["mlm"]
        if row.codes is None:
            return 0.0, [Phase(0, each)]
        end = [Phase(args.latent_until, plain)] if self.falling_weight(name, args.updates) else []
        if row.codes == SELF:
            record = StepRecord(self.output / "speed" / SELF / RECORD)
            once = record.seconds_of("stage 1: codes") if self.online else self.codes.seconds_of(args.coder)
            return 0.0, [Phase(0, plain), Phase(args.share, each, once), *end]
        before = 0.0 if args.auxiliary else self.auxiliary_updates * self.seconds[AUXILIARY]
        if self.codes_online(row):
            before += self.codes.seconds_of_dictionary[args.coder]
        else:
            before += self.codes.seconds_of(self.coder_of(row))
        return before, [Phase(0, each), *end]

    def schedule_of(self, name: str) -> Schedule:
        """The cost of a row's updates in seconds."""
        before, phases = self.phases_of(name)
        return schedule_of_phases(before, phases, self.updates_of(name))

    def updates_of(self, name: str) -> int:
        """The number of updates of a row within the budget."""
        if name == "mlm":
            return int(self.args.updates)  # their cost is the budget; a division would round
        before, phases = self.phases_of(name)
        return updates_within(self.budget - before, phases)

    @property
    def budget(self) -> float:
        """The seconds that each row may take."""
        return self.args.updates * self.seconds["mlm"]

    def pretrain(self, name: str, seed: int) -> None:
        """Search the learning rate of a row, and pre-train it with a seed."""
        args = self.args
        row = ROWS[name]
        updates = self.updates_of(name)
        self.search_rate(name)  # now, since the row may begin from a model of this comparison
        if updates < args.updates / 2:
            Progress.write(f"warning: the budget pays for {updates:,} updates of {name} and {args.updates:,} of mlm")
        run = f"runs/{name}-{seed}"
        more = self.falling_weight(name, updates)
        if name == SELF:
            self.train_in_stages(run, updates, self.rates[name], seed, *more, begin=args.share)
            return
        more += self.begin_of(name, seed)
        if row.control_of == SELF:
            more += self.branch(name, seed)
        self.train(run, self.flags_of(name), updates, self.rates[name], seed, *more)

    def begin_of(self, name: str, seed: int) -> list[object]:
        """The flags to start a row from the model of another row."""
        begins_from = ROWS[name].begins_from
        return ["--finetune-from-model", self.checkpoint(begins_from, seed)] if begins_from else []

    def branch(self, name: str, seed: int) -> list[object]:
        """Make the codes of a control of ``self``; returns the flags to continue the first stage with them."""
        kind = CONTROLS_OF_SELF[name]
        stage = self.output / f"runs/{SELF}-{seed}" / "stage-1"
        model = stage / TEACHER
        dictionary = stage / "dictionary"
        codes = f"{name}-{seed}"
        if kind == RANDOM:
            self.codes.make_random(codes, model, dictionary)
        else:
            stage_codes = stage
            if self.online:
                self.codes.encode(f"{SELF}-{seed}", model, dictionary)
                stage_codes = self.codes.folder(f"{SELF}-{seed}")
            self.codes.make_control(kind, codes, stage_codes)
        return ["--continue-once", model, "--latent-codes", self.codes.folder(codes)]

    def train_in_stages(self, name: str, updates: int, rate: float, seed: int, *more: object, begin: int) -> None:
        """Train a model once, with its own codes after ``begin`` percent of the updates."""
        args = self.args
        words = ["mlsm", "pretrain", self.data_bin, "--save-dir", self.output / name, "--seed", seed]
        words += ["--max-update", updates, "--stages", begin, "--atoms", args.atoms, "--coder", args.coder]
        words += ["--tokens", args.dictionary_tokens, *(["--k", args.k] if args.coder != "lasso" else [])]
        words += ["--latent-weight", args.latent_weight, "--latent-source", args.latent_source]
        words += ["--layer", args.layer or args.layers, "--batch-size", args.batch_size, "--threads", args.threads]
        words += [*self.masking_flags(), *more]
        self.begin_run(name, updates, rate)
        self.commands.run(name.replace("/", "-"), [*words, *self.training_flags(updates, rate)])

    def checkpoint(self, name: str, seed: int) -> Path:
        """The last checkpoint of a run."""
        return Path(self.output) / f"runs/{name}-{seed}" / "checkpoint_last.pt"

    # everything

    def run(self) -> None:
        """Run everything that is missing, and write the tables after each run."""
        args = self.args
        self.prepare()
        self.search_rate("mlm")
        self.measure_speed("mlm")
        if self.needs_auxiliary and not args.auxiliary:
            self.measure_speed(AUXILIARY)
        self.make_codes()
        for name in Progress(args.objectives, desc="speeds", unit="row"):
            self.measure_speed(name)
        runs = [  # a seed at a time, so that the tables soon have all rows
            (name, seed)
            for seed in args.seeds
            for name in args.objectives
            if seed == args.seeds[0] or ROWS[name].all_seeds
        ]
        finished: list[dict[str, Any]] = []
        for name, seed in Progress(runs, desc="pre-training", unit="run"):
            self.pretrain(name, seed)
            finished.append(self.figures_of(name, seed))
            self.write(finished)

    def write(self, runs: list[dict[str, Any]]) -> None:
        """Write the figures, tables and plots of the finished runs."""
        args = self.args
        rows = [name for name in args.objectives if any(run["row"] == name for run in runs)]
        first = self.checkpoint("mlm", args.seeds[0])
        figures = {
            "settings": {name: value for name, value in vars(args).items() if name not in FILES},
            "texts": sha256_of_files(*args.train, *args.valid, *args.held_out),
            "rows": rows,
            "tasks": [task.name for task in args.tasks],
            "pair_sets": [Path(file).stem for file in args.pairs],
            "costs": {name: self.cost_of(name) for name in rows},
            "baseline": self.measures.of("random", first, has_mlm_head=False, from_scratch=True),
            "runs": runs,
        }
        write_report(figures, self.output)

    def cost_of(self, name: str) -> dict[str, Any]:
        """Seconds and operations of a row, and its learning rate."""
        schedule = self.schedule_of(name)
        updates = self.updates_of(name)
        extra = schedule.before + sum(once for _, once, _ in schedule.parts)
        return {
            "updates": updates,
            "seconds_per_update": self.seconds[name],
            "extra_seconds": extra,
            "seconds": schedule.at(updates),
            "operations": self.operations_of(name, updates),
            "learning_rate": self.rates[name],
            "searched": self.searched.get(name, {}),
        }

    def operations_of(self, name: str, updates: int) -> float:
        """Floating-point operations of a row, including codes."""
        args = self.args
        row = ROWS[name]
        with open(self.data_bin / "dict.txt", encoding="utf-8") as file:
            vocabulary = sum(1 for _ in file) + 5
        tokens = args.batch_size * args.tokens_per_sample
        of_masked = args.arch.startswith("mlsm_modern")

        def model(layers: int, width: int) -> ModelSize:
            return ModelSize(layers, width, geglu_dim(width), vocabulary, args.tokens_per_sample, args.mask_prob)

        size = model(args.layers, args.width)
        plain = size.update(tokens, last_layer_of_masked=of_masked)
        if name == "npm":  # reads the masked and the original text, and has no output layer
            return updates * size.update(2 * tokens, vocabulary=False, last_layer_of_masked=False)
        if name == "taco":  # it compares the hidden states of all tokens
            return updates * size.update(tokens, last_layer_of_masked=False)
        if row.codes is None:
            return updates * plain
        both = size.update(tokens, atoms=args.atoms, vocabulary=row.with_mlm, last_layer_of_masked=of_masked)
        begin = updates * args.share // 100 if row.codes == SELF else 0
        end = updates * args.latent_until // 100 if self.falling_weight(name, updates) else updates
        training = (begin + updates - end) * plain + (end - begin) * both
        coder = size if row.codes == SELF else model(*args.auxiliary_size[:2])
        if row.codes != SELF and not args.auxiliary:
            training += self.auxiliary_updates * coder.update(tokens, last_layer_of_masked=of_masked)
        online = self.codes_online(row)
        seen = (end - begin) * tokens if online else self.codes.training_tokens(self.coder_of(row))
        layer = args.layer or coder.layers
        return training + coder.coding(
            seen, args.atoms, args.dictionary_tokens, layer, of_masked=online, last_layer_of_masked=online and of_masked
        )

    def figures_of(self, name: str, seed: int) -> dict[str, Any]:
        """The figures of a run."""
        row = ROWS[name]
        schedule = self.schedule_of(name)
        log = read_training_log(self.commands.log_of(f"runs-{name}-{seed}"))
        curve = []
        if row.has_mlm_head:
            for update, bits in log.valid[row.metric]:
                curve.append({"update": update, "seconds": schedule.at(update), "bits": bits})
        figures = {"row": name, "seed": seed, "curve": curve}
        if name == "npm":
            figures["retrieval_accuracy"] = log.valid["accuracy"][-1][1]
        return {**figures, **self.measures.of(f"{name}-{seed}", self.checkpoint(name, seed), has_mlm_head=bool(curve))}


def planned_folder(args: argparse.Namespace) -> PlannedFolder:
    """The folder of a comparison, with fixed settings; later commands may add rows, seeds, tasks and pairs.

    Raises:
        ValueError, OSError: a text or the auxiliary model cannot be read.
    """
    settings = {name: value for name, value in vars(args).items() if name not in (*FILES, *MAY_CHANGE)}
    plan = {"settings": settings, "texts": sha256_of_files(*args.train, *args.valid, *args.held_out)}
    if args.auxiliary:  # all rows use its tokenizer
        plan["auxiliary"] = sha256_of_files(*source_of(args.auxiliary).files_of(args.auxiliary))
    return PlannedFolder(args.output, plan, seal_file="comparison.json", advice=ADVICE)


def main() -> int:
    """Run the missing parts, and write the comparison."""
    args = parse_arguments(__doc__)
    for file in (*args.train, *args.valid, *args.held_out, *args.pairs):
        if not os.path.isfile(file):
            raise SystemExit(f"{file} does not exist")
    try:
        folder = planned_folder(args)
        folder.check()
        hold_lock(args.output)
        comparison = Comparison(args)
        comparison.measures.check_files()
        folder.begin()
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    comparison.run()
    print((args.output / "comparison.md").read_text(encoding="utf-8"))
    print(*sorted(str(path) for path in args.output.glob("comparison.*")), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
