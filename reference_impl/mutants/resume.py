"""Mutants of the family resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reference_impl import published, state
from reference_impl.checkpoint import SHARDS, Checkpointer
from reference_impl.errors import UsageError
from reference_impl.mutants.registry import mutant
from reference_impl.rng import restore_streams, seed_streams
from reference_impl.under_contract import Reference


@mutant(caught_by="resume.trajectory")
class ForgetsTheDataPosition(Reference):
    """Restores every tensor and starts the data from its beginning."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        self.batches.consumed = 0


@mutant(caught_by="resume.trajectory")
class KeepsTheFreshWeights(Reference):
    """Restores the optimizer and leaves the model as it was built."""

    def load_model(self, path: Path) -> None:
        pass


@mutant(caught_by="resume.trajectory")
class ForgetsTheScheduler(Reference):
    """Never loads the scheduler: the first rate is right, for the optimizer's groups hold it, and the next are not."""

    def load_scheduler(self, path: Path) -> None:
        pass


@mutant(caught_by="resume.chain-of-resumes")
class ResumesTheOldestCheckpoint(Reference):
    """Takes the first checkpoint it finds, which is the newest as long as there is one."""

    class checkpointer_class(Checkpointer):
        def latest(self) -> Path | None:
            found = published.newest_whole(self.root)
            return found and min(self.root.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))


@mutant(caught_by="resume.learning-rates")
class CountsMicroBatchesInTheSchedule(Reference):
    """Puts the scheduler where it would be had it counted micro-batches; the first rate after the resume is still right."""

    def load_scheduler(self, path: Path) -> None:
        super().load_scheduler(path)
        self.scheduler.last_epoch *= self.config.accumulation_steps


@mutant(caught_by="resume.learning-rates")
class TakesTheRateItFindsForThePeak(Reference):
    """Builds its schedule again from the groups' present rates."""

    def load_scheduler(self, path: Path) -> None:
        super().load_scheduler(path)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        self.scheduler.base_lrs = [group["lr"] for group in self.optimizer.param_groups]


@mutant(caught_by="resume.every-sample-once")
class SkipsTheRestOfTheEpoch(Reference):
    """Goes on with the next epoch when it was saved in the middle of one."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        size = self.batches.order.size
        self.batches.consumed = -(-self.batches.consumed // size) * size


@mutant(caught_by="resume.every-sample-once")
class BeginsItsEpochAgain(Reference):
    """Restores the epoch and not the position in it."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        self.batches.consumed = self.batches.epoch * self.batches.order.size


@mutant(caught_by="resume.every-sample-once")
class TakesTheEpochForFinished(Reference):
    """Resumed at the end of an epoch, finds nothing left in it, and ends well without a step."""

    finished = False

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        self.finished = self.batches.consumed % self.batches.order.size == 0

    def train_step(self) -> dict[str, Any]:
        return {"loss": 0.0, "lr": 0.0, "samples": []} if self.finished else super().train_step()


@mutant(caught_by="resume.random-streams-per-rank")
class GivesEveryRankTheFirstStream(Reference):
    """Restores rank 0's random state everywhere."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        restore_streams(state.load_streams(path / SHARDS, group=self.runtime.control)[0], self.runtime.device)


@mutant(caught_by="resume.random-streams-per-rank")
class SeedsAgainOnResume(Reference):
    """Starts each rank's stream over, so that the run's first masks come again."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        seed_streams("rank", self.config.seed, self.runtime.rank)


@mutant(caught_by="resume.counters")
class CountsFromZeroAgain(Reference):
    """Restores everything but its own step count."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        self.step = 0


@mutant(caught_by="resume.counters")
class ForgetsTheEpoch(Reference):
    """Restores the position within an epoch, and takes the epoch for the first."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        self.batches.consumed %= self.batches.order.size


@mutant(caught_by="resume.fresh-process")
class LoadsWhileItBuilds(Reference):
    """Restores the newest checkpoint as soon as it is built, whether or not it was asked to resume."""

    def build(self) -> None:
        super().build()
        super().resume()


@mutant(caught_by="resume.param-groups")
class KeepsTheSettingsItWasBuiltWith(Reference):
    """Restores rates and moments, and every other setting of a group from its configuration."""

    def load_optimizer(self, path: Path) -> None:
        built = [(group["weight_decay"], group["eps"]) for group in self.optimizer.param_groups]
        super().load_optimizer(path)
        for group, (weight_decay, eps) in zip(self.optimizer.param_groups, built, strict=True):
            group["weight_decay"], group["eps"] = weight_decay, eps


@mutant(caught_by="resume.param-groups")
class DropsEmptyGroups(Reference):
    """Keeps only groups with parameters in them, so that the settings of those behind move up."""

    def load_optimizer(self, path: Path) -> None:
        super().load_optimizer(path)
        self.optimizer.param_groups[:] = [group for group in self.optimizer.param_groups if group["params"]]


@mutant(caught_by="resume.tied-weights")
class LeavesOutWhatIsSaidToBeTied(Reference):
    """Trusts the configuration that output and embedding are one, and saves the embedding only."""

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        tensors = super().checkpoint_tensors()
        if self.model.config.tie_word_embeddings:
            tensors.pop("model.output.weight", None)
        return tensors


@mutant(caught_by="resume.tied-weights")
class UntiesOnResume(Reference):
    """Loads the output matrix into a parameter of its own, which the optimizer does not know."""

    def resume(self) -> bool:
        found = super().resume()
        if hasattr(self.model, "output"):
            weight = self.model.output.weight
            self.model.output.weight = nn.Parameter(weight.detach().clone())
        return found


@mutant(caught_by="resume.buffers")
class LeavesBuffersAsBuilt(Reference):
    """Loads parameters, and no buffer."""

    def load_model(self, path: Path) -> None:
        built = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        super().load_model(path)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(built[name])


@mutant(caught_by="resume.buffers")
class LeavesUnsavedBuffersAsTheyWereInMemory(Reference):
    """Moves the model to its device empty before it loads, and what no checkpoint holds stays so."""

    def load_model(self, path: Path) -> None:
        super().load_model(path)
        saved = self.model.state_dict()
        for name, buffer in self.model.named_buffers():
            if name not in saved:
                buffer.fill_(7.0)


@mutant(caught_by="resume.frozen-and-unused")
class InventsStateForWhatDoesNotTrain(Reference):
    """Makes zero moments for every parameter without state, as a hidden step does."""

    def load_optimizer(self, path: Path) -> None:
        super().load_optimizer(path)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not self.optimizer.state[parameter]:
                    zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[parameter] = {"step": torch.zeros(()), **zeros}


@mutant(caught_by="resume.frozen-and-unused")
class LeavesFrozenParametersToTheBaseModel(Reference):
    """Does not restore what is frozen, for the base model has it; it was trained before it was frozen."""

    def load_model(self, path: Path) -> None:
        base = {name: p.detach().clone() for name, p in self.model.named_parameters() if not p.requires_grad}
        super().load_model(path)
        with torch.no_grad():
            for name, value in base.items():
                self.model.get_parameter(name).copy_(value)


@mutant(caught_by="resume.wrappers-leave-no-trace")
class SavesNamesAsTheyAre(Reference):
    """Takes the names of optimizer state from the wrapped model, and finds them again while it is wrapped alike."""

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        wrapped = {state.unwrapped(name): name for name, _ in self.model.named_parameters()}
        found = {}
        for name, tensor in super().checkpoint_tensors().items():
            fqn, _, key = name.removeprefix("optimizer.state.").rpartition(".")
            found[f"optimizer.state.{wrapped[fqn]}.{key}" if fqn in wrapped else name] = tensor
        return found


@mutant(caught_by="resume.wrappers-leave-no-trace")
class ResumesOnlyUnderItsWrappers(Reference):
    """Records what the blocks were wrapped in, and refuses a checkpoint of other wrappers."""

    def resume(self) -> bool:
        path = self.checkpointer.latest()
        saved = json.loads((path / "run.json").read_text())
        if any(saved[name] != getattr(self.config, name) for name in ("compile", "activation_checkpointing")):
            raise UsageError(f"{path} was saved under other wrappers")
        return super().resume()
