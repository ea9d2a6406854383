"""The fairseq task of TACO: masked LM with a token-level contrastive loss (Fu et al., ACL 2022)."""

from typing import Any

from fairseq.tasks import register_task

from mlsm_plugin.fairseq_door.seams.batches import UpdateLookahead
from mlsm_plugin.fairseq_door.tasks.portable_masked_lm import PortableMaskedLMConfig, PortableMaskedLMTask


@register_task("taco", dataclass=PortableMaskedLMConfig)
class TacoTask(PortableMaskedLMTask):
    """Masked LM that announces all batches of an update to its criterion, ``token_contrastive``, before the first."""

    criterions = ("token_contrastive", "masked_lm")
    announces_updates = True  # the criterion requires this

    def __init__(self, cfg: PortableMaskedLMConfig, dictionary: Any) -> None:
        super().__init__(cfg, dictionary)
        self._lookahead = UpdateLookahead()

    def get_batch_iterator(self, *args: Any, **kwargs: Any) -> Any:
        return self._lookahead.watch(super().get_batch_iterator(*args, **kwargs))

    def train_step(
        self, sample: Any, model: Any, criterion: Any, optimizer: Any, update_num: int, ignore_grad: bool = False
    ) -> Any:
        batches = self._lookahead.take()
        if batches and hasattr(criterion, "begin_update"):
            batches = [self.with_share(batch, update_num) for batch in batches]
            criterion.begin_update(batches, update_num, device=sample["target"].device)
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)
