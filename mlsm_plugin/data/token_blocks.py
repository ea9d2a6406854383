"""Cut a binarized split into samples, in the same way for training and for coding."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from fairseq import utils
from fairseq.data import Dictionary, FairseqDataset, PrependTokenDataset, TokenBlockDataset, data_utils
from fairseq.data.shorten_dataset import maybe_shorten_dataset

from mlsm_plugin.fairseq_seams.binarized_files import check_splits, slices_of
from mlsm_plugin.files.atomic_files import sha256_of_files
from mlsm_plugin.files.json_checks import check_json
from mlsm_plugin.files.model_files import DICTIONARY_NAME
from mlsm_plugin.files.planned_folder import META_FILE
from mlsm_plugin.sparse_coding.code_store import CORPUS_CHECK
from mlsm_plugin.tokenization.symbol_files import symbols_of_dataset


class BlockPiecesDataset(FairseqDataset):
    """The blocks of a text, in order; a block of more than ``max_tokens`` tokens becomes several items.

    fairseq's blocks end where sentences end, so that a long sentence makes a block longer than requested. Such a block
    is cut after every ``max_tokens`` tokens, and its last piece holds the rest: each token is in exactly one item.

    Args:
        blocks: the blocks as fairseq cuts them.
        max_tokens: maximum number of tokens of an item.
        min_tokens: minimum number of tokens of a last piece, which takes missing tokens from the piece before it; at
            most ``max_tokens``.

    Attributes:
        block_sizes: number of tokens of each block, ``(n_blocks,)`` int64.
        sizes: number of tokens of each item, ``(n_items,)``.
    """

    def __init__(self, blocks: TokenBlockDataset, max_tokens: int, *, min_tokens: int = 1) -> None:
        super().__init__()
        assert 0 < min_tokens <= max_tokens
        self.blocks, self.max_tokens, self.min_tokens = blocks, max_tokens, min_tokens
        slices = slices_of(blocks)
        self.block_sizes = slices[:, 1] - slices[:, 0]
        self._long = np.flatnonzero(self.block_sizes > max_tokens)  # (n_long,) numbers of the long blocks
        added = (self.block_sizes[self._long] - 1) // max_tokens  # number of pieces of each after its first
        self._added_before = np.concatenate([[0], np.cumsum(added)])  # (n_long + 1,) sums over the long blocks
        self._first = self._long + self._added_before[:-1]  # (n_long,) the first item of each
        self.sizes = blocks.sizes if len(self._long) == 0 else self._sizes(added)

    def _sizes(self, added: np.ndarray) -> np.ndarray:
        pieces = np.ones(len(self.block_sizes), np.int64)
        pieces[self._long] += added
        sizes = np.repeat(np.minimum(self.block_sizes, self.max_tokens), pieces)
        rest = self.block_sizes[self._long] - added * self.max_tokens
        last = np.maximum(rest, self.min_tokens)
        sizes[self._first + added] = last
        sizes[self._first + added - 1] += rest - last
        return sizes

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def block_starts(self) -> np.ndarray:
        """Flat position of the first token of each block, ``(n_blocks,)`` int64, ascending."""
        return slices_of(self.blocks)[:, 0].copy()

    def pieces_of(self, block: int) -> range:
        """The numbers of the items of a block."""
        before, until = np.searchsorted(self._long, [block, block + 1])
        return range(block + int(self._added_before[before]), block + 1 + int(self._added_before[until]))

    def _place(self, index: int) -> tuple[int, int]:
        """The number of the block of an item, and which of its pieces the item is."""
        begun = int(np.searchsorted(self._first, index, side="right"))  # long blocks that begin here or before
        if begun:
            piece = index - int(self._first[begun - 1])
            if piece <= self._added_before[begun] - self._added_before[begun - 1]:
                return int(self._long[begun - 1]), piece
        return index - int(self._added_before[begun]), 0

    def __getitem__(self, index: int) -> torch.Tensor:
        block, piece = self._place(int(index))
        tokens: torch.Tensor = self.blocks[block]
        if len(tokens) <= self.max_tokens:
            return tokens
        start = min(piece * self.max_tokens, len(tokens) - self.min_tokens)
        return tokens[start : start + int(self.sizes[index])]

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    def attr(self, attr: str, index: int) -> Any:
        return self.blocks.attr(attr, self._place(int(index))[0])

    @property
    def supports_prefetch(self) -> bool:
        return bool(self.blocks.supports_prefetch)

    def prefetch(self, indices: Any) -> None:
        self.blocks.prefetch({self._place(int(index))[0] for index in indices})

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return bool(self.blocks.can_reuse_epoch_itr_across_epochs)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.blocks.set_epoch(epoch)


def split_path(data: str, split: str, epoch: int) -> str:
    """The path of a split in an epoch; ``data`` names one binarized dataset, or several that take turns (``A:B``)."""
    paths = utils.split_paths(data)
    return os.path.join(paths[(epoch - 1) % len(paths)], split)


def folders_of(data: str | os.PathLike[str]) -> list[str]:
    """The folders of one binarized dataset, or of several that take turns (``A:B``), which have one vocabulary.

    Raises:
        FileNotFoundError: the first folder has no ``dict.txt``.
        ValueError: it is damaged, or another folder has another vocabulary.
    """
    folders: list[str] = utils.split_paths(os.fspath(data))
    dictionary = symbols_of_dataset(folders[0])
    for folder in folders[1:]:
        _check_vocabulary(os.path.join(folder, "train"), dictionary)
    return folders


def load_split(path: str, dictionary: Dictionary, *, combine: bool = False) -> Any:
    """Load the memory-mapped binarized split at ``path`` (``DATA_BIN/train``).

    Args:
        path: without ``.bin``.
        dictionary: what the ids of the split mean, perhaps with symbols that a task adds at its end.
        combine: append ``train1``, ``train2``, ...

    Raises:
        FileNotFoundError: the split does not exist.
        ValueError: the split is empty, damaged, or its folder has another vocabulary.
    """
    _check_vocabulary(path, dictionary)
    check_splits(path, len(dictionary), combine=combine)
    dataset = data_utils.load_indexed_dataset(path, dictionary, combine=combine)
    if dataset is None:
        raise FileNotFoundError(f"no binarized split at {path}.bin; write one with `mlsm binarize`")
    if len(dataset) == 0:
        raise ValueError(f"the binarized split {path}.bin is empty; write it again with `mlsm binarize`")
    return dataset


def _check_vocabulary(path: str, dictionary: Dictionary) -> None:
    """Raise ValueError if the folder of a split has a ``dict.txt`` with other symbols."""
    folder = os.path.dirname(path)
    if os.path.isfile(os.path.join(folder, DICTIONARY_NAME)):
        own = symbols_of_dataset(folder).symbols
        if own != dictionary.symbols[: len(own)]:
            raise ValueError(
                f"{folder} has another vocabulary than the model or the first folder of the data: the symbols of "
                f"{DICTIONARY_NAME} differ, and the same ids mean other pieces; binarize all text with one tokenizer"
            )


def split_fingerprint(path: str | os.PathLike[str]) -> str:
    """SHA-256 of the binarized split at ``path`` (``DATA_BIN/train``)."""
    return sha256_of_files(f"{path}.idx", f"{path}.bin")


def check_is_coded(split: str | os.PathLike[str], codes: str | os.PathLike[str]) -> None:
    """Raise ValueError unless the folder ``codes`` holds the finished codes of a split, ``DATA_BIN/train``."""
    if os.path.isfile(os.path.join(codes, META_FILE)):
        return
    data, name = os.path.split(split)
    folder = os.path.dirname(codes)
    output = "" if folder == data else f" --output {folder}"
    raise ValueError(
        f"{codes} holds no {META_FILE}: it is not a finished code store; run `mlsm encode {data} --auxiliary ... "
        f"--dictionary ... --splits {name}{output}` with the checkpoint, the dictionary and the options of the other "
        "splits"
    )


def check_codes_belong_to(
    split: str | os.PathLike[str], meta: Mapping[str, Any], codes: str | os.PathLike[str] | None = None
) -> None:
    """Raise ValueError unless codes were made from a binarized split.

    Args:
        split: the split, ``DATA_BIN/train``.
        meta: of the codes.
        codes: the folder of the codes (default: ``DATA_BIN/train.codes``).
    """
    codes = codes or f"{split}.codes"
    expected = check_json(meta, CORPUS_CHECK, f"{codes}/meta.json")["fingerprints"]["split"]
    found = split_fingerprint(split)
    if found != expected:
        raise ValueError(
            f"the codes in {codes} were made from another dataset (SHA-256 {expected[:12]}) than "
            f"{split}.bin ({found[:12]}); run `mlsm encode` again"
        )


def load_dictionary(data_bin: str | os.PathLike[str]) -> Dictionary:
    """Load ``dict.txt`` of a binarized dataset and add ``<mask>``, as fairseq's masked_lm task does.

    Raises:
        FileNotFoundError: the folder has no ``dict.txt``.
        ValueError: it is damaged.
    """
    dictionary = symbols_of_dataset(data_bin)
    dictionary.add_symbol("<mask>", n=0)  # n=0: the task adds it again, and only that counts
    return dictionary


def is_content(tokens: torch.Tensor, dictionary: Dictionary) -> torch.Tensor:
    """Which of ``tokens`` (any shape) are not BOS, EOS or padding, as bool; only those are coded."""
    return (tokens != dictionary.bos()) & (tokens != dictionary.eos()) & (tokens != dictionary.pad())


def is_known(tokens: torch.Tensor, dictionary: Dictionary) -> torch.Tensor:
    """Which of ``tokens`` (any shape) are content and not unknown, as bool; only those can be learned."""
    return is_content(tokens, dictionary) & (tokens != dictionary.unk())


def cut_into_blocks(
    dataset: Any,
    *,
    dictionary: Dictionary,
    tokens_per_sample: int,
    sample_break_mode: str,
    bos: int,
) -> PrependTokenDataset:
    """Cut a split into blocks of at most ``tokens_per_sample`` tokens, each beginning with ``bos``, as masked_lm does.

    If masked_lm would make a longer block from a long sentence, its pieces become separate samples.
    """
    blocks = TokenBlockDataset(
        dataset,
        dataset.sizes,
        tokens_per_sample - 1,  # one less for BOS
        pad=dictionary.pad(),
        eos=dictionary.eos(),
        break_mode=sample_break_mode,
    )
    return PrependTokenDataset(BlockPiecesDataset(blocks, tokens_per_sample - 1), bos)


def training_samples(dataset: Any, *, split: str, cfg: Any, dictionary: Dictionary, bos: int) -> PrependTokenDataset:
    """The samples of a task like masked_lm: shortened as ``cfg`` says, then cut into blocks.

    Args:
        dataset: the tokens of the split, or their positions (``bos`` is then ``NO_POSITION``).
        cfg: the configuration, with ``tokens_per_sample``, ``sample_break_mode``, ``shorten_*`` and ``seed``.
    """
    dataset = maybe_shorten_dataset(
        dataset, split, cfg.shorten_data_split_list, cfg.shorten_method, cfg.tokens_per_sample, cfg.seed
    )
    return cut_into_blocks(
        dataset,
        dictionary=dictionary,
        tokens_per_sample=cfg.tokens_per_sample,
        sample_break_mode=cfg.sample_break_mode,
        bos=bos,
    )
