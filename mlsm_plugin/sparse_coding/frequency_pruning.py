"""Which occurrences of words take part in dictionary learning, by how frequent the words are."""

from __future__ import annotations

import numpy as np

MODES = ("none", "subsample", "drop")


def keep_mask(
    token_ids: np.ndarray,
    counts: np.ndarray,
    *,
    mode: str,
    threshold: float = 1e-5,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Choose the occurrences to learn a dictionary from, so that frequent words do not crowd out the others.

    With ``f = counts[token] / counts.sum()`` and ``t = threshold``:

    - ``"none"`` keeps everything;
    - ``"subsample"`` discards an occurrence with probability ``1 - sqrt(t / f)``, never if ``f <= t``
      (Mikolov et al., "Distributed Representations of Words and Phrases", 2013, eq. 5);
    - ``"drop"`` keeps only the words with ``f < t``.

    Args:
        token_ids: (n,) int, the occurrences.
        counts: (vocab,) occurrences of each word over the whole training split.
        mode: one of the above.
        threshold: relative frequency t, > 0.
        rng: source of the randomness of ``"subsample"``; the other modes need none.

    Returns:
        (n,) bool, True where the occurrence is kept.

    Raises:
        ValueError: unknown mode, a threshold <= 0, negative counts or none at all, an id outside the vocabulary,
            or ``"subsample"`` without ``rng``.
    """
    token_ids, counts = np.asarray(token_ids), np.asarray(counts, dtype=np.float64)
    if mode not in MODES:
        raise ValueError(f"unknown pruning mode {mode!r}; choose one of {', '.join(MODES)}")
    if not threshold > 0:
        raise ValueError(f"threshold must be a relative frequency > 0, got {threshold}")
    if token_ids.size and not (token_ids.min() >= 0 and token_ids.max() < len(counts)):
        raise ValueError(
            f"token ids run from {token_ids.min()} to {token_ids.max()} but counts covers 0 to {len(counts) - 1}; "
            "count with the dictionary that binarized the tokens"
        )
    if mode == "none":
        return np.ones(token_ids.shape, dtype=bool)
    total = counts.sum()
    if not total > 0 or (counts < 0).any():
        raise ValueError("counts must be >= 0 and not all zero: the occurrences of each word in the training split")

    frequency = counts / total
    if mode == "drop":
        return (frequency < threshold)[token_ids]
    if rng is None:
        raise ValueError("mode 'subsample' draws at random: pass rng=numpy.random.default_rng(seed)")
    keep_probability = np.sqrt(threshold / np.maximum(frequency, threshold))
    return rng.random(token_ids.shape) < keep_probability[token_ids]
