"""The fairseq task of TACO: masked LM with a token-level contrastive loss (Fu et al., ACL 2022)."""

from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary, FairseqDataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.optim import FairseqOptimizer
from fairseq.tasks import register_task

from mlsm_plugin.core.masking.masked_share import check_usable_share
from mlsm_plugin.fairseq_plugin.compat.batches import Sample, UpdateLookahead, batches_to_look_at
from mlsm_plugin.fairseq_plugin.tasks.base_masked_lm import BaseMaskedLMConfig, BaseMaskedLMTask
from mlsm_plugin.fairseq_plugin.tasks.plugin_task import StepResult

FEW_PAIRS = (
    "an anchor needs another known token in its sequence, and other sequences in its batch: use longer samples, a "
    "larger --batch-size or --max-tokens, or --negatives-across-ranks"
)


@register_task("taco", dataclass=BaseMaskedLMConfig)
class TacoTask(BaseMaskedLMTask):
    """Masked LM that announces all batches of an update to ``token_contrastive``, its criterion, before the first."""

    criterions = ("token_contrastive", "masked_lm")
    announces_updates = True  # the criterion requires this

    def __init__(self, cfg: BaseMaskedLMConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg, dictionary)
        self._lookahead = UpdateLookahead()
        self._criterion: FairseqCriterion | None = None
        self._is_checked = False

    def build_criterion(self, cfg: FairseqDataclass, *args: object, **kwargs: object) -> FairseqCriterion:
        self._criterion = super().build_criterion(cfg, *args, **kwargs)
        return self._criterion

    def get_batch_iterator(self, dataset: FairseqDataset, *args: object, **kwargs: object) -> EpochBatchIterator:
        """The batches of a dataset; ValueError if hardly any anchor in training has a positive and negatives."""
        iterator = self._lookahead.watch(super().get_batch_iterator(dataset, *args, **kwargs))
        trains = dataset is self.datasets.get(self.cfg.train_subset)
        criterion = self._criterion
        if trains and not self._is_checked and criterion is not None and getattr(criterion, "contrasts", False):
            self._is_checked = True
            counts = map(criterion.contrasted_counts, batches_to_look_at(iterator))
            anchors = f"anchors of {self.cfg.train_subset} have a positive and negatives"
            check_usable_share(anchors, counts, remedy=FEW_PAIRS)
        return iterator

    def train_step(
        self,
        sample: Sample,
        model: BaseFairseqModel,
        criterion: FairseqCriterion,
        optimizer: FairseqOptimizer,
        update_num: int,
        ignore_grad: bool = False,
    ) -> StepResult:
        batches = self._lookahead.take()
        if batches and hasattr(criterion, "begin_update"):
            batches = [self.with_share(batch, update_num) for batch in batches]
            criterion.begin_update(batches, update_num, device=sample["target"].device)
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)
