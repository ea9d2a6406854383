"""Which checkpoint of a run is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.core.files.model_files import checkpoint_of, only_checkpoint


def with_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["checkpoint7.pt", "checkpoint_best.pt", "checkpoint_last.pt", "model.pt"], "model.pt"),
        (["checkpoint7.pt", "checkpoint_best.pt", "checkpoint_last.pt"], "checkpoint_best.pt"),
        (["checkpoint7.pt", "checkpoint_last.pt"], "checkpoint_last.pt"),
        (["checkpoint9.pt", "checkpoint10.pt", "checkpoint8.pt"], "checkpoint10.pt"),
        (["checkpoint_1_9.pt", "checkpoint_1_10.pt", "other_2_1.pt"], "checkpoint_1_10.pt"),
        (["checkpoint_2_9.pt", "checkpoint_1_10.pt"], "checkpoint_2_9.pt"),
        (["checkpoint_2_6.pt"], "checkpoint_2_6.pt"),
        (["averaged.pt"], "averaged.pt"),
        (["averaged.pt", "checkpoint_2_6.pt"], "checkpoint_2_6.pt"),
        (["averaged.pt", "notes.txt"], "averaged.pt"),
    ],
)
def test_checkpoint_is_chosen_in_the_documented_order(tmp_path: Path, names: list[str], chosen: str) -> None:
    assert checkpoint_of(with_files(tmp_path, *names)) == tmp_path / chosen


def test_a_file_and_a_name_are_what_they_say(tmp_path: Path) -> None:
    with_files(tmp_path, "model.pt", "own.pt")
    assert checkpoint_of(str(tmp_path / "own.pt")) == tmp_path / "own.pt"
    assert checkpoint_of(tmp_path, "own.pt") == tmp_path / "own.pt"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere .*pass the --save-dir of a training run"):
        checkpoint_of(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no checkpoint \(\*\.pt\); pass the --save-dir"):
        checkpoint_of(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=f"but a model of Hugging Face: .* it is hf:{tmp_path}$"):
        only_checkpoint(tmp_path)
    with_files(tmp_path, "b.pt", "a.pt", "a.txt")
    with pytest.raises(FileNotFoundError, match=r"has no c\.pt; it has \['a\.pt', 'b\.pt'\]$"):
        checkpoint_of(tmp_path, "c.pt")
    with pytest.raises(FileNotFoundError) as error:
        checkpoint_of(tmp_path)
    assert (
        str(error.value)
        == f"{tmp_path} has several checkpoints (a.pt, b.pt); pass one of them, such as {tmp_path}/a.pt"
    )


def test_a_mistyped_name_is_told_with_the_nearest_ones(tmp_path: Path) -> None:
    names = ("averaged.pt", "checkpoint_best.pt", "checkpoint_last.pt", "checkpoint1.pt", "checkpoint2.pt")
    with_files(tmp_path, *names)
    for find in (checkpoint_of, only_checkpoint):
        with pytest.raises(FileNotFoundError) as error:
            find(tmp_path / "chekpoint_bset.pt")
        assert str(error.value) == (
            f"checkpoint {tmp_path}/chekpoint_bset.pt does not exist; {tmp_path} has checkpoint_best.pt, "
            "checkpoint_last.pt, checkpoint2.pt and 2 more"
        )
        with pytest.raises(FileNotFoundError) as error:
            find(tmp_path / "new" / "averaged.pt")
        assert str(error.value) == f"checkpoint {tmp_path}/new/averaged.pt does not exist"


def test_the_only_checkpoint_of_a_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    for name in ("averaged.pt", "checkpoint_2_6.pt"):
        (tmp_path / "one" / name).touch()
        assert only_checkpoint(tmp_path / "one") == only_checkpoint(tmp_path / "one" / name) == tmp_path / "one" / name
        (tmp_path / "one" / name).unlink()
    with pytest.raises(FileNotFoundError, match=r"one has no checkpoint \(\*\.pt\); pass the --save-dir"):
        only_checkpoint(tmp_path / "one")
    with_files(tmp_path, *(f"checkpoint{number}.pt" for number in range(9)), "checkpoint_best.pt")
    with pytest.raises(FileNotFoundError) as error:
        only_checkpoint(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} has several checkpoints (checkpoint0.pt, checkpoint1.pt, checkpoint2.pt, checkpoint3.pt, "
        f"checkpoint4.pt, checkpoint5.pt and 4 more); pass one of them, such as {tmp_path}/checkpoint_best.pt"
    )
