"""The fairseq task of learning an auxiliary model's vectors of texts (Reimers and Gurevych, EMNLP 2020)."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fairseq.criterions import FairseqCriterion
from fairseq.data import IdDataset, NestedDictionaryDataset, NumelDataset, NumSamplesDataset, RightPadDataset
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from fairseq.trainer import Trainer
from omegaconf import II
from torch import Tensor

from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.files.settings import option
from mlsm_plugin.core.losses.sentence_vectors import leading_directions, share_kept
from mlsm_plugin.core.masking.masked_share import samples_to_look_at
from mlsm_plugin.fairseq_plugin.compat.batches import Sample, SortedWholeEpochsDataset
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import CheckpointState
from mlsm_plugin.fairseq_plugin.compat.model_parts import sentence_encoder, token_embeddings
from mlsm_plugin.fairseq_plugin.compat.rank_gather import gather_rows
from mlsm_plugin.fairseq_plugin.data.token_blocks import cut_into_blocks, load_split, split_path
from mlsm_plugin.fairseq_plugin.data.token_datasets import BatchPaddingDataset
from mlsm_plugin.fairseq_plugin.tasks.auxiliary_model_task import AuxiliaryModelConfig, AuxiliaryModelTask
from mlsm_plugin.fairseq_plugin.tasks.plugin_task import SAMPLE_BREAK_MODE_HELP, SAMPLE_BREAK_MODES, TextBlocksConfig

logger = logging.getLogger(__name__)

# keys of the state of the task
DIRECTIONS = "vectors_directions"  # only if the model is narrower than the auxiliary model
POOLING = "vectors_pooling"
TEXTS_FOR_DIMENSION = 10  # texts whose vectors decide the directions, for each number of a vector
TEXTS_OF_BATCH = 32
HELD_OUT = 10  # every so many of these texts only measure how much of the vectors the directions keep


@dataclass
class SentenceVectorsTaskConfig(AuxiliaryModelConfig, TextBlocksConfig):
    """The options of the data and of the auxiliary model."""

    sample_break_mode: SAMPLE_BREAK_MODES = option("eos", help=SAMPLE_BREAK_MODE_HELP)  # type: ignore[valid-type]
    train_subset: str = II("dataset.train_subset")


@register_task("sentence_vectors", dataclass=SentenceVectorsTaskConfig)
class SentenceVectorsTask(AuxiliaryModelTask):
    """Texts, by default lines, with an auxiliary model's vectors; nothing is masked.

    A batch has ``net_input`` as in ``masked_lm`` and ``vectors`` (B, width) float32, which each step computes. If the
    model is narrower than the auxiliary model, ``vectors`` are projections on the directions along which a sample of
    them is longest. Blank lines are left out.
    """

    cfg: SentenceVectorsTaskConfig
    criterions = ("sentence_vectors",)
    computes = "vectors"
    _width = 0  # of the model

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False) -> BaseFairseqModel:
        model = super().build_model(cfg, from_checkpoint)
        self._width = int(token_embeddings(sentence_encoder(model)).embedding_dim)
        return model

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: object) -> None:
        """Load texts; ValueError if the auxiliary model does not fit them, or there are none."""
        self.open_auxiliary()  # reports errors before the first batch
        dictionary = self.source_dictionary
        path = split_path(self.cfg.data, split, epoch)
        samples = cut_into_blocks(
            load_split(path, dictionary, combine=combine),
            dictionary=dictionary,
            tokens_per_sample=self.cfg.tokens_per_sample,
            sample_break_mode=str(self.cfg.sample_break_mode),
            bos=dictionary.bos(),
            min_tokens=2,  # a blank line is EOS alone
        )
        if len(samples) == 0:
            raise ValueError(f"{path} has only blank lines; check the text that was binarized")
        logger.info("%s: %d texts of at most %d tokens", path, len(samples), self.cfg.tokens_per_sample)
        entries = {
            "id": IdDataset(),
            "net_input": {
                "src_tokens": RightPadDataset(samples, dictionary.pad()),
                "src_lengths": NumelDataset(samples, reduce=False),
                "has_padding": BatchPaddingDataset(samples.sizes),
            },
            "nsentences": NumSamplesDataset(),
            "ntokens": NumelDataset(samples, reduce=True),
        }
        batches = NestedDictionaryDataset(entries, sizes=[samples.sizes])
        self.datasets[split] = SortedWholeEpochsDataset(batches, samples.sizes)

    def masked_counts(self, sample: Sample) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros((), dtype=torch.int64)
        return nothing, nothing

    def auxiliary_record(self) -> dict[str, object]:
        return {**super().auxiliary_record(), POOLING: self.auxiliary.load_encoder().pooling}

    def check_starts_from(self, checkpoint: Path, saved: CheckpointState) -> None:
        """See :meth:`AuxiliaryModelTask.check_starts_from`; also take the directions of the checkpoint, if they fit."""
        super().check_starts_from(checkpoint, saved)
        if self.same_auxiliary and DIRECTIONS in saved:
            self.state.merge_state_dict({DIRECTIONS: saved[DIRECTIONS]})

    def check_resumes(self, saved: CheckpointState) -> None:
        super().check_resumes(saved)
        pooling = self.auxiliary.load_encoder().pooling
        if saved[POOLING] != pooling:
            raise ValueError(
                f"--auxiliary-checkpoint pools by {pooling}, and the run began with {saved[POOLING]}; pass another "
                "--save-dir"
            )

    def begin_run(self, trainer: Trainer, saved: CheckpointState) -> None:
        """Learn the directions, unless the checkpoint has them; ValueError if the model is wider than the vectors."""
        super().begin_run(trainer, saved)
        dim = self.auxiliary.load_encoder().dim
        if self._width > dim:
            raise ValueError(
                f"the model is {self._width} wide, and the vectors of --auxiliary-checkpoint {dim}; pass "
                f"--encoder-embed-dim {dim} or less"
            )
        if self._width < dim and DIRECTIONS not in self.state_dict():
            self.state.merge_state_dict({DIRECTIONS: self._learned_directions(trainer.device)})

    def _learned_directions(self, device: torch.device) -> Tensor:
        """The directions ``(dim, width)`` float32 of a sample of the text, the same on all ranks."""
        dataset = self.datasets[self.cfg.train_subset]
        most = TEXTS_FOR_DIMENSION * self.auxiliary.load_encoder().dim
        chosen = samples_to_look_at(len(dataset), most=most)
        chosen.sort(key=dataset.size)
        parts = []
        with Progress(total=len(chosen), desc="vectors of the teacher", unit="text") as progress:
            for first in range(0, len(chosen), TEXTS_OF_BATCH):
                indices = chosen[first : first + TEXTS_OF_BATCH]
                batch = dataset.collater([dataset[index] for index in indices])
                parts.append(self.auxiliary.text_vectors(batch["net_input"]["src_tokens"].to(device)))
                progress.update(len(indices))
        vectors = torch.cat(parts).cpu().numpy()
        is_held_out = np.arange(len(vectors)) % HELD_OUT == HELD_OUT - 1
        directions = leading_directions(vectors[~is_held_out], self._width)
        logger.info(
            "the model is narrower than the auxiliary model: it learns %d of %d directions, those of %d texts of %s",
            self._width,
            len(directions),
            len(chosen) - is_held_out.sum(),
            self._data_folder,
        )
        if is_held_out.any():
            share = share_kept(vectors[is_held_out], directions)
            logger.info("they have %.1f%% of the squared lengths of the vectors of further texts", 100 * share)
        return gather_rows(torch.from_numpy(directions).to(device))[0][: len(directions)].cpu()

    def prepare_batch(self, sample: Sample, criterion: FairseqCriterion, update_num: int | None) -> Sample:
        """The batch also gets the vectors that the model learns."""
        vectors = self.auxiliary.text_vectors(sample["net_input"]["src_tokens"])
        if self._width == vectors.size(1):
            return {**sample, "vectors": vectors}
        directions = self.state_dict()[DIRECTIONS]  # also of a checkpoint that fairseq-validate loads
        return {**sample, "vectors": vectors @ directions.to(vectors.device)}
