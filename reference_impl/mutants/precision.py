"""Mutants of the family precision."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reference_impl import model as models
from reference_impl.errors import UsageError
from reference_impl.masters import MASTER, MasterAdamW
from reference_impl.mutants.registry import mutant
from reference_impl.trainer import read_progress
from reference_impl.under_contract import Reference

MOMENTS = ("exp_avg", "exp_avg_sq")


@mutant(caught_by="precision.moments-start-declared")
class TrainsInThePublishedDtype(Reference):
    """Leaves the parameters in the dtype their directory publishes, so the first step makes moments in it."""

    def cast_parameters(self) -> None:
        pass


@mutant(caught_by="precision.moments-start-declared")
class HalvesMomentsToSaveMemory(Reference):
    """Casts every moment to bfloat16 after each step."""

    def train_step(self) -> dict[str, Any]:
        result = super().train_step()
        for state in self.optimizer.state.values():
            for key in MOMENTS:
                state[key] = state[key].to(torch.bfloat16)
        return result


@mutant(caught_by="precision.moments-survive-resume")
class RoundsMomentsAndCastsBack(Reference):
    """Takes moments through bfloat16 on resume and back, which restores the label and not the bits."""

    def load_optimizer(self, path: Path) -> None:
        super().load_optimizer(path)
        for state in self.optimizer.state.values():
            for key in MOMENTS:
                state[key] = state[key].to(torch.bfloat16).to(torch.float32)


@mutant(caught_by="precision.moments-survive-resume")
class ResumesWithZeroMoments(Reference):
    """Loads optimizer state with the right names, shapes and dtypes, and zeros in it."""

    def load_optimizer(self, path: Path) -> None:
        super().load_optimizer(path)
        for state in self.optimizer.state.values():
            for key in MOMENTS:
                state[key].zero_()


@mutant(caught_by="precision.moments-declared-on-disk")
class SavesMomentsInBfloat16(Reference):
    """Casts moments to bfloat16 on their way to disk."""

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        tensors = super().checkpoint_tensors()
        return {k: v.to(torch.bfloat16) if k.rpartition(".")[2] in MOMENTS else v for k, v in tensors.items()}


@mutant(caught_by="precision.moments-declared-on-disk")
class RoundsMomentsInTheSaveAfterAResume(Reference):
    """Saves declared moments at first, and bfloat16 ones once the run has been resumed."""

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        tensors = super().checkpoint_tensors()
        if self.resumed:
            return {k: v.to(torch.bfloat16) if k.rpartition(".")[2] in MOMENTS else v for k, v in tensors.items()}
        return tensors

    resumed = False

    def resume(self) -> bool:
        self.resumed = super().resume()
        return self.resumed


@mutant(caught_by="precision.step-counter-exact")
class CountsStepsInBfloat16(Reference):
    """Takes step counts through bfloat16 on resume, which holds 256 and 258, and not 257."""

    def load_optimizer(self, path: Path) -> None:
        super().load_optimizer(path)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].to(torch.bfloat16).to(torch.float32)


@mutant(caught_by="precision.step-counter-exact")
class CountsWithTheTrainer(Reference):
    """Sets the optimizer's step counts to the trainer's after a load, as if they were one."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        for state in self.optimizer.state.values():
            state["step"].fill_(self.step)


@mutant(caught_by="precision.params-declared")
class PromotesParametersOnResume(Reference):
    """Resumes into float32 parameters, whatever is declared."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        models.cast_parameters(self.model, torch.float32)


@mutant(caught_by="precision.params-declared")
class ForcesNothing(Reference):
    """Casts to the declared dtype at the first step of a run, and not when it is built."""

    def build(self) -> None:
        self.built = False
        super().build()
        self.built = True

    def cast_parameters(self) -> None:
        models.cast_parameters(self.model, self.parameter_dtype if self.built else torch.float32)

    def train_step(self) -> dict[str, Any]:
        self.cast_parameters()
        return super().train_step()


@mutant(caught_by="precision.small-updates-land")
class RoundsMastersInEachStep(Reference):
    """Copies parameters back over their masters after each step, so what bfloat16 cannot hold never adds up."""

    def train_step(self) -> dict[str, Any]:
        result = super().train_step()
        for parameter, state in self.optimizer.state.items():
            if MASTER in state:
                state[MASTER].copy_(parameter.detach())
        return result


@mutant(caught_by="precision.small-updates-land")
class RoundsParametersInEachStep(Reference):
    """Takes float32 parameters through bfloat16 after each step."""

    def train_step(self) -> dict[str, Any]:
        result = super().train_step()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        return result


@mutant(caught_by="precision.masters-are-a-fixed-point")
class MakesMastersFromParameters(Reference):
    """Restores parameters and moments, and makes masters anew from the parameters."""

    def load_optimizer(self, path: Path) -> None:
        super().load_optimizer(path)
        for parameter, state in self.optimizer.state.items():
            if MASTER in state:
                state[MASTER] = parameter.detach().to(torch.float32)


@mutant(caught_by="precision.masters-are-a-fixed-point")
class LoadsMastersLikeAnyState(Reference):
    """Leaves the load to torch's optimizer, which casts masters and moments to the dtype of their parameter."""

    def load_optimizer(self, path: Path) -> None:
        if isinstance(self.optimizer, MasterAdamW):
            self.optimizer.load_state_dict = functools.partial(torch.optim.Optimizer.load_state_dict, self.optimizer)
        super().load_optimizer(path)


@mutant(caught_by="precision.no-stale-masters")
class KeepsMastersOfTheFreshModel(Reference):
    """Makes masters when the optimizer is built, and loads everything but them."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer()
        if isinstance(optimizer, MasterAdamW):
            self.first = {p: optimizer.first_state(p)[MASTER] for group in optimizer.param_groups for p in group["params"]}
        return optimizer

    def load_optimizer(self, path: Path) -> None:
        super().load_optimizer(path)
        for parameter, state in self.optimizer.state.items():
            if MASTER in state:
                state[MASTER] = self.first[parameter].clone()


class Converts(Reference):
    """Reads a checkpoint in its own dtypes, and casts what it reads to the declared ones without a word."""

    def refuse_other_precision(self, path: Path) -> None:
        saved = read_progress(path)
        self.parameter_dtype = getattr(torch, saved["parameter_dtype"])
        self.moment_dtype = getattr(torch, saved["moment_dtype"])

    def cast_parameters(self) -> None:
        models.cast_parameters(self.model, getattr(torch, self.config.parameters))


@mutant(caught_by="precision.no-silent-cast")
class ConvertsWithoutAWord(Converts):
    """Casts a checkpoint of other dtypes to the declared ones and goes on."""


@mutant(caught_by="precision.no-silent-cast")
class AdoptsTheSavedPrecision(Converts):
    """Goes on in the dtypes of the checkpoint, whatever is declared."""

    def cast_parameters(self) -> None:
        models.cast_parameters(self.model, self.parameter_dtype)


@mutant(caught_by="precision.master-dtype-drift-refused")
class DropsMasters(Converts):
    """Resumes a run that kept masters into one that keeps none, where the dtypes can be cast."""

    def refuse_other_precision(self, path: Path) -> None:
        if read_progress(path)["master_dtype"] == self.config.masters:
            Reference.refuse_other_precision(self, path)
        super().refuse_other_precision(path)


@mutant(caught_by="precision.master-dtype-drift-refused")
class SaysOnlyThatPrecisionChanged(Reference):
    """Refuses another precision policy, and names none."""

    def refuse_other_precision(self, path: Path) -> None:
        try:
            super().refuse_other_precision(path)
        except UsageError:
            raise UsageError(f"{path} has another precision policy than this run") from None


@mutant(caught_by="precision.declared-policy-kept")
class PromotesMomentsOnResume(Reference):
    """Loads moments into float32 for safety, whatever is declared."""

    def load_optimizer(self, path: Path) -> None:
        super().load_optimizer(path)
        for state in self.optimizer.state.values():
            for key in MOMENTS:
                state[key] = state[key].to(torch.float32)


@mutant(caught_by="precision.reduction-precision")
class ReducesInTheComputeDtype(Reference):
    """Passes the compute dtype on and forgets the reduce dtype, which then follows it."""

    def shard(self, model: nn.Module) -> nn.Module:
        config = dataclasses.replace(self.config, reduce_dtype=self.config.compute_dtype)
        return models.shard_model(model.to(self.runtime.device), self.mesh(), config)
