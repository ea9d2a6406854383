"""Compare the speed of coding sequences of ids and a binarized split (both ``mlsm encode``), with equal blocks.

    python scripts/bench/sequence_coding.py TEXT [--tokens 200000] [--rounds 5]

The bench trains a WordPiece tokenizer on the text, and makes a BERT with random weights. The text is binarized and cut
into blocks; the sequences are these blocks as ids of that tokenizer, in a folder and in a ``datasets.Dataset``. In
every round, each way codes all blocks into a new store, in a rotating order; a ratio is the median over the rounds of
the ratios within a round. The time includes one-time work: fingerprints, opening the model, sealing the store. Target:
at least 0.95 of the speed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertModel, BertTokenizerFast

from mlsm_plugin.cli.main import main as mlsm
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.sparse_coding.encode import normalize_rows
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings
from mlsm_plugin.fairseq_plugin.coding.corpus_coding import encode_split
from mlsm_plugin.huggingface.coding import encode_sequences
from mlsm_plugin.huggingface.token_sequences import TokenSequences

TARGET = 0.95
SPLIT = "binarized split"
FOLDER = "folder of sequences"
DATASET = "datasets.Dataset"


def make_model(text: Path, folder: Path, args: argparse.Namespace) -> None:
    """A BERT with random weights, and its tokenizer."""
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train([str(text)], vocab_size=args.vocab, show_progress=False)
    folder.mkdir()
    tokenizer.save(str(folder / "raw.json"))
    fast = BertTokenizerFast(tokenizer_file=str(folder / "raw.json"))
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {"hidden_size": args.width, "intermediate_size": 4 * args.width, "num_attention_heads": args.width // 32}
    config = BertConfig(vocab_size=len(fast), num_hidden_layers=args.layers, pad_token_id=fast.pad_token_id, **sizes)
    BertModel(config).save_pretrained(folder)


def first_lines(text: Path, words: int) -> str:
    """The first lines of a text, about ``words`` words."""
    lines = []
    count = 0
    with open(text, encoding="utf-8") as file:
        for line in file:
            if count >= words:
                break
            lines.append(line)
            count += len(line.split())
    return "".join(lines)


def main() -> int:
    """Measure and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000, help="about so many tokens (default: 200,000)")
    parser.add_argument("--block", type=int, default=128, help="tokens of a block (default: 128)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--atoms", type=int, default=512)
    parser.add_argument("--lambda", dest="lambda_", type=float, default=0.12)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="sequence_coding.") as root:
        return compare(Path(root), args)


def compare(root: Path, args: argparse.Namespace) -> int:
    """Prepare the files in ``root``, code them in turn, and print the ratios."""
    text = root / "text.txt"
    model = root / "model"
    data = root / "data"
    text.write_text(first_lines(args.text, int(0.8 * args.tokens)), encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        make_model(text, model, args)
        words = ("--train", text, "--valid", text, "--tokenizer", f"hf:{model}", "--output", data, "--workers", 1)
        assert mlsm(["binarize", *map(str, words)]) == 0
    blocks = BlockSettings(args.block, "complete")
    settings = CodingSettings(layer=args.layers, blocks=blocks, threads=1)
    rng = np.random.default_rng(1)
    atoms = normalize_rows(rng.normal(size=(args.atoms, args.width)).astype(np.float32))
    coder = LassoCoder(AtomDictionary(atoms, {"lambda": args.lambda_}))

    reader = BlockReader(data, "train", blocks)
    hf_ids = HuggingFaceTokenizer(model).hf_ids
    pieces = itertools.chain.from_iterable(reader.block(index) for index in range(len(reader)))
    rows = [hf_ids[piece.tokens.numpy()] for piece in pieces]
    TokenSequences.write(root / "sequences", rows)
    dataset = Dataset.from_dict({"input_ids": rows})

    def split(_output: Path) -> None:
        encode_split(data, "train", auxiliary=f"hf:{model}", coder=coder, settings=settings)
        (data / "train.codes").rename(_output)

    def sequences(ids: object) -> Callable[[Path], None]:
        return lambda output: void(encode_sequences(ids, model, coder=coder, output=output, settings=settings))

    ways = {SPLIT: split, FOLDER: sequences(root / "sequences"), DATASET: sequences(dataset)}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    torch.set_num_threads(1)
    stores: dict[str, CodeStore] = {}
    for number in range(-1, args.rounds):  # the first round warms up
        names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for name in names:
            output = root / f"store{number}{name}"
            before = time.perf_counter(), time.process_time()
            with contextlib.redirect_stderr(io.StringIO()):
                ways[name](output)
            if number >= 0:
                wall[name].append(time.perf_counter() - before[0])
                cpu[name].append(time.process_time() - before[1])
            stores[name] = CodeStore(output)
    coded = {name: store.meta["coded_tokens"] for name, store in stores.items()}
    print(f"{args.layers} layers, {args.width} wide, {args.atoms} atoms, blocks of {args.block}, {args.rounds} rounds")
    print(f"{'':>20} {'coded':>8} {'non-zeros':>9} {'tokens/s':>9} {'speed, wall':>12} {'speed, CPU':>11}")
    good = True
    for name in ways:
        ratios = [
            statistics.median(first / seconds for first, seconds in zip(times[SPLIT], times[name], strict=True))
            for times in (wall, cpu)
        ]
        good = good and ratios[0] >= TARGET
        nonzeros = stores[name].meta["nnz"] / max(1, coded[name])
        speed = coded[name] / statistics.median(wall[name])
        print(
            f"{name:>20} {coded[name]:8} {nonzeros:9.1f} {speed:9.0f} {ratios[0]:12.3f} {ratios[1]:11.3f}", flush=True
        )
    assert len(set(coded.values())) == 1
    print(f"target {TARGET} of the speed of a binarized split: {'reached' if good else 'missed'}")
    return 0


def void(_value: object) -> None:
    """Drop a result."""


if __name__ == "__main__":
    sys.exit(main())
