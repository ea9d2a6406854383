"""T5's span corruption: its properties, its distributions, and an example like that of the paper."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mlsm_plugin.core.masking.span_corruption import (
    SpanCorruptionCollator,
    SpanNoise,
    collate_spans,
    corrupt_spans,
    filler_places,
)
from mlsm_plugin.fairseq_plugin.text.masked_text import sentinel_symbols
from tests.conftest import REPOSITORY
from tests.restored_spans import restore_spans

EOS = 2
FIRST = 1000  # the first sentinel
densities = st.floats(0.05, 0.9)
mean_lengths = st.floats(1, 10)


def expected_counts(length: int, density: float, mean: float, most: int) -> tuple[int, int]:
    """The counts as the paper's code has them, in plain words."""
    noise = int(np.round(length * density))
    noise = max(1, min(noise, length - 1))
    spans = max(1, int(np.round(noise / mean)))
    return noise, min(spans, noise, length - noise, most)


def marks_in(ids: np.ndarray) -> list[int]:
    return [int(token) for token in ids if token >= FIRST]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 600), densities, mean_lengths, st.integers(3, 120), st.booleans(), st.booleans(),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_source_and_target_hold_the_text_and_the_counts_are_those_of_t5(
    length: int, density: float, mean: float, number: int, rotate: bool, closing: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, rng.choice([3, 10, FIRST]), size=length)  # also EOS, padding and the like
    drawn = SpanNoise(density, mean, rotate, closing)
    how: dict[str, Any] = {"noise": drawn, "sentinels": range(FIRST, FIRST + number), "eos": EOS, "rng": rng}
    if length < 2:
        with pytest.raises(ValueError, match="a text of 1 tokens cannot be corrupted; it needs at least 2 tokens"):
            corrupt_spans(tokens, **how)
        return
    before = tokens.copy()
    source, target = corrupt_spans(tokens, **how)
    assert np.array_equal(tokens, before)
    assert np.array_equal(restore_spans(source, target, sentinels=how["sentinels"], eos=EOS), tokens)
    assert source[-1] == target[-1] == EOS

    noise, spans = expected_counts(length, density, mean, number - rotate - closing)
    written, closed = marks_in(source), marks_in(target)
    assert written == list(range(FIRST, FIRST + len(written)))
    assert closed == list(range(FIRST, FIRST + len(closed)))
    assert len(closed) <= number
    assert len(written) - spans in ((0, 1) if rotate else (0,))  # rolling may cut one span in two
    assert len(target) - 1 - len(closed) == noise
    assert len(source) - 1 - len(written) == length - noise
    ends_in_noise = int(source[-2]) >= FIRST
    assert len(closed) - len(written) == (1 if closing or not ends_in_noise else 0)
    if not rotate:
        assert source[0] < FIRST
        assert ends_in_noise
    limits = drawn.lengths(length, number)
    assert len(source) <= limits[0]
    assert len(target) <= limits[1]
    if not rotate:
        assert (len(source), len(target)) == limits


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 200), densities, mean_lengths, st.booleans(), st.integers(0, 2**32 - 1))
def test_no_word_is_partly_noise(length: int, density: float, mean: float, rotate: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    begins = rng.random(length) < rng.choice([0.3, 0.7])
    tokens = np.arange(length)
    how: dict[str, Any] = {"noise": SpanNoise(density, mean, rotate), "eos": -1, "rng": rng}
    how |= {"sentinels": range(FIRST, FIRST + 100), "word_begins": begins}
    if not begins[1:].any():
        with pytest.raises(ValueError, match="a text of one word cannot be corrupted"):
            corrupt_spans(tokens, **how)
        return
    source, target = corrupt_spans(tokens, **how)
    assert np.array_equal(restore_spans(source, target, sentinels=how["sentinels"], eos=-1), tokens)
    word = np.cumsum(np.append(True, begins[1:]))
    kept = set(source[source < FIRST].tolist()) - {-1}
    noise = set(range(length)) - kept
    assert {word[token] for token in kept}.isdisjoint({word[token] for token in noise})
    words = int(word[-1])
    assert len({word[token] for token in noise}) == max(1, min(words - 1, int(np.round(words * density))))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(2, 300), densities, mean_lengths, st.floats(0, 1), st.booleans(), st.booleans(), st.booleans(),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_unknown_tokens_never_become_noise(
    length: int, density: float, mean: float, share: float, rotate: bool, closing: bool, words: bool, seed: int
) -> None:
    rng, unk = np.random.default_rng(seed), 3
    tokens = np.where(rng.random(length) < share, unk, np.arange(length) + 10)
    how: dict[str, Any] = {"noise": SpanNoise(density, mean, rotate, closing)}
    how |= {"sentinels": range(FIRST, FIRST + 100), "eos": EOS}
    begins = rng.random(length) < 0.6
    how["word_begins"] = begins if words and begins[1:].any() else None
    source, target = corrupt_spans(tokens, **how, unk=unk, rng=np.random.default_rng(seed))
    assert unk not in target
    assert np.array_equal(restore_spans(source, target, sentinels=how["sentinels"], eos=EOS), tokens)
    plain = corrupt_spans(tokens, **how, rng=np.random.default_rng(seed))
    if unk not in tokens:
        assert all(np.array_equal(one, other) for one, other in zip((source, target), plain, strict=True))
    assert len(marks_in(source)) <= len(marks_in(plain[0]))  # so that the sentinels are enough
    assert len(target) <= len(plain[1]) + 1  # a closing sentinel
    noise = len(target) - 1 - len(marks_in(target))
    assert (noise > 0) == bool((tokens != unk).any())


def test_the_longest_parts_of_a_span_without_its_unknown_tokens_are_noise() -> None:
    tokens, found = [10, 3, 11, 12, 3, 13, 14, 15], set()
    for seed in range(50):  # seven tokens in two spans, with one token of text before each at the least
        rng = np.random.default_rng(seed)
        sentinels = range(FIRST, FIRST + 9)
        source, target = corrupt_spans(tokens, SpanNoise(0.7, 3.0), sentinels=sentinels, eos=EOS, unk=3, rng=rng)
        assert len(marks_in(source)) <= 2
        found.add((tuple(source.tolist()), tuple(target.tolist())))
    first, second = FIRST, FIRST + 1
    assert ((10, 3, first, 3, second, EOS), (first, 11, 12, second, 13, 14, 15, EOS)) in found


@settings(max_examples=200, deadline=None)
@given(st.integers(8, 1200), densities, mean_lengths, st.integers(3, 120), st.booleans())
def test_texts_are_as_long_as_their_source_allows(
    limit: int, density: float, mean: float, number: int, rotate: bool
) -> None:
    noise = SpanNoise(density, mean, rotate)
    length = noise.text_length(limit, number)
    assert noise.lengths(length, number)[0] <= limit < noise.lengths(length + 1, number)[0]
    lengths = [noise.lengths(n, number)[0] for n in range(2, length + 2)]
    assert all(a <= b for a, b in itertools.pairwise(lengths))


def test_lengths_are_those_of_t5() -> None:
    assert SpanNoise(0.15, 3.0).text_length(512, 100) == 568
    assert SpanNoise(0.15, 3.0).lengths(568, 100) == (512, 114)


def all_masks(length: int, noise: int, spans: int) -> set[tuple[bool, ...]]:
    """Every mask with so much noise in so many spans that begins with text and ends in noise."""
    found = set()
    for chosen in itertools.combinations(range(length), noise):
        mask = tuple(place in chosen for place in range(length))
        groups = [key for key, _ in itertools.groupby(mask)]
        if groups == [False, True] * spans:
            found.add(mask)
    return found


def mask_of(source: np.ndarray, length: int) -> tuple[bool, ...]:
    kept = set(source.tolist())
    return tuple(place not in kept for place in range(length))


@pytest.mark.parametrize(("length", "density", "mean"), [(9, 0.45, 2.0), (10, 0.3, 1.0), (8, 0.6, 2.5)])
def test_all_patterns_are_equally_likely(length: int, density: float, mean: float) -> None:
    noise, spans = expected_counts(length, density, mean, 100)
    patterns = sorted(all_masks(length, noise, spans))
    assert len(patterns) > 5
    rng = np.random.default_rng(1)
    how: dict[str, Any] = {"noise": SpanNoise(density, mean), "sentinels": range(FIRST, FIRST + 9), "eos": -1}
    drawn = Counter(
        mask_of(corrupt_spans(np.arange(length), rng=rng, **how)[0], length) for _ in range(200 * len(patterns))
    )
    assert set(drawn) == set(patterns)
    assert stats.chisquare([drawn[pattern] for pattern in patterns]).pvalue > 1e-4


def test_rolled_patterns_make_every_token_noise_equally_often() -> None:
    rng = np.random.default_rng(2)
    counts = np.zeros(12)
    drawn = 6000
    for _ in range(drawn):
        noise = SpanNoise(0.25, rotate=True)
        source, _ = corrupt_spans(np.arange(12), noise, sentinels=range(FIRST, FIRST + 9), eos=-1, rng=rng)
        counts += mask_of(source, 12)
    assert counts.sum() == 3 * drawn
    assert abs(counts / drawn - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / drawn)


def test_the_cute_dog() -> None:
    """The example of the documentation."""
    words = ["The", "cute", "dog", "walks", "in", "the", "green", "park"]

    def text(ids: np.ndarray) -> str:
        symbols = [*words, *sentinel_symbols(100), "</s>"]
        return " ".join(symbols[token] for token in ids)

    found = set()
    for seed in range(200):
        rng = np.random.default_rng(seed)
        source, target = corrupt_spans(range(8), SpanNoise(0.55, 1.5), sentinels=range(8, 108), eos=108, rng=rng)
        found.add((text(source), text(target)))
    assert (
        "The cute <extra_id_0> in <extra_id_1> green <extra_id_2> </s>",
        "<extra_id_0> dog walks <extra_id_1> the <extra_id_2> park </s>",
    ) in found


def test_what_stands_behind_sentinels_is_found_where_they_come_first() -> None:
    target = [FIRST + 1, 7, 8, FIRST, FIRST + 1, 9, EOS, FIRST + 2, 5]
    places = filler_places(target, sentinels=range(FIRST, FIRST + 3), eos=EOS)
    assert {mark: [target[i] for i in place] for mark, place in places.items()} == {FIRST + 1: [7, 8], FIRST: []}
    with pytest.raises(ValueError, match=f"the target lacks the sentinel {FIRST + 2}"):
        restore_spans([FIRST + 2, EOS], target[:7], sentinels=range(FIRST, FIRST + 3), eos=EOS)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"sentinels": []}, "at least 1 sentinels are needed, got 0"),
        ({"noise": SpanNoise(rotate=True, closing_sentinel=True)}, "at least 3 sentinels are needed, got 2"),
        ({"sentinels": [3]}, "the text contains a sentinel"),
    ],
)
def test_what_cannot_be_corrupted_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt_spans(range(8), **{"sentinels": [90, 91], "eos": EOS, "rng": np.random.default_rng(0), **how})
    with pytest.raises(ValueError, match="sources of 2 tokens are too short"):
        SpanNoise().text_length(2, 5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 3.0), "noise_density must be between 0 and 1, got 0"),
        ((1.0, 3.0), "noise_density must be between 0 and 1"),
        ((0.15, 0.5), "mean_span_length must be at least 1, got 0.5"),
    ],
)
def test_noise_out_of_range_is_refused(values: tuple[float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpanNoise(*values)


EXPECTED = [11, 12, 13, 14, 15, 16, 17, 18]


@pytest.mark.parametrize(
    "text",
    [
        [*EXPECTED, EOS], [*EXPECTED, EOS, EOS], [*EXPECTED, EOS, 1, 1], [1, *EXPECTED, 1], EXPECTED,
        {"input_ids": [*EXPECTED, EOS]}, {"input_ids": torch.tensor([*EXPECTED, EOS, 1]), "attention_mask": [1] * 10},
        np.array([*EXPECTED, EOS]), torch.tensor([*EXPECTED, EOS, 1]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("rotate", [False, True])
def test_eos_and_padding_around_a_text_never_become_noise(text: Any, rotate: bool) -> None:
    collator = SpanCorruptionCollator(range(900, 1000), eos=EOS, pad=1, noise=SpanNoise(0.3, rotate=rotate))
    for seed in range(10):
        torch.manual_seed(seed)
        ((source, target),) = collator.pairs([text])
        torch.manual_seed(seed)
        for one, other in zip((source, target), collator.pairs([EXPECTED])[0], strict=True):
            assert one.tolist() == other.tolist()
        assert source.tolist().count(EOS) == target.tolist().count(EOS) == 1
        assert restore_spans(source, target, sentinels=range(900, 1000), eos=EOS).tolist() == EXPECTED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([11, 12, 1, 13], r"a text has padding \(the id 1\) between other ids"),
        ([11, EOS, 1], "a text of 1 tokens cannot be corrupted"),
        ([1, 1], "a text of 0 tokens cannot be corrupted"),
        ([[11, 12]], r"expected the ids of a text, \(n,\), got the shape \(1, 2\)"),
        ({"input_ids": [11, 900]}, "the text contains a sentinel"),
    ],
)
def test_texts_that_cannot_be_corrupted_are_refused(text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpanCorruptionCollator(range(900, 1000), eos=EOS, pad=1)([text])


def test_batches_are_padded_and_the_decoder_sees_the_token_before() -> None:
    batch = collate_spans([([5, 90, 6, 2], [90, 7, 2]), ([90, 2], [90, 8, 9, 4, 2])], pad=1, eos=2)
    assert batch["source"].tolist() == [[5, 90, 6, 2], [90, 2, 1, 1]]
    assert batch["target"].tolist() == [[90, 7, 2, 1, 1], [90, 8, 9, 4, 2]]
    assert batch["decoder_input"].tolist() == [[2, 90, 7, 1, 1], [2, 90, 8, 9, 4]]


@pytest.mark.parametrize("workers", [0, 2])
def test_collator_serves_a_torch_loader(workers: int) -> None:
    texts = [torch.arange(10, 10 + length) for length in range(5, 25)]
    collator = SpanCorruptionCollator(range(100, 120), eos=2, pad=1, noise=SpanNoise(0.5, 1.5))

    def epochs(seed: int) -> list[list[dict[str, torch.Tensor]]]:
        torch.manual_seed(seed)
        loader = torch.utils.data.DataLoader(texts, batch_size=4, collate_fn=collator, num_workers=workers)
        return [list(loader) for _ in range(2)]

    first, again = epochs(1), epochs(1)
    for batches, same in zip(first, again, strict=True):
        assert all(torch.equal(a["source"], b["source"]) for a, b in zip(batches, same, strict=True))
    assert any(not torch.equal(a["source"], b["source"]) for a, b in zip(*first, strict=True))
    for number, batch in enumerate(first[0]):
        for row, text in enumerate(texts[4 * number : 4 * number + 4]):
            source, target = (batch[name][row][batch[name][row] != 1] for name in ("source", "target"))
            assert restore_spans(source, target, sentinels=range(100, 120), eos=2).tolist() == text.tolist()


@pytest.mark.slow
def test_plain_pytorch_without_fairseq_is_enough(tmp_path: Path) -> None:
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not entry.name.startswith("fairseq"):
            (tmp_path / entry.name).symlink_to(entry)
    program = (
        "import importlib.util; assert importlib.util.find_spec('fairseq') is None\n"
        "from mlsm_plugin.core.masking.span_corruption import SpanCorruptionCollator\n"
        "print(SpanCorruptionCollator(range(100, 120), eos=2, pad=1)([range(10, 30)])['source'].shape)"
    )
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    result = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-1500:]
    assert "torch.Size([1, " in result.stdout
