#!/usr/bin/env python3
"""Continue the pre-training of a Hugging Face masked LM on a text with MLSM + MLM, TACO or MLM, in the Trainer.

    python examples/huggingface/adapt.py MODEL train.txt valid.txt OUTPUT [--objective mlsm+mlm|taco|mlm]

``mlsm adapt`` does the same in one command, and resumes after a stop. This script shows the parts.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import transformers
import yaml

from mlsm_plugin import huggingface as hf


def main() -> None:
    args = options()
    # 1. Text to sequences of ids.
    data = {}
    for split, text in {"train": args.train, "valid": args.valid}.items():
        ids, _ = hf.write_text_sequences(
            [text], args.model, f"{args.output}/{split}.tokens", max_length=args.max_length
        )
        data[split] = hf.PretrainingSequences(ids)
    # 2. A stock model with the objective, and the collator that makes its batches.
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model: transformers.PreTrainedModel = hf.MaskedLmModel.from_pretrained(args.model)
    collator: Callable = hf.MaskedLmCollator(tokenizer)
    if args.objective == "taco":
        model = hf.TokenContrastiveModel.from_pretrained(args.model)
        collator = hf.TokenContrastiveCollator(tokenizer)
    elif args.objective == "mlsm+mlm":
        data = coded(data, args)
        model = hf.LatentSemanticModel.from_pretrained(args.model, num_atoms=data["train"].num_atoms)
        collator = hf.LatentSemanticCollator(tokenizer)
    # 3. The library's Trainer.
    further = yaml.safe_load(Path(args.config).read_text()) if args.config else {}
    arguments = transformers.TrainingArguments(
        f"{args.output}/checkpoints",
        max_steps=args.updates,
        warmup_steps=args.updates // 16,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=args.batch_size,
        report_to=[],
        **further,
    )
    trainer = hf.prepare(transformers.Trainer(model, arguments, collator, data["train"], data["valid"]))
    print("before:", trainer.evaluate())
    trainer.train()
    print("after:", trainer.evaluate())
    hf.save_pretrained(f"{args.output}/model", model, tokenizer)  # a stock folder; the latent head lies beside it


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="folder or hub name of a masked LM with its tokenizer")
    parser.add_argument("train", help="training text: a sentence a line, blank lines between documents")
    parser.add_argument("valid", help="text to evaluate on")
    parser.add_argument("output", help="folder for everything that is made")
    parser.add_argument("--objective", default="mlsm+mlm", choices=["mlsm+mlm", "taco", "mlm"])
    parser.add_argument("--layer", type=int, default=-1, help="hidden state that is coded (default: the last)")
    parser.add_argument("--atoms", type=int, default=3000, help="number of latent properties")
    parser.add_argument("--max-length", type=int, default=128, help="ids of the longest sequence")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--config", help="YAML file with further TrainingArguments, such as adapt.yaml")
    return parser.parse_args()


def coded(data: dict[str, hf.PretrainingSequences], args: argparse.Namespace) -> dict[str, hf.PretrainingSequences]:
    """Learn latent properties from the starting model's own hidden states, and code both texts with them."""
    layers = transformers.AutoConfig.from_pretrained(args.model).num_hidden_layers
    layer = args.layer % (layers + 1)
    learning = hf.LearningSettings(layer=layer, coder="topk", atoms=args.atoms)
    folder = f"{args.output}/dictionary"
    coder = hf.learn_from_sequences(data["train"].sequences, args.model, output=folder, settings=learning)
    for split in list(data):
        ids = data[split].sequences
        store = f"{args.output}/{split}.codes"
        hf.encode_sequences(ids, args.model, coder=coder, output=store, settings=hf.CodingSettings(layer=layer))
        data[split] = hf.PretrainingSequences(ids, store)
    return data


if __name__ == "__main__":  # processes that make batches may import this file
    main()
