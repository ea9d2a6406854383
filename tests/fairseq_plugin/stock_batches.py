"""Batches of fairseq's own masked_lm, and their samples, which other batches must hold."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from fairseq import tasks
from fairseq.tasks.masked_lm import MaskedLMTask

from tests.tiny_run import batches, training_config

PAD = 1
NEVER_MASKED = (0, 2, 3)  # <s>, </s> and <unk>, which fairseq masks
Sample = tuple[torch.Tensor, torch.Tensor]


def stock_batches(data: object, *flags: object, sentencepiece_model: object = None, **arguments: Any) -> list[Any]:
    """The batches of fairseq's own masked_lm."""
    cfg = training_config(data, *flags, task="masked_lm", criterion="masked_lm")
    task = tasks.setup_task(cfg.task)
    assert type(task) is MaskedLMTask
    if sentencepiece_model:  # stock masked_lm reads options that nothing gives it
        task.args = Namespace(bpe="sentencepiece", sentencepiece_model=str(sentencepiece_model))
    return batches(cfg, task=task, **arguments)


def samples_of(found: list[Any]) -> dict[int, Sample]:
    """The inputs and the targets of each sample, ``(T,)`` each, by its number; batches must agree with their counts."""
    samples = {}
    for batch in found:
        lengths = batch["net_input"]["src_lengths"]
        assert (batch["nsentences"], batch["ntokens"]) == (len(lengths), int(lengths.sum()))
        rows = zip(batch["id"].tolist(), batch["net_input"]["src_tokens"], batch["target"], lengths, strict=True)
        for number, tokens, target, length in rows:
            assert bool((tokens[length:] == PAD).all() and (target[length:] == PAD).all())
            samples[number] = tokens[:length], target[:length]
    assert len(samples) == sum(batch["nsentences"] for batch in found)
    return samples


def original_of(sample: Sample) -> torch.Tensor:
    """The tokens of a sample before masking."""
    tokens, target = sample
    return torch.where(target != PAD, target, tokens)


def known_masks(sample: Sample) -> Sample:
    """A sample of fairseq's without the masks of special and unknown tokens."""
    tokens, target = sample
    kept = torch.isin(target, torch.tensor(NEVER_MASKED))
    return torch.where(kept, target, tokens), target.masked_fill(kept, PAD)
