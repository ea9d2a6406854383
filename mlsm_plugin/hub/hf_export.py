"""Export of a checkpoint to Hugging Face: a stock model for masked LM with a fast tokenizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlsm_plugin.fairseq_seams import roberta_parts
from mlsm_plugin.files.atomic_files import atomic_directory
from mlsm_plugin.files.hf_files import LATENT_HEAD, written_by_library
from mlsm_plugin.files.hf_versions import save_pretrained
from mlsm_plugin.hub.modernbert_export import modernbert_model
from mlsm_plugin.hub.roberta_export import roberta_model
from mlsm_plugin.models.modern_layers import ModernTransformer
from mlsm_plugin.tokenization.hf_bpe import HuggingFaceBPE
from mlsm_plugin.tokenization.word_boundaries import SENTENCEPIECE_BEGIN

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
LARGEST_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class ExportProof:
    """What was found when the written files were loaded again.

    Attributes:
        lines: number of lines of text whose ids are the same.
        reordered: number of further lines that are cut into the same pieces in another order. Long runs of one
            character have many cuts of equal probability, and float32 rounding decides which one SentencePiece chooses.
        tokens: number of tokens of all these lines.
        largest_difference: largest absolute difference of two logits.
        latent_atoms: number of atoms of the latent head; 0 if there is none.
    """

    lines: int
    reordered: int
    tokens: int
    largest_difference: float
    latent_atoms: int


def check_exportable(interface: Any) -> None:
    """Raise ValueError unless the model is a pre-trained encoder whose tokenizer can be exported."""
    from mlsm_plugin.hub import MlsmHubInterface

    if not isinstance(interface, MlsmHubInterface):
        raise ValueError("only RoBERTa-like encoders can be exported; this is an encoder-decoder (span denoising)")
    if not hasattr(interface.bpe, "sp") and not isinstance(interface.bpe, HuggingFaceBPE):
        raise ValueError("only models with a SentencePiece or Hugging Face tokenizer can be exported")
    if len(roberta_parts.classification_heads(interface.model)):
        raise ValueError("this is a fine-tuned classifier; export the pre-trained checkpoint that it came from")


def exported_ids(interface: Any) -> Tensor:
    """For each id of the dictionary its id in the exported model, ``(len(dictionary),)`` int64, a permutation.

    With SentencePiece both are the same. A Hugging Face tokenizer keeps its own ids; symbols that it does not know,
    such as NPM's, come after them.

    Raises:
        ValueError: two special symbols share a token of that tokenizer, or its ids have gaps.
    """
    ids = torch.arange(len(interface.task.source_dictionary))
    if isinstance(interface.bpe, HuggingFaceBPE):
        own = torch.from_numpy(interface.bpe.tokenizer.hf_ids)
        ids[: len(own)] = own
    if not torch.equal(ids.sort().values, torch.arange(len(ids))):
        raise ValueError(
            "the model's Hugging Face tokenizer has ids without tokens, or no separate tokens for unknown and "
            "for masked text; it cannot be exported"
        )
    return ids


def stock_model(interface: Any, ids: Tensor) -> Any:
    """The library's model that computes what ours computes, with ``ids`` from :func:`exported_ids`.

    Raises:
        ValueError: the library has no such model.
    """
    modern = isinstance(roberta_parts.sentence_encoder(interface.model), ModernTransformer)
    return modernbert_model(interface, ids) if modern else roberta_model(interface, ids)


def fast_tokenizer(interface: Any) -> Any:
    """The ``transformers.PreTrainedTokenizerFast`` of the exported model."""
    if isinstance(interface.bpe, HuggingFaceBPE):
        return _its_own_tokenizer(interface)
    return _tokenizer_from_sentencepiece(interface)


def _its_own_tokenizer(interface: Any) -> Any:
    """The Hugging Face tokenizer that the model was trained with, plus the symbols that only the dictionary has."""
    from transformers import AddedToken, AutoTokenizer

    own = interface.bpe.tokenizer
    tokenizer = AutoTokenizer.from_pretrained(
        own.folder,
        trust_remote_code=False,
        model_max_length=int(interface.model.max_positions()),
        model_input_names=[
            "input_ids",
            "attention_mask",
        ],  # BERT's tokenizer also gives token types, for which the model has one row
    )
    further = interface.task.source_dictionary.symbols[len(own.hf_ids) :]
    tokenizer.add_tokens([AddedToken(symbol, special=True) for symbol in further], special_tokens=True)
    return tokenizer


def _tokenizer_from_sentencepiece(interface: Any) -> Any:
    """A tokenizer that gives fairseq's ids.

    Raises:
        ValueError: the SentencePiece model is not of type unigram.
    """
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    dictionary = interface.task.source_dictionary
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(interface.bpe.sp.serialized_model_proto())
    if proto.trainer_spec.model_type != proto.trainer_spec.UNIGRAM:
        raise ValueError("only SentencePiece models of type unigram can be exported")
    scores = {piece.piece: piece.score for piece in proto.pieces}
    vocabulary = [(symbol, scores.get(symbol, 0.0)) for symbol in dictionary.symbols]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=dictionary.unk(), byte_fallback=False))
    steps: list[Any] = []
    if proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SENTENCEPIECE_BEGIN, prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement=SENTENCEPIECE_BEGIN, prepend_scheme="always")
    ends = [(symbol, dictionary.index(symbol)) for symbol in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=int(interface.model.max_positions()),
        **{**SPECIAL, "mask_token": AddedToken("<mask>", lstrip=True, special=True)},
    )


@torch.no_grad()
def export(interface: Any, output: str | os.PathLike[str], lines: Sequence[str]) -> ExportProof:
    """Write configuration, weights (safetensors) and tokenizer, load them again, and compare.

    Args:
        interface: a loaded model, see :func:`mlsm_plugin.hub.from_pretrained`.
        output: the folder; nothing appears there unless the comparison succeeds.
        lines: text on which ids and logits are compared.

    Raises:
        ValueError: the model cannot be exported, ids differ, or a logit differs by more than 1e-4.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    check_exportable(interface)
    interface.eval().float().cpu()
    ids = exported_ids(interface)
    model = stock_model(interface, ids)
    with atomic_directory(output) as folder:
        tokenizer = fast_tokenizer(interface)
        save_pretrained(folder, model, tokenizer)
        if interface.num_atoms:
            projection = roberta_parts.lm_head(interface.model).atom_projection.state_dict()
            weights = {name: value.float().contiguous() for name, value in projection.items()}
            with written_by_library(folder):
                save_file(weights, str(folder / LATENT_HEAD))
        written = AutoModelForMaskedLM.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        reordered, tokens, difference = compare(interface, ids, tokenizer, written, lines, word="exported")
        if not interface.num_atoms:
            Path(output, LATENT_HEAD).unlink(missing_ok=True)  # of an earlier export to this folder
    return ExportProof(len(lines) - reordered, reordered, tokens, difference, interface.num_atoms)


@torch.no_grad()
def compare(
    interface: Any, ids: Tensor, tokenizer: Any, model: Any, lines: Sequence[str], *, word: str
) -> tuple[int, int, float]:
    """Compare a model with the library's: ids and logits of lines of text.

    Args:
        interface: our model, in eval mode.
        ids: for each of our ids the library's, ``(len(dictionary),)`` int64.
        tokenizer, model: the library's.
        lines: the text; a token of each line is masked.
        word: how an error calls the model, such as "exported".

    Returns:
        number of lines whose pieces come in another order, number of tokens, and largest difference of a logit.

    Raises:
        ValueError: ids differ, or a logit differs by more than 1e-4.
    """
    limit = int(interface.model.max_positions())
    reordered, tokens, difference = 0, 0, 0.0
    for line in lines:
        own = interface.encode(line)
        found, expected = tokenizer(line)["input_ids"], ids[own].tolist()
        reordered += found != expected
        if sorted(found) != sorted(expected):
            raise ValueError(f"the {word} tokenizer gives other ids for {line!r}; nothing was written")
        own = own[:limit].clone()
        if len(own) > 2:
            own[len(own) // 2] = interface.task.mask_idx
        ours, theirs = interface.model(own[None])[0], model(input_ids=ids[own][None]).logits
        largest = float((ours - theirs[..., ids]).abs().max())
        if not largest <= LARGEST_DIFFERENCE:  # true for NaN, too
            raise ValueError(f"the {word} model's logits differ by {largest:.2g}; nothing was written")
        tokens, difference = tokens + len(own), max(difference, largest)
    return reordered, tokens, difference
