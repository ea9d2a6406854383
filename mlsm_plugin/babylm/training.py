"""From a folder of text to a trained model whose words are counted; what is done is not done again."""

import logging
import math
import os
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlsm_plugin.babylm.exports import export_kept, exporting
from mlsm_plugin.babylm.ledger import LEDGER, OF_AUXILIARY, OWN, Ledger
from mlsm_plugin.babylm.settings import MAIN, BabylmSettings
from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.coding.settings import StageSettings
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open, sha256_of_files, write_json
from mlsm_plugin.core.files.output_lock import in_turn
from mlsm_plugin.core.files.planned_folder import PlannedFolder
from mlsm_plugin.core.files.step_record import Step, StepRecord
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.core.hidden_states.sources import source_of
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.text.text_files import check_text_files, progress_bar
from mlsm_plugin.core.text.words import count_words, word_lines, write_words
from mlsm_plugin.fairseq_plugin.coding.corpus_coding import encode_split, learn_from_split
from mlsm_plugin.fairseq_plugin.compat.binarized_files import flat_tokens
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import configuration_of, words_of_run
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import LAST
from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary, load_split, training_samples
from mlsm_plugin.fairseq_plugin.pipelines.preprocessing import binarized
from mlsm_plugin.fairseq_plugin.pipelines.pretraining import (
    block_flags,
    default_flags,
    early_end,
    pretrain,
    separate_words,
)
from mlsm_plugin.fairseq_plugin.pipelines.self_coded_pretraining import pretrain_in_stages
from mlsm_plugin.fairseq_plugin.tasks.word_counts import begins_word, write_word_plan
from mlsm_plugin.fairseq_plugin.text.sentencepiece_training import TokenizerSettings
from mlsm_plugin.fairseq_plugin.text.symbol_files import special_symbols

TEXT_NAME = re.compile(r".+\.(train|txt)(\.(gz|bz2|xz))?", re.IGNORECASE)
TRAINED_ON = re.compile(r"\.train\b", re.IGNORECASE)
NOT_TRAINED_ON = re.compile(r"\.(dev|valid|test)\b", re.IGNORECASE)
LINES_AT_ONCE = 1 << 16
LINES_OF_VALID = 100  # of the training text: a dataset needs the split, and nothing reads it
# flags with which an epoch would not be the whole text once, or which a run has of its own
REFUSED = {
    *("--task", "--criterion", "--save-dir", "--max-update", "--max-epoch", "--count-words", "--no-save", "--data"),
    *("--max-tokens", "--skip-remainder-batch", "--train-subset", "--shorten-method", "--fp16", "--bf16", "--amp"),
    *("--restore-file", "--finetune-from-model", "--continue-once", "--reset-dataloader", "--reset-optimizer"),
    *("--reset-meters", "--reset-lr-scheduler", "--update-epoch-batch-itr", "--grouped-shuffling", "--num-atoms"),
    *("--tokens-per-sample", "--sample-break-mode", "--seed", "--required-batch-size-multiple"),
    *("--no-last-checkpoints", "--checkpoint-suffix"),
}
OBJECTIVE = {"taco": ("--task", "taco", "--criterion", "token_contrastive")}
CODED = ("--task", "masked_latent_semantic", "--criterion", "latent_semantic_kl")
COUNTED, VALID = "words.json", "valid"
logger = logging.getLogger(__name__)


def text_files(folder: PathLike) -> list[Path]:
    """The training text of a folder: its ``*.train`` and ``*.train.txt``, or else ``*.txt``, perhaps compressed.

    A warning names files that are left out, such as empty ones; hidden files, such as ``._a.train.txt``, do not count.
    ValueError if there is no text, FileNotFoundError if there is no such folder.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder} is not a folder of text files")
    files = [file for file in sorted(Path(folder).iterdir()) if file.is_file() and not file.name.startswith(".")]
    texts = [file for file in files if TEXT_NAME.fullmatch(file.name) and not NOT_TRAINED_ON.search(file.name)]
    texts = [file for file in texts if TRAINED_ON.search(file.name)] or texts
    chosen = [file for file in texts if file.stat().st_size]
    if not chosen:
        raise ValueError(f"{folder} holds no text to train on (*.train.txt, *.train or *.txt)")
    left_out = [file.name for file in files if file not in chosen]
    if left_out:
        logger.warning(f"{folder}: not trained on: {', '.join(left_out)}")
    check_text_files(chosen)
    return chosen


def auxiliary_of(name: PathLike) -> tuple[Path, Ledger]:
    """The checkpoint of a run of ``mlsm babylm train``, or one in it, and the ledger; ValueError if there is none."""
    path = Path(name)
    run = next((one for one in (path, *list(path.parents)[:2]) if (one / LEDGER).is_file()), None)
    if run is None:
        raise ValueError(
            f"{name} has no {LEDGER}, which says what it was trained on; train it with `mlsm babylm train`"
        )
    ledger, checkpoint = Ledger.read(run), path if path.is_file() else run / "model" / LAST
    if not checkpoint.is_file():
        raise FileNotFoundError(f"{run} has no model yet; finish its training")
    return checkpoint, replace(ledger, seen=max(ledger.seen, words_of_run(checkpoint)))


def open_ledger(files: Sequence[Path], settings: BabylmSettings, auxiliary: Ledger | None) -> Ledger:
    """The ledger of a run that has not begun; ValueError if it would pass the limits of its track."""
    track = settings.limits()
    own: list[dict[str, Any]] = []
    with progress_bar("words", sum(file.stat().st_size for file in files)) as bar:
        for file in files:
            content = sha256_of_files(file)
            own.append({"file": file.name, "words": count_words(file, bar.update), "sha256": content, "of": OWN})
    contents = {one["sha256"] for one in own}
    others = [] if auxiliary is None else [{**one, "of": OF_AUXILIARY} for one in auxiliary.texts]
    texts = own + [one for one in others if one["sha256"] not in contents]
    words, charged = sum(one["words"] for one in own), 0 if auxiliary is None else auxiliary.exposures
    if not words:
        raise ValueError("the text has no words")
    if (found := sum(one["words"] for one in texts)) > track.words:
        raise ValueError(
            f"the text has {found:,} words, those of an auxiliary model included, and the track {settings.track} "
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
    limits = (settings.track, track.words, track.exposures)
    names, license = track.checkpoints(planned), settings.license
    return Ledger(*limits, settings.objective, epochs, texts, charged, planned, names, license=license)


def check_words(texts: Sequence[Path], data_bin: Path) -> None:
    """Check that the tokens of each line that begin a word are as many as its words.

    ValueError names the first line where they are not. ``texts`` are those of the split ``train``, of words that single
    spaces part.
    """
    dictionary = load_dictionary(data_bin)
    begins = begins_word(dictionary.symbols, special_symbols(dictionary)).numpy()
    split = load_split(str(data_bin / "train"), dictionary)
    tokens, ends = flat_tokens(split), np.cumsum(split.sizes, dtype=np.int64)
    sentences = np.flatnonzero(split.sizes > 1)  # the others are the ends of documents
    first = 0
    for text in texts:
        lines = ((number, line) for number, line in enumerate(word_lines(text), 1) if line)
        while some := list(islice(lines, LINES_AT_ONCE)):
            own = sentences[first : first + len(some)]
            first += len(some)
            starts, wanted = ends[own] - split.sizes[own], np.array([line.count(" ") + 1 for _, line in some])
            found = np.zeros(len(some), np.int64)
            if len(own):
                counted = begins[tokens[starts[0] : ends[own[-1]]]]
                found[: len(own)] = np.add.reduceat(counted, starts - starts[0], dtype=np.int64)
            if len(wrong := np.flatnonzero(found != wanted)):
                place = wrong[0]
                raise ValueError(
                    f"{text}:{some[place][0]}: {wanted[place]} words became {found[place]} tokens that begin a word; "
                    "the tokenizer changes words: leave the line out, or use another tokenizer"
                )


def updates_of_epochs(data_bin: Path, cfg: Any, epochs: int, ranks: int) -> int:
    """How many updates so many epochs have, with the configuration of a training on ``ranks`` processes."""
    dictionary = load_dictionary(data_bin)
    split = load_split(str(data_bin / "train"), dictionary)
    samples = training_samples(split, split="train", cfg=cfg.task, dictionary=dictionary, bos=dictionary.bos())
    batches = math.ceil(len(samples) / cfg.dataset.batch_size)
    freq = cfg.optimization.update_freq
    of_epochs = [freq[min(epoch, len(freq) - 1)] for epoch in range(epochs)]
    return sum(math.ceil(math.ceil(batches / ranks) / number) for number in of_epochs)


def ranks_of(flags: Sequence[str]) -> tuple[int, int]:
    """The number of this process and that of all, of a training with these flags, under torchrun or without it.

    fairseq itself starts a process for each GPU.
    """
    given = dict(pairwise(flags))
    gpus = 1 if "--cpu" in flags else max(1, torch.cuda.device_count())
    world = int(given.get("--distributed-world-size") or os.environ.get("WORLD_SIZE") or gpus)
    return int(given.get("--distributed-rank") or os.environ.get("RANK") or 0), world


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
    """Tokenizer, dataset, training, and an exported folder at each number of words.

    The run goes on where it was stopped. The first rank returns the ledger, and one line on a training that ended
    early, if it did. ValueError if there is no text, the track would be passed, the text or a setting is not that of
    the run in ``output``, or a step failed.

    Args:
        text_dir: see :func:`text_files`; all of it is trained on.
        tokenizer: what is learned from the same text; with an auxiliary model, its tokenizer is taken.
        learning: the seed of the run, and how codes are learned (``mlsm+mlm``). Its layer does not count.
        blocks: samples of the training and of the coding.
        arch, flags: of ``fairseq-train``, as in :func:`~mlsm_plugin.fairseq_plugin.pipelines.pretraining.pretrain`.
    """
    output, flags = Path(output), _allowed(flags)
    files, (rank, ranks) = text_files(text_dir), ranks_of(flags)
    teacher, charged = auxiliary_of(settings.auxiliary) if settings.auxiliary else (None, None)
    new = None if teacher else replace(tokenizer, keep_characters=True)
    ledger = open_ledger(files, settings, charged)
    flags += ["--seed", str(learning.seed), *block_flags(blocks), *OBJECTIVE.get(settings.objective, ())]
    cfg = configuration_of([str(output), *default_flags(1, arch, flags), *flags])
    auxiliary, vocab_size = teacher and sha256_of_files(teacher), new and new.vocab_size
    decides = {
        **_decisions(settings, ledger, learning, blocks, cfg),
        **{"arch": arch, "ranks": ranks, "auxiliary": auxiliary, "vocab_size": vocab_size},
    }
    data_bin, save_dir = output / "data-bin", output / "model"
    spent = data_bin.exists() or (save_dir / LAST).exists()  # until then, another vocabulary, say, costs nothing
    _begin(output, decides, anew=not spent)
    with in_turn(output):  # the first of several ranks prepares
        if (output / LEDGER).is_file():
            before = Ledger.read(output)
            ledger = replace(before, license=settings.license or before.license)
        if not (save_dir / LAST).exists():  # a new training makes another last model
            ledger.checkpoints.pop(MAIN, None)
        ledger.write(output)
        _prepare(files, output, teacher.parent if teacher else output / "tokenizer", new, workers)
        write_word_plan(output / COUNTED, ledger.planned, ledger.names)
        if teacher is not None:
            flags += _codes(data_bin, str(teacher), output / "dictionary", learning, blocks)
    flags += ["--count-words", str(output / COUNTED), "--max-epoch", str(ledger.epochs), "--disable-validation"]
    max_update, begin = updates_of_epochs(data_bin, cfg, ledger.epochs, ranks), time.perf_counter()
    how: dict[str, Any] = {"arch": arch, "max_update": max_update, "flags": flags}
    idle = rank == 0 and "--cpu" not in flags and torch.cuda.is_available()  # else an export would slow the training
    with exporting(output, ledger) if idle else nullcontext():
        if settings.objective == "mlsm+mlm" and teacher is None:
            pretrain_in_stages(data_bin, save_dir, StageSettings(), learning, blocks, **how)
        else:
            pretrain(data_bin, save_dir, keep_at=(), **how)
    early = early_end(save_dir, max_update, flags)
    if rank > 0:
        return None
    seconds = ledger.seconds.get("training", 0) + time.perf_counter() - begin
    ledger.seconds["training"], ledger.seen = round(seconds, 1), words_of_run(save_dir / LAST)
    if early is None and ledger.seen != ledger.planned:
        early = f"the training is over after {ledger.seen:,} of {ledger.planned:,} words; train in another --output"
    export_kept(output, ledger, finished=early is None)
    return ledger, early


def _allowed(flags: Sequence[str]) -> list[str]:
    """The flags as :func:`separate_words`; ValueError if one is in ``REFUSED``."""
    words = separate_words(flags)
    if refused := sorted(REFUSED & set(words)):
        raise ValueError(
            f"{refused[0]} is chosen by `mlsm babylm train`, or would change what an epoch is; leave it out"
        )
    if dict(pairwise(words)).get("--mlm-weight", "1").strip("0.") == "":
        raise ValueError("--mlm-weight 0 trains no masked LM, which the BabyLM challenge evaluates; leave it out")
    return words


def _begin(output: Path, decides: dict[str, Any], *, anew: bool) -> None:
    """Write down what decides a run; ValueError if the run that is there has other settings, unless it begins anew."""
    plan = PlannedFolder(output, decides, plan_file="run.json", advice="Choose another --output")
    if anew:
        plan.forget()
        (output / LEDGER).unlink(missing_ok=True)
    plan.begin()


def _decisions(
    settings: BabylmSettings, ledger: Ledger, learning: LearningSettings, blocks: BlockSettings, cfg: Any
) -> dict[str, Any]:
    """What a run that goes on has to agree in, as JSON."""
    return {
        **{"track": settings.track, "words": ledger.words_allowed, "epochs": ledger.epochs},
        **{"objective": settings.objective, "blocks": asdict(blocks), "seed": learning.seed},
        **{"batch_size": cfg.dataset.batch_size, "update_freq": list(cfg.optimization.update_freq)},
        "texts": {one["file"]: {**one, "file": None} for one in ledger.texts if one["of"] == OWN},
    }


def _prepare(files: Sequence[Path], output: Path, tokenizer: Path, new: TokenizerSettings | None, workers: int) -> None:
    """Make the dataset, whose words are those of the text; the tokenizer is ``new``, or there."""
    folder, data_bin, record = output / "text", output / "data-bin", StepRecord(output / "steps.json")
    texts, valid, checked = [folder / file.name for file in files], folder / VALID, output / "text.checked"

    def write_text() -> None:
        folder.mkdir(exist_ok=True)
        for file, text in zip(files, texts, strict=True):
            write_words(file, text)
        with atomic_open(valid, "w") as sample:
            sample.writelines(f"{line}\n" for line in islice(filter(None, word_lines(texts[0])), LINES_OF_VALID))

    def check() -> None:
        check_words(texts, data_bin)
        write_json(checked, {"words": "those of the text"})

    record.run(Step("text", write_text, {}, files, [folder]))
    splits = {"train": [str(text) for text in texts], "valid": [str(valid)], "test": []}
    binarized(record, splits, data_bin, tokenizer, new, workers)
    record.run(Step("check", check, {}, [], [checked]))


def _codes(data_bin: Path, teacher: str, output: Path, learning: LearningSettings, blocks: BlockSettings) -> list[str]:
    """Learn a dictionary from the last layer of a model, and code with it; the flags of a training on the codes."""
    layer = source_of(teacher).layers_of(teacher)
    learn_from_split(data_bin, teacher, output, replace(learning, layer=layer), blocks)
    how = {option: getattr(learning, option) for option in ("device", "fp16", "threads", "batch_tokens")}
    coding = CodingSettings(layer, blocks, **how)
    for split in ("train", "valid"):
        encode_split(data_bin, split, auxiliary=teacher, coder=load_coder(output), settings=coding)
    return [*CODED, "--mlm-weight", str(StageSettings().mlm_weight)]
