"""Continue the pre-training of a Hugging Face model on a text: from the text to the adapted model, resumable."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mlsm_plugin.auxiliary.coder_learning import LearningSettings
from mlsm_plugin.auxiliary.split_coder import CodingSettings
from mlsm_plugin.data.cooccurring_spans import SpanRules
from mlsm_plugin.files.atomic_files import read_json, sha256_of_files, write_json
from mlsm_plugin.files.hf_files import hf_folder, weight_files
from mlsm_plugin.files.output_lock import only_writer
from mlsm_plugin.files.planned_folder import PlannedFolder, Standing, recorded_in
from mlsm_plugin.files.work_share import WorkShare, work_share
from mlsm_plugin.hidden_states.library_encoder import check_vocabulary, positions_of, supported_config
from mlsm_plugin.huggingface.coding import encode_sequences
from mlsm_plugin.huggingface.collators import (
    LatentSemanticCollator,
    MaskedLmCollator,
    Masking,
    TokenContrastiveCollator,
)
from mlsm_plugin.huggingface.dictionaries import learn_from_sequences
from mlsm_plugin.huggingface.latent_semantic_model import LatentSemanticModel
from mlsm_plugin.huggingface.masked_lm_model import MaskedLmModel
from mlsm_plugin.huggingface.masked_lms import open_masked_lm
from mlsm_plugin.huggingface.pretraining_sequences import PretrainingSequences
from mlsm_plugin.huggingface.span_contrastive_model import SpanContrastiveModel
from mlsm_plugin.huggingface.span_groups import SpanGroups, SpanGroupsCollator
from mlsm_plugin.huggingface.text_sequences import default_max_length, write_text_sequences
from mlsm_plugin.huggingface.token_contrastive_model import TokenContrastiveModel
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from mlsm_plugin.huggingface.training import TrainingSettings, make_trainer, save_trained, train
from mlsm_plugin.sparse_coding.coder import load_coder
from mlsm_plugin.tokenization.hf_tokenizer import HuggingFaceTokenizer, open_tokenizer
from mlsm_plugin.tokenization.unknown_tokens import DEFAULT_MAX_UNK_RATE

OBJECTIVES = ("mlm", "mlsm", "mlsm+mlm", "taco", "npm")
WITH_CODES = ("mlsm", "mlsm+mlm")
HELD_OUT = 0.02  # share of the sequences, at their end, if there is no text to evaluate on
MOST_HELD_OUT = 2000
FEWEST_FOR_SPANS = 2  # sequences; npm finds spans in others
ADVICE = "Pass these settings again, or choose another --output"


@dataclass(frozen=True)
class Adaptation:
    """What is adapted to which text, and how.

    Attributes:
        model: folder or hub name of a masked LM with its tokenizer.
        texts: files with a sentence a line and blank lines between documents.
        output: folder for everything that is made.
        objective: one of :data:`OBJECTIVES`.
        valid_texts: text to evaluate on; empty: the last 2 % of the sequences are held out, at most 2,000.
        auxiliary: folder or hub name of the model whose hidden states are coded, with the same vocabulary; None: the
            model itself.
        learning: how the dictionary is learned, and from which layer.
        latent_top: how many atoms of a code are kept, those with the largest weights; None: all.
        masking: how much is masked, and how.
        max_length: ids of the longest sequence; None: what the model can take, at most 512.
        max_unk_rate: largest share of unknown tokens in a text.
        training: how the model is trained; its ``updates`` are replaced by those of ``epochs`` if that is given.
        epochs: passes over the text; None: ``training.updates`` counts.
    """

    model: str
    texts: Sequence[str]
    output: str
    objective: str = "mlsm+mlm"
    valid_texts: Sequence[str] = ()
    auxiliary: str | None = None
    learning: LearningSettings | None = None
    latent_top: int | None = None
    masking: Masking = field(default_factory=Masking)
    max_length: int | None = None
    max_unk_rate: float = DEFAULT_MAX_UNK_RATE
    training: TrainingSettings = field(default_factory=TrainingSettings)
    epochs: float | None = None

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"the objective must be one of {', '.join(OBJECTIVES)}, got {self.objective}")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"--epochs must be positive and finite, got {self.epochs:g}")

    @property
    def coded_model(self) -> str:
        """The model whose hidden states are coded."""
        return self.auxiliary or self.model


@dataclass(frozen=True)
class Prepared:
    """What the training reads."""

    train: TokenSequences
    valid: TokenSequences
    tokenizer: Any
    max_length: int


def adapt(settings: Adaptation) -> dict[str, dict[str, float]]:
    """Tokenize, learn and code where the objective needs it, train, and write ``model`` in the output folder.

    Every part resumes where it was stopped, and is skipped where it is complete. Under torchrun all ranks code and
    train.

    Returns:
        the figures on the held-out text ``before`` and ``after``, in nats.

    Raises:
        ValueError: model, tokenizer, text and settings do not belong together, or the folder was begun with others.
        OSError: a file cannot be read or written.
    """
    share = work_share(None, None, os.environ)
    output = Path(settings.output)
    processes = _processes(output, share.count)
    tokenizer, length = _check(settings)
    folder = PlannedFolder(output, {**_plan(settings, length), **processes}, advice=ADVICE)
    with only_writer(output) if share.index == 0 else nullcontext():
        folder.check()
        if folder.is_sealed:
            figures: dict[str, dict[str, float]] = folder.sealed_content()["figures"]
            return figures
        arguments = settings.training.arguments(output / "checkpoints")  # lets the ranks find each other
        with arguments.main_process_first(desc="preparing the text"):
            new = folder.standing() is Standing.ABSENT
            folder.begin()
            try:
                prepared = _prepared(settings, tokenizer, length, share, anew=new)
            except ValueError:
                if new:
                    folder.forget()  # so that the corrected command is not refused
                raise
        if settings.objective in WITH_CODES:
            _code(settings, prepared, share)
        figures = _train(settings, prepared, share)
        if share.index == 0:
            folder.seal({**folder.plan, "figures": figures})
    return figures


def _check(settings: Adaptation) -> tuple[Any, int]:
    """The tokenizer and the longest sequence; raises ValueError for what would fail hours later."""
    source = hf_folder(settings.model, weights=True)
    config = supported_config(source)
    own = HuggingFaceTokenizer(source)
    check_vocabulary(own, int(config.vocab_size), source)
    tokenizer = open_tokenizer(source)
    if settings.objective == "npm":
        SpanGroupsCollator(tokenizer, max_length=2)
    else:
        MaskedLmCollator(tokenizer, settings.masking)
    if settings.auxiliary is not None:
        other = HuggingFaceTokenizer(hf_folder(settings.auxiliary))
        if other.vocabulary_fingerprint != own.vocabulary_fingerprint:
            raise ValueError(
                f"the auxiliary model {settings.auxiliary} has another vocabulary than {settings.model}; their tokens "
                "must be the same"
            )
    if settings.objective in WITH_CODES:
        _learning(settings)
    length = settings.max_length or default_max_length(source)
    limit = min([positions_of(config), *([_positions(settings.auxiliary)] if settings.auxiliary else [])])
    if length > limit:
        raise ValueError(f"--max-length {length} is more than the {limit} positions of the model")
    open_masked_lm(source)  # last, as it takes longest; the training opens it again
    return tokenizer, length


def _positions(model: str) -> int:
    return positions_of(supported_config(hf_folder(model)))


def _learning(settings: Adaptation) -> LearningSettings:
    """How the dictionary is learned; by default a TopK autoencoder on the last layer."""
    if settings.learning is not None:
        return settings.learning
    return LearningSettings(layer=last_layer(settings.coded_model), coder="topk")


def last_layer(model: str) -> int:
    """The number of the last hidden state of a model."""
    return int(supported_config(hf_folder(model)).num_hidden_layers)


def _plan(settings: Adaptation, length: int) -> dict[str, Any]:
    """Everything that decides the result, as values that JSON can hold."""
    plan: dict[str, Any] = {
        "objective": settings.objective,
        "model": _fingerprint(settings.model),
        "texts": sha256_of_files(*settings.texts),
        "max_length": length,
        "masking": asdict(settings.masking),
        "training": settings.training.deciding(),
        "epochs": settings.epochs,
    }
    if settings.valid_texts:
        plan["valid_texts"] = sha256_of_files(*settings.valid_texts)
    if settings.objective in WITH_CODES:
        plan["learning"] = asdict(_learning(settings))
        plan |= {"auxiliary": _fingerprint(settings.coded_model), "latent_top": settings.latent_top}
    return plan


def _processes(output: Path, count: int) -> dict[str, int]:
    """The number of processes for the plan, since it decides batches and updates; a folder without it is resumed, too.

    Raises:
        ValueError: the folder was begun by another number of processes, and is not finished.
    """
    there = recorded_in(output, "processes")
    if there is not None and PlannedFolder(output, {}, advice=ADVICE).is_sealed:
        return {"processes": there}
    if there not in (None, count):
        raise ValueError(
            f"the number of processes is {there} in {output} and {count} now; start {there} (several: with torchrun "
            "--nproc-per-node), or choose another --output"
        )
    begun_before_it_was_recorded = there is None and recorded_in(output, "objective") is not None
    return {} if begun_before_it_was_recorded else {"processes": count}


def _fingerprint(model: str) -> str:
    folder = hf_folder(model, weights=True)
    return sha256_of_files(folder / "config.json", *weight_files(folder))


def _prepared(settings: Adaptation, tokenizer: Any, length: int, share: WorkShare, *, anew: bool) -> Prepared:
    """The sequences to train and to evaluate on, and the dictionary; ``anew`` replaces what another plan has made."""
    output = Path(settings.output)

    def sequences(texts: Sequence[str], name: str) -> TokenSequences:
        written, _ = write_text_sequences(
            *(texts, settings.model, output / name),
            max_length=length, max_unk_rate=settings.max_unk_rate, overwrite=anew,
        )  # fmt: skip
        return written

    text = sequences(settings.texts, "tokens")
    if settings.valid_texts:
        train, valid = text, sequences(settings.valid_texts, "valid")
    else:
        fewest = FEWEST_FOR_SPANS if settings.objective == "npm" else 1
        held_out = min(max(fewest, math.ceil(HELD_OUT * len(text))), MOST_HELD_OUT)
        if len(text) < 2 * held_out + 1:
            raise ValueError(
                f"the text has only {len(text)} sequences of at most {length} ids, too few to hold some out; pass more "
                "text, or text to evaluate on with --valid"
            )
        train, valid = text.part(0, len(text) - held_out), text.part(len(text) - held_out, len(text))
    if settings.objective == "npm":
        _check_spans(train, "--text")
        _check_spans(valid, "--valid")
    if settings.objective in WITH_CODES:
        learn_from_sequences(
            *(train, settings.coded_model),
            output=output / "dictionary", settings=_learning(settings), device=_device(settings, share), overwrite=anew,
        )  # fmt: skip
    return Prepared(train, valid, tokenizer, length)


def _check_spans(sequences: TokenSequences, option: str) -> None:
    if len(sequences) < FEWEST_FOR_SPANS:
        raise ValueError(
            f"the text of {option} is only {len(sequences)} sequence, and npm finds spans in other sequences; pass "
            "more text, or a smaller --max-length"
        )


def _device(settings: Adaptation, share: WorkShare) -> str | None:
    """Where hidden states and codes are computed."""
    return "cpu" if settings.training.cpu else share.device(torch.cuda.device_count())


def _code(settings: Adaptation, prepared: Prepared, share: WorkShare) -> None:
    """Code both parts of the text, each rank its share."""
    output, learning = Path(settings.output), _learning(settings)
    coder = load_coder(output / "dictionary")
    coding = CodingSettings(
        layer=learning.layer,
        threads=learning.threads,
        fp16=learning.fp16,
        batch_tokens=learning.batch_tokens,
        latent_top=settings.latent_top,
    )
    for name, sequences in (("train", prepared.train), ("valid", prepared.valid)):
        for _ in range(2):  # the second time, the shards of the other ranks are there
            encode_sequences(
                *(sequences, settings.coded_model),
                coder=coder, output=output / f"{name}.codes", settings=coding, share=share,
                device=_device(settings, share),
            )  # fmt: skip
            if share.count == 1:
                break
            torch.distributed.barrier()


def _train(settings: Adaptation, prepared: Prepared, share: WorkShare) -> dict[str, dict[str, float]]:
    output = Path(settings.output)
    model, datasets, collator = _parts_of(settings, prepared)
    updates = settings.training.updates
    if settings.epochs is not None:
        updates = settings.training.updates_of_epochs(settings.epochs, len(datasets[0]), share.count)
    trainer = make_trainer(model, datasets, collator, settings.training, output / "checkpoints", updates=updates)
    before = output / "before.json"
    if not before.exists():
        figures = trainer.evaluate()
        if share.index == 0:
            write_json(before, {name.removeprefix("eval_"): value for name, value in figures.items()})
    after = train(trainer)
    if share.index == 0:
        save_trained(trainer, prepared.tokenizer, output / "model")
    return {"before": _losses(read_json(before)) if share.index == 0 else {}, "after": _losses(after)}


def _losses(figures: dict[str, float]) -> dict[str, float]:
    """The means over tokens; the Trainer's own loss depends on its batches."""
    return {name: value for name, value in figures.items() if name.endswith(("_loss", "kl", "accuracy"))}


def _parts_of(settings: Adaptation, prepared: Prepared) -> tuple[Any, tuple[Any, Any], Any]:
    """The model, what it is trained and evaluated on, and what makes its batches."""
    both = prepared.train, prepared.valid
    stock = open_masked_lm(settings.model)
    if settings.objective == "npm":
        rules = SpanRules(mask_prob=settings.masking.mask_prob)
        collator = SpanGroupsCollator(
            *(prepared.tokenizer,), max_length=_positions(settings.model), rules=rules, seed=settings.masking.seed
        )
        return SpanContrastiveModel.of(stock), (SpanGroups(both[0]), SpanGroups(both[1])), collator
    if settings.objective in WITH_CODES:
        codes = (Path(settings.output) / f"{name}.codes" for name in ("train", "valid"))
        train, valid = (PretrainingSequences(*pair) for pair in zip(both, codes, strict=True))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.training.seed)
            model = LatentSemanticModel.of(
                stock, num_atoms=train.num_atoms, mlm_weight=float(settings.objective == "mlsm+mlm")
            )
        return model, (train, valid), LatentSemanticCollator(prepared.tokenizer, settings.masking)
    plain = PretrainingSequences(both[0]), PretrainingSequences(both[1])
    if settings.objective == "taco":
        return TokenContrastiveModel.of(stock), plain, TokenContrastiveCollator(prepared.tokenizer, settings.masking)
    return MaskedLmModel.of(stock), plain, MaskedLmCollator(prepared.tokenizer, settings.masking)
