"""What the ranks of test_real_faults.py do. Run by torchrun: ``faulty_work.py WORK FOLDER``; each WORK is a function here."""

from __future__ import annotations

import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from rank_work import built, config, steps
from torch.distributed.checkpoint import _async_process_executor

from reference_impl import run
from reference_impl.errors import PeerError
from reference_impl.stopping import end_with_launcher
from reference_impl.trainer import Trainer


def faults(folder: Path) -> None:
    full_disk(folder)
    killed_writer(folder)
    removed_directories(folder)
    out_of_time(folder)
    left_in_flight(folder)


def expect(trainer: Trainer, *names: str) -> None:
    """Assert that these checkpoints stand, begun ones among them; no rank goes on before all have looked."""
    trainer.checkpointer.settle()
    dist.barrier()
    seen = sorted(path.name for path in trainer.checkpointer.root.glob("*step_*"))
    dist.barrier()
    assert seen == list(names), (trainer.checkpointer.root, seen, names)


def refused(save: Callable[[], None]) -> str:
    try:
        save()
    except PeerError as error:
        return str(error)
    raise AssertionError("a save that could not be written raised nothing")


def full_disk(folder: Path) -> None:
    """The last rank may write no file of more than 1,000 bytes: on every rank the save fails, and the one before it stays."""
    for mode in ("sync", "thread"):
        trainer = built(folder, f"full_{mode}", save_mode=mode, keep_checkpoints=1)
        steps(trainer, 1)
        trainer.save(final=True)
        steps(trainer, 2)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == dist.get_world_size() - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        said = refused(lambda trainer=trainer: trainer.save(final=True))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert f"rank {dist.get_world_size() - 1}: " in said and "File too large" in said and "of 2 ranks" in said, said
        expect(trainer, "step_1")
        trainer.save(final=True)
        expect(trainer, "step_2")


def killed_writer(folder: Path) -> None:
    """The last rank's writer process is killed, as where memory runs out: the next save fails, the one after it does not."""
    trainer = built(folder, "killed_writer", save_mode="process", keep_checkpoints=1)
    steps(trainer, 1)
    trainer.save(final=True)
    steps(trainer, 2)
    if dist.get_rank() == dist.get_world_size() - 1:
        writer = _async_process_executor._CHECKPOINT_PROCESS._save_process
        writer.kill()
        writer.join()
    said = refused(lambda: trainer.save(final=True))
    assert f"rank {dist.get_world_size() - 1}: " in said and "of 2 ranks" in said, said
    expect(trainer, "step_1")
    trainer.save(final=True)
    expect(trainer, "step_2")
    trainer.checkpointer.close()


def removed_directories(folder: Path) -> None:
    """Somebody removes the directory that is being written, or the whole output, once the shards are written."""
    for stage in ("write_replicated", "check_shards"):
        trainer = built(folder, f"removed_{stage}")
        steps(trainer, 1)
        trainer.save(final=True)
        steps(trainer, 2)
        for gone, left in (("tmp_step_2", ["step_1"]), ("", [])):
            said = refused(lambda trainer=trainer, stage=stage, gone=gone: save_and_remove(trainer, stage, gone))
            assert "tmp_step_2" in said and "No such file" in said, said
            expect(trainer, *left)
        trainer.save(final=True)
        expect(trainer, "step_2")


def save_and_remove(trainer: Trainer, stage: str, gone: str) -> None:
    """Save, and have rank 0 remove ``gone`` when ``stage`` begins."""
    checkpointer = trainer.checkpointer
    original = getattr(checkpointer, stage)

    def remove(*arguments) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(checkpointer.root / gone)
        original(*arguments)

    setattr(checkpointer, stage, remove)
    try:
        trainer.save(final=True)
    finally:
        delattr(checkpointer, stage)


def out_of_time(folder: Path) -> None:
    """A run that stops after each step, for lack of time, ends as one that has never stopped."""
    options = {"evaluate_around_training": False, "plot": False, "progress": False, "keep_checkpoints": 1, "steps": 3}
    whole = run.train(config(folder, "in_time", **options))
    for step in (1, 2):
        part = run.train(config(folder, "out_of_time", max_seconds=1e-3, **options))
        assert (part["step"], part["stopped"]) == (step, "max_seconds=0.001"), part
    last = run.train(config(folder, "out_of_time", max_seconds=1e-3, **options))
    assert last == whole and last["stopped"] is None, (last, whole)


def left_in_flight(folder: Path) -> None:
    """The script ends with a save in flight, and calls nothing any more."""
    trainer = built(folder, "in_flight", save_mode="thread")
    steps(trainer, 1)
    trainer.save()
    expect(trainer, "tmp_step_1")


if __name__ == "__main__":
    end_with_launcher()
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](Path(sys.argv[2]))
