"""From raw text to everything that MLSM training reads, in one folder; what is up to date is not made again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlsm_plugin.core.coding.block_coding import CodingFigures
from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.coding.settings import PreprocessSettings
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.output_lock import only_writer
from mlsm_plugin.core.files.step_record import Step, StepRecord
from mlsm_plugin.core.hidden_states.sources import source_of
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.fairseq_plugin.coding.corpus_coding import encode_split, learn_from_split
from mlsm_plugin.fairseq_plugin.pipelines.pretraining import KEPT_PERCENTAGES, block_flags, pretrain, separate_words
from mlsm_plugin.fairseq_plugin.text.binarize import binarize
from mlsm_plugin.fairseq_plugin.text.sentencepiece_training import TokenizerSettings, train_tokenizer
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import tokenizer_inputs

NEUTRAL = {"device", "threads", "batch_tokens", "log"}  # how a step computes, and not what


def preprocess(
    texts: Mapping[str, Sequence[str]],
    output: PathLike,
    settings: PreprocessSettings,
    new_tokenizer: TokenizerSettings,
    learning: LearningSettings,
    coding: CodingSettings,
    *,
    layer: int | None = None,
    keep_at: Sequence[int] = KEPT_PERCENTAGES,
    flags: Sequence[str] = (),
    workers: int = 1,
    coded: Callable[[str, Callable[[], CodingFigures]], object] = lambda split, encode: encode(),
) -> StepRecord:
    """Train a tokenizer, binarize, train the auxiliary model, learn the dictionary, and code the splits.

    Returns the record of the steps. ValueError if an option of a new tokenizer is given although none is trained, or a
    step failed.

    Args:
        texts: the files of the splits ``train`` and ``valid``, and of ``test`` if there is one.
        learning, coding: their layers do not count.
        layer: whose hidden states are coded; None: the last one.
        keep_at, flags: of the auxiliary model, see :func:`~mlsm_plugin.fairseq_plugin.pipelines.pretraining.pretrain`.
        coded: runs what codes a split, whose name it gets, and shows the figures.
    """
    given = settings.tokenizer or settings.auxiliary
    if given and (new_tokenizer.user_symbols or new_tokenizer.lowercase):
        raise ValueError("--user-symbols and --lowercase need a tokenizer that is trained here, not one that is given")
    output = Path(output)
    data_bin, dictionary = output / "data-bin", output / "dictionary"
    auxiliary = settings.auxiliary or str(output / "auxiliary" / "checkpoint_best.pt")
    splits = {split: list(texts.get(split, ())) for split in ("train", "valid", "test")}
    coded_splits = [split for split, files in splits.items() if files]
    with only_writer(output):
        record = StepRecord(output / "steps.json")
        own_tokenizer = None if given else new_tokenizer
        tokenizer = settings.tokenizer or (source_of(auxiliary).tokenizer_of(auxiliary) if given else None)
        binarized(record, splits, data_bin, tokenizer or output / "tokenizer", own_tokenizer, workers)
        if not settings.auxiliary:
            own: dict[str, Any] = {
                "keep_at": list(keep_at),
                "arch": settings.auxiliary_arch,
                "max_update": settings.auxiliary_updates,
                "flags": ["--seed", str(learning.seed), *block_flags(coding.blocks), *separate_words(flags)],
            }
            made = output / "auxiliary"
            pretrain_it = partial(pretrain, data_bin, made, **own)
            record.run(Step("auxiliary", pretrain_it, own, [], [made], checked=[Path(auxiliary)]))
        layer = source_of(auxiliary).layers_of(auxiliary) if layer is None else layer
        learning, coding = replace(learning, layer=layer), replace(coding, layer=layer)
        files = source_of(auxiliary).files_of(auxiliary)
        learn = partial(learn_from_split, data_bin, auxiliary, dictionary, learning, coding.blocks)
        deciding = {**_deciding(learning), "blocks": asdict(coding.blocks)}
        record.run(Step("dictionary", learn, deciding, files, [dictionary]))

        def encode() -> None:
            coder = load_coder(dictionary)
            for split in coded_splits:
                code = partial(encode_split, data_bin, split, auxiliary=auxiliary, coder=coder, settings=coding)
                coded(split, code)

        stores = [data_bin / f"{split}.codes" for split in coded_splits]
        record.run(Step("encode", encode, {**_deciding(coding), "splits": coded_splits}, files, stores))
    return record


def binarized(
    record: StepRecord,
    splits: Mapping[str, Sequence[str]],
    data_bin: Path,
    tokenizer: PathLike,
    new_tokenizer: TokenizerSettings | None,
    workers: int,
) -> None:
    """Run the steps from text to ``data_bin``; the first trains ``tokenizer`` if it is new.

    ``splits`` are the files of ``train``, ``valid`` and ``test``.
    """
    train, valid, test = splits.values()
    tokenizer = str(tokenizer)
    if new_tokenizer is not None:
        make = partial(train_tokenizer, train, tokenizer, new_tokenizer)
        record.run(Step("tokenizer", make, asdict(new_tokenizer), [Path(file) for file in train], [Path(tokenizer)]))

    def write_data() -> None:
        made = binarize(tokenizer=tokenizer, train=train, valid=valid, test=test, output=data_bin, workers=workers)
        print(made.table())

    used = [Path(file) for files in splits.values() for file in files]
    used += [] if new_tokenizer else tokenizer_inputs(tokenizer)
    record.run(Step("binarize", write_data, {"tokenizer": tokenizer, **splits}, used, [data_bin]))


def _deciding(settings: Any) -> dict[str, Any]:
    """What decides the result of a step, as values that JSON can hold."""
    return {name: value for name, value in asdict(settings).items() if name not in NEUTRAL}
