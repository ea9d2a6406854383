"""A small corpus of ids with codes, a tokenizer of words, and small BERTs, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from tokenizers import Tokenizer, models
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from mlsm_plugin.core.sparse_coding.code_store_writer import CodeStoreWriter
from mlsm_plugin.huggingface import TokenSequences

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(5)
WORDS, ATOMS = 60, 11


def make_tokenizer(*, without: tuple[int, ...] = (), **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of WordPiece pieces: the second half of them go on with a word; ids ``without`` have no token."""
    pieces = [f"w{number}" if number < WORDS // 2 else f"##w{number}" for number in range(WORDS)]
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *pieces]) if number not in without}
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**names, **options})


def random_ids(number: int = 40, seed: int = 0, longest: int = 20) -> list[np.ndarray]:
    """Sequences of different lengths with special tokens around."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, size=number)
    return [np.array([CLS, *rng.integers(5, 5 + WORDS, size=length), SEP]) for length in lengths]


def write_codes(sequences: TokenSequences, folder: Path, *, empty: float = 0.1, **meta: Any) -> sp.csr_matrix:
    """Write random codes of a corpus, a share of which is empty; returns them, with rows that sum to 1."""
    rng = np.random.default_rng(1)
    dense = rng.random((sequences.num_tokens, ATOMS)) * (rng.random((sequences.num_tokens, ATOMS)) < 0.3)
    dense[rng.random(len(dense)) < empty] = 0
    meta = {"n_atoms": ATOMS, "fingerprints": {"split": sequences.fingerprint, "dictionary": "none"}, **meta}
    writer = CodeStoreWriter(folder, meta, [0, sequences.num_tokens])
    writer.write_shard(0, sp.csr_matrix(dense))
    writer.finish()
    return sp.csr_matrix(dense / np.maximum(dense.sum(axis=1, keepdims=True), 1e-9))


def tiny_bert(seed: int = 0, **settings: Any) -> Any:
    """A BERT of 2 layers, 32 wide, without dropout."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(pad_token_id=PAD, **{"vocab_size": 5 + WORDS, **sizes, **off, **settings}))
