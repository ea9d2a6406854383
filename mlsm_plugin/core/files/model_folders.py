"""Write the folder of a Hugging Face model without leaving files of another model, which would be read, too."""

import filecmp
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_directory

# files of a tokenizer that transformers reads
FILES_OF_TOKENIZERS = (
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "bpe.codes",
    "*.model",
)
# files that transformers reads from the folder of a model, or that this package writes there
FILES_OF_MODELS = (
    *FILES_OF_TOKENIZERS,
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "tf_model*.h5",
    "flax_model*.msgpack",
    "adapter_config.json",
    "adapter_model.*",
    "latent_head.safetensors",
    "chat_template.*",
    "preprocessor_config.json",
    "processor_config.json",
    # of sentence-transformers
    "modules.json",
    "sentence_*_config.json",
    "config_sentence_transformers.json",
)
FOLDERS_OF_MODULES = "[0-9]*_[A-Z]*"  # of sentence-transformers, such as 1_Pooling
# files that may lie beside a model: its card, and files of a repository
BESIDE_MODELS = (".*", "*.md", "LICENSE*")


@contextmanager
def new_model_folder(path: PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Fill a temporary folder with a model; its content is moved to ``path`` when the block succeeds.

    ValueError if ``path`` has model files that differ from the new ones (``overwrite`` removes them), or holds anything
    but a model.
    """
    path = Path(path)
    check_model_folder(path)
    with atomic_directory(path) as folder:
        yield folder
        stale = [file for file in _files_of_models(path) if overwrite or not _is_same(file, folder / file.name)]
        if stale and not overwrite:
            problem = f"{path} holds another model already ({stale[0].name})"
            raise ValueError(f"{problem}; name a new folder, or pass --overwrite to replace it")
        for file in stale:
            if file.is_dir():
                shutil.rmtree(file)
            else:
                file.unlink()


def check_new_model_folder(path: PathLike) -> None:
    """Raise ValueError if a folder that a command makes inside its output already holds a model or other files."""
    check_model_folder(path)
    if models := _files_of_models(Path(path)):
        raise ValueError(f"{path} holds another model already ({models[0].name}); choose another --output")


def check_model_folder(path: PathLike) -> None:
    """Raise ValueError if a folder holds files that neither belong to a model nor usually lie beside one."""
    path = Path(path)
    models = _files_of_models(path)
    beside = {file for pattern in BESIDE_MODELS for file in path.glob(pattern)}
    foreign = sorted({*path.glob("*")} - {*models} - beside)
    if foreign:
        raise ValueError(
            f"{path} holds files that do not belong to a model, such as {foreign[0].name}; name a new folder"
        )


def _files_of_models(path: Path) -> list[Path]:
    files = {file for pattern in FILES_OF_MODELS for file in path.glob(pattern) if not file.is_dir()}
    folders = {folder for folder in path.glob(FOLDERS_OF_MODULES) if folder.is_dir()}
    return sorted(files | folders)


def _is_same(file: Path, replacement: Path) -> bool:
    if file.is_dir():
        names = {path.name for path in file.iterdir()}
        new_names = {path.name for path in replacement.iterdir()} if replacement.is_dir() else set()
        return names == new_names and all(_is_same(file / name, replacement / name) for name in names)
    return replacement.is_file() and filecmp.cmp(file, replacement, shallow=False)
