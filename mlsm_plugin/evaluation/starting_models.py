"""Models to fine-tune: Hugging Face folders, and fairseq checkpoints, which are exported first."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike, sha256_of_files
from mlsm_plugin.core.files.model_files import DICTIONARY_NAME, checkpoint_of, tokenizer_files
from mlsm_plugin.core.files.model_folders import FILES_OF_TOKENIZERS
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceSource, model_and_tokenizer
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.evaluation.sentence_encoders import is_hugging_face_encoder

EXPORTED = "exported"  # folder in the output for an exported checkpoint
COMPARED_TEXTS = 200  # texts on which an exported checkpoint is compared with the original


class StartingModel(ABC):
    """A pre-trained encoder, with the ``tokenizer`` for fine-tuning."""

    tokenizer: HuggingFaceTokenizer

    @abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the ``model`` and of the files of its ``tokenizer``."""

    @abstractmethod
    def stock_folder(self, output: Path, texts: Sequence[str]) -> Path:
        """The folder of the stock Hugging Face model, which may be written to the folder ``output`` first.

        ValueError if there is no such stock model, or it differs from the original on the first ``texts``.
        """


class LibraryStart(StartingModel):
    """An encoder in a Hugging Face folder or on the hub (``hf:NAME``).

    ValueError if the model or its tokenizer does not exist or is not supported, or they do not fit together.
    """

    def __init__(self, name: PathLike) -> None:
        self._folder, _, self.tokenizer = model_and_tokenizer(name, weights=True)

    def fingerprint(self) -> dict[str, str]:
        files = {file for pattern in FILES_OF_TOKENIZERS for file in self._folder.glob(pattern)}
        return {"model": HuggingFaceSource.fingerprint_of(self._folder), "tokenizer": sha256_of_files(*sorted(files))}

    def stock_folder(self, output: Path, texts: Sequence[str]) -> Path:
        return self._folder


class CheckpointStart(StartingModel):
    """A RoBERTa-like fairseq checkpoint, or the folder of its run.

    ValueError or FileNotFoundError as in ``hub.from_pretrained``; ValueError if it cannot be exported.
    """

    def __init__(self, name: PathLike) -> None:
        from mlsm_plugin.hub import from_pretrained
        from mlsm_plugin.hub.hf_export import check_exportable, exported_tokenizer

        self._checkpoint = checkpoint_of(name)
        folder = self._checkpoint.parent
        if not (folder / DICTIONARY_NAME).is_file():
            raise FileNotFoundError(f"{folder} has no {DICTIONARY_NAME}; copy it there from the binarized dataset")
        self._interface = from_pretrained(self._checkpoint)
        check_exportable(self._interface)
        self.tokenizer = exported_tokenizer(self._interface)

    def fingerprint(self) -> dict[str, str]:
        from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import model_fingerprint

        folder = self._checkpoint.parent
        files = [folder / name for name in tokenizer_files(folder)]
        return {"model": model_fingerprint(self._checkpoint), "tokenizer": sha256_of_files(*files)}

    def stock_folder(self, output: Path, texts: Sequence[str]) -> Path:
        from mlsm_plugin.hub.hf_export import export

        folder = output / EXPORTED
        if not folder.exists():  # it is written atomically
            export(self._interface, folder, texts[:COMPARED_TEXTS])
        return folder


def open_starting_model(name: PathLike) -> StartingModel:
    """Open a model: a Hugging Face folder or hub name (``hf:NAME``), a fairseq checkpoint, or the folder of a run.

    ValueError or FileNotFoundError if there is no model, or it cannot be fine-tuned.
    """
    if is_hugging_face_encoder(name):
        return LibraryStart(name)
    if not Path(name).exists() and Path(name).suffix != ".pt":
        raise FileNotFoundError(f"{name} does not exist; a model on the hub is hf:{name}")
    return CheckpointStart(name)
