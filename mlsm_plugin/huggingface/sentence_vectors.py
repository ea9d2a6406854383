"""Sentences with a teacher's vectors, made of its last hidden states; needs no fairseq."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder, HuggingFaceSource
from mlsm_plugin.core.machine.devices import Device
from mlsm_plugin.core.masking.span_corruption import padded
from mlsm_plugin.core.masking.token_ids import check_largest_id, check_padding
from mlsm_plugin.core.text.hf_tokenizer import (
    HuggingFaceTokenizer,
    check_special_tokens,
    number_of_ids,
    vocabulary_fingerprint,
)
from mlsm_plugin.core.text.text_files import read_text
from mlsm_plugin.core.text.unknown_tokens import DEFAULT_MAX_UNK_RATE, UnknownTokens
from mlsm_plugin.huggingface.token_sequences import InputIds, TokenSequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

VECTOR_DTYPE = np.dtype("<f4")
ANOTHER_TEACHER = "choose a teacher whose tokenizer knows such text, or raise --max-unk-rate"
LINES_AT_ONCE = 1024  # sorted by length together
LINES_OF_BATCH = 32  # in a forward pass


def write_vectors(
    texts: Sequence[PathLike],
    sentences: TokenSequences,
    tokenizer: PathLike,
    teacher: PathLike,
    output: Path,
    *,
    max_unk_rate: float = DEFAULT_MAX_UNK_RATE,
    device: Device = None,
    fp16: bool | None = False,
) -> None:
    """Write the teacher's vectors of sentences as an npy file ``(n, d)`` float32.

    A sentence-transformers folder sets the pooling; otherwise, vectors are means. They are not scaled to length 1.
    ValueError if a larger share of the text than ``max_unk_rate`` is unknown to the teacher's tokenizer.

    Args:
        texts, tokenizer: the arguments of a call of ``write_text_sequences`` with ``apart``.
        sentences: the result of this call.
        teacher: folder or hub name of an encoder with its tokenizer; lines that are too long for it are cut.
        output: the file; it is replaced atomically.
        max_unk_rate: see above.
        device, fp16: see :class:`HuggingFaceEncoder`.
    """
    shape = (len(sentences), HuggingFaceSource.width_of(teacher))
    layer = HuggingFaceSource.layers_of(teacher)
    encoder = HuggingFaceEncoder(teacher, layer=layer, device=device, fp16=fp16)
    student_tokenizer = HuggingFaceTokenizer(tokenizer)
    unknown = UnknownTokens()
    cut = 0
    number = 0
    # the lines that have a sequence
    lines = (line for line in read_text(texts) if line and student_tokenizer.encoded_text(line)[0])
    with atomic_open(output) as file, Progress(total=shape[0], desc="vectors of the teacher", unit="line") as progress:
        header = {"descr": VECTOR_DTYPE.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        while batch := list(islice(lines, LINES_AT_ONCE)):
            vectors, longer = _vectors_of(batch, encoder, unknown)
            file.write(vectors.tobytes())
            cut += longer
            number += len(batch)
            progress.update(len(batch))
        if number != shape[0]:
            raise ValueError(f"the text changed while it was read: it had {shape[0]} lines, and has {number} now")
        unknown.check("the text for the teacher", max_unk_rate, remedy=ANOTHER_TEACHER)
    unknown.warn("the text for the teacher")
    if cut:
        logger.warning("%d of %d lines are longer than the teacher's positions and are cut for it", cut, number)


def _vectors_of(lines: list[str], encoder: HuggingFaceEncoder, unknown: UnknownTokens) -> tuple[np.ndarray, int]:
    """The vectors ``(n, d)`` of lines, and how many lines were cut; ``unknown`` counts their tokens."""
    tokenizer = encoder.tokenizer
    room = encoder.max_tokens - len(tokenizer.surrounded([]))
    encoded = tokenizer.encoded(lines)
    for line, (line_ids, offsets) in zip(lines, encoded, strict=True):
        unknown.add(line, line_ids, offsets, tokenizer.unknown_id)
    ids = [tokenizer.surrounded(line_ids[:room]) for line_ids, _ in encoded]
    vectors = np.zeros((len(lines), encoder.dim), VECTOR_DTYPE)
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    for first in range(0, len(order), LINES_OF_BATCH):
        indices = order[first : first + LINES_OF_BATCH]
        tokens = padded([ids[index] for index in indices], encoder.pad)
        vectors[indices] = encoder.text_vectors(tokens, tokens.ne(encoder.pad)).cpu().numpy()
    return vectors, sum(len(line_ids) > room for line_ids, _ in encoded)


@dataclass(frozen=True)
class Sentence:
    """A sentence with the teacher's vector."""

    input_ids: np.ndarray  # (T,) int64, special tokens included
    vector: np.ndarray  # (d,) float32


class SentenceVectors(Dataset):
    """Sentences with the vectors ``(n, d)`` of a teacher; ValueError if their numbers differ.

    A model of the width ``w`` that is less than ``d`` learns their projections on ``directions`` ``(d, w)``, those of
    :func:`leading_directions`.
    """

    def __init__(self, input_ids: InputIds, vectors: np.ndarray, *, directions: np.ndarray | None = None) -> None:
        self.sequences = TokenSequences.of(input_ids)
        self.vectors = vectors
        self.directions = directions
        if directions is not None and directions.shape[:1] != vectors.shape[1:]:
            raise ValueError(f"directions of shape {directions.shape} are not for vectors of shape {vectors.shape}")
        if len(self.sequences) != len(vectors):
            raise ValueError(f"there are {len(self.sequences)} sentences and {len(vectors)} vectors")

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Sentence:
        vector = np.array(self.vectors[index])
        return Sentence(self.sequences[index], vector if self.directions is None else vector @ self.directions)


class SentenceCollator:
    """Pads sentences without masking anything; ValueError if the tokenizer has no separate padding token."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no pad token; use the tokenizer of the model")
        check_special_tokens(tokenizer)
        self.pad = int(tokenizer.pad_token_id)
        self.vocabulary = vocabulary_fingerprint(tokenizer)
        self.largest_id = number_of_ids(tokenizer) - 1

    def __call__(self, sentences: Sequence[Sentence]) -> dict[str, Tensor]:
        """``input_ids``, ``attention_mask`` (B, T), ``vectors`` (B, d), ``labels`` (B, 1), which the Trainer counts.

        ValueError if a sentence has padding before or between other ids, or an id that the tokenizer lacks.
        """
        for number, sentence in enumerate(sentences):
            check_padding(sentence.input_ids, self.pad, f"sentence {number} of the batch")
            check_largest_id(sentence.input_ids, self.largest_id, f"sentence {number} of the batch")
        return {
            "labels": torch.zeros(len(sentences), 1, dtype=torch.int64),
            "input_ids": padded([sentence.input_ids for sentence in sentences], self.pad),
            "attention_mask": padded([sentence.input_ids != self.pad for sentence in sentences], 0),
            "vectors": torch.from_numpy(np.stack([sentence.vector for sentence in sentences])),
        }
