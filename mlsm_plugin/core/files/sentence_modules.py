"""The files of sentence-transformers next to a model, which say how hidden states become the vector of a text."""

import logging
import shutil
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import read_json, write_json
from mlsm_plugin.core.files.json_checks import JsonObject, check_json, fields, list_of, text

MODULES_FILE = "modules.json"
CONFIG_FILES = ("config_sentence_transformers.json", "sentence_bert_config.json")
CHECK = list_of(fields({"type": text, "path": text}))
TYPES = "sentence_transformers.models."
NEW_MODULES = ("Transformer", "Pooling")
KNOWN_MODULES = (*NEW_MODULES, "Normalize")
MEAN = "mean"
CLS = "cls"
POOLINGS = {"pooling_mode_mean_tokens": MEAN, "pooling_mode_cls_token": CLS}
logger = logging.getLogger(__name__)


def modules_of(folder: Path) -> list[JsonObject]:
    """The modules of a sentence-transformers folder, in order; none for other folders.

    ValueError if ``modules.json`` is damaged, or names a folder that is not in this folder.
    """
    path = folder / MODULES_FILE
    if not path.is_file():
        return []
    modules: list[JsonObject] = check_json(read_json(path), CHECK, path)
    for module in modules:
        if module["path"] and Path(module["path"]).name != module["path"]:
            raise ValueError(f"{path} names the folder {module['path']!r}, which is not in {folder}")
    return modules


def pooling_of(folder: Path) -> str:
    """The pooling of a sentence-transformers folder, else ``mean``; ValueError unless it is ``mean`` or ``cls``.

    Warns of other modules, such as a Dense layer behind the pooling, which this package does not apply.
    """
    pooling = MEAN
    for module in modules_of(folder):
        kind = module["type"].rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling_in(folder, folder / module["path"] / "config.json")
        elif kind not in KNOWN_MODULES:
            logger.warning(
                "vectors of %s are taken before its module %s, so they are not those of sentence-transformers",
                folder,
                kind,
            )
    return pooling


def _pooling_in(folder: Path, path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{folder / MODULES_FILE} names {path}, which does not exist")
    config = check_json(read_json(path), fields(), path)
    if config.get("pooling_mode") in POOLINGS.values():  # sentence-transformers 6
        return str(config["pooling_mode"])
    modes = [POOLINGS.get(name, name) for name, used in config.items() if used is True and "pooling" in name]
    if len(modes) == 1 and modes[0] in POOLINGS.values():
        return modes[0]
    raise ValueError(f"{folder}: this pooling is not supported: {' and '.join(modes)}; supported: mean, or cls")


def copy_modules(source: Path, folder: Path) -> None:
    """Copy the files of sentence-transformers, without the model itself, from the folder ``source``."""
    modules = modules_of(source)
    for module in modules:
        if module["path"] and (source / module["path"]).is_dir():
            shutil.copytree(source / module["path"], folder / module["path"])
    for name in CONFIG_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    write_json(folder / MODULES_FILE, modules)


def write_modules(folder: Path, *, width: int, max_length: int, normalized: bool = False) -> None:
    """Write the files that define the vector of a text as the mean of its last hidden states.

    Args:
        folder: folder of the model.
        width: width of its hidden states.
        max_length: longest text in tokens, including special tokens; longer texts are cut.
        normalized: whether vectors are scaled to length 1.
    """
    names = [*NEW_MODULES, "Normalize"] if normalized else list(NEW_MODULES)
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{name}" if number else "", "type": f"{TYPES}{name}"}
        for number, name in enumerate(names)
    ]
    for module in modules[1:]:
        (folder / str(module["path"])).mkdir()
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    write_json(folder / MODULES_FILE, modules)
