"""Whether a model and its tokenizer give the ids and the logits that those of ``transformers`` give."""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlsm_plugin.core.text.hf_tokenizer import text_backend
from mlsm_plugin.fairseq_door.text.text_tokenizer import HuggingFaceBPE

LARGEST_DIFFERENCE = 1e-4
REMEDY = "train on a dataset of `mlsm binarize`, or of fairseq-preprocess with --srcdict and the tokenizer's dict.txt"
# symbols of a dictionary that are no pieces: special ones, and those with which fairseq-preprocess fills it up
NO_PIECES = re.compile(r"<[^<>]+>|madeupword\d{4}")


@dataclass(frozen=True)
class Comparison:
    """What was found on lines of text.

    Long runs of one character have many cuts of equal probability, and float32 rounding decides which one SentencePiece
    chooses. Lines that name a special token with a role, such as ``<mask>``, are compared as plain text, which Hugging
    Face's tokenizer reads with ``split_special_tokens=True``.
    """

    lines: int  # whose ids are the same
    reordered: int  # further lines, which are cut into the same pieces in another order
    with_symbols: int  # of all these lines, those that name a special token with a role
    tokens: int  # of all these lines
    largest_difference: float  # of two logits


@torch.no_grad()
def compare(interface: Any, ids: Tensor, tokenizer: Any, model: Any, lines: Sequence[str], *, word: str) -> Comparison:
    """Compare our model, in eval mode, with Hugging Face's: ids and logits of lines, each with a masked token.

    ``ids`` ``(len(dictionary),)`` int64 has for each of our ids Hugging Face's; an error calls the model by ``word``,
    such as "exported". ValueError if ids differ, or a logit differs by more than 1e-4.
    """
    limit, unknown = int(interface.model.max_positions()), int(ids[interface.task.source_dictionary.unk()])
    as_we_read = text_backend(copy.deepcopy(tokenizer))
    added = as_we_read.get_added_tokens_decoder()
    special = {number: token.content for number, token in added.items() if token.special}
    reordered, with_symbols, tokens, difference = 0, 0, 0, 0.0
    for line in lines:
        own = interface.encode(line)
        as_text = any(symbol in line for symbol in special.values())
        found = as_we_read.encode(line).ids if as_text else tokenizer(line)["input_ids"]
        expected = ids[own].tolist()
        if as_text:
            inside = [unknown if number in special else number for number in found[1:-1]]
            found = [found[0], *inside, found[-1]]
        if sorted(found) != sorted(expected):
            vocabulary = vocabulary_difference(interface)
            why = "" if vocabulary is None else f": {vocabulary}; {REMEDY}"
            raise ValueError(f"the {word} tokenizer gives other ids for {line!r}; nothing was written{why}")
        reordered += found != expected
        with_symbols += as_text
        own = own[:limit].clone()
        if len(own) > 2:
            own[len(own) // 2] = interface.task.mask_idx
        ours, theirs = interface.model(own[None])[0], model(input_ids=ids[own][None]).logits
        largest = float((ours - theirs[..., ids]).abs().max())
        if not largest <= LARGEST_DIFFERENCE:  # true for NaN, too
            raise ValueError(f"the {word} model's logits differ by {largest:.2g}; nothing was written")
        tokens, difference = tokens + len(own), max(difference, largest)
    return Comparison(len(lines) - reordered, reordered, with_symbols, tokens, difference)


def vocabulary_difference(interface: Any) -> str | None:
    """How the symbols of a model differ from the pieces of its SentencePiece tokenizer, in words; None: they do not.

    The order of the symbols does not matter, nor do those with which ``fairseq-preprocess`` fills a dictionary up.
    """
    if isinstance(interface.bpe, HuggingFaceBPE):
        return None
    processor, symbols = interface.bpe.sp, interface.task.source_dictionary.symbols
    pieces = [processor.id_to_piece(number) for number in range(len(processor))]
    there, known = {*symbols}, {*pieces}
    missing = [piece for piece in pieces if piece not in there]
    others = [symbol for symbol in symbols if symbol not in known and not NO_PIECES.fullmatch(symbol)]
    if not missing and not others:
        return None
    return (
        f"the model's dict.txt lacks {_counted(missing)} of the tokenizer's pieces and has {_counted(others)} other "
        "symbols, as that of fairseq-preprocess without --srcdict"
    )


def _counted(symbols: list[str]) -> str:
    return f"{len(symbols):,} ({symbols[0]!r}, ...)" if symbols else "none"
