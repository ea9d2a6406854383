"""The tracks: their limits, and the names of their checkpoints."""

from __future__ import annotations

import pytest

from mlsm_plugin.babylm.settings import TRACKS, BabylmSettings, words_from


def test_the_checkpoints_of_the_tracks_are_those_of_the_challenge() -> None:
    small = [f"chck_{n}M" for n in (*range(1, 10), *range(10, 101, 10))]
    found = {name: list(track.checkpoints(track.exposures)) for name, track in TRACKS.items()}
    assert found == {"strict-small": small, "strict": [*small, *(f"chck_{n}M" for n in range(200, 1001, 100))]}
    assert TRACKS["strict-small"].checkpoints(99_999_999).keys() == {*small[:-1]}
    assert TRACKS["strict"].checkpoints(2_500_000) == {"chck_1M": 1_000_000, "chck_2M": 2_000_000}


def test_a_custom_track_has_checkpoints_of_its_size() -> None:
    def names(**given: object) -> list[str]:
        track = BabylmSettings(track="custom", **given).limits()  # type: ignore[arg-type]
        return list(track.checkpoints(track.exposures))

    assert names(words="7.7M", epochs=2) == [f"chck_{n}M" for n in range(1, 11)]
    assert names(words="2M", epochs=1) == [*(f"chck_{n}00K" for n in range(1, 10)), "chck_1M", "chck_2M"]
    assert names(words="300", epochs=1)[-4:] == ["chck_90", "chck_100", "chck_200", "chck_300"]
    assert names(words="3", epochs=1) == ["chck_1", "chck_2", "chck_3"]


@pytest.mark.parametrize(("text", "words"), [("7.7M", 7_700_000), ("12_000", 12_000), ("2k", 2000), ("1B", 10**9)])
def test_numbers_of_words(text: str, words: int) -> None:
    assert words_from(text) == words


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"track": "custom"}, "--words is only allowed with --track custom, which needs it"),
        ({"words": "5M"}, "--words is only allowed with --track custom"),
        ({"track": "custom", "words": "many"}, "words must be a number such as 7.7M, got 'many'"),
        ({"track": "custom", "words": "0"}, "words must be a number"),
        ({"epochs": 11}, "epochs must be at most 10 in the track strict-small, got 11"),
        ({"auxiliary": "run"}, "--auxiliary is only allowed with --objective mlsm"),
        ({"track": "multilingual"}, "track must be one of strict, strict-small, custom"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        BabylmSettings(**given)  # type: ignore[arg-type]
