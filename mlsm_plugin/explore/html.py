"""The parts of the page as HTML; all text from users, models and documents is escaped."""

from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from mlsm_plugin.explore.explorer import Property, ReadToken, SteeredPredictions
from mlsm_plugin.search.index import Hit, Reason

if TYPE_CHECKING:
    from mlsm_plugin.retrieval.phrase_filling import PhraseCandidate

SHOWN_TOKENS = 200
SHOWN_CHARACTERS = 600  # of a document


def style() -> str:
    """The style sheet of the page."""
    css = resources.files("mlsm_plugin.explore").joinpath("page.css").read_text(encoding="utf-8")
    return f"<style>{css}</style>"


def problem_html(message: str) -> str:
    """A line that says what is wrong."""
    return f'<p class="mlsm-problem" role="alert">{escape(message)}</p>'


def note_html(message: str) -> str:
    """A line that says how to use the page."""
    return f'<p class="mlsm-note">{escape(message)}</p>'


def tokens_html(tokens: Sequence[ReadToken]) -> str:
    """Each token of a text with its properties."""
    rows = "".join(
        f'<li><span class="mlsm-token">{_token_text(token)}</span>{_properties(token.properties)}</li>'
        for token in tokens[:SHOWN_TOKENS]
    )
    note = ""
    if len(tokens) > SHOWN_TOKENS:
        note = note_html(f"The first {SHOWN_TOKENS} of {len(tokens):,} tokens are shown.")
    return f'<ol class="mlsm-tokens">{rows}</ol>{note}'


def masks_html(tokens: Sequence[ReadToken], *, predicts_tokens: bool, steered: SteeredPredictions | None = None) -> str:
    """What is predicted for each mask, and beside it what is predicted when steered; a hint if the text has none."""
    masks = [token for token in tokens if token.is_mask]
    if not masks:
        return note_html("Write <mask> in the text to see what is predicted there.")
    parts = []
    for number, mask in enumerate(masks, 1):
        heading = f"<h4>Mask {number}</h4>" if len(masks) > 1 else ""
        tokens_part = _predicted("Tokens", mask.predicted)
        if steered is not None:
            tokens_part += _predicted(f'Tokens, steered by "{steered.name}"', steered.of_masks[number - 1])
        if not predicts_tokens:
            tokens_part = note_html("This model has no masked-LM head, so it predicts no tokens.")
        properties = f"<div><h5>Properties</h5>{_properties(mask.properties)}</div>"
        parts.append(f'{heading}<div class="mlsm-mask">{tokens_part}{properties}</div>')
    return "".join(parts)


def _predicted(heading: str, tokens: Sequence[tuple[str, float]]) -> str:
    chips = "".join(_bar(text, value) for text, value in tokens)
    return f'<div><h5>{escape(heading)}</h5><ul class="mlsm-chips">{chips}</ul></div>'


def hits_html(hits: Sequence[Hit]) -> str:
    """Search results, the properties and words they share with the query, and the tokens with these properties."""
    if not hits:
        return note_html("No document shares a property or a word with the text.")
    return f'<ol class="mlsm-hits">{"".join(_hit(hit) for hit in hits)}</ol>'


def phrases_html(of_masks: "Sequence[Sequence[PhraseCandidate]]") -> str:
    """The phrases for each mask, with their sources; each source has its phrase marked."""
    parts = []
    for number, phrases in enumerate(of_masks, 1):
        heading = f"<h4>Mask {number}</h4>" if len(of_masks) > 1 else ""
        items = "".join(_phrase(phrase) for phrase in phrases)
        parts.append(heading + (f'<ol class="mlsm-hits">{items}</ol>' if items else note_html("No phrase.")))
    return "".join(parts)


def _phrase(candidate: "PhraseCandidate") -> str:
    sources = "".join(f"<p>{_source(context, candidate.phrase)}</p>" for context in candidate.contexts)
    return f"<li><b>{escape(candidate.phrase)}</b> {candidate.score:.3f}{sources}</li>"


def _source(context: str, phrase: str) -> str:
    """A source as HTML; in ``context``, the phrase is between ``[[`` and ``]]``, and other brackets may be there."""
    before, _, after = context.partition(f"[[{phrase}]]")
    return f"{escape(before)}<mark>{escape(phrase)}</mark>{escape(after)}"


def _hit(hit: Hit) -> str:
    places = [place for reason in hit.reasons for place in reason.document_tokens]
    words = f"<li>words in both: {escape(', '.join(hit.words))}</li>" if hit.words else ""
    reasons = "".join(_reason(reason) for reason in hit.reasons)
    return (
        f"<li><b>{escape(hit.document.name)}</b><p>{marked_text(hit.document.text, places)}</p>"
        f'<ul class="mlsm-reasons">{reasons}{words}</ul></li>'
    )


def _reason(reason: Reason) -> str:
    tokens = ", ".join(dict.fromkeys(reason.query_tokens))
    return (
        f'<li title="property {reason.atom}"><span class="mlsm-name">{escape(reason.label)}</span> '
        f"{100 * reason.share:.0f}&nbsp;%, by {escape(tokens)}</li>"
    )


def marked_text(text: str, places: Sequence[tuple[int, int]]) -> str:
    """The beginning of a text as HTML, with the character spans in ``places`` marked."""
    shown = text[:SHOWN_CHARACTERS]
    parts = []
    done = 0
    for start, stop in sorted(set(places)):
        first = max(start, done)
        last = min(stop, len(shown))
        if first >= last:
            continue
        parts += [escape(shown[done:first]), "<mark>", escape(shown[first:last]), "</mark>"]
        done = last
    end = "..." if len(text) > SHOWN_CHARACTERS else ""
    return "".join([*parts, escape(shown[done:]), end])


def _token_text(token: ReadToken) -> str:
    return "<i>mask</i>" if token.is_mask else escape(token.text or "(space)")


def _properties(properties: Sequence[Property]) -> str:
    chips = "".join(_bar(item.name, item.share, title=f"property {item.atom}") for item in properties)
    return f'<ul class="mlsm-chips">{chips or "<li>none</li>"}</ul>'


def _bar(text: str, share: float, title: str = "") -> str:
    """A text with a bar behind it; the width of the bar is the share, from 0 to 1."""
    percent = min(max(100 * share, 0.0), 100.0)
    return (
        f'<li title="{escape(title or text)}"><span class="mlsm-bar" style="width:{percent:.1f}%"></span>'
        f"<span>{escape(text)}</span> <small>{percent:.0f}&nbsp;%</small></li>"
    )
