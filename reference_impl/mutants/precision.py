"""Mutants of the family precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from reference_impl.mutants.registry import mutant
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
