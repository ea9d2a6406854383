"""``python counted_faults.py fairseq|huggingface FOLDER``: 31 updates whose logits have more than 32 MB.

Prints the loss of each update, and how many page faults it caused.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np

PIECES, TOKENS, UPDATES = 12_000, 64, 31
BATCH = 64  # 64 * 64 * 0.3 masked tokens, 12,000 float32 numbers each: 59 MB

FLAGS = (
    "--task plain_masked_lm --criterion masked_lm --arch mlsm_modern_tiny --encoder-layers 1 --encoder-embed-dim 16 "
    "--encoder-attention-heads 1 --sample-break-mode none --mask-prob 0.3 --optimizer fused_adamw --lr 1e-3 --cpu "
    f"--tokens-per-sample {TOKENS} --batch-size {BATCH} --max-update {UPDATES} --no-save --disable-validation "
    "--num-workers 0"
)


class PageFaults:
    """The page faults of this process between two calls."""

    def __init__(self) -> None:
        self.counted = 0

    def since(self) -> int:
        before = self.counted
        self.counted = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return self.counted - before


def samples() -> np.ndarray:
    """Ids of pieces, ``(samples, TOKENS - 2)``."""
    return np.random.default_rng(1).integers(5, PIECES, size=(BATCH * UPDATES, TOKENS - 2))


def with_fairseq(folder: Path) -> None:
    import fairseq_cli.train
    from fairseq.trainer import Trainer

    import mlsm_plugin
    from mlsm_plugin.fairseq_plugin.compat.binarized_files import StreamingMMapBuilder

    folder.mkdir(exist_ok=True)
    (folder / "dict.txt").write_text("".join(f"piece{number} 1\n" for number in range(PIECES)), encoding="utf-8")
    for split in ("train", "valid"):
        builder = StreamingMMapBuilder(str(folder / f"{split}.bin"), PIECES + 5)
        rows = samples()
        builder.add_sentences(rows.flatten(), np.full(len(rows), rows.shape[1]))
        builder.finalize(str(folder / f"{split}.idx"))
    faults, train_step = PageFaults(), Trainer.train_step

    def counted(trainer: Trainer, *arguments: object, **named: object) -> object:
        log = train_step(trainer, *arguments, **named)
        print(log["loss"], faults.since())
        return log

    Trainer.train_step = counted
    plugin = Path(mlsm_plugin.__file__).parent
    sys.argv = f"fairseq-train {folder} --user-dir {plugin} {FLAGS}".split()
    fairseq_cli.train.cli_main()


def with_huggingface(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast, Trainer, TrainingArguments
    from transformers.trainer_callback import TrainerCallback

    from mlsm_plugin.huggingface import MaskedLmCollator, MaskedLmModel, Masking, PretrainingSequences, prepare

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {piece: number for number, piece in enumerate(special)}
    vocabulary |= {f"w{number}": number for number in range(5, PIECES)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]")),
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip
    torch.manual_seed(1)
    bert = BertForMaskedLM(
        BertConfig(vocab_size=PIECES, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=32)
    )
    faults = PageFaults()

    class Counted(TrainerCallback):
        def on_log(self, *arguments: object, logs: dict[str, float], **named: object) -> None:
            if "grad_norm" in logs:
                print(logs["loss"], faults.since())

    arguments = TrainingArguments(
        str(folder / "trainer"), max_steps=UPDATES, per_device_train_batch_size=BATCH, logging_steps=1, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        MaskedLmModel.of(bert),
        arguments,
        train_dataset=PretrainingSequences([np.array([2, *row, 3]) for row in samples()]),
        data_collator=MaskedLmCollator(tokenizer, Masking(mask_prob=0.3)),
        callbacks=[Counted()],
    )
    prepare(trainer).train()


if __name__ == "__main__":
    {"fairseq": with_fairseq, "huggingface": with_huggingface}[sys.argv[1]](Path(sys.argv[2]))
