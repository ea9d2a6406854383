"""Nothing of a checkpoint runs, whatever command or function opens it; what must not be used is one clear line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mlsm_plugin import hub
from mlsm_plugin.cli.main import main
from mlsm_plugin.fairseq_plugin.compat import checkpoint_contents
from mlsm_plugin.fairseq_plugin.models.mlsm_roberta import MlsmRobertaModel
from tests.attacks.commands import COMMANDS, Inputs
from tests.attacks.hostile_checkpoints import ATTACKS, write_hostile
from tests.conftest import fairseq_train
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Attacked:
    """A hostile checkpoint, and the file that only its code would make."""

    checkpoint: Path
    marker: Path


OPENING = ("dictionary", "preprocess", "convert model", "evaluate pairs", "datastore", "finetune", "infill", "inspect")
# commands of the fast lane that open a good checkpoint of this kind with success
SUCCEED = ("dictionary", "convert model", "evaluate pairs", "infill")
# which of the inputs a command opens, where it is not the masked LM
OPENED = {"infill": "denoising", "datastore": "npm"}


@pytest.fixture
def attacked(inputs: Inputs, tmp_path: Path) -> Callable[[str, str], Attacked]:
    """A function that puts a hostile checkpoint in the place of one of the inputs."""

    def make(attack: str, name: str = "model") -> Attacked:
        source: Path = getattr(inputs, name)
        shutil.copytree(source.parent, tmp_path / "model")
        made = Attacked(tmp_path / "model" / source.name, tmp_path / "executed")
        write_hostile(attack, source, made.checkpoint, made.marker)
        return made

    return make


def check_command(attacked: Any, inputs: Inputs, attack: str, command: str, capsys: Capture) -> None:
    name = OPENED.get(command, "model")
    hostile: Attacked = attacked(attack, name)
    output = hostile.marker.with_name("output")
    folder = hostile.checkpoint.parent
    own = replace(inputs, **{name: hostile.checkpoint}, **({"data_bin": folder} if command == "inspect" else {}))
    capsys.readouterr()
    status = main([str(word) for word in COMMANDS[command](own, output)])
    assert not hostile.marker.exists()
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    wanted = ATTACKS[attack].error
    if wanted is None:
        assert status == (0 if command in SUCCEED else status), errors
        return
    (line,) = [line for line in errors.splitlines() if line.startswith("mlsm: error: ")]
    assert status == 1
    assert wanted in line
    assert str(hostile.checkpoint) in line
    assert not output.exists() or command == "preprocess"  # it has binarized the text by then


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_runs_in_the_hub(attacked: Any, attack: str) -> None:
    hostile = attacked(attack)
    if ATTACKS[attack].error is None:
        hub.from_pretrained(hostile.checkpoint)
    else:
        with pytest.raises(ValueError, match=ATTACKS[attack].error) as caught:
            hub.from_pretrained(hostile.checkpoint)
        assert "\n" not in str(caught.value)
    assert not hostile.marker.exists()


@pytest.mark.parametrize("command", OPENING)
def test_nothing_runs_in_a_command(attacked: Any, inputs: Inputs, command: str, capsys: Capture) -> None:
    check_command(attacked, inputs, "fconv", command, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("command", OPENING)
@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_runs_in_any_command(attacked: Any, inputs: Inputs, attack: str, command: str, capsys: Capture) -> None:
    check_command(attacked, inputs, attack, command, capsys)


def test_nothing_runs_in_the_class_of_a_model(attacked: Any) -> None:
    hostile = attacked("fconv")
    with pytest.raises(ValueError, match=ATTACKS["fconv"].error):
        MlsmRobertaModel.from_pretrained(hostile.checkpoint.parent, hostile.checkpoint.name)
    assert not hostile.marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--restore-file", "--finetune-from-model"])
@pytest.mark.parametrize("attack", ["object", "interpolation", "meter", "weight that is text", "optimizer", "plugin"])
def test_nothing_runs_in_fairseq_train(attacked: Any, tiny: TinyData, attack: str, flag: str, tmp_path: Path) -> None:
    hostile = attacked(attack)
    words = (flag, hostile.checkpoint, "--max-update", 1, "--max-positions", 32, "--tokens-per-sample", 24)
    reset = ("--reset-optimizer", "--reset-dataloader", "--reset-meters") if flag == "--restore-file" else ()
    done = fairseq_train(tiny.data_bin, tmp_path / "run", *words, *reset, task="plain_masked_lm", check=False)
    assert not hostile.marker.exists()
    assert "Traceback" not in done.stderr
    if ATTACKS[attack].error is None:
        assert done.returncode == 0, done.stderr[-2000:]
    else:
        assert done.returncode != 0
        assert ATTACKS[attack].error in done.stderr


def test_a_user_can_trust_a_name(attacked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = attacked("lstm")
    trusted = {kind: set(names) for kind, names in checkpoint_contents.TRUSTED.items()}
    monkeypatch.setattr(checkpoint_contents, "TRUSTED", trusted)
    checkpoint_contents.trust(models=["lstm"])
    with pytest.raises(ValueError, match="encoder-layers") as caught:  # said by the LSTM that fairseq builds
        hub.from_pretrained(hostile.checkpoint)
    assert ATTACKS["lstm"].error not in str(caught.value)
