"""The base of this package's masked-LM tasks: new masks in each epoch, and checkpoints that load from anywhere."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
import logging
from argparse import Namespace
from dataclasses import dataclass
from typing import ClassVar, Optional

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, masked_lm
from fairseq.data import (
    FairseqDataset,
    IdDataset,
    LRUCacheDataset,
    MaskTokensDataset,
    NestedDictionaryDataset,
    NumelDataset,
    NumSamplesDataset,
    RightPadDataset,
)
from fairseq.data.encoders.utils import get_whole_word_mask
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.optim import FairseqOptimizer
from fairseq.tasks import register_task
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from fairseq.trainer import Trainer
from omegaconf import II

from mlsm_plugin.core.files.model_files import bpe_options
from mlsm_plugin.core.files.settings import option
from mlsm_plugin.core.masking.chosen_tokens import chosen_sizes
from mlsm_plugin.core.masking.masked_share import check_masked_share, samples_to_look_at
from mlsm_plugin.core.masking.word_boundaries import in_long_words
from mlsm_plugin.fairseq_plugin.compat.batches import (
    LoggingOutput,
    Sample,
    SortedWholeEpochsDataset,
    WordBeginnings,
    never_draw,
)
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import CheckpointState
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import WORDS
from mlsm_plugin.fairseq_plugin.compat.compiled_steps import MaskedLmLoss
from mlsm_plugin.fairseq_plugin.data.token_blocks import (
    is_content,
    load_dictionary,
    load_split,
    split_path,
    training_samples,
)
from mlsm_plugin.fairseq_plugin.data.token_datasets import (
    BatchPaddingDataset,
    KnownTargetsDataset,
    MaskedSizesDataset,
    MaskRanksDataset,
)
from mlsm_plugin.fairseq_plugin.tasks.plugin_task import PluginTask, SavedRunConfig, StepResult
from mlsm_plugin.fairseq_plugin.tasks.word_counts import WordCount, begins_word
from mlsm_plugin.fairseq_plugin.text.symbol_files import own_special_symbols, special_symbols

logger = logging.getLogger(__name__)


@dataclass
class BaseMaskedLMConfig(MaskedLMConfig, SavedRunConfig):
    """The options of ``masked_lm``, for a changing share of masks, and for saving the run."""

    # fairseq understands typing.Optional, but not `float | None`
    valid_mask_prob: Optional[float] = option(  # noqa: UP045
        None,
        help="share of tokens that are masked in validation (default: that of training, --mask-prob); set it to "
        "compare runs with different shares: the more is masked, the higher the loss of the same model",
    )
    mask_prob_end: Optional[float] = option(  # noqa: UP045
        None,
        help="the share of masked tokens changes linearly from --mask-prob to this one; validation masks this share "
        "unless --valid-mask-prob is given (default: the share is constant)",
    )
    mask_updates: Optional[int] = option(  # noqa: UP045
        None, help="number of updates after which the share is --mask-prob-end (default: --max-update)"
    )
    count_words: Optional[str] = option(  # noqa: UP045
        None, help="count the words of the batches with this file, which `mlsm babylm train` wrote"
    )
    train_subset: str = II("dataset.train_subset")


class BaseMaskedLMTask(PluginTask, MaskedLMTask):
    """``masked_lm`` that cuts long sentences, and copies the dictionary and the tokenizer next to its checkpoints.

    Special and unknown tokens are never masked, and the batches differ from epoch to epoch. With
    ``--mask-whole-words``, each token of a long word counts as a word.
    """

    cfg: BaseMaskedLMConfig
    criterions: ClassVar[tuple[str, ...]] = ("masked_lm",)
    word_count: WordCount | None = None  # only if the run counts words
    trainer: Trainer | None = None  # only if the run counts words

    @classmethod
    def setup_task(cls, cfg: BaseMaskedLMConfig, **kwargs: object) -> "BaseMaskedLMTask":
        """Load only the dictionary, since a checkpoint must load without the data."""
        dictionary = load_dictionary(utils.split_paths(cfg.data)[0])
        logger.info("dictionary: %d types", len(dictionary))
        return cls(cfg, dictionary)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: object) -> None:
        """Load all samples of ``masked_lm``; ValueError if hardly anything is masked."""
        samples = self.load_samples(split, epoch, combine)
        self.set_batches(split, samples, *self.masked(samples, split))

    def masked(self, samples: FairseqDataset, split: str) -> tuple[FairseqDataset, FairseqDataset]:
        """Inputs and targets of ``samples``, masked as by ``masked_lm``, except for special and unknown tokens.

        Special tokens include all that the tokenizer lists as special.
        """
        samples = LRUCacheDataset(samples)
        dictionary = self.source_dictionary
        words = self.word_beginnings() if self.cfg.mask_whole_words else None

        def dataset(return_masked_tokens: bool) -> MaskTokensDataset:
            return MaskTokensDataset(
                samples,
                dictionary,
                pad_idx=dictionary.pad(),
                mask_idx=self.mask_idx,
                return_masked_tokens=return_masked_tokens,
                seed=self.cfg.seed,
                mask_prob=self.mask_prob_of(split),
                leave_unmasked_prob=self.cfg.leave_unmasked_prob,
                random_token_prob=self.cfg.random_token_prob,
                freq_weighted_replacement=self.cfg.freq_weighted_replacement,
                mask_whole_words=words,
                mask_multiple_length=self.cfg.mask_multiple_length,
                mask_stdev=self.cfg.mask_stdev,
                skip_masking=self.cfg.skip_masking,
            )

        inputs = dataset(return_masked_tokens=False)
        targets = dataset(return_masked_tokens=True)
        never_draw(inputs, own_special_symbols(dictionary))
        return KnownTargetsDataset.of(inputs, targets, dictionary)

    def build_criterion(self, cfg: FairseqDataclass, *args: object, **kwargs: object) -> FairseqCriterion:
        """Build the criterion; this package's ``masked_lm``, which computes the same, replaces fairseq's."""
        criterion = super().build_criterion(cfg, *args, **kwargs)
        return MaskedLmLoss(cfg, self) if type(criterion) is masked_lm.MaskedLmLoss else criterion

    def word_beginnings(self) -> WordBeginnings:
        """Which tokens begin words, by the tokenizer in the data folder."""
        tokenizer = Namespace(**bpe_options(self._data_folder))
        return WordBeginnings(get_whole_word_mask(tokenizer, self.source_dictionary), in_long_words)

    def set_batches(
        self,
        split: str,
        samples: FairseqDataset,
        inputs: FairseqDataset,
        targets: FairseqDataset,
        **further_entries: FairseqDataset,
    ) -> None:
        """Set the batches of ``split`` as in ``masked_lm``; they also tell the model whether they have padding.

        ``inputs`` and ``targets`` belong to the ``samples``, ``(T,)`` each; a target is the id of a masked token,
        padding elsewhere. ``further_entries`` are datasets of further entries of a batch, by name.
        """
        pad = self.source_dictionary.pad()
        padded_targets = RightPadDataset(targets, pad)
        for_model = {
            "src_tokens": RightPadDataset(inputs, pad),
            "src_lengths": NumelDataset(inputs, reduce=False),
            "has_padding": BatchPaddingDataset(samples.sizes),
        }
        if self.cfg.include_target_tokens:
            for_model["target_tokens"] = padded_targets
        if self.cfg.mask_prob_end is not None and split == self.cfg.train_subset:
            self._check_shares_change()
            words = self.word_beginnings() if self.cfg.mask_whole_words else None
            ranks = MaskRanksDataset(samples, seed=self.cfg.seed, words=words)
            further_entries["mask_ranks"] = RightPadDataset(ranks, MaskRanksDataset.END)
        if self.cfg.include_index:
            for_model["src_id"] = IdDataset()
        entries = {
            "id": IdDataset(),
            "net_input": for_model,
            "target": padded_targets,
            "masked_sizes": MaskedSizesDataset(targets, pad, self.mask_prob_of(split) if self.compiles else None),
            "nsentences": NumSamplesDataset(),
            "ntokens": NumelDataset(inputs, reduce=True),
            **further_entries,
        }
        batches = NestedDictionaryDataset(entries, sizes=[samples.sizes])
        self.datasets[split] = SortedWholeEpochsDataset(batches, samples.sizes)
        counts = (self._counts(inputs[index], targets[index]) for index in samples_to_look_at(len(samples)))
        remedy = "the text may have too many unknown tokens: make a tokenizer from such text"
        check_masked_share(split, counts, self.mask_prob_of(split), remedy=remedy)

    def masked_counts(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        return self._counts(sample["net_input"]["src_tokens"], sample["target"])

    def _counts(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        masked = targets != self.source_dictionary.pad()
        content = is_content(self._unmasked(inputs, targets), self.source_dictionary)
        return (masked & content).sum(), content.sum()

    def _unmasked(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The tokens before masking, of any shape: a target is the id of a masked token, padding elsewhere."""
        return torch.where(targets != self.source_dictionary.pad(), targets, inputs)

    def mask_prob_of(self, split: str) -> float:
        """The share of a split that the loader masks; ValueError if a share is not between 0 and 1.

        For the training split, it is the larger of its two shares; else ``valid_mask_prob``, or the share at the end.
        """
        cfg = self.cfg
        shares = {
            "--mask-prob": cfg.mask_prob,
            "--mask-prob-end": cfg.mask_prob_end,
            "--valid-mask-prob": cfg.valid_mask_prob,
        }
        for flag, share in shares.items():
            if share is not None and not 0 < share < 1:
                raise ValueError(f"{flag} {share:g} is not between 0 and 1")
        if split == self.cfg.train_subset:
            return float(cfg.mask_prob if cfg.mask_prob_end is None else max(cfg.mask_prob, cfg.mask_prob_end))
        return self._valid_share

    @property
    def _valid_share(self) -> float:
        shares = (self.cfg.valid_mask_prob, self.cfg.mask_prob_end, self.cfg.mask_prob)
        return float(next(share for share in shares if share is not None))

    def _check_shares_change(self) -> None:
        if not self._mask_updates > 0:
            raise ValueError("--mask-prob-end needs the number of updates: pass --max-update, or --mask-updates")
        if self.cfg.mask_multiple_length > 1 or self.cfg.skip_masking:
            raise ValueError("--mask-prob-end cannot be combined with --mask-multiple-length or --skip-masking")

    @property
    def _mask_updates(self) -> int:
        return int(self.cfg.max_update if self.cfg.mask_updates is None else self.cfg.mask_updates)

    def prepare_batch(self, sample: Sample, criterion: FairseqCriterion, update_num: int | None) -> Sample:
        """What a step of update ``update_num``, or of validation (None), makes of a batch: here, its share of masks.

        A subclass adds what it computes online.
        """
        return self.with_share(sample, update_num)

    def with_share(self, sample: Sample, update_num: int | None) -> Sample:
        """A batch with the share of masks after ``update_num`` updates; a batch without ranks stays as it is.

        None: the share of validation, for a batch of the training split; ValueError if its loader masks less. Tokens
        whose ranks are too high for the share are unmasked: they are inputs again, without targets and codes. The masks
        depend only on the batch and the number of updates.
        """
        if "mask_ranks" not in sample:
            return sample
        begin = self.cfg.mask_prob
        end = begin if self.cfg.mask_prob_end is None else self.cfg.mask_prob_end
        pad = self.source_dictionary.pad()
        part = min(1.0, (update_num or 0) / self._mask_updates)
        share = self._valid_share if update_num is None else begin + (end - begin) * part
        if update_num is None and share > max(begin, end):
            raise ValueError(
                f"--valid-mask-prob {share:g} is more than the training split masks; validate on another one"
            )
        sample = dict(sample)
        target = sample["target"]
        net_input = dict(sample["net_input"])
        stays_masked = sample.pop("mask_ranks") < int(share / max(begin, end) * MaskRanksDataset.END)
        masked = target != pad
        net_input["src_tokens"] = torch.where(masked & ~stays_masked, target, net_input["src_tokens"])
        sample["target"] = target.masked_fill(~stays_masked, pad)
        if "target_tokens" in net_input:
            net_input["target_tokens"] = sample["target"]
        if "codes" in sample:
            of_masked = stays_masked[masked]
            sample["codes"] = {name: sample["codes"][name][of_masked] for name in ("atoms", "weights")}
        _, *room = sample.pop("masked_sizes")
        if self.compiles:  # the shapes of a compiled step must not change
            sample["masked_sizes"] = (None, *room)
        else:  # only few sizes, since kernels of a new size take long to make, even on a CPU
            counts = (masked & stays_masked).sum(dim=1).tolist()
            sample["masked_sizes"] = chosen_sizes(counts, [target.size(1)] * len(counts), 0.0)
        return {**sample, "net_input": net_input}

    def train_step(
        self,
        sample: Sample,
        model: BaseFairseqModel,
        criterion: FairseqCriterion,
        optimizer: FairseqOptimizer,
        update_num: int,
        ignore_grad: bool = False,
    ) -> StepResult:
        """See :meth:`PluginTask.train_step`; the batch gets the share of masks of this update."""
        sample = self.prepare_batch(sample, criterion, update_num)
        if self.word_count is not None and not ignore_grad:
            self.word_count.add(self._unmasked(sample["net_input"]["src_tokens"], sample["target"]))
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def valid_step(self, sample: Sample, model: BaseFairseqModel, criterion: FairseqCriterion) -> StepResult:
        return super().valid_step(self.prepare_batch(sample, criterion, None), model, criterion)

    def begin_run(self, trainer: Trainer, saved: CheckpointState) -> None:
        """Start counting words, with ``--count-words``; ValueError if the run resumes from a state without a count."""
        plan = getattr(self.cfg, "count_words", None)  # NPM does not count
        if plan is None:
            return
        if trainer.get_num_updates() > 0 and WORDS not in saved:
            raise ValueError(f"{self.cfg.save_dir} holds a run that did not count its words; pass another --save-dir")
        self.state.merge_state_dict({WORDS: saved.get(WORDS, 0)})
        dictionary = self.source_dictionary
        begins = begins_word(dictionary.symbols, [*special_symbols(dictionary), self.mask_idx])
        self.word_count = WordCount(plan, begins)
        self.trainer = trainer

    def optimizer_step(self, optimizer: FairseqOptimizer, model: BaseFairseqModel, update_num: int) -> None:
        if self.word_count is not None:
            self.word_count.end_update(self.state_dict()[WORDS], next(model.parameters()).device)
        super().optimizer_step(optimizer, model, update_num)

    def reduce_metrics(self, logging_outputs: list[LoggingOutput], criterion: FairseqCriterion) -> None:
        """Also count the words of the finished update, and keep the model if a number of words is reached."""
        super().reduce_metrics(logging_outputs, criterion)
        if self.word_count is not None and (words := self.word_count.take()):
            before = self.state_dict()[WORDS]
            self.state.merge_state_dict({WORDS: before + words})
            self.word_count.save_reached(self.trainer, before, before + words)

    def load_samples(self, split: str, epoch: int, combine: bool) -> FairseqDataset:
        """The samples of ``masked_lm``; a sentence that is too long for a sample is cut into several samples."""
        path = split_path(self.cfg.data, split, epoch)
        self.tokens = load_split(path, self.source_dictionary, combine=combine)  # its sizes are a memory map
        samples = self.samples_of(self.tokens, split)
        logger.info("%s: %d samples of at most %d tokens", path, len(samples), self.cfg.tokens_per_sample)
        return samples

    def samples_of(self, dataset: FairseqDataset, split: str, *, bos: int | None = None) -> FairseqDataset:
        """Cut the tokens of ``split``, or values of the same shape, into samples that begin with ``bos``; None: BOS."""
        dictionary = self.source_dictionary
        bos = dictionary.bos() if bos is None else bos
        return training_samples(dataset, split=split, cfg=self.cfg, dictionary=dictionary, bos=bos)


@register_task("plain_masked_lm", dataclass=BaseMaskedLMConfig)
class PlainMaskedLMTask(BaseMaskedLMTask):
    """fairseq's ``masked_lm`` with ``--autocast``; it also cuts long sentences, and its checkpoints load anywhere."""

    criterions = ("masked_lm", "latent_semantic_kl")

    def build_criterion(self, cfg: FairseqDataclass, *args: object, **kwargs: object) -> FairseqCriterion:
        """Build the criterion; ValueError if it belongs to another task, or needs codes."""
        criterion = super().build_criterion(cfg, *args, **kwargs)
        if getattr(criterion, "latent_weight", 0) > 0:
            raise ValueError(
                "--criterion latent_semantic_kl needs the codes of --task masked_latent_semantic; pass that task, or "
                "--latent-weight 0 for masked LM alone"
            )
        return criterion
