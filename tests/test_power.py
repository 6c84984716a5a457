"""What a power loss leaves: bytes that were flushed, under names that were, replayed from hand-written events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.lab import power


def do(operation: str, *paths: str, **how: Any) -> dict[str, Any]:
    return {"operation": operation, "paths": list(paths), "pid": 1, "thread": 1} | how


def write(path: str, **how: Any) -> dict[str, Any]:
    return do("open", path, **{"truncates": True, "exclusive": False} | how)


def fsync(path: str, size: int = 0) -> dict[str, Any]:
    return do("fsync", path, sizes={path: size})


def flushed(path: str, size: int = 5) -> list[dict[str, Any]]:
    return [write(path), fsync(path, size)]


@pytest.fixture
def root(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def lose(
    root: Path, *events: dict[str, Any], names: bool = True, standing: list[str] | None = None
) -> tuple[dict[str, str], dict]:
    """What is left of a tree to which `events` happened, file by file, and what the loss says that it took."""
    disk = power.Disk(standing or [])
    for event in power.happened(list(events), root):
        disk.happens(event)
    lost = power.lose(root, disk, root.parent / "kept", names=names)
    return {str(path.relative_to(root)): path.read_text() if path.is_file() else "/" for path in sorted(root.rglob("*"))}, lost


def fill(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_what_was_flushed_stays(root):
    fill(root, step_1__a="bytes")
    left, lost = lose(root, do("mkdir", "step_1"), *flushed("step_1/a"), fsync("step_1"), fsync("."))
    assert left == {"step_1": "/", "step_1/a": "bytes"}
    assert lost == {"cut": {}, "gone": [], "back": [], "unseen": []}


def test_bytes_that_were_not_flushed_are_gone_and_their_name_is_not(root):
    fill(root, a="bytes")
    left, lost = lose(root, write("a"), fsync("."))
    assert left == {"a": ""}
    assert lost["cut"] == {"a": [5, 0]}


def test_a_file_is_cut_to_what_its_flush_covered(root):
    fill(root, a="bytes and more")
    assert lose(root, *flushed("a"), fsync("."))[0] == {"a": "bytes"}


def test_a_file_that_was_begun_anew_is_empty_and_one_that_was_appended_to_is_not(root):
    fill(root, anew="other", more="bytes!")
    events = [*flushed("anew"), *flushed("more"), fsync("."), write("anew"), write("more", truncates=False)]
    assert lose(root, *events)[0] == {"anew": "", "more": "bytes"}


def test_a_name_that_was_not_flushed_is_gone_with_all_below_it(root):
    fill(root, step_1__a="bytes", b="bytes")
    left, lost = lose(root, *flushed("b"), fsync("."), do("mkdir", "step_1"), *flushed("step_1/a"), fsync("step_1"))
    assert left == {"b": "bytes"}
    assert lost["gone"] == ["step_1"]


def test_a_flushed_file_needs_the_flush_of_its_directory_as_well(root):
    fill(root, step_1__a="bytes")
    assert lose(root, do("mkdir", "step_1"), *flushed("step_1/a"), fsync("."))[0] == {"step_1": "/"}


def test_a_rename_that_was_not_flushed_is_undone(root):
    fill(root, step_1__a="bytes")
    begun = [do("mkdir", "tmp"), *flushed("tmp/a"), fsync("tmp"), fsync(".")]
    left, lost = lose(root, *begun, do("rename", "tmp", "step_1"))
    assert left == {"tmp": "/", "tmp/a": "bytes"}
    assert (lost["gone"], lost["back"]) == (["step_1"], ["tmp"])


def test_a_rename_that_was_flushed_stays(root):
    fill(root, step_1__a="bytes")
    begun = [do("mkdir", "tmp"), *flushed("tmp/a"), fsync("tmp"), fsync(".")]
    assert lose(root, *begun, do("rename", "tmp", "step_1"), fsync("."))[0] == {"step_1": "/", "step_1/a": "bytes"}


def test_names_may_have_got_to_the_disk_before_their_bytes(root):
    fill(root, step_1__a="bytes")
    left, _ = lose(root, do("mkdir", "tmp"), write("tmp/a"), do("rename", "tmp", "step_1"), names=False)
    assert left == {"step_1": "/", "step_1/a": ""}


@pytest.mark.parametrize("flush", ["old", "new"])
def test_a_rename_into_another_directory_is_done_when_either_is_flushed(root, flush):
    fill(root, new__a="bytes")
    (root / "old").mkdir()
    begun = [do("mkdir", "old"), do("mkdir", "new"), *flushed("old/a"), fsync("old"), fsync(".")]
    assert lose(root, *begun, do("rename", "old/a", "new/a"), fsync(flush))[0] == {"new": "/", "new/a": "bytes", "old": "/"}


def test_what_was_removed_or_replaced_comes_back_where_that_was_not_flushed(root):
    fill(root, pointer="new")
    fill(root.parent, kept__1="bytes", kept__2="old")
    events = [do("remove", "a", kept="1"), do("rename", "pointer.new", "pointer", kept="2")]
    left, lost = lose(root, *events, standing=["a", "pointer", "pointer.new"])
    assert left == {"a": "bytes", "pointer": "old", "pointer.new": "new"}
    assert lost["back"] == ["a", "pointer.new"]


def test_a_tree_whose_removal_was_flushed_does_not_come_back(root):
    fill(root, b="bytes")
    removed = [do("remove", "step_1/a"), do("rmdir", "step_1")]
    assert lose(root, *removed, fsync("."), standing=["b", "step_1/", "step_1/a"])[0] == {"b": "bytes"}


def test_links_come_and_go_as_files_do(root):
    (root / "latest").symlink_to("step_2")
    (root.parent / "kept").mkdir()
    (root.parent / "kept" / "1").symlink_to("step_1")
    lose(root, do("symlink", "new"), do("rename", "new", "latest", kept="1"), standing=["latest"])
    assert (root / "latest").readlink() == Path("step_1")
    lose(root, do("symlink", "new"), do("rename", "new", "latest"), fsync("."), standing=["latest"])
    assert (root / "latest").readlink() == Path("step_1")


def test_a_sync_flushes_everything(root):
    fill(root, step_1__a="bytes")
    sync = do("sync", ".", sizes={"step_1": 0, "step_1/a": 5})
    assert lose(root, do("mkdir", "step_1"), write("step_1/a"), sync)[0] == {"step_1": "/", "step_1/a": "bytes"}


def test_what_could_not_be_done_changes_nothing(root):
    fill(root, step_1__a="bytes", b="bytes")
    failed = [
        do("mkdir", "step_1"), do("rmdir", "step_1"), do("remove", "nowhere"), do("rename", "nowhere", "b"), write("no/where"),
        write("b", exclusive=True), do("rename", "b", "step_1"), fsync("."),
        do("remove", "empty"), do("rename", "b", "empty"), do("rmdir", "b"), fsync("."),
    ]  # fmt: skip
    (root / "empty").mkdir()
    left, _ = lose(root, *failed, standing=["b", "empty/", "step_1/", "step_1/a"])
    assert left == {"b": "bytes", "empty": "/", "step_1": "/", "step_1/a": "bytes"}


def test_what_a_process_was_about_to_do_when_it_was_killed_did_not_happen(root):
    fill(root, tmp__a="bytes")
    about = [do("open", "full", fault="Fail"), do("rename", "tmp", "step_1", thread=2), do("mkdir", "next", pid=2)]
    left, lost = lose(root, *about, fsync("."), standing=["tmp/", "tmp/a"])
    assert left == {"tmp": "/", "tmp/a": "bytes"}
    assert lost["gone"] == []


def test_a_file_that_no_event_tells_of_is_left_and_named(root):
    fill(root, step_1__native="bytes")
    left, lost = lose(root, do("mkdir", "step_1"), fsync("."))
    assert left == {"step_1": "/", "step_1/native": "bytes"}
    assert lost["unseen"] == ["step_1/native"]
