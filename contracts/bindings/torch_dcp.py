"""Plain torch: FSDP2, torch.distributed.checkpoint, and a rename, written as a user would."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from contracts.implementation import Capability, Layout
from contracts.trainer import CheckpointerOnly


class TorchDCP(CheckpointerOnly):
    """FSDP2 with torch.distributed.checkpoint: save under a temporary name, then rename."""

    capabilities = {
        Capability.TRAIN,
        Capability.RESUME,
        Capability.SCHEDULER,
        Capability.ASYNC_THREAD,
        Capability.ASYNC_PROCESS,
        Capability.PUBLISH,
        Capability.COMPANIONS,
        Capability.RESHARD,
        Capability.HYBRID_SHARDING,
        Capability.SAMPLES,
        Capability.BFLOAT16_POLICY,
    }
    layout = Layout(companions=("tokenizer.json", "tokenizer_config.json", "config.json", "trainer.json"))

    def build(self) -> None:
        super().build()
        self.in_flight = None
        # Each save in flight talks over a group of its own, beside the training's collectives.
        self.group = dist.new_group(backend="gloo") if self.case.checkpoint.mode != "sync" else None

    def save(self, *, final: bool = False) -> None:
        self.finalize()
        temporary = self.place.root / f"tmp_step_{self.step}"
        if self.place.rank == 0:
            temporary.mkdir(parents=True, exist_ok=True)
            self.tokenizer.save_pretrained(temporary)
            self.model.config.save_pretrained(temporary)
            trainer = {"step": self.step, "scheduler": self.scheduler.state_dict()}
            (temporary / "trainer.json").write_text(json.dumps(trainer))
        dist.barrier()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        if self.case.checkpoint.mode == "sync":
            dcp.save(state, checkpoint_id=temporary)
            self._publish(temporary)
        else:
            kind = dcp.state_dict_saver.AsyncCheckpointerType(self.case.checkpoint.mode)
            future = dcp.async_save(state, checkpoint_id=temporary, process_group=self.group, async_checkpointer_type=kind)
            self.in_flight = temporary, future
            if final:
                self.finalize()  # no later call would ask the future

    def finalize(self) -> None:
        if self.in_flight is not None:
            temporary, future = self.in_flight
            self.in_flight = None
            future.result()
            self._publish(temporary)

    def _publish(self, temporary: Path) -> None:
        dist.barrier()
        if self.place.rank == 0:
            temporary.rename(temporary.with_name(temporary.name.removeprefix("tmp_")))
        dist.barrier()

    def resume(self) -> None:
        found = sorted(self.place.root.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=found[-1])
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        trainer = json.loads((found[-1] / "trainer.json").read_text())
        self.scheduler.load_state_dict(trainer["scheduler"])
        self.step = trainer["step"]

    def close(self) -> None:
        self.finalize()
