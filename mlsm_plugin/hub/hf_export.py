"""Export a checkpoint to Hugging Face: a stock model for masked LM with a fast tokenizer."""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import LATENT_HEAD, import_transformers, save_pretrained, written_by_library
from mlsm_plugin.core.files.model_folders import new_model_folder
from mlsm_plugin.core.files.sentence_modules import write_modules
from mlsm_plugin.core.masking.word_boundaries import SENTENCEPIECE_BEGIN
from mlsm_plugin.core.text.hf_tokenizer import SPECIAL_SYMBOLS, HuggingFaceTokenizer
from mlsm_plugin.core.text.masked_reading import reading_as_trained
from mlsm_plugin.fairseq_plugin.compat import model_parts
from mlsm_plugin.fairseq_plugin.compat.training_options import learns_vectors, why_untrained
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import HuggingFaceBPE
from mlsm_plugin.hub.comparison import REMEDY, Comparison, compare, vocabulary_difference
from mlsm_plugin.hub.stock_models import stock_model
from mlsm_plugin.huggingface.pretraining_model import head_transform

if TYPE_CHECKING:
    from mlsm_plugin.hub.interface import MlsmHubInterface

# characters that are whitespace for Python, but not for SentencePiece; fairseq drops them when it splits a line
WHITESPACE = "[\t-\r\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"


@dataclass(frozen=True)
class ExportProof(Comparison):
    """The result of a comparison with the written files, loaded again."""

    latent_atoms: int  # number of atoms of the latent head; 0 if there is none
    vocabulary: str | None  # how it differs from the tokenizer's, if it does; other text can then get other ids
    no_head: str | None  # why the masked-LM head was left out, if it was


def check_exportable(interface: "MlsmHubInterface") -> None:
    """Raise ValueError unless the model is a pre-trained encoder whose tokenizer can be exported."""
    from mlsm_plugin.hub import MlsmHubInterface

    if not isinstance(interface, MlsmHubInterface):
        raise ValueError("only RoBERTa-like encoders can be exported; this is an encoder-decoder (span denoising)")
    if not hasattr(interface.bpe, "sp") and not isinstance(interface.bpe, HuggingFaceBPE):
        raise ValueError("only models with a SentencePiece or Hugging Face tokenizer can be exported")
    if len(model_parts.classification_heads(interface.model)):
        raise ValueError("this is a fine-tuned classifier; export the pre-trained checkpoint that it came from")


def exported_ids(interface: "MlsmHubInterface") -> Tensor:
    """The id in the exported model for each id of the dictionary, ``(len(dictionary),)`` int64, a permutation.

    A Hugging Face tokenizer keeps its ids; symbols that it does not know, such as NPM's, come after them. ValueError if
    the dictionary does not belong to the tokenizer, or there is no such permutation.
    """
    ids = torch.arange(len(interface.task.source_dictionary))
    if isinstance(interface.bpe, HuggingFaceBPE):
        tokenizer = interface.bpe.tokenizer
        symbols = interface.task.source_dictionary.symbols
        tokenizer_ids = torch.from_numpy(tokenizer.hf_ids)
        if symbols[SPECIAL_SYMBOLS : len(tokenizer_ids) - 1] != tokenizer.symbols:
            raise ValueError(f"the model's dict.txt was not made from its Hugging Face tokenizer; {REMEDY}")
        ids[: len(tokenizer_ids)] = tokenizer_ids
    if not torch.equal(ids.sort().values, torch.arange(len(ids))):
        raise ValueError(
            "the model's Hugging Face tokenizer has ids without tokens, or no separate tokens for unknown and "
            "for masked text; it cannot be exported"
        )
    return ids


def fast_tokenizer(interface: "MlsmHubInterface") -> Any:
    """The ``transformers.PreTrainedTokenizerFast`` of the exported model.

    A Hugging Face tokenizer gets the symbols that only the dictionary has, and reads text beside masks as in training.
    """
    from transformers import AddedToken, AutoTokenizer

    if not isinstance(interface.bpe, HuggingFaceBPE):
        return _tokenizer_from_sentencepiece(interface)
    source = interface.bpe.tokenizer
    tokenizer: Any = AutoTokenizer.from_pretrained(
        source.folder,
        trust_remote_code=False,
        model_max_length=int(interface.model.max_positions()),
        # BERT's tokenizer also returns token types, but the model has only one type
        model_input_names=["input_ids", "attention_mask"],
    )
    further = interface.task.source_dictionary.symbols[len(source.hf_ids) :]
    tokenizer.add_tokens([AddedToken(symbol, special=True) for symbol in further], special_tokens=True)
    return reading_as_trained(tokenizer)


def exported_tokenizer(interface: "MlsmHubInterface") -> HuggingFaceTokenizer:
    """The tokenizer of the exported model, for use before the export; ValueError if it cannot be exported."""
    import_transformers()
    exported_ids(interface)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(folder, fast_tokenizer(interface))
        return HuggingFaceTokenizer(folder)


def _tokenizer_from_sentencepiece(interface: "MlsmHubInterface") -> Any:
    """A tokenizer with fairseq's ids; ValueError if the SentencePiece model is not of type unigram."""
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
    rests = [re.escape(symbol[1:]) for symbol in dictionary.symbols if re.fullmatch(r"<[^<>]+>", symbol)]
    steps: list[Any] = []
    if proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    # leading spaces become one space, which marks the first word as a space after a mask does
    steps += [normalizers.Replace(Regex(pattern), by) for pattern, by in ((r" +\z", ""), (" {2,}", " "))]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # text right after a mask does not begin a word
            pre_tokenizers.Metaspace(replacement=SENTENCEPIECE_BEGIN, prepend_scheme="first"),
            pre_tokenizers.Split(Regex(WHITESPACE), "removed"),
            # The model also holds the special tokens as pieces. No piece of `mlsm tokenizer` continues after a "<".
            pre_tokenizers.Split(Regex(f"<(?={'|'.join(rests)})"), "merged_with_previous"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement=SENTENCEPIECE_BEGIN, prepend_scheme="always")
    ends = [(symbol, dictionary.index(symbol)) for symbol in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=int(interface.model.max_positions()),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token=AddedToken("<mask>", lstrip=True, special=True),
    )


@torch.no_grad()
def export(
    interface: "MlsmHubInterface", output: PathLike, lines: Sequence[str], *, overwrite: bool = False
) -> ExportProof:
    """Write configuration, weights (safetensors) and tokenizer, load them again, and compare.

    An untrained masked-LM head is left out; ``AutoModel`` opens such a folder, and sentence-transformers if the model
    learned vectors of texts. ``overwrite`` replaces another model in the folder. Ids and logits, or hidden states
    without a head, are compared on ``lines`` of text; nothing appears in ``output`` unless the comparison succeeds.

    ValueError if the model cannot be exported, a package is missing, ids differ, a logit differs by more than 1e-4, or
    the folder holds another model or other files.
    """
    transformers = import_transformers()
    try:
        from google import protobuf  # noqa: F401
        from safetensors.torch import save_file
    except ImportError as error:
        raise ValueError(f"an export needs {error.name}: pip install 'mlsm_plugin[hf]'") from None
    check_exportable(interface)
    interface.eval().float().cpu()
    ids = exported_ids(interface)
    no_head = why_untrained(interface.cfg)
    model = stock_model(interface, ids)
    with new_model_folder(output, overwrite=overwrite) as folder:
        save_pretrained(folder, model if no_head is None else model.base_model, fast_tokenizer(interface))
        if learns_vectors(interface.cfg):
            write_modules(folder, width=model.config.hidden_size, max_length=interface.cfg.task.tokens_per_sample)
        if interface.num_atoms:
            with written_by_library(folder):
                save_file(_latent_head(interface, model, no_head is None), str(folder / LATENT_HEAD))
        kind = transformers.AutoModelForMaskedLM if no_head is None else transformers.AutoModel
        written = kind.from_pretrained(folder).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        comparison = compare(interface, ids, tokenizer, written, lines, word="exported", head=no_head is None)
    vocabulary = vocabulary_difference(interface)
    return ExportProof(**vars(comparison), latent_atoms=interface.num_atoms, vocabulary=vocabulary, no_head=no_head)


def _latent_head(interface: "MlsmHubInterface", model: Any, has_head: bool) -> dict[str, Tensor]:
    """The weights of the latent head, and of the masked-LM head's first half if no other file has it."""
    weights = dict(model_parts.lm_head(interface.model).atom_projection.state_dict())
    if not has_head:
        weights |= head_transform(model, model.state_dict())
    return {name: values.float().contiguous() for name, values in weights.items()}
