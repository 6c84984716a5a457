"""pytest: one test per contract, in any repository.

    test_checkpoint_contracts = contract_tests(OurCheckpointer, known={"publish.exit-after-save": "https://…/issues/12"})

makes `test_checkpoint_contracts[publish.finalize-before-rename]` and its siblings. A contract that is kept passes; broken
and unknown fail, with the story of the case; not applicable and not run are skipped, and the summary says why. A contract
in `known` that is broken is an expected failure; once it is kept, its test fails until it is taken out of `known`.

Each xdist worker has a warm parent of its own per implementation, and all share the session's histories on disk, so a
case runs once whoever asks first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import os
import secrets
import shlex
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from contracts.bindings.known import Target
    from contracts.implementation import Implementation
    from contracts.judging import Contract
    from contracts.report.text import Stories
    from contracts.suite import Profile, Suite, Verdict

# pytest loads this module in every run of every project that has it installed: torch, hypothesis and the catalogue are
# imported where a contract test is collected, not here.

SEED = "fsdp_contracts_seed"


def contract_tests(
    implementation: type[Implementation] | str,
    *,
    known: Mapping[str, str] | None = None,
    contracts: Iterable[str] = ("*",),
    worlds: Sequence[int] | None = None,
    profile: str | Profile | None = None,
) -> Callable[..., None]:
    """Return a test function that pytest collects once per contract; assign it to a name that starts with `test_`.

    Args:
        implementation: a subclass of `contracts.Implementation` at the top level of a module, or what `fsdp-contracts run`
            takes: a known name or "module:Class".
        known: contracts that are known to be broken, each with the reason, best the address of an issue.
        contracts: names or globs of those to judge by.
        worlds: world sizes; they take the place of `--contract-worlds`.
        profile: "smoke", "ci", "nightly" or a `contracts.suite.Profile`; it takes the place of `--contract-profile`.

    Raises:
        TypeError: an argument has the wrong form. What only shows in the light of the catalogue (a name in `known` that
            is no contract, a class that no other process can import) is an error when pytest collects the test.
    """
    if not isinstance(implementation, str | type):
        raise TypeError(f"implementation must be a class, a known name or 'module:Class', got {implementation!r}")
    for name, reason in (known or {}).items():
        if not isinstance(reason, str) or not reason.strip():
            raise TypeError(f"known[{name!r}] must be a reason, such as the address of an issue, got {reason!r}")
    declared = _Declared(
        implementation=implementation,
        known=dict(known or {}),
        contracts=(contracts,) if isinstance(contracts, str) else tuple(contracts),
        worlds=None if worlds is None else _checked_worlds(worlds, TypeError),
        profile=profile,
    )

    @pytest.mark.fsdp_contracts
    def judge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, contract: str) -> None:
        _judge(declared, contract, request, tmp_path_factory)

    judge.contract_tests = declared
    caller = sys._getframe(1)
    # Where pytest says the test is: the line that declares it, not this file.
    judge.place_as = caller.f_code.replace(co_firstlineno=caller.f_lineno)
    return judge


@dataclass(frozen=True)
class _Declared:
    implementation: type[Implementation] | str
    known: dict[str, str]
    contracts: tuple[str, ...]
    worlds: tuple[int, ...] | None
    profile: str | Profile | None

    def target(self) -> tuple[Target, Path | None]:
        """The target, and the directory its module is imported from where only this process knows it.

        Raises:
            ValueError: nothing has that name, or no other process could import the class.
            TypeError: the class lacks a method that it owes.
        """
        from contracts.bindings.known import Target, resolve
        from contracts.implementation import Implementation, require_owed

        if isinstance(self.implementation, str):
            target, home = resolve(self.implementation), None
        else:
            if not issubclass(self.implementation, Implementation):
                raise ValueError(f"{self.implementation.__name__} is no subclass of contracts.Implementation")
            require_owed(self.implementation)
            name, home = _importable(self.implementation)
            target = Target(name, name)
        return dataclasses.replace(target, known={**target.known, **self.known}), home

    def chosen(self) -> dict[str, Contract]:
        """The contracts to judge by.

        Raises:
            ValueError: a glob or a name in `known` matches none, or no profile has that name.
        """
        from contracts.judging import REGISTRY
        from contracts.suite import PROFILES, hint, select

        if isinstance(self.profile, str) and self.profile not in PROFILES:
            raise ValueError(f"profile must be one of {', '.join(PROFILES)}, got {self.profile!r}")
        chosen = {contract.name: contract for contract in select(self.contracts)}
        for name in self.known:
            if name not in REGISTRY:
                raise ValueError(f"known names {name!r}, which is no contract; {hint(name)}")
            if name not in chosen:
                raise ValueError(f"known names {name!r}, which contracts={self.contracts!r} leaves out")
        return chosen


def _importable(implementation: type) -> tuple[str, Path]:
    """`module:Class`, and the directory that has to be on the path of a process that imports it."""
    module, name = implementation.__module__, implementation.__qualname__
    if module == "__main__":
        raise ValueError(f"{name} is defined in __main__, which the ranks cannot import; move it into a module")
    if getattr(sys.modules.get(module), name, None) is not implementation:
        raise ValueError(
            f"the ranks cannot import {name} from {module}; define it at the top level of its module, under its own name"
            " and not inside a function or another class"
        )
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        raise ValueError(f"the ranks cannot import {name}: its module {module} has no file")
    where = Path(file).absolute()
    where = where.parent if where.stem == "__init__" else where.with_suffix("")
    parts = tuple(module.split("."))
    if where.parts[-len(parts) :] != parts:  # pytest made the name up, as it does for a folder whose name has a dot
        parts = (where.name,)
    return f"{'.'.join(parts)}:{name}", where.parents[len(parts) - 1]


# --- options ---------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fsdp-contracts", "FSDP contracts (tests made by contracts.contract_tests)")
    group.addoption(
        "--contract-profile", choices=("smoke", "ci", "nightly"), default="ci",
        help="how many cases of each kind are drawn: smoke 1, ci 4, nightly 25 in a world of two and a quarter in others,"
        " nightly from a new seed each time"
        " (default: ci)",
    )  # fmt: skip
    group.addoption(
        "--contract-worlds", type=_worlds, default=(1, 2, 4), metavar="N,N",
        help="world sizes to run; a CPU world may be larger than the machine (default: 1,2,4)",
    )  # fmt: skip
    group.addoption(
        "--contract-device", choices=("cpu", "cuda"), default="cpu",
        help="gloo on cores, or NCCL with a GPU per rank; a world with too few GPUs is reported as not run (default: cpu)",
    )  # fmt: skip


def _worlds(text: str) -> tuple[int, ...]:
    try:
        worlds = [int(part) for part in text.split(",")]
    except ValueError:
        worlds = []
    return _checked_worlds(worlds, argparse.ArgumentTypeError, text)


def _checked_worlds(worlds: Sequence[int], error: type[Exception], given: Any = None) -> tuple[int, ...]:
    if not worlds or any(type(ranks) is not int or ranks < 1 for ranks in worlds):
        raise error(f"expected world sizes such as 1,2,4, got {worlds if given is None else given!r}")
    return tuple(dict.fromkeys(worlds))


# --- the session -----------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fsdp_contracts: a test made by contracts.contract_tests, which starts torchrun ranks")
    session = config.stash[_SESSION] = _Session(config)
    config.add_cleanup(session.close)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    # Workers that drew from seeds of their own would share no history.
    node.workerinput[SEED] = node.config.stash[_SESSION].seed


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto`: as many workers as worlds of two ranks fit; `-n logical` and xdist's own variable are left alone."""
    if config.option.numprocesses != "auto" or os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") or sys.platform != "linux":
        return None
    from contracts.lab.leases import whole_worlds

    return whole_worlds(config.getoption("contract_device"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    declared = getattr(metafunc.function, "contract_tests", None)
    if not isinstance(declared, _Declared):
        return
    try:
        declared.target()
        names = list(declared.chosen())
    except (TypeError, ValueError) as error:
        raise pytest.Collector.CollectError(f"{metafunc.definition.name}: {error}") from error
    metafunc.parametrize("contract", names, ids=names)


class _Session:
    """The suites of one pytest process: each is made when its first test runs and ends with the session."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        self.seed: int = secrets.randbelow(2**32) if self.worker is None else self.worker[SEED]
        self._suites: dict[tuple[Any, ...], _Judged] = {}

    def judged(self, declared: _Declared, tmp_path_factory: pytest.TempPathFactory) -> _Judged:
        from contracts.lab.lab import Lab
        from contracts.report.text import Stories
        from contracts.suite import PROFILES, Suite

        target, home = declared.target()
        profile = declared.profile or self.config.getoption("contract_profile")
        profile = PROFILES[profile] if isinstance(profile, str) else profile
        if profile.seed is None:
            profile = dataclasses.replace(profile, seed=self.seed)
        worlds = declared.worlds or self.config.getoption("contract_worlds")
        device = self.config.getoption("contract_device")
        key = (target.implementation, home, profile, worlds, device)
        if key not in self._suites:
            shared = tmp_path_factory.getbasetemp()
            if self.worker is not None:  # a worker's own directory lies in the one that the controller made
                shared = shared.parent
            digest = hashlib.sha256(f"{target.implementation} {home}".encode()).hexdigest()[:8]
            directory = shared / "fsdp-contracts" / f"{target.implementation.rpartition(':')[2]}-{digest}"
            paths = [] if target.python != sys.executable else _paths(home)
            lab = Lab(target.implementation, python=target.python, device=device, directory=directory, paths=paths)
            # The cases of broken verdicts outlive the session, in the project; its histories do not.
            suite = Suite(
                target, profile=profile, worlds=worlds, device=device, directory=self.config.rootpath / ".contracts", lab=lab
            )
            self._suites[key] = _Judged(suite, device, self._replay_prefix(paths), Stories())
        return self._suites[key]

    def turn(self, count: int) -> int:
        """Where of `count` cases this worker begins; each begins elsewhere, so that none waits for another's."""
        if self.worker is None:
            return 0
        return int(self.worker["workerid"].removeprefix("gw")) * count // self.worker["workercount"]

    def _replay_prefix(self, paths: Sequence[Path]) -> str:
        """What a replay in the directory of this command has to put before `fsdp-contracts`."""
        here, project = self.config.invocation_params.dir, self.config.rootpath
        needed = [path for path in paths if path != here and path.is_relative_to(project)]
        shown = os.pathsep.join(str(path.relative_to(here)) if path.is_relative_to(here) else str(path) for path in needed)
        theirs = os.environ.get("PYTHONPATH")
        return f"PYTHONPATH={shlex.quote(os.pathsep.join(filter(None, [shown, theirs])))} " if shown else ""

    def close(self) -> None:
        for judged in self._suites.values():
            judged.suite.lab.close()
        self._suites.clear()


_SESSION: pytest.StashKey[_Session] = pytest.StashKey()


@dataclass
class _Judged:
    """A suite, and what its tests have in common.

    Attributes:
        trouble: why the implementation cannot be judged at all; each further test fails of it at once.
    """

    suite: Suite
    device: str
    replay_prefix: str
    stories: Stories
    trouble: str | None = None


def _paths(home: Path | None) -> list[Path]:
    """What this process imports from and a fresh one of the same interpreter would not: `pythonpath`, conftest's folders."""
    own = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "scripts")]
    found = [Path(entry or os.curdir).absolute() for entry in sys.path]
    # site-packages stay behind the standard library, which they may shadow.
    found = [
        path
        for path in found
        if path.is_dir() and path.name not in ("site-packages", "dist-packages") and not {*own} & {path, *path.parents}
    ]
    return list(dict.fromkeys([*([home] if home else []), *found]))


# --- one test --------------------------------------------------------------------------------------------------------


def _judge(declared: _Declared, name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    from contracts.judging import REGISTRY
    from contracts.lab.lab import LabError
    from contracts.suite import Verdict

    session, contract = request.config.stash[_SESSION], REGISTRY[name]
    if sys.platform != "linux":
        verdict = Verdict(name, "not-run", message=f"ranks, file events and leases need Linux; this is {sys.platform}")
        _record(request.node, verdict, implementation=str(declared.implementation))
        _conclude(verdict, None, "")
        return
    judged = session.judged(declared, tmp_path_factory)
    suite = judged.suite
    about = {"implementation": suite.target.name, "profile": suite.profile.name, "device": judged.device, "seed": suite.seed}
    reason = declared.target()[0].known.get(name)  # not the suite's, which other tests of the implementation share
    missing = ""
    try:
        if judged.trouble is not None:
            raise LabError(judged.trouble)
        _import(judged)
        missing = _run(session, suite, contract)
        verdict = suite.verdict(contract)
        story = judged.stories(verdict) if verdict.verdict in ("broken", "unknown") else ""
        if verdict.verdict == "broken" and reason is None and suite.profile.shrink_seconds:
            smaller = suite.smaller(contract, verdict)
            if smaller is not None:
                story += f"\n\nA smaller case of the same:\n{judged.stories(smaller)}"
    except LabError as error:
        verdict = Verdict(name, "unknown", message=f"the lab could not run {suite.target.name}: {str(error).splitlines()[0]}")
        story = f"UNKNOWN  {name}\n  the lab could not run {suite.target.name}:\n{error}"
    if verdict.case_file is not None:  # nobody wants them in a commit
        with contextlib.suppress(FileExistsError), open(suite.directory / ".gitignore", "x") as file:
            file.write("*\n")
    story = _here(story, session, judged)
    _record(request.node, verdict, **about, known=reason, replay=_here(verdict.replay or "", session, judged), not_run=missing)
    _conclude(verdict, reason, story)


def _import(judged: _Judged) -> None:
    from contracts.lab.lab import LabError

    try:
        judged.suite.about  # noqa: B018  the warm parent imports the implementation
    except LabError as error:
        judged.trouble = str(error)
        raise


def _run(session: _Session, suite: Suite, contract: Contract) -> str:
    """Run every case of the contract's kind; returns why some did not run here, where some did not."""
    if not suite.applies(contract):
        return ""
    cases = list(suite.cases(contract.cases))
    start = session.turn(len(cases))
    histories = [suite.history(case) for case in (*cases[start:], *cases[:start])]
    return next((history for history in histories if isinstance(history, str)), "")


def _here(story: str, session: _Session, judged: _Judged) -> str:
    """The story with a replay command to paste where pytest was called."""
    kept, here = str(judged.suite.directory), session.config.invocation_params.dir
    shorter = kept.removeprefix(f"{here}/")
    return story.replace(f"fsdp-contracts replay {kept}", f"{judged.replay_prefix}fsdp-contracts replay {shorter}")


def _record(item: pytest.Item, verdict: Verdict, **more: Any) -> None:
    """Put the verdict where JUnit reports, xdist's controller and the summary find it."""
    values = {
        "contract": verdict.name,
        "verdict": verdict.verdict,
        "cases": verdict.cases,
        "evidence": verdict.evidence,
        "worlds": ",".join(map(str, verdict.worlds)),
        "message": verdict.message,
        "case_file": verdict.case_file,
        **more,
    }
    item.user_properties += [(key, value) for key, value in values.items() if value not in (None, "")]


def _conclude(verdict: Verdict, reason: str | None, story: str) -> None:
    """Pass, or raise the outcome that pytest reports for the verdict; `reason` is why the contract is known to be broken."""
    kind = verdict.verdict
    if kind == "broken":
        if reason is not None:
            pytest.xfail(reason)  # returns under --runxfail
        pytest.fail(story, pytrace=False)
    if kind == "unknown":
        note = f"\n  It is in known, which says: {reason}" if reason is not None else ""
        pytest.fail(story + note, pytrace=False)
    if reason is not None and kind in ("kept", "not-applicable"):
        seen = "kept" if kind == "kept" else f"not applicable ({verdict.message})"
        pytest.fail(f"known failure {verdict.name} is {seen} now; remove it from known. It said: {reason}", pytrace=False)
    if kind in ("not-applicable", "not-run"):
        pytest.skip(f"{kind}: {verdict.message}")


# --- the summary -----------------------------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    tests: dict[str, dict[str, Any]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            values = dict(getattr(report, "user_properties", ()))
            if getattr(report, "when", "") == "call" and {"contract", "verdict"} <= values.keys():
                tests[report.nodeid] = values
    groups: dict[str, list[dict[str, Any]]] = {}
    for nodeid, values in tests.items():
        groups.setdefault(nodeid.partition("[")[0], []).append(values)
    if groups:
        terminalreporter.section("fsdp-contracts")
    for name, rows in groups.items():
        for line in _summary(name, rows, every=config.get_verbosity() > 0):
            terminalreporter.write_line(line)


def _summary(name: str, rows: Sequence[dict[str, Any]], *, every: bool) -> list[str]:
    """Counts of the verdicts, and a line for each contract that was not simply kept; for all of them where `every`."""
    counts: dict[str, int] = {}
    for row in rows:
        row["mark"] = "known" if row["verdict"] == "broken" and "known" in row else row["verdict"]
        counts[row["mark"]] = counts.get(row["mark"], 0) + 1
    order = ("broken", "unknown", "known", "kept", "not-applicable", "not-run")
    first = rows[0]
    how = [f"profile {first['profile']}", first["device"], f"seed {first['seed']}"] if "profile" in first else []
    lines = [f"{name} ({first['implementation']}): " + ", ".join(f"{counts[mark]} {mark}" for mark in order if mark in counts)]
    lines[0] += f"   [{', '.join(how)}]" if how else ""
    width = max(len(row["contract"]) for row in rows)
    for row in rows:
        about = f"{row['cases']} cases, {row['evidence']} pieces of evidence, worlds {row.get('worlds') or '-'}"
        notes = [about] if every and row["cases"] else []
        if row["mark"] == "known":
            notes.append(row["known"])
        elif row["mark"] in ("not-applicable", "not-run", "unknown", "broken"):
            notes.append(str(row.get("message", "")).partition("\n")[0])
        if row["mark"] == "kept" and "known" in row:
            notes.append("remove it from known")
        if "not_run" in row and row["mark"] != "not-run":
            notes.append(f"in part only: {row['not_run']}")
        if notes:
            lines.append(f"  {row['mark']:14}  {row['contract']:{width}}  {'; '.join(notes)}".rstrip())
    return lines
