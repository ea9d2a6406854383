"""How much of a text is masked, judged on enough of it."""

from __future__ import annotations

import re

import pytest

from mlsm_plugin.core.masking.masked_share import ENOUGH_TOKENS, check_masked_share, samples_to_look_at

REMEDY = "take another text"


@pytest.mark.parametrize(
    ("masked", "said"), [(1500, None), (760, None), (740, "warning"), (160, "warning"), (140, "error"), (0, "error")]
)
def test_half_is_too_little_and_a_tenth_stops(masked: int, said: str | None, caplog: pytest.LogCaptureFixture) -> None:
    counts = [(masked // 10, 1000)] * 10
    line = f"only {masked / 10_000:.2g} of the tokens of train are masked, and 0.15 were asked for; {REMEDY}"
    if said == "error":
        with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
            check_masked_share("train", counts, 0.15, remedy=REMEDY)
    else:
        check_masked_share("train", counts, 0.15, remedy=REMEDY)
        assert [record.getMessage() for record in caplog.records] == ([line] if said else [])


def test_too_little_text_is_not_judged() -> None:
    check_masked_share("valid", [(0, 100)] * 13, 0.15, remedy=REMEDY)  # 195 were to be masked
    check_masked_share("valid", [], 0.15, remedy=REMEDY)
    with pytest.raises(ValueError, match="only 0 of the tokens of valid"):
        check_masked_share("valid", [(0, 100)] * 14, 0.15, remedy=REMEDY)


@pytest.mark.parametrize("asked", [0.15, 0.001])
def test_no_more_is_read_than_it_takes(asked: float) -> None:
    read = []

    def counts():
        for _ in range(10**6):
            read.append(1000)
            yield round(1000 * asked), 1000

    check_masked_share("train", counts(), asked, remedy=REMEDY)
    assert sum(read) == max(ENOUGH_TOKENS, 200 / asked)


@pytest.mark.parametrize("number", [0, 1, 7, 1000, 10**9])
def test_samples_come_from_all_parts_in_mixed_order(number: int) -> None:
    found = samples_to_look_at(number)
    assert len(set(found)) == len(found) == min(number, 1000)
    assert all(0 <= index < number for index in found)
    if number > 10:
        assert found != sorted(found)
        tenths = {10 * index // number for index in found[:100]}
        assert tenths == set(range(10))
