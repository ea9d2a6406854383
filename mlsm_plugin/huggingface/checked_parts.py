"""Checks that the parts of a training fit together: model, tokenizer, text, and batch size."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mlsm_plugin.core.hidden_states.hf_encoder import SUPPORTED, HuggingFaceEncoder, check_vocabulary, positions_of
from mlsm_plugin.core.masking.masked_share import check_masked_share, check_usable_share, samples_to_look_at
from mlsm_plugin.core.text.unknown_tokens import warn_of_unknown_ids
from mlsm_plugin.huggingface.collators import (
    AuxiliaryTextCollator,
    MaskedLmCollator,
    SpanGroupsCollator,
    TokenContrastiveCollator,
)
from mlsm_plugin.huggingface.pretraining_sequences import PretrainingSequences
from mlsm_plugin.huggingface.sentence_vectors import SentenceCollator
from mlsm_plugin.huggingface.token_sequences import TokenSequences

if TYPE_CHECKING:
    from transformers import Trainer

Collator = MaskedLmCollator | SpanGroupsCollator | SentenceCollator

OWN_TOKENIZER = "pass the tokenizer that made them to the collator"
OTHER_VOCABULARY = "align them with write_aligned, or use an auxiliary model with the same vocabulary"
FEW_PAIRS = (
    "an anchor needs another known token in its sequence, and other sequences in its batch: use longer sequences, or a "
    "larger batch (--batch-size, per_device_train_batch_size)"
)


def with_inner(dataset: object) -> Iterator[Any]:
    """A dataset, and the datasets inside torch's ``Subset`` and ``ConcatDataset``."""
    yield dataset
    for inner in (getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())):
        if inner is not None:
            yield from with_inner(inner)


def check_parts(model: Any, dataset: Any, collator: object, name: str) -> None:
    """Check that a model, a dataset called ``name`` and a collator of this package fit; other collators are accepted.

    ValueError if the model has too few embeddings for the tokenizer or too few positions for a sequence, the sequences
    were made with another tokenizer, or hardly any text is masked. Unknown tokens cause a warning.
    """
    if not isinstance(collator, (MaskedLmCollator, SpanGroupsCollator, SentenceCollator)):
        return
    check_vocabulary(collator, model.get_input_embeddings().num_embeddings, type(model).__name__)
    positions = _positions(model, collator)
    for inner in with_inner(dataset):
        sequences = getattr(inner, "sequences", None)
        if isinstance(sequences, TokenSequences):
            title = f"the sequences of {name}"
            sequences.check_made_with(collator.vocabulary, title, "the collator", remedy=OWN_TOKENIZER)
            sequences.check_positions(positions)
            if not isinstance(collator, SentenceCollator):
                ids = np.concatenate([sequences[index] for index in samples_to_look_at(len(sequences))])
                warn_of_unknown_ids(title, *collator.unknown_counts(title, ids))
    if hasattr(dataset, "__len__") and not isinstance(collator, SentenceCollator):
        batches = (collator([dataset[index]]) for index in samples_to_look_at(len(dataset)))
        counts = (collator.masked_counts(batch) for batch in batches)
        check_masked_share(name, counts, collator.mask_prob, remedy=collator.few_masks)


def _positions(model: Any, collator: Collator) -> int:
    """Tokens of the longest sequence that a model takes; ValueError if a collator of NPM makes longer sequences."""
    positions = positions_of(model.config) if model.config.model_type in SUPPORTED else sys.maxsize
    longest = collator.masking.max_length if isinstance(collator, SpanGroupsCollator) else None
    if longest is not None and longest > positions:
        raise ValueError(f"max_length of the collator is {longest}, and the model takes at most {positions}; pass that")
    return positions


def check_auxiliary(encoder: HuggingFaceEncoder, dataset: Any, collator: object, name: str) -> None:
    """Check that an auxiliary model reads the text of a dataset in its own tokens.

    ValueError if the batches lack that text, or it was made with another tokenizer.
    """
    if not isinstance(collator, AuxiliaryTextCollator):
        raise ValueError(f"{type(collator).__name__} has no text for the auxiliary model; use AuxiliaryTextCollator")
    tokenizer = encoder.tokenizer
    for inner in with_inner(dataset):
        if isinstance(inner, PretrainingSequences):
            sequences = inner.sequences
            if inner.aligned is not None:
                sequences = inner.aligned.sequences
            elif collator.vocabulary != tokenizer.vocabulary_fingerprint:
                raise ValueError(
                    f"the auxiliary model would read {name} in the ids of the collator's tokenizer, which has another "
                    f"vocabulary than its own: the same ids mean other tokens; {OTHER_VOCABULARY}"
                )
            title = f"the auxiliary model's sequences of {name}"
            sequences.check_made_with(tokenizer.vocabulary_fingerprint, title, "that model", remedy=OTHER_VOCABULARY)
            sequences.check_positions(encoder.max_tokens, title)


def check_contrast(trainer: "Trainer") -> None:
    """Check that most anchors of a TACO training have a positive and negatives in batches of its size.

    ValueError if hardly any do: the training would be plain masked LM.
    """
    dataset: Any = trainer.train_dataset
    collator = trainer.data_collator
    size = trainer.args.train_batch_size
    if not isinstance(collator, TokenContrastiveCollator) or not hasattr(dataset, "__len__"):
        return
    if getattr(trainer.model, "contrastive_weight", 0) > 0:
        places = samples_to_look_at(len(dataset))
        places_of_batches = (places[first : first + size] for first in range(0, len(places), size))
        batches = (collator([dataset[index] for index in batch_places]) for batch_places in places_of_batches)
        counts = (collator.contrasted_counts(batch) for batch in batches)
        check_usable_share("anchors of train_dataset have a positive and negatives", counts, remedy=FEW_PAIRS)
