"""A training in a process of its own: ``torchrun -m tests.huggingface.trainer_process CODES OUTPUT BATCH_SIZE``.

With the name of an objective in the place of the codes, an evaluation: ``OBJECTIVE OUTPUT``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from mlsm_plugin.huggingface import (
    LatentSemanticCollator,
    LatentSemanticModel,
    MaskedLmCollator,
    MaskedLmModel,
    Masking,
    PretrainingSequences,
    SpanContrastiveModel,
    SpanGroups,
    SpanGroupsCollator,
    TokenContrastiveCollator,
    TokenContrastiveModel,
    prepare,
)
from tests.huggingface.tiny_corpus import ATOMS, make_tokenizer, random_ids, tiny_bert


def train(codes: str, output: str, batch_size: int) -> Any:
    """Six updates; the model is written to OUTPUT/model, and the logs to OUTPUT/model/trainer_state.json."""
    data = PretrainingSequences(random_ids(24), codes)
    arguments = TrainingArguments(
        output, max_steps=6, per_device_train_batch_size=batch_size, logging_steps=1, learning_rate=1e-2,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, average_tokens_across_devices=True,
    )  # fmt: skip
    trainer = Trainer(
        LatentSemanticModel.of(tiny_bert(), num_atoms=ATOMS),
        arguments,
        train_dataset=data,
        eval_dataset=data,
        data_collator=LatentSemanticCollator(make_tokenizer(), Masking(mask_prob=0.4)),
    )
    prepare(trainer).evaluate()  # the training after it is that of all ranks together
    trainer.train()
    trainer.evaluate()
    trainer.save_model(f"{output}/model")
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(f"{output}/model/trainer_state.json")


def evaluate(objective: str, output: str) -> None:
    """Evaluate 23 sequences, or 5 groups, one in a batch; the figures are written to OUTPUT."""
    tokenizer, bert = make_tokenizer(), tiny_bert()
    model: Any
    data: Any
    collator: Any
    if objective == "npm":
        model, data = SpanContrastiveModel.of(bert), SpanGroups(random_ids(20), group_size=4)
        collator = SpanGroupsCollator(tokenizer, max_length=40)
    else:
        data = PretrainingSequences(random_ids(23))
        taco = objective == "taco"
        model = (TokenContrastiveModel if taco else MaskedLmModel).of(bert)
        collator = (TokenContrastiveCollator if taco else MaskedLmCollator)(tokenizer, Masking(mask_prob=0.4))
    arguments = TrainingArguments(
        f"{output}-trainer", per_device_eval_batch_size=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = prepare(Trainer(model, arguments, eval_dataset=data, data_collator=collator))
    figures = trainer.evaluate()
    if trainer.is_world_process_zero():
        Path(output).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        evaluate(*sys.argv[1:])
    else:
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
