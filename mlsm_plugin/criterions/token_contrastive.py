"""The TACO loss: nearby tokens share their global semantics (Fu et al., ACL 2022)."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor

from mlsm_plugin.criterions.logged_means import BIT, LoggedMeans
from mlsm_plugin.data.token_blocks import is_content
from mlsm_plugin.rank_gather import gather_rows, sum_over_ranks

logger = logging.getLogger(__name__)

# Numbers of the keys that are gathered at once: on a CPU they stay in the cache; a GPU wants more work at a time, and
# gets the keys in about this many parts.
CHUNK_ENTRIES = 1 << 20
GPU_CHUNKS = 32
NONE = -1
# Vectors shorter than this count as zero: their gradient would not be finite.
SHORTEST = 1e-8


def sample_pairs(
    valid: Tensor, *, window: int, num_negatives: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A positive and negatives for every valid token of a batch.

    The positive of token t is drawn uniformly from the valid tokens t' of its sequence with 0 < |t - t'| < window, or,
    where there is none, from all other valid tokens of the sequence. The negatives are drawn uniformly, with
    replacement, from the valid tokens of the other sequences.

    Args:
        valid: ``(B, T)`` bool: neither padding nor BOS or EOS.
        window: at least 2.
        num_negatives: K, at least 1.
        generator: on the device of ``valid``.

    Returns:
        positive ``(B, T)`` and negative ``(B, T, K)``: int64 indices into the flattened batch x length. All of a
        token's are -1 where it is not valid, or where there is nothing to draw from.

    Raises:
        ValueError: the window holds no other token, there are to be no negatives, or ``valid`` is no bool matrix.

    Reference:
        Fu et al., "Contextual Representation Learning beyond Masked Language Modeling", ACL 2022.
    """
    flat = valid.flatten().nonzero().squeeze(1)  # (N,), with the valid tokens of a sequence in a row
    positive, negative = sample_pairs_in_pool(
        valid, window=window, num_negatives=num_negatives, pool_size=len(flat), first=0, generator=generator
    )
    if len(flat) == 0:
        return positive, negative
    return torch.where(positive == NONE, NONE, flat[positive]), torch.where(negative == NONE, NONE, flat[negative])


def sample_pairs_in_pool(
    valid: Tensor, *, window: int, num_negatives: int, pool_size: int, first: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """As :func:`sample_pairs`, with negatives from a pool of tokens, and indices into that pool.

    Args:
        pool_size: tokens of the pool; all are valid.
        first: the valid tokens of this batch are those of the pool from here on, in their order.
    """
    if valid.dim() != 2 or valid.dtype != torch.bool:
        raise ValueError(f"expected valid (B, T) bool, got {tuple(valid.shape)} {valid.dtype}")
    if window < 2 or num_negatives < 1:
        raise ValueError(f"expected window >= 2 and num_negatives >= 1, got {window} and {num_negatives}")
    counts = valid.sum(dim=1)
    starts = counts.cumsum(0) - counts + first  # of the sequences, in the pool
    nearby = _draw_nearby(valid, window, generator)
    positive = torch.where(nearby == NONE, NONE, nearby + starts[:, None])
    return positive, _draw_others(valid, starts, counts, pool_size, num_negatives, generator)


def _draw(number: Tensor, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Integers of ``shape``, uniform in [0, number); ``number`` is positive where the result counts."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=number.device)
    return (uniform * number).long()


def _draw_nearby(valid: Tensor, window: int, generator: torch.Generator) -> Tensor:
    """Which of the valid tokens of its sequence, counted from 0, is the positive of each token: (B, T), -1 for none."""
    before = F.pad(valid.cumsum(dim=1), (1, 0))  # (B, T + 1): valid tokens of the sequence before each
    position = torch.arange(valid.size(1), device=valid.device)
    lowest = before[:, (position - window + 1).clamp(min=0)]
    number = before[:, (position + window).clamp(max=valid.size(1))] - lowest - 1  # without the token itself
    lonely = number < 1
    lowest = lowest.masked_fill(lonely, 0)
    number = torch.where(lonely, before[:, -1:] - 1, number)
    drawn = lowest + _draw(number, number.shape, generator)
    drawn += drawn >= before[:, :-1]  # over the token itself
    return drawn.masked_fill(~valid | (number < 1), NONE)


def _draw_others(
    valid: Tensor, starts: Tensor, counts: Tensor, pool_size: int, num_negatives: int, generator: torch.Generator
) -> Tensor:
    """Which tokens of the pool are the negatives of each token: (B, T, K), -1 for none.

    The tokens of sequence i in the pool are those from ``starts[i]`` to ``starts[i] + counts[i]`` (both (B,)).
    """
    starts, counts = starts[:, None, None], counts[:, None, None]
    drawn = _draw(pool_size - counts, torch.Size((*valid.shape, num_negatives)), generator)
    drawn += counts * (drawn >= starts)  # over the token's own sequence
    return drawn.masked_fill_(~valid[:, :, None] | (counts == pool_size), NONE)


class ContrastiveTerms(NamedTuple):
    """Sums over the anchors, float32 scalars; only the loss has a gradient.

    Attributes:
        loss: InfoNCE, in nats.
        num_correct: anchors whose positive is nearer than all of their negatives.
        positive_cosine: cosine of the anchor and its positive.
        negative_cosine: mean cosine of the anchor and its negatives.
    """

    loss: Tensor
    num_correct: Tensor
    positive_cosine: Tensor
    negative_cosine: Tensor


def token_contrastive_loss(
    semantics: Tensor, anchors: Tensor, positive: Tensor, negative: Tensor, *, temperature: float
) -> Tensor:
    """InfoNCE of unit vectors, summed over the anchors, in memory that does not grow with K.

    For anchor a, positive p and negatives n_1, ..., n_K, all divided by their L2 norms, the loss is
    ``-log(exp(a p / temperature) / (exp(a p / temperature) + sum_k exp(a n_k / temperature)))``. Only a has a gradient.

    Args:
        semantics: ``(B, T, d)``, any floating dtype; a vector of zeros has cosine 0 with all, and no
            gradient.
        anchors: ``(B, T)`` bool.
        positive, negative: ``(B, T)`` and ``(B, T, K)``, as :func:`sample_pairs` makes them. A token without
            positive or negatives is no anchor.
        temperature: positive.

    Returns:
        float32 scalar (float64 for float64 semantics), in nats.

    Raises:
        ValueError: the shapes do not belong together.

    Reference:
        Fu et al., "Contextual Representation Learning beyond Masked Language Modeling", ACL 2022.
    """
    return contrastive_terms(semantics, anchors, positive, negative, temperature=temperature).loss


def contrastive_terms(
    semantics: Tensor,
    anchors: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    temperature: float,
    keys: Optional[Tensor] = None,  # noqa: UP045
) -> ContrastiveTerms:
    """:func:`token_contrastive_loss` and what is logged beside it.

    Args:
        keys: ``(m, d)`` unit vectors that ``positive`` and ``negative`` index, without gradient; None: those of
            ``semantics``.
    """
    shape = semantics.shape[:2]
    if semantics.dim() != 3 or not shape == anchors.shape == positive.shape == negative.shape[:2]:
        raise ValueError(
            "expected semantics (B, T, d), anchors (B, T), positive (B, T) and negative (B, T, K); got "
            f"{tuple(semantics.shape)}, {tuple(anchors.shape)}, {tuple(positive.shape)} and {tuple(negative.shape)}"
        )
    chosen = (anchors & (positive != NONE) & (negative[:, :, 0] != NONE)).flatten().nonzero().squeeze(1)
    candidates = torch.cat([positive.flatten()[chosen, None], negative.flatten(0, 1)[chosen]], dim=1)
    with torch.autocast(semantics.device.type, enabled=False):  # --amp would round the products
        return ContrastiveTerms(*_InfoNce.apply(semantics.flatten(0, 1), chosen, candidates, keys, temperature))


def unit_rows(vectors: Tensor) -> Tensor:
    """``vectors`` (n, d) divided by their L2 norms, at least in float32; what is shorter than 1e-8 becomes zero."""
    vectors = vectors.detach().to(torch.promote_types(vectors.dtype, torch.float32))
    return vectors / _norms(vectors)


def _norms(vectors: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return norms.masked_fill(norms < SHORTEST, torch.inf)


class _InfoNce(torch.autograd.Function):
    """The gradient is computed in the forward pass, a few anchors at a time: no (n, K, d) tensor lives on."""

    @staticmethod
    def forward(
        ctx: Any,
        semantics: Tensor,
        chosen: Tensor,
        candidates: Tensor,
        keys: Optional[Tensor],  # noqa: UP045
        temperature: float,
    ) -> tuple[Tensor, ...]:
        """The terms; semantics (n, d), chosen (a,), candidates (a, 1 + K) with the positive first, keys (m, d)."""
        own = unit_rows(semantics)
        keys = own if keys is None else keys
        gradient = torch.zeros_like(own) if ctx.needs_input_grad[0] else None
        sums = own.new_zeros(4, dtype=torch.float64)
        rows = max(1, CHUNK_ENTRIES // max(1, candidates.size(1) * own.size(1)))
        if own.device.type != "cpu":
            rows = max(rows, len(chosen) // GPU_CHUNKS)
        for part, others in zip(chosen.split(rows), candidates.split(rows), strict=True):
            anchor = own[part]  # (r, d)
            key = keys[others]  # (r, 1 + K, d)
            cosine = torch.bmm(key, anchor[:, :, None]).squeeze(2)  # (r, 1 + K)
            logits = (cosine - cosine[:, :1]) / temperature
            normalizer = logits.logsumexp(dim=1)  # the loss, as the positive's logit is 0
            sums += torch.stack(
                [
                    normalizer.sum(),
                    (cosine[:, 0] > cosine[:, 1:].amax(dim=1)).sum(),
                    cosine[:, 0].sum(),
                    cosine[:, 1:].mean(dim=1).sum(),
                ]
            )
            if gradient is not None:
                probability = (logits - normalizer[:, None]).exp()
                probability[:, 0] -= 1
                pull = torch.bmm(probability[:, None], key).squeeze(1) / temperature  # of the unit vector
                pull -= (pull * anchor).sum(dim=1, keepdim=True) * anchor
                gradient[part] = pull
        if gradient is not None:
            gradient /= _norms(semantics.detach().to(gradient.dtype))  # that of a vector that counts as zero is zero
            ctx.save_for_backward(gradient)
        ctx.dtype = semantics.dtype
        terms = sums.to(own.dtype).unbind()
        ctx.mark_non_differentiable(*terms[1:])
        return terms

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Optional[Tensor], ...]:  # noqa: UP045
        """Scale what the forward pass computed."""
        (gradient,) = ctx.saved_tensors
        return (gradient * gradients[0]).to(ctx.dtype), None, None, None, None


@dataclass
class TokenContrastiveConfig(FairseqDataclass):
    """The task has the options."""


@register_criterion("token_contrastive", dataclass=TokenContrastiveConfig)
class TokenContrastiveCriterion(FairseqCriterion):
    """MLM + ``contrastive_weight`` x token contrastive loss, each a mean over its own tokens.

    Over all batches of an update, those of ``--update-freq`` and of all ranks, let there be M masked tokens and A
    anchors. A batch returns its summed cross entropy + contrastive_weight x (M / A) x its summed contrastive loss, and
    its masked tokens as the sample size. fairseq divides the sum of all by M: the result is (sum of cross entropies) /
    M + contrastive_weight x (sum of contrastive losses) / A, as if the update were one batch. A and M come from
    :meth:`begin_update`; where nobody calls it, and in validation, they are those of the batch.
    """

    def __init__(self, cfg: TokenContrastiveConfig, task: Any) -> None:
        super().__init__(task)
        if not hasattr(task.cfg, "contrastive_weight"):
            raise ValueError("--criterion token_contrastive needs --task taco, which has its options")
        self.cfg = task.cfg
        self.dictionary = task.source_dictionary
        self._update_num = 0
        self._anchor_scale: Optional[float] = None  # noqa: UP045
        self._warned = False

    def begin_update(self, batches: list[Any], update_num: int, *, device: torch.device) -> None:
        """Count the masked tokens and the anchors of an update. All ranks have to call it.

        Args:
            batches: all of this rank's, an empty one where it has none left; as many on all ranks.
            update_num: updates before this one.
            device: where the ranks exchange their counts.
        """
        counts = torch.stack([self._counts(batch) for batch in batches]).to(device)  # (batches, 3)
        if not self.cfg.negatives_across_ranks:
            counts = _without_lonely_anchors(counts)
        counts = _without_lonely_anchors(sum_over_ranks(counts))
        num_masked, num_anchors, _ = counts.sum(dim=0).tolist()
        self._anchor_scale = max(num_masked, 1.0) / max(num_anchors, 1.0)
        self._update_num = update_num

    def _counts(self, batch: Any) -> Tensor:
        """Masked tokens, tokens that may be anchors, sequences with content."""
        if not batch:
            return torch.zeros(3, dtype=torch.float64)
        valid, masked = self._valid_and_masked(batch)
        may_be_anchor = self._anchors(valid, masked) & (valid.sum(dim=1, keepdim=True) > 1)
        return torch.stack([masked.sum(), may_be_anchor.sum(), valid.any(dim=1).sum()]).double()

    def _valid_and_masked(self, sample: Any) -> tuple[Tensor, Tensor]:
        """Which tokens are content, and which the masked LM predicts: both (B, T) bool."""
        masked = sample["target"].ne(self.padding_idx)
        original = torch.where(masked, sample["target"], sample["net_input"]["src_tokens"])
        return is_content(original, self.dictionary), masked

    def _anchors(self, valid: Tensor, masked: Tensor) -> Tensor:
        which = str(self.cfg.contrastive_anchors)
        return {"all": valid, "masked": valid & masked, "unmasked": valid & ~masked}[which]

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, Any, dict[str, Any]]:
        """Loss summed over tokens, sample size, logging output."""
        valid, masked = self._valid_and_masked(sample)
        with _outputs_of(model.encoder.sentence_encoder) as outputs:
            logits = model(**sample["net_input"], masked_tokens=masked, return_all_hiddens=True)[0]
        (encoded,) = outputs
        semantics = (encoded["encoder_out"][0] - encoded["encoder_states"][0]).transpose(0, 1)  # (B, T, d)
        mlm = F.cross_entropy(logits.float(), sample["target"][masked], reduction="sum")
        if sample.get("is_dummy"):  # it stands in where a rank has no batch left, and is no text to draw from
            valid = torch.zeros_like(valid)
        weight = self.cfg.contrastive_weight
        terms, num_anchors = self._contrast(semantics if weight > 0 else semantics.detach(), valid, masked, sample)
        num_masked = masked.sum()
        scale: Any = num_masked.clamp(min=1) / num_anchors.clamp(min=1)
        if model.training and self._anchor_scale is not None:
            scale = self._anchor_scale
        loss = mlm + weight * scale * terms.loss if weight > 0 else mlm
        logging_output = {
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": num_masked,
            "num_anchors": num_anchors,
            "loss": loss.detach(),
            "mlm_loss": mlm.detach(),
            "contrastive_loss": terms.loss.detach(),
            "weighted_contrastive_loss": weight * terms.loss.detach(),
            "num_correct": terms.num_correct,
            "positive_cosine": terms.positive_cosine,
            "negative_cosine": terms.negative_cosine,
        }
        return loss, num_masked, logging_output

    def _contrast(
        self, semantics: Tensor, valid: Tensor, masked: Tensor, sample: dict[str, Any]
    ) -> tuple[ContrastiveTerms, Tensor]:
        """The terms of a batch, and the number of its anchors."""
        cfg, generator = self.cfg, self._generator(sample, semantics.device)
        anchors = self._anchors(valid, masked)
        how = {"window": cfg.positive_window, "num_negatives": cfg.negatives, "generator": generator}
        keys = None
        if cfg.negatives_across_ranks:
            keys, first = gather_rows(unit_rows(semantics[valid]))
            positive, negative = sample_pairs_in_pool(valid, pool_size=len(keys), first=first, **how)
        else:
            positive, negative = sample_pairs(valid, **how)
        if not self._warned and bool(valid.any()) and bool((negative == NONE).all()):
            self._warned = True
            logger.warning(
                "a batch has one sequence with text, and no other to draw negatives from: its contrastive loss is 0; "
                "use a larger --batch-size or --max-tokens%s",
                "" if cfg.negatives_across_ranks else ", or --negatives-across-ranks",
            )
        terms = contrastive_terms(semantics, anchors, positive, negative, temperature=cfg.temperature, keys=keys)
        return terms, (anchors & (positive != NONE) & (negative[:, :, 0] != NONE)).sum()

    def _generator(self, sample: dict[str, Any], device: torch.device) -> torch.Generator:
        """Random numbers that depend on the seed, the update and the batch only (in validation, not on the update)."""
        first_id = int(sample["id"].flatten()[0]) if len(sample["id"]) else 0
        words = [self.cfg.seed, self._update_num if self.training else 0, int(self.training), first_id]
        (state,) = np.random.SeedSequence(words).generate_state(1, np.uint64)
        return torch.Generator(device).manual_seed(int(state >> np.uint64(1)))

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log means over the updates' tokens; losses in bits (base 2) as fairseq does."""
        means = LoggedMeans(logging_outputs)
        anchors = means.total("num_anchors")
        means.log("mlm_loss", "mlm_loss", means.total("sample_size"), unit=BIT)
        means.log("contrastive_loss", "contrastive_loss", anchors, unit=BIT)
        means.log("contrastive_accuracy", "num_correct", anchors)
        means.log("alignment", "positive_cosine", anchors, digits=4)
        means.log("negative_cosine", "negative_cosine", anchors, digits=4)
        means.log("_weighted_contrastive_loss", "weighted_contrastive_loss", anchors, unit=BIT)
        metrics.log_derived(
            "loss", lambda meters: round(float(meters["mlm_loss"].avg + meters["_weighted_contrastive_loss"].avg), 3)
        )
        metrics.log_derived("mlm_ppl", lambda meters: utils.get_perplexity(meters["mlm_loss"].avg))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


def _without_lonely_anchors(counts: Tensor) -> Tensor:
    """``counts`` (batches, 3) without the anchors of batches of one sequence, which have no negatives."""
    enough = torch.ones_like(counts)
    enough[:, 1] = counts[:, 2] > 1
    return counts * enough


@contextmanager
def _outputs_of(module: torch.nn.Module) -> Iterator[list[Any]]:
    """What ``module`` returns while the context is open: whatever wraps the model, only its forward is called."""
    outputs: list[Any] = []
    hook = module.register_forward_hook(lambda _module, _arguments, output: outputs.append(output))
    try:
        yield outputs
    finally:
        hook.remove()
