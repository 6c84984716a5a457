"""A rank that does not see a path finds it nowhere it looks, and can still open it."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from contracts.lab.blind import blindfold


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    for step in (1, 2):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "a").write_text("text")
    (tmp_path / "latest").symlink_to("step_2")
    for name in ("stat", "lstat", "access", "listdir", "scandir"):
        monkeypatch.setattr(os, name, getattr(os, name))  # so that it is put back
    blindfold(tmp_path, r"^step_2(/|$)")
    return tmp_path


@pytest.mark.parametrize("name", ["step_2", "step_2/a", "latest"])
def test_what_is_hidden_does_not_exist(root, name):
    path = root / name
    assert not path.exists()
    assert not os.path.exists(path)
    assert not os.path.isdir(path)
    assert not os.path.isfile(path)
    assert not os.access(path, os.R_OK)
    with pytest.raises(FileNotFoundError):
        os.stat(path)


def test_what_is_hidden_is_in_no_listing(root):
    seen = {"latest", "step_1"}
    assert set(os.listdir(root)) == seen
    assert {path.name for path in root.iterdir()} == seen
    with os.scandir(root) as entries:
        assert {entry.name for entry in entries} == seen
    assert [path.name for path in root.glob("step_*")] == ["step_1"]
    assert glob.glob(str(root / "step_*" / "a")) == [str(root / "step_1" / "a")]
    assert {name for _, names, _ in os.walk(root) for name in names} <= seen


def test_what_is_hidden_can_be_opened_and_the_rest_is_seen(root):
    assert (root / "step_2" / "a").read_text() == "text"
    assert (root / "step_1" / "a").exists()
    assert (root / "latest").is_symlink()
    assert root.exists()
