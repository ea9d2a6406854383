"""Export the models of a run as Hugging Face folders, each with its card and with logits of the trained model."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch

from mlsm_plugin.babylm.cards import write_card
from mlsm_plugin.babylm.checks import spread
from mlsm_plugin.babylm.ledger import Entry, Ledger
from mlsm_plugin.babylm.settings import CHECKPOINTS, MAIN, TEXT_FOLDER
from mlsm_plugin.core.files.atomic_files import sha256_of_files, write_json
from mlsm_plugin.core.files.hf_files import weight_files
from mlsm_plugin.core.text.words import word_lines
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import updates_of, words_of_run
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import LAST
from mlsm_plugin.fairseq_plugin.tasks.word_counts import KEPT
from mlsm_plugin.fairseq_plugin.text.masked_text import encode_masked_text
from mlsm_plugin.hub import from_pretrained
from mlsm_plugin.hub.hf_export import export

COMPARED_LINES = 8
LINE_WORDS = 40
SECONDS_BETWEEN_LOOKS = 10.0
COMPARED_LOGITS = 64  # logits of one masked token, evenly spread over the vocabulary
TEXT = "The children read a story about the old house, and then they went home."
TEXT_WITH_MASK = "The children read a story about the old house, and then they went <mask>."


def export_kept(run: Path, ledger: Ledger, *, finished: bool) -> None:
    """Export the kept models that are not exported yet, and the last model if the training has ``finished``.

    Each export is compared with the trained model and entered in the ledger; then the checkpoint is deleted. Errors are
    those of :func:`~mlsm_plugin.hub.hf_export.export`.
    """
    checkpoints = {path.stem: path for path in (run / "model" / KEPT).glob("*.pt")}
    sources = {name: checkpoints[name] for name in ledger.names if name in checkpoints}
    if finished and not (MAIN in ledger.checkpoints and (run / CHECKPOINTS / MAIN).is_dir()):
        sources[MAIN] = run / "model" / LAST
    texts = [word_lines(text) for text in sorted((run / TEXT_FOLDER).iterdir()) if sources]
    lines = [" ".join(line.split()[:LINE_WORDS]) for text in texts for line in islice(text, COMPARED_LINES) if line]
    for name, checkpoint in sources.items():
        begin = time.perf_counter()
        ledger.checkpoints[name] = _exported(checkpoint, run / CHECKPOINTS / name, [*lines, TEXT])
        seconds = ledger.seconds.get("exports", 0) + time.perf_counter() - begin
        ledger.seconds["exports"] = round(seconds, 2)
        ledger.seen = max(ledger.seen, ledger.checkpoints[name]["words"])
        ledger.write(run)
        if name != MAIN:
            checkpoint.unlink()
    for name in ledger.checkpoints if finished else sources:
        if (run / CHECKPOINTS / name).is_dir():  # `mlsm babylm check` names lost folders
            write_card(run / CHECKPOINTS / name, name, ledger)
    if finished:
        ledger.write(run)


@contextmanager
def exporting(run: Path, ledger: Ledger) -> Iterator[None]:
    """During the block, a thread exports models as soon as they are kept; nothing else may use the ledger meanwhile."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(SECONDS_BETWEEN_LOOKS):
            export_kept(run, ledger, finished=False)

    thread = threading.Thread(target=look, name="export", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@torch.no_grad()
def _exported(checkpoint: Path, folder: Path, lines: list[str]) -> Entry:
    """Export a checkpoint and return its ledger entry; its dictionary and tokenizer may be in the parent folder."""
    interface = from_pretrained(checkpoint, data_name_or_path="." if checkpoint.name == LAST else "..")
    proof = export(interface, folder, lines, overwrite=True)
    if proof.no_head is not None:
        raise ValueError(f"{proof.no_head}: it cannot take part in the BabyLM challenge")
    ids = interface.encode(TEXT)
    shown = ids[: int(interface.model.max_positions())].clone()
    masked = len(shown) // 2
    shown[masked] = interface.task.mask_idx
    logits = interface.model(shown[None])[0][0, masked]
    masks = [interface.task.mask_idx]
    with_mask, _ = encode_masked_text(TEXT_WITH_MASK, interface.bpe, interface.task.source_dictionary, masks=masks)
    trained = {
        "text": TEXT,
        "ids": ids.tolist(),
        "length": len(shown),
        "masked": masked,
        "with_mask": {"text": TEXT_WITH_MASK, "ids": with_mask},
        "logits": logits[spread(len(logits), COMPARED_LOGITS)].tolist(),
    }
    write_json(folder.with_suffix(".json"), trained)
    return {
        "words": words_of_run(checkpoint),
        "updates": updates_of(checkpoint),
        "sha256": sha256_of_files(*weight_files(folder)),
    }
