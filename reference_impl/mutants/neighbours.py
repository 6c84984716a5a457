"""Good neighbours: correct, unusual, and not to be called broken."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from contracts.published_names import PublishedNames
from reference_impl import model as models
from reference_impl import published
from reference_impl.batches import Batches
from reference_impl.checkpoint import Checkpointer
from reference_impl.errors import UsageError
from reference_impl.keys import Rule
from reference_impl.masters import MasterAdamW
from reference_impl.mutants.registry import neighbour
from reference_impl.retention import Found, Retention, read_metric
from reference_impl.runtime import on_rank_zero
from reference_impl.under_contract import Mapping, Reference


@neighbour
class LoadsTheOptimizerTwice(Reference):
    """Loads model, optimizer and scheduler, and then all of it again."""

    def load_scheduler(self, path: Path) -> None:
        super().load_scheduler(path)
        self.load_model(path)
        self.load_optimizer(path)
        super().load_scheduler(path)


@neighbour
class UnfusedAdamW(Reference):
    """Uses AdamW's loop instead of its fused kernel."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer()
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = False, False
        return optimizer


@neighbour
class WritesCompanionsInTwoGoes(Reference):
    """Rank 0 writes the replicated files, and writes them once more before it lets the others go on."""

    class checkpointer_class(Checkpointer):
        def write_replicated(self, directory: Path, companions) -> None:
            super().write_replicated(directory, lambda path: (companions(path), companions(path)))


@neighbour
class FinalizesSlowly(Reference):
    """Takes its time between the end of the writer and the rename."""

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            time.sleep(0.2)
            dist.barrier()
            super().publish(directory, step)


@neighbour
class InstallsItsRulesTwice(Reference):
    """Installs every rename rule a second time, and one that matches nothing."""

    def key_mapping(self, published: PublishedNames) -> Mapping | None:
        mapping = super().key_mapping(published)
        if mapping is not None:
            for rule in list(mapping.rules.rules):
                mapping.rules.install(rule)
            mapping.rules.install(Rule(r"^never\.", "never.", undo=r"^never\.", redo="never."))
        return mapping


@neighbour
class LoadsThroughDCPsStateDict(Reference):
    """Restores moments by DCP's own functions, with their hidden step, and then what these lose of empty groups."""

    def load_optimizer(self, path: Path) -> None:
        super().load_optimizer(path)
        settings = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        state = get_optimizer_state_dict(self.model, self.optimizer)
        set_optimizer_state_dict(self.model, self.optimizer, state)
        for group, its in zip(self.optimizer.param_groups, settings, strict=True):
            if not group["params"]:
                group.update(its)


@neighbour
class MakesStateWhenItIsBuilt(Reference):
    """Gives every parameter its moments, and its master, when the optimizer is built and not in the first step."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer()
        _make_state(optimizer, self.config.amsgrad)
        return optimizer


@neighbour
class MakesStateInItsFirstSave(Reference):
    """Gives every parameter moments of zero in a save that comes before the first step, to read what is always there."""

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        if self.step == 0 and not isinstance(self.optimizer, MasterAdamW):
            _make_state(self.optimizer, self.config.amsgrad)
        return super().checkpoint_tensors()


def _make_state(optimizer: torch.optim.Optimizer, amsgrad: bool) -> None:
    """What the first step would make, before it has a gradient to use it with."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        if isinstance(optimizer, MasterAdamW):
            optimizer.state[parameter] = optimizer.first_state(parameter, amsgrad=amsgrad)
        else:
            moments = ("exp_avg", "exp_avg_sq", *("max_exp_avg_sq",) * amsgrad)
            zeros = {key: torch.zeros_like(parameter, requires_grad=False) for key in moments}
            optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **zeros}


@neighbour
class RefusesInItsOwnWords(Reference):
    """Refuses another precision policy with another error, and calls dtypes by their short names."""

    def refuse_other_precision(self, path: Path) -> None:
        try:
            super().refuse_other_precision(path)
        except UsageError as error:
            raise RuntimeError(str(error).replace("bfloat16", "BF16").replace("float32", "FP32")) from None


@neighbour
class RecomputesActivations(Reference):
    """Wraps each block for activation checkpointing, which puts a prefix into the names of its parameters."""

    def shard(self, model: nn.Module) -> nn.Module:
        models.recompute_activations(model)
        return super().shard(model)


@neighbour
class TakesSlicesFromTheEnd(Reference):
    """Gives the last rank the first slice of each batch."""

    def build_data(self) -> Batches:
        batches = super().build_data()
        take = batches.take_step
        batches.take_step = lambda rank, world: take(world - 1 - rank, world)
        return batches


@neighbour
class FlushesInItsOwnOrder(Reference):
    """Flushes folders before the files in them, all of it twice, and once more under the final name."""

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            def flush_folders_first() -> None:
                for path in (directory, *sorted(directory.rglob("*"), reverse=True)) * 2:
                    published.flush(path)

            on_rank_zero(self.runtime, "flushing", flush_folders_first)
            super().publish(directory, step)
            on_rank_zero(self.runtime, "flushing again", lambda: published.flush_tree(self.root / published.final_name(step)))


@neighbour
class EveryRankHasASay(Reference):
    """Resumes the newest checkpoint that every rank finds whole, which they agree on."""

    class checkpointer_class(Checkpointer):
        def latest(self) -> Path | None:
            found: list[set[str]] = [set()] * self.runtime.world
            whole = published.whole_checkpoints(self.root)
            mine = {path.name for _, path in whole if not published.why_not_whole(path, verify=True)}
            dist.all_gather_object(found, mine, group=self.runtime.control)
            common = max(set.intersection(*found), key=lambda name: int(name[5:]), default=None)
            return self.root / common if common else None


@neighbour
class PrefersTheOlderOfEqualOnes(Reference):
    """Takes the older of two checkpoints with equal metrics for the better one, and says so in its layout."""

    layout = replace(Reference.layout, newer_wins_ties=False)

    class OlderWins(Retention):
        def ranked(self, whole: list[Found]) -> list[Found]:
            sign = 1 if self.mode == "min" else -1
            return sorted(super().ranked(whole), key=lambda found: (sign * read_metric(found[1], self.metric), found[0]))

    def make_checkpointer(self) -> Checkpointer:
        checkpointer = super().make_checkpointer()
        checkpointer.keep = self.OlderWins(**vars(checkpointer.keep))
        return checkpointer
