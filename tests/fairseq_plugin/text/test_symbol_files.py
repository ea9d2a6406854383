from __future__ import annotations

import pytest

from mlsm_plugin.core.files.model_files import symbols_in
from mlsm_plugin.fairseq_plugin.text.symbol_files import read_symbols, symbols_of_dataset


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_symbols_and_counts(tmp_path, encoding):
    (tmp_path / "dict.txt").write_text("\u2581the 5\nmy\u00e9 2\n", encoding=encoding)
    assert symbols_in(tmp_path / "dict.txt") == ("\u2581the".encode(), "my\u00e9".encode())
    for dictionary in (read_symbols(tmp_path / "dict.txt"), symbols_of_dataset(tmp_path)):
        assert dictionary.symbols[dictionary.nspecial :] == ["\u2581the", "my\u00e9"]
        assert dictionary.count[dictionary.nspecial :] == [5, 2]


@pytest.mark.parametrize(
    "content",
    [
        b"a 1\na 2\n",
        b"<pad> 1\n",
        b"</s> 3\n",
        "\u00e9 1\n".encode("latin-1"),
        b"a\n",
        b"a b\n",
        b"a 1 x\n",
        b"\x00\xff",
    ],
)
def test_what_is_not_a_dictionary_is_one_line(tmp_path, content):
    (tmp_path / "dict.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"dict\.txt is not a dictionary of fairseq \(.+\); write it again") as caught:
        symbols_of_dataset(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_one_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not a binarized dataset: dict\.txt is missing"):
        symbols_of_dataset(tmp_path)
