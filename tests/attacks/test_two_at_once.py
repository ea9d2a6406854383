"""Two identical commands at once on one output end in one result, or one of them is refused in one line."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.attacks.commands import WRITING
from tests.attacks.conftest import Place
from tests.attacks.faults import run_command

ATTEMPTS = 3 if float(os.environ.get("MLSM_FAULTS", "1")) == 1 else 1


@pytest.mark.slow
@pytest.mark.parametrize("command", WRITING)
def test_two_at_once_are_as_good_as_one(command: str, place: Place, tmp_path: Path) -> None:
    place.reset()
    clean = run_command(place.words, place.root, place.log)
    assert clean.status == 0, clean.printed
    wanted = place.contents()
    for attempt in range(ATTEMPTS):
        place.reset()
        logs = [tmp_path / f"log{attempt}{number}" for number in range(2)]
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda log: run_command(place.words, place.root, log), logs))
        assert any(outcome.status == 0 for outcome in both), both
        for outcome in both:
            assert outcome.status == 0 or "another process is writing to" in outcome.printed, outcome
            assert "Traceback" not in outcome.printed
        assert place.contents() == wanted
