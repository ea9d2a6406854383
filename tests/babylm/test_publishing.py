"""``mlsm babylm push``, against a local stand-in of the hub's HTTP interface."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mlsm_plugin.babylm.publishing import push
from tests.babylm.made_run import make_run
from tests.conftest import REPOSITORY, failing_mlsm
from tests.tiny_models import TinyData

REPO = "someone/small"


class Hub(BaseHTTPRequestHandler):
    """Repositories, branches, lists of files, and commits of files within the request; no large files."""

    branches: dict[str, dict[str, bytes]]
    commits: list[str]

    def do_GET(self) -> None:
        branch = self.path.partition("/tree/")[2].partition("?")[0]
        files = self.branches.get(branch, {})
        rows = [{"type": "file", "path": path, "size": len(data), "oid": _blob(data)} for path, data in files.items()]
        self.answer(rows if "/tree/" in self.path else {"id": REPO, "sha": "0", "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "/branch/" in self.path:
            self.branches.setdefault(self.path.rpartition("/")[2], {})
        if "/preupload/" in self.path:
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        if "/commit/" in self.path:
            branch = self.path.rpartition("/")[2].partition("?")[0]
            self.commits.append(branch)
            for row in map(json.loads, body.splitlines()):
                if row["key"] == "file":
                    self.branches.setdefault(branch, {})[row["value"]["path"]] = base64.b64decode(
                        row["value"]["content"]
                    )
            return self.answer(
                {"success": True, "commitOid": "0" * 40, "commitUrl": f"http://127.0.0.1/{REPO}/commit/0"}
            )
        return self.answer({"url": f"http://127.0.0.1/{REPO}", "id": REPO})

    def answer(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *unused: object) -> None:
        pass


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub() -> Iterator[tuple[str, type[Hub]]]:
    kind = type("OneHub", (Hub,), {"branches": {"main": {}}, "commits": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", kind
        server.shutdown()


def pushed(run: Path, endpoint: str) -> list[str]:
    """The lines that a push prints; the library reads the address of the hub when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}
    environment |= {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "mlsm_plugin.cli.main", "babylm", "push", str(run), REPO]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_each_checkpoint_goes_to_its_branch_once(tiny: TinyData, tmp_path: Path, hub: tuple[str, type[Hub]]) -> None:
    run, (endpoint, there) = tmp_path / "run", hub
    make_run(tiny, run)
    names = ["chck_1K", "chck_2K", "main"]
    assert pushed(run, endpoint) == [f"{name}: pushed" for name in names]
    for name in names:
        files = {file.name: file.read_bytes() for file in (run / "checkpoints" / name).iterdir()}
        assert there.branches[name] == files
    there.branches["chck_2K"].pop("config.json")
    assert pushed(run, endpoint) == ["chck_1K: up to date", "chck_2K: pushed", "main: up to date"]
    assert there.commits == [*names, "chck_2K"]


def test_a_dry_run_says_what_would_be_pushed(tmp_path: Path, tiny: TinyData) -> None:
    make_run(tiny, tmp_path)
    lines = list(push(tmp_path, REPO, dry_run=True))
    assert [line.partition(":")[0] for line in lines] == ["chck_1K", "chck_2K", "main"]
    assert all("5 files" in line and f"would be pushed to {REPO}" in line for line in lines)


@pytest.mark.parametrize("name", ["someone/small-0.1", "small", "a/b/c"])
def test_a_name_that_the_pipeline_cuts_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert "the evaluation pipeline cuts a name at a dot" in failing_mlsm(capsys, "babylm", "push", tmp_path, name)
