"""One run of the suite over one implementation: which cases, which histories, which verdicts."""

from __future__ import annotations

import difflib
import fnmatch
import math
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import find as hypothesis_find
from hypothesis.errors import NoSuchExample

import contracts.catalog  # noqa: F401  fills the registry
from contracts.bindings.known import Target
from contracts.case import Case
from contracts.census import Census, census
from contracts.history import History
from contracts.implementation import Capability, Layout
from contracts.judging import REGISTRY, Contract, Judgement, VerdictName
from contracts.lab.lab import Lab
from contracts.strategies.drawing import Cases, Scope

DEFAULT_WORLDS = (1, 2, 4)


@dataclass(frozen=True)
class Profile:
    """How much is drawn.

    Attributes:
        examples: cases per kind in a world of two; other worlds get a quarter of them.
        seed: of the drawing; None draws afresh.
        shrink_seconds: how long to look for a smaller case once a contract is broken.
        keeps_failures: whether a case that broke a contract is tried first whenever the contract is judged again.
    """

    name: str
    examples: int
    seed: int | None = 0
    shrink_seconds: float = 0.0
    keeps_failures: bool = False


PROFILES = {
    "smoke": Profile("smoke", examples=1),
    "ci": Profile("ci", examples=4, shrink_seconds=20.0),
    "nightly": Profile("nightly", examples=25, seed=None, shrink_seconds=300.0, keeps_failures=True),
}


@dataclass
class Verdict:
    """What the suite says of one contract; the fields of a report's line.

    `census` counts what the histories held that `evidence` was found in; `worlds`, `meshes` of hybrid sharding and `modes` of
    saving are those among them.
    """

    name: str
    verdict: VerdictName
    kind: str = ""
    cases: int = 0
    evidence: int = 0
    worlds: list[int] = field(default_factory=list)
    meshes: list[str] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    census: Census = field(default_factory=Census)
    seconds: float = 0.0
    message: str = ""
    case_file: str | None = None
    replay: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def hint(name: str) -> str:
    """What may have been meant by a name that is no contract's."""
    near = difflib.get_close_matches(name, REGISTRY, n=3, cutoff=0.5) or [c for c in REGISTRY if c.endswith(f".{name}")]
    return f"did you mean {' or '.join(near)}?" if near else "`fsdp-contracts list` names them all"


def select(globs: Iterable[str] = ("*",)) -> list[Contract]:
    """Contracts whose names match one of the globs; raises ValueError for a glob which matches none."""
    chosen: dict[str, Contract] = {}
    for glob in globs:
        found = {name: made for name, made in REGISTRY.items() if fnmatch.fnmatch(name, glob)}
        if not found:
            raise ValueError(f"no contract matches {glob!r}; {hint(glob)}")
        chosen |= found
    return [made for name, made in REGISTRY.items() if name in chosen]


class Suite:
    """Draws cases once per kind, runs each once, and lets every contract of that kind judge its history.

    Use it as a context manager; it ends the lab's processes. No case is run once `time.monotonic()` is past `until`.
    """

    def __init__(
        self,
        target: Target,
        *,
        profile: Profile = PROFILES["ci"],
        worlds: Sequence[int] = DEFAULT_WORLDS,
        device: str = "cpu",
        directory: Path = Path(".contracts"),
        deadline: float = 60.0,
        until: float = math.inf,
        lab: Lab | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.target = target
        self.seed = secrets.randbelow(2**32) if profile.seed is None else profile.seed
        self.profile = profile
        self.worlds = tuple(worlds)
        self.directory = Path(directory)
        self.until = until
        self.progress = progress
        self._owns_lab = lab is None
        self.lab = lab or Lab(
            target.implementation, python=target.python, device=device, directory=directory, deadline=deadline
        )
        self._drawn: dict[tuple[str, int], list[Case]] = {}
        self._histories: dict[str, History | str] = {}
        self._censuses: dict[str, Census] = {}

    def __enter__(self) -> Suite:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owns_lab:
            self.lab.close()

    @property
    def about(self) -> dict[str, Any]:
        return self.lab.about(self.target.implementation)

    @property
    def scope(self) -> Scope:
        layout = self.about["layout"]
        capabilities = frozenset(Capability(name) for name in self.about["capabilities"])
        return Scope(capabilities, Layout(**layout | {"companions": tuple(layout["companions"])}))

    def applies(self, contract: Contract) -> bool:
        return contract.needs <= self.scope.capabilities

    def cases(self, kind: Cases) -> Iterator[Case]:
        """Every case of one kind, in each world."""
        for ranks in (1,) if kind.one_world else self.worlds:
            if (kind.name, ranks) not in self._drawn:
                examples = 100 if kind.one_world else self._examples(ranks) * kind.weight
                self._drawn[kind.name, ranks] = kind.draw(ranks, self.scope, examples, self.seed)
            yield from self._drawn[kind.name, ranks]

    def _examples(self, ranks: int) -> int:
        """All of the profile's in a world of two, or the first there is: other worlds cost more than they tell."""
        most = 2 if 2 in self.worlds else self.worlds[0]
        return self.profile.examples if ranks == most else -(-self.profile.examples // 4)

    def history(self, case: Case) -> History | str:
        """Run a case once; a reason instead of a history where it cannot run on this machine."""
        if case.key not in self._histories:
            if time.monotonic() > self.until:
                return "the time was up"
            try:
                self._histories[case.key] = self.lab.run(case, self.target.implementation)
            except LookupError as reason:
                self._histories[case.key] = str(reason)
        return self._histories[case.key]

    def verdict(self, contract: Contract, *, stop_when_broken: bool = False) -> Verdict:
        """Judge every history of the contract's kind."""
        result = Verdict(contract.name, "not-applicable", contract.cases.name)
        if not self.applies(contract):
            lacking = ", ".join(sorted(contract.needs - self.scope.capabilities))
            result.message = f"{self.target.name} does not declare {lacking}"
            return result
        result.verdict = "not-run"
        worst: tuple[Case, Judgement] | None = None
        started = time.monotonic()
        cases = [*self._failed_before(contract), *self.cases(contract.cases)]
        for number, case in enumerate(cases, 1):
            self.progress(f"{contract.name}  {contract.cases.name} {number}/{len(cases)}  {max(case.worlds)} ranks")
            history = self.history(case)
            if isinstance(history, str):
                result.message = result.message or history
                continue
            judgement = contract(history)
            if judgement.verdict == "not-applicable":
                result.message = result.message or judgement.message
                continue
            result.cases += 1
            result.evidence += judgement.evidence
            if judgement.evidence:
                result.worlds = sorted({*result.worlds, max(case.worlds)})
                result.meshes = sorted({*result.meshes, *("x".join(map(str, g.mesh)) for g in case.generations if g.mesh)})
                result.modes = sorted({*result.modes, case.checkpoint.mode})
                result.census += self._census(history)
            if judgement.verdict == "broken" and (worst is None or worst[1].verdict != "broken"):
                worst = case, judgement
                if stop_when_broken:
                    break
            elif judgement.verdict == "unknown" and worst is None:
                worst = case, judgement
        if worst is not None:
            self._describe(result, *worst)
            if worst[1].verdict == "broken" and self.profile.keeps_failures:
                worst[0].write(self._failures(contract) / f"{worst[0].key}.json")
        elif result.cases:
            result.verdict, result.message = "kept", ""
        elif all(not isinstance(self.history(case), str) for case in cases):
            result.verdict = "not-applicable"
        result.seconds = round(time.monotonic() - started, 3)
        return result

    def _census(self, history: History) -> Census:
        if history.case.key not in self._censuses:
            self._censuses[history.case.key] = census(history)
        return self._censuses[history.case.key]

    def _failures(self, contract: Contract) -> Path:
        """Where cases that broke a contract are kept, to be tried first in later runs."""
        return self.directory / "failures" / self.target.name.replace(":", ".") / contract.name

    def _failed_before(self, contract: Contract) -> list[Case]:
        found = []
        for path in sorted(self._failures(contract).glob("*.json")) if self.profile.keeps_failures else ():
            try:
                found.append(Case.read(path))
            except ValueError as error:  # of an older version, say; a night's other cases need not wait for it
                warnings.warn(f"passing over a case that failed before: {error}", stacklevel=2)
        return found

    def _describe(self, result: Verdict, case: Case, judgement: Judgement) -> None:
        path = case.write(self.directory / "cases" / f"{case.key}.json")
        result.verdict, result.message = judgement.verdict, judgement.message
        result.case_file = str(path)
        result.replay = f"fsdp-contracts replay {path} {self.target.name} --contracts {result.name}"

    def shrink(self, contract: Contract, broken: Case, seconds: float | None = None) -> Case:
        """Look for a smaller case that breaks the contract too, for at most `seconds`; each try runs once."""
        end = time.monotonic() + (self.profile.shrink_seconds if seconds is None else seconds)
        tries = 0

        def still_breaks(case: Case) -> bool:
            nonlocal tries
            # What ran before is judged again at any time: Hypothesis takes an answer that changes for a flaky one.
            if time.monotonic() > end and case.key not in self._histories:
                return False
            tries += 1
            self.progress(f"{contract.name}  looking for a smaller case, try {tries}")
            history = self.history(case)
            return not isinstance(history, str) and contract(history).verdict == "broken"

        ranks = max(broken.worlds)
        for world in sorted(world for world in {*self.worlds, ranks} if world <= ranks):
            if time.monotonic() > end:
                break
            if not contract.cases.corners(world, self.scope):  # as for changed worlds, where there is one rank
                continue
            try:
                return hypothesis_find(
                    contract.cases.strategy(world, self.scope),
                    still_breaks,
                    settings=settings(
                        max_examples=self.profile.examples,
                        phases=[Phase.generate, Phase.shrink],
                        database=None,
                        deadline=None,
                        derandomize=True,
                        suppress_health_check=list(HealthCheck),
                    ),
                )
            except NoSuchExample:
                continue
        return broken

    def smaller(self, contract: Contract, broken: Verdict) -> Verdict | None:
        """The verdict on a smaller case, where one is found that breaks the contract too."""
        assert broken.case_file is not None
        case = Case.read(Path(broken.case_file))
        found = self.shrink(contract, case)
        if found == case:
            return None
        history = self.history(found)
        assert isinstance(history, History)
        result = Verdict(contract.name, "broken", contract.cases.name, cases=1, worlds=[max(found.worlds)])
        self._describe(result, found, contract(history))
        return result

    def run(self, chosen: Sequence[Contract]) -> Iterator[Verdict]:
        """Verdicts, one contract at a time."""
        for contract in chosen:
            yield self.verdict(contract)
