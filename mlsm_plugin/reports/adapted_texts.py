"""The text of an adaptation with its codes, for a report; needs no fairseq."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.files.step_record import RECORD, StepRecord
from mlsm_plugin.core.sparse_coding.code_store import META_FILE, CodeStore
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.huggingface.adaptation_folder import AUXILIARY, MODEL, PLACES, TEXT_PARTS
from mlsm_plugin.huggingface.aligned_sequences import AlignedSequences
from mlsm_plugin.huggingface.pretraining_sequences import PretrainingSequences
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from mlsm_plugin.reports.latent_report import AtomSummary, summarize_atoms
from mlsm_plugin.reports.raised_tokens import Block, CountedBlocks, set_raised_tokens_of_folder

SEQUENCES_AT_ONCE = 100


def is_adaptation(folder: Path) -> bool:
    """Whether a folder is the output of ``mlsm adapt``."""
    return (folder / RECORD).is_file() and (folder / "tokens").is_dir()


def summarize_adaptation(folder: Path, split: str, *, max_tokens: int) -> tuple[list[AtomSummary], CodeStore]:
    """Summaries of all atoms over the first ``max_tokens`` tokens of a part of the text, and its codes.

    The tokens come from the trained model's tokenizer, even if the codes come from a teacher with another vocabulary.
    ValueError if there is no such part, the adaptation made no codes, or it is not finished.
    """
    dataset = coded_part(folder, split)
    symbols = HuggingFaceTokenizer(folder / MODEL).tokens_by_id()
    blocks = CountedBlocks(coded_blocks(dataset, max_tokens), len(symbols))
    summaries = summarize_atoms(blocks, num_atoms=dataset.num_atoms, num_types=len(symbols), symbols=symbols)
    set_raised_tokens_of_folder(summaries, folder / MODEL, symbols, blocks.counts)
    return summaries, CodeStore(folder / f"{split}.codes")


def coded_part(folder: Path, split: str) -> PretrainingSequences:
    """A part of the text of an adaptation with its codes; ValueError as for :func:`summarize_adaptation`."""
    if split not in TEXT_PARTS:
        raise ValueError(f"--split is one of {', '.join(TEXT_PARTS)} for {folder}, got {split}")
    codes = folder / f"{split}.codes"
    if not (codes / META_FILE).is_file():
        raise ValueError(f"{folder} has no codes ({codes.name}); only objectives with mlsm make them")
    check_finished(folder)
    return _dataset(folder, split, codes)


def check_finished(folder: Path) -> None:
    """Raise ValueError if an adaptation has not written its model yet."""
    if not (folder / MODEL).is_dir():
        raise ValueError(f"{folder} is not finished; run the same `mlsm adapt` again")


def _dataset(folder: Path, split: str, codes: Path) -> PretrainingSequences:
    """The sequences of a part of the text, with their codes; held-out sequences may lie at the end of the text."""
    record = StepRecord(folder / RECORD)
    name = "valid" if split == "valid" and "valid" in record.folders_of("text") else "tokens"
    text = TokenSequences(folder / name)
    aligned = None
    coded = text
    if f"{name}.{PLACES}" in record.folders_of("alignment"):
        coded = TokenSequences(folder / f"{name}.{AUXILIARY}")
        aligned = AlignedSequences(coded, TokenSequences(folder / f"{name}.{PLACES}"))
    first = 0
    last = int(np.searchsorted(coded.starts, len(CodeStore(codes))))  # for a part at the beginning of the text
    if split == "valid" and name == "tokens":
        first = int(np.searchsorted(coded.starts, coded.num_tokens - len(CodeStore(codes))))
        last = len(text)
    return PretrainingSequences(
        text.part(first, last), codes, aligned=None if aligned is None else aligned.part(first, last)
    )


def coded_blocks(dataset: PretrainingSequences, max_tokens: int) -> Iterator[Block]:
    """Yield ids ``(n,)`` and codes ``(n, num_atoms)`` of several sequences at a time."""
    store = dataset.codes
    assert store is not None
    done = 0
    with Progress(total=min(max_tokens, dataset.sequences.num_tokens), desc="reading codes", unit="token") as progress:
        for first in range(0, len(dataset), SEQUENCES_AT_ONCE):
            if done >= max_tokens:
                break
            samples = [dataset[index] for index in range(first, min(first + SEQUENCES_AT_ONCE, len(dataset)))]
            ids = np.concatenate([sample.input_ids for sample in samples])[: max_tokens - done]
            positions = np.concatenate([sample.positions for sample in samples])[: max_tokens - done]
            atoms, weights = store.lookup(np.maximum(positions, 0))
            used = (weights > 0) & (positions >= 0)[:, None]
            rows = np.nonzero(used)[0]
            codes = csr_matrix(
                (weights[used].astype(np.float32), (rows, atoms[used])), shape=(len(ids), store.num_atoms)
            )
            yield ids, codes
            done += len(ids)
            progress.update(len(ids))
