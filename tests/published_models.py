"""Small RoBERTas and BERTs with random weights, in the files in which others publish such models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from tests.hub.modern_models import POSITIONS, spread_weights
from tests.tiny_hf_models import TOKENIZER_OF, make_tokenizer


def make_roberta(kind: str, text: Path, folder: Path, **settings: Any) -> Any:
    """Write a model of 3 layers, 32 wide, for POSITIONS tokens, and its tokenizer trained on ``text``.

    ``kind`` is ``roberta``, ``xlm-roberta``, ``camembert`` or ``bert``, and ``settings`` are of the configuration.
    Returns the model, in eval mode.
    """
    tokenizer = make_tokenizer(TOKENIZER_OF[kind], text, folder)
    special = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("cls", "sep", "pad")}
    special |= {"bos_token_id": special["cls_token_id"], "eos_token_id": special["sep_token_id"]}
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
    unused = 0 if kind == "bert" else special["pad_token_id"] + 1
    sizes |= {"max_position_embeddings": POSITIONS + unused, "type_vocab_size": 2 if kind == "bert" else 1}
    sizes |= {"layer_norm_eps": 1e-12 if kind == "bert" else 1e-5, "vocab_size": len(tokenizer)}
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(kind, **{**sizes, **special, **settings})).eval()
    spread_weights(model)
    model.save_pretrained(folder)
    return model


def as_published(source: Path, folder: Path) -> Path:
    """A RoBERTa as ``config.json``, ``pytorch_model.bin``, ``vocab.json`` and ``merges.txt``; returns its folder."""
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    torch.save(AutoModelForMaskedLM.from_pretrained(source).state_dict(), folder / "pytorch_model.bin")
    parts = json.loads((source / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(parts["vocab"]))
    merges = [" ".join(pair) for pair in parts["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return folder
