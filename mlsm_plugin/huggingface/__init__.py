"""The objectives for models of Hugging Face, without fairseq: coding, collators, models for the library's Trainer."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "Adaptation": "huggingface.adaptation",
    "CodingSettings": "auxiliary.split_coder",
    "Contrast": "huggingface.collators",
    "LatentSemanticCollator": "huggingface.collators",
    "LatentSemanticModel": "huggingface.latent_semantic_model",
    "LearningSettings": "auxiliary.coder_learning",
    "MaskedLmCollator": "huggingface.collators",
    "MaskedLmModel": "huggingface.masked_lm_model",
    "Masking": "huggingface.collators",
    "PretrainingCallback": "huggingface.trainer_callback",
    "PretrainingSequences": "huggingface.pretraining_sequences",
    "SpanContrastiveModel": "huggingface.span_contrastive_model",
    "SpanDenoisingCollator": "huggingface.span_denoising",
    "SpanGroups": "huggingface.span_groups",
    "SpanGroupsCollator": "huggingface.span_groups",
    "TokenContrastiveCollator": "huggingface.collators",
    "TokenContrastiveModel": "huggingface.token_contrastive_model",
    "TokenSequences": "huggingface.token_sequences",
    "TrainingSettings": "huggingface.training",
    "adapt": "huggingface.adaptation",
    "encode_sequences": "huggingface.coding",
    "learn_from_sequences": "huggingface.dictionaries",
    "load_coder": "sparse_coding.coder",
    "loss_metrics": "huggingface.trainer_callback",
    "prepare": "huggingface.trainer_callback",
    "save_pretrained": "files.hf_files",
    "write_text_sequences": "huggingface.text_sequences",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a name of the package when it is first used, since the library takes seconds to import."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"mlsm_plugin.{_MODULE_OF[name]}"), name)
