"""The output tokens that an atom raises and lowers: the masked-LM head applied to its row of the latent head."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from mlsm_plugin.core.files.hf_files import LATENT_HEAD
from mlsm_plugin.core.hidden_states.hf_encoder import load_masked_lm
from mlsm_plugin.huggingface.latent_semantic_model import read_latent_head
from mlsm_plugin.huggingface.pretraining_model import head_of
from mlsm_plugin.reports.latent_report import AtomSummary

TOKENS = 5  # raised, and as many lowered
OFTEN = 20  # with this many occurrences, a token's row in the head is well trained
ATOMS_AT_ONCE = 256
Block = tuple[np.ndarray, csr_matrix]


class CountedBlocks:
    """Iterates over blocks of ids and codes once; ``counts``, ``(num_types,)``, counts their coded tokens."""

    def __init__(self, blocks: Iterable[Block], num_types: int) -> None:
        self._blocks = blocks
        self.counts = np.zeros(num_types, dtype=np.int64)

    def __iter__(self) -> Iterator[Block]:
        for ids, codes in self._blocks:
            is_coded = np.diff(codes.indptr) > 0
            self.counts += np.bincount(ids[is_coded], minlength=len(self.counts))
            yield ids, codes


@torch.no_grad()
def set_raised_tokens(
    summaries: Sequence[AtomSummary],
    directions: Tensor,
    project: Callable[[Tensor], Tensor],
    symbols: Sequence[str],
    counts: np.ndarray,
) -> None:
    """Set the tokens whose logits rise and fall most as the model moves towards predicting an atom.

    Both heads read the same transformed hidden state, so the direction is the row of the atom in the latent head
    minus the mean of all rows. The mean itself changes no prediction of atoms.

    Args:
        summaries: of all atoms.
        directions: ``(n_atoms, width)``, the rows of the latent head.
        project: from transformed hidden states ``(n, width)`` to logits of tokens ``(n, V)``, linear.
        symbols: the piece of every token type.
        counts: ``(V,)``, of the tokens in the text. Rare tokens were hardly trained; they are left out if enough
            tokens are frequent.
    """
    centred = directions.float() - directions.float().mean(dim=0)
    origin = project(torch.zeros_like(centred[:1]))
    occurs = counts >= OFTEN
    if occurs.sum() < 2 * TOKENS:
        occurs = counts > 0
    number = min(TOKENS, int(occurs.sum()))
    usable = torch.from_numpy(occurs)
    for first in range(0, len(centred), ATOMS_AT_ONCE):
        effects = (project(centred[first : first + ATOMS_AT_ONCE]) - origin)[:, : len(counts)].cpu()
        most = effects.masked_fill(~usable, -torch.inf).topk(number, dim=1).indices
        least = effects.masked_fill(~usable, torch.inf).topk(number, dim=1, largest=False).indices
        for row in range(len(effects)):
            summaries[first + row].raised = [symbols[token] for token in most[row].tolist()]
            summaries[first + row].lowered = [symbols[token] for token in least[row].tolist()]


def set_raised_tokens_of_folder(
    summaries: Sequence[AtomSummary], folder: Path, symbols: Sequence[str], counts: np.ndarray
) -> None:
    """:func:`set_raised_tokens` with the heads of a Hugging Face folder; does nothing if one is missing."""
    latent = read_latent_head(folder / LATENT_HEAD)
    if latent is None or len(latent["weight"]) != len(summaries):
        return
    try:
        head = head_of(load_masked_lm(folder).eval())
    except ValueError:  # an encoder without a head
        return
    set_raised_tokens(summaries, latent["weight"], head.project, symbols, counts)
