"""The mean of checkpoints: its weights, what else is in it, and what is refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mlsm_plugin import hub
from mlsm_plugin.core.text.vocabulary_record import vocabulary_record
from mlsm_plugin.fairseq_plugin.compat.checkpoint_averaging import average_checkpoints, last_checkpoints
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import read_state, updates_of, weights_in
from tests.tiny_models import MASKED_LM, POSITIONS, TinyData, positions, save_untrained

SIZES = positions(POSITIONS)


def changed(path: Path, **values: Any) -> Path:
    """Change what a checkpoint holds."""
    state = torch.load(path, weights_only=True)
    torch.save({**state, **values}, path)
    return path


def seen(updates: int) -> dict[str, Any]:
    run = {"criterion_name": "none", "optimizer_name": "none", "lr_scheduler_state": {}, "num_updates": updates}
    return {"optimizer_history": [run]}


@pytest.fixture(scope="module")
def run(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with three checkpoints, of 10, 20 and 30 updates."""
    folder = tmp_path_factory.mktemp("averaging") / "run"
    for number in (1, 2, 3):
        last = save_untrained(tiny.data_bin, folder, *SIZES, seed=number, **MASKED_LM)
        state = {"task_state": {**vocabulary_record(folder), "of": number}, "last_optimizer_state": {"step": number}}
        changed(last.rename(folder / f"checkpoint_1_{number}0.pt"), **state, **seen(10 * number))
    return folder


@pytest.fixture
def three(run: Path, tmp_path: Path) -> list[Path]:
    """Copies of the three, with what lies beside them."""
    return sorted(shutil.copytree(run, tmp_path / "run").glob("*.pt"))


def test_weights_are_means_and_all_else_is_that_of_the_last(three: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "run" / "averaged.pt"
    average_checkpoints(three, output)
    own = [weights_in(read_state(path)) for path in three]
    state = torch.load(output, weights_only=True)
    assert list(state["model"]) == list(own[-1])
    assert max(float((own[0][name] - own[1][name]).abs().max()) for name in own[0]) > 0.01
    for name, found in state["model"].items():
        expected = torch.stack([weights[name].double() for weights in own]).mean(dim=0).float()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert state["task_state"] == {**vocabulary_record(three[-1].parent), "of": 3}
    assert state["last_optimizer_state"] is None
    assert updates_of(output) == 30
    assert state["cfg"] == torch.load(three[-1], weights_only=True)["cfg"]

    model = hub.from_pretrained(output)
    tokens = model.encode("The name is bound.")
    assert not torch.equal(model.extract_features(tokens), hub.from_pretrained(three[0]).extract_features(tokens))
    average_checkpoints([output, three[0]], output)  # the file that is written may be one of those that are read


def test_half_precision_is_averaged_in_float64_and_kept_in_float32(three: list[Path], tmp_path: Path) -> None:
    for path in three:
        weights = {name: weight.half() for name, weight in weights_in(read_state(path)).items()}
        changed(path, model={**weights, "count": torch.tensor([updates_of(path)])})
    average_checkpoints(three, tmp_path / "run" / "averaged.pt")
    own = [torch.load(path, weights_only=True)["model"] for path in three]
    found = torch.load(tmp_path / "run" / "averaged.pt", weights_only=True)["model"]
    assert found.pop("count").tolist() == [30]
    for name, mean in found.items():
        assert mean.dtype == torch.float32
        expected = torch.stack([weights[name].double() for weights in own]).mean(dim=0).float()
        torch.testing.assert_close(mean, expected, rtol=0, atol=0)


def test_the_newest_checkpoints_of_a_run_are_one_for_each_update(three: list[Path]) -> None:
    folder = three[0].parent
    for name in ("checkpoint1.pt", "checkpoint_last.pt", "checkpoint_best.pt", "averaged.pt"):
        shutil.copy(three[2], folder / name)
    shutil.copy(three[0], folder / "checkpoint_1_9.pt")
    changed(folder / "checkpoint_1_9.pt", **seen(9))
    found = last_checkpoints(folder, 3)
    assert [updates_of(path) for path in found] == [10, 20, 30]
    assert [updates_of(path) for path in last_checkpoints(folder, 4)] == [9, 10, 20, 30]
    with pytest.raises(ValueError, match="numbered checkpoints of 4 different updates, fewer than 5; --save-interval"):
        last_checkpoints(folder, 5)


def test_heads_that_were_trained_on_other_things_are_refused(tiny: TinyData, tmp_path: Path) -> None:
    first, last = (
        save_untrained(tiny.data_bin, tmp_path / name, *SIZES, "--num-atoms", 8, "--mlm-weight", 1)
        for name in ("first", "last")
    )
    output = tmp_path / "averaged.pt"
    average_checkpoints([first, last], output)  # of an older version
    for one, other in (("a", "b"), (None, "b"), ("a", None)):
        for path, over in ((first, one), (last, other)):
            changed(path, task_state={} if over is None else {"codes_over": over})
        said = f"{first} and {last} cannot be averaged: their latent heads predict codes over different dictionaries; "
        with pytest.raises(ValueError, match=f"^{re.escape(said)}pass checkpoints of one stage of one run, or a small"):
            average_checkpoints([first, last], output)
    changed(first, task_state={})
    average_checkpoints([first, last], output)
    untrained = save_untrained(tiny.data_bin, tmp_path / "untrained", *SIZES, "--num-atoms", 8)
    said = r"of only one of them, the masked-LM head .* \(--mlm-weight was 0\); pass checkpoints of one"
    for pair in ([first, untrained], [untrained, first]):
        with pytest.raises(ValueError, match=said):
            average_checkpoints(pair, output)
    average_checkpoints([untrained, shutil.copy(untrained, tmp_path / "untrained" / "again.pt")], output)


def test_a_mean_of_classifiers_has_their_labels(tiny: TinyData, tmp_path: Path) -> None:
    labels = {"first": "bad 5\ngood 7\n", "last": "bad 1\ngood 2\n", "other": "good 7\nbad 5\n"}
    for name, content in labels.items():
        path = save_untrained(tiny.data_bin, tmp_path / name, *SIZES, **MASKED_LM)
        for part in ("input0", "label"):
            (path.parent / part).mkdir()
        shutil.copy(path.parent / "dict.txt", path.parent / "input0")
        (path.parent / "label" / "dict.txt").write_text(content, encoding="utf-8")
    first, last, other = (tmp_path / name / "checkpoint_last.pt" for name in labels)
    output = tmp_path / "mean" / "averaged.pt"
    output.parent.mkdir()
    with pytest.raises(ValueError, match="cannot be averaged: their labels differ, so the same ids mean different"):
        average_checkpoints([first, other], output)
    average_checkpoints([first, last], output)
    for part in ("input0", "label"):
        assert (output.parent / part / "dict.txt").read_bytes() == (last.parent / part / "dict.txt").read_bytes()
    shutil.copytree(other.parent / "label", tmp_path / "there" / "label")
    with pytest.raises(ValueError, match=r"has another vocabulary; choose another folder"):
        average_checkpoints([first, last], tmp_path / "there" / "averaged.pt")


def test_what_does_not_belong_together_is_refused(three: list[Path], tiny: TinyData, tmp_path: Path) -> None:
    first, _, last = three
    output = tmp_path / "out" / "averaged.pt"
    output.parent.mkdir()

    def refused(*paths: Path, where: Path = output) -> str:
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            average_checkpoints(paths, where)
        assert "\n" not in str(error.value)
        assert list(output.parent.glob("*.pt")) == []
        return str(error.value)

    def other(name: str, *flags: object, **options: Any) -> Path:
        return save_untrained(tiny.data_bin, tmp_path / name, *SIZES, *flags, **(options or MASKED_LM))

    assert "averaging needs two or more checkpoints, each of them once" in refused(last)
    assert "averaging needs two or more checkpoints, each of them once" in refused(first, last, last)
    assert "checkpoint_1_2.pt does not exist; " in refused(first, last.parent / "checkpoint_1_2.pt")
    wide = other("wide", "--encoder-ffn-embed-dim", 128)
    assert f"{first} and {wide} cannot be averaged: their architectures differ" in refused(first, wide)
    assert "their architectures differ" in refused(first, other("relu", "--activation-fn", "relu"))
    headless = shutil.copy(last, tmp_path / "run" / "headless.pt")
    weights = weights_in(read_state(last))
    changed(Path(headless), model={name: weight for name, weight in weights.items() if "lm_head.bias" not in name})
    assert "the weight encoder.lm_head.bias is missing in one of them" in refused(Path(headless), last)
    bad = Path(shutil.copy(last, tmp_path / "run" / "bad.pt"))
    changed(bad, model={name: weight * float("nan") for name, weight in weights.items()})
    assert "is not finite; leave out the checkpoint whose training has diverged" in refused(first, bad)
    renamed = Path(shutil.copy(last, tmp_path / "run" / "renamed.pt"))
    changed(renamed, task_state={"vocabulary": "another"})
    assert "their vocabularies differ" in refused(first, renamed)

    moved = shutil.copytree(tmp_path / "run", tmp_path / "moved")
    lines = (moved / "dict.txt").read_text(encoding="utf-8").splitlines()
    (moved / "dict.txt").write_text("\n".join([*lines[1:], lines[0]]) + "\n", encoding="utf-8")
    assert "their vocabularies differ" in refused(first, moved / last.name)
    shutil.copy(moved / "dict.txt", output.parent)
    assert "beside" in refused(first, last)


def test_runs_that_began_with_other_weights_have_no_mean(tiny: TinyData, tmp_path: Path) -> None:
    first, other = (
        save_untrained(tiny.data_bin, tmp_path / str(seed), *SIZES, "--seed", seed, **MASKED_LM) for seed in (1, 2)
    )
    said = r"they began with different weights \(those of --seed 1; those of --seed 2\), so their mean"
    with pytest.raises(ValueError, match=said):
        average_checkpoints([first, other], tmp_path / "mean.pt")
    start = ("--finetune-from-model", tiny.model)
    first, other = (
        save_untrained(tiny.data_bin, tmp_path / f"tuned-{seed}", *SIZES, *start, "--seed", seed, **MASKED_LM)
        for seed in (1, 2)
    )
    average_checkpoints([first, other], tmp_path / "mean.pt")
