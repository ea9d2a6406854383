"""The HTML pages in a real browser: no text in them runs, nothing is loaded, and their own script draws the atoms."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlsm_plugin.reports.latent_report import AtomSummary, render_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=3000", "--dump-dom"),
)


class Server:
    """Counts the requests of a page."""

    def __init__(self) -> None:
        self.requests = requests = list[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append(self.path)
                self.send_response(404)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing on the screen."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def payload(self) -> str:
        """Text that marks the page and asks for a file, if it is taken for markup."""
        marking = "document.body.setAttribute('pwned', 1)"
        return (
            f'</td></script><img src=\'{self.address}/image\' onload="{marking}" onerror="{marking}">'
            f"<script>{marking}; fetch('{self.address}/fetch')</script>"
            f"<link rel='stylesheet' href='{self.address}/style'><iframe src='{self.address}/frame'></iframe>"
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def opened(page: Path, profile: Path, address: str = "") -> str:
    """The document after its scripts have run."""
    words = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}", page.as_uri() + address]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert "</html>" in done.stdout, done.stderr[-2000:]
    return done.stdout


def marked(document: str) -> bool:
    return re.search(r"<body[^>]*\spwned=", document) is not None


def latent_page(text: str, path: Path) -> Path:
    context = {"left": text, "token": text, "right": text, "weight": 0.5, "marks": [(0, 4, 0.25)]}
    summary = AtomSummary(0, 0.5, 0.5, [(text, 1.0)], [context], raised=[text])  # type: ignore[list-item]
    other = AtomSummary(1, 0.4, 0.5, [("other", 1.0)], label=["other"], telling=1.0, neighbours=[(0, 0.5)])
    other.examples.append(
        {"left": "one ", "token": "other", "right": " place", "weight": 0.25, "marks": [(10, 5, 0.125)]}
    )
    summaries = [summary, other]
    render_report(summaries, title=text, facts={text: text}, output_path=path)
    return path


def test_tokens_and_titles_are_text(server: Server, tmp_path: Path) -> None:
    document = opened(latent_page(server.payload, tmp_path / "page.html"), tmp_path / "profile")
    assert not marked(document)
    assert server.requests == []
    assert ">Atom 0</a></h3>" in document  # its own script has run
    assert document.count("&lt;iframe") >= 5  # title, heading, facts, token and context


@pytest.mark.parametrize("policy", [True, False])
def test_the_policy_stops_what_gets_into_a_page(policy: bool, server: Server, tmp_path: Path) -> None:
    page = latent_page("a", tmp_path / "page.html")
    text = page.read_text(encoding="utf-8").replace("<body>", f"<body>{server.payload}")
    if not policy:  # then the same text does run, so that this test can fail
        text = text.replace("Content-Security-Policy", "x")
    page.write_text(text, encoding="utf-8")
    document = opened(page, tmp_path / "profile")
    assert marked(document) is not policy
    assert {"/fetch", "/image", "/style", "/frame"} <= set(server.requests) or policy
    assert server.requests == [] or not policy
    assert ">Atom 0</a></h3>" in document


def test_atoms_are_found_by_their_names(server: Server, tmp_path: Path) -> None:
    named = AtomSummary(0, 0.5, 0.5, [("first", 1.0)], label=["first"], name=f"Called {server.payload}")
    other = AtomSummary(1, 0.5, 0.5, [("other", 1.0)], label=["other"], telling=1.0)
    page = tmp_path / "page.html"
    render_report([named, other], title="names", facts={}, output_path=page)
    document = opened(page, tmp_path / "profile", "#q=called")
    assert "1 to 1 of 1 atom for" in document
    assert ">Called &lt;/td" in document
    assert '<span class="number">first</span><span class="number">atom 0</span>' in document
    assert not marked(document)
    assert server.requests == []


def test_atoms_are_found_by_their_contexts_and_have_links(tmp_path: Path) -> None:
    page = latent_page("first", tmp_path / "page.html")
    by_default = opened(page, tmp_path / "profile")
    assert by_default.index(">other</a>") < by_default.index(">Atom 0</a></h3>")  # the most telling comes first
    assert by_default.count('href="#q=%230"') == 2  # of itself and of its neighbour
    by_context = opened(page, tmp_path / "profile", "#q=one+other+place")
    assert "1 to 1 of 1 atom for" in by_context
    assert ">other</a></h3>" in by_context or ">other</a><span" in by_context
    by_number = opened(page, tmp_path / "profile", "#q=%230")
    assert "1 to 1 of 1 atom for" in by_number
    assert ">Atom 0</a></h3>" in by_number
