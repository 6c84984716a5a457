"""What the ranks of test_resume.py do. Run by torchrun: ``rank_work.py WORK FOLDER``; each WORK is a function here.

Importing transformers costs a rank some seconds, so one launch does much. ``FOLDER`` is the ``tiny`` fixture's.
"""

from __future__ import annotations

import random
import shutil
import sys
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist

from reference_impl import published
from reference_impl.checkpoint import Checkpointer
from reference_impl.config import Config
from reference_impl.runtime import PeerError
from reference_impl.trainer import Trainer

MODES = ("sync", "thread", "process")
SAVED = range(1, 6)
"""Steps after which the uninterrupted run saves. 11 samples at 8 a step (2 ranks) cross an epoch in steps 2, 3, 5, …"""

LAST = 8


def config(folder: Path, name: str, **options) -> Config:
    settings = dict(
        model=str(folder / "model16"),
        data=str(folder / "data.jsonl"),
        eval_fraction=0.0,
        output_dir=str(folder / name),
        device="cpu",
        batch_size=2,
        accumulation_steps=2,
        train_n_passages=3,
        steps=LAST,
        warmup_steps=2,
        learning_rate=1e-2,
        keep_checkpoints=99,
    )
    return Config(**{**settings, **options})


def built(folder: Path, name: str, **options) -> Trainer:
    trainer = Trainer(config(folder, name, **options))
    trainer.build()
    return trainer


def evidence(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Whole tensors of parameters and optimizer state, read without any state-dict API."""
    found = {}
    for name, parameter in trainer.model.named_parameters():
        found[name] = parameter.detach().full_tensor().clone()
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return found


def steps(trainer: Trainer, until: int) -> list[dict]:
    reports = []
    while trainer.step < until:
        report = trainer.train_step()
        reports.append({key: report[key] for key in ("loss", "lr", "grad_norm", "samples", "positions")})
        reports[-1]["draw"] = [random.random(), torch.rand(1).item()]
    return reports


def same_bits(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], context: str) -> None:
    assert seen.keys() == expected.keys(), (context, seen.keys() ^ expected.keys())
    for name, tensor in expected.items():
        assert seen[name].dtype == tensor.dtype, (context, name, seen[name].dtype, tensor.dtype)
        assert torch.equal(seen[name], tensor), (context, name, (seen[name] - tensor).abs().max())


def write(folder: Path) -> None:
    """In each mode: one run that saves after every early step while it goes on; all modes must agree bit for bit."""
    trajectories = []
    for mode in MODES:
        trainer = built(folder, f"run_{mode}", save_mode=mode)
        record, states = [], {}
        for step in range(1, LAST + 1):
            record += steps(trainer, step)
            states[step] = evidence(trainer)
            if step in SAVED:
                trainer.save()
                same_bits(evidence(trainer), states[step], f"{mode}: saving step {step} changed the run")
        trainer.finalize()
        trainer.finalize()  # Idempotent.
        found = [step for step, _ in published.whole_checkpoints(Path(trainer.config.output_dir))]
        assert found == list(SAVED), found
        trajectories.append((record, states))
    for record, states in trajectories[1:]:
        assert record == trajectories[0][0]
        same_bits(states[LAST], trajectories[0][1][LAST], "modes disagree")
    moments = {name: tensor for name, tensor in trajectories[0][1][1].items() if "/exp_avg" in name}
    assert moments and all(tensor.any() and not torch.equal(tensor, tensor.bfloat16().float()) for tensor in moments.values())
    torch.save(trajectories[0], folder / f"expected_{dist.get_rank()}.pt")


def resume(folder: Path) -> None:
    """From each mode's every save: the state at the boundary and the whole rest of the run, bit for bit."""
    record, states = torch.load(folder / f"expected_{dist.get_rank()}.pt")
    for mode in MODES:
        for step in SAVED if mode == "sync" else (2, 5):
            root = folder / f"resumed_{mode}_{step}"
            if dist.get_rank() == 0:
                shutil.copytree(folder / f"run_{mode}" / f"step_{step}", root / f"step_{step}")
            trainer = built(folder, root.name)
            cold = dict(trainer.model.named_parameters())["model.norm.weight"].full_tensor()
            assert not torch.equal(cold, states[step]["model.norm.weight"])  # Else equality below would prove nothing.
            torch.manual_seed(999 + dist.get_rank())
            assert trainer.resume() is True and trainer.step == step
            same_bits(evidence(trainer), states[step], f"{mode}, boundary {step}")
            assert steps(trainer, LAST) == record[step:], (mode, step)
            same_bits(evidence(trainer), states[LAST], f"{mode}, end after {step}")


def reshard(folder: Path) -> None:
    """Resume of a save made by two ranks on any other number: same values, next samples, streams of one's own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    _, states = torch.load(folder / "expected_0.pt")
    trainer = built(folder, f"reshard_{world}")
    if rank == 0:
        shutil.copytree(folder / "run_process" / "step_3", Path(trainer.config.output_dir) / "step_3")
    assert trainer.resume()
    same_bits(evidence(trainer), states[3], f"world 2 to {world}")
    draws = [None] * world
    dist.all_gather_object(draws, (random.random(), torch.rand(1).item()))
    assert len(set(draws)) == world, draws
    report = trainer.train_step()
    positions = [None] * world
    dist.all_gather_object(positions, report["positions"])
    assert sorted(position for part in positions for position in part) == list(range(24, 24 + 4 * world))
    trainer.save(final=True)
    assert trainer.checkpointer.latest().name == "step_4"


def isolate(folder: Path) -> None:
    """Live tensors overwritten the moment save returns do not change what lands; a failed writer is everybody's error."""
    for mode in MODES[1:]:
        trainer = built(folder, f"isolated_{mode}", save_mode=mode)
        steps(trainer, 1)
        expected = evidence(trainer)
        trainer.save()
        with torch.no_grad():
            for parameter, state in trainer.optimizer.state.items():
                for tensor in (parameter, *state.values()):
                    (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(7)
        trainer.finalize()
        fresh = built(folder, f"isolated_{mode}")
        assert fresh.resume()
        same_bits(evidence(fresh), expected, f"{mode}: the snapshot was not isolated")
    fail_in_background(folder)
    refuse(folder)


def fail_in_background(folder: Path) -> None:
    class DiskFullOnRankOne(Checkpointer):
        def write_shards(self, directory, tensors):
            written, stager = super().write_shards(directory, tensors)
            written.result()
            if dist.get_rank() == dist.get_world_size() - 1:
                written = Future()
                written.set_exception(OSError(28, "No space left on device"))
            return written, stager

    trainer = built(folder, "failed", save_mode="thread")
    healthy = trainer.checkpointer
    trainer.checkpointer = DiskFullOnRankOne(healthy.root, trainer.runtime, mode="thread")
    steps(trainer, 1)
    trainer.save()
    try:
        trainer.save()
    except PeerError as error:
        assert "rank 1: OSError" in str(error) and "step 1" in str(error), error
    else:
        raise AssertionError("the background failure did not surface")
    dist.barrier()
    assert sorted(path.name for path in healthy.root.iterdir()) == []
    trainer.finalize()
    trainer.checkpointer = healthy
    trainer.save(final=True)
    assert healthy.latest().name == "step_1"


def refuse(folder: Path) -> None:
    """Drift in dtype is refused before anything changes, and a fresh output directory resumes nothing."""
    trainer = built(folder, "failed", parameter_dtype="bfloat16", moment_dtype="bfloat16")
    before = evidence(trainer)
    for load in (trainer.load_model, trainer.load_optimizer):
        try:
            load(trainer.checkpointer.latest())
        except ValueError as error:
            assert "torch.float32" in str(error) and "torch.bfloat16" in str(error), error
        else:
            raise AssertionError(f"{load.__name__} accepted float32 as bfloat16")
    same_bits(evidence(trainer), before, "a refused load changed something")
    assert not trainer.optimizer.state
    assert built(folder, "nothing_here").resume() is False


if __name__ == "__main__":
    dist.init_process_group("gloo")  # The trainer must take a caller's process group as it is.
    globals()[sys.argv[1]](Path(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()
