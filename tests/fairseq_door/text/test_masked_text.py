"""Encoding texts with masks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.fairseq_door.text.masked_text import cut_around_masks, encode_masked_text, ids_between_masks


@pytest.fixture(scope="module")
def bpe(loaded: SimpleNamespace) -> SentencepieceBPE:
    return SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(loaded.folder / "sentencepiece.bpe.model")))


def ids_of(loaded: SimpleNamespace, text: str) -> list[int]:
    return [loaded.dictionary.index(piece) for piece in loaded.processor.encode(text, out_type=str)]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("The statement is here.", ["The statement is here."]),
        ("The <mask> is  <mask> .", ["The", " is", " ."]),
        ("<mask> of it <mask>", ["", " of it", ""]),
        ("<mask><mask>", ["", "", ""]),
        ("", [""]),
    ],
)
@pytest.mark.parametrize("masks", [[900], [900, 901]])
def test_parts_and_masks(
    loaded: SimpleNamespace, bpe: SentencepieceBPE, text: str, parts: list[str], masks: list[int]
) -> None:
    dictionary = loaded.dictionary
    expected = [ids_of(loaded, part) for part in parts]
    assert ids_between_masks(text, bpe, dictionary) == expected
    ids, places = encode_masked_text(text, bpe, dictionary, masks=masks)
    assert (ids[0], ids[-1]) == (dictionary.bos(), dictionary.eos())
    assert len(places) == len(parts) - 1
    assert [ids[place : place + len(masks)] for place in places] == [masks] * len(places)
    without = [id_ for id_ in ids[1:-1] if id_ not in masks]
    assert without == [id_ for part in expected for id_ in part]
    starts = [1, *(place + len(masks) for place in places)]
    assert [ids[start : start + len(part)] for start, part in zip(starts, expected, strict=True)] == expected


@pytest.mark.parametrize("text", ["The statement is here.", "The values, and others", "The testing of values"])
def test_text_right_after_a_mask_is_the_rest_of_its_word(
    loaded: SimpleNamespace, bpe: SentencepieceBPE, text: str
) -> None:
    pieces, decode = loaded.processor.encode(text, out_type=str), loaded.processor.decode
    place = next(i for i, piece in enumerate(pieces) if i > 1 and not piece.startswith("▁"))
    before, after = pieces[: place - 1], pieces[place:]
    masked = f"{decode(before)} <mask>{decode(['x', *after])[1:]}"
    expected = [[loaded.dictionary.index(piece) for piece in part] for part in (before, after)]
    assert ids_between_masks(masked, bpe, loaded.dictionary) == expected


@given(
    parts=st.lists(st.lists(st.integers(10, 99), max_size=12), min_size=2, max_size=4),
    masks=st.sampled_from([[900], [900, 901]]),
    limit=st.integers(4, 40),
)
def test_long_texts_are_cut_and_keep_their_ends_and_all_masks(
    parts: list[list[int]], masks: list[int], limit: int
) -> None:
    ids, places = [0, *parts[0]], []
    for part in parts[1:]:
        places.append(len(ids))
        ids += [*masks, *part]
    ids.append(2)
    apart = places[-1] + len(masks) - places[0]
    if apart > limit - 2 and len(ids) > limit:
        with pytest.raises(ValueError, match=f"the masks are {apart} tokens apart, the model has {limit} positions"):
            cut_around_masks(ids, places, length=len(masks), limit=limit)
        return
    kept, kept_places = cut_around_masks(ids, places, length=len(masks), limit=limit)
    assert len(kept) == min(len(ids), limit)
    assert (kept[0], kept[-1]) == (0, 2)
    offset = places[0] - kept_places[0]
    assert [place - offset for place in places] == kept_places
    assert kept[1:-1] == ids[1 + offset : len(kept) - 1 + offset]
    assert all(kept[place : place + len(masks)] == masks for place in kept_places)
