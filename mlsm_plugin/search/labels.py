"""Labels of latent properties: the most telling tokens of each."""

import numpy as np
import scipy.sparse as sp

from mlsm_plugin.core.sparse_coding.telling_tokens import telling_tokens
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer

LABEL_TOKENS = 3


def token_weights(ids: np.ndarray, codes: sp.csr_matrix, vocabulary: int) -> sp.csr_matrix:
    """``(n_atoms, vocabulary)`` float32: the sums of each atom's activations on each token.

    ``ids`` is ``(n,)``, each below ``vocabulary``; ``codes`` is ``(n, n_atoms)``.
    """
    entries = codes.tocoo()
    shape = (codes.shape[1], vocabulary)
    return sp.csr_matrix((entries.data, (entries.col, ids[entries.row])), shape=shape, dtype=np.float32)


def labels_of(weights: sp.csr_matrix, tokenizer: HuggingFaceTokenizer) -> list[str]:
    """The label of each atom: its most telling tokens, joined by commas; empty for an atom that no token has.

    ``weights`` is ``(n_atoms, V)``, from :func:`token_weights`.
    """
    telling = telling_tokens(weights, LABEL_TOKENS)
    return [", ".join(_token_text(tokenizer, int(token)) for token in tokens) for tokens, _ in telling]


def _token_text(tokenizer: HuggingFaceTokenizer, number: int) -> str:
    return str(tokenizer.backend.decode([number], skip_special_tokens=False)).strip()
