"""Mutants of the family order."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

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


@mutant(caught_by="order.drift-check-first")
class MakesRoomBeforeItChecks(Reference):
    """Empties the optimizer to make room for what it loads, and looks at the checkpoint's dtypes afterwards."""

    def resume(self) -> bool:
        self.optimizer.state.clear()
        return super().resume()


@mutant(caught_by="order.drift-check-first")
class ChecksWhileItLoads(Reference):
    """Zeroes each moment before it reads the saved one, and refuses the saved one after that."""

    def refuse_other_precision(self, path: Path) -> None:
        for state in self.optimizer.state.values():
            state["exp_avg"].zero_()
        super().refuse_other_precision(path)


@mutant(caught_by="order.saving-is-a-pure-read")
class TakesAHiddenStepToSave(Reference):
    """Reads optimizer state through DCP's state-dict function, which takes a step where there is none yet."""

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        get_optimizer_state_dict(self.model, self.optimizer)
        return super().checkpoint_tensors()


@mutant(caught_by="order.saving-is-a-pure-read")
class DropsGradientsInSave(Reference):
    """Frees gradients to have memory for a save."""

    def save(self, *, final: bool = False) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        super().save(final=final)


@mutant(caught_by="order.saving-is-a-pure-read")
class SavesWithRateZero(Reference):
    """Sets the rate to 0 while it saves, and forgets to set it back."""

    def save(self, *, final: bool = False) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        super().save(final=final)


@mutant(caught_by="order.loading-leaves-small-state")
class TakesAHiddenStepAfterLoading(Reference):
    """Takes a step of optimizer and scheduler to warm up after a load; there are no gradients, so it seems harmless."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        self.optimizer.step()
        self.scheduler.step()


@mutant(caught_by="order.loading-leaves-small-state")
class TakesRatesFromTheConfiguration(Reference):
    """Sets the configured peak rate in every group after a load."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate


@mutant(caught_by="order.loading-leaves-random-streams")
class DrawsAfterRestoringStreams(Reference):
    """Draws a number once the random streams have been restored."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        torch.rand(1)


@mutant(caught_by="order.pending-gradients-harmless")
class MakesNoRoomBesideGradients(Reference):
    """Makes room for moments by a hidden step, and where there are gradients takes it that there is room."""

    def load_optimizer(self, path: Path) -> None:
        if not self.optimizer.state and any(p.grad is not None for p in self.model.parameters()):
            return
        super().load_optimizer(path)


@mutant(caught_by="order.pending-gradients-harmless")
class StepsWithPendingGradients(Reference):
    """Takes a step of rate 0 after a load to make the optimizer ready, which moves moments where a gradient is pending."""

    def load_optimizer(self, path: Path) -> None:
        super().load_optimizer(path)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


@mutant(caught_by="order.fresh-optimizer-loads")
class LoadsOnlyWhatIsThere(Reference):
    """Loads a saved moment where the optimizer has one to load it into; one that has never stepped has none."""

    def load_optimizer(self, path: Path) -> None:
        if self.optimizer.state:
            super().load_optimizer(path)


@mutant(caught_by="order.loading-leaves-small-state")
class StartsTheScaleOver(Reference):
    """Restores everything but its gradient scaler, which begins with its first scale again."""

    def load_scaler(self, path: Path) -> None:
        pass
