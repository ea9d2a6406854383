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

from mlsm_plugin.cli.next_commands import BLOCKS
from mlsm_plugin.core.files.output_lock import run_child
from mlsm_plugin.core.files.progress import shown_by_another_process
from mlsm_plugin.core.files.step_record import Step, StepRecord
from mlsm_plugin.core.machine.devices import default_device, has_fast_bf16
from mlsm_plugin.fairseq_plugin.pipelines.training_recipe import SMALL_MODEL, TrainingPlan, training_words

REPOSITORY = Path(__file__).resolve().parents[2]
PIECES = 6000  # of the tokenizer; a short text has too few words for so many
BYTES_PER_PIECE = 200
WORD = re.compile("\u2581[A-Za-z]{3,}")
ARCH = "mlsm_modern_small"  # 4 layers


def main() -> int:
    """Run the demo; returns 0 on success."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="demo", help="folder for all files of the demo (default: demo)")
    parser.add_argument("--corpus", help="your own text: one sentence per line, blank lines between documents")
    parser.add_argument("--updates", type=int, default=600, help="updates of the MLSM model (default: 600)")
    parser.add_argument(
        "--auxiliary-updates", type=int, default=600, help="updates of the auxiliary model (default: 600)"
    )
    args = parser.parse_args()
    start = time.perf_counter()
    output = Path(args.output)
    os.environ["PYTHONWARNINGS"] = "ignore"
    try:
        make_everything(args, output)
    except subprocess.CalledProcessError as error:
        print(f"demo: the command above failed with exit status {error.returncode}", file=sys.stderr)
        return 1
    show_what_came_out(output)
    print(f"\nThe demo took {(time.perf_counter() - start) / 60:.1f} minutes.")
    show_what_to_do_next(output)
    return 0


def make_everything(args: argparse.Namespace, output: Path) -> None:
    """Collect the corpus, preprocess it, train the model, write the report."""
    corpus = output / "corpus"
    data_bin = output / "run" / "data-bin"
    model = output / "model"
    collect = [sys.executable, str(REPOSITORY / "scripts" / "collect_corpus.py"), "--output", str(corpus)]
    run([*collect, "--max-megabytes", "3.5", *(["--corpus", args.corpus] if args.corpus else [])])
    pieces = min(PIECES, (corpus / "train.txt").stat().st_size // BYTES_PER_PIECE)
    preprocess = ["preprocess", "--train", f"{corpus}/train.txt", "--valid", f"{corpus}/valid.txt"]
    preprocess += ["--output", f"{output}/run", "--vocab-size", str(pieces)]
    preprocess += ["--auxiliary-arch", ARCH, "--keep-at", "100"]
    preprocess += ["--auxiliary-updates", str(args.auxiliary_updates), *SMALL_MODEL]
    preprocess += ["--sample-break-mode", BLOCKS.sample_break_mode]
    preprocess += ["--tokens-per-sample", str(BLOCKS.tokens_per_sample)]
    preprocess += ["--layer", "3", "--atoms", "512", "--lambda", "0.15", "--tokens", "100000", "--iterations", "200"]
    # training masks few of the tokens in less than one pass, so that few of the other codes would ever be read
    preprocess += ["--coverage", "0.4"]
    preprocess += ["--fp16"] if has_fast_bf16(default_device()) else []
    # small batches learn more of a short text in the same time
    preprocess += ["--batch-size", "8", "--lr", "1.5e-3", "--warmup-updates", str(1 + args.auxiliary_updates // 12)]
    run([sys.executable, "-m", "mlsm_plugin.cli.main", *preprocess])
    plan = TrainingPlan(
        tokens=0,  # a short text: a small model and small batches
        blocks=BLOCKS,
        model=("--arch", ARCH, *SMALL_MODEL),
        start=str(output / "run" / "auxiliary" / "checkpoint_last.pt"),  # so that nothing is learned twice
        updates=args.updates,
    )
    words = training_words(data_bin, model, plan, user_dir=str(REPOSITORY / "mlsm_plugin"))
    train = [sys.executable, "-m", "fairseq_cli.train", *words[1:]]
    codes = [data_bin / f"{split}.codes" / "meta.json" for split in ("train", "valid")]
    step = Step("train", lambda: run(train), {"command": train}, codes, [model])
    StepRecord(output / "steps.json").run(step)
    run([sys.executable, "-m", "mlsm_plugin.cli.main", "inspect", str(data_bin), "--output", f"{output}/report.html"])


def run(command: Sequence[str]) -> None:
    """Print a command as a user would type it, and run it; raises CalledProcessError if it fails."""
    spoken = {"mlsm_plugin.cli.main": "mlsm", "fairseq_cli.train": "fairseq-train"}
    shown = [spoken[command[2]], *command[3:]] if command[1] == "-m" else ["python", *command[1:]]
    print(f"\n$ {shlex.join(shown)}", flush=True)
    with shown_by_another_process():
        status = run_child(command)
    if status != 0:
        raise subprocess.CalledProcessError(status, command)


def show_what_came_out(output: Path) -> None:
    """Print the validation KL with its baseline, three filled masks and ten latent properties."""
    from mlsm_plugin.evaluation.latent_kl import evaluate_latent_kl
    from mlsm_plugin.hub import from_pretrained
    from mlsm_plugin.reports.coded_datasets import name_of, summarize_split

    for name in ("fairseq", "mlsm_plugin"):
        logging.getLogger(name).setLevel(logging.WARNING)
    data_bin = output / "run" / "data-bin"
    kl = evaluate_latent_kl(output / "model", data_bin)
    print(f"\nvalidation KL on {kl.num_tokens} masked tokens, in nats (lower is better)")
    print(f"  unigram baseline (predicts the mean code): {kl.unigram:.3f}")
    print(f"  the model:                                 {kl.model:.3f}")
    model = from_pretrained(output / "model")
    print("\nthree masks of the validation text, and what the model fills in")
    for sentence, word in masked_sentences(output / "corpus" / "valid.txt", count=3):
        filled = ", ".join(f"{token.strip()} {p:.2f}" for _, p, token in model.fill_mask(sentence, topk=5))
        print(f"  {sentence}\n    was: {word}\n    model: {filled}")
    summaries, _ = summarize_split(data_bin, "valid", data_bin, max_tokens=200_000)
    print("\nthe ten latent properties of words that are easiest to name: the tokens that have them most often")
    of_words = [summary for summary in summaries if summary.label and all(map(WORD.fullmatch, summary.label))]
    for summary in sorted(of_words, key=lambda summary: summary.telling, reverse=True)[:10]:
        tokens = "  ".join(token.replace("\u2581", "_") for token, _ in summary.top_tokens)
        print(f"  {name_of(summary)}: {tokens}")


def show_what_to_do_next(output: Path) -> None:
    """Print where the report is, and commands to try."""
    sentence = "Return the <mask> of the array."
    code = (
        f"from mlsm_plugin.hub import from_pretrained; print(from_pretrained('{output}/model').fill_mask('{sentence}'))"
    )
    print(f"""
Look at the latent properties, with their contexts, in a browser:

  {(output / "report.html").resolve().as_uri()}

Fill a mask of your own:

  {shlex.join([sys.executable, "-c", code])}

Use your own text, one sentence a line:

  make demo CORPUS=my_text.txt DEMO_DIR=my_demo

The same step by step, with a datastore of phrases and an export to Hugging Face: docs/tutorial.md""")


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
