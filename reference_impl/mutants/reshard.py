"""Mutants of the family reshard."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from reference_impl import state
from reference_impl.checkpoint import SHARDS, Checkpointer
from reference_impl.mutants.registry import mutant
from reference_impl.rng import restore_streams, seed_streams
from reference_impl.trainer import read_progress
from reference_impl.under_contract import Reference


@mutant(caught_by="reshard.values-across-worlds")
class ForgetsMomentsOfAnotherWorld(Reference):
    """Takes optimizer state for a matter of its world, and begins anew on another."""

    def load_optimizer(self, path: Path) -> None:
        super().load_optimizer(path)
        if read_progress(path)["world"] != self.runtime.world:
            for its in self.optimizer.state.values():
                its["exp_avg"].zero_(), its["exp_avg_sq"].zero_()


@mutant(caught_by="reshard.values-across-worlds")
class MisplacesUnevenRows(Reference):
    """Cuts a tensor into even shards when the world has changed, so that rows of an uneven one end up a place further on."""

    def load_model(self, path: Path) -> None:
        super().load_model(path)
        if read_progress(path)["world"] != self.runtime.world:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    local = parameter.to_local()
                    if parameter.shape[0] % self.runtime.world and len(local) > 1:
                        local.copy_(local.roll(1, 0))


@mutant(caught_by="reshard.shards-tile-exactly-once")
class ForgetsTheLastShard(Reference):
    """Describes one shard less than every sharded tensor has."""

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            if self.runtime.rank == 0:
                rewrite_metadata(directory / SHARDS, lambda entry: dataclasses.replace(entry, chunks=entry.chunks[:-1]))
            super().publish(directory, step)


@mutant(caught_by="reshard.shards-tile-exactly-once")
class StoresARowTwice(Reference):
    """Makes each shard but the last one row longer than it is, into the next."""

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            if self.runtime.rank == 0:
                rewrite_metadata(directory / SHARDS, overlapping)
            super().publish(directory, step)


def overlapping(entry: Any) -> Any:
    first, *rest = entry.chunks
    longer = torch.Size([first.sizes[0] + 1, *first.sizes[1:]])
    return dataclasses.replace(entry, chunks=[dataclasses.replace(first, sizes=longer), *rest])


def rewrite_metadata(directory: Path, change: Any) -> None:
    """Change every entry of DCP's metadata that has more than one shard."""
    metadata = state.read_metadata(directory)
    for name, entry in metadata.state_dict_metadata.items():
        if len(getattr(entry, "chunks", ())) > 1:
            metadata.state_dict_metadata[name] = change(entry)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


@mutant(caught_by="reshard.new-ranks-new-streams")
class GivesNewRanksTheFirstStream(Reference):
    """Restores rank 0's random state on a rank that has none of its own."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        streams = state.load_streams(path / SHARDS, group=self.runtime.control)
        if self.runtime.rank >= len(streams):
            restore_streams(streams[0], self.runtime.device)


@mutant(caught_by="reshard.new-ranks-new-streams")
class SeedsAlikeOnAnotherWorld(Reference):
    """Starts every rank's stream from the run's seed and step when the world has changed."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        if read_progress(path)["world"] != self.runtime.world:
            seed_streams("resumed", self.config.seed, self.step)


@mutant(caught_by="reshard.samples-across-worlds")
class CountsARanksOwnBatches(Reference):
    """Keeps the position as batches of one rank, which are as many samples only on the same world."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        self.batches.consumed = self.batches.consumed * self.runtime.world // read_progress(path)["world"]


@mutant(caught_by="reshard.samples-across-worlds")
class StartsTheDataOverOnAnotherWorld(Reference):
    """Has the state of a loader for each rank, and begins at the first sample where their number has changed."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        if read_progress(path)["world"] != self.runtime.world:
            self.batches.consumed = 0


@mutant(caught_by="reshard.newest-on-every-rank")
class ResumesWhatItsOwnWorldSaved(Reference):
    """Looks for the newest checkpoint of a world of its size, and takes another only where there is none."""

    class checkpointer_class(Checkpointer):
        def latest(self) -> Path | None:
            newest = super().latest()
            found = [path for path in self.root.glob("step_*") if read_progress(path)["world"] == self.runtime.world]
            return max(found, key=lambda path: int(path.name.removeprefix("step_")), default=newest)


@mutant(caught_by="reshard.mesh-change")
class RestoresOneReplica(Reference):
    """Loads optimizer state on the first replica, and leaves the others with zero moments."""

    def load_optimizer(self, path: Path) -> None:
        super().load_optimizer(path)
        if self.config.replicas > 1 and self.runtime.rank >= self.runtime.world // self.config.replicas:
            for its in self.optimizer.state.values():
                its["exp_avg"].to_local().zero_()


@mutant(caught_by="reshard.mesh-change")
class ShardsOverReplicasToo(Reference):
    """Takes the declared number of replicas, and shards over all ranks all the same."""

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.runtime.device.type, (self.runtime.world,), mesh_dim_names=("shard",))


@mutant(caught_by="reshard.whole-parameters")
class LeavesWholeGradientsToFSDP(Reference):
    """Reduces no gradient by hand, as if FSDP reduced those too that it was told to ignore."""

    def average_whole_gradients(self) -> None:
        pass


@mutant(caught_by="reshard.whole-parameters")
class ForgetsMomentsWithoutShards(Reference):
    """Restores the moments of what is sharded, and leaves a parameter without dimensions to begin anew."""

    def load_optimizer(self, path: Path) -> None:
        super().load_optimizer(path)
        for parameter, its in self.optimizer.state.items():
            if parameter.ndim == 0:
                its["exp_avg"].zero_()
