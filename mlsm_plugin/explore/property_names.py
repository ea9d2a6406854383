"""The labels of properties for the page: their most telling tokens in a text, or in the text of an adaptation."""

from itertools import islice
from pathlib import Path

import scipy.sparse as sp

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.text_files import read_lines
from mlsm_plugin.reports.adapted_texts import coded_blocks, coded_part
from mlsm_plugin.search.labels import labels_of, token_weights
from mlsm_plugin.search.text_codes import TextCoder

MOST_LINES = 5000  # to read from the beginning of a text
LINES_AT_ONCE = 200
MOST_TOKENS = 300_000  # to read from the text of an adaptation


def labels_of_text(path: PathLike, coder: TextCoder) -> list[str]:
    """The label of each atom in the first 5,000 lines of a text file; raises the errors of :func:`.read_lines`."""
    lines = [line for line in islice(read_lines(path), MOST_LINES) if line]
    vocabulary = coder.tokenizer.largest_id + 1
    weights = sp.csr_matrix((coder.num_atoms, vocabulary))
    with Progress(total=len(lines), desc="naming properties", unit="line") as progress:
        for first in range(0, len(lines), LINES_AT_ONCE):
            batch = lines[first : first + LINES_AT_ONCE]
            for coded in coder.coded(batch):
                weights = weights + token_weights(coded.ids, coded.codes, vocabulary)
            progress.update(len(batch))
    return labels_of(weights, coder.tokenizer)


def labels_of_adaptation(folder: Path, tokenizer: HuggingFaceTokenizer) -> list[str]:
    """The label of each atom in the text of an adaptation; an empty list if it made no codes."""
    try:
        part = coded_part(folder, "train")
    except ValueError:
        return []
    vocabulary = tokenizer.largest_id + 1
    weights = sp.csr_matrix((part.num_atoms, vocabulary))
    for ids, codes in coded_blocks(part, MOST_TOKENS):
        weights = weights + token_weights(ids, codes, vocabulary)
    return labels_of(weights, tokenizer)
