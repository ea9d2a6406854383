"""Check that a model and its tokenizer give the same ids and logits as their counterparts in ``transformers``."""

import copy
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mlsm_plugin.core.text.hf_tokenizer import text_backend
from mlsm_plugin.core.text.masked_reading import masked_lines
from mlsm_plugin.fairseq_plugin.compat.model_parts import sentence_encoder, token_embeddings
from mlsm_plugin.fairseq_plugin.text.masked_text import MASK, encode_masked_text
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import HuggingFaceBPE

if TYPE_CHECKING:
    from mlsm_plugin.hub.interface import MlsmHubInterface

Line = tuple[str, Tensor]  # text and ids

LARGEST_DIFFERENCE = 1e-4
LOGIT_TOKENS = 2048  # number of tokens whose logits are compared, in lines of all lengths
NUMBERS_AT_ONCE = 1 << 24  # size of the logits of a batch
REMEDY = "train on a dataset of `mlsm binarize`, or of fairseq-preprocess with --srcdict and the tokenizer's dict.txt"
# symbols of a dictionary that are not pieces: special symbols, and fairseq-preprocess's padding symbols
NO_PIECES = re.compile(r"<[^<>]+>|madeupword\d{4}")


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison on lines of text.

    Long runs of one character have many segmentations of equal probability, and float32 rounding decides which of them
    SentencePiece chooses. Lines that contain a special token with a role, such as ``<mask>``, are compared as plain
    text, as Hugging Face's tokenizer reads it with ``split_special_tokens=True``.
    """

    lines: int  # lines with the same ids
    reordered: int  # further lines, cut into the same pieces in another order
    with_symbols: int  # how many of these lines contain a special token with a role
    masked: int  # variants of these lines with masks, with the same or reordered ids
    tokens: int  # tokens whose logits were compared
    largest_difference: float  # between two logits, or two numbers in hidden states


def compare(
    interface: "MlsmHubInterface",
    ids: Tensor,
    tokenizer: Any,
    model: Any,
    lines: Sequence[str],
    *,
    word: str,
    masked: bool = True,
    head: bool = True,
) -> Comparison:
    """Compare our model, in eval mode, with Hugging Face's: ids of lines, with and without masks, and logits.

    Logits are compared for 2,048 tokens in lines of all lengths, each with a masked token, and embeddings for all
    symbols. ValueError names a line whose ids differ, or with a logit that differs by more than 1e-4.

    Args:
        interface: our model, as the hub loads it.
        ids: Hugging Face's id for each of our ids, int64 ``(len(dictionary),)``.
        tokenizer, model: Hugging Face's tokenizer and model.
        lines: lines of text.
        word: adjective for the model in errors, such as "exported".
        masked: also compare the ids of ``lines`` with masks, as ``pipeline("fill-mask")`` reads them.
        head: whether Hugging Face's model has a masked-LM head; otherwise hidden states are compared.
    """
    return _BothModels(interface, ids, tokenizer, model, word=word, head=head).compared(lines, masked=masked)


class _BothModels:
    """Our model and Hugging Face's; arguments are those of :func:`compare`."""

    def __init__(
        self, interface: "MlsmHubInterface", ids: Tensor, tokenizer: Any, model: Any, *, word: str, head: bool
    ) -> None:
        self.interface = interface
        self.ids = ids
        self.tokenizer = tokenizer
        self.model = model
        self.word = word
        self.head = head
        self.dictionary = interface.task.source_dictionary
        self.unknown = int(ids[self.dictionary.unk()])
        self.as_text = text_backend(copy.deepcopy(tokenizer))
        added = self.as_text.get_added_tokens_decoder()
        self.special = {number: token.content for number, token in added.items() if token.special}

    @torch.no_grad()
    def compared(self, lines: Sequence[str], *, masked: bool) -> Comparison:
        """See :func:`compare`."""
        encoded = [self.interface.encode(line) for line in lines]
        named = [any(symbol in line for symbol in self.special.values()) for line in lines]
        reordered = sum(map(self._is_reordered, lines, encoded, named))
        variants = [
            variant
            for line, as_text in zip(lines, named, strict=True)
            for variant in masked_lines(line, MASK)
            if masked and not as_text
        ]
        for variant in variants:
            self._check_masked(variant)
        self._check_embeddings(lines, encoded)
        tokens, difference = self._compare_logits(lines, encoded)
        return Comparison(len(lines) - reordered, reordered, sum(named), len(variants), tokens, difference)

    def _is_reordered(self, line: str, our_ids: Tensor, as_text: bool) -> bool:
        """Whether both tokenizers cut a line into the same pieces in another order; ValueError if pieces differ."""
        their_ids = self.as_text.encode(line).ids if as_text else self.tokenizer(line)["input_ids"]
        if as_text:
            inside = [self.unknown if number in self.special else number for number in their_ids[1:-1]]
            their_ids = [their_ids[0], *inside, their_ids[-1]]
        self._check_ids(their_ids, our_ids.tolist(), line)
        return their_ids != self.ids[our_ids].tolist()

    def _check_masked(self, line: str) -> None:
        """Raise ValueError unless both tokenizers give the same ids for a line with a mask."""
        masks = [self.interface.task.mask_idx]
        our_ids, _ = encode_masked_text(line, self.interface.bpe, self.dictionary, masks=masks)
        self._check_ids(self.tokenizer(line.replace(MASK, self.tokenizer.mask_token))["input_ids"], our_ids, line)

    def _check_ids(self, their_ids: list[int], our_ids: list[int], line: str) -> None:
        if sorted(their_ids) != sorted(self.ids[our_ids].tolist()):
            vocabulary = vocabulary_difference(self.interface)
            why = "" if vocabulary is None else f": {vocabulary}; {REMEDY}"
            raise ValueError(f"the {self.word} tokenizer gives other ids for {line!r}; nothing was written{why}")

    def _check_embeddings(self, lines: Sequence[str], encoded: Sequence[Tensor]) -> None:
        """Raise ValueError, with a line that has the symbol, if the embedding of a symbol differs."""
        embeddings = token_embeddings(sentence_encoder(self.interface.model)).weight
        differing = ~(
            (embeddings - self.model.get_input_embeddings().weight[self.ids]).abs() <= LARGEST_DIFFERENCE
        ).all(dim=1)
        if differing.any():
            symbol = int(differing.nonzero()[0])
            examples = (line for line, tokens in zip(lines, encoded, strict=True) if symbol in tokens)
            where = "".join(f", as in {line!r}" for line in islice(examples, 1))
            what = f"embedding of {self.dictionary[symbol]!r}{where}"
            raise ValueError(f"the {self.word} model has another {what}; nothing was written")

    def _compare_logits(self, lines: Sequence[str], encoded: Sequence[Tensor]) -> tuple[int, float]:
        """The number of tokens with compared logits, and the largest difference; ValueError if it is too large."""
        limit = int(self.interface.model.max_positions())
        order = sorted(range(len(lines)), key=lambda line: len(encoded[line]), reverse=True)
        step = math.ceil(sum(min(len(tokens), limit) for tokens in encoded) / LOGIT_TOKENS)
        chosen = [(lines[line], self._with_mask(encoded[line][:limit])) for line in order[:: max(1, step)]]
        number = 0
        largest = 0.0
        for batch in self._batches(chosen):
            tokens = pad_sequence(
                [line_ids for _, line_ids in batch], batch_first=True, padding_value=self.dictionary.pad()
            )
            differences = self._differences(tokens)
            for (line, _), difference in zip(batch, differences.tolist(), strict=True):
                if not difference <= LARGEST_DIFFERENCE:  # true for NaN, too
                    what = "logits" if self.head else "hidden states"
                    raise ValueError(
                        f"the {self.word} model's {what} differ by {difference:.2g} on {line!r}; nothing was written"
                    )
            number += int(tokens.ne(self.dictionary.pad()).sum())
            largest = max(largest, float(differences.max()))
        return number, largest

    def _with_mask(self, tokens: Tensor) -> Tensor:
        """A copy of the ids of a line with a mask in the middle."""
        tokens = tokens.clone()
        if len(tokens) > 2:
            tokens[len(tokens) // 2] = self.interface.task.mask_idx
        return tokens

    def _batches(self, lines: Sequence[Line]) -> Iterator[list[Line]]:
        """Batches of lines of similar length; ``lines`` are sorted by length, the longest first."""
        first = 0
        room = NUMBERS_AT_ONCE // len(self.dictionary)
        while first < len(lines):
            size = max(1, room // len(lines[first][1]))
            yield list(lines[first : first + size])
            first += size

    def _differences(self, tokens: Tensor) -> Tensor:
        """The largest difference between two numbers for each row of ids ``(B, T)``: ``(B,)``."""
        attended = tokens.ne(self.dictionary.pad())
        ours = self.interface.model(tokens, features_only=not self.head)[0]
        output = self.model(input_ids=self.ids[tokens], attention_mask=attended.long())
        theirs = output.logits[..., self.ids] if self.head else output.last_hidden_state
        differences: Tensor = (ours - theirs).abs().amax(dim=2).masked_fill(~attended, 0)
        return differences.amax(dim=1)


def vocabulary_difference(interface: "MlsmHubInterface") -> str | None:
    """A phrase about how a model's symbols differ from the pieces of its SentencePiece tokenizer; None if they agree.

    The order of the symbols does not matter, and neither do the padding symbols of ``fairseq-preprocess``.
    """
    if isinstance(interface.bpe, HuggingFaceBPE):
        return None
    processor = interface.bpe.sp
    symbols = interface.task.source_dictionary.symbols
    pieces = [processor.id_to_piece(number) for number in range(len(processor))]
    known_symbols = {*symbols}
    known_pieces = {*pieces}
    missing = [piece for piece in pieces if piece not in known_symbols]
    extra = [symbol for symbol in symbols if symbol not in known_pieces and not NO_PIECES.fullmatch(symbol)]
    if not missing and not extra:
        return None
    return (
        f"the model's dict.txt lacks {_counted(missing)} of the tokenizer's pieces and has {_counted(extra)} that "
        "are no pieces, as that of fairseq-preprocess without --srcdict"
    )


def _counted(symbols: list[str]) -> str:
    return f"{len(symbols):,} ({symbols[0]!r}, ...)" if symbols else "none"
