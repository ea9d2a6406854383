#!/usr/bin/env python3
"""Does a new, small encoder learn more from the codes of a published encoder? With controls, seeds, and equal time.

    python research/compare_teachers.py TEACHER --text train.txt --valid valid.txt --output DIR \
        --labelled sst2/train.tsv sst2/dev.tsv --labelled trec/train.tsv trec/test.tsv --seeds 1 2 3

A student with its own tokenizer is trained from random weights, for the same number of updates on the same text, with

- ``mlm``: masked LM;
- ``mlsm+mlm``: masked LM and the codes of the teacher's hidden states;
- ``mlsm``: only the codes;
- ``mlsm-then-mlm``: only the codes in the first half of the updates, masked LM in the second;
- ``codes-first-half``: ``mlsm+mlm``, without the codes in the second half;
- ``regression+mlm``: masked LM and the teacher's hidden states themselves, standardized (mean squared error), which the
  teacher computes in each update: do *sparse* targets matter?
- ``random-dictionary``: codes over random directions;
- ``exchanged-within-types``: each token has the code of another token of its type, which removes the context;
- ``type-mean``: each token has the mean code of its type;
- ``sentence-vectors``: the teacher's sentence vectors, as with ``distill-vectors``, in batches of lines with as many
  tokens;
- ``mlm-time``: masked LM for the total time of ``mlsm+mlm``, including the teacher and the dictionary.

Times are processor seconds, which other work on the machine hardly changes. Measured on each student: bits of masked
words and retrieval on ``--valid``, linear probes, fine-tuning on the first ``--lines`` labelled texts, and ``--pairs``.

Writes ``teachers.md`` and JSON files. Run the same command again to resume: finished parts are not repeated. A later
command may add rows and seeds; other settings need another --output.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import kept_results
import numpy as np
import scipy.sparse as sp
import torch
from control_codes import exchanged_sources, looked_up, means_of_types, of_types, write_random_dictionary
from kept_results import KeptResults
from labelled_lines import check_tasks, first_lines
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, logging

from mlsm_plugin.core.coding.block_coding import store_meta
from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.atomic_files import atomic_open, read_json
from mlsm_plugin.core.files.planned_folder import PlannedFolder
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder, HuggingFaceSource
from mlsm_plugin.core.losses.sentence_vectors import leading_directions
from mlsm_plugin.core.machine.devices import has_fast_bf16
from mlsm_plugin.core.machine.memory import keep_freed_memory
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.code_store_writer import CodeStoreWriter
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer, load_fast_tokenizer
from mlsm_plugin.evaluation.encoder_quality import EvaluationData, evaluate_encoder, read_evaluation_data
from mlsm_plugin.evaluation.finetuning import Finetuning
from mlsm_plugin.evaluation.minimal_pairs import evaluate_pairs, read_pairs
from mlsm_plugin.evaluation.pair_models import open_pair_model
from mlsm_plugin.evaluation.quality_settings import QualitySettings
from mlsm_plugin.evaluation.sentence_encoders import open_sentence_encoder
from mlsm_plugin.evaluation.settings import FinetuneSettings
from mlsm_plugin.huggingface.adaptation_settings import MASKS_OF_STUDENT, TRAINING_OF_STUDENT
from mlsm_plugin.huggingface.aligned_sequences import AlignedSequences, write_aligned
from mlsm_plugin.huggingface.coding import learn_from_sequences
from mlsm_plugin.huggingface.collators import AuxiliaryTextCollator, LatentSemanticCollator, MaskedLmCollator
from mlsm_plugin.huggingface.distilled_model import SentenceVectorModel
from mlsm_plugin.huggingface.latent_semantic_model import LatentSemanticModel
from mlsm_plugin.huggingface.pretraining_model import MaskedLmModel, PretrainingModel
from mlsm_plugin.huggingface.pretraining_sequences import PretrainingSequences
from mlsm_plugin.huggingface.saved_folder import save_pretrained
from mlsm_plugin.huggingface.sentence_vectors import SentenceCollator, SentenceVectors, write_vectors
from mlsm_plugin.huggingface.state_regression_model import StateRegressionModel
from mlsm_plugin.huggingface.student_model import learn_tokenizer, new_model, student_config
from mlsm_plugin.huggingface.text_sequences import write_text_sequences
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from mlsm_plugin.huggingface.trainer_callback import prepare

ROWS = (
    "mlm",
    "mlsm+mlm",
    "regression+mlm",
    "exchanged-within-types",
    "random-dictionary",
    "mlm-time",
    "mlsm",
    "mlsm-then-mlm",
    "codes-first-half",
    "type-mean",
    "sentence-vectors",
)
CONTROLS = ("exchanged-within-types", "type-mean", "random-dictionary")
HALVES = ("mlsm-then-mlm", "codes-first-half")
WITHOUT_MLM = ("mlsm", "sentence-vectors")  # whose masked-LM head is not trained
TOP_OF_MEANS = 64  # atoms of a mean code
PARTS = ("dictionary-seconds", "states", "codes-seconds")  # files with the seconds of what ``mlsm+mlm`` needs
TABLE = "teachers.md"
STATES = "states.npy"
VECTORS = "vectors.npy"
BATCH = 32  # sequences for the teacher at once
CHUNK = 1 << 14  # tokens to code at once


class MaskedLmInSecondHalf(TrainerCallback):
    """Masked LM alone from the middle of the training on."""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Change the weights of the losses in the middle."""
        model = kwargs["model"]
        if state.global_step == state.max_steps // 2 and isinstance(model, LatentSemanticModel):
            model.mlm_weight = 1.0
            model.latent_weight = 0.0


class Comparison(KeptResults):
    """The parts of the comparison; each result is kept in the output folder, and not computed again."""

    @cached_property
    def tokenizer_folder(self) -> Path:
        """The student's tokenizer, learned from the text."""
        folder = self.output / "tokenizer"
        if not folder.exists():
            learn_tokenizer([self.args.text], self.args.teacher, folder, vocab_size=self.args.vocab_size)
        return folder

    @cached_property
    def text(self) -> TokenSequences:
        """The text in the student's tokens."""
        sequences, _ = write_text_sequences(
            [self.args.text], self.tokenizer_folder, self.output / "tokens", max_length=self.args.max_length
        )
        return sequences

    @cached_property
    def aligned(self) -> AlignedSequences:
        """The text in the teacher's tokens."""
        folder = self.output / "tokens.auxiliary"
        places = self.output / "tokens.places"
        if not places.exists():
            write_aligned(
                [self.args.text],
                self.text,
                HuggingFaceTokenizer(self.tokenizer_folder),
                HuggingFaceTokenizer(self.args.teacher),
                folder,
                places,
                max_length=HuggingFaceSource.usual_tokens_of(self.args.teacher),
                max_unk_rate=0.01,
            )
        return AlignedSequences(TokenSequences(folder), TokenSequences(places))

    @cached_property
    def half(self) -> bool:
        """Whether the teacher's products are in bfloat16."""
        return has_fast_bf16(torch.device("cpu"))

    @cached_property
    def encoder(self) -> HuggingFaceEncoder:
        """The teacher, up to its coded layer."""
        return HuggingFaceEncoder(self.args.teacher, layer=self.args.layer, device="cpu", fp16=self.half)

    def learn_dictionary(self) -> dict[str, float]:
        """Learn the dictionary, from the beginning; returns its processor seconds."""
        folder = self.output / "dictionary"
        shutil.rmtree(folder, ignore_errors=True)  # a resumed part would have the seconds of its end only
        start = time.process_time()
        settings = LearningSettings(
            layer=self.args.layer,
            coder="topk",
            atoms=self.args.atoms,
            k=self.args.k,
            tokens=self.args.dictionary_tokens,
            device="cpu",
            fp16=self.half,
        )
        learn_from_sequences(
            self.aligned.sequences, self.args.teacher, output=folder, settings=settings, encoder=self.encoder
        )
        return {"seconds": time.process_time() - start}

    def read_states(self) -> dict[str, float]:
        """Write the teacher's hidden states of all tokens, float16; returns the processor seconds."""
        start = time.process_time()
        sequences = self.aligned.sequences
        path = self.output / STATES
        shape = (sequences.num_tokens, self.encoder.dim)
        states = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)
        lengths = np.diff(sequences.starts)
        order = np.argsort(lengths, kind="stable")
        for first in Progress(range(0, len(order), BATCH), desc="the teacher reads", unit="batch"):
            numbers = order[first : first + BATCH]
            rows = [torch.from_numpy(sequences[int(number)]) for number in numbers]
            batch = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.encoder.pad)
            hidden = self.encoder.hidden_states(batch).numpy()
            for number, vectors in zip(numbers, hidden, strict=True):
                place = sequences.starts[number]
                states[place : place + lengths[number]] = vectors[: lengths[number]]
        states.flush()
        return {"seconds": time.process_time() - start}

    @cached_property
    def states(self) -> np.ndarray:
        """The teacher's hidden states ``(n_tokens, dim)`` float16."""
        self.once("states", self.read_states)
        return np.load(self.output / STATES, mmap_mode="r")

    @cached_property
    def lines(self) -> TokenSequences:
        """The lines of the text, each a sequence of the student's tokens."""
        sequences, _ = write_text_sequences(
            [self.args.text], self.tokenizer_folder, self.output / "lines", max_length=self.args.max_length, apart=True
        )
        return sequences

    def read_vectors(self) -> dict[str, float]:
        """Write the teacher's vectors of the lines; returns the processor seconds."""
        start = time.process_time()
        output = self.output / VECTORS
        write_vectors([self.args.text], self.lines, self.tokenizer_folder, self.args.teacher, output, fp16=self.half)
        return {"seconds": time.process_time() - start}

    def sentences(self, width: int) -> SentenceVectors:
        """The lines with their vectors, for a student of this width."""
        self.once("vectors", self.read_vectors)
        vectors = np.load(self.output / VECTORS, mmap_mode="r")
        directions = leading_directions(vectors, width)
        return SentenceVectors(self.lines, vectors, directions=directions)

    @cached_property
    def types(self) -> np.ndarray:
        """The teacher's id of each token ``(n_tokens,)``; -1 for special tokens, which have no code."""
        sequences = self.aligned.sequences
        ids = np.concatenate([sequences[number] for number in range(len(sequences))])
        special = sorted(HuggingFaceTokenizer(self.args.teacher).special_ids)
        return np.where(np.isin(ids, special), -1, ids).astype(np.int32)

    def codes(self, kind: str) -> Path:
        """The folder of a code store; ``kind`` is ``codes`` or a control."""
        self.once("dictionary-seconds", self.learn_dictionary)
        self.once("states", self.read_states)  # before the seconds of coding begin
        folder = self.output / f"{kind}.codes"
        self.once(f"{kind}-seconds", partial(self.write_codes, kind, folder))
        return folder

    def write_codes(self, kind: str, folder: Path) -> dict[str, float]:
        """Write a code store; returns the processor seconds."""
        dictionary = self.output / "dictionary"
        if kind in ("exchanged-within-types", "type-mean"):
            store = CodeStore(self.codes("codes"))
            if kind == "type-mean":
                means = means_of_types(store, self.types, int(self.types.max()) + 1, TOP_OF_MEANS)
                return self._write(kind, folder, dictionary, lambda rows: of_types(means, self.types[rows]))
            sources = exchanged_sources(self.types, np.random.default_rng(1), within_types=True)
            return self._write(kind, folder, dictionary, lambda rows: looked_up(store, sources[rows]))
        if kind == "random-dictionary":
            learned = dictionary
            dictionary = self.output / "random"
            if not dictionary.exists():
                write_random_dictionary(argparse.Namespace(dictionary=learned, output=dictionary, seed=1))
        coder = load_coder(dictionary)

        def codes_of(rows: np.ndarray) -> sp.csr_matrix:
            codes = coder.encode(torch.from_numpy(self.states[rows].astype(np.float32))).codes
            return sp.diags((self.types[rows] >= 0).astype(np.float32)) @ codes

        return self._write(kind, folder, dictionary, codes_of)

    def _write(
        self, kind: str, folder: Path, dictionary: Path, codes_of: Callable[[np.ndarray], sp.csr_matrix]
    ) -> dict[str, float]:
        shutil.rmtree(folder, ignore_errors=True)  # as in learn_dictionary
        start = time.process_time()
        number = self.aligned.sequences.num_tokens
        meta = store_meta(
            load_coder(dictionary),
            CodingSettings(self.args.layer, fp16=self.half),
            split=self.aligned.sequences.fingerprint,
            auxiliary=HuggingFaceSource.fingerprint_of(self.args.teacher),
            blocks=None,
        )
        writer = CodeStoreWriter(folder, {**meta, "control": kind}, [*range(0, number, CHUNK), number])
        for index, first, last in Progress(writer.missing_shards(), desc=kind, unit="shard"):
            codes = sp.csr_matrix(codes_of(np.arange(first, last)))
            codes.eliminate_zeros()
            writer.write_shard(index, codes)
        writer.finish()
        return {"seconds": time.process_time() - start}

    @cached_property
    def evaluation(self) -> EvaluationData:
        """The evaluation data of all students."""
        pairs = [(first_lines(train, self.args.lines, self.output), test) for train, test in self.args.labelled]
        return read_evaluation_data([self.args.valid], pairs, [], QualitySettings(queries=500, passages=5000))

    def row(self, name: str, seed: int) -> dict[str, Any]:
        """The figures of a student."""
        figures: dict[str, Any] = self.once(f"{name}-seed-{seed}", partial(self.trained, name, seed))
        return figures

    def updates_of(self, name: str, seed: int) -> int:
        """The number of updates; ``mlm-time`` has as many as fit into the total time of ``mlsm+mlm``."""
        updates: int = self.args.updates
        if name != "mlm-time":
            return updates
        plain = self.row("mlm", seed)["seconds"]
        return round(updates * self.total_seconds(seed) / plain)

    def total_seconds(self, seed: int) -> float:
        """The processor seconds of ``mlsm+mlm``, including the dictionary and the codes of the text that it reads."""
        trained = self.row("mlsm+mlm", seed)["seconds"]
        parts = {name: read_json(self.output / f"{name}.json")["seconds"] for name in PARTS}
        coding = parts["states"] + parts["codes-seconds"]
        share = min(1.0, self.args.updates * self.args.batch_size / len(self.text))
        total: float = trained + parts["dictionary-seconds"] + share * coding
        return total

    def trained(self, name: str, seed: int) -> dict[str, Any]:
        """Train a student and measure it."""
        updates = self.updates_of(name, seed)
        tokenizer = load_fast_tokenizer(self.tokenizer_folder)
        folder = self.output / "students" / f"{name}-seed-{seed}"
        torch.manual_seed(seed)
        stock = new_model(student_config(self.args.student), tokenizer)
        batch_size = self.args.batch_size
        codes = None
        sentences = None
        collator: MaskedLmCollator | SentenceCollator
        model: PretrainingModel
        if name in ("mlm", "mlm-time"):
            collator = MaskedLmCollator(tokenizer, MASKS_OF_STUDENT)
            model = MaskedLmModel.of(stock)
        elif name == "regression+mlm":
            collator = AuxiliaryTextCollator(tokenizer, MASKS_OF_STUDENT)
            model = StateRegressionModel.of(
                stock, auxiliary=self.encoder, regression_weight=self.args.regression_weight
            )
        elif name == "sentence-vectors":
            width = stock.config.hidden_size
            sentences = self.sentences(width)
            collator = SentenceCollator(tokenizer)
            model = SentenceVectorModel.of(stock, width=width)
            tokens_of_line = self.lines.num_tokens / len(self.lines)
            batch_size = round(batch_size * self.text.num_tokens / len(self.text) / tokens_of_line)
        else:
            codes = self.codes(name if name in CONTROLS else "codes")
            collator = LatentSemanticCollator(tokenizer, MASKS_OF_STUDENT)
            model = LatentSemanticModel.of(
                stock,
                num_atoms=self.args.atoms,
                latent_weight=self.args.latent_weight,
                mlm_weight=float(name not in ("mlsm", "mlsm-then-mlm")),
            )
        settings = TRAINING_OF_STUDENT
        arguments = settings.arguments(folder / "checkpoints")
        arguments.max_steps = updates
        arguments.warmup_steps = round(settings.warmup * updates)
        arguments.per_device_train_batch_size = batch_size
        arguments.eval_strategy = "no"
        arguments.save_strategy = "no"
        arguments.seed = seed
        arguments.logging_steps = 50
        trainer = prepare(
            Trainer(
                model,
                arguments,
                data_collator=collator,
                train_dataset=sentences or PretrainingSequences(self.text, codes, aligned=self.aligned),
                optimizers=(settings.optimizer_of(model), None),
            )
        )
        if name in HALVES:
            trainer.add_callback(MaskedLmInSecondHalf())
        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start
        save_pretrained(folder / "model", model, tokenizer)
        log = trainer.state.log_history
        return {"updates": updates, "seconds": seconds, "log": log, "measures": self.measured(folder, name)}

    def measured(self, folder: Path, name: str) -> dict[str, float]:
        """The figures of a trained student without fine-tuning."""
        measures = evaluate_encoder(open_sentence_encoder(folder / "model"), self.evaluation)
        figures = {measure: values.figure for measure, values in measures.items()}
        if name in WITHOUT_MLM:
            figures = {measure: figure for measure, figure in figures.items() if not measure.startswith("bits")}
        return figures

    def finetuned(self, name: str, seed: int) -> dict[str, float]:
        """The accuracy on each task after fine-tuning; empty with ``--epochs 0``."""
        if self.args.epochs == 0:
            return {}
        scores: dict[str, float] = self.once(f"{name}-seed-{seed}-finetuned", partial(self._finetuned, name, seed))
        return scores

    def _finetuned(self, name: str, seed: int) -> dict[str, float]:
        folder = self.output / "students" / f"{name}-seed-{seed}"
        settings = FinetuneSettings(
            max_epoch=self.args.epochs,
            patience=self.args.epochs,
            lr=self.args.finetuning_rate,
            max_unk_rate=0.1,
            cpu=True,
        )
        scores = {}
        for train, test in self.args.labelled:
            task = Path(train).parent.name
            files = {"train": first_lines(train, self.args.lines, self.output), "valid": test}
            summary = Finetuning(folder / "model", files, folder / "finetuned" / task, settings).run([1])
            scores[task] = summary["seeds"][0]["score"]
        return scores

    def accuracy_on_pairs(self, name: str, seed: int) -> dict[str, float]:
        """The accuracy on each file of minimal pairs; empty without files, or if no head was trained."""
        if not self.args.pairs or name in WITHOUT_MLM:
            return {}
        accuracies: dict[str, float] = self.once(f"{name}-seed-{seed}-pairs", partial(self._on_pairs, name, seed))
        return accuracies

    def _on_pairs(self, name: str, seed: int) -> dict[str, float]:
        model = open_pair_model(self.output / "students" / f"{name}-seed-{seed}" / "model", "cpu")
        files = {path: read_pairs(path) for path in self.args.pairs}
        figures = evaluate_pairs(model, files, max_unk_rate=0.1)["files"]
        return {Path(path).stem: figures[path]["accuracy"] for path in files}


def table(comparison: Comparison) -> str:
    """The figures as a Markdown table; means over the seeds."""
    args = comparison.args
    rows = {name: _results(comparison, name, "") for name in args.rows}
    rows = {name: results for name, results in rows.items() if results}
    measures = list(dict.fromkeys(measure for results in rows.values() for measure in results[0]["measures"]))
    tasks = [Path(train).parent.name for train, _ in args.labelled]
    pairs = [Path(path).stem for path in args.pairs]
    header = ["row", "updates", "minutes", *measures, *(f"{task}, fine-tuned" for task in tasks), *pairs]
    lines = [f"| {' | '.join(header)} |", f"| --- |{' ---: |' * (len(header) - 1)}"]
    for name, results in rows.items():
        cells = [name, f"{results[0]['updates']:,}", _mean([result["seconds"] / 60 for result in results])]
        for measure in measures:
            values = [result["measures"][measure] for result in results if measure in result["measures"]]
            cells.append(_mean([value if "bits" in measure else 100 * value for value in values]))
        finetuned = _results(comparison, name, "-finetuned")
        cells += [_mean([100 * scores[task] for scores in finetuned]) for task in tasks]
        accuracies = _results(comparison, name, "-pairs")
        cells += [_mean([100 * scores[file] for scores in accuracies]) for file in pairs]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _results(comparison: Comparison, name: str, what: str) -> list[dict[str, Any]]:
    paths = [comparison.output / f"{name}-seed-{seed}{what}.json" for seed in comparison.args.seeds]
    return [read_json(path) for path in paths if path.exists()]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def planned_folder(args: argparse.Namespace) -> PlannedFolder:
    """The folder of a comparison, with fixed settings and inputs; later commands may add rows and seeds.

    Raises:
        ValueError: the teacher is not a Hugging Face model, or two tasks have one name.
        OSError: a file cannot be read.
    """
    check_tasks(args.labelled)
    inputs = {"teacher": HuggingFaceSource.files_of(args.teacher), **kept_results.files_of(args), "pairs": args.pairs}
    return kept_results.planned_folder(args, inputs, may_change=("rows", "seeds", "output"), seal_file=TABLE)


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path, help="folder of a published encoder with its tokenizer")
    parser.add_argument("--text", required=True, help="text to train on")
    parser.add_argument("--valid", required=True, help="text of another source to measure on")
    parser.add_argument("--labelled", nargs=2, action="append", required=True, metavar="TSV", help="train and test")
    parser.add_argument("--lines", type=int, default=2500, help="labelled texts to train on (default: 2500)")
    parser.add_argument("--output", required=True, type=Path, help="folder for everything that is made")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--student", default="4x256")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--updates", type=int, default=900)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--layer", type=int, default=5)
    parser.add_argument("--atoms", type=int, default=2000)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--dictionary-tokens", type=int, default=600_000)
    parser.add_argument("--latent-weight", type=float, default=1.0)
    parser.add_argument("--regression-weight", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=4, help="of fine-tuning; 0: none (default: 4)")
    parser.add_argument("--pairs", nargs="+", default=[], metavar="JSONL", help="minimal pairs in BLiMP's format")
    parser.add_argument("--finetuning-rate", type=float, default=3e-4)
    return parser.parse_args()


def main() -> int:
    """Train and measure the missing students, seed by seed, and write the table."""
    args = parse_arguments()
    logging.set_verbosity_error()
    kept_results.begin(partial(planned_folder, args))
    keep_freed_memory()
    comparison = Comparison(args)
    for seed in args.seeds:
        for name in args.rows:
            comparison.row(name, seed)
            comparison.finetuned(name, seed)
            comparison.accuracy_on_pairs(name, seed)
            with atomic_open(args.output / TABLE, "w") as file:
                file.write(table(comparison))
    print(table(comparison))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
