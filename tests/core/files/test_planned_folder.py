"""Planned folders: plans, seals, and the error about another plan."""

from __future__ import annotations

import json
import os
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.core.files.atomic_files import write_json
from mlsm_plugin.core.files.planned_folder import PlannedFolder, differences

PLAN = {"size": 3, "blocks": {"length": 8, "mode": "complete"}, "splits": ("train", "valid")}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda values: st.lists(values, max_size=8) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=12,
)


def without_none(value):
    """A key with None, or with nothing but None, counts as absent."""
    if isinstance(value, dict):
        kept = {key: without_none(own) for key, own in value.items()}
        return {key: own for key, own in kept.items() if own is not None} or None
    return value


@given(found=st.dictionaries(st.text(max_size=3), VALUES), wanted=st.dictionaries(st.text(max_size=3), VALUES))
def test_plans_differ_exactly_where_their_values_do(found, wanted):
    assert differences(found, json.loads(json.dumps(found))) == []
    assert (differences(found, wanted) == []) == (without_none(found) == without_none(wanted))
    assert bool(differences(found, wanted)) == bool(differences(wanted, found))


@pytest.mark.parametrize(
    ("found", "wanted", "named"),
    [
        ({"meta": {"lambda": 1}, "b": 2}, {"meta": {"lambda": 3}, "b": 2}, ["lambda is 1 there and 3 now"]),
        ({"prints": {"a": "x"}}, {"prints": {"a": "y"}}, ["prints.a is 'x' there and 'y' now"]),
        ({"a": 1}, {"b": {"c": 1}}, ["a is 1 there and None now", "b.c is None there and 1 now"]),
        ({"a": [0, 1]}, {"a": [0, 2]}, ["a is [0, 1] there and [0, 2] now"]),
        ({"a": [*range(9)]}, {"a": [0, 1, 2, 3, 9, 5, 6, 7, 9]}, ["a[4] is 4 there and 9 now"]),
        (
            {"a": [*range(9)]},
            {"a": [*range(8)]},
            ["a is [0, 1, 2, ..., 8] (9 values) there and [0, 1, 2, ..., 7] (8 values) now"],
        ),
        ([1], {"a": 1}, ["the plan is [1] there and {'a': 1} now"]),
    ],
)
def test_each_difference_is_named_with_both_values(found, wanted, named):
    assert differences(found, wanted) == named


def test_folder_from_nothing_to_complete(tmp_path):
    folder = PlannedFolder(tmp_path / "deep" / "folder", PLAN)
    assert folder.recorded_plan is None
    assert not folder.is_complete()
    assert list(tmp_path.iterdir()) == []
    folder.begin()
    assert folder.recorded_plan == folder.plan
    assert not folder.is_complete()
    assert json.loads((folder.directory / "plan.json").read_text()) == {**PLAN, "splits": ["train", "valid"]}
    (folder.directory / f".shard.{'0' * 32}.tmp").write_text("half")
    folder.seal({**folder.plan, "total": 7})
    assert PlannedFolder(folder.directory, PLAN).is_complete()
    assert folder.sealed_content()["total"] == 7
    assert sorted(path.name for path in folder.directory.iterdir()) == ["meta.json", "plan.json"]
    folder.unseal()
    folder.unseal()
    assert not folder.is_complete()


def test_same_plan_resumes_and_leaves_its_file_alone(tmp_path):
    PlannedFolder(tmp_path, PLAN).begin()
    before = (tmp_path / "plan.json").stat()
    PlannedFolder(tmp_path, dict(reversed(PLAN.items()))).begin()
    assert (tmp_path / "plan.json").stat() == before


@pytest.mark.parametrize("sealed", [False, True])
def test_another_plan_is_refused_with_what_to_do_and_changes_nothing(tmp_path, sealed):
    first = PlannedFolder(tmp_path, PLAN)
    first.begin()
    if sealed:
        first.seal({"x": 1})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = PlannedFolder(tmp_path, {**PLAN, "size": 4}, advice="Do this.")
    for refused in (other.check, other.begin, other.is_complete):
        message = f"{tmp_path} was begun with other settings: size is 3 there and 4 now. Do this."
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            refused()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_folder_with_a_seal_only_is_complete_or_made_anew(tmp_path):
    """A folder such as a dictionary's: ``meta.json`` holds the plan and what came out."""

    def folder(**changes):
        return PlannedFolder(tmp_path, {"atoms": 5, "seed": 1, **changes}, resumable=False)

    (tmp_path / "dictionary.npy").write_bytes(b"half a run")
    assert not folder().is_complete()
    folder().seal({"health": 0.5, "seed": 1, "atoms": 5})
    assert folder().is_complete()
    with pytest.raises(ValueError, match="seed is 1 there and 2 now"):
        folder(seed=2).check()
    with pytest.raises(AssertionError):
        folder().begin()


def test_a_folder_whose_plan_is_gone_is_refused(tmp_path):
    folder = PlannedFolder(tmp_path, PLAN)
    folder.begin()
    folder.seal({**folder.plan, "total": 1})
    (tmp_path / "plan.json").unlink()
    with pytest.raises(ValueError, match=r"plan\.json is missing; restore it, or begin in an empty folder"):
        folder.begin()


def test_damaged_plan_is_named(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path / 'plan.json'))} is not valid JSON"):
        PlannedFolder(tmp_path, PLAN).check()


def test_a_plan_that_appears_after_the_first_look_is_noticed(tmp_path, monkeypatch):
    folder, real = PlannedFolder(tmp_path, PLAN), PlannedFolder.check

    def another_process_is_faster(self):
        real(self)
        if not (tmp_path / "plan.json").exists():
            write_json(tmp_path / "plan.json", {**PLAN, "size": 4})

    monkeypatch.setattr(PlannedFolder, "check", another_process_is_faster)
    with pytest.raises(ValueError, match="was begun with other settings"):
        folder.begin()


@pytest.mark.parametrize("links", [True, False])
def test_of_many_plans_at_the_same_time_one_wins(tmp_path, monkeypatch, links):
    if not links:

        def no_links(source, target):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_links)
    barrier, refused, begun = threading.Barrier(6), [], []

    def begin(size: int) -> None:
        barrier.wait(timeout=60)
        try:
            PlannedFolder(tmp_path / "folder", {"size": size}).begin()
            begun.append(size)
        except ValueError:
            refused.append(size)

    threads = [threading.Thread(target=begin, args=(number % 3,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["plan.json"]
    assert len(begun) + len(refused) == 6
    if links:
        winner = json.loads((tmp_path / "folder" / "plan.json").read_text())["size"]
        assert begun == [winner] * 2


def test_of_many_differences_the_first_are_named(tmp_path):
    PlannedFolder(tmp_path, {f"option{n}": 1 for n in range(9)}).begin()
    with pytest.raises(ValueError, match=re.escape("; option3 is 1 there and 2 now; and 5 more differences. Delete")):
        PlannedFolder(tmp_path, {f"option{n}": 2 for n in range(9)}).begin()


@pytest.mark.parametrize("content", ["null", "[1]", "3", "{", "[" * 100_000])
def test_a_damaged_plan_is_no_plan(tmp_path, content):
    (tmp_path / "plan.json").write_text(content)
    for seal in (False, True):
        if seal:
            (tmp_path / "meta.json").write_text(json.dumps(PLAN))
        with pytest.raises(ValueError, match=r"plan\.json is not .*; restore it, or begin in an empty folder"):
            PlannedFolder(tmp_path, PLAN).begin()
    assert (tmp_path / "plan.json").read_text() == content
