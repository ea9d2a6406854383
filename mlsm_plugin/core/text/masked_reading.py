"""Let a Hugging Face tokenizer read masked text as in training, where masks replace tokens.

A stock tokenizer cuts a text at its masks and reads every part as a separate text. Many then mark the beginning of each
part as the beginning of a word, so ``<mask>.`` has other tokens than the model has seen after a mask.
"""

import json
import re
from typing import TYPE_CHECKING

from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.masking.word_boundaries import SENTENCEPIECE_BEGIN

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# names of a tokenizer's steps in tokenizer.json
BYTE_LEVEL = "ByteLevel"
METASPACE = "Metaspace"
SEQUENCE = "Sequence"
STRIP = "Strip"
WHITESPACE_SPLIT = "WhitespaceSplit"
WORD = re.compile(r"\w+")
SHORTEST_CUT_WORD = 4  # letters; only part of a word this long is masked


def reading_as_trained(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """A fast tokenizer that reads masked text as in training, and all other text as ``tokenizer`` does.

    It is ``tokenizer`` itself if that already does so, or has no mask. A space before a mask belongs to the mask, and
    text right after a mask does not begin a word.
    """
    from tokenizers import Tokenizer

    mask = tokenizer.mask_token
    if mask is None:
        return tokenizer
    takes_space = tokenizer.encode(f"a {mask}") == tokenizer.encode(f"a{mask}")
    if takes_space and not marks_every_part(tokenizer.backend_tokenizer):
        return tokenizer
    state = _marking(json.loads(tokenizer.backend_tokenizer.to_str()), "first")
    for token in state["added_tokens"]:
        token["lstrip"] = token["lstrip"] or token["content"] == mask
    return _with_backend(tokenizer, Tokenizer.from_str(json.dumps(state)))


def marks_every_part(backend: "Tokenizer") -> bool:
    """Whether a ``tokenizers.Tokenizer`` marks every part of a text as the beginning of a word, even after a mask."""
    return any(_marks(part, "first") for part in _parts(json.loads(backend.to_str())["pre_tokenizer"]))


def reading_the_rest(backend: "Tokenizer") -> "Tokenizer":
    """A ``tokenizers.Tokenizer`` like ``backend`` for text after a mask, which does not mark the text's beginning."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(_marking(json.loads(backend.to_str()), "never")))


def _one_space(pattern: str) -> list[JsonObject]:
    """Normalizers that replace whitespace of this pattern by one space, or by nothing before the mark of a word."""
    return [
        {"type": "Replace", "pattern": {"Regex": f"{pattern}(?={SENTENCEPIECE_BEGIN})"}, "content": ""},
        {"type": "Replace", "pattern": {"Regex": pattern}, "content": " "},
        {"type": STRIP, "strip_left": False, "strip_right": True},
    ]


def _marking(state: JsonObject, scheme: str) -> JsonObject:
    """The state of a tokenizer that marks the beginning of only the ``first`` part of a text, or ``never`` does.

    Without masks, ``first`` gives the same tokens as ``state``.
    """
    parts = _parts(state["pre_tokenizer"])
    if not any(_marks(part, scheme) for part in parts):
        return state
    normalizers = [step for part in _parts(state["normalizer"]) for step in _keeping_a_space(part)]
    if any(part["type"] == WHITESPACE_SPLIT for part in parts):  # it drops the space before a word after a mask
        parts = [part for part in parts if part["type"] != WHITESPACE_SPLIT]
        normalizers += _one_space(r"\s+")
    marking = [step for part in parts for step in _marking_part(part, scheme)]
    changed = {
        "normalizer": _sequence("normalizers", normalizers),
        "pre_tokenizer": _sequence("pretokenizers", marking),
    }
    return {**state, **changed}


def _parts(step: JsonObject | None) -> list[JsonObject]:
    """The steps of a normalizer or a pre-tokenizer, in order."""
    if step is None:
        return []
    if step["type"] != SEQUENCE:
        return [step]
    inner = step.get("pretokenizers") or step.get("normalizers") or []
    return [part for inner_step in inner for part in _parts(inner_step)]


def _sequence(name: str, parts: list[JsonObject]) -> JsonObject | None:
    return {"type": SEQUENCE, name: parts} if parts else None


def _marks(part: JsonObject, scheme: str) -> bool:
    """Whether a step of a pre-tokenizer marks more parts of a text than ``scheme`` allows."""
    if part["type"] == BYTE_LEVEL:
        return bool(part["add_prefix_space"])
    return part["type"] == METASPACE and part["prepend_scheme"] not in ("never", scheme)


def _marking_part(part: JsonObject, scheme: str) -> list[JsonObject]:
    if not _marks(part, scheme):
        return [part]
    if part["type"] == METASPACE:
        return [{**part, "prepend_scheme": scheme}]
    space = {"type": METASPACE, "replacement": " ", "prepend_scheme": scheme, "split": False}
    return [space, {**part, "add_prefix_space": False}]


def _keeping_a_space(part: JsonObject) -> list[JsonObject]:
    """A normalizer that leaves a space at the beginning of a text."""
    if part["type"] != STRIP or not part["strip_left"]:
        return [part]
    at_end = [{"type": STRIP, "strip_left": False, "strip_right": True}] if part["strip_right"] else []
    return [*at_end, *_one_space(r"\A\s+")[:2]]


def _with_backend(tokenizer: "PreTrainedTokenizerBase", backend: "Tokenizer") -> "PreTrainedTokenizerFast":
    """A ``PreTrainedTokenizerFast`` with another backend, and with a mask that takes the space before it.

    It is not of a model's tokenizer class, since transformers 5 builds a new backend for these.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    changed = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        mask_token=AddedToken(tokenizer.mask_token, lstrip=True, normalized=False, special=True),
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        model_input_names=tokenizer.model_input_names,
        clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
    )
    roles = tokenizer.special_tokens_map
    changed.add_special_tokens({role: token for role, token in roles.items() if role != "mask_token"})
    return changed


def masked_lines(line: str, mask: str) -> list[str]:
    """Copies of a line with a mask in place of the first, a middle or the last word, or half of the longest word."""
    words = list(WORD.finditer(line))
    if not words:
        return []
    places = [words[place].span() for place in (0, len(words) // 2, -1)]
    longest = max(words, key=lambda word: len(word.group()))
    if len(longest.group()) >= SHORTEST_CUT_WORD:
        middle = (longest.start() + longest.end()) // 2
        places += [(longest.start(), middle), (middle, longest.end())]
    return [line[:start] + mask + line[end:] for start, end in dict.fromkeys(places)]
