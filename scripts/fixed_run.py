"""Record the output of a fixed small run: SHA-256 of its files, and the losses of 20 updates of every objective.

A change that must not change behaviour must keep this output, byte for byte and digit for digit. The inputs are made
once and used by both versions, since a checkpoint contains the time and the folder of its training:

    python scripts/fixed_run.py inputs FOLDER               # text, tokenizer, dataset, auxiliary model, dictionary
    python scripts/fixed_run.py record FOLDER before.json   # with the package as it was (PYTHONPATH chooses)
    python scripts/fixed_run.py record FOLDER after.json    # with the package as it is
    diff before.json after.json

All processes use one thread and float32. It takes about four minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mlsm_plugin.core.files.progress import Progress

UPDATES = 20
BLOCK = ("--tokens-per-sample", 64)
MODEL = (
    *("--arch", "mlsm_roberta_tiny", "--encoder-layers", 2, "--encoder-embed-dim", 32),
    *("--encoder-ffn-embed-dim", 64, "--encoder-attention-heads", 2, "--max-positions", 128),
)
TRAINING = (
    *("--sample-break-mode", "complete", *BLOCK, "--optimizer", "adam", "--lr", "1e-3", "--lr-scheduler", "fixed"),
    *("--batch-size", 8, "--num-workers", 0, "--log-format", "simple", "--log-interval", 1, "--seed", 1, "--cpu"),
    *("--max-update", UPDATES, "--no-epoch-checkpoints", "--required-batch-size-multiple", 1),
)
MLSM = ("--task", "masked_latent_semantic", "--criterion", "latent_semantic_kl", *MODEL)


def objectives(inputs: Path) -> dict[str, tuple[str, tuple[object, ...]]]:
    """The dataset and the flags of each objective, by name."""
    online = ("--latent-source", "online", "--auxiliary-checkpoint", inputs / "auxiliary/checkpoint_last.pt")
    npm = ("--task", "nonparametric_masked_lm", "--criterion", "span_contrastive", *MODEL)
    taco = ("--task", "taco", "--criterion", "token_contrastive", *MODEL)
    return {
        "masked_lm": ("full", ("--task", "masked_lm", "--criterion", "masked_lm", *MODEL)),
        "mlsm": ("full", MLSM),
        "mlsm+mlm": ("full", (*MLSM, "--mlm-weight", 1, "--update-freq", 2)),
        "mlsm+mlm, argmax": ("full", (*MLSM, "--mlm-weight", 0.5, "--latent-target", "argmax")),
        "mlsm+mlm, coverage 0.3": ("covered", (*MLSM, "--mlm-weight", 1)),
        "mlsm+mlm, online": ("full", (*MLSM, "--mlm-weight", 1, *online, "--latent-dictionary", inputs / "dictionary")),
        "taco": ("full", (*taco, "--update-freq", 2)),
        "taco, masked anchors": ("full", (*taco, "--contrastive-anchors", "masked", "--positive-window", 3)),
        "npm": ("full", (*npm, "--group-size", 4, "--batch-size", 2)),
        "npm, single, l2": ("full", (*npm, "--span-mode", "single", "--similarity", "l2", "--group-size", 4)),
        "span denoising": (
            "full",
            ("--task", "span_denoising", "--criterion", "cross_entropy", "--arch", "denoising_small",
             "--encoder-layers", 2, "--encoder-embed-dim", 32, "--encoder-attention-heads", 2, "--rotate"),
        ),
    }  # fmt: skip


def run(*words: object) -> str:
    """Run a command in its own process, with one thread; returns its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def mlsm(*words: object) -> None:
    """Run an ``mlsm`` command."""
    run("mlsm_plugin.cli.main", *words)


def train(data: Path, save_dir: Path, *flags: object) -> str:
    """Run ``fairseq-train``; returns its log."""
    return run("fairseq_cli.train", data, "--user-dir", _plugin(), "--save-dir", save_dir, *TRAINING, *flags)


def _plugin() -> Path:
    import mlsm_plugin

    return Path(mlsm_plugin.__file__).parent


def make_inputs(folder: Path) -> None:
    """Write text from Python's manual, without sentences longer than a block, and make all inputs from it."""
    from pydoc_data.topics import topics

    folder.mkdir(parents=True)
    documents = []
    for name in sorted(topics):
        sentences = re.split(r"(?<=[.!?])\s+", " ".join(topics[name].split()))
        documents.append("".join(f"{sentence}\n" for sentence in sentences if 20 < len(sentence) < 80))
    for name, chosen in (("train.txt", documents[5:]), ("valid.txt", documents[:5])):
        (folder / name).write_text("\n".join(chosen), encoding="utf-8")
    data = folder / "data-bin"
    auxiliary = folder / "auxiliary"
    mlsm("tokenizer", "--input", folder / "train.txt", "--vocab-size", 800, "--output", folder / "tokenizer")
    mlsm(
        *("binarize", "--tokenizer", folder / "tokenizer", "--output", data, "--workers", 1),
        *("--train", folder / "train.txt", "--valid", folder / "valid.txt"),
    )
    train(data, auxiliary, "--task", "masked_lm", "--criterion", "masked_lm", *MODEL)
    npm = ("--task", "nonparametric_masked_lm", "--criterion", "span_contrastive", *MODEL, "--group-size", 4)
    train(data, folder / "npm", *npm, "--batch-size", 2, "--finetune-from-model", auxiliary / "checkpoint_last.pt")
    mlsm(*dictionary_words(folder, folder / "dictionary"))


def dictionary_words(folder: Path, output: Path) -> list[object]:
    """The command that learns the dictionary."""
    words = ["dictionary", folder / "data-bin", "--auxiliary", folder / "auxiliary/checkpoint_last.pt", "--layer", 2]
    return [*words, "--output", output, "--atoms", 48, "--tokens", 5000, "--iterations", 20, "--batch-size", 100,
            "--threads", 1, *BLOCK]  # fmt: skip


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the files of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def weights_hash(checkpoint: Path) -> str:
    """SHA-256 of the weights in a checkpoint, in the order of their names."""
    import torch

    import mlsm_plugin  # noqa: F401  (lets torch read fairseq's checkpoints)

    digest = hashlib.sha256()
    for name, weight in sorted(torch.load(checkpoint, map_location="cpu")["model"].items()):
        digest.update(name.encode())
        digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()


def logged(output: str) -> list[str]:
    """The lines of training and validation, without times and speeds."""
    lines = []
    for line in output.splitlines():
        if re.search(r"\| (train_inner|valid) \|", line):
            text = re.sub(r"^\S+ \S+ \| INFO \| ", "", line)
            lines.append(re.sub(r"(,|\|) ?(wps|ups|train_wall|wall|gb_free)[= ][^,|]*", "", text).strip())
    return lines


def record(inputs: Path) -> dict[str, object]:
    """Run everything; returns the hashes and losses."""
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        full, covered = (Path(shutil.copytree(inputs / "data-bin", work / kind)) for kind in ("full", "covered"))
        coding = ("--auxiliary", inputs / "auxiliary/checkpoint_last.pt", "--dictionary", inputs / "dictionary", *BLOCK)
        coding = (*coding, "--shard-tokens", 20_000, "--batch-tokens", 2048, "--threads", 1)
        mlsm("encode", full, *coding)
        mlsm("encode", covered, *coding, "--coverage", 0.3)
        for kind, data in (("full", full), ("covered", covered)):
            for split in ("train", "valid"):
                results[f"code store, {kind}, {split}"] = hashes(data / f"{split}.codes")
        mlsm(*dictionary_words(inputs, work / "dictionary"))
        results["dictionary"] = hashes(work / "dictionary")
        for kind, options in (("whole", ()), ("words", ("--word-boundaries-only",))):
            store = work / f"datastore-{kind}"
            mlsm(
                *("npm", "datastore", inputs / "data-bin", "--checkpoint", inputs / "npm/checkpoint_last.pt"),
                *("--output", store, *BLOCK, "--shard-tokens", 20_000, "--batch-tokens", 2048, "--threads", 1),
                *("--splits", "train", "valid", *options),
            )
            results[f"phrase datastore, {kind}"] = hashes(store)
        for objective, (kind, flags) in Progress(objectives(inputs).items(), desc="objectives"):
            save_dir = work / "runs" / objective.replace(" ", "-")
            output = train(work / kind, save_dir, *flags)
            weights = weights_hash(save_dir / "checkpoint_last.pt")
            results[f"training, {objective}"] = {"logged": logged(output), "weights": weights}
    return results


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["inputs", "record"])
    parser.add_argument("folder", type=Path, help="folder of the inputs")
    parser.add_argument("output", type=Path, nargs="?", help="JSON file to write (only with record)")
    args = parser.parse_args()
    if args.action == "inputs":
        make_inputs(args.folder)
    elif args.output is None:
        parser.error("record needs the file to write")
    else:
        args.output.write_text(json.dumps(record(args.folder), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
