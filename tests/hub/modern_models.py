"""Small models of ``mlsm_modern`` and ``mlsm_deberta``, and the library's, whose weights make every part matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fairseq import tasks
from transformers import AutoConfig, AutoModelForMaskedLM

from tests.tiny_hf_models import SETTINGS, make_tokenizer
from tests.tiny_models import positions, save_model
from tests.tiny_run import seeded_model, training_config

POSITIONS = 48
PLAIN = {"task": "plain_masked_lm", "criterion": "masked_lm"}
NPM = {"task": "nonparametric_masked_lm", "criterion": "span_contrastive"}
# a window that is shorter than the samples, and angles that tell local layers from global ones
WINDOW = (
    *("--encoder-layers", 4, "--attention-window", 8, "--global-attention-every", 3),
    *("--rope-theta", 160000, "--local-rope-theta", 500),
)
# distances that share buckets within the samples
BUCKETS = ("--position-buckets", 8, "--max-relative-positions", 24)


def spread_weights(model: torch.nn.Module) -> None:
    """Draw weights that are larger than at the start of a training, also of norms and biases."""
    torch.manual_seed(2)
    for name, values in model.named_parameters():
        torch.nn.init.normal_(values, mean=1.0 if "norm" in name.lower() else 0.0, std=0.3)


def save_modern(data_bin: Path, folder: Path, *flags: object, arch: str = "mlsm_modern_tiny", **options: Any) -> Path:
    """Write what the --save-dir of a run with ``mlsm_modern`` or ``mlsm_deberta`` holds; returns the checkpoint."""
    flags = (*positions(POSITIONS), *flags)
    cfg = training_config(data_bin, *flags, arch=arch, **(options or PLAIN))
    model = seeded_model(cfg, tasks.setup_task(cfg.task))
    spread_weights(model)
    return save_model(cfg, model, folder, data_bin)


def make_stock(kind: str, text: Path, folder: Path, *, rows: int = 0, **settings: Any) -> Any:
    """Write a stock masked LM of 4 layers with its tokenizer; its window or its buckets are smaller than the samples.

    Args:
        kind: ``modernbert`` or ``deberta-v2``.
        text: what the tokenizer is trained on.
        folder: the folder to write.
        rows: embeddings that no token has.
        settings: of the configuration.

    Returns:
        the model, in eval mode.
    """
    tokenizer = make_tokenizer("modern_byte_level", text, folder)
    special = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("cls", "sep", "pad")}
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48}
    config = AutoConfig.for_model(
        kind,
        **{"vocab_size": len(tokenizer) + rows, "max_position_embeddings": POSITIONS, **special, **sizes}
        | {"bos_token_id": special["cls_token_id"], "eos_token_id": special["sep_token_id"]}
        | SETTINGS[kind]
        | settings,
    )
    model = AutoModelForMaskedLM.from_config(config).eval()
    spread_weights(model)
    model.save_pretrained(folder)
    return model
