"""The objectives in the Trainer of ``transformers``, without fairseq: coding, collators, models.

Users import all names from here. Each is loaded on first use, since ``transformers`` takes seconds to import; the
imports below are for type checkers. Add a new name to both lists.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlsm_plugin.core.coding.coder_learning import LearningSettings
    from mlsm_plugin.core.coding.split_coder import CodingSettings
    from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder
    from mlsm_plugin.core.losses.sentence_vectors import leading_directions
    from mlsm_plugin.core.losses.token_contrastive import Contrast
    from mlsm_plugin.core.sparse_coding.coder import load_coder
    from mlsm_plugin.huggingface.adaptation import adapt
    from mlsm_plugin.huggingface.adaptation_settings import Adaptation
    from mlsm_plugin.huggingface.aligned_sequences import write_aligned
    from mlsm_plugin.huggingface.coding import encode_sequences, learn_from_sequences
    from mlsm_plugin.huggingface.collators import (
        AuxiliaryTextCollator,
        LatentSemanticCollator,
        MaskedLmCollator,
        Masking,
        SpanDenoisingCollator,
        SpanGroupsCollator,
        TokenContrastiveCollator,
    )
    from mlsm_plugin.huggingface.distilled_model import DistilledModel, SentenceVectorModel
    from mlsm_plugin.huggingface.kept_states_model import KeptStatesModel
    from mlsm_plugin.huggingface.latent_semantic_model import LatentSemanticModel
    from mlsm_plugin.huggingface.pretraining_model import MaskedLmModel, SpanContrastiveModel, TokenContrastiveModel
    from mlsm_plugin.huggingface.pretraining_sequences import PretrainingSequences, SpanGroups
    from mlsm_plugin.huggingface.saved_folder import save_pretrained
    from mlsm_plugin.huggingface.sentence_vectors import SentenceCollator, SentenceVectors, write_vectors
    from mlsm_plugin.huggingface.state_regression_model import StateRegressionModel
    from mlsm_plugin.huggingface.text_sequences import write_text_sequences
    from mlsm_plugin.huggingface.token_sequences import TokenSequences
    from mlsm_plugin.huggingface.trainer_callback import PretrainingCallback, loss_metrics, prepare
    from mlsm_plugin.huggingface.training import TrainingSettings, muon_adamw

_MODULE_OF = {
    "Adaptation": "mlsm_plugin.huggingface.adaptation_settings",
    "CodingSettings": "mlsm_plugin.core.coding.split_coder",
    "Contrast": "mlsm_plugin.core.losses.token_contrastive",
    "DistilledModel": "mlsm_plugin.huggingface.distilled_model",
    "LatentSemanticCollator": "mlsm_plugin.huggingface.collators",
    "LatentSemanticModel": "mlsm_plugin.huggingface.latent_semantic_model",
    "LearningSettings": "mlsm_plugin.core.coding.coder_learning",
    "KeptStatesModel": "mlsm_plugin.huggingface.kept_states_model",
    "HuggingFaceEncoder": "mlsm_plugin.core.hidden_states.hf_encoder",
    "MaskedLmCollator": "mlsm_plugin.huggingface.collators",
    "MaskedLmModel": "mlsm_plugin.huggingface.pretraining_model",
    "Masking": "mlsm_plugin.huggingface.collators",
    "PretrainingCallback": "mlsm_plugin.huggingface.trainer_callback",
    "PretrainingSequences": "mlsm_plugin.huggingface.pretraining_sequences",
    "SentenceCollator": "mlsm_plugin.huggingface.sentence_vectors",
    "SentenceVectorModel": "mlsm_plugin.huggingface.distilled_model",
    "SentenceVectors": "mlsm_plugin.huggingface.sentence_vectors",
    "SpanContrastiveModel": "mlsm_plugin.huggingface.pretraining_model",
    "SpanDenoisingCollator": "mlsm_plugin.huggingface.collators",
    "SpanGroups": "mlsm_plugin.huggingface.pretraining_sequences",
    "SpanGroupsCollator": "mlsm_plugin.huggingface.collators",
    "AuxiliaryTextCollator": "mlsm_plugin.huggingface.collators",
    "StateRegressionModel": "mlsm_plugin.huggingface.state_regression_model",
    "TokenContrastiveCollator": "mlsm_plugin.huggingface.collators",
    "TokenContrastiveModel": "mlsm_plugin.huggingface.pretraining_model",
    "TokenSequences": "mlsm_plugin.huggingface.token_sequences",
    "TrainingSettings": "mlsm_plugin.huggingface.training",
    "adapt": "mlsm_plugin.huggingface.adaptation",
    "encode_sequences": "mlsm_plugin.huggingface.coding",
    "leading_directions": "mlsm_plugin.core.losses.sentence_vectors",
    "learn_from_sequences": "mlsm_plugin.huggingface.coding",
    "load_coder": "mlsm_plugin.core.sparse_coding.coder",
    "loss_metrics": "mlsm_plugin.huggingface.trainer_callback",
    "muon_adamw": "mlsm_plugin.huggingface.training",
    "prepare": "mlsm_plugin.huggingface.trainer_callback",
    "save_pretrained": "mlsm_plugin.huggingface.saved_folder",
    "write_aligned": "mlsm_plugin.huggingface.aligned_sequences",
    "write_text_sequences": "mlsm_plugin.huggingface.text_sequences",
    "write_vectors": "mlsm_plugin.huggingface.sentence_vectors",
}

__all__ = [
    "Adaptation",
    "AuxiliaryTextCollator",
    "CodingSettings",
    "Contrast",
    "DistilledModel",
    "HuggingFaceEncoder",
    "KeptStatesModel",
    "LatentSemanticCollator",
    "LatentSemanticModel",
    "LearningSettings",
    "MaskedLmCollator",
    "MaskedLmModel",
    "Masking",
    "PretrainingCallback",
    "PretrainingSequences",
    "SentenceCollator",
    "SentenceVectorModel",
    "SentenceVectors",
    "SpanContrastiveModel",
    "SpanDenoisingCollator",
    "SpanGroups",
    "SpanGroupsCollator",
    "StateRegressionModel",
    "TokenContrastiveCollator",
    "TokenContrastiveModel",
    "TokenSequences",
    "TrainingSettings",
    "adapt",
    "encode_sequences",
    "leading_directions",
    "learn_from_sequences",
    "load_coder",
    "loss_metrics",
    "muon_adamw",
    "prepare",
    "save_pretrained",
    "write_aligned",
    "write_text_sequences",
    "write_vectors",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULE_OF[name]), name)

    def __dir__() -> list[str]:
        return sorted([*globals(), *_MODULE_OF])
