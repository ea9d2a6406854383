"""A Hugging Face tokenizer whose vocabulary is fairseq's dictionary."""

import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlsm_plugin.core.files.atomic_files import PathLike, read_json
from mlsm_plugin.core.files.hf_files import TRAINER_STATE, first_line, hf_folder, import_transformers, save_pretrained
from mlsm_plugin.core.files.json_checks import anything, check_json, fields, list_of, text, whole
from mlsm_plugin.core.files.model_files import DICTIONARY_NAME, symbols_in
from mlsm_plugin.core.masking.token_ids import check_distinct
from mlsm_plugin.core.masking.word_boundaries import PieceClasses
from mlsm_plugin.core.text.masked_reading import reading_the_rest
from mlsm_plugin.core.text.unknown_tokens import UnknownTokens

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SPECIAL_SYMBOLS = 4  # fairseq's <s> <pad> </s> <unk>
FAIRSEQ_PAD = 1
FILES_OF_TOKENIZERS = ("tokenizer*", "vocab.*", "*.model", "bpe.codes")
# roles of Hugging Face's special tokens; not the unknown token, which stands for a word
ROLES = ("cls", "bos", "sep", "eos", "pad", "mask")
# special tokens without a role that stand for missing text, like the mask: the masks of NPM, and sentinels
GAPS = re.compile(r"<mask_[se]>|<extra_id_\d+>")
ModelInput = dict[str, list[int]]  # ids, attention mask and, for some models, token types
Offsets = list[tuple[int, int]]  # the places of the characters of tokens
# roles whose token must differ from the tokens of other roles: padding gets no attention, and a mask is never masked
SINGLE_ROLES = {"pad": ("cls", "bos", "sep", "eos", "mask"), "mask": ("cls", "bos", "sep", "eos", "unk")}
ADDED_TOKEN = fields({"id": whole(), "content": text, "special": anything})
TOKENIZER_CHECK = fields(known={"added_tokens": list_of(ADDED_TOKEN)})  # of tokenizer.json


class HuggingFaceTokenizer:
    """A tokenizer of ``transformers``, with the mapping between its ids and fairseq's ids.

    fairseq's dictionary is ``<s> <pad> </s> <unk>``, then the vocabulary in its order without the tokens that have
    these roles, then ``<mask>``. For RoBERTa's vocabulary, the ids are the same as Hugging Face's. A token that
    fairseq's files cannot hold (it contains whitespace, or looks like a special symbol) is listed as ``[hf:ID]``.
    ValueError if there is no tokenizer, it is not a fast one, or it lacks tokens that begin, end and pad a text.

    :func:`text_backend` describes how a text is read. A Unigram vocabulary also holds special tokens as pieces; if a
    text contains a special token that is never text, it becomes the unknown token.

    ``path`` is a folder or a hub name, with or without ``hf:``.

    Attributes:
        symbols: the lines of ``dict.txt``.
        hf_ids: Hugging Face's id for each of fairseq's ids, ``<mask>`` included, ``(len(symbols) + 5,)`` int64.
        fairseq_ids: fairseq's id for each of Hugging Face's ids, ``(largest_id + 1,)``; special tokens map to
            ``<unk>``.
        begin_id, pad_id, end_id: Hugging Face's ids of the tokens that are declared to begin, pad and end a text.
        before, after: the ids that the tokenizer actually adds before and after a text; it can declare tokens and add
            none.
        mask_id: Hugging Face's id of the mask, or None.
        special_ids: Hugging Face's ids of special tokens, see :func:`special_ids`.
        backend: the ``tokenizers.Tokenizer`` of :func:`text_backend`.
    """

    def __init__(self, path: PathLike) -> None:
        self.folder = hf_folder(path)
        self._tokenizer: PreTrainedTokenizerBase = load_fast_tokenizer(self.folder)
        self.backend = text_backend(self._tokenizer)
        begin, pad, end, unknown, mask = _special_ids(self._tokenizer, self.folder)
        self.mask_id = mask
        self.begin_id = begin
        self.pad_id = pad
        self.end_id = end
        self.unknown_id = unknown
        self.before, self.after = _added_ids(self.backend, begin)
        self.special_ids = special_ids(self._tokenizer)
        self._never_text = self.special_ids - _read_as_tokens(self._tokenizer)
        vocabulary = sorted((number, token) for token, number in self._tokenizer.get_vocab().items())
        special = {begin, pad, end, unknown, mask}
        plain = [(number, token) for number, token in vocabulary if number not in special]
        self.symbols = [_symbol(token, number) for number, token in plain]
        if not self.symbols:  # transformers makes such a tokenizer from a config.json alone
            raise ValueError(f"{self.folder} has no readable tokenizer: its vocabulary is empty")
        mask_or_unknown = unknown if mask is None else mask
        in_order = [begin, pad, end, unknown, *(number for number, _ in plain), mask_or_unknown]
        self.hf_ids = np.array(in_order, dtype=np.int64)
        self.largest_id = int(self.hf_ids.max())
        self.fairseq_ids = np.full(self.largest_id + 1, SPECIAL_SYMBOLS - 1)  # <unk>
        self.fairseq_ids[self.hf_ids[SPECIAL_SYMBOLS:-1]] = np.arange(SPECIAL_SYMBOLS, len(self.hf_ids) - 1)
        self._names = ["<s>", "<pad>", "</s>", "<unk>", *self.symbols, "<mask>"]
        self._id_of_symbol = dict(zip(self._names, in_order, strict=True))

    @cached_property
    def vocabulary_fingerprint(self) -> str:
        """See :func:`vocabulary_fingerprint`."""
        return vocabulary_fingerprint(self._tokenizer)

    @cached_property
    def segmentation_fingerprint(self) -> str:
        """SHA-256 of everything that decides how a text is cut into tokens."""
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    def tokens_by_id(self) -> list[str]:
        """The tokens in the order of their ids; empty for an id without a token."""
        tokens = [""] * (self.largest_id + 1)
        for token, number in self._tokenizer.get_vocab().items():
            tokens[number] = token
        return tokens

    def surrounded(self, ids: Sequence[int]) -> list[int]:
        """The ids of a text with the ids that the tokenizer adds before and after it."""
        return [*self.before, *ids, *self.after]

    def encoded(self, texts: Sequence[str], *, after_a_gap: bool = False) -> list[tuple[list[int], Offsets]]:
        """Hugging Face's ids of each text, without tokens that begin and end it, and the places of their characters.

        ``after_a_gap`` is for texts right after a mask; without a leading space they continue the masked word.
        """
        backend = self._after_a_gap if after_a_gap else self.backend
        encodings = backend.encode_batch(list(texts), add_special_tokens=False)
        return [(self._of_text(encoding.ids), encoding.offsets) for encoding in encodings]

    def encoded_text(self, text: str) -> tuple[list[int], Offsets]:
        """As :meth:`encoded`, for one text."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        return self._of_text(encoding.ids), encoding.offsets

    def _of_text(self, ids: list[int]) -> list[int]:
        if self._never_text.isdisjoint(ids):
            return ids
        return [self.unknown_id if number in self._never_text else number for number in ids]

    def inputs_of(self, samples: Sequence[Sequence[str]], max_length: int) -> tuple[list[ModelInput], int]:
        """The inputs of a model for texts and pairs of texts, with the tokens that the tokenizer adds.

        Samples of more than ``max_length`` ids are cut at their end, the longer text of a pair first.

        Returns:
            the inputs, and the number of samples that were cut.
        """
        pairs = [tuple(sample) if len(sample) > 1 else sample[0] for sample in samples]
        self.backend.enable_truncation(max_length)
        try:
            encodings = self.backend.encode_batch(pairs)
        finally:
            self.backend.no_truncation()
        cut = sum(bool(encoding.overflowing) for encoding in encodings)
        return [self._model_input(encoding) for encoding in encodings], cut

    def _model_input(self, encoding: "Encoding") -> ModelInput:
        added = encoding.special_tokens_mask
        ids = [
            self.unknown_id if number in self._never_text and not is_added else number
            for number, is_added in zip(encoding.ids, added, strict=True)
        ]
        inputs = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        if "token_type_ids" in self._tokenizer.model_input_names:
            inputs["token_type_ids"] = list(encoding.type_ids)
        return inputs

    def unknown_of(self, text: str) -> UnknownTokens:
        """The unknown tokens of a text."""
        ids, offsets = self.encoded_text(text)
        counted = UnknownTokens()
        counted.add(text, ids, offsets, self.unknown_id)
        return counted

    def symbols_of(self, text: str) -> list[str]:
        """The tokens of a text as symbols of ``dict.txt``; unknown tokens become ``<unk>``."""
        ids, _ = self.encoded_text(text)
        return self._symbols(ids)

    def symbols_after_a_gap(self, text: str) -> list[str]:
        """As :meth:`symbols_of`, for text right after a mask; without a leading space it continues the masked word."""
        return self._symbols(self._of_text(self._after_a_gap.encode(text, add_special_tokens=False).ids))

    def ids_of(self, text: str) -> list[int]:
        """Hugging Face's ids of a text, without tokens that begin and end it."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def ids_with_masks(self, text: str, mask: str) -> list[int]:
        """As :meth:`ids_of`, for a text in which ``mask`` stands for masked tokens, as in training.

        Spaces before it are ignored. The tokenizer must have a mask.
        """
        return self.encoded_with_masks(text, mask)[0]

    def encoded_with_masks(self, text: str, mask: str) -> tuple[list[int], Offsets]:
        """The ids of :meth:`ids_with_masks`, and the places of their characters."""
        assert self.mask_id is not None, "the tokenizer has no mask"
        parts = text.split(mask)
        ids: list[int] = []
        offsets: Offsets = []
        place = 0
        for number, part in enumerate(parts):
            read = part.rstrip() if number + 1 < len(parts) else part
            backend = self._after_a_gap if number else self.backend
            encoding = backend.encode(read, add_special_tokens=False)
            ids += self._of_text(encoding.ids)
            offsets += [(place + start, place + stop) for start, stop in encoding.offsets]
            place += len(part)
            if number + 1 < len(parts):
                ids.append(self.mask_id)
                offsets.append((place, place + len(mask)))
                place += len(mask)
        return ids, offsets

    @cached_property
    def _after_a_gap(self) -> "Tokenizer":
        backend = reading_the_rest(self.backend)
        backend.encode_special_tokens = self.backend.encode_special_tokens
        return backend

    def _symbols(self, ids: Sequence[int]) -> list[str]:
        return [self._names[number] for number in self.fairseq_ids[ids].tolist()]

    def surfaces_of(self, text: str) -> list[str]:
        """The part of a text that each symbol of :meth:`symbols_of` stands for."""
        _, offsets = self.encoded_text(text)
        return [text[start:stop] for start, stop in offsets]

    def text_of(self, symbols: Sequence[str]) -> str:
        """The text of a list of symbols; special symbols are left out, except ``<mask>`` and ``<unk>``."""
        parts: list[str] = []
        run: list[int] = []
        for symbol in [*symbols, "<s>"]:  # the added symbol ends the last run
            if symbol not in ("<s>", "</s>", "<pad>", "<mask>", "<unk>"):
                run.append(self._id_of_symbol[symbol])
                continue
            if run:
                parts.append(self.backend.decode(run, skip_special_tokens=False).strip())
                run = []
            if symbol in ("<mask>", "<unk>"):
                parts.append(symbol)
        return " ".join(parts)

    def continued(self, before: str, symbol: str) -> tuple[str, str]:
        """Add a symbol to a text such that it is read as this symbol, if possible; also returns the symbol's text."""
        added = self.text_of_id(self._id_of_symbol[symbol])
        whole = before + added.strip()
        token = added.strip()
        if not before.strip() or self.symbols_of(whole) == [*self.symbols_of(before), symbol]:
            return whole, token
        return before.rstrip() + added, token

    def text_of_id(self, number: int) -> str:
        """The text of one of Hugging Face's ids within a text, with the space that it may begin with."""
        once = self.backend.decode([number], skip_special_tokens=False)
        twice = self.backend.decode([number, number], skip_special_tokens=False)
        return twice[len(once) :]

    def check_dictionary(self, folder: Path) -> None:
        """Raise ValueError unless the ``dict.txt`` of a folder was made from the tokenizer."""
        if not self.has_dictionary(folder):
            raise ValueError(
                f"{folder / DICTIONARY_NAME} was not made from the tokenizer of {self.folder}; binarize the text with "
                f"--tokenizer hf:{self.folder}"
            )

    def has_dictionary(self, folder: Path) -> bool:
        """Whether the ``dict.txt`` of a folder was made from the tokenizer; ValueError if there is none."""
        path = folder / DICTIONARY_NAME
        if not path.is_file():
            raise ValueError(f"{path} does not exist; `mlsm binarize` makes it")
        return symbols_in(path) == tuple(symbol.encode() for symbol in self.symbols)

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files; they can be loaded without the model."""
        save_pretrained(folder, self._tokenizer)


def load_fast_tokenizer(folder: Path) -> Any:
    """Hugging Face's fast tokenizer in a folder; raises ValueError if there is none."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes share the lines instead
    if (folder / TRAINER_STATE).is_file() and not any(any(folder.glob(name)) for name in FILES_OF_TOKENIZERS):
        raise ValueError(
            f"{folder} is a Trainer's checkpoint without a tokenizer; copy the tokenizer's files into it, or use the "
            "folder of the finished model"
        )
    transformers = import_transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # missing and damaged files raise errors of different types
        raise ValueError(f"{folder} has no readable tokenizer: {first_line(error)}") from None
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{folder} has no fast tokenizer (tokenizer.json); save one with transformers first")
    return tokenizer


def vocabulary_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """SHA-256 of the tokens and ids of a Hugging Face tokenizer, and of the tokens that begin, end and pad a text."""
    vocabulary = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    begin, pad, end = _surrounding_ids(tokenizer)
    return hashlib.sha256(json.dumps([vocabulary, begin, end, pad]).encode()).hexdigest()


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """The ids that are never masked and never coded: tokens that begin, separate, end, pad or mask text, and all others
    that the tokenizer lists as special. The unknown token is not among them, since it stands for a word.
    """
    roles = (getattr(tokenizer, f"{role}_token_id", None) for role in ROLES)
    return frozenset(int(number) for number in roles if number is not None) | {*own_special_tokens(tokenizer)}


def own_special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """The special tokens without a role that a tokenizer lists, by their ids.

    They are its ``additional_special_tokens`` (version 5 of ``transformers``: ``extra_special_tokens``), and the other
    added tokens that are marked as special.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    listed = {number: token.content for number, token in added.items() if token.special}
    listed |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    with_roles = [None, *(getattr(tokenizer, f"{role}_token_id", None) for role in (*ROLES, "unk"))]
    return {int(number): token for number, token in listed.items() if number not in with_roles}


def own_special_symbols(folder: Path) -> list[str]:
    """The ``dict.txt`` symbols of the :func:`own_special_tokens` of a tokenizer that this package saved in a folder.

    Needs no ``transformers``; empty if there is no tokenizer. ValueError if a file is damaged.
    """
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    if not all(file.is_file() for file in files):
        return []
    added = check_json(read_json(files[0]), TOKENIZER_CHECK, files[0]).get("added_tokens", [])
    config = check_json(read_json(files[1]), fields(), files[1])
    named = [config.get(f"{role}_token") for role in (*ROLES, "unk")]
    with_roles = [token.get("content") if isinstance(token, dict) else token for token in named]
    return [
        _symbol(token["content"], token["id"])
        for token in added
        if token["special"] and token["content"] not in with_roles
    ]


def text_backend(tokenizer: "PreTrainedTokenizerBase", *, with_gaps: bool = False) -> "Tokenizer":
    """The ``tokenizers.Tokenizer`` that reads a text, without truncation and padding.

    A text has the same tokens each time: the ``dropout`` of a BPE is switched off in ``tokenizer``, with a warning.

    The :func:`own_special_tokens` are read as tokens, as in Hugging Face, unless the tokenizer has
    ``split_special_tokens``. Special tokens with a role or for missing text are read as ordinary text, since the
    content of a text must neither mask nor end it. ``with_gaps`` also reads the tokens for missing text as tokens.
    """
    backend = tokenizer.backend_tokenizer
    if getattr(backend.model, "dropout", None):
        logger.warning("the tokenizer drops merges at random (dropout in tokenizer.json); text is read without that")
        backend.model.dropout = None
    tokens = _read_as_tokens(tokenizer, with_gaps=with_gaps)
    if tokens:
        content = json.loads(backend.to_str())
        for token in content["added_tokens"]:
            token["special"] = token["special"] and token["id"] not in tokens  # if not special, it is read as a token
        backend = type(backend).from_str(json.dumps(content))
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def _read_as_tokens(tokenizer: "PreTrainedTokenizerBase", *, with_gaps: bool = False) -> frozenset[int]:
    """The ids of the special tokens that :func:`text_backend` finds in a text."""
    if getattr(tokenizer, "split_special_tokens", False):
        return frozenset()
    listed = own_special_tokens(tokenizer)
    return frozenset(number for number, token in listed.items() if with_gaps or not GAPS.fullmatch(token))


def check_masked_lm_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ValueError if a tokenizer of ``transformers`` has no mask or padding token, or it has another role, too."""
    for name in ("mask", "pad"):
        if _first_id(tokenizer, name) is None:
            raise ValueError(f"the tokenizer has no {name} token; use the tokenizer of a masked LM")
    check_special_tokens(tokenizer)


def check_special_tokens(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ValueError if the padding token or the mask of a tokenizer is also another special token."""
    for role, other_roles in SINGLE_ROLES.items():
        for other_role in other_roles:
            ids = {role_name(role): _first_id(tokenizer, role), role_name(other_role): _first_id(tokenizer, other_role)}
            check_distinct(ids, remedy=f"set {role}_token to a token of its own")


def role_name(role: str) -> str:
    """The name in errors of the token with a role."""
    return f"the {role} token"


def number_of_ids(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The largest id of a tokenizer + 1. Ids can be missing, for example if a vocab.txt has a line twice."""
    return max(tokenizer.get_vocab().values()) + 1


def unmasked_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Ids that are never masked and never replace masked tokens: special and unknown tokens."""
    unknown = _first_id(tokenizer, "unk")
    return sorted({*special_ids(tokenizer), *([] if unknown is None else [unknown])})


def piece_classes(tokenizer: "PreTrainedTokenizerBase", masks: Sequence[int] = ()) -> PieceClasses:
    """The classes of all ids of a tokenizer, see :meth:`PieceClasses.of_vocabulary`; ``masks`` are special, too."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(number_of_ids(tokenizer))))
    return PieceClasses.of_vocabulary([token or "" for token in tokens], {*unmasked_ids(tokenizer), *masks})


def _first_id(tokenizer: "PreTrainedTokenizerBase", *roles: str) -> int | None:
    ids = (getattr(tokenizer, f"{role}_token_id", None) for role in roles)
    return next((int(number) for number in ids if number is not None), None)


def _surrounding_ids(tokenizer: "PreTrainedTokenizerBase") -> tuple[int | None, int | None, int | None]:
    """The ids of the tokens that begin, pad and end a text."""
    return _first_id(tokenizer, "cls", "bos"), _first_id(tokenizer, "pad"), _first_id(tokenizer, "sep", "eos")


def _added_ids(backend: "Tokenizer", begin: int) -> tuple[list[int], list[int]]:
    """The ids that a ``tokenizers.Tokenizer`` adds before and after a text."""
    try:
        encoding = backend.encode("a")
    except Exception:  # the vocabulary has neither this letter nor an unknown token
        encoding = backend.encode("")
    ids = encoding.ids
    added = encoding.special_tokens_mask
    first = added.index(0) if 0 in added else int(begin in ids)
    return ids[:first], ids[first + added.count(0) :]


def _special_ids(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> tuple[int, int, int, int, int | None]:
    """The ids of the tokens that begin, pad and end a text, of the unknown token and of the mask (None: no mask)."""
    begin, pad, end = _surrounding_ids(tokenizer)
    if begin is None or pad is None or end is None or len({begin, pad, end}) < 3:
        raise ValueError(
            f"the tokenizer of {folder} must have three different tokens that begin, end and pad a text, but has the "
            f"ids {begin}, {end} and {pad}; use the tokenizer of an encoder like BERT or RoBERTa"
        )
    check_special_tokens(tokenizer)
    unknown = _first_id(tokenizer, "unk")
    return begin, pad, end, pad if unknown is None else unknown, _first_id(tokenizer, "mask")


def _symbol(token: str, number: int) -> str:
    odd = not token or re.search(r"\s", token) or re.fullmatch(r"<[^<>]+>|\[hf:\d+\]", token)
    return f"[hf:{number}]" if odd else token
