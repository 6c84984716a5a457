"""Implementations with one fault each, small enough that what the lab says of them can only be about that fault."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from contracts.implementation import Capability, Layout
from contracts.lab.file_events import JOB_VARIABLE
from contracts.trainer import CheckpointerOnly


class Honest(CheckpointerOnly):
    """Rank 0 writes a tokenizer and one tensor under the final name, and everybody waits for it."""

    capabilities = frozenset({Capability.TRAIN, Capability.COMPANIONS})
    layout = Layout(companions=("tokenizer.json",))

    @property
    def directory(self) -> Path:
        return self.place.root / f"step_{self.step}"

    def save(self, *, final: bool = False) -> None:
        if self.place.rank == 0:
            self.directory.mkdir()
            self.tokenizer.save_pretrained(self.directory)
            save_file({"weight": torch.zeros(2)}, self.directory / "model.safetensors")
        dist.barrier()


class HangsInSave(Honest):
    """Rank 1 never comes out of `save`."""

    def save(self, *, final: bool = False) -> None:
        if self.place.rank == 1:
            never_comes_back()
        dist.barrier()


class RaisesInSave(Honest):
    """Rank 1 raises in `save`; the others wait for it."""

    def save(self, *, final: bool = False) -> None:
        if self.place.rank == 1:
            raise OSError(28, "No space left on device")
        dist.barrier()


class ExitsInSave(Honest):
    """Rank 0 leaves with exit code 0 in the middle of `save`."""

    def save(self, *, final: bool = False) -> None:
        if self.place.rank == 0:
            os._exit(0)
        dist.barrier()


class ExitsBeforeItBegins(Honest):
    """Rank 0 is gone before it has recorded a step."""

    def build(self) -> None:
        os._exit(0)


class LeavesAChild(Honest):
    """Starts a program in a session of its own and leaves it running."""

    def save(self, *, final: bool = False) -> None:
        super().save()
        if self.place.rank == 0:
            # Not a path that counts as a checkpoint; the test reads the number from it.
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            (self.place.root / "child.pid").write_text(str(child.pid))


class FallsBackToDDP(Honest):
    """Wraps nothing in FSDP, as some stacks do on a CPU."""

    def build(self) -> None:
        from transformers import AutoModelForSequenceClassification

        self.model = AutoModelForSequenceClassification.from_pretrained(self.place.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())


class Floods(Honest):
    """Prints 4 MB in `save`."""

    def save(self, *, final: bool = False) -> None:
        for number in range(40_000):
            print(f"{number:06d}", "x" * 100)
        super().save()


class ReturnsBeforeRank0HasWritten(Honest):
    """Rank 0 writes a file after the others have gone on."""

    def save(self, *, final: bool = False) -> None:
        if self.place.rank == 0:
            (self.place.root / "held.bin").write_text("late")


class WritesFourFiles(Honest):
    """Every rank makes a directory of its own and writes four files of four bytes into it: five file events."""

    def save(self, *, final: bool = False) -> None:
        mine = self.place.root / f"rank-{self.place.rank}"
        mine.mkdir(exist_ok=True)
        for name in "abcd":
            (mine / name).write_text(name * 4)


class Forks(Honest):
    """Every rank makes a directory at each save; a process that it forks writes four files into it, and then itself one."""

    saves = 0

    def save(self, *, final: bool = False) -> None:
        self.saves += 1
        mine = self.place.root / f"rank-{self.place.rank}-{self.saves}"
        mine.mkdir()
        if (writer := os.fork()) == 0:
            for name in "abcd":
                (mine / name).write_text(name)
            os._exit(0)
        os.waitpid(writer, 0)
        (mine / "by-the-rank").write_text("here")


class Flushes(Honest):
    """Every rank makes a directory at each save and writes two files into it, of which it flushes the first."""

    saves = 0

    def save(self, *, final: bool = False) -> None:
        self.saves += 1
        mine = self.place.root / f"rank-{self.place.rank}-{self.saves}"
        mine.mkdir()
        for name in "ab":
            with open(mine / name, "w") as file:
                file.write(name)
                file.flush()
                if name == "a":
                    os.fsync(file.fileno())
        for directory in (mine, self.place.root):
            handle = os.open(directory, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
            dist.barrier()  # A peer that flushes the root flushes every rank's names in it.


class LooksBeforeItWrites(Honest):
    """Every rank makes a directory of its own where it sees none."""

    def save(self, *, final: bool = False) -> None:
        mine = self.place.root / f"rank-{self.place.rank}"
        if not mine.exists():
            mine.mkdir()


class RemovesATree(Honest):
    """Rank 0 makes a small tree and removes it."""

    def save(self, *, final: bool = False) -> None:
        if self.place.rank == 0:
            tree = self.place.root / "tree"
            (tree / "below").mkdir(parents=True)
            (tree / "below" / "file").write_text("soon gone")
            shutil.rmtree(tree)
        dist.barrier()


class WritesFromItsChildren(Honest):
    """Rank 1 writes through a process that it spawns and one that it forks, natively and by Python."""

    def save(self, *, final: bool = False) -> None:
        if self.place.rank == 1:
            for method in ("spawn", "fork"):
                child = multiprocessing.get_context(method).Process(target=write_both_ways, args=(self.place.root / method,))
                child.start()
                child.join()
                assert child.exitcode == 0
        dist.barrier()


class EndsTheLab(Honest):
    """Kills the warm parent, as an out-of-memory killer may."""

    def save(self, *, final: bool = False) -> None:
        if self.place.rank == 0:
            agent = os.getppid()
            os.kill(int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        never_comes_back()


def __getattr__(name: str):
    if name == "ExitsWhenItIsImported" and JOB_VARIABLE not in os.environ and "PYTEST_CURRENT_TEST" in os.environ:
        print("this stack cannot be imported here")
        os._exit(7)
    raise AttributeError(name)


def never_comes_back() -> None:
    while True:
        time.sleep(0.01)


def write_both_ways(folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "python.txt").write_text("text")
    save_file({"weight": torch.zeros(2)}, folder / "native.safetensors")
