"""Distillation of a teacher's vectors of texts: mean squared error (Reimers and Gurevych, EMNLP 2020)."""

from fairseq.criterions import register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor

from mlsm_plugin.core.losses.sentence_vectors import mean_vectors, vector_errors
from mlsm_plugin.core.losses.zero_gradients import zero_with_gradient
from mlsm_plugin.fairseq_plugin.compat.batches import LoggingOutput, Sample
from mlsm_plugin.fairseq_plugin.compat.model_parts import lm_head
from mlsm_plugin.fairseq_plugin.criterions.logged_means import LoggedMeans, SummedCriterion

DIGITS = 5  # entries of vectors, and so errors, can be small


@register_criterion("sentence_vectors", dataclass=FairseqDataclass)
class SentenceVectorsCriterion(SummedCriterion):
    """The squared error of a text's vector, the mean of its last hidden states; a mean over entries and texts.

    The masked-LM head is not trained. ValueError if the task has no vectors.
    """

    def __init__(self, task: FairseqTask) -> None:
        super().__init__(task)
        if getattr(task, "computes", None) != "vectors":
            raise ValueError("--criterion sentence_vectors needs --task sentence_vectors, which has the vectors")

    def forward(
        self, model: BaseFairseqModel, sample: Sample, reduce: bool = True
    ) -> tuple[Tensor, Tensor, LoggingOutput]:
        """The errors summed over the texts that have a vector, their number, and the logging output."""
        net_input = sample["net_input"]
        hidden = model(**net_input, features_only=True)[0].float()
        predicted = mean_vectors(hidden, net_input["src_tokens"].ne(self.padding_idx))
        loss = vector_errors(predicted, sample["vectors"]).sum() + zero_with_gradient(lm_head(model).parameters())
        number = sample["vectors"].any(dim=1).sum()
        logging_output = {
            "loss": loss.detach(),
            "sample_size": number,
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
        }
        return loss, number, logging_output

    @staticmethod
    def reduce_metrics(logging_outputs: list[LoggingOutput]) -> None:
        """Log the mean over the texts of the updates."""
        means = LoggedMeans(logging_outputs)
        means.log("loss", "loss", means.total("sample_size"), digits=DIGITS)
