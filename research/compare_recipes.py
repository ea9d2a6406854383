#!/usr/bin/env python3
"""Which recipe adapts a published encoder to a text best? Masked LM at equal time, against ``run_mlm.py``.

    python research/compare_recipes.py MODEL --text train.txt --valid held_out.txt --output DIR --minutes 5 \
        --labelled sst2/train.tsv sst2/dev.tsv --rows run_mlm mlm muon

``run_mlm`` is what the script of that name in the examples of ``transformers`` does without options: the stock model
and collator, blocks of as many ids as the model takes (lines are concatenated), 8 blocks a batch, AdamW with a rate of
5e-5 that falls linearly, float32. ``run_mlm-tuned`` has the length, batch size, rate and precision of ``mlm``.
All other rows are recipes of ``mlsm adapt``: see ``RECIPES``.

The updates of a row follow from the processor seconds (with ``--wall``, on an idle machine: the seconds) of a few
updates of its recipe, so that each row trains for ``--minutes``. Memory that is freed stays with the process in the
rows of ``mlsm adapt``, and in what follows them, so run the rows of ``run_mlm`` in a command of their own. Measured
before (``start``) and after: bits of masked words and retrieval on ``--valid``, and linear probes on the first
``--lines`` labelled texts.

Writes a table and a JSON file for each row. Run the same command again to resume. A later command may change the rows
and the minutes; other settings need another --output.
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import kept_results
import numpy as np
import torch
from kept_results import KeptResults
from labelled_lines import check_tasks, first_lines
from torch import nn
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    SchedulerType,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    logging,
)

from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.atomic_files import atomic_open
from mlsm_plugin.core.files.planned_folder import PlannedFolder
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder, HuggingFaceSource
from mlsm_plugin.core.machine.devices import has_fast_bf16
from mlsm_plugin.core.machine.memory import keep_freed_memory
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.text.hf_tokenizer import load_fast_tokenizer
from mlsm_plugin.evaluation.encoder_quality import EvaluationData, evaluate_encoder, read_evaluation_data
from mlsm_plugin.evaluation.quality_settings import QualitySettings
from mlsm_plugin.evaluation.sentence_encoders import open_sentence_encoder
from mlsm_plugin.huggingface.coding import encode_sequences, learn_from_sequences
from mlsm_plugin.huggingface.collators import IGNORED, LatentSemanticCollator, MaskedLmCollator, Masking
from mlsm_plugin.huggingface.kept_states_model import KEEP_WEIGHT, KeptStatesModel
from mlsm_plugin.huggingface.latent_semantic_model import LatentSemanticModel
from mlsm_plugin.huggingface.pretraining_model import MaskedLmModel, PretrainingModel
from mlsm_plugin.huggingface.pretraining_sequences import PretrainingSequence, PretrainingSequences
from mlsm_plugin.huggingface.saved_folder import save_pretrained
from mlsm_plugin.huggingface.text_sequences import write_text_sequences
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from mlsm_plugin.huggingface.trainer_callback import prepare
from mlsm_plugin.huggingface.training import TrainingSettings

START = "start"
STOCK = "run_mlm"
STOCK_TUNED = "run_mlm-tuned"
CODES = "mlsm+mlm"
PILOT = 8  # updates whose time is measured; the first two do not count


@dataclass(frozen=True)
class Recipe:
    """How a row is trained."""

    training: TrainingSettings = field(default_factory=TrainingSettings)
    masks: Masking = field(default_factory=Masking)
    head_first: float = 0.0  # share of the updates that train only the masked-LM head
    causal_first: float = 0.0  # share of the time that trains next tokens with causal attention
    layer_decay: float | None = None  # ratio of a layer's rate to that of the next layer
    keep_weight: float = 0.0  # of the loss that keeps the hidden states of unmasked tokens; 0: none


FALLING = Masking(mask_prob=0.3, mask_prob_end=0.15)
RECIPES = {
    "mlm": Recipe(),
    "head-first": Recipe(head_first=0.2),
    "rate-5e-5": Recipe(TrainingSettings(learning_rate=5e-5)),
    "head-first-5e-5": Recipe(TrainingSettings(learning_rate=5e-5), head_first=0.2),
    "rate-5e-4": Recipe(TrainingSettings(learning_rate=5e-4)),
    "rate-1e-3": Recipe(TrainingSettings(learning_rate=1e-3)),
    "masks-30": Recipe(masks=Masking(mask_prob=0.3)),
    "falling": Recipe(masks=FALLING),
    "whole-words": Recipe(masks=Masking(whole_words=True)),
    "attention-dropout": Recipe(TrainingSettings(attention_dropout=0.1)),
    "muon": Recipe(TrainingSettings(optimizer="muon", learning_rate=5e-4, muon_learning_rate=2e-3)),
    "muon-5e-3": Recipe(TrainingSettings(optimizer="muon", learning_rate=1e-3, muon_learning_rate=5e-3)),
    "falling-5e-4": Recipe(TrainingSettings(learning_rate=5e-4), FALLING),
    "falling-1e-3": Recipe(TrainingSettings(learning_rate=1e-3), FALLING),
    "lower-rates-below": Recipe(layer_decay=0.75),
    "causal-first": Recipe(causal_first=0.6),
    "kept": Recipe(keep_weight=KEEP_WEIGHT),
    "kept-5e-4": Recipe(TrainingSettings(learning_rate=5e-4), keep_weight=KEEP_WEIGHT),
    "kept-muon": Recipe(
        TrainingSettings(optimizer="muon", learning_rate=1e-3, muon_learning_rate=5e-3), keep_weight=KEEP_WEIGHT
    ),
    CODES: Recipe(),
}
ROWS = (START, STOCK, STOCK_TUNED, *RECIPES)


class Clock(TrainerCallback):
    """The time at the end of each update, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.times.append(self.now())


class HeadFirst(TrainerCallback):
    """Trains only the masked-LM head in the first updates, as far as it is not tied to the embeddings."""

    def __init__(self, model: MaskedLmModel, updates: int) -> None:
        head = {id(parameter) for parameter in model.head_parameters()}
        self.encoder = [parameter for parameter in model.parameters() if id(parameter) not in head]
        self.updates = updates

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Freeze or unfreeze the encoder."""
        for parameter in self.encoder:
            parameter.requires_grad_(state.global_step >= self.updates)


class NextTokenCollator(MaskedLmCollator):
    """Batches without masks, whose labels are the next tokens."""

    def __call__(self, sequences: Sequence[PretrainingSequence]) -> dict[str, Any]:
        """The batch of the base class, with other ``input_ids`` and ``labels``."""
        batch = super().__call__(sequences)
        ids = torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])
        following = ids[:, 1:].masked_fill(batch["attention_mask"][:, 1:] == 0, IGNORED)
        batch["input_ids"] = ids
        batch["labels"] = nn.functional.pad(following, (0, 1), value=IGNORED)
        return batch


def set_causal(model: PretrainingModel, *, causal: bool) -> None:
    """Let the tokens of a BERT see earlier tokens only, or all.

    ValueError if tokens still see later ones, as in a model type that cannot be a decoder.
    """
    model.config.is_decoder = causal
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = causal
    if causal and sees_later_tokens(model):
        kind = model.config.model_type
        raise ValueError(f"a model of type {kind} has no causal attention; leave causal-first out of --rows")


def sees_later_tokens(model: PretrainingModel) -> bool:
    """Whether a token changes the states of earlier tokens, in a sequence with padding; ends training mode."""
    model.eval()
    ids = torch.tensor([[10, 11, 12, 13, 14]], device=model.device)
    mask = torch.tensor([[1, 1, 1, 1, 0]], device=model.device)  # some models are causal only without padding
    changed = ids.clone()
    changed[:, 3] = 15
    with torch.no_grad():
        states = [model.base_model(input_ids=tokens, attention_mask=mask)[0] for tokens in (ids, changed)]
    return not torch.allclose(states[0][:, :3], states[1][:, :3])


def adamw_by_layers(model: PretrainingModel, training: TrainingSettings, decay: float) -> torch.optim.AdamW:
    """AdamW whose rate falls by ``decay`` from the head to the last layer, and so on down to the embeddings."""
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    depth_of = {id(weight): depth for depth, layer in enumerate(layers, start=1) for weight in layer.parameters()}
    head = {id(weight) for weight in model.head_parameters()}
    groups = []
    for weight in model.parameters():
        depth = len(layers) + 1 if id(weight) in head else depth_of.get(id(weight), 0)
        rate = training.largest_rate * decay ** (len(layers) + 1 - depth)
        weight_decay = training.weight_decay if weight.dim() > 1 else 0.0
        groups.append({"params": [weight], "lr": rate, "weight_decay": weight_decay})
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


class Comparison(KeptResults):
    """The rows of the comparison; each result is kept in the output folder, and not computed again."""

    @cached_property
    def text(self) -> TokenSequences:
        """The text as ``mlsm adapt`` packs it."""
        sequences, _ = write_text_sequences(
            [self.args.text], self.args.model, self.output / "tokens", max_length=self.args.max_length
        )
        return sequences

    def blocks(self, length: int) -> list[dict[str, list[int]]]:
        """The text as ``run_mlm.py`` cuts it: lines with their special tokens, concatenated, in blocks."""
        tokenizer = load_fast_tokenizer(self.args.model)
        with open(self.args.text, encoding="utf-8") as file:
            lines = [line for line in file.read().splitlines() if line.strip()]
        ids = np.concatenate([np.asarray(row) for row in tokenizer(lines, verbose=False)["input_ids"]])
        rows = ids[: len(ids) // length * length].reshape(-1, length)
        return [{"input_ids": row.tolist()} for row in rows]

    @cached_property
    def evaluation(self) -> EvaluationData:
        """The evaluation data of all rows."""
        pairs = [(first_lines(train, self.args.lines, self.output), test) for train, test in self.args.labelled]
        return read_evaluation_data([self.args.valid], pairs, [], QualitySettings(queries=300, passages=2000))

    def timed_name(self, name: str) -> str:
        """A file's name with the minutes, and of which clock they are."""
        clock = "-wall" if self.args.wall else ""
        return f"{name}-{self.args.minutes:g}{clock}"

    def row(self, name: str) -> dict[str, Any]:
        """The figures of a row."""
        key = START if name == START else self.timed_name(name)
        figures: dict[str, Any] = self.once(key, partial(self.measured, name, self.output / "models" / key))
        return figures

    def measured(self, name: str, folder: Path) -> dict[str, Any]:
        """Train a row and measure it."""
        figures: dict[str, Any] = {"updates": 0, "seconds": 0.0}
        model: Path = self.args.model
        if name != START:
            figures = self.trained(name, folder)
            model = folder
        measures = evaluate_encoder(open_sentence_encoder(model), self.evaluation)
        return {**figures, "measures": {measure: values.figure for measure, values in measures.items()}}

    def trained(self, name: str, folder: Path) -> dict[str, Any]:
        """Train for the time, write the model, and return the number of updates and the seconds."""
        if name.startswith(STOCK):
            trainer, seconds = self.timed(partial(self.stock_trainer, name), self.args.minutes)
        else:
            keep_freed_memory()
            share = RECIPES[name].causal_first
            model = None
            seconds = 0.0
            if share:
                causal, seconds = self.timed(partial(self.causal_trainer, name), share * self.args.minutes)
                model = causal.model
                set_causal(model, causal=False)
            trainer, further_seconds = self.timed(
                partial(self.trainer, name, model=model), (1 - share) * self.args.minutes
            )
            seconds += further_seconds
        shutil.rmtree(self.output / "trainer", ignore_errors=True)
        save_pretrained(folder, trainer.model, load_fast_tokenizer(self.args.model))
        return {"updates": trainer.state.max_steps, "seconds": seconds, "log": trainer.state.log_history}

    def timed(self, make: Callable[[int], Trainer], minutes: float) -> tuple[Trainer, float]:
        """Train for the time with the trainer that ``make`` makes for a number of updates; also return the seconds."""
        now = time.perf_counter if self.args.wall else time.process_time
        clock = Clock(now)
        pilot = make(PILOT)
        pilot.add_callback(clock)
        pilot.train()
        seconds_of_update = (clock.times[-1] - clock.times[1]) / (len(clock.times) - 2)
        trainer = make(max(1, round(60 * minutes / seconds_of_update)))
        start = now()
        trainer.train()
        return trainer, now() - start

    def stock_trainer(self, name: str, updates: int) -> Trainer:
        """The trainer of ``run_mlm.py``."""
        tuned = TrainingSettings().for_length(self.args.max_length)
        is_tuned = name == STOCK_TUNED
        arguments = TrainingArguments(
            output_dir=str(self.output / "trainer"),
            max_steps=updates,
            per_device_train_batch_size=tuned.samples_per_batch if is_tuned else 8,
            gradient_accumulation_steps=tuned.batches_per_update if is_tuned else 1,
            learning_rate=tuned.largest_rate if is_tuned else 5e-5,
            bf16=is_tuned and tuned.in_bf16,
            use_cpu=True,
            save_strategy="no",
            logging_steps=20,
            report_to=[],
        )
        torch.manual_seed(1)
        model = AutoModelForMaskedLM.from_pretrained(self.args.model)
        length = self.args.max_length if is_tuned else min(1024, HuggingFaceSource.usual_tokens_of(self.args.model))
        collator = DataCollatorForLanguageModeling(load_fast_tokenizer(self.args.model))
        return Trainer(model, arguments, data_collator=collator, train_dataset=self.blocks(length))

    def causal_trainer(self, name: str, updates: int) -> Trainer:
        """A trainer of next tokens with causal attention, whose rate does not fall."""
        trainer = self.trainer(name, updates)
        trainer.data_collator = NextTokenCollator(load_fast_tokenizer(self.args.model))
        trainer.args.lr_scheduler_type = SchedulerType.CONSTANT_WITH_WARMUP
        set_causal(trainer.model, causal=True)
        return trainer

    def trainer(self, name: str, updates: int, *, model: PretrainingModel | None = None) -> Trainer:
        """A trainer as ``mlsm adapt`` makes it, of a copy of ``model`` or of a new one."""
        recipe = RECIPES[name]
        settings = recipe.training.for_length(self.args.max_length)
        tokenizer = load_fast_tokenizer(self.args.model)
        codes = self.codes() if name == CODES else None
        torch.manual_seed(1)
        collator: MaskedLmCollator
        if model is not None:
            model = copy.deepcopy(model)
            collator = MaskedLmCollator(tokenizer, recipe.masks)
        elif codes is None:
            dropout = recipe.training.attention_dropout or 0.0
            stock = MaskedLmModel.opened(self.args.model, attention_dropout=dropout)
            if recipe.keep_weight:
                model = KeptStatesModel.of(stock, keep_weight=recipe.keep_weight)
            else:
                model = MaskedLmModel.of(stock)
            collator = MaskedLmCollator(tokenizer, recipe.masks)
        else:
            stock = LatentSemanticModel.opened(self.args.model, mlm_weight=1.0)
            model = LatentSemanticModel.of(stock, num_atoms=self.args.atoms, mlm_weight=1.0)
            collator = LatentSemanticCollator(tokenizer, recipe.masks)
        arguments = settings.arguments(self.output / "trainer")
        arguments.max_steps = updates
        arguments.warmup_steps = round(settings.warmup * updates)
        arguments.eval_strategy = "no"
        arguments.save_strategy = "no"
        arguments.logging_steps = 20
        optimizer: torch.optim.Optimizer | None = settings.optimizer_of(model)
        if recipe.layer_decay is not None:
            optimizer = adamw_by_layers(model, settings, recipe.layer_decay)
        trainer = prepare(
            Trainer(
                model,
                arguments,
                data_collator=collator,
                train_dataset=PretrainingSequences(self.text, codes),
                optimizers=(optimizer, None),
            )
        )
        if recipe.head_first:
            assert isinstance(model, MaskedLmModel)
            trainer.add_callback(HeadFirst(model, round(recipe.head_first * updates)))
        return trainer

    def codes(self) -> Path:
        """The model's own codes, as ``mlsm adapt`` makes them."""
        folder = self.output / "codes"
        model = self.args.model
        layer = HuggingFaceSource.layers_of(model)
        half = has_fast_bf16(torch.device("cpu"))
        encoder = HuggingFaceEncoder(model, layer=layer, device="cpu", fp16=half)
        learning = LearningSettings(
            layer=layer, coder="topk", atoms=self.args.atoms, tokens=self.args.tokens, device="cpu", fp16=half
        )
        dictionary = self.output / "dictionary"
        learn_from_sequences(self.text, model, output=dictionary, settings=learning, encoder=encoder)
        if not (folder / "meta.json").exists():
            encode_sequences(
                self.text,
                model,
                coder=load_coder(dictionary),
                output=folder,
                settings=CodingSettings(layer, fp16=half),
                encoder=encoder,
            )
        return folder


def table(comparison: Comparison, row: Callable[[str], dict[str, Any]]) -> str:
    """The figures of the rows as a Markdown table."""
    rows = {name: row(name) for name in comparison.args.rows}
    measures = list(rows[comparison.args.rows[-1]]["measures"])
    header = ["row", "updates", "minutes", *measures]
    lines = [f"| {' | '.join(header)} |", f"| --- |{' ---: |' * (len(header) - 1)}"]
    for name, figures in rows.items():
        cells = [name, f"{figures['updates']:,}", f"{figures['seconds'] / 60:.1f}"]
        for measure in measures:
            value = figures["measures"].get(measure)
            cells.append("" if value is None else f"{value if 'bits' in measure else 100 * value:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def planned_folder(args: argparse.Namespace) -> PlannedFolder:
    """The folder of a comparison, with fixed settings and inputs; later commands may change the rows and the minutes.

    Raises:
        ValueError: the model is not a Hugging Face model, or two tasks have one name.
        OSError: a file cannot be read.
    """
    check_tasks(args.labelled)
    inputs = {"model": HuggingFaceSource.files_of(args.model), **kept_results.files_of(args)}
    may_change = ("rows", "minutes", "wall", "output")
    return kept_results.planned_folder(args, inputs, may_change=may_change, seal_file=f"{START}.json")


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a published encoder with its tokenizer")
    parser.add_argument("--text", required=True, help="text to train on")
    parser.add_argument("--valid", required=True, help="held-out text to measure on")
    parser.add_argument(
        "--labelled", nargs=2, action="append", default=[], metavar="TSV", help="train and test (default: none)"
    )
    parser.add_argument("--lines", type=int, default=2000, help="labelled texts to train on (default: 2000)")
    parser.add_argument("--output", required=True, type=Path, help="folder for everything that is made")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--minutes", type=float, default=5.0, help="of each training (default: 5)")
    parser.add_argument("--wall", action="store_true", help="take minutes of the clock, not of the processor")
    parser.add_argument("--max-length", type=int, default=128, help="ids of a sequence (default: 128)")
    parser.add_argument("--atoms", type=int, default=3000, help=f"of the dictionary of {CODES} (default: 3000)")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="to learn the dictionary from")
    return parser.parse_args()


def main() -> int:
    """Train and measure the missing rows, and write the table."""
    args = parse_arguments()
    logging.set_verbosity_error()
    kept_results.begin(partial(planned_folder, args))
    comparison = Comparison(args)
    for name in args.rows:
        try:
            figures = comparison.row(name)
        except (ValueError, OSError) as error:
            raise SystemExit(str(error)) from None
        print(name, figures["updates"], figures["seconds"], figures["measures"], flush=True)
    rows = table(comparison, comparison.row)
    with atomic_open(args.output / f"{comparison.timed_name('recipes')}.md", "w") as file:
        file.write(rows)
    print(rows)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
