"""A training in a process of its own: ``torchrun -m tests.huggingface.trainer_process CODES OUTPUT BATCH_SIZE``."""

from __future__ import annotations

import sys
from typing import Any

from transformers import Trainer, TrainingArguments

from mlsm_plugin.huggingface import LatentSemanticCollator, LatentSemanticModel, Masking, PretrainingSequences, prepare
from tests.huggingface.tiny_corpus import ATOMS, make_tokenizer, random_ids, tiny_bert


def train(codes: str, output: str, batch_size: int) -> Any:
    """Six updates; the model is written to OUTPUT/model, and the logs to OUTPUT/model/trainer_state.json."""
    data = PretrainingSequences(random_ids(24), codes)
    arguments = TrainingArguments(
        output, max_steps=6, per_device_train_batch_size=batch_size, logging_steps=1, learning_rate=1e-2,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        LatentSemanticModel.of(tiny_bert(), num_atoms=ATOMS),
        arguments,
        train_dataset=data,
        eval_dataset=data,
        data_collator=LatentSemanticCollator(make_tokenizer(), Masking(mask_prob=0.4)),
    )
    prepare(trainer).train()
    trainer.evaluate()
    trainer.save_model(f"{output}/model")
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(f"{output}/model/trainer_state.json")


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
