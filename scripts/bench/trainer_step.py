#!/usr/bin/env python3
"""Measure a step of each objective in Hugging Face's Trainer, compared with stock MLM.

    python scripts/bench/trainer_step.py [--type bert] [--layers 4] [--dim 256] [--vocab 8000] [--rounds 7]

In each round every training takes ``--steps`` updates in transformers' ``Trainer``, in a rotating order. A step is
timed from the collation of the batch in the main process to the end of the optimizer's step. The figure of a round is
the median of its steps except the first two; the ratio is the median over the rounds of the ratios within a round:

- ``stock``: the stock model with transformers' ``DataCollatorForLanguageModeling``;
- ``mlm``: ``MaskedLmModel``, whose head only sees the masked tokens;
- ``mlm, no attention dropout``: the same, as ``mlsm adapt`` trains it;
- ``mlsm + mlm``: ``LatentSemanticModel`` with codes from a store;
- ``mlsm + mlm, online``: the same with codes of a top-k SAE of an auxiliary model, which reads each batch;
- ``regression + mlm``: ``StateRegressionModel`` with the same auxiliary model;
- ``taco``: ``TokenContrastiveModel``.

Text, codes and weights are random; codes have the mean length measured on real text. The auxiliary model has the size
of all-MiniLM-L6-v2 and reads up to its layer 5.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    logging,
)

from mlsm_plugin.core.hidden_states.hf_encoder import built_with_dropout
from mlsm_plugin.core.sparse_coding.code_store_writer import CodeStoreWriter
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig, SaeWeights, SparseAutoencoder
from mlsm_plugin.huggingface import (
    AuxiliaryTextCollator,
    HuggingFaceEncoder,
    LatentSemanticCollator,
    LatentSemanticModel,
    MaskedLmCollator,
    MaskedLmModel,
    PretrainingSequences,
    StateRegressionModel,
    TokenContrastiveCollator,
    TokenContrastiveModel,
    TokenSequences,
)

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TARGETS = {"mlsm + mlm": 1.10, "taco": 1.15}


class StepTimes(TrainerCallback):
    """Records when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def seconds(self) -> float:
        """Median of the steps except the first two."""
        return statistics.median(np.diff(self.ends)[1:])


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of ``size`` words."""
    words = [*SPECIAL, *(f"w{number}" for number in range(size - len(SPECIAL)))]
    vocabulary = {word: number for number, word in enumerate(words)}
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True))
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{f"{name}_token": word for name, word in names.items()})


def make_codes(sequences: TokenSequences, atoms: int, nonzeros: int, folder: Path) -> Path:
    """Random codes of every token."""
    rng = np.random.default_rng(0)
    rows = np.arange(0, (sequences.num_tokens + 1) * nonzeros, nonzeros)
    columns = np.sort(rng.integers(atoms // nonzeros, size=(sequences.num_tokens, nonzeros)), axis=1)
    columns = columns + np.arange(nonzeros) * (atoms // nonzeros)
    values = rng.random(columns.size, np.float32) + 0.1
    codes = sp.csr_matrix((values, columns.ravel(), rows), shape=(sequences.num_tokens, atoms))
    meta = {"n_atoms": atoms, "fingerprints": {"split": sequences.fingerprint, "dictionary": "random"}}
    writer = CodeStoreWriter(folder, meta, [0, sequences.num_tokens])
    writer.write_shard(0, codes)
    writer.finish()
    return folder


def make_auxiliary(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, folder: Path) -> HuggingFaceEncoder:
    """An encoder of 6 layers, 384 wide, up to layer 5."""
    config = AutoConfig.for_model(
        "bert",
        vocab_size=args.vocab,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    device = "cpu" if args.cpu or not torch.cuda.is_available() else "cuda"
    return HuggingFaceEncoder(folder, layer=5, device=device, fp16=args.bf16)


def make_coder(dim: int, atoms: int) -> SaeCoder:
    """A top-k SAE with random weights and 16 active atoms."""
    decoder = torch.nn.functional.normalize(torch.randn(atoms, dim), dim=1)
    weights = SaeWeights(decoder, torch.zeros(atoms), decoder, torch.zeros(dim))
    return SaeCoder(SparseAutoencoder(SaeConfig("topk", k=16), weights))


def trainings(args: argparse.Namespace, folder: Path) -> dict[str, tuple[Any, Any, Any]]:
    """Model, dataset and collator of each training."""
    tokenizer = make_tokenizer(args.vocab)
    rng = np.random.default_rng(1)
    ids = rng.integers(len(SPECIAL), args.vocab, size=(args.steps * args.batch_size, args.block))
    ids[:, 0] = tokenizer.cls_token_id
    ids[:, -1] = tokenizer.sep_token_id
    sequences = TokenSequences(ids)
    codes = make_codes(sequences, args.atoms, args.nonzeros, folder / "codes")

    def model(attention_dropout: float | None = None) -> Any:
        torch.manual_seed(1)
        sizes = {"hidden_size": args.dim, "num_hidden_layers": args.layers, "num_attention_heads": args.dim // 64}
        roles = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "cls", "sep")}
        roles |= {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
        config = AutoConfig.for_model(
            args.type, vocab_size=args.vocab, intermediate_size=4 * args.dim, **sizes, **roles
        )
        build = AutoModelForMaskedLM.from_config
        return build(config) if attention_dropout is None else built_with_dropout(config, build, attention_dropout)

    auxiliary = make_auxiliary(args, tokenizer, folder / "auxiliary")
    online = LatentSemanticModel.of(model(), num_atoms=args.atoms)
    online.compute_codes(auxiliary, make_coder(auxiliary.dim, args.atoms))
    plain = PretrainingSequences(sequences)
    stock = [{"input_ids": row} for row in ids]
    return {
        "stock": (model(), stock, DataCollatorForLanguageModeling(tokenizer)),
        "mlm": (MaskedLmModel.of(model()), plain, MaskedLmCollator(tokenizer)),
        "mlm, no attention dropout": (MaskedLmModel.of(model(0.0)), plain, MaskedLmCollator(tokenizer)),
        "mlsm + mlm": (
            LatentSemanticModel.of(model(), num_atoms=args.atoms),
            PretrainingSequences(sequences, codes),
            LatentSemanticCollator(tokenizer),
        ),
        "mlsm + mlm, online": (online, plain, AuxiliaryTextCollator(tokenizer)),
        "regression + mlm": (
            StateRegressionModel.of(model(), auxiliary=auxiliary),
            plain,
            AuxiliaryTextCollator(tokenizer),
        ),
        "taco": (TokenContrastiveModel.of(model()), plain, TokenContrastiveCollator(tokenizer)),
    }


def step_seconds(training: tuple[Any, Any, Any], args: argparse.Namespace, folder: Path) -> float:
    """Median seconds of a step."""
    model, dataset, collator = training
    times = StepTimes()
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        bf16=args.bf16,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=args.cpu or not torch.cuda.is_available(),
        remove_unused_columns=False,
    )
    Trainer(model, arguments, train_dataset=dataset, data_collator=collator, callbacks=[times]).train()
    return times.seconds()


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--type", default="bert", help="type of the model, as in configurations of transformers")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--atoms", type=int, default=3000)
    parser.add_argument("--nonzeros", type=int, default=42, help="atoms of a code")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--block", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=12, help="updates of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    return parser.parse_args()


def main() -> int:
    """Time the rounds and print a table; returns 1 if a target is missed."""
    args = parse_arguments()
    logging.set_verbosity_error()
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        every = trainings(args, folder)
        for number in range(args.rounds):
            order = list(every)[number % len(every) :] + list(every)[: number % len(every)]
            for kind in order:
                seconds.setdefault(kind, []).append(step_seconds(every[kind], args, folder))
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    device = "cpu" if args.cpu or not torch.cuda.is_available() else torch.cuda.get_device_name()
    print(f"{args.type} {args.layers} x {args.dim}, vocabulary {args.vocab}, {args.batch_size} x {args.block} tokens")
    print(f"{device}, {torch.get_num_threads()} threads, bf16 {args.bf16}, torch {torch.__version__}\n")
    print("| training | ms | ratio to stock | to mlm | target |\n| --- | --- | --- | --- | --- |")
    missed = False
    for kind in every:
        ratios = {
            peer: statistics.median(np.array(seconds[kind]) / np.array(seconds[peer])) for peer in ("stock", "mlm")
        }
        target = TARGETS.get(kind)
        missed |= target is not None and ratios["stock"] > target
        print(
            f"| {kind} | {1000 * statistics.median(seconds[kind]):.1f} | {ratios['stock']:.3f} | {ratios['mlm']:.3f} | "
            f"{target or ''} |"
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
