"""``mlsm convert``: what it says when it is done, and the training command that it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from mlsm_plugin.core.files.hf_files import import_transformers
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import read_state, updates_of, weights_in
from tests.conftest import PLUGIN, failing_mlsm, fairseq_train, mlsm
from tests.tiny_models import TinyData

import_transformers()  # before the helper imports it
from tests.hub.modern_models import POSITIONS, make_stock  # noqa: E402
from tests.published_models import make_roberta  # noqa: E402

Capture = pytest.CaptureFixture[str]
BRIEFLY = ("--max-update", 2, "--disable-validation", "--batch-size", 4)


def test_command_says_what_it_proved_and_what_follows(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    make_stock("modernbert", tiny.text, tmp_path / "library")
    capsys.readouterr()
    mlsm("convert", f"hf:{tmp_path}/library", tmp_path / "model", "--text", tiny.text, "--lines", 20)
    printed = capsys.readouterr().out
    found = re.search(r"ids are the same on 20 lines, logits of ([\d,]+) tokens differ by at most (\S+)", printed)
    assert found is not None
    assert int(found.group(1).replace(",", "")) > 200
    assert 0 <= float(found.group(2)) <= 1e-4
    assert f"`mlsm binarize --tokenizer {tmp_path}/model`" in printed
    assert training_words(printed)[:3] == ["DATA_BIN", "--user-dir", str(PLUGIN)]
    assert training_words(printed)[-2:] == ["--finetune-from-model", f"{tmp_path}/model/model.pt"]


def test_what_cannot_be_compared_is_refused(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    words = ("convert", f"hf:{tmp_path}/nowhere", tmp_path / "model", "--text")
    assert "--lines must be positive, got 0" in failing_mlsm(capsys, *words, tiny.text, "--lines", 0)
    assert "is not a folder of a Hugging Face model" in failing_mlsm(capsys, *words, tiny.text)
    (tmp_path / "empty.txt").write_text("\n")
    assert "empty.txt holds no text" in failing_mlsm(capsys, *words, tmp_path / "empty.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def training_words(printed: str) -> list[str]:
    """The arguments of the command that `mlsm convert` printed; `mlsm binarize` prints another one after it."""
    command = next(line for line in printed.splitlines() if line.startswith("fairseq-train"))
    return shlex.split(command)[1:]


def import_published(kind: str, tiny: TinyData, root: Path, *options: object) -> None:
    """Write ``library``, ``model`` and its dataset ``data`` in ``root``."""
    if kind in ("roberta", "bert"):
        make_roberta(kind, tiny.text, root / "library")
    else:
        make_stock(kind, tiny.text, root / "library")
    mlsm("convert", root / "library", root / "model", "--text", tiny.text, "--lines", 5, *options)
    texts = ("--train", tiny.text, "--valid", tiny.text)
    mlsm("binarize", "--tokenizer", root / "model", *texts, "--output", root / "data", "--workers", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [("modernbert", ()), ("deberta-v2", ()), ("roberta", ()), ("bert", ()), ("roberta", ("--npm", "phrase"))],
)
def test_printed_command_trains_the_imported_weights(
    kind: str, options: tuple[str, ...], tiny: TinyData, tmp_path: Path, capsys: Capture
) -> None:
    import_published(kind, tiny, tmp_path, *options)
    words = training_words(capsys.readouterr().out)
    rate, flags = 1e-5, (*BRIEFLY, *(("--group-size", 4) if options else ()))
    fairseq_train(tmp_path / "data", tmp_path / "run", *words[3:], *flags, "--lr", rate, task="masked_lm")
    last = tmp_path / "run" / "checkpoint_last.pt"
    assert updates_of(last) == 2
    before, after = (weights_in(read_state(path)) for path in (tmp_path / "model" / "model.pt", last))
    assert before.keys() == after.keys()
    changes = [float((before[name] - after[name]).abs().max()) for name in before]
    assert 0 < max(changes) <= 2.1 * rate  # Adam changes no weight by more than its rate
    spreads = [values.std() for values in after.values() if len(values) > 1]
    assert torch.stack(spreads).min() > 0.1  # random ones would be far away


@pytest.mark.slow
def test_an_imported_model_serves_every_objective(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    import_published("bert", tiny, tmp_path)
    words, data, model = training_words(capsys.readouterr().out)[7:], tmp_path / "data", tmp_path / "model"
    assert words[:2] == ["--arch", "mlsm_roberta"]
    blocks = ("--tokens-per-sample", POSITIONS)
    options = ("--atoms", 16, "--tokens", 1000, "--iterations", 3, "--batch-size", 100, *blocks)
    mlsm("dictionary", data, "--auxiliary", model, "--layer", 3, "--output", tmp_path / "dict", *options)
    mlsm("encode", data, "--auxiliary", model, "--dictionary", tmp_path / "dict", *blocks)
    of_task = {"masked_latent_semantic": (), "taco": (), "nonparametric_masked_lm": ("--group-size", 4)}
    first = weights_in(read_state(model / "model.pt"))
    for task, more in of_task.items():
        more = (*more, *blocks, "--max-positions", POSITIONS, "--lr", 1e-5)
        fairseq_train(data, tmp_path / task, *words, *BRIEFLY, *more, task=task)
        last = weights_in(read_state(tmp_path / task / "checkpoint_last.pt"))
        assert last.keys() - first.keys() == {name for name in last if "atom_projection" in name}
        changes = [float((first[name] - last[name][: len(first[name])]).abs().max()) for name in first]
        assert 0 < max(changes) <= 2.1e-5
    mlsm("npm", "datastore", data, "--checkpoint", model, "--output", tmp_path / "store", *blocks)
    mlsm("npm", "fill", "If the <mask> is bound", "--checkpoint", model, "--datastore", tmp_path / "store")
    assert "mask 1" in capsys.readouterr().out
