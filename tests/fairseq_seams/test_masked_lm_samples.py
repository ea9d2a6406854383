"""fairseq's masked_lm still gets its samples from the method that this package replaces."""

from __future__ import annotations

from typing import Any

import torch
from fairseq import tasks
from fairseq.data import ListDataset

from mlsm_plugin.fairseq_seams.batches import OwnSamplesMaskedLMTask
from tests.conftest import Pipeline
from tests.tiny_run import training_config

SEAM = (
    "seam mlsm_plugin/fairseq_seams/masked_lm_samples.py: fairseq's MaskedLMTask.load_dataset no longer takes its "
    "samples from _load_dataset_split, so that sentences longer than a sample are not cut"
)


def test_load_dataset_takes_its_samples_from_the_subclass(pipeline: Pipeline) -> None:
    asked: list[tuple[str, int, bool]] = []

    class Task(OwnSamplesMaskedLMTask):
        def load_samples(self, split: str, epoch: int, combine: bool) -> Any:
            asked.append((split, epoch, combine))
            return ListDataset([torch.tensor([0, 5, 6, 2]), torch.tensor([0, 7, 2])], [4, 3])

        def tokenizer_options(self) -> dict[str, Any]:
            return {}

    cfg = training_config(pipeline.data_bin, "--mask-prob", 0.5, task="masked_lm", criterion="masked_lm")
    stock = tasks.setup_task(cfg.task)
    task = Task(cfg.task, stock.source_dictionary)
    task.load_dataset("valid", epoch=3, combine=True)
    assert asked == [("valid", 3, True)], SEAM
    dataset = task.dataset("valid")
    assert len(dataset) == 2, SEAM
    batch = dataset.collater([dataset[0], dataset[1]])
    tokens = torch.where(batch["target"] != 1, batch["target"], batch["net_input"]["src_tokens"])
    assert tokens.tolist() == [[0, 5, 6, 2], [0, 7, 2, 1]], SEAM
