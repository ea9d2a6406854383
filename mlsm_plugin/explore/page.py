"""The gradio page: it takes text, and shows the HTML of :mod:`.html`."""

import os
from typing import TYPE_CHECKING

from mlsm_plugin.explore import html
from mlsm_plugin.explore.explorer import MASK, MOST_STRENGTH, Explorer

if TYPE_CHECKING:
    from types import ModuleType

    from gradio import Blocks

HOST = "127.0.0.1"
MODES = {"properties and words": "both", "properties": "codes", "words": "words"}
TITLE = "Latent semantic properties"
WITHOUT_MASK = "Farmers wait for rain in the dry season."
WITH_MASK = f"Farmers wait for {MASK} in the dry season."


def import_gradio() -> "ModuleType":
    """Import gradio without its analytics; ValueError if it is not installed."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import gradio
    except ImportError as error:
        raise ValueError(f"the page needs {error.name}: pip install 'mlsm_plugin[explore]'") from None
    return gradio


def answer(explorer: Explorer, text: str, query: str = "", strength: float = 0.0) -> tuple[str, str]:
    """The tokens of a text and the predictions for its masks, as HTML; a problem with the text replaces the tokens.

    With ``query`` not blank, the predictions are also steered, as in :meth:`.Explorer.steered`.
    """
    try:
        tokens = explorer.read(text)
    except ValueError as error:
        return html.problem_html(str(error)), ""
    if not explorer.has_mask:
        return html.tokens_html(tokens), ""
    steered = None
    problem = ""
    if query.strip():
        try:
            steered = explorer.steered(text, query, strength)
        except ValueError as error:
            problem = html.problem_html(str(error))
    masks = html.masks_html(tokens, predicts_tokens=explorer.predicts_tokens, steered=steered)
    return html.tokens_html(tokens), problem + masks


def how_steered(explorer: Explorer) -> str:
    """A sentence on what the two controls of steering do."""
    return (
        f"This adds the direction of the property to the hidden state of each token, masks too, in layer "
        f"{explorer.coder.layer}. At strength 1 it is as long as the hidden state; below 0 the property is lowered."
    )


def phrases(explorer: Explorer, text: str) -> str:
    """The phrases for the masks of a text as HTML."""
    if not explorer.has_masks_in(text):
        return html.note_html(f"Write {MASK} in the text to see which phrases fill it.")
    try:
        return html.phrases_html(explorer.phrases_of(text))
    except ValueError as error:
        return html.problem_html(str(error))


def results(explorer: Explorer, text: str, mode: str) -> str:
    """The search results for a text as HTML; ``mode`` is a key of ``MODES``."""
    try:
        return html.hits_html(explorer.search(text, mode=MODES.get(mode, mode)))
    except ValueError as error:
        return html.problem_html(str(error))


def make_page(explorer: Explorer) -> "Blocks":
    """The page of a model; ``launch()`` on the result serves it, for example on a Space.

    ValueError if gradio is not installed.
    """
    gradio = import_gradio()
    reads_masks = explorer.has_mask or explorer.phrases is not None
    with gradio.Blocks(title=TITLE, analytics_enabled=False) as page:
        gradio.HTML(html.style() + f"<h2>{TITLE}</h2>")
        text = gradio.Textbox(
            value=WITH_MASK if reads_masks else WITHOUT_MASK,
            label=f"Text, in which {MASK} stands for a masked token" if reads_masks else "Text",
            lines=2,
            elem_id="text",
        )
        button = gradio.Button("Show", variant="primary", elem_id="show")
        events = [button.click, text.submit, page.load]
        gradio.Markdown("### Masks", visible=explorer.has_mask)
        with gradio.Row(visible=explorer.can_steer):
            query = gradio.Textbox(
                label="Raise a property", placeholder="number, or a part of the name", elem_id="property"
            )
            strength = gradio.Slider(
                -MOST_STRENGTH, MOST_STRENGTH, value=0.5, step=0.05, label="Strength", elem_id="strength"
            )
        gradio.HTML(html.note_html(how_steered(explorer)), visible=explorer.can_steer)
        masks = gradio.HTML(elem_id="masks")
        gradio.Markdown("### Tokens and their properties")
        tokens = gradio.HTML(elem_id="tokens")
        for event in (*events, query.submit, strength.release):
            event(
                lambda typed, searched, value: answer(explorer, typed, searched, value),
                [text, query, strength],
                [tokens, masks],
                api_visibility="private",
            )
        if explorer.phrases is not None:
            gradio.Markdown("### Phrases for the masks")
            filled = gradio.HTML(elem_id="phrases")
            for event in events:
                event(lambda typed: phrases(explorer, typed), text, filled, api_visibility="private")
        if explorer.index is not None:
            gradio.Markdown("### Documents with these properties")
            mode = gradio.Radio(list(MODES), value=next(iter(MODES)), label="Search by", elem_id="mode")
            hits = gradio.HTML(elem_id="hits")
            for event in (*events, mode.change):
                event(
                    lambda typed, chosen: results(explorer, typed, chosen), [text, mode], hits, api_visibility="private"
                )
    return page


def serve(explorer: Explorer, port: int | None = None) -> None:
    """Serve the page on this machine only, until it is interrupted; prints its address.

    With ``port`` None, it takes the first free port from 7860 on. ValueError if gradio is not installed; OSError if the
    port is taken.
    """
    page = make_page(explorer)
    try:
        _, address, _ = page.launch(
            server_name=HOST,
            server_port=port,
            share=False,
            ssr_mode=False,
            mcp_server=False,
            enable_monitoring=False,
            footer_links=[],
            quiet=True,
            prevent_thread_lock=True,
        )
    except OSError:
        where = "the ports from 7860 on are" if port is None else f"port {port} is"
        raise OSError(f"{where} taken on {HOST}; pass another --port") from None
    print(f"{address} (only this machine can open it; Ctrl+C ends it)", flush=True)
    page.block_thread()
