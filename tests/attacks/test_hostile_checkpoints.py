"""Nothing of a checkpoint runs, whatever command or function opens it; what must not be used is one clear line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlsm_plugin import hub
from mlsm_plugin.cli.main import main
from mlsm_plugin.fairseq_seams import checkpoint_contents
from mlsm_plugin.models.mlsm_roberta import MlsmRobertaModel
from tests.attacks.hostile_checkpoints import ATTACKS, write_hostile
from tests.conftest import fairseq_train
from tests.denoising_flags import TINY
from tests.tiny_models import TinyData, save_untrained, save_untrained_npm

Capture = pytest.CaptureFixture[str]
SOURCE = "The <extra_id_0> walks."
MLSM = {"task": "masked_lm", "criterion": "masked_lm"}
DENOISING = {"task": "span_denoising", "criterion": "cross_entropy", "arch": "denoising_small"}


class Place:
    """Files that the commands need, in a folder of the test; ``checkpoint`` is the hostile one."""

    def __init__(self, tiny: TinyData, folder: Path) -> None:
        self.tiny, self.output = tiny, folder / "output"
        self.checkpoint = folder / "model" / "checkpoint_last.pt"
        self.pairs, self.labelled, self.verbalizer = folder / "pairs.jsonl", folder / "labelled.tsv", folder / "words"
        self.pairs.write_text('{"sentence_good": "The name is bound.", "sentence_bad": "Names the is."}\n')
        self.labelled.write_text("a\tThe name is bound.\nb\tNames are bound.\n")
        self.verbalizer.write_text("a\tname\nb\tobject\n")

    def command(self, name: str) -> list[str]:
        """The words of an ``mlsm`` command that opens the checkpoint."""
        tiny, checkpoint, labelled = self.tiny, self.checkpoint, ("--train", self.labelled, "--valid", self.labelled)
        texts = ("--train", tiny.text, "--valid", tiny.text)
        small = ("--atoms", 4, "--tokens", 200, "--iterations", 2, "--batch-size", 50)
        words: dict[str, tuple[object, ...]] = {
            "dictionary": (tiny.data_bin, "--auxiliary", checkpoint, "--layer", 1, "--output", self.output, *small),
            "preprocess": (*texts, "--auxiliary", checkpoint, "--layer", 1, "--output", self.output, *small),
            "export-hf": (checkpoint, self.output, "--text", tiny.text, "--lines", 2),
            "evaluate-pairs": ("--checkpoint", checkpoint, "--input", self.pairs, "--output", self.output),
            "datastore": ("build", tiny.data_bin, "--checkpoint", checkpoint, "--output", self.output),
            "finetune": ("--checkpoint", checkpoint, *labelled, "--output", self.output, "--max-epoch", 1, "--cpu"),
            "classify": (
                *("--checkpoint", checkpoint, "--template", "{} <mask>", "--verbalizer", self.verbalizer),
                *("--input", self.labelled, "--output", self.output, "--parametric"),
            ),
            "fill": ("--checkpoint", checkpoint, "--datastore", self.output, "The <mask> is bound."),
            "infill": ("--checkpoint", checkpoint, SOURCE, "--max-length", 2, "--beam", 1),
            "inspect": (checkpoint.parent, "--output", self.output),
            "auxiliary": (tiny.data_bin, "--save-dir", checkpoint.parent, "--max-update", 0),
        }
        return [name, *(str(word) for word in words[name])]


COMMANDS = ("dictionary", "preprocess", "export-hf", "evaluate-pairs", "datastore", "finetune", "infill", "inspect")
# commands of the fast lane that open a good checkpoint of this kind with success
SUCCEED = ("dictionary", "export-hf", "evaluate-pairs", "infill")
FUNCTIONS: dict[str, Callable[[Path], Any]] = {
    "hub": hub.from_pretrained,
    "model class": lambda checkpoint: MlsmRobertaModel.from_pretrained(checkpoint.parent, checkpoint.name),
}


@pytest.fixture(scope="session")
def good(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of a masked LM, and of the models that some commands want."""
    folder = tmp_path_factory.mktemp("good")
    denoising = save_untrained(tiny.data_bin, folder / "denoising", *TINY, **DENOISING)
    npm = save_untrained_npm(tiny, folder / "npm")
    return {"infill": denoising, "datastore": npm, "masked_lm": tiny.model}


@pytest.fixture
def attacked(tiny: TinyData, good: dict[str, Path], tmp_path: Path) -> Callable[[str, str], tuple[Place, Path]]:
    """A function that makes the place for an attack on a command, and names the file that hostile code would make."""

    def make(attack: str, command: str) -> tuple[Place, Path]:
        place, marker = Place(tiny, tmp_path), tmp_path / "executed"
        source = good.get(command, good["masked_lm"])
        shutil.copytree(source.parent, place.checkpoint.parent, ignore=shutil.ignore_patterns("store"))
        write_hostile(attack, source, place.checkpoint, marker)
        return place, marker

    return make


def check_command(made: Any, attack: str, command: str, capsys: Capture) -> None:
    place, marker = made(attack, command)
    capsys.readouterr()
    status = main(place.command(command))
    assert not marker.exists()
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    wanted = ATTACKS[attack].error
    if wanted is None:
        assert status == (0 if command in SUCCEED else status), errors
        return
    (line,) = [line for line in errors.splitlines() if line.startswith("mlsm: error: ")]
    assert status == 1
    assert wanted in line
    assert str(place.checkpoint) in line
    assert not place.output.exists() or command == "preprocess"  # it has binarized the text by then


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_runs_in_the_hub(attacked: Any, attack: str, tmp_path: Path) -> None:
    place, marker = attacked(attack, "hub")
    if ATTACKS[attack].error is None:
        hub.from_pretrained(place.checkpoint)
    else:
        with pytest.raises(ValueError, match=ATTACKS[attack].error) as caught:
            hub.from_pretrained(place.checkpoint)
        assert "\n" not in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_runs_in_a_command(attacked: Any, command: str, capsys: Capture) -> None:
    check_command(attacked, "fconv", command, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_runs_in_any_command(attacked: Any, attack: str, command: str, capsys: Capture) -> None:
    check_command(attacked, attack, command, capsys)


def test_nothing_runs_in_the_class_of_a_model(attacked: Any) -> None:
    place, marker = attacked("fconv", "hub")
    with pytest.raises(ValueError, match=ATTACKS["fconv"].error):
        MlsmRobertaModel.from_pretrained(place.checkpoint.parent, place.checkpoint.name)
    assert not marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--restore-file", "--finetune-from-model"])
@pytest.mark.parametrize("attack", ["object", "interpolation", "meter", "weight that is text", "optimizer", "plugin"])
def test_nothing_runs_in_fairseq_train(attacked: Any, tiny: TinyData, attack: str, flag: str, tmp_path: Path) -> None:
    place, marker = attacked(attack, "hub")
    words = (flag, place.checkpoint, "--max-update", 1, "--max-positions", 32, "--tokens-per-sample", 24)
    reset = ("--reset-optimizer", "--reset-dataloader", "--reset-meters") if flag == "--restore-file" else ()
    done = fairseq_train(tiny.data_bin, tmp_path / "run", *words, *reset, task="plain_masked_lm", check=False)
    assert not marker.exists()
    assert "Traceback" not in done.stderr
    if ATTACKS[attack].error is None:
        assert done.returncode == 0, done.stderr[-2000:]
    else:
        assert done.returncode != 0
        assert ATTACKS[attack].error in done.stderr


def test_a_user_can_trust_a_name(attacked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place, _ = attacked("lstm", "hub")
    trusted = {kind: set(names) for kind, names in checkpoint_contents.TRUSTED.items()}
    monkeypatch.setattr(checkpoint_contents, "TRUSTED", trusted)
    checkpoint_contents.trust(models=["lstm"])
    with pytest.raises(ValueError, match="encoder-layers") as caught:  # said by the LSTM that fairseq builds
        hub.from_pretrained(place.checkpoint)
    assert ATTACKS["lstm"].error not in str(caught.value)
