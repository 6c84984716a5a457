"""Faults that a case names: what each does to a rank or to a directory, and that a history says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from contracts.case import Blind, Case, Exit, Fail, Finalize, Generation, Kill, PowerLoss, Save, Tamper, Train
from contracts.implementation import Layout
from contracts.lab import tamper
from contracts.lab.lab import Lab

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])))
        with Lab("lab_faults:WritesFourFiles", directory=tmp_path_factory.mktemp("faults")) as lab:
            yield lab


def case(*steps, faults=()) -> Case:
    return Case(generations=(Generation(ranks=2, steps=steps, faults=faults),))


def of_rank_1(history) -> set[str]:
    return {name for name in history.generations[0].names if name.startswith("rank-1/")}


# --- in a rank -------------------------------------------------------------------------------------------------------


def test_what_fails_at_an_open_stays_full_and_the_rank_says_so(lab):
    history = lab.run(case(Train(1), Save(), Finalize(), faults=(Fail(rank=1, at=r"/[bcd]$", event=1, error="ENOSPC"),)))
    generation = history.generations[0]
    assert of_rank_1(history) == {"rank-1/", "rank-1/a", "rank-1/b"}
    (raised,) = generation.of("raised")
    assert (raised.rank, raised.step) == (1, 1)
    assert "No space left on device" in raised.error
    assert [(line["fault"], line["rank"], line["paths"]) for line in generation.fired] == [("Fail", 1, ["rank-1/c"])]
    assert "rank-1/c" not in generation.writers


def test_a_fault_of_the_second_save_leaves_the_first_alone(lab):
    history = lab.run(case(Save(), Save(), Finalize(), faults=(Fail(rank=1, error="EACCES", save=2),)))
    assert {f"rank-1/{name}" for name in "abcd"} < of_rank_1(history)
    (raised,) = history.generations[0].of("raised")
    assert (raised.rank, raised.step) == (1, 1)
    assert "Permission denied" in raised.error


def test_a_writer_is_killed_and_its_rank_is_not(lab):
    history = lab.run(
        case(Save(), Save(), Finalize(), faults=(Fail(rank=1, event=2, error="SIGKILL", save=2),)), "lab_faults:Forks"
    )
    generation = history.generations[0]
    assert [outcome.status for outcome in generation.launch.outcomes] == ["returned", "returned"]
    assert [(line["fault"], line["rank"], line["paths"]) for line in generation.fired] == [("Fail", 1, ["rank-1-2/c"])]
    its = {name for name in generation.names if name.startswith("rank-1-2/")}
    assert its == {"rank-1-2/", "rank-1-2/a", "rank-1-2/b", "rank-1-2/by-the-rank"}


def test_a_kill_is_counted_from_the_save_that_it_names(lab):
    history = lab.run(case(Train(1), Save(), faults=(Kill(rank=1, event=2, save=1),)))
    assert history.failures == []
    assert of_rank_1(history) == {"rank-1/", "rank-1/a"}
    assert [(line["fault"], line["operation"], line["paths"]) for line in history.generations[0].fired] == [
        ("Kill", "open", ["rank-1/b"])
    ]


def test_a_torn_file_is_the_last_that_a_rank_writes(lab):
    history = lab.run(case(Train(1), Save(), faults=(Kill(rank=1, event=2, save=1, torn=True),)))
    generation = history.generations[0]
    assert history.failures == []
    assert generation.launch.outcomes[1].signal == "SIGXFSZ"
    its = {name: size for name, size in generation.names.items() if name.startswith("rank-1/")}
    assert its == {"rank-1/": 0, "rank-1/a": 4, "rank-1/b": 4, "rank-1/c": 1}


def test_power_is_lost_on_every_rank_and_takes_what_was_not_flushed(lab):
    history = lab.run(case(Save(), Save(), faults=(PowerLoss(rank=1, event=4, save=2),)), "lab_faults:Flushes")
    generation = history.generations[0]
    assert history.failures == []
    assert [outcome.signal for outcome in generation.launch.outcomes] == ["SIGKILL", "SIGKILL"]
    assert [(line["rank"], line["operation"], line["paths"]) for line in generation.fired] == [(1, "fsync", ["rank-1-2"])]
    # Of the second save, rank 1 has flushed the first of its two files, and not their directory.
    assert {name for name in generation.names if name.startswith("rank-1")} == {"rank-1-1/", "rank-1-1/a", "rank-1-1/b"}
    assert generation.names["rank-1-1/a"] == 1
    assert "rank-1-2" in generation.lost["gone"]
    flushes = [event.paths[0] for event in generation.of("flush", rank=1)]
    assert flushes == ["rank-1-1/a", "rank-1-1", ".", "rank-1-2/a"]


def test_where_names_are_on_the_disk_bytes_alone_are_lost(lab):
    history = lab.run(case(Save(), Save(), faults=(PowerLoss(rank=1, event=4, save=2, lost="bytes"),)), "lab_faults:Flushes")
    its = {name: size for name, size in history.generations[0].names.items() if name.startswith("rank-1-2/")}
    assert its == {"rank-1-2/": 0, "rank-1-2/a": 1, "rank-1-2/b": 0}


def test_power_that_is_never_lost_takes_nothing(lab):
    history = lab.run(case(Save(), faults=(PowerLoss(rank=1, event=99),)), "lab_faults:Flushes")
    assert history.generations[0].lost == {}
    assert "rank 1 was to be killed at a file event, and had fewer" in history.failures[0]


def test_a_rank_that_does_not_see_a_path_says_what_it_ran_into(lab):
    history = lab.run(case(Save(), Save(), faults=(Blind(rank=1, at="^rank-1$"),)), "lab_faults:LooksBeforeItWrites")
    generation = history.generations[0]
    assert [(event.rank, event.step) for event in generation.of("raised")] == [(1, 1)]
    assert [event.step for event in generation.of("step-done", rank=0)] == [0, 1]


def test_a_process_that_exits_after_its_save_has_not_failed(lab):
    history = lab.run(case(Train(1), Save(final=True), Exit()))
    generation = history.generations[0]
    assert history.failures == []
    assert len(generation.of("exits")) == 2
    assert generation.of("ends") == []


def test_a_tree_that_is_removed_is_seen_file_by_file(lab):
    history = lab.run(case(Train(1), Save()), "lab_faults:RemovesATree")
    removed = [
        (e.operation, e.paths[0]) for e in history.generations[0].of("attempt", rank=0) if e.operation in ("remove", "rmdir")
    ]
    assert removed == [("remove", "tree/below/file"), ("rmdir", "tree/below"), ("rmdir", "tree")]


# --- to a directory --------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    for step in (9, 10):
        (tmp_path / f"step_{step}" / "below").mkdir(parents=True)
        (tmp_path / f"step_{step}" / "a").write_bytes(b"0123456789")
        (tmp_path / f"step_{step}" / "below" / "b").write_bytes(b"abcdefghij")
    (tmp_path / "tmp_step_11").mkdir()
    return tmp_path


@pytest.mark.parametrize(("how", "left"), [("truncate", b"01234"), ("empty", b""), ("remove", None), ("flip", b"01234%6789")])
def test_damage_is_done_to_a_file_of_the_newest_checkpoint(root, how, left):
    done = tamper.apply(Tamper(how=how, file=2), root, Layout())  # two files, counted around
    assert done == {"how": how, "checkpoint": "step_10", "paths": ["step_10/a"]}
    path = root / "step_10" / "a"
    assert (path.read_bytes() if path.exists() else None) == left
    assert (root / "step_9" / "a").read_bytes() == b"0123456789"


def test_foreign_names_look_like_steps_and_are_none(root):
    done = tamper.apply(Tamper(how="foreign"), root, Layout())
    assert {"step_100.backup", "step_abc", "step_notes.txt"} < set(done["paths"])
    assert (root / "step_100.backup" / "below" / "b").exists()
    assert [path.name for path in tamper.published(root, Layout())] == ["step_9", "step_10"]


def test_times_are_turned_around(root):
    tamper.apply(Tamper(how="older-touched"), root, Layout())
    assert (root / "step_9").stat().st_mtime > (root / "step_10").stat().st_mtime


def test_litter_goes_where_nothing_is_published(root):
    assert tamper.apply(Tamper(how="litter"), root, Layout())["paths"] == ["tmp_step_11/left-over.bin"]


def test_a_checkpoint_with_its_mark_is_not_the_newest(root):
    (root / "step_10" / ".incomplete").touch()
    assert tamper.apply(Tamper(how="empty"), root, Layout(incomplete=".incomplete"))["checkpoint"] == "step_9"


def test_nothing_is_done_where_nothing_is_published(tmp_path):
    assert tamper.apply(Tamper(how="empty"), tmp_path, Layout())["paths"] == []
