"""A sample of normalized hidden states to learn the dictionary from."""

from __future__ import annotations

import numpy as np

from mlsm_plugin.files.progress import Progress
from mlsm_plugin.hidden_states.blocks import TokenBlocks, hidden_states_of
from mlsm_plugin.hidden_states.encoder import TokenVectors
from mlsm_plugin.sparse_coding.encode import normalize_rows
from mlsm_plugin.sparse_coding.frequency_pruning import keep_mask

BLOCKS_AT_ONCE = 64


def type_counts(reader: TokenBlocks) -> np.ndarray:
    """Occurrences of every symbol in the whole text, ``(n_symbols,)``; those without a position do not count."""
    counts = np.zeros(reader.num_symbols, np.int64)
    for index in Progress(range(len(reader)), desc="counting words", unit="block", leave=False):
        for block in reader.block(index):
            counts += np.bincount(block.tokens[block.positions >= 0].numpy(), minlength=len(counts))
    return counts


def sample_hidden_states(
    reader: TokenBlocks,
    encoder: TokenVectors,
    *,
    num_tokens: int,
    max_batch_tokens: int,
    frequency_pruning: str = "none",
    pruning_threshold: float = 1e-5,
    seed: int = 1,
) -> np.ndarray:
    """Hidden states of blocks drawn uniformly, without replacement, from the whole split.

    Args:
        reader, encoder: the text and the model.
        num_tokens: how many hidden states; all of the split's if it has fewer.
        max_batch_tokens: tokens in one forward pass.
        frequency_pruning, pruning_threshold: see :func:`keep_mask`.
        seed: decides the blocks, their order, and which occurrences ``subsample`` keeps.

    Returns:
        ``(n, dim)`` float32 with unit rows, n <= num_tokens.

    Raises:
        ValueError: frequency pruning removed all tokens.
    """
    rng = np.random.default_rng(seed)
    counts = type_counts(reader) if frequency_pruning != "none" else None
    sample = np.empty((min(num_tokens, reader.num_tokens), encoder.dim), np.float32)
    filled = 0
    order = rng.permutation(len(reader))
    with Progress(total=len(sample), desc="hidden states", unit="token", unit_scale=True) as progress:
        for first in range(0, len(order), BLOCKS_AT_ONCE):
            if filled == len(sample):
                break
            blocks = [block for index in order[first : first + BLOCKS_AT_ONCE] for block in reader.block(int(index))]
            positions, on_device = hidden_states_of(blocks, reader, encoder, max_tokens=max_batch_tokens)
            hidden = on_device.cpu().numpy()
            if counts is not None:
                tokens = _tokens_at(blocks, positions)
                hidden = hidden[keep_mask(tokens, counts, mode=frequency_pruning, threshold=pruning_threshold, rng=rng)]
            taken = min(len(hidden), len(sample) - filled)
            sample[filled : filled + taken] = hidden[:taken]
            filled += taken
            progress.update(taken)
    if filled == 0:
        raise no_token_left(frequency_pruning, pruning_threshold)
    return normalize_rows(sample[:filled])


def no_token_left(frequency_pruning: str, pruning_threshold: float) -> ValueError:
    """The error where frequency pruning removed all tokens."""
    return ValueError(
        f"no token is left to learn a dictionary from: frequency pruning '{frequency_pruning}' at threshold "
        f"{pruning_threshold:g} removed all; use a higher --pruning-threshold or --frequency-pruning none"
    )


def _tokens_at(blocks: list, positions: np.ndarray) -> np.ndarray:
    """Ids of the tokens at the flat ``positions`` (ascending) of ``blocks``."""
    where = np.concatenate([block.positions.numpy() for block in blocks])
    tokens = np.concatenate([block.tokens.numpy() for block in blocks])
    order = np.argsort(where, kind="stable")
    return tokens[order][np.searchsorted(where[order], positions)]
