"""The fairseq task of span denoising (T5; Raffel et al., 2020), for fairseq's encoder-decoders and cross entropies."""

import functools
import logging
from dataclasses import dataclass

import numpy as np
import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary, FairseqDataset, TokenBlockDataset
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.optim import FairseqOptimizer
from fairseq.tasks import FairseqTask, register_task

from mlsm_plugin.core.files.settings import option
from mlsm_plugin.core.masking.masked_share import check_masked_share, samples_to_look_at
from mlsm_plugin.core.masking.span_corruption import SpanNoise
from mlsm_plugin.core.masking.word_boundaries import PieceClasses
from mlsm_plugin.fairseq_plugin.compat import version_shims
from mlsm_plugin.fairseq_plugin.compat.batches import Sample
from mlsm_plugin.fairseq_plugin.compat.loading_hooks import before_loading
from mlsm_plugin.fairseq_plugin.compat.model_parts import SOURCE_EMBEDDINGS
from mlsm_plugin.fairseq_plugin.data.span_datasets import Corruption, SpanDenoisingDataset, WithoutEos
from mlsm_plugin.fairseq_plugin.data.token_blocks import BlockPiecesDataset, is_content, load_split, split_path
from mlsm_plugin.fairseq_plugin.tasks.plugin_task import (
    SAMPLE_BREAK_MODE_HELP,
    SAMPLE_BREAK_MODES,
    PluginTask,
    StepResult,
    TextBlocksConfig,
)
from mlsm_plugin.fairseq_plugin.text.masked_text import DEFAULT_SENTINELS, dictionary_with_sentinels
from mlsm_plugin.fairseq_plugin.text.symbol_files import own_special_symbols, special_symbols

logger = logging.getLogger(__name__)

NO_LONG_TEXT = "no text of {split} can be corrupted, as all have fewer than 2 tokens; use longer texts"


@dataclass
class SpanDenoisingConfig(TextBlocksConfig):
    """The options of the data and the corruption."""

    sample_break_mode: SAMPLE_BREAK_MODES = option("none", help=SAMPLE_BREAK_MODE_HELP)  # type: ignore[valid-type]
    tokens_per_sample: int = option(
        512,
        help="maximum number of tokens of a corrupted source, </s> included; raw blocks are longer so that the "
        "corrupted source fills the block",
    )
    noise_density: float = option(0.15, help="share of tokens that become noise")
    mean_span_length: float = option(3.0, help="mean number of tokens of a noise span")
    sentinels: int = option(
        DEFAULT_SENTINELS,
        help="number of sentinels <extra_id_0>, <extra_id_1>, ...; it limits the noise spans of a text",
    )
    rotate: bool = option(
        False, help="shift the noise by a random offset: a text may then begin and end with noise or text"
    )
    closing_sentinel: bool = option(False, help="end every target with a sentinel, even if its text ends in noise")
    mask_whole_words: bool = option(False, help="let only whole words become noise")
    shuffle: bool = option(True, help="shuffle texts of the same length again in every epoch")


@register_task("span_denoising", dataclass=SpanDenoisingConfig)
class SpanDenoisingTask(PluginTask, FairseqTask):
    """Texts in which sentinels replace spans, with the spans as targets; the spans are redrawn in every epoch.

    ValueError if an option is out of range.
    """

    cfg: SpanDenoisingConfig
    criterions = ("cross_entropy", "label_smoothed_cross_entropy")
    encoder_decoder = True
    usual_arch = "denoising_small"

    def __init__(self, cfg: SpanDenoisingConfig, dictionary: Dictionary, sentinels: np.ndarray) -> None:
        super().__init__(cfg)
        if cfg.sentinels < 1:
            raise ValueError(f"--sentinels must be at least 1, got {cfg.sentinels}")
        try:
            self.noise = SpanNoise(cfg.noise_density, cfg.mean_span_length, cfg.rotate, cfg.closing_sentinel)
            self.text_length = self.noise.text_length(cfg.tokens_per_sample, len(sentinels))
        except ValueError as error:
            raise ValueError(f"options of the span corruption: {error}") from error
        self.target_length = self.noise.lengths(self.text_length, len(sentinels))[1]
        self.target_positions = max(cfg.tokens_per_sample, 2 * self.target_length)  # the default
        self.dictionary = dictionary
        self.sentinels = sentinels

    @classmethod
    def setup_task(cls, cfg: SpanDenoisingConfig, **kwargs: object) -> "SpanDenoisingTask":
        """Load only the dictionary, since a checkpoint must load without the data."""
        return cls(cfg, *dictionary_with_sentinels(utils.split_paths(cfg.data)[0], cfg.sentinels))

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False) -> BaseFairseqModel:
        """Build the model; ValueError if its options set too few positions for sources or targets."""
        # with whole words as noise, the lengths of targets vary
        needed = {"max_source_positions": self.cfg.tokens_per_sample, "max_target_positions": self.target_length}
        for name, least in needed.items():
            if getattr(cfg, name, None) is None:
                with version_shims.open_config(cfg):
                    setattr(cfg, name, self.target_positions)
            if getattr(cfg, name) < least:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} {getattr(cfg, name)} is too few: --tokens-per-sample needs {least}")
        self.target_positions = cfg.max_target_positions
        model = super().build_model(cfg, from_checkpoint)
        before_loading(model, functools.partial(_check_sentinels, self))
        return model

    def train_step(
        self,
        sample: Sample,
        model: BaseFairseqModel,
        criterion: FairseqCriterion,
        optimizer: FairseqOptimizer,
        update_num: int,
        ignore_grad: bool = False,
    ) -> StepResult:
        """Put ``</s>`` into sources that are only padding, since fairseq's attention to nothing is NaN."""
        tokens = sample["net_input"]["src_tokens"]
        empty = tokens.eq(self.dictionary.pad()).all(dim=1, keepdim=True)
        tokens = torch.cat([tokens[:, :1].masked_fill(empty, self.dictionary.eos()), tokens[:, 1:]], dim=1)
        sample = {**sample, "net_input": {**sample["net_input"], "src_tokens": tokens}}
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: object) -> None:
        """Load texts to corrupt."""
        corruption = Corruption(
            noise=self.noise,
            sentinels=self.sentinels,
            eos=self.dictionary.eos(),
            pad=self.dictionary.pad(),
            source_length=self.cfg.tokens_per_sample,
            seed=self.cfg.seed,
            pieces=self._pieces() if self.cfg.mask_whole_words else None,
            target_length=self.target_positions,
            unk=[self.dictionary.unk(), *own_special_symbols(self.dictionary)],
        )
        path = split_path(self.cfg.data, split, epoch)
        blocks = self._blocks(split, load_split(path, self.dictionary, combine=combine))
        lengths = [int(blocks.sizes[index]) for index in samples_to_look_at(len(blocks))]
        self.noise.check_lengths(lengths, len(self.sentinels), split)
        dataset = SpanDenoisingDataset(blocks, corruption, shuffle=self.cfg.shuffle)
        batches = (dataset.collater([dataset[index]]) for index in samples_to_look_at(len(dataset)))
        counts = (self.masked_counts(batch) for batch in batches)
        remedy = "the text may have too many unknown tokens: make a tokenizer from such text"
        check_masked_share(split, counts, self.cfg.noise_density, remedy=remedy)
        self.datasets[split] = dataset

    def masked_counts(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        noise = self._number_of_content(sample["target"])
        return noise, noise + self._number_of_content(sample["net_input"]["src_tokens"])

    def _number_of_content(self, tokens: torch.Tensor) -> torch.Tensor:
        """The number of ``tokens`` that are content, without sentinels."""
        sentinels = torch.as_tensor(self.sentinels, device=tokens.device)
        return (is_content(tokens, self.dictionary) & ~torch.isin(tokens, sentinels)).sum()

    def _blocks(self, split: str, dataset: FairseqDataset) -> BlockPiecesDataset:
        """Cut texts, without EOS, to the lengths whose sources just fit; drop texts of one token, with a warning."""
        mode = str(self.cfg.sample_break_mode)
        documents = mode == "complete_doc"
        sentences = WithoutEos(dataset, self.dictionary.eos(), keep_boundaries=documents)
        if len(sentences) == 0:
            raise ValueError(f"{split} has no text, only document boundaries; check the text that was binarized")
        if documents and sentences.longest_document < 2:  # fairseq makes no block of it
            raise ValueError(NO_LONG_TEXT.format(split=split))
        blocks = TokenBlockDataset(
            sentences,
            sentences.sizes,
            self.text_length,
            pad=self.dictionary.pad(),
            eos=self.dictionary.eos(),
            break_mode=mode,
            document_sep_len=sentences.boundary_size if documents else 0,
        )
        blocks = BlockPiecesDataset(blocks, self.text_length, min_tokens=2)
        num_short = int((blocks.block_sizes < 2).sum())
        logger.info("%s: %d texts of at most %d tokens", split, len(blocks) + num_short, self.text_length)
        if documents:  # fairseq itself leaves out texts of one token
            words = sentences.sizes[sentences.sizes < sentences.boundary_size]
            num_short += int(words.sum() - blocks.block_sizes.sum())
        if num_short:
            logger.warning("%s: %d texts of one token are left out", split, num_short)
        if len(blocks) == 0:
            raise ValueError(NO_LONG_TEXT.format(split=split))
        return blocks

    def _pieces(self) -> PieceClasses:
        special = [*special_symbols(self.dictionary), *self.sentinels.tolist()]
        try:
            return PieceClasses.of_vocabulary(self.dictionary.symbols, special)
        except ValueError as error:
            raise ValueError(f"--mask-whole-words: {error}") from error


def _check_sentinels(task: SpanDenoisingTask, state_dict: dict[str, torch.Tensor], prefix: str) -> None:
    """Raise ValueError unless the checkpoint of an encoder-decoder has as many sentinels as the task."""
    if prefix + SOURCE_EMBEDDINGS not in state_dict:
        return
    saved = len(state_dict[prefix + SOURCE_EMBEDDINGS])
    if saved == len(task.dictionary):
        return
    text_symbols = len(task.dictionary) - len(task.sentinels)
    if saved > text_symbols:
        raise ValueError(
            f"the checkpoint has {saved - text_symbols} sentinels and {text_symbols} other symbols, but --sentinels is "
            f"{len(task.sentinels)}; pass --sentinels {saved - text_symbols} if dict.txt is that of the checkpoint"
        )
    raise ValueError(
        f"the checkpoint has {saved} symbols, but dict.txt and the sentinels have {len(task.dictionary)}; "
        "binarize the text with the tokenizer of the checkpoint"
    )
