"""Stored codes with their text and their model, which are checked to belong together, for exports to other programs."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import HF_PREFIX
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceSource
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.huggingface.pretraining_sequences import SequenceCodes
from mlsm_plugin.huggingface.token_sequences import TokenSequences


@dataclass(frozen=True)
class CodedText:
    """Codes, the sequences that they were made from, and the model that was coded."""

    codes: SequenceCodes
    text: TokenSequences
    model: str  # folder or hub name, without "hf:"
    tokenizer: HuggingFaceTokenizer


def open_coded_text(codes: PathLike, sequences: PathLike, model: PathLike) -> CodedText:
    """Open codes, sequences and the tokenizer of a model.

    Args:
        codes: folder of the store.
        sequences: the coded sequences, as for :class:`TokenSequences`. After ``mlsm adapt``, pass the folder
            ``tokens``; ``train.codes`` belong to its first sequences.
        model: folder or hub name of the model that was coded.

    Raises:
        ValueError: the codes belong to other sequences or another model, or a part cannot be read.
    """
    store, text = _opened(Path(codes), TokenSequences(sequences))
    name = str(model).removeprefix(HF_PREFIX)
    tokenizer = HuggingFaceTokenizer(name)
    fingerprint = HuggingFaceSource.fingerprint_of(name)
    coded = store.meta["fingerprints"].get("auxiliary")
    if coded not in (None, fingerprint):
        raise ValueError(f"the codes are of another model (SHA-256 {coded[:12]}) than {name} ({fingerprint[:12]})")
    text.check_made_with(
        tokenizer.vocabulary_fingerprint, "the sequences", name, remedy="pass the model whose tokenizer made them"
    )
    return CodedText(store, text, name, tokenizer)


def _opened(codes: Path, text: TokenSequences) -> tuple[SequenceCodes, TokenSequences]:
    """The codes with their sequences, which may be only the first sequences of the text."""
    coded_tokens = len(CodeStore(codes))
    number = int(np.searchsorted(text.starts, coded_tokens))
    if 0 < number < len(text) and text.starts[number] == coded_tokens:
        text = text.part(0, number)
    return SequenceCodes(codes, text), text
