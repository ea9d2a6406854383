"""Fine-tuning of an encoder in Hugging Face's Trainer, once for each seed; a stopped run resumes."""

import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open, copy_file, link_file, sha256_of_files
from mlsm_plugin.core.files.json_checks import Check, JsonObject, check_json, fields, number
from mlsm_plugin.core.files.model_folders import new_model_folder
from mlsm_plugin.core.files.output_lock import only_writer
from mlsm_plugin.core.files.planned_folder import START_ANEW, PlannedFolder
from mlsm_plugin.core.files.settings import identity
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.unknown_tokens import UnknownTokens
from mlsm_plugin.evaluation.labelled_texts import LabelledTexts, check_same_kind, read_labelled_texts
from mlsm_plugin.evaluation.settings import FinetuneSettings
from mlsm_plugin.evaluation.starting_models import EXPORTED, open_starting_model
from mlsm_plugin.evaluation.text_classifier import Prediction, TextClassifier, measured
from mlsm_plugin.huggingface.training import TRAINER_STATE, last_checkpoint

RESULT = "result.json"  # the figures of a seed
MODEL = "model"  # the folder of the classifier of a seed, and of the best classifier
CHECKPOINTS = "checkpoints"  # in the folder of a seed, until its training is done


class Finetuning:
    """Fine-tunes an encoder on labelled texts, with several seeds.

    ValueError or FileNotFoundError if model or texts cannot be used; this is checked before anything is written.

    Args:
        model: folder of a Hugging Face encoder, or its hub name with ``hf:``; or a RoBERTa-like fairseq checkpoint in
            a folder with ``dict.txt`` and the tokenizer, or that folder.
        files: labelled texts by split: ``train``, ``valid`` and optionally ``test``.
        output: folder for the runs, predictions, ``results.json``, and the best model.
        settings: how the model is trained.
    """

    def __init__(
        self, model: PathLike, files: Mapping[str, PathLike], output: PathLike, settings: FinetuneSettings
    ) -> None:
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
        self.start = open_starting_model(model)
        for texts in self.texts.values():
            check_tokens(texts, self.start.tokenizer, settings.max_unk_rate)

    def run(self, seeds: Sequence[int]) -> JsonObject:
        """Train the missing runs, and write ``results.json``; return its content.

        ValueError if the folder holds other runs, another process is writing to it, or a training fails.
        """
        with only_writer(self.output):
            folder = self._folder()
            self._check_recorded(folder)
            self._check_best(seeds)
            classifier = self._classifier()
            folder.begin()
            self._print_cut(classifier)
            results = [self._run_seed(classifier, seed) for seed in seeds]
            best = max(results, key=lambda result: result["score"])
            self._keep(best["seed"])
            summary = {**summarized(results), "best_seed": best["seed"], "seeds": results}
            folder.seal(summary)
        return summary

    def _folder(self) -> PlannedFolder:
        """The folder of the runs; its plan has all inputs except the seeds, since a later command may add seeds."""
        plan = {
            **self.start.fingerprint(),
            "files": {split: sha256_of_files(texts.path) for split, texts in self.texts.items()},
            "settings": identity(self.settings),
        }
        advice = f"{START_ANEW}, or choose another --output"
        return PlannedFolder(self.output, plan, seal_file="results.json", advice=advice)

    def _check_recorded(self, folder: PlannedFolder) -> None:
        """Raise ValueError if the folder has another plan; forget that plan if nothing was trained yet."""
        plan = folder.recorded_plan
        if plan is not None and "checkpoint" in plan:
            raise ValueError(
                f"{self.output} holds runs of fairseq, which an older version of `mlsm finetune` trained; choose "
                "another --output"
            )
        trained = [*self.output.glob(f"seed-*/{CHECKPOINTS}/*"), *self.output.glob(f"seed-*/{MODEL}")]
        trained += self.output.glob(f"seed-*/{RESULT}")
        if plan != folder.plan and not trained:  # the corrected command must run after a mistyped option
            shutil.rmtree(self.output / EXPORTED, ignore_errors=True)
            folder.forget()
        folder.check()

    def _check_best(self, seeds: Sequence[int]) -> None:
        """Raise ValueError if the model of the best finished seed was deleted, since it may become the result."""
        results = [self._result(self._run(seed)) for seed in seeds if self._run(seed).is_sealed]
        if not results:
            return
        best = max(results, key=lambda result: result["score"])
        folder = self.output / f"seed-{best['seed']}"
        if not (folder / MODEL).is_dir():
            raise ValueError(f"{folder / MODEL} is missing; delete {folder} to train this seed again")

    def _run(self, seed: int) -> PlannedFolder:
        """The folder of a seed."""
        return PlannedFolder(self.output / f"seed-{seed}", {"seed": seed}, resumable=False, seal_file=RESULT)

    def _result(self, run: PlannedFolder) -> JsonObject:
        """The result of a finished seed; ValueError if it is damaged."""
        return check_json(run.sealed_content(), fields(self._measures()), run.seal_path)

    def _classifier(self) -> TextClassifier:
        lines = [text for parts in self.texts["train"].texts for text in parts]
        folder = self.start.stock_folder(self.output, lines)
        labels = [] if self.settings.regression else sorted({*self.texts["train"].labels})
        return TextClassifier(folder, self.start.tokenizer, labels, self.settings)

    def _print_cut(self, classifier: TextClassifier) -> None:
        for split, texts in self.texts.items():
            _, cut = classifier.samples(texts)
            if cut:
                limit = classifier.positions
                print(f"{split}: {cut} texts are longer than the model's {limit} positions; they are cut")

    def _run_seed(self, classifier: TextClassifier, seed: int) -> JsonObject:
        run = self._run(seed)
        if not run.is_complete():
            print(f"seed {seed}: training", flush=True)
            run.seal({"seed": seed, **self._trained(classifier, seed, run.directory)})
        shutil.rmtree(run.directory / CHECKPOINTS, ignore_errors=True)
        return self._result(run)

    def _trained(self, classifier: TextClassifier, seed: int, folder: Path) -> JsonObject:
        """Train a classifier, write it and its predictions, and return its results on validation and test texts."""
        checkpoints = folder / CHECKPOINTS
        best = classifier.train(self.texts["train"], self.texts["valid"], checkpoints, seed)
        classifier.write(best, folder / MODEL)
        copy_file(Path(str(last_checkpoint(checkpoints)), TRAINER_STATE), folder / TRAINER_STATE)  # its log
        figures: JsonObject = {}
        for split in self._held_out():
            texts = self.texts[split]
            predictions = classifier.predictions(folder / MODEL, texts)
            write_predictions(folder / f"{split}.predictions.tsv", texts, predictions)
            measures = measured(texts.labels, predictions, self.settings)
            figures |= {f"{split}_{name}": value for name, value in measures.items()}
        measure = "pearson" if self.settings.regression else self.settings.metric
        return {"score": figures[f"valid_{measure}"], **figures}

    def _keep(self, seed: int) -> None:
        """Make the model of this seed the model of the output folder."""
        with new_model_folder(self.output / MODEL, overwrite=True) as folder:
            for file in (self.output / f"seed-{seed}" / MODEL).iterdir():
                link_file(file, folder / file.name)

    def _held_out(self) -> list[str]:
        return [split for split in self.texts if split != "train"]

    def _measures(self) -> dict[str, Check]:
        """The checks for the entries of a seed's result."""
        f1 = ("f1",) if self.settings.metric == "f1" else ()
        measures = ("pearson", "spearman") if self.settings.regression else ("accuracy", *f1)
        return {"score": number, **{f"{split}_{name}": number for split in self._held_out() for name in measures}}


def write_predictions(path: Path, texts: LabelledTexts, predictions: Sequence[Prediction]) -> None:
    """Write a line for each text: its label, the predicted label with its probability, and the text."""
    with atomic_open(path, "w") as file:
        for expected, (label, score), parts in zip(texts.labels, predictions, texts.texts, strict=True):
            file.write("\t".join([expected, label, f"{score:.4f}", *parts]) + "\n")


def summarized(results: list[JsonObject]) -> dict[str, dict[str, float]]:
    """The mean and the standard deviation (n - 1; 0 for one seed) of each measure over the seeds."""
    names = [name for name in results[0] if name not in ("seed", "score")]
    values = {name: [result[name] for result in results] for name in names}
    return {
        "mean": {name: statistics.fmean(seed_values) for name, seed_values in values.items()},
        "deviation": {
            name: statistics.stdev(seed_values) if len(seed_values) > 1 else 0.0 for name, seed_values in values.items()
        },
    }


def check_tokens(texts: LabelledTexts, tokenizer: HuggingFaceTokenizer, max_unk_rate: float) -> None:
    """Raise ValueError if a text has no tokens, such as a zero-width space, or too much of the texts is unknown.

    The message names the line of such a text. At most the share ``max_unk_rate`` may be unknown, with a warning.
    """
    total = UnknownTokens()
    for index, parts in enumerate(texts.texts):
        for text in parts:
            unknown = tokenizer.unknown_of(text)
            if not unknown.tokens:
                raise ValueError(f"{texts.where(index)}: the text {text!r} has no tokens after normalization")
            total.add_text(unknown)
    total.check(str(texts.path), max_unk_rate)
    total.warn(str(texts.path))
