#!/usr/bin/env python3
"""All of MLSM on a small scale: from raw text to a trained model, its report and its figures.

Each step is a command, printed before it runs. Run the demo again to resume it: finished steps are skipped.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mlsm_plugin.core.files.step_record import Step, StepRecord

REPOSITORY = Path(__file__).resolve().parents[2]
TOKENS_PER_SAMPLE = "128"
PIECES, BYTES_PER_PIECE = 6000, 200  # of the tokenizer; a short text has too few words for 6,000
WORD = re.compile("\u2581[A-Za-z]{3,}")
# for minutes instead of days: a small model, a high learning rate, and small batches, which learn more of this text in
# the same time
SHORT_TRAINING = (*("--encoder-embed-dim", "256", "--batch-size", "8", "--clip-norm", "1.0", "--autocast", "auto"),)
ARCH = "mlsm_modern_small"  # 4 layers


def main() -> int:
    """Run the demo; returns 0 on success."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="demo", help="folder for all files of the demo (default: demo)")
    parser.add_argument("--corpus", help="your own text: one sentence per line, blank lines between documents")
    parser.add_argument("--updates", type=int, default=600, help="updates of the MLSM model (default: 600)")
    parser.add_argument(
        "--auxiliary-updates", type=int, default=1200, help="updates of the auxiliary model (default: 1200)"
    )
    args = parser.parse_args()
    start = time.perf_counter()
    output = Path(args.output)
    try:
        make_everything(args, output)
    except subprocess.CalledProcessError as error:
        print(f"demo: the command above failed with exit status {error.returncode}", file=sys.stderr)
        return 1
    show_what_came_out(output)
    print(f"\nreport: {(output / 'report.html').resolve()}")
    print(f"model:  {output / 'model'}")
    print(f"The demo took {(time.perf_counter() - start) / 60:.1f} minutes.")
    return 0


def make_everything(args: argparse.Namespace, output: Path) -> None:
    """Collect the corpus, preprocess it, train the model, write the report."""
    corpus, data_bin, model = output / "corpus", output / "run" / "data-bin", output / "model"
    collect = [sys.executable, str(REPOSITORY / "scripts" / "collect_corpus.py"), "--output", str(corpus)]
    run([*collect, "--max-megabytes", "3.5", *(["--corpus", args.corpus] if args.corpus else [])])
    pieces = min(PIECES, (corpus / "train.txt").stat().st_size // BYTES_PER_PIECE)
    preprocess = [
        *(
            "preprocess",
            "--train",
            f"{corpus}/train.txt",
            "--valid",
            f"{corpus}/valid.txt",
            "--output",
            f"{output}/run",
        ),
        *("--vocab-size", str(pieces), "--auxiliary-arch", ARCH, "--keep-at", "100", "--sample-break-mode", "none"),
        *("--auxiliary-updates", str(args.auxiliary_updates), "--tokens-per-sample", TOKENS_PER_SAMPLE),
        *("--layer", "3", "--atoms", "512", "--lambda", "0.15", "--tokens", "100000", "--iterations", "200"),
        # training masks 15 % of the tokens in less than one pass, so that few of the other codes would ever be read
        *("--coverage", "0.4", "--fp16"),
        *(*SHORT_TRAINING, "--lr", "1.5e-3", "--warmup-updates", str(1 + args.auxiliary_updates // 12)),
    ]
    run([sys.executable, "-m", "mlsm_plugin.cli.main", *preprocess])
    train = [
        *(sys.executable, "-m", "fairseq_cli.train", str(data_bin), "--user-dir", str(REPOSITORY / "mlsm_plugin")),
        *("--task", "masked_latent_semantic", "--criterion", "latent_semantic_kl", "--mlm-weight", "1"),
        # the model starts from the auxiliary one, so that nothing is learned twice
        *("--arch", ARCH, "--finetune-from-model", str(output / "run" / "auxiliary" / "checkpoint_last.pt")),
        *("--save-dir", str(model)),
        *("--sample-break-mode", "none", "--tokens-per-sample", TOKENS_PER_SAMPLE),
        *(*SHORT_TRAINING, "--lr", "1e-3", "--warmup-updates", str(1 + args.updates // 12)),
        *("--max-update", str(args.updates), "--total-num-update", str(args.updates)),
        *("--optimizer", "fused_adamw", "--lr-scheduler", "polynomial_decay"),
        *("--log-format", "simple", "--log-interval", "50", "--no-epoch-checkpoints"),
    ]
    codes = [data_bin / f"{split}.codes" / "meta.json" for split in ("train", "valid")]
    step = Step("train", lambda: run(train), {"command": train}, codes, [model])
    StepRecord(output / "steps.json").run(step)
    run([sys.executable, "-m", "mlsm_plugin.cli.main", "inspect", str(data_bin), "--output", f"{output}/report.html"])


def run(command: Sequence[str]) -> None:
    """Print a command as a user would type it, and run it; raises CalledProcessError if it fails."""
    spoken = {"mlsm_plugin.cli.main": "mlsm", "fairseq_cli.train": "fairseq-train"}
    shown = [spoken[command[2]], *command[3:]] if command[1] == "-m" else ["python", *command[1:]]
    print(f"\n$ {shlex.join(shown)}", flush=True)
    subprocess.run(command, check=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})


def show_what_came_out(output: Path) -> None:
    """Print the validation KL with its baseline, five filled masks and ten atoms."""
    from mlsm_plugin.evaluation.latent_kl import evaluate_latent_kl
    from mlsm_plugin.hub import from_pretrained
    from mlsm_plugin.reports.coded_datasets import summarize_split

    for name in ("fairseq", "mlsm_plugin"):
        logging.getLogger(name).setLevel(logging.WARNING)
    data_bin = output / "run" / "data-bin"
    kl = evaluate_latent_kl(output / "model", data_bin)
    print(f"\nvalidation KL on {kl.num_tokens} masked tokens, in nats (lower is better)")
    print(f"  unigram baseline (predicts the mean code): {kl.unigram:.3f}")
    print(f"  the model:                                 {kl.model:.3f}")
    model = from_pretrained(output / "model")
    print("\nfive masks of the validation text, and what the model fills in")
    for sentence, word in masked_sentences(output / "corpus" / "valid.txt", count=5):
        filled = ", ".join(f"{token.strip()} {p:.2f}" for _, p, token in model.fill_mask(sentence, topk=5))
        print(f"  {sentence}\n    was: {word}\n    model: {filled}")
    summaries, _ = summarize_split(data_bin, "valid", data_bin, max_tokens=200_000)
    print("\nthe ten latent properties of words that are easiest to name: the tokens that carry most of their weight")
    of_words = [summary for summary in summaries if summary.label and all(map(WORD.fullmatch, summary.label))]
    for summary in sorted(of_words, key=lambda summary: summary.telling, reverse=True)[:10]:
        tokens = "  ".join(token.replace("\u2581", "_") for token, _ in summary.top_tokens)
        print(f"  atom {summary.atom:>3}: {tokens}")


def masked_sentences(text: Path, *, count: int) -> list[tuple[str, str]]:
    """Random sentences of 8 to 20 words, each with one lower-case word masked; the seed is fixed."""
    sentences = [line for line in text.read_text(encoding="utf-8").splitlines() if 8 <= len(line.split()) <= 20]
    draw = random.Random(7)
    draw.shuffle(sentences)
    chosen: list[tuple[str, str]] = []
    for sentence in sentences:
        words = sentence.split()
        places = [i for i, word in enumerate(words) if i > 0 and re.fullmatch(r"[a-z]{3,}", word)]
        if places and len(chosen) < count:
            place = draw.choice(places)
            chosen.append((" ".join([*words[:place], "<mask>", *words[place + 1 :]]), words[place]))
    return chosen


if __name__ == "__main__":
    sys.exit(main())
