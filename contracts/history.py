"""A history: the evidence of one run of a case, in the one order in which it happened.

A history is read-only data. It is loaded from the lab's evidence directory, or made by hand in a test of a contract:

    History.of(case, [events of generation 0], [events of generation 1])

`Event.order` orders the events of all ranks and all file events of a generation, whoever did them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from contracts.case import Case, Generation, Kill, PowerLoss
from contracts.checkpoint_dir import CheckpointDirectory
from contracts.implementation import Layout
from contracts.torchrun import Launch

FLUSHES = ("fsync", "sync")
"""Operations that change nothing but what a disk is sure to hold."""


class MissingEvidence(LookupError):
    """The history does not hold what a contract asks for; its verdict is unknown."""


@dataclass(frozen=True)
class Shard:
    """One rank's piece of one tensor.

    Attributes:
        local: the piece, on the CPU, in the dtype it had.
        shape: of the whole tensor.
        offset: of the piece in the whole; an empty piece lies at the end.
        device: where it lived.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    device: str = "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def same_bits(self, other: Shard) -> bool:
        return same_bits(self.local, other.local)


@dataclass(frozen=True)
class Event:
    """Something that happened on `rank`.

    File events seen from outside have kind "file" and no rank; what a rank was about to do to a path is an "attempt", and
    what it had flushed to storage when that returned a "flush".
    """

    kind: str
    rank: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    order: int = 0

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise MissingEvidence(f"event {self.kind!r} of rank {self.rank} has no {name!r}") from None


@dataclass(frozen=True)
class State:
    """One rank's tensors at one instant, by fully qualified name; moments by (name, key)."""

    label: str
    rank: int
    step: int
    parameters: Mapping[str, Shard]
    moments: Mapping[tuple[str, str], Shard]
    buffers: Mapping[str, Shard] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    order: int = 0
    gradients: Mapping[str, Shard] = field(default_factory=dict)

    @property
    def scheduler(self) -> dict[str, Any]:
        """What its scheduler's next rates follow from.

        Private values are left out but for the rates it last gave. How often it was called is not how far it is: one that
        is built for the step it resumes at was called once.
        """
        its = self.small.get("scheduler") or {}
        return {key: value for key, value in its.items() if not key.startswith("_") or key == "_last_lr"}


@dataclass(frozen=True)
class Snapshot:
    """The states of all ranks at corresponding instants."""

    ranks: tuple[State, ...]

    @property
    def step(self) -> int:
        return self.ranks[0].step

    @property
    def order(self) -> int:
        return max(state.order for state in self.ranks)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Whole parameters by name."""
        return {name: self._whole(name, [s.parameters for s in self.ranks]) for name in self.ranks[0].parameters}

    def moments(self) -> dict[tuple[str, str], torch.Tensor]:
        """Whole moments, step counts included, by (parameter name, key)."""
        return {name: self._whole(name, [s.moments for s in self.ranks]) for name in self.ranks[0].moments}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole pending gradients by parameter name."""
        return {name: self._whole(name, [s.gradients for s in self.ranks]) for name in self.ranks[0].gradients}

    def everything(self) -> dict[str, torch.Tensor]:
        """Whole parameters and moments under one name each."""
        return self.parameters() | {f"{key} of {name}": value for (name, key), value in self.moments().items()}

    @staticmethod
    def _whole(name: Any, shards: list[Mapping[Any, Shard]]) -> torch.Tensor:
        if not all(name in of_rank for of_rank in shards):
            raise MissingEvidence(f"{name} is not on every rank")
        pieces = [of_rank[name] for of_rank in shards]
        whole = torch.empty(pieces[0].shape, dtype=pieces[0].dtype)
        seen = torch.zeros(pieces[0].shape, dtype=torch.bool)
        for piece in pieces:
            if piece.local.numel() or not piece.shape:
                where = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.local.shape, strict=True))
                whole[where], seen[where] = piece.local, True
        if not bool(seen.all()):
            raise MissingEvidence(f"the ranks' shards of {name} leave {int((~seen).sum())} elements uncovered")
        return whole


@dataclass
class GenerationHistory:
    """What happened in one generation.

    Attributes:
        case: the generation as the case gives it.
        launch: what became of its ranks.
        events: of every rank, and file events from outside, in order.
        writers: ranks that opened each path for writing, or renamed a file to it, from inside; a path is relative to the
            run's root.
        disk: the published checkpoints at its end, by name.
        fired: faults that were carried out in a rank: `{"fault", "rank", "operation", "paths", …}`.
        tampered: what was done to the directory beforehand: `{"how", "paths"}`.
        lost: what a power loss took, see `contracts.lab.power.lose`; empty where there was none.
        names: every name under the run's root at the end, with its size in bytes; a directory's ends in a slash.
        pointer, best: what the layout's pointers to the newest and to the best checkpoint name at the end, or None.
    """

    case: Generation
    launch: Launch
    events: list[Event] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    writers: dict[str, set[int]] = field(default_factory=dict)
    disk: dict[str, CheckpointDirectory] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fired: list[dict[str, Any]] = field(default_factory=list)
    tampered: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    pointer: str | None = None
    lost: dict[str, Any] = field(default_factory=dict)
    best: str | None = None

    def of(self, *kinds: str, rank: int | None = None) -> list[Event]:
        """Events of these kinds, in order."""
        return [e for e in self.events if e.kind in kinds and (rank is None or e.rank == rank)]

    def files(self, *operations: str) -> Iterator[Event]:
        """File events under the run's root, seen from outside, in order."""
        return (e for e in self.events if e.kind == "file" and (not operations or e.operation in operations))

    def snapshots(self, label: str) -> list[Snapshot]:
        """Snapshots that every rank took under `label`, in order."""
        by_rank = [[s for s in self.states if s.label == label and s.rank == r] for r in range(self.case.ranks)]
        return [Snapshot(states) for states in zip(*by_rank, strict=False)]

    def snapshot(self, label: str, step: int | None = None) -> Snapshot:
        """The first snapshot under `label` (at `step`); raises MissingEvidence where there is none."""
        for snapshot in self.snapshots(label):
            if step is None or snapshot.step == step:
                return snapshot
        at = "" if step is None else f" at step {step}"
        raise MissingEvidence(f"no {label!r} snapshot{at} on every rank ({self.case})")

    @property
    def failure(self) -> str | None:
        """Why this generation did not end as the case says, or None."""
        wanted = {fault.rank for fault in self.case.faults if isinstance(fault, Kill | PowerLoss)}
        first = self.launch.primary
        if any(line["fault"] == "PowerLoss" for line in self.fired) and not self.launch.timed_out:
            return None if first is not None and first.signal == "SIGKILL" else self.launch.explain()
        killed = {outcome.rank for outcome in self.launch.outcomes if outcome.signal in ("SIGKILL", "SIGXFSZ")}
        struck = {line["rank"] for line in self.fired if line["fault"] == "Kill"}
        if (
            wanted
            and not self.launch.timed_out
            and first is not None
            and (first.rank in wanted & killed or wanted & struck & killed)
        ):
            return None
        if wanted and self.launch.ok:
            return f"rank {min(wanted)} was to be killed at a file event, and had fewer"
        return None if self.launch.ok else self.launch.explain()


@dataclass
class History:
    """The evidence of one run of `case` on an implementation with `layout`."""

    case: Case
    generations: list[GenerationHistory]
    layout: Layout = field(default_factory=Layout)
    directory: Path | None = None

    @classmethod
    def of(cls, case: Case, *events: Iterable[Event], layout: Layout | None = None, **more: list[Any]) -> History:
        """A hand-written history: events of each generation, every rank of which returned.

        Keywords `states`, `writers` and `disk` give one item per generation.
        """
        from contracts.torchrun import RankOutcome

        made = []
        for number, (generation, its) in enumerate(zip(case.generations, events, strict=True)):
            launch = Launch([RankOutcome(rank, "returned") for rank in range(generation.ranks)])
            ordered = [Event(e.kind, e.rank, e.data, order) for order, e in enumerate(its)]
            made.append(GenerationHistory(generation, launch, ordered, **{k: v[number] for k, v in more.items()}))
        return cls(case, made, layout or Layout())

    @property
    def failures(self) -> list[str]:
        return [f"generation {i} ({g.case}): {g.failure}" for i, g in enumerate(self.generations) if g.failure]

    def resumes(self) -> Iterator[tuple[GenerationHistory, GenerationHistory]]:
        """Pairs (generation that saved, next generation of the same run that resumes it)."""
        for number, later in enumerate(self.generations):
            if any(type(step).__name__ == "Resume" for step in later.case.steps):
                earlier = [g for g in self.generations[:number] if g.case.root == later.case.root]
                if earlier:
                    yield earlier[-1], later

    @cached_property
    def runs(self) -> dict[str, list[GenerationHistory]]:
        """Generations by the run they belong to."""
        found: dict[str, list[GenerationHistory]] = {}
        for generation in self.generations:
            found.setdefault(generation.case.root, []).append(generation)
        return found

    # --- reading the lab's evidence ------------------------------------------------------------------------------

    @classmethod
    def load(cls, directory: Path) -> History:
        """Load the evidence that the lab left in `directory`."""
        about = json.loads((directory / "about.json").read_text())
        case = Case.read(directory / "case.json")
        layout = Layout(**about["layout"] | {"companions": tuple(about["layout"]["companions"])})
        generations = [_load_generation(directory, number, g) for number, g in enumerate(case.generations)]
        return cls(case, generations, layout, directory)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit; NaN equals itself and 0.0 differs from −0.0."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    )


def first_difference(expected: Mapping[Any, torch.Tensor], seen: Mapping[Any, torch.Tensor]) -> str | None:
    """Say where two sets of tensors first differ in a bit, and in how many tensors; None where they agree."""
    different = [name for name in expected if name not in seen or not same_bits(expected[name], seen[name])]
    different += [name for name in seen if name not in expected]
    if not different:
        return None
    name = different[0]
    count = f"; {len(different)} of {len(expected.keys() | seen.keys())} tensors differ"
    if name not in seen or name not in expected:
        return f"{name} is {'missing' if name not in seen else 'unexpected'}{count}"
    a, b = expected[name], seen[name]
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{name} is {b.dtype} {list(b.shape)}, expected {a.dtype} {list(a.shape)}{count}"
    # Bytes are compared, as same_bits does: by value NaN would differ from itself, and 0.0 not from -0.0.
    size = a.element_size()
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)]
    index = int((bits[0] != bits[1]).nonzero()[0]) // size
    return f"{name} element {index} is {b.view(-1)[index].item()!r}, expected {a.view(-1)[index].item()!r}{count}"


def without_room(tensors: Mapping[Any, torch.Tensor], beside: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    """`tensors` without those of zeros that `beside` has not got.

    Moments and step counts that are there and zero are what an optimizer makes just before a parameter's first update. To
    have made that room early, as long as nothing else differs, is to have done nothing yet.
    """
    return {name: tensor for name, tensor in tensors.items() if name in beside or bool((tensor != 0).any())}


def _load_generation(directory: Path, number: int, generation: Generation) -> GenerationHistory:
    where = directory / f"generation-{number}"
    done = json.loads((where / "done.json").read_text())
    marks = _marks(where)
    outside = enumerate(_lines(where / "outside.jsonl"))
    events = [Event("file", None, line, order) for order, line in outside if line["tree"] != "marks"]
    states: list[State] = []
    notes: list[str] = list(done["notes"])
    for rank in range(generation.ranks):
        for line in _lines(where / f"events-{rank}.jsonl"):
            order = marks.get((rank, str(line["number"])))
            if order is None:
                notes.append(f"event {line['number']} of rank {rank} ({line['kind']}) has no place: its mark was not seen")
                continue
            if line["kind"] == "state":
                states.append(_load_state(where / "states", line, order))
            events.append(Event(line["kind"], rank, line["data"], order))
    writers: dict[str, set[int]] = {}
    fired: list[dict[str, Any]] = []
    for order, line in inside_events(where, marks):
        if "fault" in line:
            fired.append(line)
        if order is not None:
            events.append(Event("flush" if line["operation"] in FLUSHES else "attempt", line["rank"], line, order))
        if line.get("fault") == "Fail":
            continue
        if line["operation"] == "open":
            writers.setdefault(line["paths"][0], set()).add(line["rank"])
        elif line["operation"] == "rename" and len(line["paths"]) == 2:
            # A file that was written under another name gets its final one here.
            writers.setdefault(line["paths"][1], set()).add(line["rank"])
    return GenerationHistory(
        case=generation,
        launch=Launch.from_json(done["launch"]),
        events=sorted(events, key=lambda event: event.order),
        states=sorted(states, key=lambda state: state.order),
        writers=writers,
        disk={name: CheckpointDirectory.from_json(data) for name, data in done["disk"].items()},
        notes=notes,
        fired=fired,
        tampered=done.get("tampered", []),
        names=done.get("names", {}),
        pointer=done.get("pointer"),
        lost=done.get("lost", {}),
        best=done.get("best"),
    )


def inside_events(evidence: Path, marks: dict[tuple[int, str], int] | None = None) -> list[tuple[int | None, dict[str, Any]]]:
    """What the processes of a generation did to files, each with its order; in that order, and last what has none.

    An event at which a fault ended its process left no mark, so it has no order.
    """
    marks = _marks(evidence) if marks is None else marks
    lines = [line for file in sorted(evidence.glob("files-*.jsonl")) for line in _lines(file)]
    found = [(marks.get((line["rank"], f"{line['pid']}-{line['number']}")), line) for line in lines]
    return sorted(found, key=lambda item: float("inf") if item[0] is None else item[0])


def _marks(evidence: Path) -> dict[tuple[int, str], int]:
    """A mark's position among the outside events is its event's order."""
    marks: dict[tuple[int, str], int] = {}
    for order, line in enumerate(_lines(evidence / "outside.jsonl")):
        if line["tree"] == "marks" and line["operation"] == "created":
            rank, sequence, _ = line["path"].split(".", 2)
            marks.setdefault((int(rank), sequence), order)
    return marks


def _load_state(where: Path, line: dict[str, Any], order: int) -> State:
    from safetensors.torch import load_file

    data = line["data"]
    tensors = load_file(where / data["file"])
    groups: dict[str, dict[Any, Shard]] = {"parameter": {}, "moment": {}, "buffer": {}, "gradient": {}}
    for key, tensor in tensors.items():
        kind, *name = key.split("|")
        place = data["places"][key]
        shard = Shard(tensor, tuple(place["shape"]), tuple(place["offset"]), place["device"])
        groups[kind][(name[1], name[0]) if kind == "moment" else name[0]] = shard
    small = {key: data[key] for key in ("groups", "scheduler", "scaler", "random", "numbers", "aliases") if key in data}
    return State(
        data["label"], line["rank"], data["step"], groups["parameter"], groups["moment"], groups["buffer"], small, order,
        groups["gradient"],
    )  # fmt: skip


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            # A rank that was killed may have left half a line.
            try:
                yield json.loads(line)
            except ValueError:
                continue
