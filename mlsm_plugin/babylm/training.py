"""Train a model on a folder of text and count the words that it sees; finished steps are skipped."""

import logging
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
from fairseq.dataclass.configs import FairseqConfig

from mlsm_plugin.babylm.exports import export_kept, exporting
from mlsm_plugin.babylm.ledger import LEDGER, OF_AUXILIARY, OF_RUN, Entry, Ledger
from mlsm_plugin.babylm.settings import MAIN, TEXT_FOLDER, BabylmSettings
from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.coding.settings import StageSettings
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open, sha256_of_files
from mlsm_plugin.core.files.output_lock import in_turn
from mlsm_plugin.core.files.process_rank import ProcessRank
from mlsm_plugin.core.files.settings import identity
from mlsm_plugin.core.files.step_record import RECORD, Step, StepRecord
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.core.hidden_states.sources import source_of
from mlsm_plugin.core.text.shared_text import warn_of_shared_files
from mlsm_plugin.core.text.text_files import check_text_files, progress_bar
from mlsm_plugin.core.text.words import count_words, word_lines, write_words
from mlsm_plugin.fairseq_plugin.compat.binarized_files import flat_tokens
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import configuration_of, words_of_run
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import LAST
from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary, load_split, training_samples
from mlsm_plugin.fairseq_plugin.pipelines.preprocessing import steps_to_codes, steps_to_data
from mlsm_plugin.fairseq_plugin.pipelines.pretraining import (
    block_flags,
    default_flags,
    early_end,
    pretrain,
    process_of,
    separate_words,
)
from mlsm_plugin.fairseq_plugin.pipelines.self_coded_pretraining import pretrain_in_stages
from mlsm_plugin.fairseq_plugin.tasks.word_counts import begins_word, write_word_plan
from mlsm_plugin.fairseq_plugin.text.sentencepiece_training import TokenizerSettings, resumed_settings
from mlsm_plugin.fairseq_plugin.text.symbol_files import special_symbols

TEXT_NAME = re.compile(r".+\.(train|txt)(\.(gz|bz2|xz))?", re.IGNORECASE)
TRAINED_ON = re.compile(r"\.train\b", re.IGNORECASE)
NOT_TRAINED_ON = re.compile(r"(^|[._-])(dev|valid|validation|test)(?![a-z0-9])", re.IGNORECASE)
LINES_AT_ONCE = 1 << 16
LINES_OF_VALID = 100  # lines of training text; a dataset needs this split, although nothing reads it
# flags that a run sets itself, or that would make an epoch something else than the whole text once
REFUSED = {
    "--amp",
    "--bf16",
    "--checkpoint-suffix",
    "--continue-once",
    "--count-words",
    "--criterion",
    "--data",
    "--finetune-from-model",
    "--fp16",
    "--grouped-shuffling",
    "--max-epoch",
    "--max-tokens",
    "--max-update",
    "--no-last-checkpoints",
    "--no-save",
    "--num-atoms",
    "--required-batch-size-multiple",
    "--reset-dataloader",
    "--reset-lr-scheduler",
    "--reset-meters",
    "--reset-optimizer",
    "--restore-file",
    "--sample-break-mode",
    "--save-dir",
    "--seed",
    "--shorten-method",
    "--skip-remainder-batch",
    "--task",
    "--tokens-per-sample",
    "--train-subset",
    "--update-epoch-batch-itr",
}
FLAGS_OF_OBJECTIVE = {"taco": ("--task", "taco", "--criterion", "token_contrastive")}
FLAGS_WITH_CODES = ("--task", "masked_latent_semantic", "--criterion", "latent_semantic_kl")
WORD_PLAN = "words.json"
VALID = "valid"
logger = logging.getLogger(__name__)


def text_files(folder: PathLike) -> list[Path]:
    """The training text of a folder: its ``*.train`` and ``*.train.txt``, or else ``*.txt``, perhaps compressed.

    Warns of files and folders that are left out, such as empty files and ``valid.txt``; hidden files, such as
    ``._a.train.txt``, are ignored. ValueError if there is no text, FileNotFoundError if there is no such folder.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder} is not a folder of text files")
    files = [file for file in sorted(Path(folder).iterdir()) if file.is_file() and not file.name.startswith(".")]
    texts = [file for file in files if TEXT_NAME.fullmatch(file.name) and not NOT_TRAINED_ON.search(file.name)]
    texts = [file for file in texts if TRAINED_ON.search(file.name)] or texts
    texts = [file for file in texts if file.stat().st_size]
    if not texts:
        raise ValueError(f"{folder} holds no text to train on (*.train.txt, *.train or *.txt)")
    left_out = [file.name for file in files if file not in texts]
    left_out += sorted(f"{path.name}/" for path in Path(folder).iterdir() if path.is_dir() and path.name[0] != ".")
    if left_out:
        logger.warning(f"{folder}: not trained on: {', '.join(left_out)}")
    check_text_files(texts)
    warn_of_shared_files(texts)
    return texts


def auxiliary_of(name: PathLike) -> tuple[Path, Ledger]:
    """The checkpoint of a run of ``mlsm babylm train``, and the ledger; ``name`` is the run or a checkpoint in it.

    ValueError if there is no ledger, FileNotFoundError if there is no model.
    """
    path = Path(name)
    run = next((folder for folder in (path, *list(path.parents)[:2]) if (folder / LEDGER).is_file()), None)
    if run is None:
        raise ValueError(
            f"{name} has no {LEDGER}, which says what it was trained on; train it with `mlsm babylm train`"
        )
    ledger = Ledger.read(run)
    checkpoint = path if path.is_file() else run / "model" / LAST
    if not checkpoint.is_file():
        raise FileNotFoundError(f"{run} has no model yet; finish its training")
    return checkpoint, replace(ledger, seen=max(ledger.seen, words_of_run(checkpoint)))


def open_ledger(files: Sequence[Path], settings: BabylmSettings, auxiliary: Ledger | None) -> Ledger:
    """The ledger of a run that has not begun; ValueError if it would exceed the limits of its track."""
    track = settings.limits()
    texts_of_run: list[Entry] = []
    with progress_bar("words", sum(file.stat().st_size for file in files)) as bar:
        for file in files:
            content = sha256_of_files(file)
            words = count_words(file, bar.update)
            texts_of_run.append({"file": file.name, "words": words, "sha256": content, "of": OF_RUN})
    contents = {text["sha256"] for text in texts_of_run}
    further_texts = [] if auxiliary is None else [{**text, "of": OF_AUXILIARY} for text in auxiliary.texts]
    texts = texts_of_run + [text for text in further_texts if text["sha256"] not in contents]
    words = sum(text["words"] for text in texts_of_run)
    charged = 0 if auxiliary is None else auxiliary.exposures
    if not words:
        raise ValueError("the text has no words")
    all_words = sum(text["words"] for text in texts)
    if all_words > track.words:
        raise ValueError(
            f"the text has {all_words:,} words, including those of an auxiliary model, but the track {settings.track} "
            f"allows {track.words:,}; leave some out"
        )
    possible = min(track.epochs, (track.exposures - charged) // words)
    epochs = settings.epochs or possible
    if not 1 <= epochs <= possible:
        raise ValueError(
            f"{max(1, epochs)} epochs of {words:,} words, after {charged:,} of an auxiliary model, are more than the "
            f"{track.exposures:,} words that the track {settings.track} allows to see; pass fewer --epochs, or leave "
            "text out"
        )
    planned = epochs * words
    return Ledger(
        track=settings.track,
        words_allowed=track.words,
        exposures_allowed=track.exposures,
        objective=settings.objective,
        epochs=epochs,
        texts=texts,
        auxiliary_exposures=charged,
        planned=planned,
        names=track.checkpoints(planned),
        license=settings.license,
    )


def check_words(texts: Sequence[Path], data_bin: Path) -> None:
    """Check that the tokens of each line begin as many words as the line has.

    ValueError names the first line where they differ. ``texts`` are the texts of the split ``train``, with words
    separated by single spaces.
    """
    dictionary = load_dictionary(data_bin)
    begins = begins_word(dictionary.symbols, special_symbols(dictionary)).numpy()
    split = load_split(str(data_bin / "train"), dictionary)
    tokens = flat_tokens(split)
    ends = np.cumsum(split.sizes, dtype=np.int64)
    sentences = np.flatnonzero(split.sizes > 1)  # shorter ones are document boundaries
    first = 0
    for text in texts:
        numbered_lines = ((number, line) for number, line in enumerate(word_lines(text), 1) if line)
        while lines := list(islice(numbered_lines, LINES_AT_ONCE)):
            numbers = sentences[first : first + len(lines)]
            first += len(lines)
            starts = ends[numbers] - split.sizes[numbers]
            words = np.array([line.count(" ") + 1 for _, line in lines])
            beginnings = np.zeros(len(lines), np.int64)
            if len(numbers):
                begins_of_tokens = begins[tokens[starts[0] : ends[numbers[-1]]]]
                beginnings[: len(numbers)] = np.add.reduceat(begins_of_tokens, starts - starts[0], dtype=np.int64)
            wrong = np.flatnonzero(beginnings != words)
            if len(wrong):
                place = wrong[0]
                raise ValueError(
                    f"{text}:{lines[place][0]}: {words[place]} words became {beginnings[place]} tokens that begin a "
                    "word; the tokenizer changes words: leave the line out, or use another tokenizer"
                )


def updates_of_epochs(data_bin: Path, cfg: FairseqConfig, epochs: int, ranks: int) -> int:
    """The number of updates in ``epochs`` of a training on ``ranks`` processes with the configuration ``cfg``."""
    dictionary = load_dictionary(data_bin)
    split = load_split(str(data_bin / "train"), dictionary)
    samples = training_samples(split, split="train", cfg=cfg.task, dictionary=dictionary, bos=dictionary.bos())
    batches = math.ceil(len(samples) / cfg.dataset.batch_size)
    freq = cfg.optimization.update_freq
    batches_per_update = [freq[min(epoch, len(freq) - 1)] for epoch in range(epochs)]
    return sum(math.ceil(math.ceil(batches / ranks) / number) for number in batches_per_update)


def train(
    text_dir: PathLike,
    output: PathLike,
    settings: BabylmSettings,
    tokenizer: TokenizerSettings,
    learning: LearningSettings,
    blocks: BlockSettings,
    *,
    arch: str,
    flags: Sequence[str] = (),
    workers: int = 1,
) -> tuple[Ledger, str | None] | None:
    """Make a tokenizer and a dataset, train, and export a folder at each number of words.

    A stopped run resumes. The first rank returns the ledger, and a line about a training that ended early, or None.
    ValueError if there is no text, the limits of the track would be exceeded, the text or a setting differs from the
    run in ``output``, or a step failed.

    Args:
        text_dir: see :func:`text_files`; all of it is training text.
        tokenizer: the tokenizer to train on the same text; an auxiliary model's tokenizer replaces it.
        learning: the seed of the run, and how codes are learned (``mlsm+mlm``). Its layer is ignored.
        blocks: samples of the training and of the coding.
        arch, flags: of ``fairseq-train``, as in :func:`~mlsm_plugin.fairseq_plugin.pipelines.pretraining.pretrain`.
    """
    output = Path(output)
    flags = _allowed(flags)
    files = text_files(text_dir)
    process = process_of(flags)
    teacher = None
    ledger_of_teacher = None
    if settings.auxiliary:
        teacher, ledger_of_teacher = auxiliary_of(settings.auxiliary)
    new_tokenizer = None if teacher else replace(tokenizer, keep_characters=True)
    ledger = open_ledger(files, settings, ledger_of_teacher)
    flags += ["--seed", str(learning.seed), *block_flags(blocks), *FLAGS_OF_OBJECTIVE.get(settings.objective, ())]
    cfg = configuration_of([str(output), *default_flags(1, arch, flags), *flags])
    decides = {
        **_decisions(settings, ledger, learning, blocks, cfg),
        "arch": arch,
        "ranks": process.world_size,
        "auxiliary": None if teacher is None else sha256_of_files(teacher),
        "vocab_size": None if new_tokenizer is None else new_tokenizer.vocab_size,
    }
    output.mkdir(parents=True, exist_ok=True)
    record = StepRecord(output / RECORD)
    with in_turn(output):  # the first of several ranks does the work
        _begin(record, decides)
        ledger = _continued(ledger, output, settings.license)
        if new_tokenizer is not None:
            new_tokenizer = resumed_settings(new_tokenizer, record.settings_of("tokenizer"))
        _make_data(record, files, teacher, new_tokenizer, learning, blocks, workers)
        write_word_plan(output / WORD_PLAN, ledger.planned, ledger.names)
    if teacher is not None:
        flags += [*FLAGS_WITH_CODES, "--mlm-weight", str(StageSettings().mlm_weight)]
    flags += ["--count-words", str(output / WORD_PLAN), "--max-epoch", str(ledger.epochs), "--disable-validation"]
    max_update = updates_of_epochs(output / "data-bin", cfg, ledger.epochs, process.world_size)
    in_stages = settings.objective == "mlsm+mlm" and teacher is None
    begin = time.perf_counter()
    with _exports(output, ledger, process, flags):
        _pretrain(output, learning if in_stages else None, blocks, arch=arch, max_update=max_update, flags=flags)
    if process.rank > 0:
        return None
    seconds = ledger.seconds.get("training", 0) + time.perf_counter() - begin
    ledger.seconds["training"] = round(seconds, 1)
    return ledger, _finished(ledger, output, early_end(output / "model", max_update, flags))


def _make_data(
    record: StepRecord,
    files: Sequence[Path],
    teacher: Path | None,
    new_tokenizer: TokenizerSettings | None,
    learning: LearningSettings,
    blocks: BlockSettings,
    workers: int,
) -> None:
    """Run the incomplete steps to a dataset, and to the codes of a ``teacher``, whose tokenizer the run then has."""
    output = record.path.parent
    tokenizer = teacher.parent if teacher else output / "tokenizer"
    for step in _steps(files, output, tokenizer, new_tokenizer, workers):
        record.run(step)
    if teacher is not None:
        for step in _steps_to_codes(output, str(teacher), learning, blocks):
            record.run(step)


def _exports(
    output: Path, ledger: Ledger, process: ProcessRank, flags: Sequence[str]
) -> AbstractContextManager[object]:
    """A context in which the first process exports during the training; on a CPU, this would slow the training."""
    on_gpu = process.rank == 0 and "--cpu" not in flags and torch.cuda.is_available()
    return exporting(output, ledger) if on_gpu else nullcontext()


def _pretrain(
    output: Path,
    learning: LearningSettings | None,
    blocks: BlockSettings,
    *,
    arch: str,
    max_update: int,
    flags: list[str],
) -> None:
    """Train on the dataset in ``output``; with ``learning``, in stages on the model's own codes."""
    data_bin = output / "data-bin"
    save_dir = output / "model"
    if learning is None:
        pretrain(data_bin, save_dir, arch=arch, max_update=max_update, flags=flags, keep_at=())
    else:
        stages = StageSettings()
        pretrain_in_stages(data_bin, save_dir, stages, learning, blocks, arch=arch, max_update=max_update, flags=flags)


def _finished(ledger: Ledger, output: Path, early: str | None) -> str | None:
    """Export the kept models and record the words seen; returns why the training ended early, or None."""
    ledger.seen = words_of_run(output / "model" / LAST)
    if early is None and ledger.seen != ledger.planned:
        early = f"the training is over after {ledger.seen:,} of {ledger.planned:,} words; train in another --output"
    export_kept(output, ledger, finished=early is None)
    lost = [name for name in ledger.names if name not in ledger.checkpoints]
    if early is None and lost:
        early = (
            f"the run has no {', '.join(lost)}, which an earlier {LEDGER} had; restore both from a copy, or train in "
            "another --output"
        )
    return early


def _continued(ledger: Ledger, output: Path, license: str | None) -> Ledger:
    """The ledger of the run in a folder, or else the new ``ledger``; writes it to the folder."""
    if (output / LEDGER).is_file():
        ledger = Ledger.read(output)
        ledger = replace(ledger, license=license or ledger.license)
    if not (output / "model" / LAST).exists():  # a new training makes another last model
        ledger.checkpoints.pop(MAIN, None)
    ledger.write(output)
    return ledger


def _allowed(flags: Sequence[str]) -> list[str]:
    """The flags, after :func:`separate_words`; ValueError if a flag is not allowed."""
    words = separate_words(flags)
    if refused := sorted(REFUSED & set(words)):
        raise ValueError(
            f"{refused[0]} is chosen by `mlsm babylm train`, or would change what an epoch is; leave it out"
        )
    if dict(pairwise(words)).get("--mlm-weight", "1").strip("0.") == "":
        raise ValueError("--mlm-weight 0 trains no masked LM, which the BabyLM challenge evaluates; leave it out")
    return words


def _begin(record: StepRecord, decides: dict[str, object]) -> None:
    """Record the settings that decide a run; ValueError if it has results of other settings."""
    output = record.path.parent
    has_results = (output / "data-bin").exists() or (output / "model" / LAST).exists()
    if not has_results:  # other settings cost nothing
        (output / LEDGER).unlink(missing_ok=True)
    record.keep_settings("run", decides, "Choose another --output", fixed=None if has_results else ())


def _decisions(
    settings: BabylmSettings, ledger: Ledger, learning: LearningSettings, blocks: BlockSettings, cfg: FairseqConfig
) -> dict[str, object]:
    """The settings that a resumed run must share, as JSON."""
    return {
        "track": settings.track,
        "words": ledger.words_allowed,
        "epochs": ledger.epochs,
        "objective": settings.objective,
        "blocks": identity(blocks),
        "seed": learning.seed,
        "batch_size": cfg.dataset.batch_size,
        "update_freq": list(cfg.optimization.update_freq),
        "texts": {text["file"]: {**text, "file": None} for text in ledger.texts if text["of"] == OF_RUN},
    }


def _steps(
    files: Sequence[Path], output: Path, tokenizer: Path, new: TokenizerSettings | None, workers: int
) -> Iterator[Step]:
    """The steps to a dataset with exactly the words of a text. ``new`` trains a tokenizer; None uses ``tokenizer``."""
    folder = output / TEXT_FOLDER
    data_bin = output / "data-bin"
    texts = [folder / file.name for file in files]
    valid = folder / VALID

    def write_text() -> None:
        folder.mkdir(exist_ok=True)
        for file, text in zip(files, texts, strict=True):
            write_words(file, text)
        with atomic_open(valid, "w") as sample:
            sample.writelines(f"{line}\n" for line in islice(filter(None, word_lines(texts[0])), LINES_OF_VALID))

    yield Step("text", write_text, {}, files, [folder])
    splits = {"train": [str(text) for text in texts], "valid": [str(valid)], "test": []}
    yield from steps_to_data(splits, data_bin, tokenizer, new, workers)
    yield Step("check", partial(check_words, texts, data_bin), {}, [], [])


def _steps_to_codes(output: Path, teacher: str, learning: LearningSettings, blocks: BlockSettings) -> Iterator[Step]:
    """The steps that learn a dictionary from the last layer of a model, and code with it."""
    layer = source_of(teacher).layers_of(teacher)
    coding = CodingSettings.with_run(learning, layer, blocks=blocks)
    learning = replace(learning, layer=layer)
    data_bin = output / "data-bin"
    return steps_to_codes(data_bin, teacher, output / "dictionary", learning, coding, splits=["train", "valid"])
