"""Places of tokens by the characters that they share with others, against a slow oracle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.core.text.token_places import code_points, places_of, visible_spans

Spans = list[tuple[int, int]]


def characters(span: tuple[int, int], text: str) -> set[int]:
    """The places of the characters of a token without white space around it."""
    begin, end = span
    while begin < end and text[begin].isspace():
        begin += 1
    while begin < end and text[end - 1].isspace():
        end -= 1
    return set(range(begin, end))


def slow_places(spans: Spans, others: Spans, text: str) -> list[int]:
    return [
        max((n for n, other in enumerate(others) if characters(span, text) & characters(other, text)), default=-1)
        for span in spans
    ]


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, Spans, Spans]:
    text = draw(st.text(alphabet="ab é\u3000文\u0301", max_size=12))

    def spans() -> Spans:
        ends = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
        return list(zip([0, *ends], [*ends, len(text)], strict=True))

    return text, spans(), spans()


@given(cut_texts())
def test_a_token_takes_the_last_that_shares_a_character(cut: tuple[str, Spans, Spans]) -> None:
    text, spans, others = cut
    assert places_of(spans, others, text).tolist() == slow_places(spans, others, text)
    assert places_of(spans, [], text).tolist() == [-1] * len(spans)


@given(cut_texts())
def test_spans_without_the_white_space_around_them(cut: tuple[str, Spans, Spans]) -> None:
    text, spans, _ = cut
    begins, ends = visible_spans(spans, text)
    for span, begin, end in zip(spans, begins.tolist(), ends.tolist(), strict=True):
        assert text[begin:end] == text[slice(*span)].strip()
        assert set(range(begin, end)) == characters(span, text)


def test_code_points() -> None:
    assert code_points("aé文\U0001f600").tolist() == [0x61, 0xE9, 0x6587, 0x1F600]
