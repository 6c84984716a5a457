"""A case: what is to be run, as plain data.

A case is a model, an optimizer, policies, a seed and a tuple of generations. A generation is one launch of fresh
processes: a world, steps for every rank to take, and faults for the lab to inject. Everything is frozen and goes to
JSON and back unchanged, so a case can be stored, shrunk, printed as a short script and replayed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A sequence classifier with one label, small enough to build in milliseconds; sizes count elements."""

    architecture: Literal["llama", "odd"] = "llama"
    """"odd" is this suite's own classifier, which has the features below; a llama has none of them."""
    hidden: int = 8
    layers: int = 2
    weights_dtype: DType = "float32"
    """Dtype of the published weights the run starts from; the parameters' own dtype is `Precision.parameters`."""
    rows: tuple[int, ...] = ()
    """First dimensions of additional matrices: 1, one less and one more than the world, a prime."""
    tied: Literal["no", "shared", "declared"] = "no"
    """Whether the output matrix is the embedding, or is only said to be while it has values of its own."""
    unused: bool = False
    """Whether there are parameters that never get a gradient."""
    scalar: bool = False
    """Whether there is a parameter without dimensions. FSDP2 shards none, so it is kept out, whole on every rank."""
    frozen: str = ""
    """Regular expression, searched in parameter names, of those that do not train."""
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW with a warm-up and a linear decay; the default rate moves every parameter visibly in one step."""

    lr: float = 1e-2
    weight_decay: float = 0.1
    amsgrad: bool = False
    warmup_steps: int = 2
    total_steps: int = 40
    accumulation: int = 1
    empty_group: bool = False
    """Whether a parameter group without parameters stands between the others."""
    scaler: bool = False
    """Whether the loss is scaled by a `torch.amp.GradScaler`, whose scale doubles every second step."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Declared dtypes. What a contract calls declared is what stands here."""

    parameters: DType = "float32"
    moments: DType = "float32"
    masters: Literal["none", "float32"] = "none"
    """Whether the optimizer keeps master weights beside parameters of a smaller dtype."""
    compute: DType = "float32"
    reduce: DType = "float32"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Checkpoint policy: how `save` writes, and how many published checkpoints are kept (`keep_latest` of 0 keeps all).

    `keep_best` more are kept for their metric, which each save is given; `best_mode` says which values are better.
    """

    mode: Literal["sync", "thread", "process"] = "sync"
    keep_latest: int = 0
    keep_best: int = 0
    best_mode: Literal["min", "max"] = "min"


@dataclass(frozen=True, kw_only=True)
class Data:
    """Retrieval records; `global_batch` queries a step over all ranks, `passages` texts a query."""

    records: int = 24
    global_batch: int = 4
    passages: int = 2


# --- steps: what every rank of a generation does, in order -----------------------------------------------------------


@dataclass(frozen=True)
class Train:
    """Take `steps` optimizer steps; `lr` replaces the rate of every group for each of them."""

    steps: int = 1
    lr: float | None = None


@dataclass(frozen=True)
class Save:
    """Ask for a checkpoint; with an asynchronous policy it returns before the bytes have landed.

    `metric` is what the model was measured at just before, for policies that keep the best.
    """

    final: bool = False
    metric: float | None = None


@dataclass(frozen=True)
class Finalize:
    """Complete and publish whatever save is in flight."""


@dataclass(frozen=True)
class Overwrite:
    """Fill every live parameter and moment with a value no checkpoint may contain."""

    value: float = 1234.5


@dataclass(frozen=True)
class Resume:
    """Restore the newest whole checkpoint under the generation's root; `refused` where the stack must raise instead."""

    refused: bool = False


@dataclass(frozen=True)
class Draw:
    """Draw `count` random numbers from torch's default generator, as dropout would."""

    count: int = 4


@dataclass(frozen=True)
class FillGradients:
    """Give every trained parameter a gradient of `value`, as a step that was interrupted leaves them; None takes them away."""

    value: float | None = 1.0


@dataclass(frozen=True)
class Retune:
    """Scale every group's weight decay and epsilon by a factor of its own, as a schedule of them does in mid-run."""

    factor: float = 1.5


@dataclass(frozen=True)
class SetStepCount:
    """Let the optimizer have counted `value` steps, in its state and in its groups, wherever it counts."""

    value: int


@dataclass(frozen=True)
class ForgetMoments:
    """Empty the optimizer's state, as in an optimizer that has never stepped."""


@dataclass(frozen=True)
class MapNames:
    """Map the published names of `source` (a list under contracts/data/published_names) to parameters."""

    source: str


@dataclass(frozen=True)
class Exit:
    """Leave the process here, as a script does after its last line: nothing is finalized and nothing is closed."""


Step = (
    Train
    | Save
    | Finalize
    | Overwrite
    | Resume
    | Draw
    | FillGradients
    | Retune
    | MapNames
    | SetStepCount
    | ForgetMoments
    | Exit
)


# --- faults: what the lab does to a generation -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Hold one rank's file event until every other rank has announced `until`, and then for up to `grace` seconds more.

    The grace ends as soon as a name under the run's root comes or goes; all of it ends after `at_most` seconds. This
    forces a race instead of waiting for one: the writer cannot finish before the other side has had its chance to go wrong.
    `at` is a regular expression searched in the path, relative to the run's root, that is opened for writing.
    """

    rank: int
    at: str
    until: str
    grace: float = 0.8
    at_most: float = 4.0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL `rank` at its `event`-th file event (0 is the first) under the run's root, before it happens.

    Events are counted from the beginning, or from that of the `save`-th save (1 is the first) where that is given; all of
    them, or those in a path of which the regular expression `at` is found.

    A `torn` one counts opens for writing alone, and lets that one happen: the rank dies of the second byte it writes.
    """

    rank: int
    event: int
    save: int = 0
    at: str = ""
    torn: bool = False


@dataclass(frozen=True, kw_only=True)
class PowerLoss:
    """The machine loses power right before the `event`-th file event or flush of `rank`, counted as a Kill's are.

    Every rank and writer is gone at once, and with them what no disk was sure to hold (`contracts.lab.power`): what was
    not flushed of names and bytes; or, where `lost` is "bytes", of bytes alone, as names may get to a disk by themselves.
    """

    rank: int
    event: int
    save: int = 0
    at: str = ""
    lost: Literal["names and bytes", "bytes"] = "names and bytes"


@dataclass(frozen=True, kw_only=True)
class Blind:
    """`rank` does not see the paths in which `at` is found, as on a shared file system whose cache is stale.

    Its questions about existence and its listings leave them out; opening one works. Every rank may raise in such a
    generation, as with Fail.
    """

    rank: int
    at: str


@dataclass(frozen=True, kw_only=True)
class Fail:
    """From the `event`-th open for writing whose path `at` is found in, nothing can be created by a process of `rank`.

    Every open for writing, directory and link raises `error` from then on, as on a full disk that stays full. Opens are
    counted from the beginning of the `save`-th save (1 is the first), in each process of the rank for itself. Every rank
    may raise in such a generation: it says so, waits for the others to answer, and goes.

    "SIGKILL" is not raised but kills, as the kernel does when memory runs out: a process that writes for the rank, right
    before that open. The rank's own opens go well.
    """

    rank: int
    at: str = ""
    event: int = 0
    error: Literal["ENOSPC", "EIO", "EACCES", "SIGKILL"] = "ENOSPC"
    save: int = 1


@dataclass(frozen=True, kw_only=True)
class Tamper:
    """Change the run's directory before this generation's ranks start.

    The first four are done to the `file`-th file (in alphabetical order, counted around) of the newest published
    checkpoint, of all its files or those in whose path the regular expression `at` is found: cut it in half, empty it,
    remove it, or flip one bit in its middle.
    "foreign" adds names that resemble a checkpoint's and are none, some of them of a higher step; "older-touched" makes the
    newest checkpoint the one that was modified first; "litter" leaves a file in every directory that is not published.
    """

    how: Literal["truncate", "empty", "remove", "flip", "foreign", "older-touched", "litter"]
    file: int = 0
    at: str = ""


Fault = Hold | Kill | PowerLoss | Blind | Fail | Tamper


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One launch of fresh processes.

    Attributes:
        ranks: world size.
        steps: what every rank does.
        faults: what the lab does meanwhile.
        root: name of the run's directory; generations that share it are one training run.
        seed: seeds the model that the generation starts from, so that a resume cannot pass by luck.
        mesh: sizes of (replicate, shard) for hybrid sharding; empty for one dimension over all ranks.
        precision: what this generation declares where it is not the case's own, as after a changed configuration.
        frozen: what this generation freezes where it is not what the case's model says.
        wrapped: what each block of the model is wrapped in, from the inside: "recompute" computes its activations again in the
            backward, "compile" is `torch.compile`, whose backend may be "eager".
    """

    ranks: int
    steps: tuple[Step, ...]
    faults: tuple[Fault, ...] = ()
    root: str = "run"
    seed: int = 0
    mesh: tuple[int, ...] = ()
    precision: Precision | None = None
    frozen: str | None = None
    wrapped: tuple[Literal["recompute", "compile"], ...] = ()

    def __str__(self) -> str:
        text = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        text += f" ({' × '.join(map(str, self.mesh))})" if self.mesh else ""
        text += f" declaring {_declared(self.precision)}" if self.precision else ""
        text += f" wrapped to {' and '.join(self.wrapped)}" if self.wrapped else ""
        text += f" freezing {self.frozen or 'nothing'}" if self.frozen is not None else ""
        text += ": " + ", ".join(map(_phrase, self.steps))
        for fault in self.faults:
            text += f" [{_phrase(fault)}]"
        return text if self.root == "run" else f"{text} (in {self.root})"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything one run of the lab needs to know."""

    generations: tuple[Generation, ...]
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    precision: Precision = field(default_factory=Precision)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    data: Data = field(default_factory=Data)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.generations:
            raise ValueError("a case needs at least one generation")
        for generation in self.generations:
            if generation.ranks < 1:
                raise ValueError(f"a generation needs at least one rank, got {generation.ranks}")
            if generation.mesh and math.prod(generation.mesh) != generation.ranks:
                raise ValueError(f"a mesh of {generation.mesh} does not hold {generation.ranks} ranks")
            if not generation.steps:
                raise ValueError("a generation needs at least one step")
            for fault in generation.faults:
                if getattr(fault, "rank", 0) >= generation.ranks:
                    raise ValueError(f"{fault} names rank {fault.rank} of {generation.ranks}")

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that name this case; equal cases have equal keys."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def worlds(self) -> tuple[int, ...]:
        return tuple(sorted({generation.ranks for generation in self.generations}))

    def __str__(self) -> str:
        return "\n".join([*map(str, self.generations), self.policy()])

    def policy(self) -> str:
        """One line of what differs from the defaults, after the model."""
        changes = []
        for part in ("model", "optimizer", "precision", "checkpoint", "data"):
            value = getattr(self, part)
            for item in dataclasses.fields(value):
                if (seen := getattr(value, item.name)) != item.default and item.name != "architecture":
                    changes.append(f"{part}.{item.name}={seen}")
        return " ".join([self.model.architecture, *changes, f"seed={self.seed}"])

    def to_json(self) -> dict[str, Any]:
        """Return this case as data that `json` can write."""
        return _to_json(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        """Build a case from `to_json` data.

        Raises:
            ValueError: a field is unknown, missing or of the wrong form; the message names its place.
        """
        return _from_json(cls, data, "case")

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> Case:
        """Read a case file; raises ValueError naming the file where it is not one."""
        try:
            data = json.loads(Path(path).read_text())
            if not isinstance(data, dict) or "generations" not in data:
                raise ValueError('it is no case: a case is an object with "generations"')
            return cls.from_json(data)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: it is no case file: {error}") from error
        except OSError as error:
            raise ValueError(f"{path}: cannot read the case file: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _declared(precision: Precision) -> str:
    return " ".join(f"{name}={value}" for name, value in vars(precision).items())


def _phrase(item: Step | Fault) -> str:
    match item:
        case Train(steps, lr):
            return f"train {steps}" + (f" at rate {lr}" if lr is not None else "")
        case Resume(refused):
            return "resume (to be refused)" if refused else "resume"
        case Draw(count):
            return f"draw {count}"
        case FillGradients(value):
            return "drop gradients" if value is None else "leave gradients pending"
        case Save(final, metric):
            return "save" + " final" * final + (f" at {metric}" if metric is not None else "")
        case SetStepCount(value):
            return f"count {value} optimizer steps"
        case ForgetMoments():
            return "forget moments"
        case Hold():
            return f"rank {item.rank} held at {item.at} until {item.until}"
        case Kill(torn=True):
            return f"rank {item.rank} killed in the middle of the file that open {item.event}{_where(item)} is of"
        case Kill():
            return f"rank {item.rank} killed at file event {item.event}" + _where(item)
        case PowerLoss():
            where = f"event or flush {item.event} of rank {item.rank}{_where(item)}"
            return f"power lost at file {where}, and unflushed {item.lost} with it"
        case Blind():
            return f"rank {item.rank} does not see {item.at}"
        case Fail(error="SIGKILL"):
            return f"a writer of rank {item.rank} killed at open {item.event} of save {item.save}, at {item.at or 'any path'}"
        case Fail():
            return f"{item.error} on rank {item.rank} from open {item.event} of save {item.save} on, at {item.at or 'any path'}"
        case Tamper():
            which = f" file {item.file}" + (f" at {item.at}" if item.at else "")
            return f"before: {item.how}" + (which if item.how in ("truncate", "empty", "remove", "flip") else "")
        case Retune():
            return "retune the groups"
        case MapNames(source):
            return f"map the names of {source}"
        case _:
            return type(item).__name__.lower()


def _where(fault: Kill | PowerLoss) -> str:
    return (f" of save {fault.save}" if fault.save else "") + (f" at {fault.at}" if fault.at else "")


_TAGGED: dict[str, type] = {kind.__name__: kind for kind in (*typing.get_args(Step), *typing.get_args(Fault))}


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        data = {item.name: _to_json(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return {"do": type(value).__name__, **data} if type(value).__name__ in _TAGGED else data
    return [_to_json(item) for item in value] if isinstance(value, tuple) else value


def _from_json(kind: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{where}: expected a list, got {data!r}")
        return tuple(_from_json(typing.get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin in (typing.Union, types.UnionType) and type(None) in typing.get_args(kind):
        (only,) = (option for option in typing.get_args(kind) if option is not type(None))
        return None if data is None else _from_json(only, data, where)
    if origin in (typing.Union, types.UnionType):
        name = data.get("do") if isinstance(data, dict) else None
        if name not in _TAGGED or _TAGGED[name] not in typing.get_args(kind):
            known = ", ".join(option.__name__ for option in typing.get_args(kind))
            raise ValueError(f'{where}: expected an object with "do" one of {known}, got {data!r}')
        return _from_json(_TAGGED[name], {key: item for key, item in data.items() if key != "do"}, where)
    if origin is Literal:
        if data not in typing.get_args(kind):
            raise ValueError(f"{where}: expected one of {', '.join(typing.get_args(kind))}, got {data!r}")
        return data
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            raise ValueError(f"{where}: expected an object, got {data!r}")
        hints = typing.get_type_hints(kind)
        if unknown := data.keys() - hints.keys():
            raise ValueError(f"{where}: unknown field {sorted(unknown)[0]!r}; known: {', '.join(hints)}")
        try:
            return kind(**{name: _from_json(hints[name], item, f"{where}.{name}") for name, item in data.items()})
        except TypeError as error:
            raise ValueError(f"{where}: {error}") from error
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        raise ValueError(f"{where}: expected {kind.__name__}, got {data!r}")
    return data
