"""NVIDIA nemo-automodel 0.7.0: its Checkpointer, driven by its own recipe.

`BaseRecipe.save_checkpoint` and `load_checkpoint` decide what is written, by which rank and in which order, and
`CheckpointLifecycle` publishes; this file hands them the suite's trainer. Options that a case does not set keep their
defaults. A checkpoint bears its final name from the start, with a `.incomplete` marker in it until it is whole; then
`LATEST` points at it and the marker goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from contracts.implementation import Capability, Layout
from contracts.trainer import CheckpointerOnly

try:
    from nemo_automodel.components.checkpoint import checkpointing
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig
    from nemo_automodel.components.config.loader import ConfigNode
    from nemo_automodel.components.optim.scheduler import OptimizerParamScheduler
    from nemo_automodel.components.training.rng import StatefulRNG
    from nemo_automodel.recipes.base_recipe import BaseRecipe
except ImportError as error:
    raise ImportError(
        f"nemo-automodel cannot be imported here ({error}). It has an environment of its own:"
        " run `make env-nemo_automodel` and use the fsdp-contracts in it"
    ) from error


class Scheduler(OptimizerParamScheduler):
    """torch's scheduler as the kind that a recipe saves and loads together with its optimizer."""

    def __init__(self, scheduler: Any) -> None:
        self.state_dict, self.load_state_dict = scheduler.state_dict, scheduler.load_state_dict


class Progress:
    """What a recipe needs of its `step_scheduler`: steps taken, and whether this save is the last."""

    step, is_last_step = 0, False

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "epoch": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class NemoAutomodel(CheckpointerOnly):
    """The suite's plain FSDP2 trainer, checkpointed by a nemo-automodel recipe; its asynchronous mode is a process."""

    capabilities = {
        Capability.TRAIN,
        Capability.RESUME,
        Capability.SCHEDULER,
        Capability.ASYNC_PROCESS,
        Capability.PUBLISH,
        Capability.COMPANIONS,
        Capability.RESHARD,
        Capability.HYBRID_SHARDING,
        Capability.SAMPLES,
    }
    layout = Layout(
        published=r"epoch_\d+_step_(?P<step>\d+)",
        temporary=r"epoch_\d+_step_\d+\.reserving-[0-9a-f]+",
        companions=("config.yaml", "config.json", "tokenizer.json", "tokenizer_config.json"),
        incomplete=".incomplete",
    )
    recipe: BaseRecipe | None = None
    loss = 0.0

    def build(self) -> None:
        checkpoint, recipe = self.case.checkpoint, BaseRecipe()
        if checkpoint.mode == "thread":
            raise ValueError("nemo-automodel saves in a background process; it has no thread mode")
        recipe.rng = StatefulRNG(self.case.seed, ranked=True)  # it seeds every generator, so it comes before the model
        super().build()
        recipe.cfg = ConfigNode({"model": {"pretrained_model_name_or_path": str(self.place.model)}})
        recipe.model_parts, recipe.tokenizer, recipe.peft_config = [self.model], self.tokenizer, None
        recipe.optimizer, recipe.lr_scheduler = [self.optimizer], [Scheduler(self.scheduler)]
        recipe.step_scheduler = Progress()
        if not torch.accelerator.is_available():
            # Its stager takes torch's defaults, one of which raises without an accelerator; the others stay.
            checkpointing.DefaultStager = partial(DefaultStager, StagingOptions(use_non_blocking_copy=False))
        recipe.checkpointer = CheckpointingConfig(
            checkpoint_dir=str(self.place.root),
            model_repo_id=str(self.place.model),
            is_async=checkpoint.mode == "process",
            max_recent_checkpoints=checkpoint.keep_latest or None,
        ).build(dp_rank=self.place.rank, tp_rank=0, pp_rank=0)
        self.recipe = recipe

    def train_step(self) -> Mapping[str, Any]:
        self.recipe.checkpointer.maybe_wait_for_staging()  # as its recipes do before optimizer.step
        result = super().train_step()
        self.loss = result["loss"]
        return result

    def save(self, *, final: bool = False) -> None:
        self.recipe.step_scheduler.step, self.recipe.step_scheduler.is_last_step = self.step, final
        self.recipe.save_checkpoint(epoch=0, step=self.step, train_loss=self.loss)
        if final:
            self.finalize()  # as its recipes do when training ends

    def finalize(self) -> None:
        self.recipe.checkpointer.async_wait()
        self.recipe.checkpointer.lifecycle.complete_pending()

    def resume(self) -> None:
        self.recipe.load_checkpoint("LATEST")
        self.step = self.recipe.step_scheduler.step

    def close(self) -> None:
        if self.recipe is not None:
            self.recipe._finalize_and_close_checkpointer()
