"""The base of this package's masked-LM tasks: new masks in each epoch, checkpoints that load from anywhere."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

import torch
from fairseq import utils
from fairseq.tasks import register_task
from fairseq.tasks.masked_lm import MaskedLMConfig
from omegaconf import II

from mlsm_plugin.data.masked_share import check_masked_share, samples_to_look_at
from mlsm_plugin.data.token_blocks import (
    is_content,
    load_dictionary,
    load_split,
    split_path,
    training_samples,
)
from mlsm_plugin.data.token_datasets import BatchPaddingDataset, KnownTargetsDataset
from mlsm_plugin.fairseq_seams.batches import (
    OwnSamplesMaskedLMTask,
    cut_long_words,
    masked_inputs,
    masked_targets,
    replace_masks,
    tell_model,
    with_whole_epochs,
)
from mlsm_plugin.files.model_files import bpe_options
from mlsm_plugin.tasks.own_task import OwnTask, SavedRunConfig
from mlsm_plugin.tokenization.word_boundaries import in_long_words

logger = logging.getLogger(__name__)


@dataclass
class PortableMaskedLMConfig(MaskedLMConfig, SavedRunConfig):
    """The options of ``masked_lm``, that for the masks of validation, and those for saving the run."""

    # fairseq understands typing.Optional, but not `float | None`
    valid_mask_prob: Optional[float] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "share of the tokens that is masked in validation (default: that of training, --mask-prob); set it "
            "to compare runs with other shares: the more is masked, the higher is the loss of the same model"
        },
    )
    train_subset: str = II("dataset.train_subset")


class PortableMaskedLMTask(OwnTask, OwnSamplesMaskedLMTask):
    """``masked_lm`` that cuts long sentences, and copies the dictionary and the tokenizer next to its checkpoints.

    Unknown tokens are never masked. With ``--mask-whole-words``, the tokens of long words are words.
    """

    cfg: PortableMaskedLMConfig
    criterions: ClassVar[tuple[str, ...]] = ("masked_lm",)

    @classmethod
    def setup_task(cls, cfg: PortableMaskedLMConfig, **kwargs: Any) -> "PortableMaskedLMTask":
        """Load only the dictionary, so that a checkpoint loads without the data."""
        dictionary = load_dictionary(utils.split_paths(cfg.data)[0])
        logger.info("dictionary: %d types", len(dictionary))
        return cls(cfg, dictionary)

    def tokenizer_options(self) -> dict[str, Any]:
        """The options of the tokenizer in the folder of the data."""
        return bpe_options(self._data_folder)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load the samples of ``masked_lm``, all of them; the model is told which batches have padding.

        Raises:
            ValueError: hardly anything is masked.
        """
        with self._masking_of(split):
            super().load_dataset(split, epoch=epoch, combine=combine, **kwargs)
        batches = self.datasets[split] = with_whole_epochs(self.datasets[split])
        cut_long_words(batches, in_long_words)
        known = KnownTargetsDataset.of(masked_inputs(batches), masked_targets(batches), self.source_dictionary)
        replace_masks(batches, *known, pad=self.source_dictionary.pad())
        tell_model(batches, "has_padding", BatchPaddingDataset(masked_targets(batches).sizes))
        samples = ((known[0][index], known[1][index]) for index in samples_to_look_at(len(batches)))
        counts = (self._counts(*sample) for sample in samples)
        remedy = "the text may have too many unknown tokens: make a tokenizer from such text"
        check_masked_share(split, counts, self.mask_prob_of(split), remedy=remedy)

    def masked_counts(self, sample: dict[str, Any]) -> tuple[Any, Any]:
        """How many content tokens of a batch are masked, and how many there are."""
        return self._counts(sample["net_input"]["src_tokens"], sample["target"])

    def _counts(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        masked = targets != self.source_dictionary.pad()
        content = is_content(torch.where(masked, targets, inputs), self.source_dictionary)
        return (masked & content).sum(), content.sum()

    def mask_prob_of(self, split: str) -> float:
        """The share of the tokens of a split that is masked: ``valid_mask_prob`` unless it is the training split.

        Raises:
            ValueError: one of the two shares is not between 0 and 1.
        """
        shares = {"--mask-prob": self.cfg.mask_prob, "--valid-mask-prob": self.cfg.valid_mask_prob}
        for option, share in shares.items():
            if share is not None and not 0 < share < 1:
                raise ValueError(f"{option} {share:g} is not between 0 and 1")
        if self.cfg.valid_mask_prob is None or split == self.cfg.train_subset:
            return float(self.cfg.mask_prob)
        return float(self.cfg.valid_mask_prob)

    @contextmanager
    def _masking_of(self, split: str) -> Iterator[None]:
        """fairseq reads the share of a split from the options."""
        of_training, self.cfg.mask_prob = self.cfg.mask_prob, self.mask_prob_of(split)
        try:
            yield
        finally:
            self.cfg.mask_prob = of_training

    def load_samples(self, split: str, epoch: int, combine: bool) -> Any:
        """The samples of ``masked_lm``; a sentence that is too long for one sample is cut into several."""
        path = split_path(self.cfg.data, split, epoch)
        self.tokens = load_split(path, self.source_dictionary, combine=combine)  # whose sizes are a memory map
        samples = self.samples_of(self.tokens, split)
        logger.info("%s: %d samples of at most %d tokens", path, len(samples), self.cfg.tokens_per_sample)
        return samples

    def samples_of(self, dataset: Any, split: str, *, bos: int | None = None) -> Any:
        """Cut the tokens of ``split``, or values for them such as their positions, into samples.

        Args:
            dataset: the tokens or values, a dataset of the same shape as the split.
            bos: the value that each sample begins with; None: BOS.
        """
        dictionary = self.source_dictionary
        bos = dictionary.bos() if bos is None else bos
        return training_samples(dataset, split=split, cfg=self.cfg, dictionary=dictionary, bos=bos)


@dataclass
class PlainMaskedLMConfig(PortableMaskedLMConfig):
    """The options of fairseq's ``masked_lm``, and those for the run."""


@register_task("plain_masked_lm", dataclass=PlainMaskedLMConfig)
class PlainMaskedLMTask(PortableMaskedLMTask):
    """fairseq's ``masked_lm`` with ``--autocast``; it also cuts long sentences, and its checkpoints load anywhere.

    The criterion is fairseq's ``masked_lm``.
    """

    cfg: PlainMaskedLMConfig
    criterions = ("masked_lm", "latent_semantic_kl")

    def build_criterion(self, cfg: Any, *more: Any, **named: Any) -> Any:
        """Build the criterion.

        Raises:
            ValueError: it is that of another task, or needs codes, which the batches do not have.
        """
        criterion = super().build_criterion(cfg, *more, **named)
        if getattr(criterion, "latent_weight", 0) > 0:
            raise ValueError(
                "--criterion latent_semantic_kl needs the codes of --task masked_latent_semantic; pass that task, or "
                "--latent-weight 0 for masked LM alone"
            )
        return criterion
