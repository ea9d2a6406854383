"""A training that kills itself: ``python -m tests.huggingface.resumed_training OUTPUT``, or a command of ``mlsm``.

``MLSM_KILLED_AT`` is the update before which it dies. Without it, the training goes on from its last checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments, trainer

from mlsm_plugin.cli.main import main
from mlsm_plugin.huggingface import MaskedLmCollator, MaskedLmModel, Masking, PretrainingSequences, prepare
from mlsm_plugin.huggingface.training import last_checkpoint
from tests.huggingface.tiny_corpus import make_tokenizer, random_ids, tiny_bert

KILLED_AT = int(os.environ.get("MLSM_KILLED_AT", "-1"))


class Killed(TrainerCallback):
    """Kills this process."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def train(output: Path) -> None:
    """15 updates on 22 sequences, of which an epoch has 6, with dropout; evaluated on the same sequences."""
    arguments = TrainingArguments(
        str(output), max_steps=15, per_device_train_batch_size=4, learning_rate=1e-2, seed=3, save_steps=2,
        eval_strategy="steps", eval_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data = PretrainingSequences(random_ids(22))
    model = MaskedLmModel.of(tiny_bert(hidden_dropout_prob=0.1))
    collator = MaskedLmCollator(make_tokenizer(), Masking(mask_prob=0.4))
    prepared = prepare(Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collator))
    prepared.train(resume_from_checkpoint=last_checkpoint(output))
    prepared.save_model(str(output / "model"))


if __name__ == "__main__":
    trainer.DEFAULT_CALLBACKS.append(Killed)
    if sys.argv[1] == "adapt":
        sys.exit(main(sys.argv[1:]))
    train(Path(sys.argv[1]))
