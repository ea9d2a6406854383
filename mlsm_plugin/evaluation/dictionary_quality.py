"""The quality of a dictionary on a split: its reconstructions, and the loss of a masked LM that reads them."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.core.coding.coder_fit import fitting_encoder, fitting_fingerprint
from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.hidden_states.encoder import HiddenStateSource
from mlsm_plugin.core.sparse_coding.coder import SparseCoder
from mlsm_plugin.core.sparse_coding.encode import first_nonfinite_row
from mlsm_plugin.core.sparse_coding.quality import Figures, ReconstructionQuality
from mlsm_plugin.evaluation.masked_batches import MASKED_SHARE, MaskedBatch, masked_batches, shown_chunks
from mlsm_plugin.evaluation.masked_lms import MaskedLm, NoMaskedLmError, open_masked_lm
from mlsm_plugin.evaluation.settings import EvaluationSettings
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, hidden_states_of
from mlsm_plugin.fairseq_plugin.data.token_blocks import split_fingerprint


def evaluate_dictionary(
    data_bin: PathLike, split: str, auxiliary: str, coder: SparseCoder, settings: EvaluationSettings
) -> JsonObject:
    """Evaluate the reconstructions of a coder, then the loss of the model ``auxiliary`` with them.

    ValueError if the model, the coder and the text do not fit together, or as in the two functions below.

    Returns:
        the inputs of the evaluation, and the results of :func:`evaluate_reconstruction` and :func:`evaluate_loss` under
        ``reconstruction`` and ``loss``; if the model is not a masked LM, ``loss`` is None, and ``why_no_loss`` says
        why.
    """
    reader = BlockReader(data_bin, split, settings.blocks)
    fingerprint = fitting_fingerprint(auxiliary, coder, settings.layer)
    encoder = fitting_encoder(auxiliary, data_bin, coder, settings)
    quality, inexact = evaluate_reconstruction(reader, encoder, coder, settings)
    del encoder
    loss: JsonObject | None = None
    why_no_loss = None
    try:
        model = open_masked_lm(auxiliary, data_bin, device=settings.device, fp16=settings.fp16)
        loss = {**evaluate_loss(reader, model, coder, settings), "masked_share": MASKED_SHARE, "ablation": "zero"}
    except NoMaskedLmError as error:
        why_no_loss = str(error)
    return {
        "dictionary": {"fingerprint": coder.fingerprint, "n_atoms": coder.num_atoms, **coder.settings()},
        "auxiliary_fingerprint": fingerprint,
        "layer": settings.layer,
        "fp16": settings.fp16,
        "blocks": asdict(settings.blocks),
        "split": split,
        "split_fingerprint": split_fingerprint(Path(data_bin, split)),
        "seed": settings.seed,
        "inexact_codes": inexact,
        "reconstruction": quality,
        "loss": loss,
        "why_no_loss": why_no_loss,
    }


def drawn_blocks(reader: BlockReader, settings: EvaluationSettings) -> np.ndarray:
    """Ascending numbers of random blocks, drawn without replacement until they hold ``max_tokens`` tokens."""
    order = np.random.default_rng(settings.seed).permutation(len(reader))
    sizes = np.cumsum(reader.sizes[order])
    return np.sort(order[: int(np.searchsorted(sizes, settings.max_tokens)) + 1])


def evaluate_reconstruction(
    reader: BlockReader, encoder: HiddenStateSource, coder: SparseCoder, settings: EvaluationSettings
) -> tuple[Figures, int]:
    """Code the hidden states of the content tokens of the drawn blocks, and evaluate their reconstructions.

    ValueError if a hidden state is NaN or infinite, the coder cannot reconstruct, or the blocks hold no content.

    Returns:
        the figures, see :meth:`ReconstructionQuality.result`; and how many codes miss the requested accuracy.
    """
    quality = ReconstructionQuality(coder.num_atoms, coder.dim)
    inexact = 0
    numbers = drawn_blocks(reader, settings)
    for blocks in shown_chunks(reader, numbers, batch_tokens=settings.batch_tokens, what="reconstructing"):
        positions, hidden = hidden_states_of(blocks, reader, encoder, max_tokens=settings.batch_tokens)
        if (row := first_nonfinite_row(hidden)) is not None:
            raise ValueError(
                f"the hidden state of the token at position {positions[row]} in layer {settings.layer} holds NaN or "
                "infinity; try without --fp16"
            )
        coded = coder.encode(hidden, threads=settings.threads)
        missed = coder.inexact(coded)
        inexact += 0 if missed is None else len(missed.rows)
        quality.add(hidden, coded.codes, coder.reconstruct(hidden, coded.codes))
    if quality.rows == 0:
        raise ValueError("the blocks have only special tokens; choose another --split or a larger --max-tokens")
    return quality.result(), inexact


def evaluate_loss(reader: BlockReader, model: MaskedLm, coder: SparseCoder, settings: EvaluationSettings) -> Figures:
    """The loss of a masked LM when reconstructions replace the hidden states of one layer.

    15 % of the content tokens become ``<mask>``, depending only on the seed and their positions. Reconstructions, or
    zero vectors (the ablation of SAEBench), replace the hidden states of all content tokens, masked or not. The hidden
    states of BOS, EOS and padding are kept. ValueError if a loss is NaN or infinite, or the coder cannot reconstruct.

    Returns:
        ``masked_tokens``: their number; their mean cross entropy in nats: ``ce_loss_without_sae``,
        ``ce_loss_with_sae`` (with the reconstructions of any coder; the name is SAEBench's), ``ce_loss_with_ablation``;
        and ``ce_loss_score = (ablation - with) / (ablation - without)``, None if the ablation changes nothing. Without
        masked tokens, all are None.
    """

    def reconstructed(hidden: Tensor) -> Tensor:
        codes = coder.encode(hidden, threads=settings.threads).codes
        return torch.from_numpy(coder.reconstruct(hidden, codes)).float()

    changes: dict[str, Callable[[Tensor], Tensor] | None] = {
        "ce_loss_without_sae": None,
        "ce_loss_with_sae": reconstructed,
        "ce_loss_with_ablation": torch.zeros_like,
    }
    sums = dict.fromkeys(changes, 0.0)
    count = 0
    numbers = drawn_blocks(reader, settings)
    chunks = shown_chunks(reader, numbers, batch_tokens=settings.batch_tokens, what="masked-LM loss")
    for batch in masked_batches(reader, chunks, seed=settings.seed, batch_tokens=settings.batch_tokens):
        count += int(batch.masked.sum())
        for name, change in changes.items():
            sums[name] += float(replaced_losses(model, batch, settings.layer, change).sum())
    if not all(np.isfinite(list(sums.values()))):
        raise ValueError(f"the masked-LM loss is not finite ({sums}); try without --fp16")
    means: Figures = {name: total / count if count else None for name, total in sums.items()}
    unchanged_loss = sums["ce_loss_without_sae"]
    ablated_loss = sums["ce_loss_with_ablation"]
    score = None
    if count and ablated_loss != unchanged_loss:
        score = (ablated_loss - sums["ce_loss_with_sae"]) / (ablated_loss - unchanged_loss)
    return {"masked_tokens": count, **means, "ce_loss_score": score}


def replaced_losses(
    model: MaskedLm, batch: MaskedBatch, layer: int, change: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Cross entropies ``(n_masked,)`` float64 in nats, with ``change`` applied to the hidden states of one layer.

    ``change`` maps the hidden states ``(n, dim)`` of the content tokens; None: no change.
    """
    if change is None:
        return model.losses(batch.inputs, batch.masked, batch.targets)
    content = batch.content.to(model.device)

    def change_some(hidden: Tensor) -> Tensor:
        changed = hidden.clone()
        changed[content] = change(hidden[content]).to(hidden)
        return changed

    with model.changed(layer, change_some):
        return model.losses(batch.inputs, batch.masked, batch.targets)
