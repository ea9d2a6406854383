"""Hugging Face masked LMs with an objective of this package, for the Trainer of ``transformers``.

The class of a stock model, such as ``BertForMaskedLM``, is replaced with a subclass of the same name, whose forward
pass computes the loss of the objective from a batch of its collator. Everything else is inherited.
"""

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlsm_plugin.core.files.atomic_files import PathLike, write_json
from mlsm_plugin.core.files.hf_files import UNTRAINED_HEAD
from mlsm_plugin.core.hidden_states.hf_encoder import check_encoder, load_masked_lm
from mlsm_plugin.core.losses.span_contrastive import NO_KEY, check_similarity, span_batch_terms, span_ngrams, stacked
from mlsm_plugin.core.losses.token_contrastive import check_contrast_weight, contrastive_terms, usable_anchors
from mlsm_plugin.huggingface.auxiliary_states import AuxiliaryStates
from mlsm_plugin.huggingface.collators import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel as StockModel
else:
    StockModel = object  # every model also inherits from a stock class of the library; see _with_objective

logger = logging.getLogger(__name__)
Step = Callable[[Tensor], Tensor]
NEW_HEAD = "which this training trains"
TRAINER_CHECKPOINT = re.compile(r"checkpoint-\d+")
# the loss summed over the labels; the number of labels; and for each figure its sum and its count, (B,) each. The last
# count is left out: it is the number of tokens that are not special
Objective = tuple[Tensor, Tensor, list[Tensor]]


class PretrainingModel(StockModel):
    """The base class of the objectives. The Trainer calls the forward pass with the batches of a collator.

    In training, sums over tokens are collected until :meth:`taken_parts` is called. In evaluation, the output holds
    them for each sequence or group as ``parts`` (B, 2 x number of figures): when the Trainer repeats rows to fill the
    batch of a rank, it drops them again.
    """

    # makes the Trainer pass the number of labels in all batches of an update
    accepts_loss_kwargs: ClassVar[bool] = True
    trains_head: ClassVar[bool] = True  # whether the objective trains the masked-LM head
    added_parts: ClassVar[tuple[str, ...]] = ()  # names of what the objective adds to the stock model
    # names of the logged figures, each a sum divided by a count; the last is masked_share
    figures: ClassVar[tuple[str, ...]]
    auxiliary_states: AuxiliaryStates | None = None  # of a model that reads each batch, if the objective has one
    config: Any
    training: bool
    # checks and sets the options of the objective, and adds what it needs to the model
    set_objective: Callable[..., None]
    _objective: Callable[..., Objective]  # takes the labels, and the rest of the batch by name
    _collected: Tensor | None = None

    @classmethod
    def of(cls, model: Any, **options: Any) -> Self:
        """Turn a stock ``AutoModelForMaskedLM`` into a model with this objective, in place; see the class for options.

        Parts that an earlier objective of this package has added are removed. Logs a warning if weights are not in
        float32, since rounding then loses small updates. ValueError if the model is a decoder, its head has an unknown
        form, or an option is out of range.
        """
        check_encoder(model.config, f"this {type(model).__name__}")
        head_of(model)
        _warn_of_low_precision(model)
        trained = getattr(model, "trains_head", True)
        for name in getattr(model, "added_parts", ()):  # by its objective before
            if name in vars(model) or name in dict(model.named_children()):
                delattr(model, name)
        stock = next(base for base in type(model).__mro__ if not issubclass(base, PretrainingModel))
        model.__class__ = _with_objective(cls, stock)  # type: ignore[arg-type]  # mypy takes classes as not hashable
        model.forget_parts()
        model.set_objective(**options)
        if trained is not cls.trains_head:
            for parameter in model.head_parameters():
                parameter.requires_grad_(cls.trains_head)
        return model

    @classmethod
    def from_pretrained(cls, path: PathLike, **options: Any) -> Self:  # type: ignore[override]
        """Open a folder or hub name; see :meth:`of` for the options.

        A missing masked-LM head is initialized at random. ValueError as in :meth:`of`, or if the model does not exist.
        """
        return cls.of(cls.opened(path, **options), **options)

    @classmethod
    def opened(cls, path: PathLike, *, attention_dropout: float | None = None, **options: Any) -> Any:
        """The stock model that :meth:`of` takes with these ``options``; a missing head is initialized at random.

        This is logged if the objective trains the head. ``attention_dropout`` is the dropout of attention weights in
        training; None: that of the model. ValueError if the model does not exist, or cannot be read.
        """
        new_head = NEW_HEAD if cls.keeps_head(**options) else ""
        return load_masked_lm(path, new_head=new_head, attention_dropout=attention_dropout)

    @classmethod
    def keeps_head(cls, **options: Any) -> bool:
        """Whether these options train the masked-LM head, which is then part of the result."""
        return cls.trains_head

    @property
    def has_trained_head(self) -> bool:
        """:meth:`keeps_head` with the options of this model."""
        return self.keeps_head()

    def targets_record(self) -> dict[str, object]:
        """What decides the targets that are computed in each batch; empty if they come from the data."""
        return {} if self.auxiliary_states is None else self.auxiliary_states.record()

    def save_pretrained(
        self, save_directory: PathLike, *args: Any, state_dict: dict[str, Tensor] | None = None, **options: Any
    ) -> None:
        """Write a stock model folder; arguments as in the stock class.

        If the objective does not train the masked-LM head, the folder holds only the encoder, which ``AutoModel``
        opens. A Trainer's ``checkpoint-N`` holds the whole model, so that the Trainer can resume, and a file that says
        that the head is untrained.
        """
        if self.has_trained_head or TRAINER_CHECKPOINT.fullmatch(Path(save_directory).name):
            super().save_pretrained(save_directory, *args, state_dict=state_dict, **options)  # type: ignore[misc]
            if not self.has_trained_head:
                write_json(Path(save_directory, UNTRAINED_HEAD), {"objective": objective_name(self)})
            return
        state = self.state_dict() if state_dict is None else state_dict
        prefix = f"{self.base_model_prefix}."
        encoder = {name.removeprefix(prefix): values for name, values in state.items() if name.startswith(prefix)}
        self.base_model.save_pretrained(save_directory, *args, state_dict=encoder, **options)  # type: ignore[operator]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        content: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **batch: Any,
    ) -> Any:
        """The loss of a batch of the objective's collator; ValueError for a batch of another collator.

        Args:
            input_ids, attention_mask, labels: ``(B, T)``; without labels, this is the stock forward pass.
            content: ``(B,)`` number of tokens of each sequence or group that are not special, for ``masked_share``; or
                None.
            num_items_in_batch: number of labels in the update; None: in the batch.
            batch: the rest of the batch, and options of the stock class.
        """
        batch |= {"input_ids": input_ids, "attention_mask": attention_mask}
        if labels is None or input_ids is None:
            return super().forward(**batch)
        loss, number_of_labels, parts = self._objective(labels, **batch)
        number = number_of_labels if num_items_in_batch is None else num_items_in_batch
        loss = loss / torch.as_tensor(number, device=loss.device).clamp(min=1)
        parts = [*parts, labels.new_zeros(len(labels)) if content is None else content]
        rows = torch.stack([part.detach().double() for part in parts], dim=1)
        if not self.training:
            return {"loss": loss, "parts": rows}
        sums = rows.sum(dim=0)
        self._collected = sums if self._collected is None else self._collected + sums
        return {"loss": loss}

    def forget_parts(self) -> None:
        """Forget figures that were not taken, such as those of the last updates of an earlier training."""
        self._collected = None

    def taken_parts(self) -> dict[str, float]:
        """The figures over all tokens of all ranks since the last call, by name; every rank must call this."""
        sums = self._collected
        if sums is None:
            return {}
        self._collected = None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        return self.means_of(sums)

    @classmethod
    def means_of(cls, sums: Iterable[float | Tensor]) -> dict[str, float]:
        """The figures from alternating sums and counts; figures with count 0 are left out."""
        values = [float(value) for value in sums]
        figures = zip(cls.figures, values[::2], values[1::2], strict=True)
        return {name: total / count for name, total, count in figures if count}

    def _encoded(self, **inputs: Tensor | bool) -> Any:
        return self.base_model(return_dict=True, **inputs)

    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters of the masked-LM head, except those shared with the encoder."""
        prefix = f"{self.base_model_prefix}."
        parameters = self.named_parameters()
        return [parameter for name, parameter in parameters if not name.startswith(prefix)]

    def _masked_lm(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The summed cross entropy of the masked tokens; and for each row the sum and the number of masked tokens."""
        head = head_of(self)
        masked = labels != IGNORED
        logits = head.project(head.transform(hidden[masked]))
        losses = F.cross_entropy(logits.float(), labels[masked], reduction="none")
        return losses.sum(), [sums_of_rows(losses, masked), masked.sum(dim=1)]


class MaskedLmModel(PretrainingModel):
    """A masked LM with the same loss as the stock class, but faster and with exact means over an update."""

    figures: ClassVar[tuple[str, ...]] = ("mlm_loss", "masked_share")

    def set_objective(self) -> None:
        """Do nothing: there are no options."""

    def _objective(self, labels: Tensor, **inputs: Tensor) -> Objective:
        loss, (sums, masked) = self._masked_lm(self._encoded(**inputs)[0], labels)
        return loss, masked.sum(), [sums, masked, masked]


class TokenContrastiveModel(PretrainingModel):
    """A masked LM that learns similar global semantics for nearby tokens: TACO (Fu et al., ACL 2022), with MLM.

    The global semantics of a token is its last hidden state minus its embedding. The contrastive loss is a mean over
    the anchors of a batch; if an update has several batches, they are weighted by their numbers of masked tokens.

    Args (of :meth:`of` and :meth:`from_pretrained`):
        contrastive_weight: weight of the contrastive loss, not negative.
        temperature: divisor of the cosines, positive.
    """

    figures: ClassVar[tuple[str, ...]] = (
        "mlm_loss",
        "contrastive_loss",
        "contrastive_accuracy",
        "contrasted",
        "masked_share",
    )

    def set_objective(self, *, contrastive_weight: float = 1.0, temperature: float = 0.07) -> None:
        """Set the options of the class; raises ValueError if one is out of range."""
        check_contrast_weight(contrastive_weight, temperature)
        self.contrastive_weight = contrastive_weight
        self.temperature = temperature

    def _objective(self, labels: Tensor, *, pairs: dict[str, Tensor] | None = None, **inputs: Tensor) -> Objective:
        if pairs is None:
            raise ValueError("the batch has no pairs; make it with TokenContrastiveCollator")
        anchors = pairs["anchors"]
        positive = pairs["positive"]
        negative = pairs["negative"]
        encoded = self._encoded(output_hidden_states=True, **inputs)
        loss, (sums, masked) = self._masked_lm(encoded[0], labels)
        semantics = encoded[0] - encoded.hidden_states[0]
        terms = contrastive_terms(
            semantics if self.contrastive_weight > 0 else semantics.detach(),
            anchors=anchors,
            positive=positive,
            negative=negative,
            temperature=self.temperature,
        )
        number = masked.sum()
        usable = usable_anchors(anchors=anchors, positive=positive, negative=negative)
        if self.contrastive_weight > 0:
            loss = loss + self.contrastive_weight * number.clamp(min=1) / usable.sum().clamp(min=1) * terms.loss
        usable_of_rows = usable.sum(dim=1)
        contrast = [sums_of_rows(terms.losses, usable), usable_of_rows]
        contrast += [sums_of_rows(terms.correct, usable), usable_of_rows]
        contrast += [usable_of_rows, anchors.sum(dim=1)]
        return loss, number, [sums, masked, *contrast, masked]


class SpanContrastiveModel(PretrainingModel):
    """An encoder that retrieves the ends of masked spans: NPM (Min et al., 2022), without an output vocabulary.

    Args (of :meth:`of` and :meth:`from_pretrained`):
        similarity: ``inner`` or ``l2``.
        temperature: divisor of the scores, positive; None: the square root of the width.
    """

    trains_head: ClassVar[bool] = False
    figures: ClassVar[tuple[str, ...]] = ("start_loss", "end_loss", "accuracy", "with_positive", "masked_share")

    def set_objective(self, *, similarity: str = "inner", temperature: float | None = None) -> None:
        """Set the options of the class; raises ValueError if one is out of range."""
        check_similarity(similarity, temperature)
        self.similarity = similarity
        self.temperature = temperature

    def _objective(
        self,
        labels: Tensor,
        *,
        context_ids: Tensor | None = None,
        spans: dict[str, Tensor] | None = None,
        special: Tensor | None = None,
        **inputs: Tensor,
    ) -> Objective:
        if context_ids is None or spans is None or special is None:
            raise ValueError("the batch has no spans; make it with SpanGroupsCollator")
        pad = int(special[0])
        sequences = stacked(inputs["input_ids"], context_ids, pad)
        inputs["input_ids"] = sequences
        inputs["attention_mask"] = (sequences != pad).long()
        features, key_features = self._encoded(**inputs)[0].chunk(2)
        is_key = ~torch.isin(context_ids, special)
        terms = span_batch_terms(
            features,
            key_features[:, : context_ids.size(1)][is_key],
            context_ids.masked_fill(~is_key, NO_KEY),
            spans,
            span_ngrams(context_ids, spans),
            similarity=self.similarity,
            temperature=self.temperature,
        )
        start = terms["start"]
        end = terms["end"]
        counted = start.has_positive
        all_spans = torch.ones_like(counted)
        span_values = [start.losses, counted, end.losses, counted]
        span_values += [start.correct & end.correct, counted, counted, all_spans, spans["length"]]
        is_span = labels != IGNORED
        return start.loss + end.loss, counted.sum(), [sums_of_rows(values, is_span) for values in span_values]


@cache
def _with_objective(objective: type, stock: type) -> type:
    """A class that inherits from an objective and a stock class, with the name of the stock class."""
    return type(stock.__name__, (objective, stock), {"__module__": stock.__module__})


def _warn_of_low_precision(model: nn.Module) -> None:
    """Log a warning if weights are in bfloat16 or float16."""
    kinds = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    low = sorted(kinds & {"bfloat16", "float16"})
    if low:
        logger.warning(
            f"the weights of this {type(model).__name__} are in {' and '.join(low)}: it computes in this precision, "
            "and updates that are smaller than its rounding are lost; train model.float(), with bf16=True in the "
            "TrainingArguments for fast products"
        )


def objective_name(model: object) -> str:
    """The name of a model's objective class; the class of the model itself has the name of the stock class."""
    return type(model).__mro__[1].__name__ if isinstance(model, PretrainingModel) else type(model).__name__


def sums_of_rows(values: Tensor, mask: Tensor) -> Tensor:
    """The sum of ``values`` (n,) in each row of the ``mask`` (B, T), which is True at n places.

    The result is ``(B,)`` float64, without gradients.
    """
    sums = torch.zeros(len(mask), dtype=torch.float64, device=values.device)
    return sums.index_add_(0, mask.nonzero()[:, 0], values.detach().double())


@dataclass(frozen=True)
class Head:
    """The two halves of a masked-LM head."""

    transform: Step  # hidden states (n, d) to the input of the projection, (n, width)
    project: Step  # (n, width) to vocabulary logits (n, V)
    width: int
    bias: nn.Parameter | None  # of the projection, whose weight may be shared with the embeddings


def head_of(model: Any) -> Head:
    """The head of a masked LM: BERT, RoBERTa, MPNet, ModernBERT, DeBERTa-v2, DistilBERT, ELECTRA and similar models.

    ValueError if the head has another form.
    """

    def part(name: str) -> Any:
        return getattr(model, name, None)

    head: Any
    if (head := getattr(part("cls"), "predictions", None)) is not None:  # BERT
        return _head(head.transform, head.decoder)
    if (head := getattr(part("lm_predictions"), "lm_head", None)) is not None:  # DeBERTa-v2
        embeddings = model.get_input_embeddings()
        return Head(
            lambda hidden: head.LayerNorm(head.transform_act_fn(head.dense(hidden))),
            lambda transformed: F.linear(transformed, embeddings.weight, head.bias),
            head.dense.out_features,
            head.bias,
        )
    head = part("lm_head")
    decoder = part("decoder")
    if all(hasattr(head, name) for name in ("dense", "layer_norm", "decoder")):  # RoBERTa, MPNet
        return _head(lambda hidden: head.layer_norm(F.gelu(head.dense(hidden))), head.decoder)
    if (dense := part("head")) is not None and decoder is not None:  # ModernBERT
        return _head(dense, decoder)
    if (projector := part("vocab_projector")) is not None:  # DistilBERT
        return _head(lambda hidden: model.vocab_layer_norm(model.activation(model.vocab_transform(hidden))), projector)
    if (projector := part("generator_lm_head")) is not None:  # ELECTRA
        return _head(model.generator_predictions, projector)
    raise ValueError(
        f"the masked-LM head of {type(model).__name__} has an unknown form; use a model like BERT, RoBERTa, "
        "ModernBERT, DeBERTa-v2, DistilBERT or ELECTRA"
    )


def head_transform(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights in ``state`` of the first half of a masked-LM head, by the names of the stock class."""
    encoder = f"{model.base_model_prefix}."
    symbols = int(model.config.vocab_size)
    return {name: values for name, values in state.items() if not name.startswith(encoder) and len(values) != symbols}


def _head(transform: Step, projection: nn.Linear) -> Head:
    return Head(transform, projection, projection.in_features, projection.bias)
