"""Good neighbours: correct, unusual, and not to be called broken."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from contracts.published_names import PublishedNames
from reference_impl.checkpoint import Checkpointer
from reference_impl.keys import Rule
from reference_impl.mutants.registry import neighbour
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
class WaitsInSave(Reference):
    """Is asked for asynchronous saves and completes each before it returns."""

    def save(self, *, final: bool = False) -> None:
        super().save(final=final)
        self.finalize()


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
    """Restores moments through DCP's own state-dict functions, which take a hidden step to make room for them."""

    def load_optimizer(self, path: Path) -> None:
        super().load_optimizer(path)
        state = get_optimizer_state_dict(self.model, self.optimizer)
        set_optimizer_state_dict(self.model, self.optimizer, state)
