"""Distillation of Hugging Face masked LMs (Hinton et al., 2015)."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mlsm_plugin.core.files.sentence_modules import CLS, MEAN
from mlsm_plugin.core.losses.cross_entropy import check_temperature, distillation_kl
from mlsm_plugin.core.losses.sentence_vectors import pooled_vectors, vector_errors
from mlsm_plugin.huggingface.collators import IGNORED
from mlsm_plugin.huggingface.pretraining_model import Objective, PretrainingModel, head_of, sums_of_rows


class DistilledModel(PretrainingModel):
    """A masked LM that learns a teacher's predictions for the masked tokens of the same masked text.

    ``mlm_loss`` is only logged: the student is not trained on the true tokens.

    Args (of :meth:`of` and :meth:`from_pretrained`):
        teacher: a masked LM with the same vocabulary, as ``AutoModelForMaskedLM`` opens it; it is not trained.
        temperature: divisor of the logits of both models, positive.
    """

    added_parts: ClassVar[tuple[str, ...]] = ("_teacher",)
    figures: ClassVar[tuple[str, ...]] = ("teacher_kl", "mlm_loss", "masked_share")

    def set_objective(self, *, teacher: Any, temperature: float = 1.0) -> None:
        """Set the options of the class; ValueError if one is out of range, or the vocabularies differ."""
        check_temperature(temperature)
        size = self.config.vocab_size
        teacher_size = teacher.config.vocab_size
        if size != teacher_size:
            raise ValueError(f"the student has {size} tokens, the teacher {teacher_size}; they must be the same")
        head_of(teacher)
        self.temperature = temperature
        # in a tuple, it is not a submodule, so it is neither trained nor saved
        self._teacher = (teacher.eval().requires_grad_(False),)

    def _objective(self, labels: Tensor, **inputs: Tensor) -> Objective:
        masked = labels != IGNORED
        logits = _logits(self, self._encoded(**inputs)[0][masked])
        with torch.no_grad():
            (teacher,) = self._teacher
            if teacher.device != labels.device:
                teacher.to(labels.device)
            expected = _logits(teacher, teacher.base_model(return_dict=True, **inputs)[0][masked])
            mlm = F.cross_entropy(logits.float(), labels[masked], reduction="none")
        losses = distillation_kl(logits, expected, self.temperature)
        number = masked.sum(dim=1)
        parts = [sums_of_rows(losses, masked), number, sums_of_rows(mlm, masked), number, number]
        return losses.sum(), number.sum(), parts


def _logits(model: Any, hidden: Tensor) -> Tensor:
    """Vocabulary logits ``(n, V)`` of hidden states ``(n, d)``."""
    head = head_of(model)
    return head.project(head.transform(hidden))


class SentenceVectorModel(PretrainingModel):
    """An encoder that learns a teacher's sentence vectors with its own; tokenizers may differ.

    The loss is the mean squared error over the entries of a vector. The masked-LM head is not trained.

    Args (of :meth:`of` and :meth:`from_pretrained`):
        width: width of the vectors that are learned; must be equal to the width of the model.
        pooling: how hidden states become a vector: ``mean``, or ``cls``, the first token's.
    """

    trains_head: ClassVar[bool] = False
    figures: ClassVar[tuple[str, ...]] = ("vector_loss", "masked_share")

    def set_objective(self, *, width: int, pooling: str = MEAN) -> None:
        """Set the options of the class; ValueError if one is out of range."""
        if pooling not in (MEAN, CLS):
            raise ValueError(f"pooling must be {MEAN} or {CLS}, got {pooling!r}")
        self.pooling = pooling
        if width != self.config.hidden_size:
            raise ValueError(
                f"the vectors are {width} wide, those of the model {self.config.hidden_size}; a narrower model learns "
                "their projections on leading_directions, and no model can be wider than its teacher"
            )

    def _objective(self, labels: Tensor, *, vectors: Tensor | None = None, **inputs: Tensor) -> Objective:
        if vectors is None:
            raise ValueError("the batch has no vectors; make it with SentenceCollator")
        student_vectors = pooled_vectors(self._encoded(**inputs)[0], inputs["attention_mask"], self.pooling)
        if vectors.shape != student_vectors.shape:
            raise ValueError(
                f"the vectors of the batch have the shape {tuple(vectors.shape)}, those of the model "
                f"{tuple(student_vectors.shape)}; a narrower model needs SentenceVectors with directions"
            )
        losses = vector_errors(student_vectors, vectors)
        number = torch.ones_like(labels[:, 0])
        return losses.sum(), number.sum(), [losses.detach(), number, torch.zeros_like(number)]
