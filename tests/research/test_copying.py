"""What copies of a masked token are worth to a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.evaluation.masked_batches import MaskedBatch
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings
from tests.conftest import REPOSITORY
from tests.documented import bash_blocks, run_in
from tests.script_module import load_script, runner_of
from tests.tiny_models import TinyData

copying = load_script("research/copying.py")
from comparison.masked_lm_loss import evaluate_masked_lm  # noqa: E402

MASK, FREQUENT = 99, 5  # ids below 5 are frequent, 0 is padding


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    return runner_of(copying, monkeypatch)


@given(st.lists(st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=8, max_size=8), min_size=1, max_size=4))
def test_copies_of_repeated_tokens_are_hidden_or_as_many_others(blocks: list[list[tuple[int, bool]]]) -> None:
    targets = torch.tensor([[token for token, _ in block] for block in blocks])
    masked = torch.tensor([[hidden for _, hidden in block] for block in blocks])
    batch = MaskedBatch(targets.masked_fill(masked, MASK), masked, targets, torch.ones_like(masked))
    frequent = torch.arange(100) < FREQUENT
    repeated, copies, others = copying.hide_copies(batch, frequent, torch.Generator().manual_seed(1))
    expected_repeated, expected_copies = [], []
    for block in blocks:
        visible = [token for token, hidden in block if not hidden and token >= FREQUENT]
        wanted = [token for token, hidden in block if hidden]
        expected_repeated += [token in visible for token in wanted]
        expected_copies.append([not hidden and token >= FREQUENT and token in wanted for token, hidden in block])
    assert repeated.tolist() == expected_repeated
    assert copies.tolist() == expected_copies
    assert not (others & (copies | masked | frequent[targets])).any()
    left = (~masked & ~copies & ~frequent[targets]).sum(dim=1)
    assert others.sum(dim=1).tolist() == torch.minimum(left, copies.sum(dim=1)).tolist()


class Copier:
    """A model that is sure of a token that it sees elsewhere in the block, and has 10 bits for the others."""

    def losses(self, tokens: torch.Tensor, masked: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        samples, places = masked.nonzero(as_tuple=True)
        seen = (tokens[samples] == targets[samples, places][:, None]).any(dim=1)
        return torch.where(seen, 0.0, 10.0).double() * math.log(2)


def test_a_model_that_copies_needs_the_copies(tiny: TinyData) -> None:
    reader = BlockReader(tiny.data_bin, "valid", BlockSettings(24, "none"))
    count, losses = copying.losses_of_repeated(Copier(), reader, seed=1)
    assert count > 10
    assert losses == pytest.approx([0, 10, 0])


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_the_documented_command_prints_a_table(tiny: TinyData, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "research" / "comparison.md").read_text(encoding="utf-8")
    (command,) = (block for block in bash_blocks(page) if "copying.py" in block)
    runs = tmp_path / "comparison" / "runs"
    runs.mkdir(parents=True)
    for link, target in (
        (tmp_path / "research", REPOSITORY / "research"),
        (runs.parent / "data-bin", tiny.data_bin),
        (runs / "mlm-1", tiny.model.parent),
        (runs / "mlm-2", tiny.model.parent),
    ):
        link.symlink_to(target)
    lines = run_in(tmp_path, f"{command.strip()} --tokens-per-sample 24").splitlines()  # the tiny model takes no more
    assert [line.split("|")[1].strip() for line in lines] == ["model", "---", "mlm-1", "mlm-2"]


def test_the_table_has_the_loss_of_repeated_tokens(
    tiny: TinyData, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny.data_bin, tiny.model, "--tokens-per-sample", 24, "--device", "cpu") == 0
    cells = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    assert cells[0] == tiny.model.parent.name
    assert len(cells) == 6
    known = evaluate_masked_lm(tiny.model, tiny.data_bin, "valid", BlockSettings(24, "none"), seed=1, device="cpu")
    assert float(cells[2]) == pytest.approx(known.repeated_bits, abs=0.006)
    assert float(cells[5]) == pytest.approx(float(cells[3]) - float(cells[4]), abs=0.011)


def test_what_cannot_be_measured_is_one_line(tiny: TinyData, run: Callable[..., int]) -> None:
    for words in (
        (tiny.data_bin, "absent.pt"),
        ("absent", tiny.model),
        (tiny.data_bin, tiny.model, "--split", "none"),
        (tiny.data_bin, tiny.model),
    ):
        with pytest.raises(SystemExit, match=r"^error: "):
            run(*words, "--device", "cpu")
