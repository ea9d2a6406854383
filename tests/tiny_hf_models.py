"""Small Hugging Face models with random weights and tokenizers trained on the tests' text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

from mlsm_plugin.core.files.hf_files import save_pretrained

BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
VOCABULARY = 600


def _word_piece() -> tuple[Tokenizer, Any, list[str]]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=BERT_SPECIAL), BERT_SPECIAL


def _byte_level() -> tuple[Tokenizer, Any, list[str]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=ROBERTA_SPECIAL, initial_alphabet=alphabet)
    return tokenizer, trainer, ROBERTA_SPECIAL


def _modern_byte_level() -> tuple[Tokenizer, Any, list[str]]:
    """As ModernBERT's: the special tokens are those of BERT, and come after all others."""
    tokenizer, trainer, _ = _byte_level()
    trainer.vocab_size, trainer.special_tokens = VOCABULARY - len(BERT_SPECIAL), []
    return tokenizer, trainer, BERT_SPECIAL


def _unigram() -> tuple[Tokenizer, Any, list[str]]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=VOCABULARY, special_tokens=ROBERTA_SPECIAL, unk_token="<unk>")
    return tokenizer, trainer, ROBERTA_SPECIAL


def _deberta_unigram() -> tuple[Tokenizer, Any, list[str]]:
    """As that of DeBERTa-v3: of the special tokens, which are those of BERT, the mask is the last of all."""
    tokenizer, _, _ = _unigram()
    first = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    trainer = trainers.UnigramTrainer(vocab_size=VOCABULARY - 1, special_tokens=first, unk_token="[UNK]")
    return tokenizer, trainer, BERT_SPECIAL


TOKENIZERS: dict[str, Callable[[], tuple[Tokenizer, Any, list[str]]]] = {
    "word_piece": _word_piece,
    "byte_level": _byte_level,
    "modern_byte_level": _modern_byte_level,
    "unigram": _unigram,
    "deberta_unigram": _deberta_unigram,
}
TOKENIZER_OF = {
    "bert": "word_piece",
    "distilbert": "word_piece",
    "electra": "word_piece",
    "mpnet": "word_piece",
    "roberta": "byte_level",
    "xlm-roberta": "unigram",
    "camembert": "unigram",
    "modernbert": "modern_byte_level",
    "deberta": "modern_byte_level",
    "deberta-v2": "deberta_unigram",
}
SETTINGS: dict[str, dict[str, Any]] = {
    # a window of 4 tokens on each side, which is shorter than the samples
    "modernbert": {"local_attention": 8, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 160_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }},
    "deberta": {
        "relative_attention": True, "pos_att_type": "c2p|p2c", "max_relative_positions": -1,
        "position_biased_input": False, "type_vocab_size": 0,
    },
    # as DeBERTa-v3, with fewer buckets
    "deberta-v2": {
        "relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 8, "norm_rel_ebd": "layer_norm",
        "share_att_key": True, "position_biased_input": False, "max_relative_positions": -1, "type_vocab_size": 0,
    },
}  # fmt: skip


def make_tokenizer(kind: str, text: Path, folder: Path) -> PreTrainedTokenizerFast:
    """Train a tokenizer of a kind and save it."""
    tokenizer, trainer, special = TOKENIZERS[kind]()
    tokenizer.train([str(text)], trainer)
    tokenizer.add_special_tokens([token for token in special if tokenizer.token_to_id(token) is None])
    bert = special is BERT_SPECIAL
    begin, end = ("[CLS]", "[SEP]") if bert else ("<s>", "</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", special_tokens=[(token, tokenizer.token_to_id(token)) for token in (begin, end)]
    )
    pad, unknown, mask = ("[PAD]", "[UNK]", "[MASK]") if bert else ("<pad>", "<unk>", "<mask>")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token=begin, sep_token=end, pad_token=pad, unk_token=unknown, mask_token=mask
    )
    fast.save_pretrained(folder)
    return fast


def make_model(model_type: str, text: Path, folder: Path, *, kind: Any = AutoModel, **settings: Any) -> Path:
    """A model of three layers, 32 wide, with random weights, and its tokenizer; returns the folder.

    ``kind`` is the library's class that makes it: ``AutoModel``, or ``AutoModelForMaskedLM`` for one with a head.
    """
    tokenizer = make_tokenizer(TOKENIZER_OF[model_type], text, folder)
    torch.manual_seed(1)
    sizes = {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 64} if model_type == "distilbert" else {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64
    }  # fmt: skip
    special = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("cls", "sep")}
    sizes |= {**special, "bos_token_id": special["cls_token_id"], "eos_token_id": special["sep_token_id"]}
    config = AutoConfig.for_model(
        model_type,
        **{"vocab_size": len(tokenizer), "max_position_embeddings": 70, "pad_token_id": tokenizer.pad_token_id}
        | sizes
        | SETTINGS.get(model_type, {})
        | settings,
    )
    kind.from_config(config).save_pretrained(folder)
    return folder


def library_ids(tokenizer: Any, line: str) -> list[int]:
    """What the library's tokenizer says, with special tokens in the text taken as text."""
    return list(tokenizer(line, add_special_tokens=False, split_special_tokens=True)["input_ids"])


OWN_TOKENS = ("[E1]", "[/E1]", "<ctrl>")


def add_own_tokens(folder: Path, copy: Path, **options: Any) -> PreTrainedTokenizerFast:
    """A copy of a tokenizer with special tokens of its own list, the last of which is only marked as special."""
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    tokenizer.add_special_tokens({"additional_special_tokens": list(OWN_TOKENS[:2])})
    tokenizer.add_tokens([AddedToken(OWN_TOKENS[2], special=True)], special_tokens=True)
    save_pretrained(copy, tokenizer)
    return tokenizer


def make_model_with_own_tokens(model_type: str, text: Path, folder: Path) -> Path:
    """A masked LM of :func:`make_model` whose tokenizer has special tokens of its own list."""
    size = VOCABULARY + len(OWN_TOKENS)
    make_model(model_type, text, folder, kind=AutoModelForMaskedLM, vocab_size=size)
    add_own_tokens(folder, folder)
    return folder


def add_nothing_around(folder: Path) -> None:
    """Change a tokenizer so that it declares tokens that begin and end a text, and adds none."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps({**content, "post_processor": None}), encoding="utf-8")
