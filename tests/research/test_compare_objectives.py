"""The comparison of objectives: what it refuses, what it writes, and that it resumes where it stopped."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from fairseq import tasks
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mlsm_plugin.core.files.output_lock import only_writer
from mlsm_plugin.core.files.planned_folder import PlannedFolder
from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import FairseqEncoder
from tests.conftest import REPOSITORY
from tests.documented import bash_blocks
from tests.script_module import load_script

load_script("research/compare_objectives.py")
from comparison.costs import ModelSize, Phase, Schedule, cost_to_reach, schedule_of_phases, updates_within  # noqa: E402
from comparison.report import (  # noqa: E402
    cost_table,
    loss_table,
    paired_difference,
    rates_table,
    round_updates,
    seeds_table,
    use_table,
)
from comparison.rows import ROWS, ordered  # noqa: E402

from tests.tiny_models import TinyData  # noqa: E402
from tests.tiny_run import seeded_model, training_config  # noqa: E402

SCRIPT = REPOSITORY / "research" / "compare_objectives.py"
PAGES = [
    (REPOSITORY / "docs" / "research" / name).read_text(encoding="utf-8")
    for name in ("comparison.md", "comparison_log.md")
]
COMMON = ("--train", "train.txt", "--valid", "valid.txt", "--held-out", "held_out.txt", "--output", "out")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("research/compare_objectives.py")


@pytest.fixture
def texts(tmp_path: Path, english_text: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    lines = english_text[0].read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.txt").write_text("".join(lines[:1200]), encoding="utf-8")
    (tmp_path / "valid.txt").write_text("".join(lines[1200:1300]), encoding="utf-8")
    (tmp_path / "held_out.txt").write_text("".join(lines[1300:1400]), encoding="utf-8")
    rows = "".join(f"{label}\t{text}\n" for label, text in (("good", "A fine name."), ("bad", "No value at all.")) * 15)
    for split in ("train", "test"):
        (tmp_path / f"sst2-{split}.tsv").write_text(rows, encoding="utf-8")
    pair = {"sentence_good": "A name is bound.", "sentence_bad": "A name are bound."}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_options(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["compare_objectives.py", *COMMON, *words])
    args = script.parse_arguments(None)
    assert isinstance(args, argparse.Namespace)
    return args


def documented_commands() -> list[list[str]]:
    commands = [shlex.split(block.replace("\\\n", " ")) for page in PAGES for block in bash_blocks(page)]
    return [words for words in commands if words[1] == "research/compare_objectives.py"]


def test_documented_commands_are_understood(script: ModuleType, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in documented_commands():
        assert words[0] == "python"
        monkeypatch.setattr(sys, "argv", words[1:])
        args = script.parse_arguments(None)
        named = set(ROWS)
        if "--objectives" in words:
            rest = words[words.index("--objectives") + 1 :]
            named = {"mlm", *itertools.takewhile(lambda word: not word.startswith("-"), rest)}
        assert set(args.objectives) == named
        assert [task.name for task in args.tasks[:1]] == (["sst2"] if "--task" in words else [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "sst2=sst2-train.tsv"), "is not NAME=TRAIN.tsv,TEST.tsv"),
        (("--task", "sst2=nowhere.tsv,sst2-test.tsv"), "nowhere.tsv does not exist"),
        (("--batch-size", "24"), "--batch-size 24 is not a multiple of --group-size 16"),
        (("--width", "33"), "a width of 33 is not a multiple of 4 heads"),
        (("--auxiliary-size", "2", "33", "4"), "a width of 33 is not a multiple of 4 heads"),
        (("--auxiliary-size", "2", "64", "2"), "so self needs --latent-source online"),
        (("--auxiliary-size", "2", "64", "2", "--auxiliary", "a.pt"), "leave out --auxiliary-size"),
        (("--auxiliary-size", "2", "64", "2", "--layer", "3"), "--layer 3 is above 2, the layers of the model to code"),
        (("--objectives", "self"), "self has the rate of mlsm+mlm: name both in --objectives"),
        (("--share", "95"), "95 is not from 1 to 90"),
        (("--latent-until", "101"), "101 is not from 1 to 100"),
        (("--latent-until", "20"), "--latent-until 20 is not after --share 20, where self has codes"),
        (("--updates", "0"), "0 is not positive"),
        (("--rates", "0"), "0 is not a positive number"),
        (("--mask-prob", "1"), "1 is not between 0 and 1"),
        (("--latent-weight", "inf"), "inf is not a positive number"),
        (("--seeds", "1", "2", "1"), "--seeds has 1 twice"),
        (("--task", "a=sst2-train.tsv,sst2-test.tsv", "--task", "a=sst2-test.tsv,sst2-test.tsv"), "--task has a twice"),
        (("--k", "33", "--atoms", "32"), "--k 33 is above 32, the number of atoms"),
        (("--output", "train.txt"), "--output train.txt is not a folder"),
        (("--objectives", "bert"), "invalid choice"),
        (("--pairs", "nowhere.jsonl"), "nowhere.jsonl does not exist"),
    ],
)
def test_wrong_options_end_it_before_anything_runs(
    script: ModuleType, texts: Path, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["compare_objectives.py", *COMMON, *words])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert message in f"{stopped.value} {capsys.readouterr().err}"
    assert not (texts / "out").exists()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("sst2-train.tsv", "good\tA name.\nbad\n", "sst2-train.tsv, line 2 has 1 columns"),
        ("sst2-train.tsv", "good\tA name.\ngood\tA value.\n", "train.tsv has only one label (good)"),
        (
            "sst2-test.tsv",
            "fair\tA name.\n",
            "sst2-test.tsv has labels that comparison/tasks/sst2/train.tsv lacks: fair",
        ),
        ("pairs.jsonl", '{"good": "A name is bound."}\n', "pairs.jsonl, line 1 needs the texts sentence_good and"),
    ],
)
def test_files_to_measure_on_are_read_before_anything_is_trained(
    script: ModuleType, texts: Path, file: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (texts / file).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", documented_commands()[0][1:])
    with pytest.raises(SystemExit, match=re.escape(message)):
        script.main()
    assert not list((texts / "comparison" / "steps").iterdir())


def test_a_folder_keeps_the_settings_that_it_was_begun_with(
    script: ModuleType, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = with_options(script, monkeypatch, "--updates", "20", "--objectives", "taco")
    script.planned_folder(args).begin()
    files = sorted((texts / "out").iterdir())
    more = ("--objectives", "self", "--seeds", "4", "--rates", "1e-3", "--pairs", "pairs.jsonl")
    script.planned_folder(with_options(script, monkeypatch, "--updates", "20", *more)).check()
    for words, message in (
        (("--updates", "30"), "settings.updates is 20 there and 30 now. Give another --output"),
        (("--updates", "20", "--mask-prob", "0.3"), "settings.mask_prob is 0.15 there and 0.3 now"),
        (("--updates", "20", "--fairseq-flags=--cpu"), "settings.fairseq_flags is '' there and '--cpu' now"),
        (("--updates", "20", "--train", "valid.txt"), "out was begun with other settings: texts is"),
    ):
        with_options(script, monkeypatch, *words)
        with pytest.raises(SystemExit, match=re.escape(message)):
            script.main()
    assert sorted((texts / "out").iterdir()) == files


def test_a_ready_auxiliary_model_belongs_to_the_settings(
    script: ModuleType, texts: Path, tiny: TinyData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brings the tokenizer of all rows; a later command with it would compare rows of two vocabularies."""
    script.planned_folder(with_options(script, monkeypatch, "--objectives", "taco")).begin()
    for auxiliary, message in (
        (str(tiny.model), "out was begun with other settings: auxiliary is None there and"),
        ("none.pt", "none.pt does not exist"),
    ):
        with_options(script, monkeypatch, "--auxiliary", auxiliary)
        with pytest.raises(SystemExit, match=message):
            script.main()


def test_the_last_layer_is_that_of_a_ready_auxiliary_model(
    script: ModuleType, texts: Path, tiny: TinyData, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = with_options(script, monkeypatch, "--auxiliary", str(tiny.model), "--layers", "7")
    comparison, started = script.Comparison(args), []

    def run(name: str, words: list[object], **more: object) -> argparse.Namespace:
        started.append(words)
        return argparse.Namespace(seconds=1.0)

    monkeypatch.setattr(comparison.commands, "run", run)
    comparison.codes.learn("topk", comparison.auxiliary)
    assert started[0][started[0].index("--layer") + 1] == FairseqEncoder.layers_of(tiny.model) < 7


def test_random_weights_are_measured_once(script: ModuleType, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later command may have another seed first, whose model the folder of the fine-tuning would refuse."""
    task = ("--task", "sst2=sst2-train.tsv,sst2-test.tsv")
    comparison, asked = script.Comparison(with_options(script, monkeypatch, *task)), []

    def finetuned(task: object, checkpoint: Path, name: str, *, from_scratch: bool) -> dict[str, float]:
        asked.append(checkpoint)
        return {"mean": 0.5, "deviation": 0.0}

    monkeypatch.setattr(comparison.measures, "finetuned", finetuned)
    for seed in (1, 4):
        first = comparison.checkpoint("mlm", seed)
        found = comparison.measures.of("random", first, has_mlm_head=False, from_scratch=True)
        assert found["finetuned"] == {"sst2": {"mean": 0.5, "deviation": 0.0}}
    assert asked == [comparison.checkpoint("mlm", 1)]


def test_a_run_with_another_rate_is_not_resumed(
    script: ModuleType, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlm-1", "self-1"):
        PlannedFolder(texts / "out" / "runs" / name, {"learning_rate": 1e-3, "updates": 20}).begin()
    comparison = script.Comparison(with_options(script, monkeypatch, "--rates", "2e-3"))
    message = "-1 was begun with other settings: learning_rate is 0.001 there and 0.002 now"
    with pytest.raises(SystemExit, match=re.escape(message)):
        comparison.train("runs/mlm-1", ROWS["mlm"].flags, 20, 2e-3, 1)
    with pytest.raises(SystemExit, match=re.escape(message)):
        comparison.train_in_stages("runs/self-1", 20, 2e-3, 1, begin=20)
    assert not list((texts / "out" / "steps").iterdir())


@pytest.mark.slow
def test_two_comparisons_do_not_write_to_one_folder(texts: Path) -> None:
    command = [sys.executable, str(SCRIPT), *documented_commands()[0][2:]]
    with only_writer(texts / "comparison"):
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "another process is writing to comparison" in found.stderr.splitlines()[-1]
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("words", "needed", "stored"),
    [
        (("taco",), False, None),
        (("self", "--latent-source", "online"), False, None),
        (("self",), True, {"topk"}),
        (("mlsm+mlm", "lasso"), True, {"topk", "lasso"}),
        (("self-random-dictionary", "--latent-source", "online"), False, None),
        (("mlsm+mlm", "--latent-source", "online"), True, set()),
        (("mlsm+mlm", "lasso", "--latent-source", "online"), True, {"lasso"}),
        (("mlsm+mlm", "random-dictionary", "--latent-source", "online"), True, set()),
        (("self", "exchanged", "--latent-source", "online"), True, {"topk"}),
    ],
)
def test_an_auxiliary_model_and_codes_of_all_tokens_are_made_where_a_row_needs_them(
    script: ModuleType, texts: Path, words: tuple[str, ...], needed: bool, stored: set[str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    comparison = script.Comparison(with_options(script, monkeypatch, "--rates", "1e-3", "--objectives", *words))
    assert comparison.needs_auxiliary == needed
    if stored is not None:
        assert comparison.stored == stored


def test_rows_come_in_the_order_in_which_they_are_run_with_what_they_begin_from() -> None:
    assert ordered(["npm", "self"]) == ["mlm", "self", "npm"]
    assert ordered(["self-exchanged-within-types"]) == ["self", "self-exchanged-within-types"]
    for name, row in ROWS.items():
        assert row.rate_of is None or list(ROWS).index(row.rate_of) < list(ROWS).index(name)


@given(
    before=st.floats(0, 10),
    parts=st.lists(st.tuples(st.integers(1, 20), st.floats(0, 5), st.floats(0.1, 2)), max_size=3),
    update=st.integers(0, 80),
)
def test_the_cost_of_a_run_is_that_of_its_updates_one_by_one(
    before: float, parts: list[tuple[int, float, float]], update: int
) -> None:
    begins, begin = [(0, 0.0, 1.0)], 0
    for length, once, each in parts:
        begin += length
        begins.append((begin, once, each))
    expected = before
    for number in range(1, update + 1):
        current = [part for part in begins if part[0] < number][-1]
        expected += current[2] + (current[1] if number == current[0] + 1 else 0)
    assert Schedule(before, tuple(begins)).at(update) == pytest.approx(expected)


@given(
    budget=st.floats(50, 1e4),
    begins=st.lists(st.integers(1, 99), unique=True, max_size=3).map(sorted),
    costs=st.lists(st.tuples(st.floats(0.1, 3), st.floats(0, 10)), min_size=4, max_size=4),
)
def test_phases_cost_what_they_may(budget: float, begins: list[int], costs: list[tuple[float, float]]) -> None:
    phases = [Phase(begin, *cost) for begin, cost in zip([0, *begins], costs, strict=False)]
    updates = updates_within(budget, phases)
    cost = schedule_of_phases(0, phases, updates).at(updates)
    assert cost == pytest.approx(budget, abs=3 * len(phases))  # an update costs up to 3; each begin is rounded


def test_cost_at_a_loss() -> None:
    curve = [(1.0, 9.0), (2.0, 7.0), (4.0, 6.0)]
    assert cost_to_reach(curve, 8.0) == pytest.approx(1.5)
    assert cost_to_reach(curve, 6.0) == pytest.approx(4.0)
    assert (cost_to_reach(curve, 10.0), cost_to_reach(curve, 5.9), cost_to_reach([], 5.9)) == (1.0, None, None)


@pytest.mark.parametrize(("share", "places"), [(0.15, [3, 8, 19]), (0.3, [1, 3, 8, 9, 14, 19])])
@pytest.mark.slow
def test_operations_are_those_that_torch_counts(tiny: TinyData, share: float, places: list[int]) -> None:
    """Of a batch without padding; what the products of a real model do, forward and backward."""
    flags = ("--encoder-layers", 2, "--encoder-embed-dim", 64, "--encoder-attention-heads", 2, "--max-positions", 32)
    cfg = training_config(tiny.data_bin, "--arch", "mlsm_modern", "--num-atoms", 50, *flags)
    model = seeded_model(cfg, tasks.setup_task(cfg.task))
    tokens = torch.randint(5, 100, (32, 20))
    masked = torch.zeros_like(tokens, dtype=torch.bool)
    masked[:, places] = True
    vocabulary = len(tasks.setup_task(cfg.task).source_dictionary)
    for atoms, of_vocabulary, of_masked in ((50, True, True), (50, False, True), (0, True, True), (0, True, False)):
        model.train(of_masked)  # in evaluation, the last layer computes all tokens
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # counts no fused attention
            token_logits, extra = model(
                tokens, masked_tokens=masked, project_tokens=of_vocabulary, project_atoms=atoms > 0
            )
            loss = extra["zero_with_gradient"] + (token_logits.sum() if of_vocabulary else 0)
            (loss + (extra["atom_logits"].sum() if atoms else 0)).backward()
        size = ModelSize(2, 64, model.encoder.sentence_encoder.layers[0].fc2.in_features, vocabulary, 20, share)
        expected = size.update(tokens.numel(), atoms=atoms, vocabulary=of_vocabulary, last_layer_of_masked=of_masked)
        assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # as NPM: hidden states only
        model(tokens, features_only=True)[0].sum().backward()
    expected = size.update(tokens.numel(), vocabulary=False, last_layer_of_masked=False)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_differences_of_pairs_have_the_interval_of_a_paired_test() -> None:
    one, other = [5.1, 5.4, 5.0], [5.3, 5.5, 5.35]
    expected = stats.ttest_rel(one, other).confidence_interval(0.95)
    mean, low, high = paired_difference(one, other) or (0.0, 0.0, 0.0)
    assert mean == pytest.approx(np.mean(one) - np.mean(other))
    assert (low, high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert paired_difference([1.0], [2.0]) is None
    assert paired_difference([1.0, 2.0], [2.0, 3.0]) == (-1.0, -1.0, -1.0)


def test_tables() -> None:
    def run(row: str, seed: int, last: float) -> dict[str, object]:
        curve = [{"update": 1, "seconds": 50.0, "bits": last + 1}, {"update": 2, "seconds": 100.0, "bits": last}]
        measures = {"valid_bits": last, "test_bits": last + 0.5, "pairs": {"agreement": 0.75}, "probe": {"sst2": 0.6}}
        measures |= {"valid_repeated_bits": last + 2, "valid_new_bits": None if row == "taco" else last + 3}
        return {
            "row": row,
            "seed": seed,
            "curve": curve,
            "finetuned": {"sst2": {"mean": 0.8, "deviation": 0.01}},
            **measures,
        }

    cost = {"updates": 1000, "seconds_per_update": 0.1, "extra_seconds": 0.0, "seconds": 100.0, "operations": 2e15}
    figures = {
        "rows": ["mlm", "self", "taco"],
        "tasks": ["sst2"],
        "pair_sets": ["agreement"],
        "costs": {name: {**cost, "learning_rate": 0.002} for name in ("mlm", "self", "taco")},
        "baseline": {"finetuned": {"sst2": {"mean": 0.5, "deviation": 0.0}}},
        "runs": [run("mlm", 1, 6.0), run("mlm", 2, 6.2), run("self", 1, 5.5), run("self", 2, 5.7), run("taco", 1, 7.0)],
    }
    assert "| mlm | 1,000 | 0.100 | 0 | 100 | 2,000 | 0.002 |" in cost_table(figures)
    assert rates_table(figures) is None
    costs = dict(figures["costs"])
    costs["mlm"] = {**cost, "learning_rate": 0.002, "searched": {"0.002": 7.0, "0.0005": 7.5}}
    costs["self"] = {**cost, "learning_rate": 0.002, "searched": {}}  # as that of another row
    rates = rates_table({**figures, "costs": costs})
    assert rates is not None
    assert rates.splitlines()[2:] == ["| mlm | loss | 7.50 | 7.00 |"]
    losses = loss_table(figures)
    assert "| mlm | 2 | 6.100 ± 0.141 | 6.600 ± 0.141 | 8.10 ± 0.14 | 9.10 ± 0.14 |  | 100 ± 0 |" in losses
    assert (
        "| self | 2 | 5.600 ± 0.141 | 6.100 ± 0.141 | 7.60 ± 0.14 | 8.60 ± 0.14 | -0.500 [-0.500, -0.500] | 75 ± 0 |"
        in losses
    )
    assert "| taco | 1 | 7.000 | 7.500 | 9.00 |  |  | not |" in losses
    uses = use_table(figures)
    assert "| random weights |  | 50.0 ± 0.0 |  |  |" in uses
    assert "| self | 2 | 80.0 ± 0.0 | 60.0 ± 0.0 | 75.0 ± 0.0 |" in uses


@given(st.integers(12, 10**7))
def test_round_numbers_of_updates(most: int) -> None:
    found = round_updates(most)
    assert 4 <= len(found) <= 9
    assert found == [found[0] * number for number in range(1, len(found) + 1)]
    assert found[-1] < most <= found[-1] + found[0]
    assert str(found[0]).strip("0") in "123456789"


def test_table_of_runs_reads_losses_between_validations() -> None:
    def run(row: str, seed: int, updates: int, last: float) -> dict[str, object]:
        curve = [{"update": at, "seconds": 2.0 * at, "bits": last + updates - at} for at in range(3, updates + 1, 3)]
        return {"row": row, "seed": seed, "curve": curve, "valid_new_bits": 9.0}

    runs = [run("mlm", 2, 12, 5.0), run("mlm", 1, 12, 4.0), run("self", 1, 9, 3.5)]
    without_masked_lm = {"row": "npm", "seed": 1, "curve": []}
    figures = {"rows": ["mlm", "self", "npm"], "costs": {"mlm": {"updates": 12}}, "runs": [*runs, without_masked_lm]}
    assert seeds_table(figures).splitlines() == [
        "| row | seed | 2 | 4 | 6 | 8 | 10 | the end | to mlm | cost to mlm's loss, % | repeated | new |",
        "|" + " --- |" * 12,
        "| mlm | 1 |  | 12.00 | 10.00 | 8.00 | 6.00 | 4.00 |  | 100 |  | 9.00 |",
        "| mlm | 2 |  | 13.00 | 11.00 | 9.00 | 7.00 | 5.00 |  | 100 |  | 9.00 |",
        "| self | 1 |  | 8.50 | 6.50 | 4.50 |  | 3.50 | -0.50 | 71 |  | 9.00 |",
    ]


def steps_of(texts: Path, begin: str = "") -> list[Path]:
    """The records of the commands that a comparison has run and whose names begin so."""
    return list((texts / "comparison" / "steps").glob(f"{begin}*.json"))


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_the_documented_comparison_runs_resumes_and_writes_its_tables(texts: Path) -> None:
    own_controls = ("self-exchanged-within-types", "self-random-dictionary")
    rows = ("mlm", "mlsm+mlm", "self", "lasso", "npm", "type-mean", "random-dictionary", *own_controls)
    command = [*documented_commands()[0], "--objectives", *rows, "--updates", "20", "--share", "50", "--seeds", "1"]
    command += ["--vocab-size", "400", "--layers", "2", "--width", "32", "--heads", "2", "--atoms", "16", "--k", "4"]
    command += ["--dictionary-tokens", "2000", "--finetune-seeds", "1", "--finetune-epochs", "1"]
    command += ["--rates", "1e-3", "2e-3", "--search-updates", "4"]
    command += ["--batch-size", "4", "--group-size", "4", "--tokens-per-sample", "64"]
    command += ["--latent-source", "online", "--latent-until", "75", "--auxiliary-size", "1", "16", "2"]
    command += ["--mask-prob", "0.3"]
    command[:2] = [sys.executable, str(SCRIPT)]

    def run() -> str:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-3000:]
        return found.stdout

    first = run()
    figures = json.loads((texts / "comparison" / "comparison.json").read_text())
    assert {run["row"] for run in figures["runs"]} == set(rows)
    for own in figures["runs"]:
        assert 0 <= own["finetuned"]["sst2"]["mean"] <= 1
        assert 0 <= own["probe"]["sst2"] <= 1
        cost = figures["costs"][own["row"]]
        assert cost["operations"] > 0
        if own["row"] == "npm":
            assert 0 <= own["retrieval_accuracy"] <= 1
            continue
        assert own["curve"][-1]["update"] == cost["updates"]
        assert own["curve"][-1]["bits"] == pytest.approx(own["valid_bits"], abs=1)
        assert 0 <= own["pairs"]["pairs"] <= 1
    for name in own_controls:
        assert figures["costs"][name] == figures["costs"]["self"]
        (own,) = (run for run in figures["runs"] if run["row"] == name)
        begin = figures["costs"]["self"]["updates"] // 2
        assert begin < own["curve"][0]["update"] <= begin + 2  # it continues the first stage
    seconds = json.loads((texts / "comparison" / "seconds.json").read_text())
    auxiliary, dictionary = (
        json.loads((texts / "comparison" / "steps" / f"{name}.json").read_text())
        for name in ("auxiliary", "dictionary-topk")
    )
    words = auxiliary["signature"]["command"]
    updates = int(words[words.index("--max-update") + 1])
    expected = updates * seconds["auxiliary"] + dictionary["seconds"]
    assert figures["costs"]["mlsm+mlm"]["extra_seconds"] == pytest.approx(expected, abs=0.01)
    assert figures["costs"]["self"]["extra_seconds"] > 0
    assert (texts / "comparison" / "comparison.png").stat().st_size > 10_000
    searched = {name for name in rows if ROWS[name].rate_of is None}
    found = {path.stem.removeprefix("search-").rpartition("-0.00")[0] for path in steps_of(texts, "search-")}
    assert found == searched
    for path in steps_of(texts, "search-npm-"):  # with the model that it begins from
        assert "comparison/runs/mlm-1/checkpoint_last.pt" in json.loads(path.read_text())["signature"]["command"]
    assert set(figures["costs"]["npm"]["searched"]) == {"0.001", "0.002"}
    assert figures["costs"]["type-mean"]["searched"] == {}
    for path in steps_of(texts, "runs-"):
        words = shlex.join(json.loads(path.read_text())["signature"]["command"])
        assert ("--mask-prob 0.3 --valid-mask-prob 0.15 " in words) == ("-npm-" not in path.stem)
    steps = {path: path.stat().st_mtime_ns for path in steps_of(texts)}
    (texts / "comparison" / "comparison.md").unlink()
    assert run() == first
    assert {path: path.stat().st_mtime_ns for path in steps} == steps
    assert (texts / "comparison" / "comparison.md").is_file()
