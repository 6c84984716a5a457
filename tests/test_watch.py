"""The view from outside: what happens to a path is seen, under the name it has by then, in the order in which it happened."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from contracts.lab.watch import Watch


class Tree:
    """A watched folder, and what was seen to happen in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.watch = Watch({"root": root})

    def seen(self) -> list[tuple[str, str]]:
        """What was seen since the last call, as (operation, path)."""
        before = len(self.watch.events)
        self.watch.drain()
        return [(event["operation"], event["path"]) for event in self.watch.events[before:]]


@pytest.fixture
def tree(tmp_path):
    tree = Tree(tmp_path)
    with contextlib.closing(tree.watch):
        yield tree


def test_a_file_is_created_modified_closed_and_deleted(tree):
    (tree.root / "a").write_text("text")
    (tree.root / "a").unlink()
    assert tree.seen() == [("created", "a"), ("modified", "a"), ("closed", "a"), ("deleted", "a")]


def test_nothing_is_seen_where_nothing_is_written(tree):
    (tree.root / "a").write_text("text")
    tree.seen()
    (tree.root / "a").read_text()
    assert tree.seen() == []


def test_what_was_there_before_is_no_event_and_is_watched(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a").touch()
    tree = Tree(tmp_path)
    with contextlib.closing(tree.watch):
        assert tree.seen() == []
        (tmp_path / "old" / "a").write_text("text")
        assert tree.seen() == [("modified", "old/a"), ("closed", "old/a")]


def test_both_ends_of_a_rename_share_a_cookie(tree):
    (tree.root / "tmp_step_1").mkdir()
    (tree.root / "tmp_step_1").rename(tree.root / "step_1")
    tree.seen()
    gone, come = tree.watch.events[-2:]
    assert (gone["operation"], gone["path"], come["operation"], come["path"]) == (
        "moved-from",
        "tmp_step_1",
        "moved-to",
        "step_1",
    )
    assert gone["cookie"] == come["cookie"] != 0
    assert gone["directory"] and come["directory"]


def test_files_in_a_folder_that_was_renamed_are_seen_under_its_new_name(tree):
    (tree.root / "tmp_step_1" / "model").mkdir(parents=True)
    tree.seen()
    (tree.root / "tmp_step_1").rename(tree.root / "step_1")
    (tree.root / "step_1" / "model" / "late").touch()
    assert tree.seen() == [
        ("moved-from", "tmp_step_1"),
        ("moved-to", "step_1"),
        ("created", "step_1/model/late"),
        ("closed", "step_1/model/late"),
    ]


def test_a_writer_that_holds_a_file_open_is_seen_under_the_new_name(tree):
    (tree.root / "tmp_step_1").mkdir()
    tree.seen()
    with open(tree.root / "tmp_step_1" / "shard", "w") as file:
        (tree.root / "tmp_step_1").rename(tree.root / "step_1")
        file.write("late")
    assert tree.seen()[-2:] == [("modified", "step_1/shard"), ("closed", "step_1/shard")]


def test_a_folder_that_moved_before_its_watch_could_begin_is_seen_as_if_it_had_been_watched(tree):
    (tree.root / "tmp_step_1").mkdir()
    (tree.root / "tmp_step_1" / "early").touch()
    (tree.root / "tmp_step_1").rename(tree.root / "step_1")
    assert tree.seen() == [
        ("created", "tmp_step_1"),
        ("created", "tmp_step_1/early"),
        ("moved-from", "tmp_step_1"),
        ("moved-to", "step_1"),
    ]
    (tree.root / "step_1" / "late").touch()
    assert tree.seen() == [("created", "step_1/late"), ("closed", "step_1/late")]


@pytest.mark.parametrize("names", [("step_1",), ("ready_step_1", "step_1")])
def test_a_folder_in_one_that_has_moved_since_is_seen_with_its_files(tree, names):
    (tree.root / "tmp_step_1").mkdir()
    tree.seen()
    (tree.root / "tmp_step_1" / "tokenizer").mkdir()
    (tree.root / "tmp_step_1" / "tokenizer" / "tokenizer.json").touch()
    path = tree.root / "tmp_step_1"
    for name in names:
        path = path.rename(tree.root / name)
    seen = tree.seen()
    assert seen[:2] == [("created", "tmp_step_1/tokenizer"), ("created", "tmp_step_1/tokenizer/tokenizer.json")]
    (tree.root / "step_1" / "tokenizer" / "late").touch()
    assert tree.seen() == [("created", "step_1/tokenizer/late"), ("closed", "step_1/tokenizer/late")]


def test_no_folder_stays_open_that_is_gone(tree):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        (tree.root / f"step_{number}" / "below").mkdir(parents=True)
        tree.seen()
        shutil.rmtree(tree.root / f"step_{number}")
        tree.seen()
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tree.watch.trees.values()) == [("root", "")]


def test_a_folder_that_comes_from_elsewhere_brings_what_it_holds(tmp_path):
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    (elsewhere / "step_1").mkdir(parents=True)
    (elsewhere / "step_1" / "early").touch()
    root.mkdir()
    tree = Tree(root)
    with contextlib.closing(tree.watch):
        (elsewhere / "step_1").rename(root / "step_1")
        assert tree.seen() == [("created", "step_1/early"), ("moved-to", "step_1")]
        (root / "step_1" / "late").touch()
        assert tree.seen() == [("created", "step_1/late"), ("closed", "step_1/late")]


def test_nested_folders_that_are_made_at_once_are_seen_with_every_file(tree):
    paths = {f"{a}/{b}/{c}" for a in "xyz" for b in "uvw" for c in range(5)}
    for path in paths:
        (tree.root / path).parent.mkdir(parents=True, exist_ok=True)
        (tree.root / path).touch()
    created = {path for operation, path in tree.seen() if operation == "created"}
    assert created == paths | {"x", "y", "z"} | {f"{a}/{b}" for a in "xyz" for b in "uvw"}
    (tree.root / "z/w/0").write_text("text")
    assert tree.seen() == [("modified", "z/w/0"), ("closed", "z/w/0")]


def test_events_of_several_trees_come_in_the_order_in_which_they_happened(tmp_path):
    for name in ("marks", "root"):
        (tmp_path / name).mkdir()
    watch = Watch({"marks": tmp_path / "marks", "root": tmp_path / "root"})
    with contextlib.closing(watch):
        wanted = [(("marks", "root")[number % 2], str(number)) for number in range(200)]
        for tree, name in wanted:
            (tmp_path / tree / name).touch()
        watch.drain()
    assert [(event["tree"], event["path"]) for event in watch.events if event["operation"] == "created"] == wanted


def test_a_link_to_a_folder_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    tree = Tree(tmp_path / "root")
    with contextlib.closing(tree.watch):
        os.symlink(tmp_path / "elsewhere", tree.root / "latest")
        assert tree.seen() == [("created", "latest")]
        (tmp_path / "elsewhere" / "a").touch()
        assert tree.seen() == []


def test_a_folder_that_is_deleted_and_made_again_is_watched_again(tree):
    for _ in range(2):
        (tree.root / "step_1").mkdir()
        tree.seen()
        (tree.root / "step_1" / "a").touch()
        assert tree.seen() == [("created", "step_1/a"), ("closed", "step_1/a")]
        (tree.root / "step_1" / "a").unlink()
        (tree.root / "step_1").rmdir()
        assert tree.seen() == [("deleted", "step_1/a"), ("deleted", "step_1")]


def test_a_flood_that_the_kernel_could_not_keep_is_said(tree):
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    descriptor = os.open(tree.root / "a", os.O_CREAT | os.O_WRONLY)
    other = os.open(tree.root / "b", os.O_CREAT | os.O_WRONLY)
    # Equal events in a row are merged, so two files take turns.
    for _ in range(limit // 2 + 10):
        os.write(descriptor, b"x"), os.write(other, b"x")
    os.close(descriptor), os.close(other)
    tree.seen()
    assert tree.watch.overflowed
