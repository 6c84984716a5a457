"""Which checkpoints the reference keeps: the newest, and the best in one total order."""

import json
import shutil
import threading
from types import SimpleNamespace

import pytest

from reference_impl import published
from reference_impl.checkpoint import Checkpointer
from reference_impl.config import Config, ConfigError
from reference_impl.retention import ABOUT, Retention


def whole(root, **metrics):
    """Whole checkpoints whose steps are 1, 2, 3, … with these losses, as `published` finds them."""
    for step, loss in enumerate(metrics["losses"], 1):
        directory = root / published.final_name(step)
        directory.mkdir()
        about = {"step": step, "final": False, "metrics": {} if loss is None else {"loss": loss}}
        (directory / ABOUT).write_text(json.dumps(about))
        published.seal(directory)
    return published.whole_checkpoints(root)


def steps(found):
    return [step for step, _ in found]


def test_the_best_come_first_and_the_newer_of_equal_ones(tmp_path):
    found = whole(tmp_path, losses=[0.5, 0.2, 0.5, float("nan"), None, 0.7])
    assert steps(Retention(best=1).ranked(found)) == [2, 3, 1, 6]
    assert steps(Retention(best=1, mode="max").ranked(found)) == [6, 3, 1, 2]
    assert Retention(best=1, metric="mrr@10").ranked(found) == []


def test_the_newest_and_the_best_are_kept_and_never_less_than_one(tmp_path):
    found = whole(tmp_path, losses=[0.5, 0.2, 0.5, 0.9])
    assert set(steps(Retention(latest=1, best=2).kept(found))) == {4, 2, 3}
    assert steps(Retention(latest=1).kept(found)) == [4]
    with pytest.raises(ConfigError, match="keep_checkpoints"):
        Config(keep_checkpoints=0)


def test_a_checkpoint_without_a_readable_metric_is_never_best(tmp_path):
    found = whole(tmp_path, losses=[0.5, 0.2])
    (tmp_path / "step_2" / ABOUT).write_text("{")
    assert steps(Retention(best=2).ranked(found)) == [1]


def test_a_mode_that_would_keep_the_worst_is_refused():
    with pytest.raises(ConfigError, match="best_mode=max would keep the worst"):
        Config(keep_best=1, best_mode="max")
    Config(keep_best=1, best_metric="mrr@10", best_mode="max")


def alone(root, latest=1):
    """Rank 0's checkpointer; what is tested of it talks to nobody."""
    return Checkpointer(root, SimpleNamespace(rank=0, world=1), keep=Retention(latest=latest))


def test_old_checkpoints_are_removed_behind_training(tmp_path, monkeypatch):
    whole(tmp_path, losses=[0.5, 0.2])
    may, really = threading.Event(), shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **how: may.wait(10) and really(*args, **how))
    checkpointer = alone(tmp_path)
    checkpointer.prune()
    assert checkpointer.removing.is_alive()  # and `prune` has returned
    may.set()
    checkpointer.settle()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2"]


def test_what_cannot_be_removed_is_shown_and_tried_again(tmp_path, monkeypatch, capsys):
    whole(tmp_path, losses=[0.5, 0.2, 0.3])
    really = shutil.rmtree

    def fails(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(16, "Device or resource busy", str(path))

    monkeypatch.setattr(shutil, "rmtree", fails)
    checkpointer = alone(tmp_path)
    checkpointer.prune()
    checkpointer.settle()
    assert "could not remove" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deleting_step_1", "deleting_step_2", "step_3"]
    monkeypatch.setattr(shutil, "rmtree", really)
    for path in published.leftovers(tmp_path):
        published.remove_or_say(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3"]
