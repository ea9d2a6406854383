"""How well a model predicts the latent semantics of masked tokens, compared with a unigram baseline."""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fairseq import utils
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.losses.latent_semantic import latent_semantic_kl
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.stored_codes import check_same_codes, origin_of, strongest_of_padded
from mlsm_plugin.hub import MlsmHubInterface, from_pretrained

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 1 << 16  # of a code store
UNSEEN = 1e-8  # probability of an atom that the training split never uses


@dataclass(frozen=True)
class LatentKl:
    """Mean KL divergences, in nats, from the codes of the masked tokens of a split."""

    model: float  # for the model's predictions
    unigram: float  # for the mean code of the training split, predicted for every token
    num_tokens: int  # masked tokens with a code


def mean_code(store: CodeStore, top: int | None = None) -> np.ndarray:
    """Mean target distribution ``(n_atoms,)`` float64 over the tokens of a store, of their ``top`` strongest atoms."""
    total = np.zeros(store.num_atoms)
    for start in range(0, store.num_tokens, ROWS_AT_ONCE):
        codes = store.lookup(np.arange(start, min(start + ROWS_AT_ONCE, store.num_tokens)))
        atoms, weights = strongest_of_padded(*codes, top or store.num_atoms)
        total += np.bincount(atoms[atoms >= 0], weights[atoms >= 0], store.num_atoms)
    total = total + UNSEEN * total.sum()
    return total / total.sum()


@torch.no_grad()
def evaluate_latent_kl(
    run: PathLike, data_bin: PathLike, split: str = "valid", *, batch_size: int = 32, codes: PathLike | None = None
) -> LatentKl:
    """Evaluate the model in the folder of a run and the unigram baseline on the same tokens, masked as in training.

    ``codes`` is the folder with the codes of ``split`` and ``train``; None: the binarized dataset. ValueError if the
    model has no latent head or predicts other codes, the codes belong to other data, or no masked token has a code.
    """
    hub = from_pretrained(run)
    if getattr(hub, "num_atoms", 0) == 0:  # an encoder-decoder has none
        raise ValueError(f"{run} has no latent head: it was not trained with --task masked_latent_semantic")
    hub.task.cfg.data = str(data_bin)
    hub.task.cfg.latent_source = "store"  # even if the model was trained on codes computed online
    codes = Path(codes or data_bin)
    hub.task.cfg.latent_codes = str(codes)
    predicted_codes = dict(hub.task.state_dict())
    train = CodeStore(codes / "train.codes")
    hub.task.load_dataset(split)
    for stored_codes in (hub.task.state_dict(), origin_of(train.meta, hub.task.cfg.latent_top)):
        check_same_codes(
            before=predicted_codes,
            now=stored_codes,
            codes=f"the codes in {codes}",
            others=f"those that {run} predicts",
            remedy="pass the folder of those as codes",
        )
    dataset = hub.task.dataset(split)
    unigram = torch.from_numpy(mean_code(train, hub.task.cfg.latent_top)).log().float()
    sums = torch.zeros(3, dtype=torch.float64)
    usable = [index for index in range(len(dataset)) if dataset.size(index) <= hub.model.max_positions()]
    if too_long := len(dataset) - len(usable):
        logger.warning("%d samples are longer than the model's positions; the other %d count", too_long, len(usable))
    for start in Progress(range(0, len(usable), batch_size), desc=f"evaluating {split}", unit="batch"):
        batch = dataset.collater([dataset[index] for index in usable[start : start + batch_size]])
        sums += _batch_sums(hub, utils.move_to_cpu(batch), unigram)
    model, baseline, count = sums.tolist()
    if not count:
        raise ValueError(f"no masked token of {split} has a code; code more of it, or choose another split")
    return LatentKl(model / count, baseline / count, int(count))


def _batch_sums(hub: MlsmHubInterface, batch: dict, unigram: Tensor) -> Tensor:
    masked = batch["target"].ne(hub.task.source_dictionary.pad())
    _, extra = hub.model(**batch["net_input"], masked_tokens=masked, project_tokens=False, project_atoms=True)
    atoms = batch["codes"]["atoms"]
    weights = batch["codes"]["weights"]
    baseline = unigram.expand(len(atoms), -1)
    count = weights.gt(0).any(dim=1).sum() if weights.size(1) else torch.tensor(0)
    parts = (latent_semantic_kl(logits, atoms, weights).double() for logits in (extra["atom_logits"], baseline))
    return torch.stack([*(part.sum() for part in parts), count.double()])
