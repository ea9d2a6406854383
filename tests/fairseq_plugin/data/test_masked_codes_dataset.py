from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from fairseq.data import ListDataset, data_utils
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.code_store_writer import CodeStoreWriter
from mlsm_plugin.fairseq_plugin.data.token_datasets import NO_POSITION, MaskedCodesDataset

PAD = 1
N_ATOMS = 30
N_TOKENS = 60


def make_store(directory):
    """A store of three shards, and its codes as a dense array (n_tokens, n_atoms)."""
    rng = np.random.default_rng(5)
    codes = sp.random(N_TOKENS, N_ATOMS, density=0.1, format="csr", random_state=rng, dtype=np.float64)
    writer = CodeStoreWriter(directory, {"n_atoms": N_ATOMS}, [0, 10, 45, N_TOKENS])
    for index, (start, stop) in enumerate([(0, 10), (10, 45), (45, N_TOKENS)]):
        writer.write_shard(index, codes[start:stop])
    writer.finish()
    total = np.maximum(codes.sum(axis=1), 1e-30)
    return CodeStore(directory), (codes.toarray() / total).astype(np.float16)


def dense_rows(codes):
    """(n, n_atoms) from atoms and weights padded with -1 and 0."""
    rows = np.zeros((len(codes["atoms"]), N_ATOMS), dtype=np.float16)
    for row, atoms, weights in zip(rows, codes["atoms"].numpy(), codes["weights"].numpy(), strict=True):
        row[atoms[atoms >= 0]] = weights[atoms >= 0]
        assert not weights[atoms < 0].any()
    return rows


def test_rows_are_the_codes_of_the_masked_tokens_in_the_order_of_the_padded_batch(tmp_path):
    store, dense = make_store(tmp_path / "codes")
    dense = np.vstack([dense, np.zeros(N_ATOMS, np.float16)])  # row -1: a token without position

    @settings(max_examples=100, deadline=None)
    @given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 10**6))
    def check(lengths, seed):
        rng = np.random.default_rng(seed)
        positions = [torch.from_numpy(rng.integers(NO_POSITION, N_TOKENS, length)) for length in lengths]
        targets = [torch.from_numpy(np.where(rng.random(length) < 0.4, 7, PAD)) for length in lengths]
        dataset = MaskedCodesDataset(
            ListDataset(positions, np.array(lengths)), ListDataset(targets, np.array(lengths)), store, PAD
        )
        codes = dataset.collater([dataset[index] for index in range(len(dataset))])
        assert (codes["atoms"].dtype, codes["weights"].dtype) == (torch.int32, torch.float16)
        assert codes["atoms"].shape == codes["weights"].shape

        masked = data_utils.collate_tokens(targets, PAD).ne(PAD)
        padded = data_utils.collate_tokens(positions, -100)
        assert len(codes["atoms"]) == masked.sum()
        np.testing.assert_array_equal(dense_rows(codes), dense[padded[masked].numpy()])

    check()


def test_a_batch_without_masked_tokens_has_no_rows(tmp_path):
    store, _ = make_store(tmp_path / "codes")
    positions, targets = [torch.arange(4), torch.arange(3)], [torch.full((4,), PAD), torch.full((3,), PAD)]
    dataset = MaskedCodesDataset(ListDataset(positions, [4, 3]), ListDataset(targets, [4, 3]), store, PAD)
    codes = dataset.collater([dataset[0], dataset[1]])
    assert codes["atoms"].shape == codes["weights"].shape == (0, 0)


def test_only_the_masked_rows_are_looked_up(tmp_path):
    store, _ = make_store(tmp_path / "codes")
    targets = ListDataset([torch.tensor([PAD, 9, PAD, 9])], [4])
    dataset = MaskedCodesDataset(ListDataset([torch.tensor([NO_POSITION, 50, 51, 7])], [4]), targets, store, PAD)
    assert dataset[0].tolist() == [50, 7]


def test_the_epoch_reaches_positions_and_targets(tmp_path):
    class Recorder(ListDataset):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

    store, _ = make_store(tmp_path / "codes")
    positions, targets = Recorder([torch.arange(3)], [3]), Recorder([torch.arange(3)], [3])
    MaskedCodesDataset(positions, targets, store, PAD).set_epoch(4)
    assert (positions.epoch, targets.epoch) == (4, 4)
