"""Codes of sequences are those of the fairseq way, whatever holds the ids, and however the work is divided."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.process_rank import ProcessRank
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.stored_codes import covered_positions
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings
from mlsm_plugin.fairseq_plugin.coding.corpus_coding import encode_split
from mlsm_plugin.huggingface.coding import encode_sequences
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from tests.conftest import mlsm
from tests.huggingface.coded_model import LAYER, CodedModel, coded_model, files_of, settings

SPECIAL = (0, 2, 3, 4)


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> CodedModel:
    return coded_model(tmp_path_factory, english_text[0])


def encode(made: CodedModel, ids: object, output: Path, **more: object) -> dict[str, bytes]:
    options = {"coder": made.coder, "settings": settings(), **more}
    encode_sequences(ids, made.model, output=output, **options)  # type: ignore[arg-type]
    return files_of(output)


def test_an_open_model_of_another_layer_or_folder_is_refused(made: CodedModel, tmp_path: Path) -> None:
    ids = [[0, 7, 8, 2]]
    other = shutil.copytree(made.model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: values + 1 for name, values in weights.items()}, other / "model.safetensors", {"format": "pt"})
    for folder, layer in ((made.model, LAYER - 1), (other, LAYER)):
        encoder = HuggingFaceEncoder(folder, layer=layer, device="cpu")
        with pytest.raises(ValueError, match=f"the encoder gives layer {layer} of {folder}, and the settings ask for"):
            encode(made, ids, tmp_path / "codes", encoder=encoder)
    assert not (tmp_path / "codes").exists()
    encoder = HuggingFaceEncoder(made.model, layer=LAYER, device="cpu")
    assert encode(made, ids, tmp_path / "codes", encoder=encoder) == encode(made, ids, tmp_path / "same")


def test_codes_are_those_of_the_fairseq_way(made: CodedModel, tmp_path: Path) -> None:
    data = tmp_path / "data"
    texts = ("--train", made.text, "--valid", made.text)
    mlsm("binarize", "--tokenizer", f"hf:{made.model}", *texts, "--output", data, "--workers", 1)
    # one batch of sentences that are the same on both sides, so that even the last bit is the same
    blocks = BlockSettings(tokens_per_sample=70, sample_break_mode="eos")
    whole = CodingSettings(layer=LAYER, threads=1, batch_tokens=1 << 20, blocks=blocks)
    encode_split(data, "train", auxiliary=f"hf:{made.model}", coder=made.coder, settings=whole)
    theirs = CodeStore(data / "train.codes")

    reader, hf_ids = BlockReader(data, "train", blocks), HuggingFaceTokenizer(made.model).hf_ids
    pieces = [piece for index in range(len(reader)) for piece in reader.block(index) if len(piece.tokens) > 2]
    rows = [hf_ids[piece.tokens.numpy()] for piece in pieces]
    encode_sequences(
        rows, made.model, coder=made.coder, settings=whole, output=tmp_path / "own"
    )  # a sentence that was cut lacks its last [SEP] or first [CLS] on both sides
    own, sequences = CodeStore(tmp_path / "own"), TokenSequences(rows)
    compared = 0
    for number, piece in enumerate(pieces):
        first = int(sequences.starts[number])
        ours = own.rows(first, int(sequences.starts[number + 1]))
        for place, position in enumerate(piece.positions.tolist()):
            wanted = theirs.rows(position, position + 1) if position >= 0 else None
            found = ours[place]
            assert found.nnz == (0 if wanted is None else wanted.nnz)
            if wanted is not None:
                np.testing.assert_array_equal(found.indices, wanted.indices)
                np.testing.assert_array_equal(found.data, wanted.data)
                compared += found.nnz > 0
    assert compared == own.meta["coded_tokens"] == theirs.meta["coded_tokens"] > 2000
    for name in ("dictionary", "auxiliary"):
        assert own.meta["fingerprints"][name] == theirs.meta["fingerprints"][name]
    assert own.meta["fingerprints"]["split"] == sequences.fingerprint
    assert "blocks" not in own.meta


def test_every_kind_of_input_gives_the_same_store(made: CodedModel, tmp_path: Path) -> None:
    rows = [row.tolist() for row in TokenSequences(made.tokens)][:60]
    longest = max(map(len, rows))
    padded = np.array([row + [0] * (longest - len(row)) for row in rows], np.int32)
    np.save(tmp_path / "rows.npy", padded)
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"input_ids": padded.tolist(), "attention_mask": (padded > 0).tolist()})
    dataset.save_to_disk(tmp_path / "saved")
    TokenSequences.write(tmp_path / "folder", padded)
    kinds = {
        **{"list": padded.tolist(), "array": padded, "map": np.load(tmp_path / "rows.npy", mmap_mode="r")},
        **{"npy": tmp_path / "rows.npy", "dataset": dataset, "saved": tmp_path / "saved", "own": tmp_path / "folder"},
    }
    stores = {name: encode(made, ids, tmp_path / "stores" / name) for name, ids in kinds.items()}
    assert all(store == stores["list"] for store in stores.values())
    # padding has no codes, and is not attended to: the codes are those of the rows without it
    encode(made, rows, tmp_path / "ragged")
    with_padding, ragged = CodeStore(tmp_path / "stores" / "list"), CodeStore(tmp_path / "ragged")
    codes = with_padding.rows(0, with_padding.num_tokens)
    assert codes[np.flatnonzero(np.isin(padded.ravel(), SPECIAL))].nnz == 0
    kept = codes[np.flatnonzero(padded.ravel())].toarray()
    wanted = ragged.rows(0, ragged.num_tokens).toarray()
    assert ragged.meta["coded_tokens"] > 1000
    np.testing.assert_allclose(kept, wanted, atol=2e-3)


def test_codes_are_those_of_the_hidden_states(made: CodedModel, tmp_path: Path) -> None:
    """Row by row, one sequence at a time, against the library's own model."""
    import torch
    from transformers import AutoModel

    encode(made, made.tokens, tmp_path / "store")
    store, sequences = CodeStore(tmp_path / "store"), TokenSequences(made.tokens)
    model = AutoModel.from_pretrained(made.model).eval()
    for number in (0, 7, len(sequences) - 1):
        ids = sequences[number]
        with torch.no_grad():
            hidden = model(torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states[LAYER][0]
        content = ~np.isin(ids, SPECIAL)
        wanted = made.coder.encode(hidden[content], threads=1).codes.toarray()
        found = store.rows(int(sequences.starts[number]), int(sequences.starts[number + 1])).toarray()
        assert not found[~content].any()
        np.testing.assert_allclose(found[content], wanted / wanted.sum(1, keepdims=True), atol=2e-3)


def test_two_shares_write_what_one_process_writes(made: CodedModel, tmp_path: Path) -> None:
    wanted = encode(made, made.tokens, tmp_path / "one")
    output = tmp_path / "two"
    options = {"coder": made.coder, "settings": settings(), "output": output}
    first = encode_sequences(made.tokens, made.model, process=ProcessRank(1, 2), **options)  # type: ignore[arg-type]
    assert first.meta is None
    assert first.missing_shards == (first.num_shards + 1) // 2 > 1
    second = encode_sequences(made.tokens, made.model, process=ProcessRank(0, 2), **options)  # type: ignore[arg-type]
    assert second.meta is not None
    assert files_of(output) == wanted
    again = encode_sequences(made.tokens, made.model, **options)  # type: ignore[arg-type]
    assert (again.already_complete, again.coded_tokens) == (True, 0)


def test_missing_shards_are_coded_again_to_the_same_bytes(made: CodedModel, tmp_path: Path) -> None:
    wanted = encode(made, made.tokens, tmp_path / "store")
    for name in ("meta.json", "shard-00001.indptr.npy", "shard-00003.atoms.npy"):
        (tmp_path / "store" / name).unlink()
    assert encode(made, made.tokens, tmp_path / "store") == wanted


def test_coverage_and_strongest_atoms(made: CodedModel, tmp_path: Path) -> None:
    encode(made, made.tokens, tmp_path / "all")
    some = replace(settings(), coverage=0.3, coverage_seed=5, latent_top=2)
    encode(made, made.tokens, tmp_path / "some", settings=some)
    sequences, store, full = TokenSequences(made.tokens), CodeStore(tmp_path / "some"), CodeStore(tmp_path / "all")
    codes, all_codes = (found.rows(0, found.num_tokens) for found in (store, full))
    flat = np.concatenate(list(sequences))
    covered = covered_positions(np.arange(len(flat)), coverage=0.3, seed=5) & ~np.isin(flat, SPECIAL)
    assert store.meta["coded_tokens"] == covered.sum()
    filled = np.diff(all_codes.indptr) > 0
    np.testing.assert_array_equal(np.diff(codes.indptr), np.minimum(np.diff(all_codes.indptr), 2) * covered)
    assert (covered & filled).sum() > 500


def test_what_does_not_belong_together_is_refused_before_anything_is_written(made: CodedModel, tmp_path: Path) -> None:
    def refused(message: str, ids: object = made.tokens, **more: object) -> None:
        with pytest.raises(ValueError, match=message):
            encode(made, ids, tmp_path / "store", **more)
        assert not (tmp_path / "store").exists()

    refused("was learned from layer 2, not from --layer 1", settings=replace(settings(), layer=1))
    refused("sequence 0 has 71 tokens, but the model takes at most 70", [[2] * 71])
    refused("sequence 1 has the id 600, but the model has the ids 0 to 599", [[2, 9, 3], [2, 600, 3]])
    unbound = made.coder
    unbound.meta = {}
    refused("--layer 4 is out of range", coder=unbound, settings=replace(settings(), layer=4))
    other = shutil.copytree(made.model, tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text().replace('"bert"', '"gpt2"'))
    with pytest.raises(ValueError, match="dictionary was learned from another auxiliary"):
        encode_sequences(made.tokens, other, coder=made.coder, settings=settings(), output=tmp_path / "store")


def test_other_sequences_or_another_order_are_refused(made: CodedModel, tmp_path: Path) -> None:
    rows = [row.tolist() for row in TokenSequences(made.tokens)][:40]
    before = encode(made, rows, tmp_path / "store")
    for others in (rows[::-1], rows[1:], [*rows[:-1], [*rows[-1][:-2], 9, 3]]):
        with pytest.raises(ValueError, match=r"was begun with other settings: .*fingerprints.split is .* there"):
            encode(made, others, tmp_path / "store")
    assert files_of(tmp_path / "store") == before
