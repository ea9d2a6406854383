"""Imported models of NPM (Min et al., 2022), compared with their published method in its slowest form.

The oracle knows neither this package nor fairseq: Hugging Face's model in float64, its tokenizer, and loops. ``<mask>``
is doubled (for single tokens: not), the last hidden states at its places are the queries, the last hidden states of the
corpus the keys, a score is their inner product divided by the square root of the width, and by 5 for a closed set.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from mlsm_plugin import hub
from mlsm_plugin.retrieval import PhraseDatastore
from mlsm_plugin.retrieval.phrase_filling import PhraseFiller
from mlsm_plugin.retrieval.settings import FillingSettings
from mlsm_plugin.retrieval.zero_shot import RetrievalClassifier
from tests.conftest import mlsm
from tests.hub.modern_models import POSITIONS
from tests.published_models import as_published, make_roberta
from tests.tiny_models import TinyData

TEXT = "If the <mask> is bound, it is a name."
VERBALIZER = {"first": ["the name", "name"], "second": ["value", "a value"]}
LONGEST = 3
Key = tuple[int, int]


class Published:
    """The slow oracle for the corpus ``lines``; each is a sequence of its own."""

    def __init__(self, folder: Path, lines: list[str], *, single: bool) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model, self.single = AutoModel.from_pretrained(folder).double().eval(), single
        self.ids = [self.tokenizer(line)["input_ids"] for line in lines]
        self.keys = {
            (line, place): hidden
            for line, ids in enumerate(self.ids)
            for place, hidden in enumerate(self._hidden(ids))
            if 0 < place < len(ids) - 1
        }

    def _hidden(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([ids])).last_hidden_state[0]

    def scores(self, text: str) -> list[dict[Key, float]]:
        """The scores of all tokens as the start of the phrase and, unless it is a single token, as its end."""
        mask = self.tokenizer.mask_token
        # RoBERTa's mask takes the space before it, which transformers 5 forgets for a vocab.json
        masks = mask if self.single else mask + mask
        ids = self.tokenizer(text.replace(f" {mask}", masks))["input_ids"]
        places = [place for place, token in enumerate(ids) if token == self.tokenizer.mask_token_id]
        assert len(places) == (1 if self.single else 2)
        hidden = self._hidden(ids)
        width = hidden.size(1)
        return [
            {where: float(key @ hidden[place]) / math.sqrt(width) for where, key in self.keys.items()}
            for place in places
        ]

    def phrases(self, text: str) -> dict[str, float]:
        """For each phrase of the corpus p(start) + p(end), summed over its occurrences."""
        parts = [self._softmax(scores) for scores in self.scores(text)]
        found: dict[str, float] = {}
        for line, first in self.keys:
            for length in range(1, 2 if self.single else LONGEST + 1):
                last = first + length - 1
                if (line, last) in self.keys:
                    phrase = self.tokenizer.decode(self.ids[line][first : last + 1]).strip()
                    score = sum(part[line, end] for part, end in zip(parts, (first, last), strict=False))
                    found[phrase] = found.get(phrase, 0.0) + score
        return found

    def labels(self, text: str) -> list[float]:
        """The probability of each label of VERBALIZER, whose words are the candidates."""
        occurrences: dict[str, list[tuple[Key, Key]]] = {}
        for label, words in VERBALIZER.items():
            for word in words:
                wanted = self.tokenizer(" " + word, add_special_tokens=False)["input_ids"]
                for line, ids in enumerate(self.ids):
                    for first in range(len(ids)):
                        if ids[first : first + len(wanted)] == wanted:
                            both = (line, first), (line, first + len(wanted) - 1)
                            occurrences.setdefault(label, []).append(both)
        queries = self.scores(text)
        queries = queries * 2 if self.single else queries
        totals = dict.fromkeys(VERBALIZER, 0.0)
        for number, scores in enumerate(queries):
            weights = {
                label: sum(math.exp(scores[both[number]] / 5) for both in found) for label, found in occurrences.items()
            }
            for label in totals:
                totals[label] += weights[label] / sum(weights.values()) / 2
        return list(totals.values())

    @staticmethod
    def _softmax(scores: dict[Key, float]) -> dict[Key, float]:
        total = sum(map(math.exp, scores.values()))
        return {where: math.exp(score) / total for where, score in scores.items()}


Both = tuple[Published, PhraseFiller, Path]


@pytest.fixture(scope="module", params=["phrase", "single"])
def both(request: Any, tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """The oracle, our side of the same model and corpus, and the folder with ``model``, ``store`` and ``npm``."""
    root = tmp_path_factory.mktemp(request.param)
    make_roberta("roberta", tiny.text, root / "library")
    npm = as_published(root / "library", root / "npm")
    wanted = (line for line in tiny.text.read_text().splitlines() if "name" in line or "value" in line)
    tokenizer = AutoTokenizer.from_pretrained(npm)
    lines = list(itertools.islice((line for line in wanted if len(tokenizer(line)["input_ids"]) <= POSITIONS), 12))
    (root / "corpus.txt").write_text("\n".join(lines) + "\n")
    texts = ("--text", root / "corpus.txt", "--npm", request.param)
    mlsm("convert", npm, root / "model", *texts)
    texts = ("--train", root / "corpus.txt", "--valid", root / "corpus.txt")
    mlsm("binarize", "--tokenizer", root / "model", *texts, "--output", root / "data", "--workers", 1)
    options = ("--dtype", "float32", "--sample-break-mode", "eos", "--tokens-per-sample", POSITIONS)
    mlsm("npm", "datastore", root / "data", "--checkpoint", root / "model", "--output", root / "store", *options)
    store = PhraseDatastore(root / "store")
    settings = FillingSettings(k=len(store), max_length=LONGEST, any_pieces=True)
    filler = PhraseFiller(hub.from_pretrained(root / "model"), store, settings)
    return Published(npm, lines, single=request.param == "single"), filler, root


def test_phrases_are_those_of_the_published_method(both: Both) -> None:
    oracle, filler, _ = both
    assert len(filler.datastore) == len(oracle.keys) > 100
    expected = oracle.phrases(TEXT)
    (found,) = filler.fill(TEXT, topk=20)
    assert [candidate.score for candidate in found] == pytest.approx(sorted(expected.values())[:-21:-1], rel=1e-4)
    assert [expected[candidate.phrase] for candidate in found] == pytest.approx([one.score for one in found], rel=1e-4)
    assert found[0].score > 1.5 * found[-1].score


def test_labels_are_those_of_the_published_method(both: Both) -> None:
    oracle, filler, _ = both
    expected = oracle.labels(TEXT)
    assert RetrievalClassifier(filler, VERBALIZER).probabilities(TEXT).tolist() == pytest.approx(expected, rel=1e-4)
    assert min(expected) > 0.02


def test_commands_give_the_same(both: Both, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    oracle, filler, root = both
    where = ("--checkpoint", root / "model", "--datastore", root / "store")
    capsys.readouterr()
    options = ("--neighbors", len(filler.datastore), "--max-length", LONGEST, "--any-pieces", "--topk", 1)
    mlsm("npm", "fill", TEXT, *where, *options)
    score, phrase = capsys.readouterr().out.splitlines()[2].split(maxsplit=1)
    expected = oracle.phrases(TEXT)
    assert float(score) == pytest.approx(max(expected.values()), abs=1e-4)
    assert expected[phrase] == pytest.approx(max(expected.values()))
    (tmp_path / "words.txt").write_text("".join(f"{label}\t{', '.join(own)}\n" for label, own in VERBALIZER.items()))
    (tmp_path / "texts.tsv").write_text("If the name is bound\n")
    texts = ("--verbalizer", tmp_path / "words.txt", "--input", tmp_path / "texts.tsv", "--output", tmp_path / "out")
    mlsm("npm", "classify", *where, "--template", "{} , it is a <mask>.", *texts)
    label, share, _ = (tmp_path / "out").read_text().split("\t")
    labels = dict(zip(VERBALIZER, oracle.labels("If the name is bound , it is a <mask>."), strict=True))
    assert labels[label] == max(labels.values()) == pytest.approx(float(share), abs=1e-4)
