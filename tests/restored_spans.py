"""The inverse of span corruption, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlsm_plugin.core.masking.span_corruption import filler_places


def restore_spans(source: Any, target: Any, *, sentinels: Sequence[int] | np.ndarray, eos: int) -> np.ndarray:
    """Restore the text from which :func:`corrupt_spans` made ``source`` and ``target``: int64 ``(n,)``.

    ValueError if the target lacks a sentinel of the source.
    """
    marks, target = set(np.asarray(sentinels).tolist()), np.asarray(target)
    # the last EOS ends the target; the text may contain others
    places = filler_places(target[:-1], sentinels=sentinels, eos=-1)
    text: list[int] = []
    for token in np.asarray(source)[:-1].tolist():
        if token in marks and token not in places:
            raise ValueError(f"the target lacks the sentinel {token} of the source")
        text += target[places[token]].tolist() if token in marks else [token]
    return np.array(text, dtype=np.int64)
