"""The objectives for models of Hugging Face, without fairseq: coding, collators, models for the library's Trainer."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "Contrast": "collators",
    "LatentSemanticCollator": "collators",
    "MaskedLmCollator": "collators",
    "Masking": "collators",
    "TokenContrastiveCollator": "collators",
    "LatentSemanticModel": "latent_semantic_model",
    "MaskedLmModel": "masked_lm_model",
    "PretrainingCallback": "trainer_callback",
    "PretrainingSequences": "pretraining_sequences",
    "SpanContrastiveModel": "span_contrastive_model",
    "SpanGroups": "span_groups",
    "SpanGroupsCollator": "span_groups",
    "TokenContrastiveModel": "token_contrastive_model",
    "TokenSequences": "token_sequences",
    "loss_metrics": "trainer_callback",
    "prepare": "trainer_callback",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a name of the package when it is first used, since the library takes seconds to import."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
