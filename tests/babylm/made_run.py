"""What a run of ``mlsm babylm train`` leaves, made of an untrained model in a second."""

from __future__ import annotations

from pathlib import Path

import torch

from mlsm_plugin.babylm.exports import export_kept
from mlsm_plugin.babylm.ledger import OF_RUN, Ledger
from mlsm_plugin.core.files.model_files import copy_tokenizer
from tests.tiny_models import TinyData

LINE = "The name is bound to a value.\n"
NAMES = {"chck_1K": 1000, "chck_2K": 2000}


def make_run(tiny: TinyData, run: Path, *, finished: bool = True, license: str | None = "mit") -> Ledger:
    """Checkpoints with 1,200 and 2,100 words and a last one with 2,400; the first two are kept, then exported."""
    texts = [{"file": "a.txt", "words": 1200, "sha256": "0", "of": OF_RUN}]
    ledger = Ledger("custom", 1200, 2400, "mlm", 2, texts, 0, 2400, NAMES, license=license)
    (run / "text").mkdir(parents=True)
    (run / "text" / "a.txt").write_text(f"{LINE * 171}The name is\n", encoding="utf-8")  # 1,200 words
    model = run / "model"
    (model / "words").mkdir(parents=True)
    copy_tokenizer(tiny.data_bin, model)
    state = torch.load(tiny.model, weights_only=True)
    for name, words in (("words/chck_1K", 1200), ("words/chck_2K", 2100), ("checkpoint_last", 2400)):
        for weights in state["model"].values():
            weights.mul_(1.1)
        state["task_state"] = {"words": words}
        torch.save(state, model / f"{name}.pt")
    ledger.seen = 2400 if finished else 2100
    export_kept(run, ledger, finished=finished)
    return ledger
