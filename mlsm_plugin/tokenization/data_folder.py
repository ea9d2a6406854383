"""What a data folder holds, whether ``mlsm binarize`` made it of texts or of pairs of texts."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlsm_plugin.files.tokenizer_files import FOLDER_NAME, MODEL_NAME

SPLITS = ("train", "valid", "test")
SIDES = ("source", "target")
SUMMARY_NAME = "binarize.json"


def remove_earlier_run(output: Path) -> None:
    """Remove the splits, the tokenizer and the summary of an earlier run, of texts or of pairs.

    A task would read splits that are left there with the new dictionary.
    """
    shutil.rmtree(output / FOLDER_NAME, ignore_errors=True)
    datasets = [f"{split}{side}" for split in SPLITS for side in ("", *(f".{side}" for side in SIDES))]
    for name in (
        SUMMARY_NAME,
        MODEL_NAME,
        *(f"{dataset}{ending}" for ending in (".idx", ".bin") for dataset in datasets),
    ):
        (output / name).unlink(missing_ok=True)
