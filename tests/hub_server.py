"""A local stand-in of the HTTP interface of the Hugging Face hub."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.conftest import REPOSITORY

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
                if row["key"] == "deletedFile":
                    self.branches[branch].pop(row["value"]["path"])
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


@contextmanager
def hub_server() -> Iterator[tuple[str, type[Hub]]]:
    """The address of a hub with an empty repository, and what it holds."""
    kind = type("OneHub", (Hub,), {"branches": {"main": {}}, "commits": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", kind
        server.shutdown()


def mlsm_with_hub(endpoint: str, *arguments: object) -> list[str]:
    """The lines that a command prints; the library reads the address of the hub when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}
    environment |= {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "mlsm_plugin.cli.main", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
