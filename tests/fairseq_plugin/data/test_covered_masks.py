"""Masks that are drawn only at a seeded share of the positions."""

from __future__ import annotations

import pickle
import re
import shutil
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from fairseq import tasks
from fairseq.data import Dictionary, ListDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.masking.masked_share import MaskReplacement
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.code_store_writer import CodeStoreWriter
from mlsm_plugin.core.sparse_coding.stored_codes import covered_positions
from mlsm_plugin.fairseq_plugin.data.token_datasets import (
    CoveredMaskTokensDataset,
    SplitCoverage,
    masking_probabilities,
)
from tests.fairseq_plugin.stock_batches import original_of, samples_of, stock_batches
from tests.fairseq_plugin.tasks.test_masked_latent_semantic import assert_codes_by_position
from tests.tiny_run import batches, training_config

BOS, PAD, EOS, UNK = range(4)
TRAIN, VALID = (0.4, 5), (0.3, 9)  # coverage, seed


def vocabulary(words: int = 30) -> Dictionary:
    dictionary = Dictionary()
    for number in range(words):
        dictionary.add_symbol(f"w{number}", n=1 + number)
    dictionary.add_symbol("<mask>", n=0)
    return dictionary


VOCABULARY = vocabulary()
MASK = VOCABULARY.index("<mask>")


def listed(values):
    return ListDataset(values, [len(value) for value in values])


def random_samples(seed, lengths, unknown=0.0):
    """Ids with BOS in front, and EOS and a share of unknown tokens here and there, and their flat positions."""
    rng = np.random.default_rng(seed)
    tokens, positions, start = [], [], 0
    for length in lengths:
        ids = rng.integers(VOCABULARY.nspecial, MASK, length)
        ids[rng.random(length) < 0.1] = EOS
        if unknown:
            ids[rng.random(length) < unknown] = UNK
        tokens.append(torch.from_numpy(np.concatenate([[BOS], ids])))
        positions.append(torch.from_numpy(np.concatenate([[-1], np.arange(start, start + length)])))
        start += length
    return tokens, positions, start


def masked_pair(tokens, positions, splits, mask_prob, **settings):
    data = listed(tokens), listed(positions), splits, mask_prob, VOCABULARY
    return CoveredMaskTokensDataset.apply_mask(*data, **settings)


@settings(max_examples=60, deadline=None)
@given(
    data_seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    coverage=st.floats(0.01, 0.99),
    share=st.floats(0.01, 1),
    coverage_seed=st.integers(0, 2**63 - 1),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 50),
    leave=st.sampled_from([0.0, 0.1, 0.5]),
    replace=st.sampled_from([0.0, 0.1, 0.5]),
    weighted=st.booleans(),
    unknown=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_masks_are_covered_content_and_come_from_seed_epoch_and_index(
    data_seed, lengths, coverage, share, coverage_seed, seed, epoch, leave, replace, weighted, unknown
):
    tokens, positions, total = random_samples(data_seed, lengths, unknown)
    arguments = (tokens, positions, [SplitCoverage(total, coverage, coverage_seed)], coverage * share)
    replacement = {
        "replacement": MaskReplacement(leave_unmasked_prob=leave, random_token_prob=replace),
        "freq_weighted_replacement": weighted,
    }
    inputs, targets = masked_pair(*arguments, seed=seed, **replacement)
    again = masked_pair(*arguments, seed=seed, **replacement)
    for dataset in (inputs, targets, *again):
        dataset.set_epoch(epoch)
    for index in reversed(range(len(tokens))):  # in another order than the others
        for dataset in again:
            dataset[index]
    for index, (ids, places) in enumerate(zip(tokens, positions, strict=True)):
        source, target = inputs[index], targets[index]
        assert source.dtype == target.dtype == ids.dtype
        masked = target != PAD
        covered = covered_positions(places.numpy(), coverage=coverage, seed=coverage_seed)
        assert not (masked & ~torch.from_numpy(covered)).any()
        assert not torch.isin(ids[masked], torch.tensor([BOS, PAD, EOS, UNK])).any()
        assert torch.equal(target[masked], ids[masked])
        assert torch.equal(source[~masked], ids[~masked])
        assert ((source[masked] >= VOCABULARY.nspecial) & (source[masked] <= MASK)).all()
        if leave == replace == 0:
            assert (source[masked] == MASK).all()
        if share == 1:
            content = ~torch.isin(ids, torch.tensor([BOS, EOS, UNK]))
            assert torch.equal(masked, content & torch.from_numpy(covered))
        assert torch.equal(again[0][index], source)
        assert torch.equal(again[1][index], target)


@pytest.mark.parametrize(("coverage", "mask_prob"), [(0.3, 0.15), (0.15, 0.15), (0.9, 0.4)])
def test_share_of_masked_content_is_the_masking_rate_whatever_the_coverage(coverage, mask_prob):
    tokens, positions, total = random_samples(1, [100] * 400)
    inputs, targets = masked_pair(
        tokens,
        positions,
        [SplitCoverage(total, coverage, 3)],
        mask_prob,
        replacement=MaskReplacement(leave_unmasked_prob=0.2, random_token_prob=0.3),
    )
    ids, source, target = (torch.cat([dataset[index] for index in range(400)]) for dataset in (tokens, inputs, targets))
    content = int(((ids != BOS) & (ids != EOS)).sum())
    masked = target != PAD
    deviation = (mask_prob * (1 - mask_prob) / content) ** 0.5
    assert float(masked.sum()) / content == pytest.approx(mask_prob, abs=4 * deviation)
    shares = [(source[masked] == MASK).double().mean(), (source[masked] == ids[masked]).double().mean()]
    # one in 31 random symbols is the original, and one is <mask>
    assert shares == pytest.approx([0.5 + 0.3 / 31, 0.2 + 0.3 / 31], abs=4 * (0.25 / (content * mask_prob)) ** 0.5)


@pytest.mark.parametrize("weighted", [False, True])
def test_random_symbols_come_evenly_or_by_their_counts(weighted):
    tokens, positions, total = random_samples(1, [100] * 400)
    inputs, _ = masked_pair(
        tokens,
        positions,
        [SplitCoverage(total, 0.6, 3)],
        0.6,
        replacement=MaskReplacement(leave_unmasked_prob=0, random_token_prob=1),
        freq_weighted_replacement=weighted,
    )
    targets = masked_pair(tokens, positions, [SplitCoverage(total, 0.6, 3)], 0.6)[1]
    source, target = (torch.cat([dataset[index] for index in range(400)]) for dataset in (inputs, targets))
    found = np.bincount(source[target != PAD], minlength=len(VOCABULARY))
    weights = np.array(VOCABULARY.count if weighted else [1] * len(VOCABULARY), dtype=float)
    weights[: VOCABULARY.nspecial] = 0
    expected = found.sum() * weights / weights.sum()
    assert (found[expected == 0] == 0).all()
    assert (abs(found - expected) <= 4.5 * expected**0.5).all()


def test_every_covered_token_gets_its_turn_and_epochs_differ():
    tokens, positions, total = random_samples(2, [50] * 4)
    inputs, targets = masked_pair(tokens, positions, [SplitCoverage(total, 0.5, 3)], 0.25)
    times = np.zeros(total, dtype=int)
    sources = []
    for epoch in range(1, 401):
        targets.set_epoch(epoch)
        inputs.set_epoch(epoch)
        sources.append(torch.cat([inputs[index] for index in range(4)]))
        for index in range(4):
            times[positions[index][targets[index] != PAD].numpy()] += 1
    covered = covered_positions(np.arange(total), coverage=0.5, seed=3)
    content = torch.cat([ids[1:] for ids in tokens]).numpy() != EOS
    assert (times[~(covered & content)] == 0).all()
    assert abs(times[covered & content] - 200).max() < 5 * (400 * 0.25) ** 0.5  # each with probability 1/2
    assert sum(torch.equal(one, other) for one, other in pairwise(sources)) == 0


def test_each_split_of_a_combined_one_has_its_own_coverage():
    splits = [SplitCoverage(7, 0.5, 1), SplitCoverage(30, 1.0, 0), SplitCoverage(100, 0.25, 4)]
    positions = torch.cat([torch.tensor([-1]), torch.arange(137)])  # one block through all three
    found = masking_probabilities(positions.numpy(), splits, 0.2)
    expected = [
        covered_positions(np.arange(s.num_tokens), coverage=s.coverage, seed=s.seed) * 0.2 / s.coverage for s in splits
    ]
    np.testing.assert_allclose(found, np.concatenate([[0], *expected]))
    assert len(np.unique(found)) == 4
    with pytest.raises(AssertionError):
        masking_probabilities(positions.numpy(), splits, 0.3)


def test_shares_of_the_masked_tokens_must_be_shares():
    with pytest.raises(ValueError, match=r"together above 1; got \(0\.6, 0\.5\)"):
        MaskReplacement(leave_unmasked_prob=0.6, random_token_prob=0.5)


def cover(store_directory, target, coverage, seed):
    """A store with the codes of a seeded share of another one's positions."""
    store = CodeStore(store_directory)
    covered = covered_positions(np.arange(len(store)), coverage=coverage, seed=seed)
    totals = ("format_version", "token_count", "nnz", "mean_nonzeros", "shards")
    meta = {key: value for key, value in store.meta.items() if key not in totals}
    writer = CodeStoreWriter(target, {**meta, "coverage": coverage, "coverage_seed": seed}, [0, len(store)])
    writer.write_shard(0, sp.diags(covered.astype(np.float32)).tocsr() @ store.rows(0, len(store)))
    writer.finish()


@pytest.fixture(scope="module")
def covered_data(pipeline, tmp_path_factory):
    """The shared data-bin with codes of 0.4 of the training and 0.3 of the validation positions."""
    folder = tmp_path_factory.mktemp("covered")
    shutil.copytree(pipeline.data_bin, folder, ignore=shutil.ignore_patterns("*.codes"), dirs_exist_ok=True)
    for split, (coverage, seed) in (("train", TRAIN), ("valid", VALID)):
        cover(pipeline.data_bin / f"{split}.codes", folder / f"{split}.codes", coverage, seed)
    return folder


OTHERS = [pytest.param("valid", epoch, marks=pytest.mark.slow) for epoch in (1, 2)]


@pytest.mark.parametrize(("split", "epoch"), [("train", 1), *OTHERS])
def test_batches_have_the_codes_of_covered_masked_tokens(covered_data, caplog, split, epoch):
    coverage, seed = TRAIN if split == "train" else VALID
    cfg = training_config(covered_data, "--sample-break-mode", "none")
    task = tasks.setup_task(cfg.task)
    with caplog.at_level("INFO"):
        found = batches(cfg, split, epoch=epoch, task=task)
    pad = task.source_dictionary.pad()
    store = CodeStore(covered_data / f"{split}.codes")
    codes = store.rows(0, len(store))
    stock = stock_batches(covered_data, "--sample-break-mode", "none", split=split, epoch=epoch)
    masked_tokens = 0
    texts, expected = ({index: original_of(one) for index, one in samples_of(part).items()} for part in (found, stock))
    assert texts.keys() == expected.keys()
    assert all(torch.equal(text, expected[index]) for index, text in texts.items())
    content_tokens = int((~torch.isin(torch.cat([*texts.values()]), torch.tensor([BOS, EOS]))).sum())
    for batch in found:
        assert set(batch) == set(stock[0]) | {"codes", "masked_sizes"}
        assert set(batch["net_input"]) == set(stock[0]["net_input"]) | {"has_padding"}
        assert_codes_by_position(batch, codes, pad, block=63)
        assert batch["codes"]["weights"].gt(0).any(dim=1).all()
        masked_tokens += len(batch["codes"]["weights"])
    deviation = (0.15 * 0.85 / content_tokens) ** 0.5
    assert masked_tokens / content_tokens == pytest.approx(0.15, abs=4 * deviation)
    (line,) = [record.getMessage() for record in caplog.records if "masks are drawn" in record.getMessage()]
    assert f"{split}.codes covers {coverage} of the positions (seed {seed})" in line
    assert f"each with probability {0.15 / coverage:.4g}, so a share of 0.15" in line


@pytest.mark.parametrize(
    "flags",
    [
        ("--sample-break-mode", "complete"),
        ("--sample-break-mode", "eos", "--tokens-per-sample", "512"),
        ("--shorten-method", "random_crop", "--tokens-per-sample", "20", "--random-token-prob", "0.5"),
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_every_way_of_cutting_keeps_masks_on_coded_tokens(covered_data, flags):
    found = batches(training_config(covered_data, *flags), "valid")
    rows = [row for batch in found for row in batch["codes"]["weights"].gt(0).any(dim=1)]
    assert len(rows) > 200
    assert all(rows)


def test_masking_all_that_is_covered_is_the_same_every_epoch(covered_data):
    cfg = training_config(covered_data, "--mask-prob", VALID[0])
    epochs = []
    for epoch in (1, 2):
        found = batches(cfg, "valid", epoch=epoch)
        epochs.append(
            {int(i): row.tolist() for batch in found for i, row in zip(batch["id"], batch["target"], strict=True)}
        )
    trimmed = [{i: [t for t in row if t != PAD] for i, row in targets.items()} for targets in epochs]
    assert trimmed[0] == trimmed[1]
    store = CodeStore(covered_data / "valid.codes")
    assert sum(map(len, trimmed[0].values())) == int((np.diff(store.rows(0, len(store)).indptr) > 0).sum())


@pytest.mark.slow
def test_folders_take_turns_with_their_own_codes_and_coverage(pipeline, covered_data, tmp_path):
    for name in ("dict.txt", "sentencepiece.bpe.model"):
        shutil.copy(pipeline.data_bin / name, tmp_path)
    for suffix in ("idx", "bin"):
        shutil.copy(pipeline.data_bin / f"valid.{suffix}", tmp_path / f"train.{suffix}")
    shutil.copytree(covered_data / "valid.codes", tmp_path / "train.codes")
    cfg = training_config(f"{pipeline.data_bin}:{tmp_path}", "--sample-break-mode", "none")
    task = tasks.setup_task(cfg.task)
    sizes = []
    for epoch, folder in ((1, pipeline.data_bin), (2, tmp_path), (3, pipeline.data_bin), (4, tmp_path)):
        task.load_dataset("train", epoch=epoch)
        store = CodeStore(folder / "train.codes")
        codes = store.rows(0, len(store))
        found = batches(cfg, "train", epoch=epoch, task=task)
        for batch in found:
            assert_codes_by_position(batch, codes, task.source_dictionary.pad(), block=63)
        coded = torch.cat([batch["codes"]["weights"].gt(0).any(dim=1) for batch in found])
        assert bool(coded.all())
        assert int(coded.sum()) > 400
        sizes.append(len(task.dataset("train")))
    assert sizes[0] == sizes[2] > sizes[1] == sizes[3]


def test_pickled_dataset_masks_as_the_original(covered_data):
    task = tasks.setup_task(training_config(covered_data, "--include-target-tokens").task)
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    dataset.set_epoch(3)
    copy = pickle.loads(pickle.dumps(dataset))
    one, other = (each.collater([each[index] for index in (5, 2, 9)]) for each in (dataset, copy))
    assert torch.equal(one["net_input"]["src_tokens"], other["net_input"]["src_tokens"])
    assert torch.equal(one["target"], other["target"])
    assert torch.equal(one["net_input"]["target_tokens"], one["target"])
    assert torch.equal(one["codes"]["atoms"], other["codes"]["atoms"])
    assert one["target"].ne(PAD).sum() > 5


@pytest.mark.parametrize(
    ("flags", "option"),
    [
        (("--mask-whole-words",), "--mask-whole-words"),
        (("--mask-multiple-length", 3), "--mask-multiple-length above 1"),
        (("--mask-stdev", 1.0), "--mask-stdev above 0"),
        (("--skip-masking",), "--skip-masking"),
    ],
)
def test_masks_that_do_not_fall_on_single_positions_are_refused(covered_data, flags, option):
    task = tasks.setup_task(training_config(covered_data, *flags).task)
    with pytest.raises(ValueError, match=rf"{option} needs codes of all positions, but .*valid\.codes covers 0\.3 of"):
        task.load_dataset("valid")


def test_more_masks_than_covered_tokens_are_refused(covered_data):
    task = tasks.setup_task(training_config(covered_data, "--mask-prob", 0.35).task)
    task.load_dataset("train")  # 0.4 is enough
    with pytest.raises(ValueError, match=r"masking 0\.35 of the positions is more") as error:
        task.load_dataset("valid")
    store = re.escape(str(covered_data / "valid.codes"))
    assert re.fullmatch(
        rf"masking 0\.35 of the positions is more than the 0\.3 that {store} covers; run `mlsm encode --coverage` with "
        r"at least 0\.35, or pass a smaller --mask-prob \(in validation: --valid-mask-prob\)",
        str(error.value),
    )


def test_validation_may_mask_less_than_training(covered_data):
    flags = ("--mask-prob", 0.35, "--valid-mask-prob", 0.1)
    found = batches(training_config(covered_data, *flags), "valid")
    expected = batches(training_config(covered_data, "--mask-prob", 0.1), "valid")
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one["target"], other["target"])
        assert torch.equal(one["codes"]["weights"], other["codes"]["weights"])


def test_store_that_does_not_say_what_it_covers_is_refused(covered_data, tmp_path):
    folder = shutil.copytree(covered_data, tmp_path / "data-bin")
    meta = folder / "valid.codes" / "meta.json"
    meta.write_text(re.sub(r'"coverage_seed": \d+', '"coverage_seed": null', meta.read_text()))
    task = tasks.setup_task(training_config(folder).task)
    with pytest.raises(ValueError, match=r"gives the coverage 0\.3 but no coverage_seed"):
        task.load_dataset("valid")
