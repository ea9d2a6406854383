"""Check ids that a user passes: whole numbers, padding only at the ends, and distinct special ids."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

LARGEST = np.iinfo(np.int32).max
SENTINELS_REMEDY = (
    "if the tokenizer lacks sentinels, add <extra_id_0>, <extra_id_1>, ... as special tokens, and resize the model's "
    "embeddings"
)


def checked_ids(values: ArrayLike, name: str) -> np.ndarray:
    """The ids of the text ``name``, ``(n,)`` int64; ValueError unless they are whole numbers from 0 on.

    Fractions and strings are errors, although numpy would convert them.
    """
    ids = np.asarray(values)
    if ids.size == 0:
        return np.zeros(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) > LARGEST:
        raise no_ids(name)
    return ids.astype(np.int64)


def no_ids(name: str) -> ValueError:
    """The error for a text that does not consist of ids."""
    return ValueError(f"{name} does not consist of token ids (whole numbers from 0 on)")


def check_attention(ids: np.ndarray, attention_mask: ArrayLike, name: str) -> None:
    """Raise ValueError if an ``attention_mask`` (n,) excludes any of the ``ids`` (n,) except padding.

    This package attends to all ids except padding, a single id that occurs only before and after the text.
    """
    attended = np.asarray(attention_mask)
    if attended.shape != ids.shape or not np.isin(attended, (0, 1)).all():
        raise ValueError(f"the attention_mask of {name} does not have a 0 or 1 for each of its {len(ids)} ids")
    text = np.flatnonzero(attended)
    within = ids[: text[-1] + 1][text[0] :] if len(text) else ids[:0]
    left_out = np.unique(ids[attended == 0])
    if len(within) > len(text) or len(left_out) > 1 or np.isin(left_out, within).any():
        raise ValueError(
            f"the attention_mask of {name} is 0 at ids that are not padding, but this package attends to all ids "
            "except padding; take these ids out of the text"
        )


def check_padding(ids: np.ndarray, pad: int, name: str) -> None:
    """Raise ValueError if padding comes before or between other ids (n,), where it would shift or split the text."""
    text = np.flatnonzero(ids != pad)
    if len(text) and text[-1] + 1 > len(text):
        raise ValueError(
            f"{name} has padding (the id {pad}) before or between other ids, but this package only pads at the end; "
            "pass ids without padding"
        )


def check_largest_id(ids: np.ndarray, largest: int, name: str) -> None:
    """Raise ValueError if an id in ``ids`` (n,) is above ``largest``, the largest id of the tokenizer."""
    if ids.max(initial=0) > largest:
        raise ValueError(
            f"{name} has the id {int(ids.max())}, but the tokenizer only has ids below {largest + 1}; pass the "
            "tokenizer that made the ids"
        )


def check_distinct(ids_of_roles: Mapping[str, int | None], *, remedy: str) -> None:
    """Raise ValueError, ending with ``remedy``, if two roles have the same id; a role with id None does not exist."""
    role_of: dict[int, str] = {}
    for role, number in ids_of_roles.items():
        if number is None:
            continue
        if number in role_of:
            raise ValueError(f"{role_of[number]} and {role} are both the id {number}; {remedy}")
        role_of[number] = role


def checked_sentinels(
    sentinels: Sequence[int] | np.ndarray,
    others: Mapping[str, int | None],
    *,
    unlearned: int | Sequence[int] | None = None,
) -> np.ndarray:
    """The ids of sentinels, ``(n,)`` int64; ValueError unless they differ from each other and from ``others``.

    ``others`` holds ids by role. ``unlearned`` are ids of unknown and special tokens, or None. A tokenizer returns the
    unknown token's id for each sentinel that it lacks.
    """
    ids = checked_ids(sentinels, "the list of sentinels")
    unusable = np.zeros(0, bool) if unlearned is None else np.isin(ids, unlearned)
    if unusable.any():
        number = int(unusable.argmax())
        raise ValueError(f"sentinel {number} is an unknown or special token, {ids[number]}; {SENTINELS_REMEDY}")
    special = [number for number in others.values() if number is not None]
    if len({*ids.tolist(), *special}) < len(ids) + len(special):
        marks = {f"sentinel {number}": int(token) for number, token in enumerate(ids)}
        check_distinct({**others, **marks}, remedy=SENTINELS_REMEDY)
    return ids
