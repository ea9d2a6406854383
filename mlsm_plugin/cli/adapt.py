"""``mlsm adapt``: continue the pre-training of a Hugging Face model on a text; needs no fairseq."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from typing import TYPE_CHECKING, Any

from mlsm_plugin.cli.coding_options import add_max_unk_rate, check_positive
from mlsm_plugin.cli.dictionary import add_sae_options
from mlsm_plugin.cli.next_commands import print_next
from mlsm_plugin.cli.output_folder import output_folder

if TYPE_CHECKING:
    from mlsm_plugin.auxiliary.coder_learning import LearningSettings

OBJECTIVES = ("mlm", "mlsm", "mlsm+mlm", "taco", "npm")
CODERS = ("topk", "batchtopk", "lasso")
EPOCHS = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.epilog = (
        "Run the same command again to resume after a stop. Under torchrun, all processes code and train. "
        "docs/huggingface.md shows the same in Python."
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub name of a masked LM with its tokenizer")
    parser.add_argument(
        "--text", nargs="+", required=True, metavar="FILE",
        help="training text, one sentence a line and blank lines between documents; may be .gz, .bz2, .xz",
    )  # fmt: skip
    parser.add_argument(
        "--valid", nargs="+", default=[], metavar="FILE",
        help="text to evaluate on (default: the last 2 %% of the sequences are held out, at most 2,000)",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=output_folder, required=True, metavar="DIR", help="folder for everything that is made"
    )
    parser.add_argument("--objective", default="mlsm+mlm", choices=OBJECTIVES, help="what the model is trained for")
    parser.add_argument("--max-length", type=int, metavar="N",
                        help="ids of the longest sequence (default: what the model can take, at most 512)")  # fmt: skip
    parser.add_argument("--mask-prob", type=float, default=0.15, metavar="P", help="share of the tokens to mask")
    parser.add_argument("--whole-words", action="store_true", help="mask all pieces of a word, or none")
    add_max_unk_rate(parser)
    _add_code_options(parser.add_argument_group("codes, for mlsm and mlsm+mlm"))
    _add_training_options(parser.add_argument_group("training"))


def _add_code_options(group: Any) -> None:
    group.add_argument(
        "--auxiliary", metavar="MODEL", help="model whose hidden states are coded (default: MODEL itself, as it is)"
    )
    group.add_argument("--layer", type=int, metavar="L", help="hidden state to code (default: the last)")
    group.add_argument("--coder", default=CODERS[0], choices=CODERS, help="kind of coder, as in `mlsm dictionary`")
    group.add_argument("--atoms", type=int, default=3000, metavar="N", help="number of latent properties")
    group.add_argument("--tokens", type=int, default=1_000_000, metavar="N", help="hidden states to learn from")
    group.add_argument(
        "--lambda", dest="lambda_", type=float, metavar="X", help="lasso: weight of the L1 penalty (default: 0.05)"
    )
    group.add_argument("--iterations", type=int, metavar="N", help="lasso: number of mini-batches (default: 1000)")
    add_sae_options(group)
    group.add_argument("--latent-top", type=int, metavar="N", help="keep the N strongest atoms of each code")


def _add_training_options(group: Any) -> None:
    group.add_argument("--epochs", type=float, metavar="F", help=f"passes over the text (default: {EPOCHS:g})")
    group.add_argument("--updates", type=int, metavar="N", help="number of updates, instead of --epochs")
    group.add_argument("--batch-size", type=int, default=32, metavar="N",
                       help="sequences (npm: groups of 16 sequences) of a batch on each device")  # fmt: skip
    group.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches of an update")
    group.add_argument("--learning-rate", type=float, default=2e-4, metavar="F", help="largest learning rate of AdamW")
    group.add_argument("--warmup", type=float, default=0.06, metavar="F", help="share of the updates with rising rate")
    group.add_argument(
        "--bf16",
        default="auto",
        choices=["auto", "on", "off"],
        help="bfloat16, and codes in half precision; auto: where the machine is fast in bfloat16",
    )
    group.add_argument(
        "--evaluate-every", type=int, default=500, metavar="N", help="updates between evaluations and checkpoints"
    )
    group.add_argument("--seed", type=int, default=1, metavar="N", help="random seed of everything")
    group.add_argument("--workers", type=int, default=0, metavar="N", help="processes that make batches")
    group.add_argument("--threads", type=int, metavar="N", help="number of CPU threads (default: all cores)")
    group.add_argument("--cpu", action="store_true", help="do not use a GPU")


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Adapt the model, and print the figures before and after."""
    # what is checked now does not fail hours later
    check_positive(args, "atoms", "tokens", "lambda_", "iterations", "k", "latent_top", "updates", "max_length")
    check_positive(args, "threads")
    if args.epochs is not None and args.updates is not None:
        raise ValueError("pass --epochs or --updates, not both")
    import torch

    from mlsm_plugin.files.work_share import work_share
    from mlsm_plugin.huggingface.adaptation import WITH_CODES, Adaptation, adapt
    from mlsm_plugin.huggingface.collators import Masking
    from mlsm_plugin.huggingface.training import TrainingSettings
    from mlsm_plugin.sparse_coding.thread_counts import torch_threads

    training = TrainingSettings(
        updates=args.updates or 1,
        batch_size=args.batch_size,
        accumulate=args.accumulate,
        learning_rate=args.learning_rate,
        warmup=args.warmup,
        bf16=args.bf16,
        evaluate_every=args.evaluate_every,
        seed=args.seed,
        workers=args.workers,
        cpu=args.cpu,
    )
    with_codes = args.objective in WITH_CODES
    with torch_threads(args.threads):
        figures = adapt(
            Adaptation(
                model=args.model,
                texts=args.text,
                output=args.output,
                objective=args.objective,
                valid_texts=args.valid,
                auxiliary=args.auxiliary if with_codes else None,
                learning=_learning(args, half=training.in_bf16) if with_codes else None,
                latent_top=args.latent_top,
                masking=Masking(mask_prob=args.mask_prob, whole_words=args.whole_words, seed=args.seed),
                max_length=args.max_length,
                max_unk_rate=args.max_unk_rate,
                training=training,
                epochs=None if args.updates else EPOCHS if args.epochs is None else args.epochs,
            )
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # its threads can abort a process that ends without this
    if work_share(None, None, os.environ).index == 0:
        _print_figures(figures, args.output)
    return 0


def _print_figures(figures: dict[str, dict[str, float]], output: str) -> None:
    for name, value in figures["after"].items():
        before = figures["before"].get(name)
        print(f"held-out {name}: {'' if before is None else f'{before:.4f} before, '}{value:.4f} after")
    print(f"model: {output}/model")
    path = json.dumps(f"{output}/model", ensure_ascii=False)  # a literal of Python, too
    task = "fill-mask" if "mlm_loss" in figures["after"] else "feature-extraction"  # without MLM, the head stays behind
    code = f'from transformers import pipeline; pipeline("{task}", {path})'
    print_next("Use it with", shlex.join(["python", "-c", code]))


def _learning(args: argparse.Namespace, *, half: bool) -> LearningSettings:
    from mlsm_plugin.auxiliary.coder_learning import LearningSettings
    from mlsm_plugin.hidden_states.hf_encoder import HuggingFaceEncoder

    return LearningSettings(
        layer=HuggingFaceEncoder.layers_of(args.auxiliary or args.model) if args.layer is None else args.layer,
        coder=args.coder,
        atoms=args.atoms,
        tokens=args.tokens,
        lambda_=args.lambda_,
        iterations=args.iterations,
        k=args.k,
        matryoshka=args.matryoshka,
        seed=args.seed,
        threads=args.threads,
        fp16=half,
    )
