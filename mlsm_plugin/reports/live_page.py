"""A page that follows runs: one HTML file with their curves, which the browser reloads."""

import base64
import html
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open
from mlsm_plugin.reports.training_log import NoProgressError

SECONDS = 10.0
QUIET = 600.0  # seconds; a run in parts logs its end after each part
END = "done training"  # what fairseq-train logs last
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
{refresh}<title>{title}</title>
</head>
<body style="margin: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff">
<p>{title}: {state}</p>
<img alt="curves of the runs" style="max-width: 100%" src="data:image/png;base64,{picture}">
</body>
</html>
"""


def watch(files: Sequence[Path], picture: PathLike, page: PathLike, draw: Callable[[], object]) -> None:
    """Draw the PNG ``picture`` and write the ``page`` whenever a log grows, until all runs are over.

    ``draw`` writes the picture; ``files`` are the logs. A run is over when fairseq-train has logged its end, and then
    nothing for ten minutes. ValueError as for ``draw``, except that progress and metrics are waited for until then.
    """
    title = ", ".join(map(str, files))
    last_sizes = None
    while True:
        sizes = [file.stat().st_size for file in files]
        quiet = all(time.time() - file.stat().st_mtime >= QUIET for file in files)
        over = quiet and all(END in file.read_text(encoding="utf-8", errors="replace")[-2000:] for file in files)
        if sizes != last_sizes or over:
            try:
                draw()
                _write_page(page, title, picture, over=over)
            except NoProgressError:  # a metric of validation is logged later
                if over:
                    raise
        if over:
            return
        last_sizes = sizes
        time.sleep(SECONDS)


def _write_page(page: PathLike, title: str, picture: PathLike, *, over: bool) -> None:
    refresh = "" if over else f'<meta http-equiv="refresh" content="{max(1, round(SECONDS))}">\n'
    state = f"{'over' if over else 'running'}, {time.strftime('%H:%M:%S')}"
    content = base64.b64encode(Path(picture).read_bytes()).decode()
    with atomic_open(page, "w") as out:
        out.write(PAGE.format(refresh=refresh, title=html.escape(title), state=state, picture=content))
