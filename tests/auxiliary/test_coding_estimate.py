"""What coding will cost, compared with what it cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlsm_plugin.auxiliary.block_coding import (
    MAX_SAMPLE_TEXT,
    SAMPLE_TOKENS,
    CodingEstimate,
    peak_memory,
    sampled_blocks,
)
from mlsm_plugin.auxiliary.corpus_coding import encode_split, estimate_split
from mlsm_plugin.auxiliary.split_coder import CodingSettings
from mlsm_plugin.files.work_share import WorkShare
from mlsm_plugin.hidden_states.block_reader import BlockReader, BlockSettings
from tests.auxiliary.toy_coder import ToyCoder
from tests.tiny_models import TinyData

SETTINGS = CodingSettings(layer=1, blocks=BlockSettings(16), shard_tokens=1000)


def estimate(tiny: TinyData, coder: ToyCoder, settings: CodingSettings = SETTINGS, **options: Any) -> CodingEstimate:
    return estimate_split(tiny.data_bin, "valid", auxiliary=tiny.model, coder=coder, settings=settings, **options)


@pytest.mark.parametrize("coverage", [1, 0.5])
def test_estimate_from_the_whole_split_is_exact_and_writes_nothing(
    tiny: TinyData, tmp_path: Any, coverage: float
) -> None:
    settings = replace(SETTINGS, coverage=coverage, batch_tokens=1 << 20)  # the sample is everything
    before = sorted(tiny.data_bin.rglob("*"))
    found = estimate(tiny, ToyCoder(), settings)
    assert sorted(tiny.data_bin.rglob("*")) == before
    data = tiny.copy(tmp_path / "data-bin")
    made = encode_split(data, "valid", auxiliary=tiny.model, coder=ToyCoder(), settings=settings)
    assert made.meta is not None
    assert found.tokens_to_code == found.sampled_tokens == made.coded_tokens
    assert found.mean_nonzeros == pytest.approx(made.meta["nnz"] / made.coded_tokens)
    assert found.num_shards == made.num_shards
    assert found.gap_max == pytest.approx(made.meta["gap_max"])
    assert found.gap_mean == pytest.approx(made.meta["gap_mean"])
    size = sum(path.stat().st_size for path in made.directory.glob("*[sr].npy") if "gap" not in path.name)
    assert found.disk_bytes == pytest.approx(size, rel=0.1)
    assert found.memory_bytes > peak_memory() / 2 > 10**8
    assert (found.inexact_tokens, found.gpu_bytes) == (0, 0)


def test_processes_share_the_time(tiny: TinyData) -> None:
    alone, third = (estimate(tiny, ToyCoder(), share=WorkShare(0, count)) for count in (1, 3))
    assert (alone.num_processes, third.num_processes) == (1, 3)
    shards = alone.num_shards
    assert alone.seconds * alone.tokens_per_second == pytest.approx(alone.tokens_to_code)
    part = third.seconds * third.tokens_per_second / third.tokens_to_code
    assert part == pytest.approx(-(-shards // 3) / shards)


def test_inexact_codes_are_counted_and_a_silent_coder_is_no_error(tiny: TinyData) -> None:
    assert estimate(tiny, ToyCoder(tolerance=0.0)).inexact_tokens > 100
    assert estimate(tiny, ToyCoder(silent=True)).mean_nonzeros == 0
    with pytest.raises(ValueError, match="learned from layer 2, not from --layer 1"):
        estimate(tiny, ToyCoder(layer=2))


@pytest.mark.parametrize(("coverage", "batch_tokens"), [(1.0, 64), (0.5, 64), (0.001, 64), (1.0, 1 << 20)])
def test_sample_is_spread_over_the_split(tiny: TinyData, coverage: float, batch_tokens: int) -> None:
    reader = BlockReader(tiny.data_bin, "train", SETTINGS.blocks)
    found = sampled_blocks(reader, replace(SETTINGS, coverage=coverage, batch_tokens=batch_tokens))
    assert (np.diff(found) > 0).all()
    assert (found[0], found[-1]) == (0, len(reader) - 1)
    wanted = min(max(SAMPLE_TOKENS, batch_tokens) / coverage, max(MAX_SAMPLE_TEXT, batch_tokens), reader.num_tokens)
    assert reader.sizes[found].sum() == pytest.approx(wanted, rel=0.1)


FIGURES: dict[str, Any] = {
    **{"split": "train", "num_tokens": 1000, "tokens_to_code": 800, "sampled_tokens": 40, "mean_nonzeros": 12.34},
    **{"inexact_tokens": 0, "gap_mean": 1e-6, "gap_max": 2e-5, "tokens_per_second": 99.6, "num_shards": 4},
    **{"num_processes": 1, "seconds": 3599.2, "disk_bytes": 2_500_000, "memory_bytes": 1_234_000_000, "gpu_bytes": 0},
}


def test_estimate_is_said_in_few_lines() -> None:
    assert str(CodingEstimate(**FIGURES)).splitlines() == [
        "train: 1000 tokens, 800 to code, in 4 shards",
        "  sample: 40 tokens, 12.3 non-zeros a token, 100 tokens a second, duality gap mean 1.0e-06, max 2.0e-05",
        "  time: 1:00:00 with 1 process",
        "  disk: 2.5 MB",
        "  memory: 1.23 GB a process",
    ]
    other = {"gap_mean": None, "gap_max": None, "num_processes": 3, "gpu_bytes": 5_000_000_000}
    text = str(CodingEstimate(**{**FIGURES, **other}))
    assert "gap" not in text
    assert "with 3 processes like this one" in text
    assert text.endswith("1.23 GB a process, 5.00 GB on the GPU")
