"""Which symbols stand for a masked span."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mlsm_plugin.core.masking.word_boundaries import SPAN_MASKS, added_symbols


@pytest.mark.parametrize("symbols", ["shared", "distinct", None])
@pytest.mark.parametrize("mode", ["single", "phrase", None])
def test_only_phrases_with_distinct_masks_add_symbols(symbols: str | None, mode: str | None) -> None:
    options = {"span_mask_symbols": symbols, "span_mode": mode}
    cfg = Namespace(**{name: value for name, value in options.items() if value is not None})  # older ones lack both
    expected = ("<mask_s>", "<mask_e>") if (symbols, mode) == ("distinct", "phrase") else ()
    assert added_symbols(cfg) == expected


def test_the_first_symbol_begins_a_span() -> None:
    assert SPAN_MASKS == ("<mask_s>", "<mask_e>")
