"""The most informative tokens of an atom: not its most common tokens, but tokens more common than by chance."""

import numpy as np
import scipy.sparse as sp


def telling_tokens(weights: sp.csr_matrix, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each atom, at most ``count`` of the most informative tokens and their scores, the highest first.

    The score of a token is p log(p / q), where p is its share of the atom's weight, and q its share of all weight: its
    term of the Kullback-Leibler divergence.

    Args:
        weights: ``(n_atoms, V)``, the sums of each atom's activations on each token.
        count: largest number of tokens per atom.
    """
    weights = weights.tocsr().astype(np.float64)
    of_atom = np.asarray(weights.sum(axis=1)).ravel()
    of_token = np.asarray(weights.sum(axis=0)).ravel()
    total = max(float(weights.sum()), 1e-12)
    chosen = []
    for atom in range(weights.shape[0]):
        row = slice(weights.indptr[atom], weights.indptr[atom + 1])
        tokens = weights.indices[row]
        share = weights.data[row] / max(of_atom[atom], 1e-12)
        telling = share * np.log(np.maximum(share, 1e-300) * total / np.maximum(of_token[tokens], 1e-12))
        order = np.argsort(-telling, kind="stable")[:count]
        chosen.append((tokens[order], telling[order]))
    return chosen
