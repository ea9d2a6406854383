"""The fairseq task of NPM: nonparametric masked language modeling (Min et al., 2022)."""

import functools
import logging
from dataclasses import dataclass

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task

from mlsm_plugin.core.files.settings import option
from mlsm_plugin.core.masking.masked_share import check_masked_share
from mlsm_plugin.core.masking.span_groups import SpanMasking, SpanRules, consecutive_groups
from mlsm_plugin.core.masking.word_boundaries import PieceClasses, added_symbols
from mlsm_plugin.fairseq_plugin.compat import version_shims
from mlsm_plugin.fairseq_plugin.compat.batches import Sample
from mlsm_plugin.fairseq_plugin.compat.loading_hooks import before_loading
from mlsm_plugin.fairseq_plugin.compat.model_parts import VOCABULARY_WEIGHTS
from mlsm_plugin.fairseq_plugin.data.span_datasets import SpanGroupsDataset
from mlsm_plugin.fairseq_plugin.data.token_blocks import cut_into_blocks, is_content, load_split, split_path
from mlsm_plugin.fairseq_plugin.tasks.base_masked_lm import BaseMaskedLMTask
from mlsm_plugin.fairseq_plugin.tasks.plugin_task import TextBlocksConfig
from mlsm_plugin.fairseq_plugin.text.symbol_files import special_symbols

logger = logging.getLogger(__name__)

GROUPS_TO_LOOK_AT = 64  # number of groups that are checked for common spans before training


@dataclass
class NonparametricMaskedLMConfig(TextBlocksConfig):
    """The options of the data and the masking."""

    group_size: int = option(16, help="samples per group; --batch-size counts groups")
    group_by: ChoiceEnum(["document", "random"]) = option(  # type: ignore[valid-type]
        "document", help="document: samples that follow each other; random: any samples"
    )
    mask_prob: float = option(0.15, help="maximum share of a group's tokens that is masked")
    span_length_p: float = option(0.5, help="parameter p of the geometric distribution of span lengths")
    max_span_length: int = option(10, help="maximum number of tokens of a span")
    punctuation_prob: float = option(0.1, help="probability that a single punctuation token may be masked")
    max_ngram_masks: int = option(10, help="maximum number of times that one n-gram is masked in a group")
    max_spans_per_sequence: int = option(64, help="maximum number of masked spans of a sample")
    span_mode: ChoiceEnum(["phrase", "single"]) = option(  # type: ignore[valid-type]
        "phrase", help="phrase: a span is masked and retrieved as a whole; single: each of its tokens separately"
    )
    span_mask_symbols: ChoiceEnum(["distinct", "shared"]) = option(  # type: ignore[valid-type]
        "distinct", help="distinct: a span becomes <mask_s> <mask_e>; shared: <mask> <mask>, which older models know"
    )
    context_masking_ratio: float = option(0.0, help="probability that the keys of a batch come from the masked text")


@register_task("nonparametric_masked_lm", dataclass=NonparametricMaskedLMConfig)
class NonparametricMaskedLMTask(BaseMaskedLMTask):
    """Groups of blocks whose common spans are masked, in batches of :class:`SpanGroupsDataset`."""

    cfg: NonparametricMaskedLMConfig
    criterions = ("span_contrastive",)

    def __init__(self, cfg: NonparametricMaskedLMConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg, dictionary)
        try:
            self.rules = SpanRules(
                mask_prob=cfg.mask_prob,
                length_p=cfg.span_length_p,
                max_length=cfg.max_span_length,
                punctuation_prob=cfg.punctuation_prob,
                max_ngram_masks=cfg.max_ngram_masks,
                max_spans_per_sequence=cfg.max_spans_per_sequence,
            )
        except ValueError as error:
            raise ValueError(f"options of the span masking: {error}") from error
        if cfg.group_size < 2:
            raise ValueError(f"--group-size must be at least 2, got {cfg.group_size}: spans are found in other blocks")
        if not 0 <= cfg.context_masking_ratio <= 1:
            raise ValueError(f"--context-masking-ratio must be in [0, 1], got {cfg.context_masking_ratio}")
        self.span_masks = [dictionary.add_symbol(symbol, n=0) for symbol in added_symbols(cfg)]
        self.span_masks = self.span_masks or [self.mask_idx, self.mask_idx]
        self.special_ids = sorted({*special_symbols(dictionary), self.mask_idx, *self.span_masks})

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False) -> BaseFairseqModel:
        """Build the model, with additional positions, since masks can be longer than the spans that they replace.

        It can load a checkpoint without the mask symbols, which then start as copies of ``<mask>``.
        """
        if getattr(cfg, "max_positions", None) is None:
            with version_shims.open_config(cfg):
                cfg.max_positions = self.cfg.tokens_per_sample + self.cfg.max_spans_per_sequence
        self.model_positions = int(cfg.max_positions)
        model = super().build_model(cfg, from_checkpoint)
        before_loading(model, functools.partial(_add_rows, len(self.source_dictionary), self.mask_idx))
        return model

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: object) -> None:
        """Load groups of blocks, whose spans are redrawn in every epoch."""
        dictionary = self.source_dictionary
        blocks = cut_into_blocks(
            load_split(split_path(self.cfg.data, split, epoch), dictionary, combine=combine),
            dictionary=dictionary,
            tokens_per_sample=self.cfg.tokens_per_sample,
            sample_break_mode=str(self.cfg.sample_break_mode),
            bos=dictionary.bos(),
        )
        at_random = str(self.cfg.group_by) == "random"
        order = np.random.default_rng(self.cfg.seed).permutation(len(blocks)) if at_random else None
        groups = consecutive_groups(len(blocks), self.cfg.group_size, order=order)
        dataset = SpanGroupsDataset(blocks, groups, self._masking(), shuffle=True)
        self._check_spans(split, dataset)
        self.datasets[split] = dataset

    def _check_spans(self, split: str, dataset: SpanGroupsDataset) -> None:
        """Warn of groups with nothing to mask; raise ValueError if no group has, or hardly anything is masked."""
        looked_at = np.unique(np.linspace(0, len(dataset) - 1, min(len(dataset), GROUPS_TO_LOOK_AT)).astype(int))
        groups = [dataset[int(index)] for index in looked_at]
        empty = sum(not group["spans"] for group in groups)
        share = f"{empty} of {len(groups)} groups of {split} have no span that occurs in two of their blocks"
        if empty == len(groups):
            raise ValueError(f"{share}: there is nothing to learn; use a larger --group-size, or --group-by document")
        if empty:
            logger.warning("%s; they are skipped", share)
        batches = (dataset.collater([group]) for group in groups)
        counts = (self.masked_counts(batch) for batch in batches)
        remedy = (
            "spans must occur in two blocks of a group: use a larger --group-size, --max-span-length or "
            "--max-spans-per-sequence, or ask for less with --mask-prob"
        )
        check_masked_share(split, counts, self.cfg.mask_prob, remedy=remedy)

    def masked_counts(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        content = is_content(sample["context"]["src_tokens"], self.source_dictionary)
        return sample["spans"]["length"].sum(), content.sum()

    def _masking(self) -> SpanMasking:
        try:
            pieces = PieceClasses.of_vocabulary(self.source_dictionary.symbols, self.special_ids)
        except ValueError as error:
            raise ValueError(
                f"{self.cfg.data}/dict.txt: {error}; `mlsm tokenizer` and `mlsm binarize` make such a vocabulary"
            ) from error
        return SpanMasking(
            pieces=pieces,
            rules=self.rules,
            start_mask=self.span_masks[0],
            end_mask=self.span_masks[1],
            pad=self.source_dictionary.pad(),
            seed=self.cfg.seed,
            single=str(self.cfg.span_mode) == "single",
            max_length=getattr(self, "model_positions", None),
            context_masking_ratio=self.cfg.context_masking_ratio,
        )


def _add_rows(size: int, mask: int, state_dict: dict[str, torch.Tensor], prefix: str) -> None:
    """Append rows for new symbols to the parameters of a checkpoint, as copies of the row of ``<mask>``."""
    for name in VOCABULARY_WEIGHTS:
        saved = state_dict.get(prefix + name)
        if saved is not None and mask < len(saved) < size:
            new = saved[mask : mask + 1].expand(size - len(saved), *saved.shape[1:])
            state_dict[prefix + name] = torch.cat([saved, new])
            logger.info("%s%s: %d symbols are new, and start as copies of <mask>", prefix, name, size - len(saved))
