"""A run that is saved and resumed is the run that never stopped, bit for bit, in real torchrun ranks."""

import pytest

from conftest import HERE, launch


def work(tiny, name, *, world=2):
    launch(world, str(HERE / "rank_work.py"), name, str(tiny))


@pytest.fixture(scope="module")
def written(tiny):
    work(tiny, "write")
    return tiny


def test_saving_in_any_mode_leaves_the_run_as_it_was(written):
    assert (written / "run_process" / "step_5" / "manifest.json").exists()


def test_a_run_resumed_after_any_step_equals_the_uninterrupted_one(written):
    work(written, "resume")


@pytest.mark.parametrize("world", [1, 3])
def test_a_checkpoint_of_two_ranks_resumes_on_another_number(written, world):
    work(written, "reshard", world=world)


def test_snapshots_are_isolated_and_failures_reach_every_rank(tiny):
    work(tiny, "isolate")
