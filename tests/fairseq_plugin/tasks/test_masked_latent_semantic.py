"""The task's batches: those of stock masked_lm, plus the codes of the masked tokens."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from fairseq import tasks
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset
from fairseq.models import BaseFairseqModel
from torch.utils.data import DataLoader

from mlsm_plugin.core.masking.word_boundaries import LONGEST_WORD
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.code_store_writer import CodeStoreWriter
from mlsm_plugin.fairseq_plugin.compat.binarized_files import combined_splits
from mlsm_plugin.fairseq_plugin.data.token_datasets import TokenPositionsDataset
from mlsm_plugin.fairseq_plugin.tasks import masked_latent_semantic
from tests.conftest import mlsm
from tests.fairseq_plugin.stock_batches import known_masks, original_of, samples_of, stock_batches
from tests.tiny_run import batches, training_config

UNK = 3


def assert_same_samples(ours, stock, compared=lambda text: True):
    """Compare with stock samples without masks of special and unknown tokens; ``compared`` chooses by their text."""
    found, expected = samples_of(ours), samples_of(stock)
    number = 0
    assert found.keys() == expected.keys()
    for index, sample in found.items():
        stock_sample = expected[index]
        assert torch.equal(original_of(sample), original_of(stock_sample))
        if compared(original_of(stock_sample)):
            assert all(torch.equal(*pair) for pair in zip(sample, known_masks(stock_sample), strict=True))
            number += 1
    assert number > 20
    shapes = [sorted(batch["target"].shape for batch in part) for part in (ours, stock)]
    assert shapes[0] == shapes[1]  # as little padding
    for batch in ours:
        assert set(batch) == set(stock[0]) | {"codes", "masked_sizes"}
        assert set(batch["net_input"]) == set(stock[0]["net_input"]) | {"has_padding"}


def dense(codes, n_atoms):
    """(n, n_atoms) from atoms and weights padded with -1 and 0."""
    rows = np.zeros((len(codes["atoms"]), n_atoms), dtype=np.float32)
    for row, atoms, weights in zip(rows, codes["atoms"].numpy(), codes["weights"].numpy(), strict=True):
        row[atoms[atoms >= 0]] = weights[atoms >= 0]
    return rows


def assert_codes_by_position(batch, codes, pad, block):
    """Of samples that are consecutive blocks (break mode none), compare codes with rows counted by hand."""
    masked = batch["target"].ne(pad)
    sample, place = masked.nonzero(as_tuple=True)
    positions = batch["id"][sample] * block + place - 1
    assert not bool((place == 0).any())  # BOS
    expected = codes[positions.numpy()].toarray()
    np.testing.assert_array_equal(dense(batch["codes"], codes.shape[1]), expected)


NO_LONG_SENTENCE = ("--tokens-per-sample", "140")  # fairseq's own masked_lm does not cut what is longer
FLAGS = [
    NO_LONG_SENTENCE,
    ("--sample-break-mode", "none", "--mask-prob", "0.4"),
    ("--sample-break-mode", "eos", "--tokens-per-sample", "512"),
    ("--sample-break-mode", "complete_doc", *NO_LONG_SENTENCE),
    ("--shorten-method", "random_crop", "--tokens-per-sample", "20", "--seed", "7", "--sample-break-mode", "none"),
    ("--shorten-method", "truncate", *NO_LONG_SENTENCE, "--shorten-data-split-list", "train"),
    ("--leave-unmasked-prob", "0", "--random-token-prob", "0.5", "--freq-weighted-replacement", *NO_LONG_SENTENCE),
    ("--mask-multiple-length", "3", "--mask-stdev", "1.0", *NO_LONG_SENTENCE),
]


@pytest.mark.slow
@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
@pytest.mark.parametrize("epoch", [1, 3])
def test_tokens_masks_and_targets_are_those_of_masked_lm(pipeline, flags, epoch):
    ours = batches(training_config(pipeline.data_bin, *flags), "valid", epoch=epoch)
    assert_same_samples(ours, stock_batches(pipeline.data_bin, *flags, split="valid", epoch=epoch))


def test_positions_are_counted_while_the_split_is_mapped(pipeline, monkeypatch):
    """fairseq unmaps the sizes of a split as soon as nothing refers to the split."""
    mapped = []

    class WatchedIndex(MMapIndexedDataset.Index):
        def __del__(self):
            mapped.remove(id(self.sizes))
            super().__del__()

        def __init__(self, path):
            super().__init__(path)
            mapped.append(id(self.sizes))

    class WatchedPositions(TokenPositionsDataset):
        def __init__(self, sizes):
            assert id(sizes) in mapped
            super().__init__(sizes)

    monkeypatch.setattr(MMapIndexedDataset, "Index", WatchedIndex)
    monkeypatch.setattr(masked_latent_semantic, "TokenPositionsDataset", WatchedPositions)
    task = tasks.setup_task(training_config(pipeline.data_bin).task)
    task.load_dataset("valid")
    assert len(mapped) == 1  # the one that the batches read


@pytest.mark.slow
def test_whole_words_are_masked_with_the_tokenizer_of_the_data(pipeline):
    flags = ("--mask-whole-words", *NO_LONG_SENTENCE)
    ours = batches(training_config(pipeline.data_bin, *flags), "valid")
    model = pipeline.data_bin / "sentencepiece.bpe.model"
    stock = stock_batches(pipeline.data_bin, *flags, split="valid", sentencepiece_model=model)
    dictionary = Dictionary.load(str(pipeline.data_bin / "dict.txt"))
    pad, continued = dictionary.pad(), 0
    symbols = enumerate(dictionary.symbols)
    begins = torch.tensor([index < dictionary.nspecial or symbol.startswith("\u2581") for index, symbol in symbols])

    def without_long_words(text):
        ends = torch.cat([begins[text].nonzero()[:, 0], torch.tensor([len(text)])])
        return int(ends.diff().max()) <= LONGEST_WORD

    assert_same_samples(ours, stock, without_long_words)
    for batch in ours:
        for tokens, target in zip(batch["net_input"]["src_tokens"], batch["target"], strict=True):
            original = torch.where(target.ne(pad), target, tokens)
            for place in range(2, len(original)) if without_long_words(original) else ():
                if not begins[original[place]] and original[place - 1] != UNK:
                    # a piece inside a word is masked if and only if the piece before it is
                    assert target[place].ne(pad) == target[place - 1].ne(pad)
                    continued += int(target[place].ne(pad))
    assert continued > 20


@pytest.mark.parametrize("flags", [(), ("--mask-whole-words",)])
def test_codes_are_those_of_the_masked_tokens(pipeline, flags):
    cfg = training_config(pipeline.data_bin, "--sample-break-mode", "none", "--mask-prob", "0.3", *flags)
    task = tasks.setup_task(cfg.task)
    store = CodeStore(pipeline.data_bin / "valid.codes")
    codes = store.rows(0, len(store))
    coded = 0
    for batch in batches(cfg, "valid", task=task):
        assert_codes_by_position(batch, codes, task.source_dictionary.pad(), block=63)
        coded += int(batch["codes"]["weights"].gt(0).any(dim=1).sum())
    assert coded > 500


def test_masks_change_with_the_epoch_and_codes_follow(pipeline):
    cfg = training_config(pipeline.data_bin, "--sample-break-mode", "none")
    task = tasks.setup_task(cfg.task)
    store = CodeStore(pipeline.data_bin / "valid.codes")
    codes = store.rows(0, len(store))
    targets = []
    for epoch in (1, 2):
        found = batches(cfg, "valid", epoch=epoch, task=task)
        for batch in found:
            assert_codes_by_position(batch, codes, task.source_dictionary.pad(), block=63)
        targets.append({int(i): row for batch in found for i, row in zip(batch["id"], batch["target"], strict=True)})
    assert targets[0].keys() == targets[1].keys()
    same = [torch.equal(targets[0][index], targets[1][index]) for index in targets[0]]
    assert sum(same) < len(same) / 4
    again = batches(cfg, "valid", epoch=1)  # another process after a restart
    assert all(torch.equal(batch["codes"]["atoms"], other["codes"]["atoms"]) for batch, other in zip(
        again, batches(cfg, "valid", epoch=1), strict=True
    ))  # fmt: skip


@pytest.mark.slow
def test_spawned_workers_give_the_same_batches(pipeline):
    cfg = training_config(pipeline.data_bin)
    task = tasks.setup_task(cfg.task)
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    dataset.set_epoch(2)
    indices = [list(range(start, start + 4)) for start in range(0, 24, 4)]
    loader = DataLoader(
        dataset, batch_sampler=indices, collate_fn=dataset.collater, num_workers=2, multiprocessing_context="spawn"
    )
    for batch, chosen in zip(loader, indices, strict=True):
        expected = dataset.collater([dataset[index] for index in chosen])
        assert torch.equal(batch["net_input"]["src_tokens"], expected["net_input"]["src_tokens"])
        assert torch.equal(batch["target"], expected["target"])
        for key in ("atoms", "weights"):
            assert torch.equal(batch["codes"][key], expected["codes"][key])
        assert len(expected["codes"]["atoms"]) > 0


def test_combined_splits_are_read_as_one_with_their_codes(pipeline, tmp_path):
    # train1 stands for a second part of the training data
    for name in ("dict.txt", "sentencepiece.bpe.model"):
        shutil.copy(pipeline.data_bin / name, tmp_path / name)
    for part, source in [("train", "valid"), ("train1", "train")]:
        for suffix in ("bin", "idx"):
            shutil.copy(pipeline.data_bin / f"{source}.{suffix}", tmp_path / f"{part}.{suffix}")
        shutil.copytree(pipeline.data_bin / f"{source}.codes", tmp_path / f"{part}.codes")
    assert combined_splits(str(tmp_path / "train")) == [str(tmp_path / "train"), str(tmp_path / "train1")]
    assert combined_splits(str(tmp_path / "none")) == [str(tmp_path / "none")]

    flags = ("--sample-break-mode", "none", "--tokens-per-sample", "256")
    cfg = training_config(tmp_path, *flags)
    task = tasks.setup_task(cfg.task)
    ours = batches(cfg, combine=True, task=task)
    assert_same_samples(ours, stock_batches(tmp_path, *flags, combine=True))
    stores = [CodeStore(tmp_path / f"{part}.codes") for part in ("train", "train1")]
    codes = sp.vstack([store.rows(0, len(store)) for store in stores], format="csr")
    seen = set()
    for batch in ours:
        assert_codes_by_position(batch, codes, task.source_dictionary.pad(), block=255)
        seen.update(batch["id"].tolist())
    assert seen == set(range(-(-codes.shape[0] // 255)))

    alone = tasks.setup_task(cfg.task)
    alone.load_dataset("train", combine=False)
    assert len(alone.dataset("train")) == -(-len(stores[0]) // 255)


@pytest.fixture
def own_data(pipeline, tmp_path):
    """A data-bin to spoil: the dictionary, the tokenizer and the validation split."""
    for path in pipeline.data_bin.iterdir():
        if path.is_file() and not path.name.startswith("train"):
            shutil.copy(path, tmp_path / path.name)
    shutil.copytree(pipeline.data_bin / "valid.codes", tmp_path / "valid.codes")
    return tmp_path


def test_codes_of_another_dataset_are_refused(own_data):
    task = tasks.setup_task(training_config(own_data).task)
    task.load_dataset("valid")
    found = bytearray((own_data / "valid.bin").read_bytes())
    found[0] ^= 1
    (own_data / "valid.bin").write_bytes(found)
    task = tasks.setup_task(training_config(own_data).task)
    with pytest.raises(ValueError, match="were made from another dataset") as error:
        task.load_dataset("valid")
    split = re.escape(str(own_data / "valid"))
    pattern = rf"the codes in {split}\.codes were made from another dataset \(SHA-256 [\da-f]{{12}}\) than "
    assert re.fullmatch(pattern + rf"{split}\.bin \([\da-f]{{12}}\); run `mlsm encode` again", str(error.value))


def test_codes_may_be_in_another_folder(pipeline, own_data, tmp_path):
    expected = batches(training_config(pipeline.data_bin), split="valid")
    codes = tmp_path / "codes"
    codes.mkdir()
    (own_data / "valid.codes").rename(codes / "valid.codes")
    found = batches(training_config(own_data, "--latent-codes", codes), split="valid")
    for batch, own in zip(expected, found, strict=True):
        for name in ("atoms", "weights"):
            assert torch.equal(own["codes"][name], batch["codes"][name])
    cfg = training_config(own_data, "--latent-codes", tmp_path / "absent")
    task = tasks.setup_task(cfg.task)
    with pytest.raises(FileNotFoundError, match=r"absent has no codes \(train\.codes, valid\.codes\); write them"):
        task.build_model(cfg.model)


@pytest.mark.parametrize("folder", [None, pytest.param("codes", marks=pytest.mark.slow)])
def test_the_line_about_a_split_without_codes_has_the_command_that_makes_them(own_data, pipeline, tmp_path, folder):
    for ending in ("bin", "idx"):
        shutil.copy(own_data / f"valid.{ending}", own_data / f"test.{ending}")
    codes = own_data / folder if folder else own_data
    codes.mkdir(exist_ok=True)
    if folder:
        (own_data / "valid.codes").rename(codes / "valid.codes")
    cfg = training_config(own_data, *(("--latent-codes", codes) if folder else ()))
    task = tasks.setup_task(cfg.task)
    task.load_dataset("valid")
    with pytest.raises(
        ValueError, match=r"test\.codes holds no meta\.json: it is not a finished code store; run"
    ) as error:
        task.load_dataset("test")  # --valid-subset valid,test
    (command,) = re.findall(r"`mlsm (encode .*)`", str(error.value))
    assert command.endswith(f"--splits test --output {codes}" if folder else "--splits test")
    command = command.replace("--auxiliary ...", f"--auxiliary {pipeline.auxiliary}")
    mlsm(*command.replace("--dictionary ...", f"--dictionary {pipeline.dictionary}").split(), "--tokens-per-sample", 64)
    task.load_dataset("test")
    assert len(task.dataset("test")) == len(task.dataset("valid"))


def test_missing_codes_are_named(own_data):
    shutil.rmtree(own_data / "valid.codes")
    cfg = training_config(own_data)
    task = tasks.setup_task(cfg.task)
    with pytest.raises(ValueError, match=r"valid\.codes holds no meta\.json: it is not a finished code store"):
        task.load_dataset("valid")
    with pytest.raises(FileNotFoundError, match=r"has no codes \(.*\); write them with `mlsm encode`"):
        task.build_model(cfg.model)


def test_number_of_atoms_is_that_of_a_training_split_with_another_name(own_data):
    for path in own_data.glob("valid.*"):
        path.rename(own_data / f"news{path.suffix}")
    cfg = training_config(own_data, "--train-subset", "news")
    task = tasks.setup_task(cfg.task)
    task.build_model(cfg.model)
    task.load_dataset("news")
    cfg = training_config(own_data)
    with pytest.raises(FileNotFoundError, match=r"has no codes \(train\.codes, valid\.codes\); write them"):
        tasks.setup_task(cfg.task).build_model(cfg.model)


def test_fewer_atoms_than_the_codes_have_are_refused(pipeline):
    stored = CodeStore(pipeline.data_bin / "valid.codes").num_atoms
    for given in (stored - 1, stored, stored + 1):
        cfg = training_config(pipeline.data_bin, "--num-atoms", given)
        task = tasks.setup_task(cfg.task)
        task.build_model(cfg.model)
        if given >= stored:
            task.load_dataset("valid")
            continue
        with pytest.raises(ValueError, match=rf"--num-atoms {given} is less than the {stored} atoms of .*valid\.codes"):
            task.load_dataset("valid")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--latent-layer", 0), "--latent-layer: only --latent-source online reads this"),
        (("--latent-lambda", 0.1), "--latent-lambda: only --latent-source online reads this"),
        (
            ("--auxiliary-checkpoint", "absent.pt", "--latent-dictionary", "absent", "--auxiliary-fp16"),
            "--auxiliary-checkpoint, --latent-dictionary, --auxiliary-fp16: only --latent-source online reads this",
        ),
        (("--latent-source", "online", "--latent-codes", "codes"), "--latent-codes: only --latent-source store reads"),
    ],
)
def test_options_that_nothing_reads_are_refused_in_training(pipeline, flags, problem):
    cfg = training_config(pipeline.data_bin, *flags, "--num-atoms", 48)
    task = tasks.setup_task(cfg.task)
    with pytest.raises(ValueError, match=f"^{problem}"):
        task.build_model(cfg.model)
    task.build_model(cfg.model, from_checkpoint=True)  # older checkpoints load


def test_codes_over_another_dictionary_are_refused_when_a_run_resumes(pipeline):
    task = tasks.setup_task(training_config(pipeline.data_bin).task)
    task.load_dataset("valid")
    saved = dict(task.state_dict())
    meta = CodeStore(pipeline.data_bin / "valid.codes").meta
    own = {"codes_over": meta["fingerprints"]["dictionary"], "codes_auxiliary": meta["fingerprints"]["auxiliary"]}
    known = {**own, "codes_layer": 2, "codes_lambda": meta["lambda"], "codes_latent_top": "all"}
    assert {name: value for name, value in saved.items() if value is not None} == known
    task.check_resumes(saved)
    task.check_resumes({})  # a run of an older version
    task.check_resumes({"codes_over": saved["codes_over"]})  # of a later one, which knew the dictionary only
    with pytest.raises(ValueError, match=r"over another dictionary \(SHA-256 .*\) than .* \(a{12}\); pass another"):
        task.check_resumes(dict.fromkeys(saved, "a" * 64))
    with pytest.raises(ValueError, match=r"over another dictionary \(SHA-256 .*\) than .* \(a{12}\); pass another"):
        task.check_resumes({"codes_over": "a" * 64})
    with pytest.raises(ValueError, match=r"^the codes are of another lambda \(.*\) than .* began with \(0.5\); pass"):
        task.check_resumes({**saved, "codes_lambda": 0.5})
    shorter = tasks.setup_task(training_config(pipeline.data_bin, "--latent-top", 2).task)
    shorter.load_dataset("valid")
    with pytest.raises(ValueError, match=r"of another latent_top \(2\) than .* \(all\)"):
        shorter.check_resumes(saved)


@pytest.mark.parametrize("change", [{"lambda": 0.5}, {"layer": 1}, {"latent_top": 3, "latent_select": "weight"}])
def test_codes_of_one_dictionary_with_other_options_are_not_mixed(pipeline, tmp_path, change):
    data = shutil.copytree(pipeline.data_bin, tmp_path / "data-bin")
    meta = CodeStore(data / "valid.codes").meta
    (data / "valid.codes" / "meta.json").write_text(json.dumps({**meta, **change, "coverage": 0.9, "coverage_seed": 1}))
    task = tasks.setup_task(training_config(data).task)
    task.load_dataset("train")
    name, value = next(iter(change.items()))
    where = f"the codes in {data}/valid.codes are of another {name} ({value}) than those in {data}/train.codes ("
    with pytest.raises(ValueError, match=re.escape(where) + r".*\); encode both with the same dictionary and options"):
        task.load_dataset("valid")
    if "latent_top" in change:  # which makes them the same
        task = tasks.setup_task(training_config(data, "--latent-top", 3).task)
        task.load_dataset("train")
        task.load_dataset("valid")


def test_no_atom_of_a_code_is_refused(pipeline):
    with pytest.raises(ValueError, match="--latent-top must be at least 1"):
        tasks.setup_task(training_config(pipeline.data_bin, "--latent-top", 0).task)


def with_empty_codes(data, folder, share):
    """The same data, of which only a ``share`` of the tokens has a code."""
    shutil.copytree(data, folder)
    for name in ("train", "valid"):
        store, codes = CodeStore(folder / f"{name}.codes"), folder / f"{name}.codes"
        rows = store.rows(0, len(store)).tolil()
        rows[np.random.default_rng(1).random(len(store)) >= share] = 0
        meta = {key: store.meta[key] for key in store.meta if key not in ("shards", "statistics")}
        shutil.rmtree(codes)
        writer = CodeStoreWriter(codes, meta, [0, len(store)])
        writer.write_shard(0, rows.tocsr())
        writer.finish()
    return folder


@pytest.mark.parametrize(
    ("share", "said"), [(0.9, None), (0.28, "warning"), pytest.param(0.05, "error", marks=pytest.mark.slow)]
)
def test_masked_tokens_without_codes_are_said(pipeline, tmp_path, caplog, share, said):
    data = with_empty_codes(pipeline.data_bin, tmp_path / "data-bin", share)
    cfg = training_config(data)
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")  # nothing reads the codes
    task.build_criterion(cfg.criterion)
    if said == "error":
        with pytest.raises(ValueError, match=r"^only 0\.0\d+ of the masked tokens of train have a code; a smaller"):
            task.load_dataset("train")
        return
    task.load_dataset("train")
    lines = [line for line in caplog.messages if "of the masked tokens of train have a code; a smaller" in line]
    assert len(lines) == (said == "warning")
    if said:
        assert float(lines[0].split()[1]) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("spoilt", ["missing", "of another dataset"])
def test_codes_of_a_later_folder_are_checked_before_the_first_update(pipeline, tmp_path, spoilt):
    second = shutil.copytree(pipeline.data_bin, tmp_path / "second")
    if spoilt == "missing":
        shutil.rmtree(second / "train.codes")
    else:
        shutil.rmtree(second / "train.codes")
        shutil.copytree(pipeline.data_bin / "valid.codes", second / "train.codes")
    task = tasks.setup_task(training_config(f"{pipeline.data_bin}:{second}", "--no-save").task)
    task.load_dataset("train")
    message = "holds no meta.json: it is not a finished" if spoilt == "missing" else "were made from another dataset"
    with pytest.raises(ValueError, match=rf"{re.escape(str(second))}/train\.codes .*{message}"):
        task.begin_epoch(1, BaseFairseqModel())
    whole = tasks.setup_task(training_config(f"{pipeline.data_bin}:{pipeline.data_bin}", "--no-save").task)
    whole.begin_epoch(1, BaseFairseqModel())
