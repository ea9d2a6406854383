"""The TACO loss: nearby tokens have similar global semantics (Fu et al., ACL 2022)."""

import logging
from dataclasses import dataclass
from typing import Optional

import torch
from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor

from mlsm_plugin.core.files.settings import option
from mlsm_plugin.core.losses.cross_entropy import token_cross_entropy
from mlsm_plugin.core.losses.token_contrastive import (
    ANCHORS,
    NONE,
    Contrast,
    ContrastiveTerms,
    check_contrast_weight,
    contrastive_terms,
    generator_of,
    sample_pairs,
    unit_rows,
)
from mlsm_plugin.fairseq_plugin.compat.batches import LoggingOutput, Sample
from mlsm_plugin.fairseq_plugin.compat.model_parts import first_and_last_states, project_masked
from mlsm_plugin.fairseq_plugin.compat.rank_gather import gather_rows, sum_over_ranks
from mlsm_plugin.fairseq_plugin.criterions.logged_means import BIT, LoggedMeans, SummedCriterion
from mlsm_plugin.fairseq_plugin.data.token_blocks import is_known

logger = logging.getLogger(__name__)


@dataclass
class TokenContrastiveConfig(FairseqDataclass):
    """The options of the contrastive loss."""

    contrastive_weight: float = option(
        1.0, help="weight of the contrastive loss; 0 trains a plain masked LM and only logs the loss"
    )
    contrastive_anchors: ChoiceEnum(ANCHORS) = option("all", help="tokens of the masked input that are anchors")  # type: ignore[valid-type]
    positive_window: int = option(5, help="W: a positive is less than W tokens from its anchor (published code: 3)")
    negatives: int = option(50, help="K: number of tokens of other sequences that each anchor is compared with")
    temperature: float = option(0.07, help="divisor of the cosines")
    negatives_across_ranks: bool = option(False, help="draw negatives from the batches of all ranks")
    seed: int = II("common.seed")


@register_criterion("token_contrastive", dataclass=TokenContrastiveConfig)
class TokenContrastiveCriterion(SummedCriterion):
    """MLM + ``contrastive_weight`` x token contrastive loss, each a mean over its tokens.

    Let M be the number of masked tokens and A the number of anchors in an update, over all ``--update-freq`` batches on
    all ranks. A batch returns its summed cross entropy + contrastive_weight x (M / A) x its summed contrastive loss.
    fairseq divides the sum over all batches by M, so the result is the same as for one large batch. A and M come from
    :meth:`begin_update`; in validation, or if it is not called, they are those of the batch. ValueError if the task
    does not announce updates, or an option is out of range.
    """

    def __init__(self, cfg: TokenContrastiveConfig, task: FairseqTask) -> None:
        super().__init__(task)
        if not getattr(task, "announces_updates", False):
            raise ValueError(
                "--criterion token_contrastive needs --task taco, which announces all batches of an update"
            )
        check_contrast_weight(cfg.contrastive_weight, cfg.temperature)
        self.contrast = Contrast(cfg.positive_window, cfg.negatives, str(cfg.contrastive_anchors))
        self.cfg = cfg
        self.dictionary = task.source_dictionary
        self._update_num = 0
        self._anchor_scale: Optional[float] = None  # noqa: UP045
        self._warned = False

    def begin_update(self, batches: list[Sample], update_num: int, *, device: torch.device) -> None:
        """Count the masked tokens and the anchors of the update after ``update_num``. All ranks have to call this.

        ``batches`` are the batches of this rank, the same number on all ranks; a rank without batches passes empty
        ones. The ranks exchange their counts on ``device``.
        """
        counts = torch.stack([self._counts(batch) for batch in batches]).to(device)  # (batches, 3)
        if not self.cfg.negatives_across_ranks:
            counts = _without_lonely_anchors(counts)
        counts = _without_lonely_anchors(sum_over_ranks(counts))
        num_masked, num_anchors, _ = counts.sum(dim=0).tolist()
        self._anchor_scale = max(num_masked, 1.0) / max(num_anchors, 1.0)
        self._update_num = update_num

    def _counts(self, batch: Sample) -> Tensor:
        """The numbers of masked tokens, of possible anchors and of sequences with content: (3,) float64."""
        if not batch:
            return torch.zeros(3, dtype=torch.float64)
        valid, masked = self._valid_and_masked(batch)
        may_be_anchor = self.contrast.anchors_in(valid, masked) & (valid.sum(dim=1, keepdim=True) > 1)
        return torch.stack([masked.sum(), may_be_anchor.sum(), valid.any(dim=1).sum()]).double()

    @property
    def contrasts(self) -> bool:
        """Whether the contrastive loss is trained."""
        return self.cfg.contrastive_weight > 0

    def contrasted_counts(self, batch: Sample) -> tuple[int, int]:
        """The number of anchors of a batch with a positive and negatives, and the number of all anchors."""
        valid, masked = self._valid_and_masked(batch)
        _, with_positive, num_sequences = self._counts(batch).tolist()
        has_negatives = num_sequences > 1 or self.cfg.negatives_across_ranks
        return int(with_positive) * has_negatives, int(self.contrast.anchors_in(valid, masked).sum())

    def _valid_and_masked(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Whether each token may be compared (if it is known), and whether it is masked: (B, T) bool each."""
        masked = sample["target"].ne(self.padding_idx)
        original = torch.where(masked, sample["target"], sample["net_input"]["src_tokens"])
        return is_known(original, self.dictionary), masked

    def forward(
        self, model: BaseFairseqModel, sample: Sample, reduce: bool = True
    ) -> tuple[Tensor, int | Tensor, LoggingOutput]:
        valid, masked = self._valid_and_masked(sample)
        targets, num_masked, logits, extra = project_masked(model, sample, self.padding_idx, return_all_hiddens=True)
        assert logits is not None
        embedded, encoded = first_and_last_states(model, extra)
        semantics = encoded.float() - embedded.float()  # (B, T, d)
        mlm = token_cross_entropy(logits, targets, ignore_index=self.padding_idx).sum()
        if sample.get("is_dummy"):  # this rank has no batch left; do not draw from this one
            valid = torch.zeros_like(valid)
        weight = self.cfg.contrastive_weight
        terms = self._contrast(semantics if weight > 0 else semantics.detach(), valid, masked, sample)
        num_anchors = len(terms.losses)
        num_possible = self.contrast.anchors_in(valid, masked).sum()
        scale = max(int(num_masked), 1) / max(num_anchors, 1)
        if model.training and self._anchor_scale is not None:
            scale = self._anchor_scale
        loss = mlm + weight * scale * terms.loss if weight > 0 else mlm
        logging_output = {
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": num_masked,
            "num_anchors": num_anchors,
            "num_possible_anchors": num_possible,
            "loss": loss.detach(),
            "mlm_loss": mlm.detach(),
            "contrastive_loss": terms.loss.detach(),
            "weighted_contrastive_loss": weight * terms.loss.detach(),
            "num_correct": terms.correct.sum(),
            "positive_cosine": terms.positive_cosine.double().sum().float(),
            "negative_cosine": terms.negative_cosine.double().sum().float(),
        }
        return loss, num_masked, logging_output

    def _contrast(self, semantics: Tensor, valid: Tensor, masked: Tensor, sample: Sample) -> ContrastiveTerms:
        cfg = self.cfg
        generator = self._generator(sample, semantics.device)
        anchors = self.contrast.anchors_in(valid, masked)
        keys = None
        pool_size = None
        first = 0
        if cfg.negatives_across_ranks:
            keys, first = gather_rows(unit_rows(semantics[valid]))
            pool_size = len(keys)
        positive, negative = sample_pairs(
            valid,
            window=cfg.positive_window,
            num_negatives=cfg.negatives,
            generator=generator,
            pool_size=pool_size,
            first=first,
        )
        if not self._warned and bool(valid.any()) and bool((negative == NONE).all()):
            self._warned = True
            logger.warning(
                "a batch has only one sequence with text, so it has no negatives, and its contrastive loss is 0; use "
                "a larger --batch-size or --max-tokens%s",
                "" if cfg.negatives_across_ranks else ", or --negatives-across-ranks",
            )
        return contrastive_terms(semantics, anchors, positive, negative, temperature=cfg.temperature, keys=keys)

    def _generator(self, sample: Sample, device: torch.device) -> torch.Generator:
        """A generator that depends only on the seed, the batch and, in training, the update."""
        first_id = int(sample["id"].flatten()[0]) if len(sample["id"]) else 0
        update_num = self._update_num if self.training else 0
        return generator_of(self.cfg.seed, update_num, int(self.training), first_id, device=device)

    @staticmethod
    def reduce_metrics(logging_outputs: list[LoggingOutput]) -> None:
        """Log means over the tokens of the updates; losses in bits (base 2), as in fairseq."""
        means = LoggedMeans(logging_outputs)
        anchors = means.total("num_anchors")
        means.log("mlm_loss", "mlm_loss", means.total("sample_size"), unit=BIT)
        means.log("contrastive_loss", "contrastive_loss", anchors, unit=BIT)
        means.log("contrastive_accuracy", "num_correct", anchors)
        means.log("contrasted", "num_anchors", means.total("num_possible_anchors"))
        means.log("alignment", "positive_cosine", anchors, digits=4)
        means.log("negative_cosine", "negative_cosine", anchors, digits=4)
        means.log("_weighted_contrastive_loss", "weighted_contrastive_loss", anchors, unit=BIT)
        metrics.log_derived(
            "loss", lambda meters: round(float(meters["mlm_loss"].avg + meters["_weighted_contrastive_loss"].avg), 3)
        )
        metrics.log_derived("mlm_ppl", lambda meters: utils.get_perplexity(meters["mlm_loss"].avg))


def _without_lonely_anchors(counts: Tensor) -> Tensor:
    """Set the anchors in ``counts`` (batches, 3) to 0 for batches with only one sequence, which have no negatives."""
    enough = torch.ones_like(counts)
    enough[:, 1] = counts[:, 2] > 1
    return counts * enough
