"""The tokens that atoms raise: those whose probability grows where the model moves towards predicting the atom."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch import nn

from mlsm_plugin.core.files.hf_files import LATENT_HEAD
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.huggingface.latent_semantic_model import LatentSemanticModel
from mlsm_plugin.huggingface.pretraining_model import head_of
from mlsm_plugin.reports.adapted_texts import summarize_adaptation
from mlsm_plugin.reports.coded_datasets import summarize_split
from mlsm_plugin.reports.latent_report import AtomSummary
from mlsm_plugin.reports.raised_tokens import OFTEN, CountedBlocks, set_raised_tokens, set_raised_tokens_of_folder
from tests.adapted_student import ATOMS, adapted_student
from tests.tiny_models import save_untrained


def test_the_gradient_of_an_atom_raises_these_tokens() -> None:
    """A small step up the gradient of the log-probability of an atom, averaged over states of uniform predictions."""
    torch.manual_seed(0)
    latent, tokens = nn.Linear(8, 5), nn.Linear(8, 30)
    symbols = [f"w{number}" for number in range(30)]
    counts = np.full(30, OFTEN)
    counts[7] = OFTEN - 1
    summaries = [AtomSummary(atom, 0.5, 0.5) for atom in range(5)]
    set_raised_tokens(summaries, latent.weight.detach(), tokens, symbols, counts)
    nn.init.zeros_(latent.bias)
    for atom, summary in enumerate(summaries):
        state = torch.zeros(8, requires_grad=True)
        latent(state).log_softmax(dim=0)[atom].backward()
        assert state.grad is not None
        change = (tokens(state + 1e-3 * state.grad) - tokens(state)).detach().numpy()
        order = [symbols[token] for token in np.argsort(-change) if token != 7]
        assert (summary.raised, summary.lowered) == (order[:5], order[::-1][:5])


def test_few_tokens_and_blocks_are_counted() -> None:
    blocks = [(np.array([0, 1, 1]), csr_matrix([[0.0], [1.0], [0.5]])), (np.array([2]), csr_matrix([[1.0]]))]
    counted = CountedBlocks(blocks, 4)
    assert [ids.tolist() for ids, _ in counted] == [[0, 1, 1], [2]]
    assert counted.counts.tolist() == [0, 2, 1, 0]
    summaries = [AtomSummary(0, 0.5, 0.5)]
    set_raised_tokens(summaries, torch.randn(1, 3), nn.Linear(3, 6), ["a", "b", "c", "d"], counted.counts)
    assert sorted(summaries[0].raised) == sorted(summaries[0].lowered) == ["b", "c"]


def test_an_adaptation_has_those_of_its_heads(
    tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path], tmp_path: Path
) -> None:
    output = adapted_student(tmp_path_factory, english_text[0])
    summaries, _ = summarize_adaptation(output, "train", max_tokens=10**9)
    model = LatentSemanticModel.from_pretrained(output / "model").eval()
    symbols = HuggingFaceTokenizer(output / "model").tokens_by_id()
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    rows = model.latent_head.weight.detach()
    effects = head_of(model).project(rows - rows.mean(dim=0)).detach()
    effects = effects - head_of(model).project(torch.zeros_like(rows)).detach()
    for atom, summary in enumerate(summaries):
        values = [float(effects[atom, numbers[symbol]]) for symbol in summary.raised]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert values[-1] > max(float(effects[atom, numbers[symbol]]) for symbol in summary.lowered)
        assert "[CLS]" not in summary.raised
    bare = [AtomSummary(atom, 0.5, 0.5) for atom in range(ATOMS + 1)]
    set_raised_tokens_of_folder(bare, output / "model", symbols, np.ones(len(symbols)))  # of another dictionary
    set_raised_tokens_of_folder(bare[:ATOMS], tmp_path, symbols, np.ones(len(symbols)))  # without a latent head
    assert not any(summary.raised for summary in bare)
    assert (output / "model" / LATENT_HEAD).is_file()


@pytest.mark.parametrize(("mlm_weight", "number"), [(1.0, 5), (0.0, 0)])
def test_a_run_of_fairseq_has_those_of_its_heads(mlm_weight: float, number: int, coded: Path, tmp_path: Path) -> None:
    data = coded / "data-bin"
    run = save_untrained(data, tmp_path / "run", "--mlm-weight", mlm_weight).parent
    summaries, _ = summarize_split(data, "train", data, max_tokens=500, run=run)
    assert {len(summary.raised) for summary in summaries} == {number}
    without, _ = summarize_split(data, "train", data, max_tokens=500)
    assert not any(summary.raised for summary in without)
