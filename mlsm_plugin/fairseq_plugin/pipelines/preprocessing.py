"""From raw text to everything that MLSM training reads, in one folder; steps that are up to date are skipped."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.coding.settings import PreprocessSettings
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.output_lock import only_writer
from mlsm_plugin.core.files.settings import identity
from mlsm_plugin.core.files.step_record import RECORD, Step, StepRecord
from mlsm_plugin.core.hidden_states.sources import source_of
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.fairseq_plugin.coding.corpus_coding import Coded, learn_from_split, splits_encoder
from mlsm_plugin.fairseq_plugin.pipelines.pretraining import KEPT_PERCENTAGES, block_flags, pretrain, separate_words
from mlsm_plugin.fairseq_plugin.text.binarize import binarize
from mlsm_plugin.fairseq_plugin.text.sentencepiece_training import TokenizerSettings, resumed_settings, train_tokenizer
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import tokenizer_inputs


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
    coded: Coded = lambda split, encode: encode(),
) -> StepRecord:
    """Train a tokenizer, binarize, train the auxiliary model, learn the dictionary, and code the splits.

    Returns the record of the steps. ValueError if an option of a new tokenizer is set although none is trained, or a
    step failed.

    Args:
        texts: the files of the splits ``train``, ``valid`` and, optionally, ``test``.
        learning, coding: their layers are ignored.
        layer: layer whose hidden states are coded; None: the last layer.
        keep_at, flags: of the auxiliary model, see :func:`~mlsm_plugin.fairseq_plugin.pipelines.pretraining.pretrain`.
        coded: takes the name of a split and the function that codes it, calls it, and shows the figures.
    """
    has_tokenizer = bool(settings.tokenizer or settings.auxiliary)
    if has_tokenizer and (new_tokenizer.user_symbols or new_tokenizer.lowercase):
        raise ValueError("--user-symbols and --lowercase need a tokenizer that is trained here, not one that is given")
    output = Path(output)
    splits = {split: list(texts.get(split, ())) for split in ("train", "valid", "test")}

    def steps() -> Iterator[Step]:
        data_bin = output / "data-bin"
        tokenizer: PathLike = output / "tokenizer"
        auxiliary = settings.auxiliary or str(output / "auxiliary" / "checkpoint_best.pt")
        if settings.tokenizer:
            tokenizer = settings.tokenizer
        elif settings.auxiliary:
            tokenizer = source_of(auxiliary).tokenizer_of(auxiliary) or tokenizer
        learned = None if has_tokenizer else resumed_settings(new_tokenizer, record.settings_of("tokenizer"))
        yield from steps_to_data(splits, data_bin, tokenizer, learned, workers)
        if not settings.auxiliary:
            training_flags = ["--seed", str(learning.seed), *block_flags(coding.blocks), *separate_words(flags)]
            yield _auxiliary_step(data_bin, Path(auxiliary), settings, list(keep_at), training_flags)
        coded_splits = [split for split, files in splits.items() if files]
        coded_layer = source_of(auxiliary).layers_of(auxiliary) if layer is None else layer
        yield from steps_to_codes(
            data_bin,
            auxiliary,
            output / "dictionary",
            replace(learning, layer=coded_layer),
            replace(coding, layer=coded_layer),
            splits=coded_splits,
            coded=coded,
        )

    record = StepRecord(output / RECORD)
    with only_writer(output):
        for step in steps():
            record.run(step)
    return record


def steps_to_data(
    splits: Mapping[str, Sequence[str]],
    data_bin: Path,
    tokenizer: PathLike,
    new_tokenizer: TokenizerSettings | None,
    workers: int,
) -> Iterator[Step]:
    """The steps from text to ``data_bin``; the first step trains ``tokenizer`` if it is new.

    ``splits`` holds the files of ``train``, ``valid`` and ``test``.
    """
    train, valid, test = splits.values()
    tokenizer = str(tokenizer)
    inputs = [Path(file) for files in splits.values() for file in files]
    if new_tokenizer is not None:
        make = partial(train_tokenizer, train, tokenizer, new_tokenizer)
        texts = [Path(file) for file in train]
        yield Step("tokenizer", make, identity(new_tokenizer), texts, [Path(tokenizer)])
    else:
        inputs += tokenizer_inputs(tokenizer)

    def write_data() -> None:
        figures = binarize(tokenizer=tokenizer, train=train, valid=valid, test=test, output=data_bin, workers=workers)
        print(figures.table())

    yield Step("binarize", write_data, {"tokenizer": tokenizer, **splits}, inputs, [data_bin])


def steps_to_codes(
    data_bin: Path,
    auxiliary: str,
    dictionary: Path,
    learning: LearningSettings,
    coding: CodingSettings,
    *,
    splits: Sequence[str],
    coded: Coded = lambda split, encode: encode(),
) -> Iterator[Step]:
    """The steps that learn a dictionary from the hidden states of a model, and code the splits with it.

    ``coded`` takes the name of a split and the function that codes it.
    """
    files = source_of(auxiliary).files_of(auxiliary)
    learn = partial(learn_from_split, data_bin, auxiliary, dictionary, learning, coding.blocks)
    deciding = {**identity(learning), "blocks": identity(coding.blocks)}
    yield Step("dictionary", learn, deciding, files, [dictionary])

    def write_codes() -> None:
        coder = load_coder(dictionary)
        encode = splits_encoder(data_bin, auxiliary=auxiliary, coder=coder, settings=coding)
        for split in splits:
            coded(split, partial(encode, split))

    stores = [data_bin / f"{split}.codes" for split in splits]
    yield Step("encode", write_codes, {**identity(coding), "splits": splits}, files, stores)


def _auxiliary_step(
    data_bin: Path, checkpoint: Path, settings: PreprocessSettings, keep_at: list[int], flags: list[str]
) -> Step:
    """The step that trains the auxiliary model."""
    folder = checkpoint.parent
    arch = settings.auxiliary_arch
    max_update = settings.auxiliary_updates
    train = partial(pretrain, data_bin, folder, arch=arch, max_update=max_update, flags=flags, keep_at=keep_at)
    deciding = {"keep_at": keep_at, "arch": arch, "max_update": max_update, "flags": flags}
    return Step("auxiliary", train, deciding, [], [folder], checked=[checkpoint])
