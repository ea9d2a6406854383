"""``mlsm explore``: its options reach the page; the page itself is tested in tests/explore."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mlsm_plugin.cli import explore
from mlsm_plugin.cli.main import build_parser
from mlsm_plugin.explore import page
from mlsm_plugin.explore.explorer import Explorer
from tests.conftest import failing_mlsm, mlsm
from tests.explore.explored import explored
from tests.tiny_models import TinyData


def test_the_options_reach_the_page(
    tiny: TinyData, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, dictionary, index = explored(tmp_path_factory, tiny.text)
    served: list[tuple[Explorer, int | None]] = []
    monkeypatch.setattr(page, "import_gradio", lambda: SimpleNamespace())
    monkeypatch.setattr(page, "serve", lambda explorer, port: served.append((explorer, port)))
    (tmp_path / "names.json").write_text('{"3": "rain"}')
    words = ("explore", model, "--dictionary", dictionary, "--index", index, "--names", tmp_path / "names.json")
    mlsm(*words, "--port", 7000, "--device", "cpu")
    mlsm("explore", model, "--dictionary", dictionary, "--text", tiny.text)
    (explorer, port), (named_by_text, no_port) = served
    assert (port, no_port) == (7000, None)
    assert explorer.name_of(3) == "rain"
    assert explorer.index is not None
    assert explorer.name_of(4) == explorer.index.labels[4]
    assert named_by_text.index is None
    assert not named_by_text.name_of(4).startswith("property")


def test_fairseq_is_only_needed_for_a_datastore() -> None:
    parser = build_parser("explore")
    for more, needed in (([], False), (["--datastore", "store"], True)):
        assert explore.needs_fairseq(parser.parse_args(["explore", "model", *more])) is needed


def test_what_is_no_model_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "import_gradio", lambda: SimpleNamespace())
    assert "does not hold a Hugging Face model" in failing_mlsm(capsys, "explore", f"hf:{tmp_path}")
