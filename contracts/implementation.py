"""What a stack must offer to be put under contract.

A stack subclasses `Implementation`. Every rank of a generation makes one instance in a fresh process whose process
group is already up, calls `build`, and then the method of each step of the case. The attributes are what the recorder
reads, between steps; an implementation never records, judges or sees a contract.

A stack that only checkpoints subclasses `contracts.CheckpointerOnly` instead, which brings a plain FSDP2 trainer.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from contracts.case import Case
    from contracts.published_names import PublishedNames


class Capability(enum.StrEnum):
    """What an implementation says it can do. Contracts that need something else are not applicable."""

    TRAIN = "train"
    """Trains with FSDP2 and saves published checkpoints."""
    RESUME = "resume"
    """Resumes the newest whole checkpoint in fresh processes, optimizer state included."""
    SCHEDULER = "scheduler"
    """Has a learning-rate scheduler whose state is saved and resumed."""
    ASYNC_THREAD = "async-thread"
    """Saves in a background thread when the case says so."""
    ASYNC_PROCESS = "async-process"
    """Saves in a background process when the case says so."""
    PUBLISH = "publish"
    """A checkpoint appears under its final name only when it is whole."""
    COMPANIONS = "companions"
    """Writes replicated files (tokenizer, configuration) into each checkpoint."""
    RESHARD = "reshard"
    """Resumes on another number of ranks than it saved from."""
    HYBRID_SHARDING = "hybrid-sharding"
    """Shards over a (replicate, shard) mesh where the case asks for one."""
    RANDOM_STREAMS = "random-streams"
    """Saves and restores each rank's random stream."""
    SAMPLES = "samples"
    """Reports the ids of the records each step consumed, and resumes its position in them."""
    BFLOAT16_POLICY = "bfloat16-policy"
    """Trains parameters and moments in bfloat16 where that is declared."""
    MASTER_WEIGHTS = "master-weights"
    """Keeps float32 master weights and moments beside bfloat16 parameters where that is declared."""
    DECLARED_DTYPES = "declared-dtypes"
    """Refuses a checkpoint whose dtypes are not the declared ones, unless its policy says to convert."""
    KEY_MAPPING = "key-mapping"
    """Maps published checkpoint names to parameter names."""
    WRAPPERS = "wrappers"
    """Wraps each block for activation checkpointing and `torch.compile` where the case says so."""
    WHOLE_PARAMETERS = "whole-parameters"
    """Trains parameters that FSDP does not shard, such as one without dimensions."""
    SCALER = "scaler"
    """Has a `scaler` that scales the loss where the case says so, and whose state is saved and resumed."""
    RETENTION = "retention"
    """Keeps as many published checkpoints as the case says, and removes older ones."""
    BEST = "best"
    """Keeps the best checkpoints by `metric` beside the newest, as many as the case says, and points at the best."""
    INTEGRITY = "integrity"
    """Notices when a checkpoint's bytes are not those that were written."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a stack puts things under the run's root.

    Attributes:
        published: regular expression that a checkpoint's final name, relative to the root, matches in full; its group
            `step` is the optimizer step.
        temporary: the same for the names a checkpoint may have while it is written.
        companions: base names of replicated files which every checkpoint holds.
        incomplete: name of a file inside a checkpoint which says, while it is there, that the checkpoint is not
            published yet; for stacks that write under the final name from the start.
        pointer: name of a link, or of a text file that holds a name, which points at the newest published checkpoint.
        best: the same for the checkpoint with the best metric.
        newer_wins_ties: whether the newer or the older of two checkpoints with equal metrics is the better one.
    """

    published: str = r"step_(?P<step>\d+)"
    temporary: str = r"tmp_step_\d+"
    companions: tuple[str, ...] = ()
    incomplete: str | None = None
    pointer: str | None = None
    best: str | None = None
    newer_wins_ties: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.companions, str):
            raise TypeError(f"companions must be a tuple of file names, such as ({self.companions!r},); got a string")
        if "step" not in re.compile(self.published).groupindex:
            raise ValueError(f"published must hold a group (?P<step>...) around the step's number, got {self.published!r}")


@dataclass(frozen=True, kw_only=True)
class Place:
    """What the lab hands to a rank.

    Attributes:
        root: the run's checkpoint directory; it exists and is shared by every generation of the run.
        model: a transformers directory (configuration, weights, tokenizer) of a sequence classifier with one label.
        records: JSON Lines of `{"query", "pos_doc", "neg_doc"}`.
        device: "cpu", or "cuda" where this rank's device is already current.
        rank, ranks: this rank and the world size.
        mesh: sizes of (replicate, shard) where the case asks for hybrid sharding; empty for one dimension.
        wrapped: what each block is to be wrapped in, from the inside: "recompute", "compile"; most often nothing.
    """

    root: Path
    model: Path
    records: Path
    device: str
    rank: int
    ranks: int
    mesh: tuple[int, ...] = ()
    wrapped: tuple[str, ...] = ()


class KeyMapping(Protocol):
    """A stack's mapping from published checkpoint names to its model's names."""

    targets: Iterable[str]
    """Names that a load has to fill: parameters and persistent buffers, tied aliases left out."""

    def map(self, name: str) -> str | None:
        """Return the model's name for a published name, or None for a name which is declared ignored."""


class Implementation:
    """Base of every implementation; see the module's docstring.

    Attributes:
        model: the sharded `torch.nn.Module`, or None before `build`.
        optimizer: its `torch.optim.Optimizer`.
        scheduler: its learning-rate scheduler, or None.
        scaler: its gradient scaler, or None.
        step: optimizer steps taken by the run.
        metric: what a stack that keeps the best checkpoints is to rank the next save by; set before each `save`.
    """

    capabilities: ClassVar[frozenset[Capability] | set[Capability]] = frozenset()
    layout: ClassVar[Layout] = Layout()
    start_method: ClassVar[str] = "fork"
    """How ranks start: "fork" from a parent that has imported the stack, or "spawn" where the stack cannot be forked."""

    model: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    scaler: Any = None
    step: int = 0
    metric: float | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError for a capability there is none of, or one that the layout does not bear out."""
        super().__init_subclass__(**kwargs)
        for name in cls.capabilities:
            if name not in list(Capability):
                near = difflib.get_close_matches(str(name).lower(), list(Capability), n=1)
                hint = f"did you mean {str(near[0])!r}?" if near else f"there are {', '.join(Capability)}"
                raise TypeError(f"{cls.__name__} declares {name!r}, which is no capability; {hint}")
        if Capability.COMPANIONS in cls.capabilities and not cls.layout.companions:
            raise TypeError(f"{cls.__name__} declares COMPANIONS; name its files in layout.companions, or leave it out")

    def __init__(self, case: Case, place: Place) -> None:
        self.case = case
        self.place = place

    def build(self) -> None:
        """Make model, optimizer, scheduler and data, as a run does before it looks for a checkpoint."""

    def train_step(self) -> Mapping[str, Any]:
        """Take one optimizer step.

        Returns:
            `loss`, the mean over the global batch, as a float; optionally `lr`, the rate this step used, and `samples`,
            the ids of the records this rank consumed.
        """
        raise NotImplementedError

    def save(self, *, final: bool = False) -> None:
        """Save a checkpoint of the present step; `final` marks the deliberate end of the run."""
        raise NotImplementedError

    def finalize(self) -> None:
        """Complete and publish whatever save is in flight; a stack whose saves are synchronous has nothing to do."""

    def resume(self) -> None:
        """Restore the newest whole checkpoint under `place.root`."""
        raise NotImplementedError

    def key_mapping(self, published: PublishedNames) -> KeyMapping | None:
        """Return the mapping for the model of `published`, weights on the meta device; None for a model not supported."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of background workers; called at the end of each generation that reached its end."""


OWED = {Capability.TRAIN: ("train_step", "save"), Capability.RESUME: ("resume",), Capability.KEY_MAPPING: ("key_mapping",)}
"""What a stack that declares a capability has to write."""


def require_owed(implementation: type[Implementation]) -> None:
    """Raise TypeError where a stack declares a capability and lacks a method that it takes."""
    for capability, methods in OWED.items():
        for method in methods if capability in implementation.capabilities else ():
            if getattr(implementation, method) is getattr(Implementation, method):
                raise TypeError(f"{implementation.__name__} declares {capability.name} and has no method {method!r}")
