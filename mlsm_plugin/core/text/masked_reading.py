"""How a tokenizer of Hugging Face reads a text with masks: as a model is trained, in which masks replace tokens.

A stock tokenizer cuts a text at its masks and reads every part as a text of its own. Many then mark the beginning of
each part as that of a word, so that ``<mask>.`` has other tokens than the model has seen after a mask.
"""

import json
import re
from typing import TYPE_CHECKING

from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.masking.word_boundaries import SENTENCEPIECE_BEGIN

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# what tokenizer.json calls steps of a tokenizer
BYTE_LEVEL = "ByteLevel"
METASPACE = "Metaspace"
SEQUENCE = "Sequence"
STRIP = "Strip"
WHITESPACE_SPLIT = "WhitespaceSplit"
WORD = re.compile(r"\w+")
SHORTEST_CUT_WORD = 4  # letters of a word of which a part is masked


def reading_as_trained(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """A fast tokenizer that reads masked text as a model is trained, and all other text as ``tokenizer`` does.

    It is ``tokenizer`` itself if that reads it so, or has no mask. A space before a mask belongs to the mask, and what
    stands right after a mask is not the beginning of a word.
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
    """Whether a ``tokenizers.Tokenizer`` marks the beginning of a text as that of a word, whatever stands before it."""
    return any(_marks(part, "first") for part in _parts(json.loads(backend.to_str())["pre_tokenizer"]))


def reading_the_rest(backend: "Tokenizer") -> "Tokenizer":
    """A ``tokenizers.Tokenizer`` like ``backend`` for text that stands after a mask: it does not mark its beginning."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(_marking(json.loads(backend.to_str()), "never")))


def _one_space(pattern: str) -> list[JsonObject]:
    """Normalizers that let one space stand where a pattern of whitespace is, unless a mark of a word follows it."""
    return [
        {"type": "Replace", "pattern": {"Regex": f"{pattern}(?={SENTENCEPIECE_BEGIN})"}, "content": ""},
        {"type": "Replace", "pattern": {"Regex": pattern}, "content": " "},
        {"type": STRIP, "strip_left": False, "strip_right": True},
    ]


def _marking(state: JsonObject, scheme: str) -> JsonObject:
    """The state of a tokenizer that marks the beginning of the ``first`` part of a text only, or ``never`` one.

    Without masks, ``first`` gives the same tokens as ``state``.
    """
    parts = _parts(state["pre_tokenizer"])
    if not any(_marks(part, scheme) for part in parts):
        return state
    normalizers = [step for part in _parts(state["normalizer"]) for step in _keeping_a_space(part)]
    if any(part["type"] == WHITESPACE_SPLIT for part in parts):  # it drops the space that marks a word after a mask
        parts = [part for part in parts if part["type"] != WHITESPACE_SPLIT]
        normalizers += _one_space(r"\s+")
    marking = [step for part in parts for step in _marking_part(part, scheme)]
    changed = {
        "normalizer": _sequence("normalizers", normalizers),
        "pre_tokenizer": _sequence("pretokenizers", marking),
    }
    return {**state, **changed}


def _parts(step: JsonObject | None) -> list[JsonObject]:
    """The steps of a normalizer or a pre-tokenizer, in their order."""
    if step is None:
        return []
    if step["type"] != SEQUENCE:
        return [step]
    inner = step.get("pretokenizers") or step.get("normalizers") or []
    return [part for inner_step in inner for part in _parts(inner_step)]


def _sequence(name: str, parts: list[JsonObject]) -> JsonObject | None:
    return {"type": SEQUENCE, name: parts} if parts else None


def _marks(part: JsonObject, scheme: str) -> bool:
    """Whether a step of a pre-tokenizer marks the beginning of more parts of a text than ``scheme`` says."""
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
    """A ``PreTrainedTokenizerFast`` with another backend, whose mask takes the space before it.

    It is not of the class of a model, since transformers 5 builds a new backend for those.
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
    """A line with a mask in the place of its first word, of one inside, of the last one, and of a part of a word."""
    words = list(WORD.finditer(line))
    if not words:
        return []
    places = [words[place].span() for place in (0, len(words) // 2, -1)]
    longest = max(words, key=lambda word: len(word.group()))
    if len(longest.group()) >= SHORTEST_CUT_WORD:
        middle = (longest.start() + longest.end()) // 2
        places += [(longest.start(), middle), (middle, longest.end())]
    return [line[:start] + mask + line[end:] for start, end in dict.fromkeys(places)]
