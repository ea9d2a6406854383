"""Scores of Hugging Face's models: those that the BabyLM evaluation pipeline computes, by its own definition."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from mlsm_plugin import hub
from mlsm_plugin.evaluation.minimal_pairs import EWOK, TIE, compare_pairs, pseudo_log_likelihoods, read_pairs
from mlsm_plugin.evaluation.pair_models import LibraryModel, PairModel, is_library_model, open_pair_model
from tests.conftest import mlsm
from tests.tiny_hf_models import TOKENIZERS, add_nothing_around, make_model, make_model_with_own_tokens
from tests.tiny_models import TinyData

KINDS = ("bert", "roberta", "modernbert", "deberta-v2", "xlm-roberta")
CONTEXTS = ("The name is bound to an object.", "A value is missing.", "It is not called")
TARGETS = ("The object has a name.", "the target is an attribute", "Names are")


def ewok_lines() -> list[dict[str, str]]:
    pairs = itertools.product(itertools.permutations(CONTEXTS, 2), TARGETS)
    return [
        {"Context1": right, "Context2": wrong, "Target1": target, "Target2": "Never read.", "Domain": f"d{index % 2}"}
        for index, ((right, wrong), target) in enumerate(pairs)
    ]


def write(path: Path, lines: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


class Oracle:
    """One mask at a time, with the library's tokenizer and model; the scored tokens are found by their characters."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForMaskedLM.from_pretrained(folder).eval().double()

    @torch.no_grad()
    def score(self, sentence: str, completion: str) -> tuple[float, int]:
        """The score, and the place of the first scored token."""
        encoded = self.tokenizer(sentence, return_offsets_mapping=True)
        ids, begin, total = encoded["input_ids"], len(sentence) - len(completion), 0.0
        places = [place for place, (_, end) in enumerate(encoded["offset_mapping"]) if end > begin]
        assert places
        for place in places:
            masked = torch.tensor([ids])
            masked[0, place] = self.tokenizer.mask_token_id
            logits = self.model(input_ids=masked, attention_mask=torch.ones_like(masked)).logits[0, place]
            total += float(logits.log_softmax(dim=0)[ids[place]])
        return total, places[0]


def spread(folder: Path) -> None:
    """Make the predictions of a model with random weights differ between tokens."""
    model = AutoModelForMaskedLM.from_pretrained(folder)
    torch.manual_seed(5)
    for values in model.parameters():
        if values.dim() > 1:
            torch.nn.init.normal_(values, std=0.4)
    model.save_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_decided_as_by_the_pipeline(tiny: TinyData, tmp_path: Path, kind: str) -> None:
    folder = make_model(kind, tiny.text, tmp_path / "model", kind=AutoModelForMaskedLM)
    spread(folder)
    oracle, model = Oracle(folder), open_pair_model(folder)
    assert isinstance(model, LibraryModel)
    lines = ewok_lines()
    pairs = read_pairs(write(tmp_path / "ewok.jsonl", lines))
    sentences = [(f"{line[key]} {line['Target1']}", f" {line['Target1']}") for line in lines for key in EWOK[2:]]
    sentences += [(text, text) for text in (*CONTEXTS, *TARGETS)]
    expected, starts = zip(*(oracle.score(*own) for own in sentences), strict=True)
    found = pseudo_log_likelihoods(model, [model.encode(text) for text, _ in sentences], starts)
    assert found == pytest.approx(list(expected), rel=1e-4)
    differences = [expected[2 * index] - expected[2 * index + 1] for index in range(len(lines))]
    assert min(map(abs, differences)) > 2 * TIE
    assert {value > 0 for value in differences} == {True, False}
    for batch_tokens in (8192, 40):
        verdicts = compare_pairs(model, pairs, batch_tokens=batch_tokens)
        assert verdicts == [1 if value > 0 else -1 for value in differences]


def test_a_checkpoint_and_its_export_give_the_same_scores(tiny: TinyData, tmp_path: Path) -> None:
    mlsm("convert", tiny.model, tmp_path / "exported", "--text", tiny.text, "--lines", 2)
    texts = [*CONTEXTS, *TARGETS]
    own, exported = open_pair_model(tiny.model), open_pair_model(tmp_path / "exported")
    assert (type(own), type(exported)) == (PairModel, LibraryModel)
    found = [pseudo_log_likelihoods(model, [model.encode(text) for text in texts]) for model in (own, exported)]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert own.positions == exported.positions == 32
    pairs = read_pairs(write(tmp_path / "ewok.jsonl", ewok_lines()))
    assert (
        compare_pairs(own, pairs)
        == compare_pairs(exported, pairs)
        == compare_pairs(hub.from_pretrained(tiny.model), pairs)
    )
    assert own.unknown(["the \u4e30"]).unknown == exported.unknown(["the \u4e30"]).unknown == 1


@pytest.mark.parametrize("around", [True, False])
def test_sentences_are_read_as_the_tokenizer_reads_them(tiny: TinyData, tmp_path: Path, around: bool) -> None:
    folder = make_model_with_own_tokens("bert", tiny.text, tmp_path / "model")
    spread(folder)
    if not around:
        add_nothing_around(folder)
    oracle, model = Oracle(folder), open_pair_model(folder)
    for text in ("the name [E1] is bound", CONTEXTS[0]):
        assert model.encode(text).tolist() == oracle.tokenizer(text)["input_ids"]
    lines = ewok_lines()[:4]
    sentences = [(f"{line[key]} {line['Target1']}", f" {line['Target1']}") for line in lines for key in EWOK[2:]]
    expected, starts = zip(*(oracle.score(*own) for own in sentences), strict=True)
    found = pseudo_log_likelihoods(model, [model.encode(text) for text, _ in sentences], starts)
    assert found == pytest.approx(list(expected), rel=1e-4)
    whole, start = oracle.score(CONTEXTS[0], CONTEXTS[0])
    assert start == int(around)
    assert pseudo_log_likelihoods(model, [model.encode(CONTEXTS[0])]) == pytest.approx([whole], rel=1e-4)
    verdicts = compare_pairs(model, read_pairs(write(tmp_path / "ewok.jsonl", lines)))
    differences = [expected[2 * index] - expected[2 * index + 1] for index in range(len(lines))]
    assert verdicts == [0 if abs(value) < TIE else 1 if value > 0 else -1 for value in differences]


def test_a_context_that_ends_within_a_token_is_refused(
    tiny: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def across_words() -> Any:
        tokenizer, trainer, special = byte_level()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return tokenizer, trainer, special

    byte_level = TOKENIZERS["byte_level"]
    monkeypatch.setitem(TOKENIZERS, "byte_level", across_words)
    model = open_pair_model(make_model("roberta", tiny.text, tmp_path / "model", kind=AutoModelForMaskedLM))
    line = {"Context1": "the name of", "Context2": "a name of", "Target1": "the object"}
    with pytest.raises(ValueError, match=r"ewok.jsonl, line 1: the tokenizer has a token across the end of the contex"):
        compare_pairs(model, read_pairs(write(tmp_path / "ewok.jsonl", [line])))


def test_what_is_no_model_is_one_line(tiny: TinyData, tmp_path: Path) -> None:
    headless = make_model("bert", tiny.text, tmp_path / "headless", kind=AutoModel)
    with pytest.raises(ValueError, match="saved without a masked-LM head"):
        open_pair_model(headless)
    maskless: Any = make_model("bert", tiny.text, tmp_path / "maskless", kind=AutoModelForMaskedLM)
    tokenizer = AutoTokenizer.from_pretrained(maskless)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(maskless)
    with pytest.raises(ValueError, match="maskless has no mask token; use the tokenizer of a masked LM"):
        open_pair_model(maskless)
    (headless / "model.safetensors").unlink()
    record = tmp_path / "chck_1M.json"
    record.write_text("{}", encoding="utf-8")
    for name, message in (
        (headless, "has no weights"),
        (tmp_path / "none", "none does not exist"),
        (record, r"chck_1M.json is not a model; .*, as in chck_\*/"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            is_library_model(name)
