"""The parts of the page: what they say, and that no text in them is markup."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from mlsm_plugin.explore.explorer import Property, ReadToken, SteeredPredictions
from mlsm_plugin.explore.html import (
    SHOWN_CHARACTERS,
    SHOWN_TOKENS,
    hits_html,
    marked_text,
    masks_html,
    note_html,
    phrases_html,
    problem_html,
    style,
    tokens_html,
)
from mlsm_plugin.retrieval.phrase_filling import PhraseCandidate
from mlsm_plugin.search.documents import Document
from mlsm_plugin.search.index import Hit, Reason

HOSTILE = "</li></style><script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp;"


class Parts(HTMLParser):
    """Tags, attributes and text of some HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.depth = 0
        self.feed(html)
        self.close()
        assert self.depth == 0, html

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.depth += 1

    def handle_endtag(self, tag: str) -> None:
        self.depth -= 1

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile_parts() -> list[str]:
    item = Property(3, HOSTILE, 0.5)
    token = ReadToken(HOSTILE, (item,), False)
    mask = ReadToken("<mask>", (item,), True, ((HOSTILE, 0.25),))
    reason = Reason(3, HOSTILE, 0.5, (HOSTILE,), ((0, 3), (2, 9)))
    hit = Hit(Document(HOSTILE, HOSTILE), 1.0, (reason,), (HOSTILE,))
    return [
        tokens_html([token, mask]),
        masks_html([token, mask, mask], predicts_tokens=True),
        masks_html([mask], predicts_tokens=False),
        masks_html([mask], predicts_tokens=True, steered=SteeredPredictions(3, HOSTILE, (((HOSTILE, 0.5),),))),
        hits_html([hit]),
        phrases_html([[PhraseCandidate(HOSTILE, 0.5, (), (f"a [[{HOSTILE}]] b",))], []]),
        problem_html(HOSTILE),
        note_html(HOSTILE),
    ]


@pytest.mark.parametrize("html", hostile_parts())
def test_hostile_text_is_inert(html: str) -> None:
    parts = Parts(html)
    assert not {"script", "img", "style"} & set(parts.tags)
    assert not [name for name, _ in parts.attributes if name.startswith("on") or name in ("src", "href")]
    assert "alert(2)" in parts.text


def test_tokens_have_their_properties() -> None:
    token = ReadToken("rain", (Property(3, "rain, snow", 0.25), Property(1, "water", 0.125)), False)
    html = tokens_html([token])
    assert 'title="property 3"><span class="mlsm-bar" style="width:25.0%">' in html
    assert Parts(html).text == "rainrain, snow 25\xa0%water 12\xa0%"
    many = tokens_html([token] * (SHOWN_TOKENS + 1))
    assert many.count('mlsm-token"') == SHOWN_TOKENS
    assert "The first 200 of 201 tokens are shown." in many
    assert Parts(tokens_html([ReadToken("", (), False)])).text == "(space)none"


def test_masks_show_tokens_and_properties() -> None:
    mask = ReadToken("<mask>", (Property(1, "water", 0.5),), True, (("rain", 0.75),))
    assert Parts(masks_html([mask], predicts_tokens=True)).text == "Tokensrain 75\xa0%Propertieswater 50\xa0%"
    assert "Mask 2" in masks_html([mask, mask], predicts_tokens=True)
    steered = SteeredPredictions(1, "water", ((("snow", 0.5),), (("ice", 0.25),)))
    text = Parts(masks_html([mask, mask], predicts_tokens=True, steered=steered)).text
    assert text.startswith(
        'Mask 1Tokensrain 75\xa0%Tokens, steered by "water"snow 50\xa0%Propertieswater 50\xa0%Mask 2'
    )
    assert 'steered by "water"ice 25\xa0%' in text
    assert "has no masked-LM head" in masks_html([mask], predicts_tokens=False)
    assert "Write &lt;mask&gt; in the text" in masks_html([], predicts_tokens=True)


def test_results_say_why() -> None:
    reason = Reason(3, "rain, snow", 0.5, ("rain", "rain", "wet"), ((4, 8),))
    html = hits_html([Hit(Document("a:1", "the snow of"), 1.0, (reason,), ("the",))])
    assert "the <mark>snow</mark> of" in html
    text = Parts(html).text
    assert "rain, snow 50\xa0%, by rain, wet" in text
    assert "words in both: the" in text
    assert "No document" in hits_html([])


def test_marks_stay_in_the_shown_part_and_do_not_overlap() -> None:
    assert marked_text("abcdef", [(1, 3), (2, 4), (1, 3)]) == "a<mark>bc</mark><mark>d</mark>ef"
    assert marked_text("a<b", [(0, 2)]) == "<mark>a&lt;</mark>b"
    long = marked_text("a" * (SHOWN_CHARACTERS + 5), [(SHOWN_CHARACTERS - 1, SHOWN_CHARACTERS + 2), (700, 702)])
    assert long == "a" * (SHOWN_CHARACTERS - 1) + "<mark>a</mark>..."


def test_phrases_have_their_sources() -> None:
    html = phrases_html([[PhraseCandidate("the rain", 0.5, (), ("wait for [[the rain]] in",))], []])
    assert "<b>the rain</b> 0.500" in html
    assert "wait for <mark>the rain</mark> in" in html
    assert "Mask 2" in html
    assert "No phrase." in html


def test_the_phrase_is_marked_beside_other_brackets() -> None:
    context = "the array [[0, 1], [2]] holds [[the rain]] of it"
    html = phrases_html([[PhraseCandidate("the rain", 0.5, (), (context,))]])
    assert "the array [[0, 1], [2]] holds <mark>the rain</mark> of it" in html


def test_the_style_names_the_classes_of_the_parts() -> None:
    assert style().startswith("<style>")
    for name in ("mlsm-tokens", "mlsm-bar", "mlsm-hits", "mlsm-problem", "mlsm-note"):
        assert f".{name}" in style()
