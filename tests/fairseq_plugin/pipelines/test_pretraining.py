"""The flags of an auxiliary model's training, and what is left of a run; ``tests/cli/test_auxiliary.py`` trains."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import options

import mlsm_plugin  # noqa: F401  (registers)
from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.coding.settings import StageSettings
from mlsm_plugin.core.files.atomic_files import read_json, write_json
from mlsm_plugin.core.files.process_rank import ProcessRank
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import architecture_of
from mlsm_plugin.fairseq_plugin.pipelines.pretraining import (
    KEPT_PERCENTAGES,
    _optimizer,
    _restored,
    _without_restart,
    begin_run,
    default_flags,
    early_end,
    pretrain,
    process_of,
    separate_words,
    updates_of,
)
from mlsm_plugin.fairseq_plugin.pipelines.self_coded_pretraining import pretrain_in_stages
from tests.tiny_models import TinyData


def parsed(given: list[str], max_update: int = 1000, arch: str = "mlsm_roberta_tiny", **how: Any) -> Any:
    """What fairseq makes of the flags."""
    words = ["data", *default_flags(max_update, arch, given, **how), *given]
    return options.parse_args_and_arch(options.get_training_parser(), words)


def test_default_flags_are_one_schedule_over_all_updates() -> None:
    args = parsed([])
    assert (args.task, args.criterion, args.arch) == ("plain_masked_lm", "masked_lm", "mlsm_roberta_tiny")
    assert (args.optimizer, args.lr_scheduler, args.autocast) == ("fused_adamw", "polynomial_decay", "auto")
    assert (args.warmup_updates, float(args.total_num_update)) == (60, 1000)
    assert (args.sample_break_mode, args.tokens_per_sample) == ("complete", 512)
    assert parsed([], max_update=3).warmup_updates == 1


def test_todays_encoder_has_no_dropout_a_higher_rate_and_more_masks_at_first() -> None:
    old, new = parsed([]), parsed([], arch="mlsm_modern_tiny", optimizer="muon")
    assert (old.dropout, old.attention_dropout, old.lr) == (0.1, 0.1, [5e-4])
    assert (new.dropout, new.attention_dropout, new.lr) == (0.0, 0.0, [1e-3])
    assert (old.mask_prob, old.mask_prob_end) == (0.15, None)
    assert (new.mask_prob, new.mask_prob_end, new.mask_updates, new.initialization) == (0.3, 0.15, 1000, "bert")
    assert parsed([], arch="mlsm_modern_tiny", optimizer="fused_adamw").initialization == "width"
    deberta = parsed([], arch="mlsm_deberta_tiny", optimizer="muon")
    assert {**vars(new), "initialization": "width"}.items() >= {
        name: getattr(deberta, name) for name in ("dropout", "lr", "mask_prob", "mask_prob_end", "initialization")
    }.items()
    given = parsed(["--mask-prob", "0.2", "--initialization", "bert"], arch="mlsm_modern_tiny")
    assert (given.mask_prob, given.mask_prob_end, given.initialization) == (0.2, None, "bert")


def test_a_run_that_is_there_keeps_its_masks_and_initial_weights(tiny: TinyData, tmp_path: Path) -> None:
    for masks in ((0.15, None), (0.25, 0.1)):
        state = torch.load(tiny.model)
        state["cfg"]["task"] |= dict(zip(("mask_prob", "mask_prob_end"), masks, strict=True))
        torch.save(state, tmp_path / "model.pt")
        args = parsed([], arch="mlsm_modern_tiny", optimizer="muon", run=tmp_path / "model.pt")
        assert (args.mask_prob, args.mask_prob_end, args.initialization) == (*masks, "bert")


def test_given_flags_override_the_defaults_and_other_optimizers_and_schedules_replace_them() -> None:
    assert parsed(["--tokens-per-sample", "64", "--lr", "1e-3"]).tokens_per_sample == 64
    args = parsed(["--optimizer", "sgd", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "7"])
    assert (args.optimizer, args.lr_scheduler, args.warmup_updates) == ("sgd", "inverse_sqrt", 7)
    flags = default_flags(1000, "roberta_base", ["--optimizer", "sgd", "--lr-scheduler", "fixed"])
    assert not {"--adam-betas", "--weight-decay", "--total-num-update", "--warmup-updates"} & set(flags)


def test_flags_with_an_equals_sign_are_found_by_their_names(tiny: TinyData, tmp_path: Path) -> None:
    words = ["--restore-file=a=b.pt", "--lr-scheduler=fixed", "--adam-betas=(0.9, 0.98)", "--cpu", "--lr", "x=1"]
    separated = separate_words([*words, "--stop-min-lr=-1"])
    assert separated == [
        *("--restore-file", "a=b.pt", "--lr-scheduler", "fixed", "--adam-betas", "(0.9, 0.98)", "--cpu", "--lr", "x=1"),
        "--stop-min-lr=-1",  # the value looks like a flag
    ]
    args = parsed(separate_words(["--lr-scheduler=fixed", "--optimizer=sgd", "--stop-min-lr=-1", "--autocast=off"]))
    assert (args.lr_scheduler, args.optimizer, args.stop_min_lr, args.autocast) == ("fixed", "sgd", -1, "off")
    (tmp_path / "checkpoint_last.pt").touch()
    assert _without_restart(separate_words(["--restore-file=a.pt"]), tmp_path / "checkpoint_last.pt") == []
    assert _restored(separate_words([f"--restore-file={tiny.model}"])) == tiny.model


def test_own_checkpoint_comes_before_the_one_to_restore(tmp_path: Path) -> None:
    flags = ["--fp16", "--restore-file", "other.pt", "--reset-optimizer", "--reset-dataloader", "--lr", "1"]
    last = tmp_path / "checkpoint_last.pt"
    assert _without_restart(flags, last) == flags
    last.touch()
    assert _without_restart(flags, last) == ["--fp16", "--lr", "1"]
    assert _without_restart(["--fp16", "--reset-optimizer"], last) == ["--fp16", "--reset-optimizer"]


@pytest.mark.parametrize(
    ("saved", "flags", "expected"),
    [
        (None, [], "muon"),
        (None, ["--fp16"], "fused_adamw"),
        (None, ["--fp16", "--fp16-no-flatten-grads"], "muon"),
        ("FairseqAdam", [], "adam"),
        ("FairseqAdam", ["--reset-optimizer"], "muon"),
        ("FusedAdamW", [], "fused_adamw"),
        ("Muon", [], "muon"),
        (None, ["--memory-efficient-fp16"], "adam"),
    ],
)
def test_optimizer_is_one_that_can_continue_the_run(
    tiny: TinyData, tmp_path: Path, saved: str | None, flags: list[str], expected: str
) -> None:
    source = None
    if saved:
        source = tmp_path / "model.pt"
        state = torch.load(tiny.model)
        state["optimizer_history"][-1]["optimizer_name"] = saved
        torch.save(state, source)
    assert _optimizer(source, flags, "mlsm_modern_tiny") == expected
    if expected == "muon":
        assert _optimizer(None, flags, "mlsm_roberta_tiny") == "fused_adamw"
    assert parsed([], optimizer=expected).optimizer == expected


def test_checkpoint_to_restore_decides_the_architecture(tiny: TinyData, tmp_path: Path) -> None:
    assert _restored(["--lr", "1"]) is None
    assert _restored(["--restore-file"]) is None
    assert _restored(["--restore-file", str(tmp_path / "absent.pt")]) is None
    assert _restored(["--restore-file", str(tiny.model), "--lr", "1"]) == tiny.model
    assert architecture_of(tiny.model) == "mlsm_roberta_tiny"


DEEPER = ["--encoder-layers", "3"]


def test_a_run_is_not_resumed_with_another_architecture(tiny: TinyData, tmp_path: Path) -> None:
    with_updates(tiny, tmp_path / "auxiliary" / "checkpoint_last.pt", 3)
    for updates in (20, 3):  # the run has three
        with pytest.raises(ValueError, match="holds a run with --arch mlsm_roberta_tiny, and not mlsm_modern_tiny; le"):
            pretrain(tiny.data_bin, tmp_path / "auxiliary", arch="mlsm_modern_tiny", max_update=updates, flags=[])
        with pytest.raises(ValueError, match="holds a run with --encoder-layers 2, and not 3; pass that to resume it"):
            pretrain(tiny.data_bin, tmp_path / "auxiliary", arch=None, max_update=updates, flags=DEEPER)
    with pytest.raises(ValueError, match="leave --arch out"):
        pretrain_in_stages(
            tiny.data_bin,
            tmp_path / "auxiliary",
            StageSettings(),
            LearningSettings(layer=0),
            BlockSettings(),
            arch="mlsm_modern_tiny",
            max_update=20,
        )


def with_updates(tiny: TinyData, path: Path, updates: int) -> Path:
    state = torch.load(tiny.model)
    state["optimizer_history"][-1]["num_updates"] = updates
    path.parent.mkdir(exist_ok=True)
    torch.save(state, path)
    return path


def test_updates_are_read_from_the_checkpoint(tiny: TinyData, tmp_path: Path) -> None:
    assert updates_of(tmp_path / "absent.pt") == 0
    assert updates_of(with_updates(tiny, tmp_path / "model.pt", 17)) == 17


def test_run_that_is_there_is_not_trained_again(tiny: TinyData, tmp_path: Path) -> None:
    save_dir = tmp_path / "auxiliary"
    last = with_updates(tiny, save_dir / "checkpoint_last.pt", 20)
    for percentage in KEPT_PERCENTAGES[:2]:  # as of a run that began before the others
        with_updates(tiny, save_dir / f"checkpoint_at_{percentage}_percent.pt", 20 * percentage // 100)
    kept = pretrain(tiny.data_bin, save_dir, arch="mlsm_roberta_tiny", max_update=20, flags=["--no-such-flag"])
    assert [path.name for path in kept] == [f"checkpoint_at_{percentage}_percent.pt" for percentage in (10, 25, 100)]
    assert kept[-1].read_bytes() == last.read_bytes()
    assert (save_dir / "dict.txt").read_bytes() == (tiny.data_bin / "dict.txt").read_bytes()


def training(tiny: TinyData, *, until: int = 1 << 30) -> Callable[[Sequence[str]], int]:
    """A trainer that trains nothing, and that ends at an update if it is not told to end before."""

    def run_child(command: Sequence[str]) -> int:
        goal, save_dir = (command[command.index(flag) + 1] for flag in ("--max-update", "--save-dir"))
        last = Path(save_dir, "checkpoint_last.pt")
        last.unlink(missing_ok=True)  # a trainer replaces it, so that its other names stay as they are
        with_updates(tiny, last, min(int(goal), until))
        return 0

    return run_child


def test_kept_checkpoints_are_of_the_updates_in_their_names(
    tiny: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = {"arch": None, "flags": ["--patience", "2"], "keep_at": (25, 50)}
    monkeypatch.setattr("mlsm_plugin.fairseq_plugin.pipelines.pretraining.run_child", training(tiny, until=7))
    kept = pretrain(tiny.data_bin, tmp_path, max_update=20, **run)  # type: ignore[arg-type]
    assert [(path.name, updates_of(path)) for path in kept] == [
        ("checkpoint_at_25_percent.pt", 5), ("checkpoint_last.pt", 7),
    ]  # fmt: skip
    assert not list(tmp_path.glob("checkpoint_at_*0_percent.pt"))
    expected = f"training ended after update 7, before update 10 (--patience 2): {tmp_path}"
    assert caplog.messages == [expected]
    assert early_end(tmp_path, 10, []) == expected.replace("--patience 2", "the trainer's own message is above")
    assert early_end(tmp_path, 7, []) is None

    caplog.clear()
    monkeypatch.setattr("mlsm_plugin.fairseq_plugin.pipelines.pretraining.run_child", training(tiny))
    (tmp_path / "checkpoint_at_50_percent.pt").write_bytes(b"damaged")
    kept = pretrain(tiny.data_bin, tmp_path, max_update=24, **run)  # type: ignore[arg-type]
    assert [updates_of(path) for path in kept] == [12, 24]  # the model after update 6 is lost
    wrong = tmp_path / "checkpoint_at_25_percent.pt"
    assert caplog.messages == [f"{wrong} is not the model after update 6 of 24; delete or rename it"]
    with pytest.raises(ValueError, match="holds a run of 24 updates, more than the 20 that were asked for; ask for at"):
        pretrain(tiny.data_bin, tmp_path, max_update=20, **run)  # type: ignore[arg-type]


def more_text(data_bin: Path) -> None:
    with (data_bin / "valid.bin").open("ab") as file:
        file.write(b"more")


def test_a_run_keeps_the_text_that_its_best_model_is_chosen_on(tiny: TinyData, tmp_path: Path) -> None:
    data, run = shutil.copytree(tiny.data_bin, tmp_path / "data"), tmp_path / "run"
    settings = begin_run(data, run, []).settings_of("data")
    more_text(data)
    with pytest.raises(ValueError, match=r"was begun with other settings: valid is .* Choose another --save-dir"):
        begin_run(data, run, [])
    (run / "steps.json").unlink()
    write_json(run / "data.json", {"train": settings["train"]})  # of a version that did not record it
    begin_run(data, run, [])
    more_text(data)
    with pytest.raises(ValueError, match="valid is "):
        begin_run(data, run, [])


def test_only_the_first_of_several_processes_writes_the_record(tiny: TinyData, tmp_path: Path) -> None:
    for rank in ("1", "0"):
        begin_run(tiny.data_bin, tmp_path, ["--distributed-world-size", "2", "--distributed-rank", rank])
        assert (tmp_path / "steps.json").exists() == (rank == "0")
    assert list(read_json(tmp_path / "steps.json")) == ["data"]


def test_the_ranks_are_those_of_the_flags_of_torchrun_or_of_fairseq(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert process_of(["--cpu"]) == ProcessRank(0, 1)
    assert process_of(["--distributed-world-size", "4", "--distributed-rank", "3"]) == ProcessRank(3, 4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert process_of([]) == ProcessRank(1, 2)
