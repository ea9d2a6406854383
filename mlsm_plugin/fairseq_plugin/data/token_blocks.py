"""Cut a binarized split into samples, in the same way for training and for coding."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from fairseq import utils
from fairseq.data import Dictionary, FairseqDataset, PrependTokenDataset, TokenBlockDataset, data_utils
from fairseq.data.shorten_dataset import maybe_shorten_dataset
from fairseq.dataclass import FairseqDataclass

from mlsm_plugin.core.files.atomic_files import PathLike, read_json, sha256_of_files
from mlsm_plugin.core.files.json_checks import check_json, fields, text
from mlsm_plugin.core.files.model_files import DICTIONARY_NAME, SUMMARY_NAME
from mlsm_plugin.core.files.planned_folder import META_FILE
from mlsm_plugin.core.sparse_coding.code_store import CORPUS_CHECK
from mlsm_plugin.core.text.unknown_tokens import warn_of_unknown_ids
from mlsm_plugin.core.text.vocabulary_record import reading_fingerprint, tokenizer_fingerprint
from mlsm_plugin.fairseq_plugin.compat.binarized_files import check_splits, count_symbols, slices_of
from mlsm_plugin.fairseq_plugin.text.symbol_files import own_special_symbols, symbols_of_dataset


class SizedDataset(FairseqDataset):
    """A dataset whose ``sizes`` are the numbers of tokens of its items, ``(n_items,)``."""

    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def size(self, index: int) -> int:
        return int(self.sizes[index])


class BlockPiecesDataset(SizedDataset):
    """The blocks of a text, in order; a block of more than ``max_tokens`` tokens becomes several items.

    fairseq's blocks end at the ends of sentences, so a long sentence makes a block longer than requested. Such a block
    is cut after every ``max_tokens`` tokens, and its last piece holds the rest. Each token is in exactly one item.

    An item has at least ``min_tokens`` and at most ``max_tokens``. A last piece that is too short takes tokens from the
    piece before it; a block of fewer tokens is left out.

    Attributes:
        block_starts: flat position of the first token of each block, ``(n_blocks,)`` int64, ascending.
        block_sizes, sizes: number of tokens of each block, ``(n_blocks,)``, and of each item, ``(n_items,)``, int64.
    """

    def __init__(self, blocks: TokenBlockDataset, max_tokens: int, *, min_tokens: int = 1) -> None:
        super().__init__()
        assert 0 < min_tokens <= max_tokens
        self.blocks = blocks
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.block_starts, ends = slices_of(blocks).T.copy()
        self.block_sizes = ends - self.block_starts
        pieces = np.where(self.block_sizes < min_tokens, 0, -(-self.block_sizes // max_tokens))
        self._first = np.concatenate([[0], np.cumsum(pieces)])  # the first item of each block, and the end
        self.sizes = np.repeat(np.minimum(self.block_sizes, max_tokens), pieces)
        cut = pieces > 1
        rest = (self.block_sizes - (pieces - 1) * max_tokens)[cut]
        last = self._first[1:][cut] - 1
        self.sizes[last] = np.maximum(rest, min_tokens)
        self.sizes[last - 1] += rest - self.sizes[last]

    def pieces_of(self, block: int) -> range:
        """The numbers of the items of a block."""
        return range(int(self._first[block]), int(self._first[block + 1]))

    def __getitem__(self, index: int) -> torch.Tensor:
        block = int(np.searchsorted(self._first, index, side="right")) - 1
        tokens: torch.Tensor = self.blocks[block]
        start = (int(index) - int(self._first[block])) * self.max_tokens
        start = max(0, min(start, len(tokens) - self.min_tokens))
        return tokens[start : start + int(self.sizes[index])]


def split_path(data: str, split: str, epoch: int) -> str:
    """The path of a split in an epoch; ``data`` names one binarized dataset, or several that alternate (``A:B``)."""
    paths = utils.split_paths(data)
    return os.path.join(paths[(epoch - 1) % len(paths)], split)


def folders_of(data: PathLike) -> list[str]:
    """The folders of one binarized dataset, or of several that alternate (``A:B``).

    ValueError if they differ in vocabulary or tokenizer; further errors are those of :func:`symbols_of_dataset`.
    """
    folders: list[str] = utils.split_paths(os.fspath(data))
    dictionary = symbols_of_dataset(folders[0])
    for folder in folders[1:]:
        _check_vocabulary(os.path.join(folder, "train"), dictionary)
        if differ_in_tokenizer(folders[0], folder):
            raise ValueError(
                f"{folder} was binarized with another tokenizer than {folders[0]}: the same text has other ids; "
                "binarize all text with one tokenizer"
            )
    return folders


def differ_in_tokenizer(first: PathLike, second: PathLike) -> bool:
    """Whether two folders have different tokenizers; if one has none, their ``binarize.json`` files decide."""
    fingerprints = [tokenizer_fingerprint(folder) for folder in (first, second)]
    if None in fingerprints:
        fingerprints = [_binarized_with(Path(folder, SUMMARY_NAME)) for folder in (first, second)]
    readings = [reading_fingerprint(folder) for folder in (first, second)]
    return any(None not in pair and pair[0] != pair[1] for pair in (fingerprints, readings))


def _binarized_with(summary: Path) -> str | None:
    """The fingerprint of the tokenizer that `mlsm binarize` has recorded, or None."""
    if not summary.is_file():
        return None
    figures = check_json(read_json(summary), fields({"tokenizer_sha256": text}), summary)
    return str(figures["tokenizer_sha256"])


def load_split(path: str, dictionary: Dictionary, *, combine: bool = False) -> FairseqDataset:
    """Load the memory-mapped binarized split at ``path`` (``DATA_BIN/train``), with ``combine`` also ``train1``, ...

    ``dictionary`` has the symbols of its ids, and perhaps symbols that a task adds at the end. Warns if more than 1 %
    of the tokens are unknown. FileNotFoundError if the split does not exist, ValueError if it is empty, damaged, or its
    folder has another vocabulary.
    """
    _check_vocabulary(path, dictionary)
    check_splits(path, len(dictionary), combine=combine)
    dataset = data_utils.load_indexed_dataset(path, dictionary, combine=combine)
    if dataset is None:
        raise FileNotFoundError(f"no binarized split at {path}.bin; write one with `mlsm binarize`")
    if len(dataset) == 0:
        raise ValueError(f"the binarized split {path}.bin is empty; write it again with `mlsm binarize`")
    tokens, (unknown, ends) = count_symbols(dataset, [dictionary.unk(), dictionary.eos()])
    _warn_of_unknown(path, unknown, tokens - ends)
    return dataset


@cache
def _warn_of_unknown(path: str, unknown: int, tokens: int) -> None:
    """Warn once, although each epoch and each reader of a split counts again."""
    warn_of_unknown_ids(path, unknown, tokens)


def _check_vocabulary(path: str, dictionary: Dictionary) -> None:
    """Raise ValueError if the folder of a split has a ``dict.txt`` with other symbols."""
    folder = os.path.dirname(path)
    if os.path.isfile(os.path.join(folder, DICTIONARY_NAME)):
        symbols = symbols_of_dataset(folder).symbols
        if symbols != dictionary.symbols[: len(symbols)]:
            raise ValueError(
                f"{folder} has another vocabulary than the model or the first folder of the data: the symbols of "
                f"{DICTIONARY_NAME} differ, and the same ids mean other pieces; binarize all text with one tokenizer"
            )


def split_fingerprint(path: PathLike) -> str:
    """SHA-256 of the binarized split at ``path`` (``DATA_BIN/train``)."""
    return sha256_of_files(f"{path}.idx", f"{path}.bin")


def check_is_coded(split: PathLike, codes: PathLike) -> None:
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


def check_codes_belong_to(split: PathLike, meta: Mapping[str, object], codes: PathLike) -> None:
    """Raise ValueError unless the codes in a folder, with this ``meta``, were made from a split, ``DATA_BIN/train``."""
    expected = check_json(meta, CORPUS_CHECK, f"{codes}/meta.json")["fingerprints"]["split"]
    fingerprint = split_fingerprint(split)
    if fingerprint != expected:
        raise ValueError(
            f"the codes in {codes} were made from another dataset (SHA-256 {expected[:12]}) than "
            f"{split}.bin ({fingerprint[:12]}); run `mlsm encode` again"
        )


def load_dictionary(data_bin: PathLike) -> Dictionary:
    """Load ``dict.txt`` as :func:`symbols_of_dataset`, and add ``<mask>``, as fairseq's masked_lm task does."""
    dictionary = symbols_of_dataset(data_bin)
    dictionary.add_symbol("<mask>", n=0)  # n=0: the task adds it again, and only that counts
    return dictionary


def is_content(tokens: torch.Tensor, dictionary: Dictionary) -> torch.Tensor:
    """Whether each of ``tokens`` (any shape) is not special, such as BOS, EOS and padding (bool); only these are coded.

    Unknown tokens are content.
    """
    content = (tokens != dictionary.bos()) & (tokens != dictionary.eos()) & (tokens != dictionary.pad())
    special = own_special_symbols(dictionary)
    if special:
        content &= ~torch.isin(tokens, torch.tensor(special, device=tokens.device))
    return content


def is_known(tokens: torch.Tensor, dictionary: Dictionary) -> torch.Tensor:
    """Whether each of ``tokens`` (any shape) is content and not unknown (bool); only these can be learned."""
    return is_content(tokens, dictionary) & (tokens != dictionary.unk())


def cut_into_blocks(
    dataset: FairseqDataset,
    *,
    dictionary: Dictionary,
    tokens_per_sample: int,
    sample_break_mode: str,
    bos: int,
    min_tokens: int = 1,
) -> PrependTokenDataset:
    """Cut a split into blocks of at most ``tokens_per_sample`` tokens, each beginning with ``bos``, as masked_lm does.

    If masked_lm would make a longer block from a long sentence, its pieces become separate samples. Blocks of fewer
    than ``min_tokens`` tokens, without ``bos``, are left out.
    """
    blocks = TokenBlockDataset(
        dataset,
        dataset.sizes,
        tokens_per_sample - 1,  # one less for BOS
        pad=dictionary.pad(),
        eos=dictionary.eos(),
        break_mode=sample_break_mode,
    )
    return PrependTokenDataset(BlockPiecesDataset(blocks, tokens_per_sample - 1, min_tokens=min_tokens), bos)


def training_samples(
    dataset: FairseqDataset, *, split: str, cfg: FairseqDataclass, dictionary: Dictionary, bos: int
) -> PrependTokenDataset:
    """The samples of a task like masked_lm, shortened according to its ``cfg``, then cut into blocks.

    The dataset has the tokens of the split, or their positions (``bos`` is then ``NO_POSITION``).
    """
    length = cfg.tokens_per_sample
    dataset = maybe_shorten_dataset(dataset, split, cfg.shorten_data_split_list, cfg.shorten_method, length, cfg.seed)
    return cut_into_blocks(
        dataset, dictionary=dictionary, tokens_per_sample=length, sample_break_mode=cfg.sample_break_mode, bos=bos
    )
