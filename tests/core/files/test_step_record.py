from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import replace
from functools import partial

import pytest

from mlsm_plugin.core.files import step_record
from mlsm_plugin.core.files.atomic_files import read_json, write_json
from mlsm_plugin.core.files.process_rank import ProcessRank
from mlsm_plugin.core.files.step_record import Step, StepRecord, changed_file, fingerprints_of


class Chain:
    """Two steps: ``first`` copies input to a file, ``second`` copies that into a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.input, self.middle, self.result = folder / "input", folder / "middle", folder / "result"
        self.input.write_text("one")
        self.settings = {"first": {"speed": "fast"}, "second": {}}
        self.ran = []
        self.failing = None

    def steps(self):
        return [
            Step("first", lambda: self.act("first"), self.settings["first"], [self.input], [self.middle]),
            Step("second", lambda: self.act("second"), self.settings["second"], [self.middle], [self.result]),
        ]

    def act(self, name):
        self.ran.append((name, self.result.exists() if name == "second" else self.middle.exists()))
        if name == "first":
            self.middle.write_text(self.input.read_text())
        else:
            self.result.mkdir(exist_ok=True)
            (self.result / "file").write_text(self.middle.read_text())
        if name == self.failing:
            raise ValueError("it failed")

    def run(self):
        """Run the chain; returns the names of the steps that ran, and whether one failed."""
        self.ran.clear()
        self.record = StepRecord(self.folder / "steps.json")
        try:
            for step in self.steps():
                self.record.run(step)
        except ValueError:
            return [name for name, _ in self.ran], 1
        return [name for name, _ in self.ran], 0


@pytest.fixture
def chain(tmp_path):
    return Chain(tmp_path)


def test_a_chain_runs_once(chain):
    assert chain.run() == (["first", "second"], 0)
    assert (chain.result / "file").read_text() == "one"
    assert chain.run() == ([], 0)
    assert [row[:2] for row in chain.record.rows] == [("first", "current"), ("second", "current")]


def test_a_changed_input_makes_its_step_and_all_after_it_stale(chain):
    chain.run()
    chain.input.write_text("two")
    assert chain.run() == (["first", "second"], 0)
    assert (chain.result / "file").read_text() == "two"


def test_a_copy_of_the_folder_is_checked_by_its_own_files(chain):
    chain.run()
    copied = chain.folder.with_name("copied")
    shutil.copytree(chain.folder, copied)
    copy = Chain(copied)
    assert copy.run() == ([], 0)
    assert StepRecord(copied / "steps.json").is_complete(copy.steps())
    (copied / "result" / "file").write_text("damaged")
    assert not StepRecord(copied / "steps.json").is_complete(copy.steps())
    assert copy.run() == (["second"], 0)
    assert (copied / "result" / "file").read_text() == "one"
    assert chain.run() == ([], 0)


def test_records_with_whole_paths_and_without_seconds_are_read(chain):
    chain.run()
    recorded = read_json(chain.folder / "steps.json")
    for entry in recorded.values():
        del entry["seconds"]
        entry["outputs"] = {str(chain.folder / name): content for name, content in entry["outputs"].items()}
    write_json(chain.folder / "steps.json", recorded)
    assert chain.run() == ([], 0)
    (chain.result / "file").write_text("damaged")
    assert chain.run() == (["second"], 0)


def test_touching_an_input_without_changing_it_runs_nothing(chain):
    chain.run()
    chain.input.write_text("one")
    assert chain.run() == ([], 0)


def test_a_changed_setting_makes_all_after_it_stale_although_their_inputs_are_the_same(chain):
    chain.run()
    chain.settings["first"] = {"speed": "slow"}
    assert chain.run() == (["first", "second"], 0)
    chain.settings["second"] = {"level": 9}
    assert chain.run() == (["second"], 0)


def test_a_missing_output_is_made_again(chain):
    chain.run()
    (chain.result / "file").unlink()
    chain.result.rmdir()
    assert chain.run() == (["second"], 0)
    assert (chain.result / "file").read_text() == "one"


def test_a_stale_step_starts_without_its_old_outputs_and_an_interrupted_one_with_them(chain):
    chain.failing = "second"
    assert chain.run() == (["first", "second"], 1)
    assert [row[0] for row in chain.record.rows] == ["first"]
    chain.failing = None
    assert chain.run() == (["second"], 0)
    assert chain.ran == [("second", True)]  # continues with the output that exists
    chain.input.write_text("three")
    chain.run()
    assert chain.ran == [("first", False), ("second", False)]


def test_an_interrupted_step_on_other_inputs_starts_anew(chain):
    chain.failing = "second"
    chain.run()
    chain.failing = None
    chain.settings["second"] = {"level": 9}
    chain.run()
    assert chain.ran == [("second", False)]


def test_a_kill_within_a_step_leaves_it_undone(chain):
    def killed():
        chain.middle.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        StepRecord(chain.folder / "steps.json").run(replace(chain.steps()[0], run=killed))
    assert chain.run() == (["first", "second"], 0)
    assert chain.middle.read_text() == "one"


def test_a_missing_input_is_named(chain):
    chain.input.unlink()
    with pytest.raises(FileNotFoundError, match="input"):
        chain.run()


def test_the_table_lists_state_time_size_and_path(chain):
    chain.input.write_text("x" * 2_300_000)
    chain.run()
    header, first, second = chain.record.table().splitlines()
    assert header.split() == ["step", "state", "time", "size", "path"]
    assert re.fullmatch(rf"first +done +\d+\.\d s +2\.3 MB  {re.escape(str(chain.middle))}", first)
    assert re.fullmatch(rf"second +done +\d+\.\d s +2\.3 MB  {re.escape(str(chain.result))}", second)
    chain.run()
    assert all(line.split()[1] == "current" for line in chain.record.table().splitlines()[1:])


def test_a_changed_output_is_set_aside_and_made_again(chain):
    chain.run()
    (chain.result / "more").write_text("added later")  # does not count
    assert chain.run() == ([], 0)
    (chain.result / "file").write_text("")
    assert chain.run() == (["second"], 0)
    assert (chain.result / "file").read_text() == "one"
    assert (chain.folder / "result.old" / "more").read_text() == "added later"
    chain.middle.write_text("two")
    assert chain.run() == (["first", "second"], 0)
    assert {path.name for path in chain.folder.iterdir()} >= {"result.old", "result.old2", "middle.old"}
    assert (chain.folder / "result.old" / "more").exists()


def test_only_some_outputs_are_checked(chain):
    def act():
        chain.middle.write_text("one")
        chain.result.mkdir(exist_ok=True)
        (chain.result / "big").write_text("x")

    step = Step("first", act, {}, [chain.input], [chain.middle, chain.result], checked=[chain.middle])
    record = chain.folder / "steps.json"
    StepRecord(record).run(step)
    (chain.result / "big").unlink()
    StepRecord(record).run(replace(step, run=pytest.fail))


def test_lines_that_move_from_one_input_to_another_are_noticed(tmp_path):
    first, second, result = tmp_path / "first", tmp_path / "second", tmp_path / "result"
    ran = []

    def run(one, other):
        first.write_text(one)
        second.write_text(other)

        def act():
            ran.append(one)
            result.write_text(one)

        StepRecord(tmp_path / "steps.json").run(Step("join", act, {}, [first, second], [result]))
        return len(ran)

    assert run("a\nb\n", "c\n") == 1
    assert run("a\nb\n", "c\n") == 1
    assert run("a\n", "b\nc\n") == 2


@pytest.mark.parametrize("damaged", [{}, {"settings": 3, "after": 4}, {"settings": "copy", "after": ["x"]}])
def test_a_step_with_a_damaged_signature_runs_again(chain, damaged):
    chain.run()
    record = read_json(chain.folder / "steps.json")
    record["first"]["signature"] = damaged
    write_json(chain.folder / "steps.json", record)
    assert chain.run() == (["first", "second"], 0)


def test_contents_count_and_not_times(tmp_path):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    files = [tmp_path / "one", tmp_path / "folder" / "two", tmp_path / "folder" / "deep" / "three"]
    for file in files:
        file.write_text(file.name)
    (tmp_path / "folder" / ".hidden").touch()
    found = fingerprints_of([files[0], tmp_path / "folder", tmp_path / "absent"])
    assert list(found) == [str(files[0]), str(files[2]), str(files[1])]
    assert found[str(files[0])]["sha256"] == hashlib.sha256(b"one").hexdigest()
    os.utime(files[0], ns=(1, 1))
    assert changed_file(found) is None
    files[1].write_text("owt")
    (tmp_path / "folder" / "more").touch()
    assert changed_file(found) == str(files[1])
    files[1].unlink()
    assert changed_file(found) == str(files[1])


def test_a_file_with_the_same_size_and_time_is_not_read_again(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    found = fingerprints_of([tmp_path / "file"])
    monkeypatch.setattr(step_record, "sha256_of_files", None)
    assert changed_file(found) is None


def test_a_finished_chain_may_lose_all_but_its_last_outputs(chain):
    steps = [replace(step, inputs=[chain.input]) for step in chain.steps()]
    record = StepRecord(chain.folder / "steps.json")
    assert not record.is_complete(steps)
    for step in steps:
        record.run(step)
    chain.middle.unlink()
    assert record.is_complete(steps)
    assert not record.is_complete([steps[0], replace(steps[1], inputs=[chain.middle])])  # was deleted
    assert not record.is_complete([steps[0], replace(steps[1], settings={"level": 9})])
    (chain.result / "file").write_text("changed")
    assert not record.is_complete(steps)


def test_figures_are_recorded_and_a_damaged_record_has_none(tmp_path):
    record = StepRecord(tmp_path / "steps.json")
    assert record.figures_of("measure") == {}
    record.run(Step("measure", lambda: {"loss": 0.5}, {"seed": 1}, [], []))
    assert record.figures_of("measure") == {"loss": 0.5}
    assert record.settings_of("measure") == {"seed": 1}
    record = StepRecord(tmp_path / "steps.json")
    record.run(Step("measure", lambda: {"loss": 0.7}, {"seed": 1}, [], []))
    assert [row[1] for row in record.rows] == ["current"]
    assert record.figures_of("measure") == {"loss": 0.5}
    content = read_json(record.path)
    content["measure"]["signature"]["settings"] = 3
    write_json(record.path, content)
    assert record.settings_of("measure") == {}


def test_settings_of_a_training_are_kept(tmp_path):
    def keep(record, settings, **fixed):
        record.keep_settings("data", settings, "Choose another folder", **fixed)

    record = StepRecord(tmp_path / "steps.json")
    keep(record, {"size": (3, 4), "seed": 1})
    keep(record, {"size": [3, 4], "seed": 1, "rate": None})  # the rate was not recorded before
    refused = f"{tmp_path} was begun with other settings: rate is None there and 5 now; seed is 1 there and None now. "
    with pytest.raises(ValueError, match=re.escape(f"{refused}Choose another folder")):
        keep(record, {"size": [3, 4], "rate": 5})
    with pytest.raises(ValueError, match="seed is 1 there and 2 now"):
        keep(record, {"size": 9, "seed": 2}, fixed=["seed"])
    keep(record, {"size": 9, "seed": 1}, fixed=["seed"])
    assert StepRecord(record.path).settings_of("data") == {"size": 9, "seed": 1}
    keep(record, {"seed": 2}, fixed=())
    assert record.settings_of("data") == {"seed": 2}


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (3, "3 is not a dictionary"),
        ({"signature": {}}, "has no settings"),
        ({"signature": {"settings": [1]}}, "has no settings"),
    ],
)
def test_a_training_does_not_go_on_without_its_settings(tmp_path, entry, problem):
    """Nor does the error advise to delete them."""
    record = StepRecord(tmp_path / "steps.json")
    write_json(record.path, {"data": entry})
    before = record.path.read_bytes()
    message = rf"steps\.json is not valid: data:? {problem}; restore it, or begin in an empty folder$"
    with pytest.raises(ValueError, match=message):
        record.keep_settings("data", {"seed": 1}, "")
    assert record.path.read_bytes() == before


def test_a_training_in_the_folder_of_a_chain_outlives_its_changes(chain):
    record = StepRecord(chain.folder / "steps.json")
    record.keep_settings("run", {"seed": 1}, "")
    record.add_seconds("stage 1: codes", 2)
    chain.run()
    chain.input.write_text("two")
    assert chain.run() == (["first", "second"], 0)
    assert record.settings_of("run") == {"seed": 1}
    assert record.seconds_of("stage 1: codes") == 2


def test_what_an_earlier_version_recorded_is_taken_where_there_is_no_entry(tmp_path):
    record = StepRecord(tmp_path / "steps.json")
    write_json(tmp_path / "run.json", {"seed": 1})
    write_json(tmp_path / "tokenizer.json", {"model": {}})  # a file of something else
    assert record.settings_of("run") == {"seed": 1}
    assert record.settings_of("tokenizer") == {}
    with pytest.raises(ValueError, match="seed is 1 there and 2 now"):
        record.keep_settings("run", {"seed": 2}, "")
    assert not record.path.exists()
    record.keep_settings("run", {"seed": 1}, "")
    write_json(tmp_path / "run.json", {"seed": 2})
    record.keep_settings("run", {"seed": 1}, "")


FIRST = ProcessRank(0, 2)
SECOND = ProcessRank(1, 2)


def test_the_first_process_alone_runs_a_step_of_its_own(tmp_path):
    ran = []
    for process in (FIRST, SECOND):  # in turn, as within the context
        StepRecord(tmp_path / "steps.json", process).run(Step("copy", partial(ran.append, process.rank), {}, [], []))
    assert ran == [0]


def test_all_processes_run_a_step_of_all_and_the_first_writes(tmp_path):
    ran = []
    result = tmp_path / "result"
    result.write_text("of another plan")
    path = tmp_path / "steps.json"

    def copy(process):
        ran.append(process.rank)
        if process is FIRST:
            StepRecord(path, SECOND).run(step_of(SECOND))  # while the first is at it
            assert read_json(path)["copy"]["done"] is False
            result.write_text("new")

    def step_of(process):
        return Step("copy", partial(copy, process), {}, [], [result], by_all=True)

    StepRecord(path, FIRST).run(step_of(FIRST))
    assert ran == [0, 1]
    assert read_json(path)["copy"]["done"] is True
    assert (tmp_path / "result.old").read_text() == "of another plan"
    StepRecord(path, SECOND).run(step_of(SECOND))
    assert ran == [0, 1]


def test_a_step_that_fails_and_makes_nothing_leaves_nothing(tmp_path):
    def fail():
        raise ValueError("it cannot be")

    record = StepRecord(tmp_path / "steps.json")
    with pytest.raises(ValueError, match="it cannot be"):
        record.run(Step("first", fail, {}, [], [tmp_path / "result"]))
    assert not list(tmp_path.iterdir())
    record.run(Step("first", lambda: (tmp_path / "result").touch(), {}, [], [tmp_path / "result"]))
    with pytest.raises(ValueError, match="it cannot be"):
        record.run(Step("second", fail, {}, [], [tmp_path / "other"]))
    assert list(read_json(record.path)) == ["first"]


def test_a_file_that_may_be_edited_does_not_make_its_step_again(chain):
    chain.steps = lambda: [replace(step, editable=[chain.result / "card"]) for step in Chain.steps(chain)]
    chain.run()
    (chain.result / "card").write_text("edited")
    assert chain.run() == ([], 0)
    (chain.result / "file").write_text("edited")
    assert chain.run() == (["second"], 0)


def test_an_invalidated_step_runs_again_alone(chain):
    chain.run()
    chain.record.invalidate("second")
    chain.record.invalidate("none")
    assert chain.run() == (["second"], 0)


def test_a_step_that_comes_after_a_complete_chain_runs_alone(chain):
    chain.run()
    chain.middle.unlink()
    last = Step("third", lambda: (chain.folder / "third").touch(), {}, [], [chain.folder / "third"])
    record = StepRecord(chain.folder / "steps.json")
    assert record.is_complete(chain.steps()[:2]) is False  # the second step reads what the first one made
    steps = [replace(step, inputs=[]) for step in chain.steps()]
    chain.steps = lambda: steps
    chain.run()
    chain.middle.unlink()
    record = StepRecord(chain.folder / "steps.json")
    assert record.is_complete(steps)
    record.skip(steps)
    record.run(last)
    assert [row[:2] for row in record.rows] == [("first", "current"), ("second", "current"), ("third", "done")]
    assert StepRecord(chain.folder / "steps.json").is_complete([*steps, last])
    assert not chain.middle.exists()


class EvaluatedChain(Chain):
    """The steps of ``Chain``, of which the second also copies a file that only decides what is evaluated."""

    def __init__(self, folder):
        super().__init__(folder)
        self.evaluated, self.figures = folder / "evaluated", folder / "figures"
        self.evaluated.write_text("eins")

    def steps(self):
        first, second = super().steps()
        second = replace(
            second, outputs=[self.result, self.figures], evaluated=[self.evaluated], of_evaluation=[self.figures]
        )
        third = Step("third", lambda: self.act("third"), {}, [], [self.folder / "third"])
        return [first, second, third]

    def act(self, name):
        if name != "third":
            super().act(name)
        else:
            self.ran.append((name, False))
            (self.folder / "third").touch()
        if name == "second":
            self.figures.write_text(self.evaluated.read_text())


def test_other_files_to_evaluate_on_repeat_the_evaluation_and_nothing_else(tmp_path):
    chain = EvaluatedChain(tmp_path)
    assert chain.run() == (["first", "second", "third"], 0)
    chain.evaluated.write_text("zwei")
    assert not StepRecord(tmp_path / "steps.json").is_complete(chain.steps())
    assert chain.run() == (["second"], 0)
    assert chain.ran == [("second", True)]  # continues with what does not depend on the evaluation
    assert (chain.figures.read_text(), (tmp_path / "figures.old").read_text()) == ("zwei", "eins")
    assert not (tmp_path / "result.old").exists()
    assert chain.run() == ([], 0)
    chain.input.write_text("two")  # decides everything
    assert chain.run() == (["first", "second", "third"], 0)
    assert (tmp_path / "result.old").exists()


def test_a_killed_evaluation_goes_on_and_an_output_that_changed_repeats_all(tmp_path):
    chain = EvaluatedChain(tmp_path)
    chain.run()
    chain.evaluated.write_text("zwei")
    chain.failing = "second"
    assert chain.run() == (["second"], 1)
    chain.failing = None
    assert chain.run() == (["second"], 0)
    assert chain.figures.read_text() == "zwei"
    chain.evaluated.write_text("drei")
    (chain.result / "file").write_text("damaged")
    assert chain.run() == (["second", "third"], 0)
    assert ((chain.result / "file").read_text(), chain.figures.read_text()) == ("one", "drei")


def test_a_step_without_files_to_evaluate_on_is_recorded_as_before(chain):
    chain.run()
    assert all(
        set(entry["signature"]) == {"settings", "inputs", "after"} for entry in read_json(chain.record.path).values()
    )
