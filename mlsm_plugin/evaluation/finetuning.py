"""Fine-tuning with fairseq's own trainer, once for each seed; a stopped run resumes."""

import math
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fairseq.data import Dictionary
from scipy import stats

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_directory, atomic_open, link_file, sha256_of_files
from mlsm_plugin.core.files.json_checks import Check, JsonObject, check_json, fields, number
from mlsm_plugin.core.files.model_files import DICTIONARY_NAME, bpe_options, copy_dicts, copy_tokenizer, tokenizer_files
from mlsm_plugin.core.files.output_lock import only_writer, start_child
from mlsm_plugin.core.files.planned_folder import START_ANEW, PlannedFolder
from mlsm_plugin.core.hidden_states.devices import default_device
from mlsm_plugin.core.text.unknown_tokens import unknown_tokens_in
from mlsm_plugin.evaluation.labelled_texts import LabelledTexts, check_same_kind, read_labelled_texts
from mlsm_plugin.evaluation.settings import FinetuneSettings
from mlsm_plugin.fairseq_plugin.compat import model_parts
from mlsm_plugin.fairseq_plugin.compat.binarized_files import StreamingMMapBuilder
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import config_in, model_fingerprint, read_state, weights_in
from mlsm_plugin.fairseq_plugin.compat.model_parts import EMBEDDINGS
from mlsm_plugin.fairseq_plugin.compat.training_options import registered_name
from mlsm_plugin.fairseq_plugin.compat.version_shims import PACKAGE_DIR
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import TextTokenizer, open_tokenizer
from mlsm_plugin.hub import from_pretrained

if TYPE_CHECKING:
    from mlsm_plugin.hub.interface import MlsmHubInterface

LOG = "train.log"  # in the folder of a seed
# options of the architecture whose value in the checkpoint does not apply to fine-tuning
NOT_TAKEN_OVER = frozenset({"num_atoms", "max_positions"}) | model_parts.TRAINING_OPTIONS


def architecture_flags(model_cfg: Any) -> list[str]:
    """Flags of ``fairseq-train`` for a model of the same size, and of the class that drops unused heads."""
    from mlsm_plugin.fairseq_plugin.models.mlsm_deberta import MlsmDebertaModel
    from mlsm_plugin.fairseq_plugin.models.mlsm_modern import MlsmModernModel
    from mlsm_plugin.fairseq_plugin.models.mlsm_roberta import MlsmRobertaModel

    kinds: JsonObject = {"mlsm_deberta": MlsmDebertaModel, "mlsm_modern": MlsmModernModel}
    arch = next((kind for kind in kinds if registered_name(model_cfg).startswith(kind)), "mlsm_roberta")
    flags = model_parts.flags_of(kinds.get(arch, MlsmRobertaModel).add_args, model_cfg, without=NOT_TAKEN_OVER)
    return ["--arch", arch, *flags]


class Finetuning:
    """Fine-tunes a checkpoint on labelled texts, with several seeds; ValueError if they cannot be used.

    Args:
        checkpoint: checkpoint of a RoBERTa-like model, in a folder with ``dict.txt`` and the tokenizer.
        files: labelled texts by split: ``train``, ``valid`` and optionally ``test``.
        output: folder for the dataset, the runs, predictions, ``results.json``, and the best model.
    """

    def __init__(
        self, checkpoint: Path, files: Mapping[str, PathLike], output: PathLike, settings: FinetuneSettings
    ) -> None:
        self.checkpoint = checkpoint
        self.output = Path(output)
        self.settings = settings
        self.texts = {
            split: read_labelled_texts(path, regression=settings.regression, header=settings.header)
            for split, path in files.items()
        }
        held_out = [texts for split, texts in self.texts.items() if split != "train"]
        single = settings.allow_single_labels
        check_same_kind(self.texts["train"], held_out, regression=settings.regression, allow_single=single)
        if settings.metric == "f1" and (settings.regression or {*self.texts["train"].labels} != {"0", "1"}):
            raise ValueError(f"{self.texts['train'].path}: --metric f1 needs the labels 0 and 1, without --regression")
        folder = checkpoint.parent
        if not (folder / DICTIONARY_NAME).is_file():
            raise FileNotFoundError(f"{folder} has no {DICTIONARY_NAME}; copy it there from the binarized dataset")
        bpe_options(folder)  # raises an error that says what is missing
        self.tokenizer = open_tokenizer(folder)
        state = read_state(checkpoint)
        if EMBEDDINGS not in weights_in(state):
            raise ValueError(f"{checkpoint} is not a RoBERTa-like encoder; only those can be fine-tuned")
        interface = from_pretrained(checkpoint)  # a weight that does not fit is found now, not by the trainer
        for texts in self.texts.values():
            check_tokens(texts, interface, settings.max_unk_rate)
        model_cfg = config_in(state).model
        self.positions = int(model_cfg.max_positions)
        self.flags = architecture_flags(model_cfg)

    def run(self, seeds: Sequence[int]) -> JsonObject:
        """Train what is missing, and write ``results.json``; returns its content.

        ValueError if the folder holds other runs, another process is writing there, or a training fails.
        """
        with only_writer(self.output):
            folder = self._folder()
            self._write_data(folder)
            results = [self._run_seed(seed) for seed in seeds]
            best = max(results, key=lambda result: result["score"])
            link_file(self.output / f"seed-{best['seed']}" / "checkpoint_best.pt", self.output / "model.pt")
            self._complete(self.output)  # this folder can be loaded
            summary = {**summarized(results), "best_seed": best["seed"], "seeds": results}
            folder.seal(summary)
        return summary

    def _write_data(self, folder: PlannedFolder) -> None:
        data = self.output / "data"
        trained_files = [path for path in self.output.glob("seed-*/*") if path.name != LOG]
        if folder.differences() and not trained_files:
            # nothing was trained yet; a mistyped flag must not refuse the corrected command
            shutil.rmtree(data, ignore_errors=True)
            folder.forget()
        folder.begin()
        if not (data / "label").is_dir():
            limit = self.positions
            regression = self.settings.regression
            too_long = write_classification_data(
                self.texts, self.tokenizer, data, positions=limit, regression=regression
            )
            for split, number in too_long.items():
                if number:
                    print(f"{split}: {number} texts are longer than the model's {limit} positions; they are cut")

    def _folder(self) -> PlannedFolder:
        """The folder of the runs; its plan has all inputs, but not the seeds, of which a later command may add more."""
        tokenizer = [self.checkpoint.parent / name for name in tokenizer_files(self.checkpoint.parent)]
        plan = {
            "checkpoint": model_fingerprint(self.checkpoint),
            "tokenizer": sha256_of_files(*tokenizer),
            "files": {split: sha256_of_files(texts.path) for split, texts in self.texts.items()},
            "settings": {
                **vars(self.settings),
                "metric": None if self.settings.metric == "accuracy" else self.settings.metric,
                "header": self.settings.header or None,
                "allow_single_labels": None,
                "max_unk_rate": None,
            },
        }
        advice = f"{START_ANEW}, or choose another --output"
        return PlannedFolder(self.output, plan, seal_file="results.json", advice=advice)

    def _run_seed(self, seed: int) -> JsonObject:
        folder = self.output / f"seed-{seed}"
        run = PlannedFolder(folder, {"seed": seed}, plan_file=None, seal_file="result.json")
        if run.is_complete():
            return check_json(run.sealed_content(), fields(self._measures()), run.seal_path)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / LOG
        print(f"seed {seed}: training, log in {log}", flush=True)
        status, last = _run_logged(self.command(seed), log)
        if status != 0:
            raise ValueError(f"fairseq-train stopped with exit status {status} ({last}); its log is {log}")
        self._complete(folder)
        result = {"seed": seed, **self._evaluated(folder)}
        run.seal(result)
        return result

    def command(self, seed: int) -> list[str]:
        """The words of the ``fairseq-train`` command for a seed."""
        settings = self.settings
        train = self.texts["train"]
        updates = settings.max_epoch * math.ceil(len(train) / settings.batch_size)
        classes = 1 if settings.regression else len(set(train.labels))
        words: list[object] = [sys.executable, "-m", "fairseq_cli.train", self.output / "data"]
        words += ["--user-dir", PACKAGE_DIR]
        words += ["--save-dir", self.output / f"seed-{seed}", "--seed", seed, *self.flags]
        words += ["--task", "sentence_prediction", "--criterion", "sentence_prediction", "--num-classes", classes]
        words += ["--max-positions", self.positions, "--shorten-method", "truncate"]
        words += ["--init-token", 0, "--separator-token", 2, "--required-batch-size-multiple", 1]
        words += ["--batch-size", settings.batch_size, "--max-epoch", settings.max_epoch]
        words += ["--patience", settings.patience]
        words += ["--dropout", 0.1, "--attention-dropout", 0.1, "--pooler-dropout", 0.1, "--clip-norm", 1.0]
        words += ["--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--adam-eps", "1e-6", "--weight-decay", 0.1]
        words += ["--lr-scheduler", "polynomial_decay", "--lr", settings.lr, "--total-num-update", updates]
        words += ["--warmup-updates", max(1, updates * 6 // 100), "--no-epoch-checkpoints"]
        words += ["--log-format", "simple", "--log-interval", 50]
        if settings.regression:
            words += ["--regression-target", "--best-checkpoint-metric", "loss"]
        else:
            words += ["--best-checkpoint-metric", settings.metric, "--maximize-best-checkpoint-metric"]
            words += ["--report-acc-and-f1"] if settings.metric == "f1" else []
        if not settings.from_scratch:
            words += ["--finetune-from-model", self.checkpoint]
        return [str(word) for word in (*words, *settings.extra)]

    def _complete(self, folder: Path) -> None:
        """Copy what loading needs into a folder of checkpoints."""
        copy_dicts(self.output / "data", folder)
        copy_tokenizer(self.checkpoint.parent, folder)

    def _evaluated(self, folder: Path) -> JsonObject:
        """Results on the validation and the test texts; writes the predictions."""
        model = from_pretrained(folder, "checkpoint_best.pt")
        model.to(default_device())
        model.max_unk_rate = 1  # the files were checked
        figures: JsonObject = {}
        for split in (split for split in ("valid", "test") if split in self.texts):
            texts = self.texts[split]
            predicted = model.predict_labels(texts.texts)
            with atomic_open(folder / f"{split}.predictions.tsv", "w") as file:
                for expected, (label, score), line in zip(texts.labels, predicted, texts.texts, strict=True):
                    file.write("\t".join([expected, str(label), f"{score:.4f}", *line]) + "\n")
            figures |= {f"{split}_{name}": value for name, value in self._measured(texts, predicted).items()}
        measure = "pearson" if self.settings.regression else self.settings.metric
        return {"score": figures[f"valid_{measure}"], **figures}

    def _measures(self) -> dict[str, Check]:
        """What the result of a seed holds."""
        f1 = ("f1",) if self.settings.metric == "f1" else ()
        measures = ("pearson", "spearman") if self.settings.regression else ("accuracy", *f1)
        splits = [split for split in self.texts if split != "train"]
        return {"score": number, **{f"{split}_{measure}": number for split in splits for measure in measures}}

    def _measured(self, texts: LabelledTexts, predicted: list[tuple[Any, float]]) -> dict[str, float]:
        if not self.settings.regression:
            pairs = [(expected, label) for expected, (label, _) in zip(texts.labels, predicted, strict=True)]
            accuracy = {"accuracy": float(np.mean([expected == label for expected, label in pairs]))}
            ones = sum(pair.count("1") for pair in pairs)
            f1 = {"f1": 2 * pairs.count(("1", "1")) / max(1, ones)}
            return accuracy | (f1 if self.settings.metric == "f1" else {})
        labels = [float(label) for label in texts.labels]
        numbers = [float(label) for label, _ in predicted]
        return {
            "pearson": _correlation(stats.pearsonr, labels, numbers),
            "spearman": _correlation(stats.spearmanr, labels, numbers),
        }


def _run_logged(command: list[str], log: Path) -> tuple[int, str]:
    """Run a command; log its output, print its validation results; returns exit status and last line."""
    last = ""
    with (
        open(log, "a", encoding="utf-8") as file,
        start_child(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            last = line.strip() or last
            if "| valid |" in line:
                print("  " + line.split("| valid |", 1)[1].strip(), flush=True)
    return process.returncode, last


def _correlation(measure: Any, expected: list[float], predicted: list[float]) -> float:
    """The correlation by ``measure``; 0 if one of the two lists is constant."""
    if len(set(expected)) < 2 or len(set(predicted)) < 2:
        return 0.0
    return float(measure(expected, predicted)[0])


def summarized(results: list[JsonObject]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation over the seeds (n - 1; 0 for one seed) of each measure."""
    names = [name for name in results[0] if name not in ("seed", "score")]
    values = {name: [result[name] for result in results] for name in names}
    return {
        "mean": {name: statistics.fmean(seed_values) for name, seed_values in values.items()},
        "deviation": {
            name: statistics.stdev(seed_values) if len(seed_values) > 1 else 0.0 for name, seed_values in values.items()
        },
    }


def check_tokens(texts: LabelledTexts, interface: "MlsmHubInterface", max_unk_rate: float) -> None:
    """Raise ValueError if a loaded model has no token for a text, such as a zero-width space (the message names its
    line), or more than the share ``max_unk_rate`` of the texts is unknown; warn of less.
    """
    for index, parts in enumerate(texts.texts):
        for text in parts:
            if not interface.bpe.encode(text).split():
                raise ValueError(f"{texts.where(index)}: the text {text!r} has no tokens after normalization")
    every = (text for parts in texts.texts for text in parts)
    unknown = unknown_tokens_in(every, interface.bpe, interface.task.source_dictionary)
    unknown.check(str(texts.path), max_unk_rate)
    unknown.warn(str(texts.path))


def write_classification_data(
    splits: Mapping[str, LabelledTexts], tokenizer: TextTokenizer, output: Path, *, positions: int, regression: bool
) -> dict[str, int]:
    """Write ``input0``, ``input1`` (for pairs) and ``label``, each with ``<split>.{bin,idx}`` and ``dict.txt``; and the
    tokenizer.

    The split ``train`` decides which labels exist; for ``regression`` they are numbers, in ``label/<split>.label``.
    Nothing appears in ``output`` unless everything succeeds.

    Returns:
        for each split how many samples have more tokens than ``positions``, with those that mark the beginning and the
        ends; training cuts them.
    """
    too_long = {}
    with atomic_directory(output) as folder:
        inputs = [folder / f"input{i}" for i in range(splits["train"].texts_per_line)]
        for directory in (*inputs, folder / "label"):
            directory.mkdir()
        for name, texts in splits.items():
            lengths = np.zeros(len(texts), np.int64)
            for column, directory in enumerate(inputs):
                builder = StreamingMMapBuilder(str(directory / f"{name}.bin"), len(tokenizer.dictionary))
                for line, parts in enumerate(texts.texts):
                    ids = tokenizer.ids_of(parts[column])
                    builder.add_sentences(ids, np.array([len(ids)]))
                    lengths[line] += 1 + len(ids)  # BOS, or the separator
                builder.finalize(str(directory / f"{name}.idx"))
            too_long[name] = int((lengths > positions).sum())
        for directory in inputs:
            tokenizer.dictionary.save(str(directory / DICTIONARY_NAME))
        tokenizer.write_to(folder)  # which the checkpoints remember
        _write_labels(splits, folder / "label", regression=regression)
    return too_long


def _write_labels(splits: Mapping[str, LabelledTexts], folder: Path, *, regression: bool) -> None:
    if regression:
        for name, texts in splits.items():
            (folder / f"{name}.label").write_text("".join(f"{label}\n" for label in texts.labels), encoding="utf-8")
        return
    counts = Counter(splits["train"].labels)
    names = sorted(counts)
    special = Dictionary().symbols  # a label that is called like one of these gets an id of its own
    flags = {label: " #fairseq:overwrite" if label in special else "" for label in names}
    lines = "".join(f"{label} {counts[label]}{flags[label]}\n" for label in names)
    (folder / DICTIONARY_NAME).write_text(lines, encoding="utf-8")
    dictionary = Dictionary.load(str(folder / DICTIONARY_NAME))
    for name, texts in splits.items():
        builder = StreamingMMapBuilder(str(folder / f"{name}.bin"), len(dictionary))
        for label in texts.labels:
            builder.add_sentences(np.array([dictionary.index(label), dictionary.eos()]), np.array([2]))
        builder.finalize(str(folder / f"{name}.idx"))
