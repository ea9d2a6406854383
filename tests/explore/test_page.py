"""The page: its parts without gradio; and the real server, asked by HTTP, and in a real browser if there is one."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlsm_plugin.explore.explorer import Explorer
from mlsm_plugin.explore.page import HOST, answer, how_steered, import_gradio, phrases, results
from tests.conftest import failing_mlsm
from tests.explore.explored import Folders

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "the <img src=x onerror=\"document.body.setAttribute('pwned', 1)\"> name"


def test_a_text_gives_its_parts(explorer: Explorer) -> None:
    tokens, masks = answer(explorer, "the <mask> of a value")
    assert tokens.count('class="mlsm-token"') == 5
    assert "<h5>Tokens</h5>" in masks
    tokens, masks = answer(explorer, "the name")
    assert "Write &lt;mask&gt;" in masks
    assert "<img" not in "".join(answer(explorer, HOSTILE))


def test_problems_are_lines_on_the_page(explorer: Explorer) -> None:
    assert answer(explorer, " ") == ('<p class="mlsm-problem" role="alert">the text is empty</p>', "")
    assert "the text is empty" in results(explorer, "", "words")
    assert "Write &lt;mask&gt; in the text" in phrases(explorer, "name")
    for mask in ("<mask>", "[MASK]"):  # the second is the tokenizer's own
        assert "there is no datastore of phrases" in phrases(explorer, f"a {mask}")


def test_steering_is_shown_beside_the_masks(explorer: Explorer) -> None:
    text = "the <mask> of a value"
    tokens, masks = answer(explorer, text)
    assert answer(explorer, text, " ", 1) == (tokens, masks)
    assert "steered by" in answer(explorer, text, "7", 1)[1]
    problem = answer(explorer, text, "<b>", 1)[1].removesuffix(masks)
    assert problem.startswith('<p class="mlsm-problem" role="alert">no property has &quot;&lt;b&gt;&quot; in its name')
    assert answer(explorer, "the name", "7", 1) == answer(explorer, "the name")
    assert "masks too, in layer 1." in how_steered(explorer)


def test_results_are_ranked_as_chosen(explorer: Explorer) -> None:
    assert explorer.index is not None
    document = explorer.index.documents[4]
    for mode in ("properties and words", "properties", "words"):
        html = results(explorer, document.text, mode)
        assert html.count("<b>") == 5
        assert f"<b>{document.name}</b>" in html or mode == "properties"


def test_without_gradio_there_is_one_line(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ValueError, match=r"the page needs gradio: pip install 'mlsm_plugin\[explore\]'"):
        import_gradio()
    assert "the page needs gradio" in failing_mlsm(capsys, "explore", folders[0], "--dictionary", folders[1])
    assert "--port must be from 1 to 65535" in failing_mlsm(capsys, "explore", folders[0], "--port", 0)


# ---- the real server ----


@pytest.fixture(scope="module")
def address(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a page that ``mlsm explore`` serves."""
    pytest.importorskip("gradio", reason="the extra explore is not installed")
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    model, dictionary, index = folders
    names = tmp_path_factory.mktemp("names") / "names.json"
    names.write_text(json.dumps({str(atom): f"called {atom}" for atom in range(40)}))
    words = ["explore", model, "--dictionary", dictionary, "--index", index, "--names", names, "--port", port]
    command = [sys.executable, "-m", "mlsm_plugin.cli.main", *map(str, words), "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        line = next((line for line in server.stdout if "http" in line), "")
        assert f"http://{HOST}:{port}/ (only this machine can open it; Ctrl+C ends it)" in line
        yield f"http://{HOST}:{port}/"
        server.terminate()


@pytest.mark.slow
def test_only_this_machine_can_open_the_page_and_nothing_reports_home(address: str) -> None:
    config = json.loads(urllib.request.urlopen(f"{address}config", timeout=30).read())
    assert config["analytics_enabled"] is False
    assert not [item for item in config["dependencies"] if item["api_visibility"] != "private"]
    port = int(address.rstrip("/").rpartition(":")[2])
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port]
    assert listening == [f"0100007F:{port:04X}"]  # 127.0.0.1
    everywhere = [row for row in Path("/proc/net/tcp6").read_text().splitlines()[1:] if f":{port:04X}" in row[:50]]
    assert everywhere == []


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line(address: str, folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    port = address.rstrip("/").rpartition(":")[2]
    line = failing_mlsm(capsys, "explore", folders[0], "--dictionary", folders[1], "--port", port)
    assert f"port {port} is taken on 127.0.0.1; pass another --port" in line


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_person_types_and_sees_the_answer(address: str, width: int, scheme: str, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        elsewhere: list[str] = []
        page.on("request", lambda request: elsewhere.append(request.url))
        page.goto(address)
        page.wait_for_selector("#tokens li")  # of the example
        page.fill("#text textarea", f"{HOSTILE} [MASK]")
        page.click("#show")
        page.wait_for_selector("#tokens .mlsm-tokens > li:first-child .mlsm-token:text-is('the')")
        assert "onerror" in "".join(page.locator("#tokens .mlsm-token").all_inner_texts())
        assert "called " in page.inner_text("#tokens")
        assert page.locator("#masks h5").all_inner_texts() == ["Tokens", "Properties"]
        page.fill("#property textarea, #property input", "called 3")
        page.keyboard.press("Enter")
        page.wait_for_selector('#masks h5:text-is("Tokens, steered by \\"called 3\\"")')
        page.fill("#strength input[type=number]", "-1")
        page.keyboard.press("Tab")
        page.fill("#property textarea, #property input", HOSTILE)
        page.keyboard.press("Enter")
        page.wait_for_selector("#masks .mlsm-problem")
        assert page.locator("#masks h5").all_inner_texts() == ["Tokens", "Properties"]
        page.wait_for_selector("#hits mark")
        page.click("#mode label >> text='words'")
        page.fill("#text textarea", " ")
        page.click("#show")
        page.wait_for_selector("#tokens .mlsm-problem")
        assert page.inner_text("#tokens .mlsm-problem") == "the text is empty"
        assert page.get_attribute("body", "pwned") is None
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert [url for url in elsewhere if not url.startswith((address, "data:", "blob:"))] == []
        page.screenshot(path=tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000
        browser.close()
