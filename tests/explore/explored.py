"""A small masked LM with a dictionary and an index of documents, as the page shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.explore.explorer import Explorer, open_explorer
from mlsm_plugin.search.index import build_index
from mlsm_plugin.search.text_codes import open_text_coder
from tests.conftest import made_once
from tests.search.searched import make_encoder, write_documents

Folders = tuple[Path, Path, Path]


def explored(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Folders:
    """Folders of a model, of a dictionary and of an index; read only."""

    def make(root: Path) -> None:
        model, dictionary = make_encoder(text, root)
        write_documents(text, root / "docs.txt")
        build_index([root / "docs.txt"], open_text_coder(model, dictionary), root / "index")

    root = made_once(tmp_path_factory, "explored", make)
    return root / "bert", root / "dictionary", root / "index"


def opened(folders: Folders, **more: object) -> Explorer:
    model, dictionary, index = folders
    return open_explorer(model, dictionary=dictionary, index=index, **more)  # type: ignore[arg-type]
