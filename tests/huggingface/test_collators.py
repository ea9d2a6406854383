"""The collators: masks, codes and pairs, whatever the batch and the worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from mlsm_plugin.core.text.hf_tokenizer import piece_classes
from mlsm_plugin.huggingface import (
    LatentSemanticModel,
    MaskedLmModel,
    PretrainingSequences,
    SpanGroups,
    SpanGroupsCollator,
    TokenContrastiveModel,
    TokenSequences,
)
from mlsm_plugin.huggingface.collators import (
    IGNORED,
    Contrast,
    LatentSemanticCollator,
    MaskedLmCollator,
    Masking,
    TokenContrastiveCollator,
)
from tests.core.masking.slow_boundaries import slow_boundaries
from tests.huggingface.tiny_corpus import (
    ATOMS,
    CLS,
    MASK,
    PAD,
    SEP,
    UNK,
    WORDS,
    make_tokenizer,
    random_ids,
    tiny_bert,
    write_codes,
)


def items(dataset: PretrainingSequences, *indices: int) -> list[Any]:
    return [dataset[index] for index in indices]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.mark.parametrize("ids", [[PAD, PAD, CLS, 7, 8, SEP], [CLS, 7, PAD, 8, SEP]])
def test_padding_stands_after_the_text_only(tokenizer: Any, ids: list[int]) -> None:
    whole = [CLS, 7, 8, SEP, PAD, PAD][: len(ids)]
    batch = MaskedLmCollator(tokenizer)(items(PretrainingSequences([whole]), 0))
    assert batch["attention_mask"].tolist() == [[int(number != PAD) for number in whole]]
    with pytest.raises(ValueError, match=rf"sequence 0 has padding \(the id {PAD}\) before or between other ids"):
        MaskedLmCollator(tokenizer)(items(PretrainingSequences([ids]), 0))
    groups = SpanGroups([ids] * 2, 2)
    with pytest.raises(ValueError, match="group 0 has padding"):
        SpanGroupsCollator(tokenizer, max_length=8)([groups[0]])


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> tuple[PretrainingSequences, Any]:
    sequences = TokenSequences(random_ids())
    folder = tmp_path_factory.mktemp("coded") / "codes"
    codes = write_codes(sequences, folder)
    return PretrainingSequences(sequences, folder), codes


def test_padding_among_the_ids_is_not_attended_to(tokenizer: Any) -> None:
    dataset = PretrainingSequences(np.array([[CLS, 7, SEP, PAD, PAD], [CLS, 7, 8, 9, SEP], [PAD] * 5]))
    batch = MaskedLmCollator(tokenizer)(items(dataset, 0, 1, 2))
    # attention to nothing may not be finite
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert batch["labels"][2].tolist() == [IGNORED] * 5


def test_a_batch_of_empty_sequences_has_a_loss_of_0(tokenizer: Any, tmp_path: Path) -> None:
    ids = TokenSequences([[], [CLS, 7, 8, SEP], []])
    write_codes(ids, tmp_path / "codes")
    plain, coded = PretrainingSequences(ids), PretrainingSequences(ids, tmp_path / "codes")
    for model, dataset, collator in (
        (MaskedLmModel.of(tiny_bert()), plain, MaskedLmCollator(tokenizer)),
        (TokenContrastiveModel.of(tiny_bert()), plain, TokenContrastiveCollator(tokenizer)),
        (LatentSemanticModel.of(tiny_bert(), num_atoms=ATOMS), coded, LatentSemanticCollator(tokenizer)),
    ):
        batch = collator(items(dataset, 0, 2))
        assert batch["input_ids"].tolist() == [[PAD], [PAD]]
        assert batch["attention_mask"].tolist() == [[1], [1]]  # attention to nothing may not be finite
        loss = model.train()(**batch)["loss"]
        loss.backward()
        assert loss.item() == 0
        assert all(bool(values.grad.isfinite().all()) for values in model.parameters() if values.grad is not None)
    assert MaskedLmCollator(tokenizer)(items(plain, 0, 1))["attention_mask"].tolist() == [[1, 0, 0, 0], [1] * 4]


def test_special_and_unknown_tokens_are_never_masked(tokenizer: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    text = [np.where(rng.random(len(ids)) < 0.4, UNK, ids) for ids in random_ids(60)]
    text = [np.array([CLS, *ids[1:-1], SEP]) for ids in text] + [np.array([CLS, UNK, UNK, SEP])]
    sequences = TokenSequences(text)
    write_codes(sequences, tmp_path / "codes", empty=0)  # unknown tokens may have codes
    dataset = PretrainingSequences(sequences, tmp_path / "codes")
    masking = Masking(mask_prob=0.6, random_token_prob=0.6)
    for collator in (
        MaskedLmCollator(tokenizer, masking),
        MaskedLmCollator(tokenizer, Masking(mask_prob=0.6, random_token_prob=0.6, whole_words=True)),
        LatentSemanticCollator(tokenizer, masking),
        TokenContrastiveCollator(tokenizer, masking),
    ):
        batch = collator(items(dataset, *range(61)))
        original = torch.full_like(batch["input_ids"], PAD)
        for row, ids in enumerate(text):
            original[row, : len(ids)] = torch.from_numpy(ids)
        masked = batch["labels"] != IGNORED
        assert int(masked.sum()) > 100
        assert not bool(torch.isin(original[masked], torch.tensor([PAD, UNK, CLS, SEP, MASK])).any())
        assert torch.equal(batch["input_ids"] == UNK, original == UNK)  # nor drawn for another token
        assert not bool(masked[60].any())
        assert collator.masked_counts(batch) == (int(masked.sum()), sum(len(ids) - 2 for ids in text))
        if "codes" in batch:
            assert len(batch["codes"]["atoms"]) == int(masked.sum())
        if "pairs" in batch:
            known = ~torch.isin(original, torch.tensor([PAD, UNK, CLS, SEP]))
            assert torch.equal(batch["pairs"]["anchors"], known)
            for name in ("positive", "negative"):
                drawn = batch["pairs"][name][batch["pairs"][name] >= 0]
                assert bool(known.flatten()[drawn].all())


def test_special_tokens_of_the_own_list_are_neither_masked_nor_drawn() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["w3", "w4"]})
    tokenizer.add_tokens([AddedToken("w5", special=True)], special_tokens=True)
    own = tokenizer.convert_tokens_to_ids(["w3", "w4", "w5"])
    data = PretrainingSequences(random_ids(60))
    masking = Masking(mask_prob=0.9, random_token_prob=0.9, leave_unmasked_prob=0.1)
    for collator in (MaskedLmCollator(tokenizer, masking), TokenContrastiveCollator(tokenizer, masking)):
        batch = collator([data[index] for index in range(len(data))])
        masked = batch["labels"] != IGNORED
        assert masked.sum() > 200
        originals = torch.where(masked, batch["labels"], batch["input_ids"])
        assert torch.isin(originals, torch.tensor(own)).sum() > 10
        assert not torch.isin(batch["labels"], torch.tensor(own)).any()
        assert not torch.isin(batch["input_ids"][masked], torch.tensor(own)).any()
        special = torch.tensor([PAD, CLS, SEP, *own])
        assert batch["content"].tolist() == (~torch.isin(originals, special)).sum(dim=1).tolist()


def test_a_tokenizer_may_have_no_unknown_token() -> None:
    dataset = PretrainingSequences(random_ids())
    both = [
        MaskedLmCollator(make_tokenizer(**options), Masking(random_token_prob=0))(items(dataset, *range(40)))
        for options in ({"unk_token": None}, {})
    ]
    assert torch.equal(both[0]["input_ids"], both[1]["input_ids"])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**40), st.integers(0, 5), st.lists(st.integers(0, 39), min_size=1, max_size=6), st.booleans())
def test_masks_depend_on_seed_epoch_and_index_only(seed: int, epoch: int, rows: list[int], whole: bool) -> None:
    dataset = PretrainingSequences(random_ids())
    dataset.set_epoch(epoch)
    collator = MaskedLmCollator(make_tokenizer(), Masking(mask_prob=0.3, seed=seed, whole_words=whole))
    together = collator(items(dataset, *rows))
    for place, row in enumerate(rows):
        alone, length = collator(items(dataset, row)), len(dataset[row].input_ids)
        assert together["content"][place] == alone.pop("content")[0] == length - 2
        for name, value in alone.items():
            assert torch.equal(together[name][place, :length], value[0])
        assert together["attention_mask"][place].sum() == length
        assert bool((together["input_ids"][place, length:] == PAD).all())
        masked = alone["labels"][0] != IGNORED
        original = torch.from_numpy(dataset[row].input_ids)
        assert torch.equal(alone["labels"][0][masked], original[masked])
        assert torch.equal(alone["input_ids"][0][~masked], original[~masked])


def test_the_shares_are_those_of_bert(tokenizer: Any) -> None:
    text = np.concatenate([[CLS], np.random.default_rng(0).integers(5, 5 + WORDS, size=200_000), [SEP]])
    batch = MaskedLmCollator(tokenizer)(items(PretrainingSequences([text]), 0))
    labels, ids = batch["labels"][0], batch["input_ids"][0]
    masked = labels != IGNORED
    assert float(masked.float().mean()) == pytest.approx(0.15, abs=0.003)
    fate = ids[masked]
    assert float((fate == MASK).float().mean()) == pytest.approx(0.8, abs=0.01)
    assert float((fate == labels[masked]).float().mean()) == pytest.approx(0.1 + 0.1 / WORDS, abs=0.01)
    assert not bool(torch.isin(fate, torch.tensor([PAD, CLS, SEP])).any())


def test_whole_words_are_masked_or_left(tokenizer: Any) -> None:
    dataset = PretrainingSequences(random_ids(200, seed=3))
    batch = MaskedLmCollator(tokenizer, Masking(mask_prob=0.4, whole_words=True))(items(dataset, *range(200)))
    masked, pieces = (batch["labels"] != IGNORED).numpy(), piece_classes(tokenizer)
    words = 0
    for row in range(200):
        ids = dataset[row].input_ids
        begins, _ = slow_boundaries(ids, pieces)  # the tokens of long words are words
        for place in range(2, len(ids) - 1):
            if not begins[place]:
                assert masked[row, place] == masked[row, place - 1]
                words += 1
    assert words > 100
    assert 0.3 < masked.sum() / sum(len(dataset[row].input_ids) - 2 for row in range(200)) < 0.5


def test_text_without_spaces_is_masked_by_its_pieces(tokenizer: Any) -> None:
    """It is one word, which was masked as a whole in 15 of 100 sequences."""
    lines = np.random.default_rng(1).integers(
        5 + WORDS // 2, 5 + WORDS, size=(100, 80)
    )  # pieces that go on with a word
    batch = MaskedLmCollator(tokenizer, Masking(whole_words=True))(items(PretrainingSequences(lines), *range(100)))
    masked = (batch["labels"] != IGNORED).sum(dim=1)
    assert int(masked.min()) > 0
    assert int(masked.max()) < 40
    assert int(masked.sum()) / 8000 == pytest.approx(0.15, abs=0.015)


def test_ids_without_a_token_are_never_drawn() -> None:
    """A vocab.txt that has a line twice gives such a tokenizer."""
    missing, last = (6, 7, 40), 4 + WORDS
    tokenizer = make_tokenizer(without=missing)
    assert len(tokenizer) < last + 1
    text = PretrainingSequences([[CLS, *[last] * 3000, SEP]])
    masking = Masking(mask_prob=0.5, leave_unmasked_prob=0, random_token_prob=1)
    batch = MaskedLmCollator(tokenizer, masking)(items(text, 0))
    drawn = set(batch["input_ids"].unique().tolist())
    assert drawn == {CLS, SEP, *range(5, last + 1)} - {*missing}
    pieces = piece_classes(tokenizer)
    assert len(pieces.special) == last + 1
    assert not pieces.begins_word[last]
    MaskedLmCollator(tokenizer, Masking(whole_words=True))(items(text, 0))


def test_codes_are_those_of_the_masked_tokens(tokenizer: Any, coded: tuple[PretrainingSequences, Any]) -> None:
    dataset, codes = coded
    batch = LatentSemanticCollator(tokenizer, Masking(mask_prob=0.4))(items(dataset, 7, 0, 30, 7))
    atoms, weights = batch["codes"]["atoms"], batch["codes"]["weights"]
    places = (batch["labels"] != IGNORED).nonzero()
    assert len(atoms) == len(places) > 5
    for row, (sequence, offset) in enumerate(places.tolist()):
        found = np.zeros(ATOMS)
        kept = atoms[row] >= 0
        found[atoms[row][kept].numpy()] = weights[row][kept].float().numpy()
        position = int(dataset.sequences.starts[[7, 0, 30, 7][sequence]]) + offset
        np.testing.assert_allclose(found, codes[position].toarray()[0], atol=1e-3)
        assert found.sum() > 0.99  # a token without a code is not masked


def test_sequences_with_other_codes_are_not_looked_up(
    tokenizer: Any, coded: tuple[PretrainingSequences, Any], tmp_path: Path
) -> None:
    other = TokenSequences(random_ids(seed=1))
    write_codes(other, tmp_path / "codes")
    rows = [coded[0][3], PretrainingSequences(other, tmp_path / "codes")[4]]  # as torch's ConcatDataset gives them
    with pytest.raises(ValueError, match="mixes sequences of several datasets"):
        LatentSemanticCollator(tokenizer)(rows)


def test_masks_are_drawn_among_the_covered_positions(tokenizer: Any, tmp_path: Path) -> None:
    text = [np.array([CLS, *([7] * 4000), SEP])]
    sequences = TokenSequences(text)
    write_codes(sequences, tmp_path / "codes", empty=0, coverage=0.5, coverage_seed=4)
    dataset = PretrainingSequences(sequences, tmp_path / "codes")
    batch = LatentSemanticCollator(tokenizer, Masking(mask_prob=0.3))(items(dataset, 0))
    masked = (batch["labels"][0] != IGNORED).numpy()
    assert masked.mean() == pytest.approx(0.3, abs=0.03)
    assert dataset.codes is not None
    assert dataset.codes.covered(np.flatnonzero(masked)).all()
    for masking, message in ((Masking(mask_prob=0.6), "0.5 of the positions"), (Masking(whole_words=True), "coverage")):
        with pytest.raises(ValueError, match=message):
            LatentSemanticCollator(tokenizer, masking)(items(dataset, 0))


@pytest.mark.parametrize("anchors", ["all", "masked", "unmasked"])
def test_pairs_are_drawn_from_the_content(tokenizer: Any, anchors: str) -> None:
    dataset = PretrainingSequences(random_ids())
    collator = TokenContrastiveCollator(tokenizer, contrast=Contrast(positive_window=3, negatives=4, anchors=anchors))
    batch, pairs = collator(items(dataset, 1, 2, 3)), collator(items(dataset, 1, 2, 3))["pairs"]
    assert all(torch.equal(batch["pairs"][name], pairs[name]) for name in pairs)
    masked = batch["labels"] != IGNORED
    content = torch.zeros_like(masked)
    for row, index in enumerate((1, 2, 3)):
        content[row, 1 : len(dataset[index].input_ids) - 1] = True
    wanted = {"all": content, "masked": content & masked, "unmasked": content & ~masked}[anchors]
    assert torch.equal(pairs["anchors"], wanted)
    width = content.size(1)
    for row, place in content.nonzero().tolist():
        others = pairs["negative"][row, place]
        assert bool((others // width != row).all())
        assert bool(content.flatten()[others].all())
        positive = int(pairs["positive"][row, place])
        assert positive // width == row or positive == -1
    dataset.set_epoch(1)
    assert not torch.equal(collator(items(dataset, 1, 2, 3))["pairs"]["negative"], pairs["negative"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Masking(mask_prob=0), "mask_prob must be above 0 and at most 1"),
        (lambda: Masking(leave_unmasked_prob=0.6, random_token_prob=0.6), "together above 1"),
        (lambda: Masking(seed=-1), "seed must be at least 0 and below 2\\^63"),
        (lambda: Contrast(positive_window=1), "positive_window must be at least 2"),
        (lambda: Contrast(negatives=0), "negatives must be at least 1"),
        (lambda: Contrast(negatives=2.5), "negatives must be a whole number, got 2.5"),
        (lambda: Contrast(anchors="some"), "anchors must be all, masked or unmasked"),
        (lambda: MaskedLmCollator(make_tokenizer(mask_token=None)), "the tokenizer has no mask token"),
        (
            lambda: MaskedLmCollator(make_tokenizer())(items(PretrainingSequences([[2, 900, 3]]), 0)),
            "sequence 0 has the id 900, but the tokenizer only has ids below 65",
        ),
        (
            lambda: LatentSemanticCollator(make_tokenizer())(items(PretrainingSequences([[2, 9, 3]]), 0)),
            "these sequences have no codes",
        ),
        *(
            (
                lambda kind=kind: kind(make_tokenizer())([{"input_ids": [2, 9, 3]}]),
                r"the collator got a dict, not a PretrainingSequence: wrap the ids in PretrainingSequences\(ids\)",
            )
            for kind in (MaskedLmCollator, LatentSemanticCollator, TokenContrastiveCollator)
        ),
    ],
)
def test_what_cannot_be_is_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
