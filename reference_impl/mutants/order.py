"""Mutants of the family order."""

from __future__ import annotations

import torch

from reference_impl import model as models
from reference_impl.mutants.registry import mutant
from reference_impl.under_contract import Reference


@mutant(caught_by="order.params-final-before-optimizer")
class CastsAfterOptimizerLoad(Reference):
    """Resumes a bfloat16 model, and casts it to the declared dtype once the optimizer has been loaded."""

    def resume(self) -> bool:
        path = self.checkpointer.latest()
        models.cast_parameters(self.model, torch.bfloat16)
        self.load_model(path)
        self.load_optimizer(path)
        self.cast_parameters()
        self.load_scheduler(path)
        self.load_progress(path)
        return True


@mutant(caught_by="order.params-final-before-optimizer")
class LoadsOptimizerBeforeModel(Reference):
    """Loads optimizer state first and the parameters it belongs to afterwards."""

    def resume(self) -> bool:
        path = self.checkpointer.latest()
        self.load_optimizer(path)
        self.load_model(path)
        self.cast_parameters()
        self.load_scheduler(path)
        self.load_progress(path)
        return True


@mutant(caught_by="order.scheduler-after-optimizer")
class LoadsSchedulerBeforeOptimizer(Reference):
    """Loads the scheduler first, so that the groups of the optimizer's state overrule it."""

    def resume(self) -> bool:
        path = self.checkpointer.latest()
        self.load_model(path)
        self.cast_parameters()
        self.load_scheduler(path)
        self.load_optimizer(path)
        self.load_progress(path)
        return True


@mutant(caught_by="order.scheduler-after-optimizer")
class WarmsUpAgain(Reference):
    """Builds a new scheduler after the load, which starts its warm-up over."""

    def load_scheduler(self, path) -> None:
        super().load_scheduler(path)
        self.scheduler = self.build_scheduler()
