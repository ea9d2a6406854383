"""The objectives in the Trainer of ``transformers``, without fairseq: coding, collators, models."""

from importlib import import_module
from typing import Any

_NAMES_IN = {
    "core.coding.coder_learning": "LearningSettings",
    "core.coding.split_coder": "CodingSettings",
    "huggingface.adaptation": "Adaptation adapt",
    "huggingface.coding": "encode_sequences learn_from_sequences",
    "huggingface.collators": "LatentSemanticCollator MaskedLmCollator Masking SpanDenoisingCollator SpanGroupsCollator "
    "TokenContrastiveCollator",
    "huggingface.distilled_model": "DistilledModel SentenceVectorModel",
    "huggingface.latent_semantic_model": "LatentSemanticModel",
    "huggingface.pretraining_model": "MaskedLmModel SpanContrastiveModel TokenContrastiveModel",
    "huggingface.pretraining_sequences": "PretrainingSequences SpanGroups",
    "huggingface.saved_folder": "save_pretrained",
    "huggingface.sentence_vectors": "SentenceCollator SentenceVectors write_vectors",
    "huggingface.text_sequences": "write_text_sequences",
    "huggingface.token_sequences": "TokenSequences",
    "huggingface.trainer_callback": "PretrainingCallback loss_metrics prepare",
    "huggingface.training": "TrainingSettings muon_adamw",
    "core.losses.token_contrastive": "Contrast",
    "core.sparse_coding.coder": "load_coder",
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a name of the package when it is first used, since ``transformers`` takes seconds to import."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"mlsm_plugin.{_MODULE_OF[name]}"), name)
