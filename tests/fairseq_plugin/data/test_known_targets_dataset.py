"""fairseq's masks without those of special and unknown tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, ListDataset, MaskTokensDataset

from mlsm_plugin.fairseq_plugin.data.token_datasets import KnownTargetsDataset

BOS, PAD, EOS, UNK = range(4)
VOCABULARY = Dictionary()
for number in range(30):
    VOCABULARY.add_symbol(f"w{number}")
MASK = VOCABULARY.add_symbol("<mask>")
BEGINS = torch.ByteTensor([index % 3 != 1 or index < VOCABULARY.nspecial for index in range(len(VOCABULARY))])


def samples(unknown: float) -> Any:
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 40, size=60)
    ids = [rng.integers(VOCABULARY.nspecial, MASK, size=length) for length in lengths]
    ids = [np.array([BOS, *np.where(rng.random(len(one)) < unknown, UNK, one), EOS]) for one in ids]
    return ListDataset([torch.from_numpy(one) for one in ids], [len(one) for one in ids])


@pytest.mark.parametrize("unknown", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"mask_whole_words": BEGINS}, {"mask_multiple_length": 3}, {"random_token_prob": 0.9}, {"mask_stdev": 1.0}],
    ids=lambda options: "".join(options),
)
def test_all_masks_stay_but_those_of_special_and_unknown_tokens(unknown: float, options: dict[str, Any]) -> None:
    tokens = samples(unknown)
    settings = {"mask_prob": 0.5, "leave_unmasked_prob": 0.05, "random_token_prob": 0.4, **options}
    pair = MaskTokensDataset.apply_mask(tokens, VOCABULARY, pad_idx=PAD, mask_idx=MASK, **settings)
    known = KnownTargetsDataset.of(*pair, VOCABULARY)
    assert list(known[0].sizes) == list(pair[0].sizes)
    seen, taken_back = [], 0
    for epoch in (1, 2):
        for dataset in (*pair, *known):
            dataset.set_epoch(epoch)
        type(pair[0]).__getitem__.cache_clear()  # fairseq keeps samples by their index alone
        for index in range(len(tokens)):
            original, (source, target) = tokens[index], (dataset[index] for dataset in pair)
            found_source, found_target = (dataset[index] for dataset in known)
            kept = torch.isin(original, torch.tensor([BOS, EOS, UNK]))
            taken_back += int((target[kept] != PAD).sum())
            assert torch.equal(found_source[kept], original[kept])
            assert bool((found_target[kept] == PAD).all())
            assert torch.equal(found_source[~kept], source[~kept])
            assert torch.equal(found_target[~kept], target[~kept])
            seen.append(found_source.tolist())
    assert (seen[: len(tokens)] != seen[len(tokens) :]) is (unknown < 1)
    assert taken_back > 60
