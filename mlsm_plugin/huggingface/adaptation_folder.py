"""What is in the output folder of an adaptation, and whether one can begin or continue there."""

from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.model_folders import check_new_model_folder
from mlsm_plugin.core.files.planned_folder import PLAN_FILE
from mlsm_plugin.core.files.step_record import RECORD, StepRecord

MODEL = "model"  # the adapted model
DOCUMENTS = "documents.txt"
TOKENIZER = "tokenizer"
AUXILIARY = "auxiliary"  # suffix of the names of sequences that the auxiliary model reads
PLACES = "places"  # suffix of the names of what says where each token is in these
TEXT_PARTS = ("train", "valid")
DIRECTIONS = "directions.npy"  # in which a narrow model learns the vectors of its teacher
DICTIONARY = "dictionary"
CHECKPOINTS = "checkpoints"
LOGS = "logs"  # for TensorBoard
HELD_OUT_TEXT = "held_out.txt"
QUALITY = "quality.json"


def check_output(output: Path) -> None:
    """Raise ValueError if the folder holds something that a new adaptation cannot continue or must not replace."""
    if (output / RECORD).exists():
        return
    if (output / PLAN_FILE).exists():
        raise ValueError(
            f"{output} was begun by an earlier version, which recorded its steps in {PLAN_FILE}; choose another "
            f"--output (if it was finished, its model is {output / MODEL})"
        )
    check_new_model_folder(output / MODEL)


def recorded_objective(output: PathLike) -> str | None:
    """The objective that a folder was begun with; None if nothing that depends on it was begun.

    Codes of which no training was begun are taken to be for the default of earlier versions.
    """
    record = StepRecord(Path(output, RECORD))
    objective: str | None = record.settings_of("before").get("objective")
    if objective is None and record.settings_of("dictionary"):
        return "mlsm+mlm"
    return objective
