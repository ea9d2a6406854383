"""Continue the pre-training of a Hugging Face model on a text: from the text to the adapted model, resumable."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mlsm_plugin.auxiliary.coder_learning import LearningSettings
from mlsm_plugin.auxiliary.split_coder import CodingSettings
from mlsm_plugin.data.span_groups import SpanRules
from mlsm_plugin.files.atomic_files import read_json, sha256_of_files, write_json
from mlsm_plugin.files.hf_files import hf_folder
from mlsm_plugin.files.output_lock import only_writer
from mlsm_plugin.files.planned_folder import PlannedFolder
from mlsm_plugin.files.settings import check, option
from mlsm_plugin.files.work_share import WorkShare, work_share
from mlsm_plugin.hidden_states.hf_encoder import HuggingFaceEncoder, check_vocabulary, supported_config
from mlsm_plugin.huggingface.coding import encode_sequences, learn_from_sequences
from mlsm_plugin.huggingface.collators import (
    LatentSemanticCollator,
    MaskedLmCollator,
    Masking,
    SpanGroupsCollator,
    TokenContrastiveCollator,
)
from mlsm_plugin.huggingface.contrastive_models import SpanContrastiveModel, TokenContrastiveModel
from mlsm_plugin.huggingface.latent_semantic_model import LatentSemanticModel
from mlsm_plugin.huggingface.pretraining_model import MaskedLmModel, stock_masked_lm
from mlsm_plugin.huggingface.pretraining_sequences import PretrainingSequences, SpanGroups
from mlsm_plugin.huggingface.text_sequences import default_max_length, write_text_sequences
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from mlsm_plugin.huggingface.training import TrainingSettings, make_trainer, save_trained, train
from mlsm_plugin.sparse_coding.coder import load_coder
from mlsm_plugin.tokenization.hf_tokenizer import HuggingFaceTokenizer, open_tokenizer
from mlsm_plugin.tokenization.unknown_tokens import KnownText

OBJECTIVES = ("mlm", "mlsm", "mlsm+mlm", "taco", "npm")
WITH_CODES = ("mlsm", "mlsm+mlm")
HELD_OUT = 0.02  # share of the sequences, at their end, if there is no text to evaluate on
MOST_HELD_OUT = 2000
FEWEST_FOR_SPANS = 2  # sequences; npm finds spans in others
Texts = tuple[TokenSequences, TokenSequences]  # to train on, and to evaluate on
ADVICE = "Pass these settings again, or choose another --output"


@dataclass(frozen=True)
class Adaptation(KnownText):
    """What is adapted to which text, and how.

    Attributes:
        model: folder or hub name of a masked LM with its tokenizer.
        texts: files with a sentence a line and blank lines between documents.
        output: folder for everything that is made.
        learning: how the dictionary is learned, and from which layer.
        masking: how much is masked, and how.
        training: how the model is trained; its ``updates`` are replaced by those of ``epochs`` if that is given.
        epochs: passes over the text; None: ``training.updates`` counts.

    Raises:
        ValueError: a value is out of range.
    """

    model: str
    texts: Sequence[str]
    output: str
    objective: str = option("mlsm+mlm", choices=OBJECTIVES, help="what the model is trained for")
    valid_texts: list[str] = option(
        [], flag="--valid", metavar="FILE",
        help="text to evaluate on (default: the last 2 %% of the sequences are held out, at most 2,000)",
    )  # fmt: skip
    auxiliary: str | None = option(
        None, metavar="MODEL", help="model whose hidden states are coded (default: MODEL itself, as it is)"
    )
    learning: LearningSettings | None = None
    latent_top: int | None = option(None, least=1, help="keep the N strongest atoms of each code")
    masking: Masking = field(default_factory=Masking)
    max_length: int | None = option(
        None, least=1, help="ids of the longest sequence (default: what the model can take, at most 512)"
    )
    training: TrainingSettings = field(default_factory=TrainingSettings)
    epochs: float | None = option(None, above=0, help="passes over the text (default: 3)")

    def __post_init__(self) -> None:
        check(self)

    @property
    def coded_model(self) -> str:
        """The model whose hidden states are coded."""
        return self.auxiliary or self.model


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
    folder = PlannedFolder(output, {**_plan(settings, length), "processes": processes}, advice=ADVICE)
    with only_writer(output) if share.index == 0 else nullcontext():
        folder.check()
        if folder.is_sealed:
            figures: dict[str, dict[str, float]] = folder.sealed_content()["figures"]
            return figures
        arguments = settings.training.arguments(output / "checkpoints")  # lets the ranks find each other
        with arguments.main_process_first(desc="preparing the text"):
            new = folder.found is None
            folder.begin()
            try:
                texts = _prepared(settings, length, share, anew=new)
            except ValueError:
                if new:
                    folder.forget()  # so that the corrected command is not refused
                raise
        if settings.objective in WITH_CODES:
            _code(settings, texts, share)
        figures = _train(settings, texts, tokenizer, share)
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
    limit = min(map(HuggingFaceEncoder.usual_tokens_of, {settings.model, settings.coded_model}))
    if length > limit:
        raise ValueError(f"--max-length {length} is more than the {limit} positions of the model")
    stock_masked_lm(source)  # last, as it takes longest; the training opens it again
    return tokenizer, length


def _learning(settings: Adaptation) -> LearningSettings:
    """How the dictionary is learned; by default a TopK autoencoder on the last layer."""
    if settings.learning is not None:
        return settings.learning
    return LearningSettings(layer=HuggingFaceEncoder.layers_of(settings.coded_model), coder="topk")


def _plan(settings: Adaptation, length: int) -> dict[str, Any]:
    """Everything that decides the result, as values that JSON can hold."""
    plan: dict[str, Any] = {
        "objective": settings.objective,
        "model": HuggingFaceEncoder.fingerprint_of(settings.model),
        "texts": sha256_of_files(*settings.texts),
        "max_length": length,
        "masking": asdict(settings.masking),
        "training": settings.training.deciding(),
        "epochs": settings.epochs,
    }
    if settings.valid_texts:
        plan["valid_texts"] = sha256_of_files(*settings.valid_texts)
    if settings.objective in WITH_CODES:
        plan["learning"] = {name: value for name, value in asdict(_learning(settings)).items() if name != "device"}
        plan |= {
            "auxiliary": HuggingFaceEncoder.fingerprint_of(settings.coded_model),
            "latent_top": settings.latent_top,
        }
    return plan


def _processes(output: Path, count: int) -> int:
    """The number of processes for the plan, since it decides batches and updates; any number may read what is finished.

    Raises:
        ValueError: the folder was begun by another number of processes, and is not finished.
    """
    folder = PlannedFolder(output, {})
    there: int = (folder.found or {}).get("processes", count)
    if there != count and not folder.is_sealed:
        raise ValueError(
            f"the number of processes is {there} in {output} and {count} now; start {there} (several: with torchrun "
            "--nproc-per-node), or choose another --output"
        )
    return there


def _prepared(settings: Adaptation, length: int, share: WorkShare, *, anew: bool) -> Texts:
    """Make the sequences and the dictionary; ``anew`` replaces what another plan has made."""
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
    for named, part in (("--text", train), ("--valid", valid)):
        if settings.objective == "npm" and len(part) < FEWEST_FOR_SPANS:
            raise ValueError(
                f"the text of {named} is only {len(part)} sequence, and npm finds spans in other sequences; pass "
                "more text, or a smaller --max-length"
            )
    if settings.objective in WITH_CODES:
        learn_from_sequences(
            *(train, settings.coded_model),
            output=output / "dictionary", settings=replace(_learning(settings), device=_device(settings, share)),
            overwrite=anew,
        )  # fmt: skip
    return train, valid


def _device(settings: Adaptation, share: WorkShare) -> str | None:
    """Where hidden states and codes are computed."""
    return "cpu" if settings.training.cpu else share.device(torch.cuda.device_count())


def _code(settings: Adaptation, texts: Texts, share: WorkShare) -> None:
    """Code both parts of the text, each rank its share."""
    output, learning = Path(settings.output), _learning(settings)
    coder = load_coder(output / "dictionary")
    coding = CodingSettings(
        layer=learning.layer,
        device=_device(settings, share),
        threads=learning.threads,
        fp16=learning.fp16,
        batch_tokens=learning.batch_tokens,
        latent_top=settings.latent_top,
    )
    for name, sequences in zip(("train", "valid"), texts, strict=True):
        for _ in range(2):  # the second time, the shards of the other ranks are there
            encode_sequences(
                *(sequences, settings.coded_model),
                coder=coder, output=output / f"{name}.codes", settings=coding, share=share,
            )  # fmt: skip
            if share.count == 1:
                break
            torch.distributed.barrier()


def _train(settings: Adaptation, texts: Texts, tokenizer: Any, share: WorkShare) -> dict[str, dict[str, float]]:
    output = Path(settings.output)
    model, datasets, collator = _parts_of(settings, texts, tokenizer)
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
        save_trained(trainer, tokenizer, output / "model")
    return {"before": _losses(read_json(before)) if share.index == 0 else {}, "after": _losses(after)}


def _losses(figures: dict[str, float]) -> dict[str, float]:
    """The means over tokens; the Trainer's own loss depends on its batches."""
    return {name: value for name, value in figures.items() if name.endswith(("_loss", "kl", "accuracy"))}


def _parts_of(settings: Adaptation, texts: Texts, tokenizer: Any) -> tuple[Any, tuple[Any, Any], Any]:
    """The model, what it is trained and evaluated on, and what makes its batches."""
    stock = stock_masked_lm(settings.model)
    if settings.objective == "npm":
        rules = SpanRules(mask_prob=settings.masking.mask_prob)
        collator = SpanGroupsCollator(
            tokenizer,
            max_length=HuggingFaceEncoder.usual_tokens_of(settings.model),
            rules=rules,
            seed=settings.masking.seed,
        )
        return SpanContrastiveModel.of(stock), (SpanGroups(texts[0]), SpanGroups(texts[1])), collator
    if settings.objective in WITH_CODES:
        codes = (Path(settings.output) / f"{name}.codes" for name in ("train", "valid"))
        train, valid = (PretrainingSequences(*pair) for pair in zip(texts, codes, strict=True))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.training.seed)
            model = LatentSemanticModel.of(
                stock, num_atoms=train.num_atoms, mlm_weight=float(settings.objective == "mlsm+mlm")
            )
        return model, (train, valid), LatentSemanticCollator(tokenizer, settings.masking)
    plain = PretrainingSequences(texts[0]), PretrainingSequences(texts[1])
    if settings.objective == "taco":
        return TokenContrastiveModel.of(stock), plain, TokenContrastiveCollator(tokenizer, settings.masking)
    return MaskedLmModel.of(stock), plain, MaskedLmCollator(tokenizer, settings.masking)
