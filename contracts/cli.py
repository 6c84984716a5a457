"""The command line: list the contracts, run them over an implementation, replay a case, prove that they can fail."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contracts.bindings.known import Target
    from contracts.judging import Contract
    from contracts.lab.lab import Lab
    from contracts.suite import Suite, Verdict

BAD_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 where everything is kept, 1 for something broken or unknown, 2 for bad usage."""
    options = _parser().parse_args(arguments)
    if sys.platform != "linux":
        return _usage(f"ranks, file events and leases need Linux; this is {sys.platform}. Use a Linux machine or container.")
    sys.path.insert(0, os.getcwd())  # `module:Class` is looked up here, as `python -m` would
    from contracts.bindings.known import UnknownImplementation
    from contracts.lab.lab import LabError

    try:
        return options.command(options)
    except (UnknownImplementation, ValueError) as error:
        return _usage(str(error))
    except LabError as error:
        print(f"fsdp-contracts: the lab could not run this implementation:\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fsdp-contracts: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdp-contracts",
        description="Judge an FSDP fine-tuning or checkpointing stack in real torchrun worlds.",
        epilog="exit status: 0 everything kept · 1 something broken or unknown · 2 bad usage",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="every contract: its name, what it says, what it needs, who saw it broken")
    listing.add_argument("--json", action="store_true", help="as JSON on standard output")
    listing.set_defaults(command=_list)

    running = commands.add_parser("run", help="judge an implementation by every contract that applies to it")
    running.add_argument(
        "implementation", help="reference, torch_dcp, nemo_automodel, transformers, a mutant's name, or module:Class"
    )
    running.add_argument("--contracts", nargs="+", default=["*"], metavar="GLOB", help="names or globs, such as 'publish.*'")
    running.add_argument("--worlds", type=_worlds, default=(1, 2, 4), metavar="N,N", help="world sizes (default: 1,2,4)")
    running.add_argument(
        "--profile", choices=("smoke", "ci", "nightly"), default="ci", help="how many cases are drawn (default: ci)"
    )
    running.add_argument(
        "--minutes", type=_minutes, metavar="M",
        help="draw fresh cases, round after round, for so long (default: 60 for nightly, else one round)",
    )  # fmt: skip
    running.add_argument("--no-shrink", action="store_true", help="do not look for a smaller case that breaks a contract too")
    running.add_argument("--python", metavar="FILE", help="interpreter of the environment the implementation lives in")
    running.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    _common(running)
    running.set_defaults(command=_run)

    replaying = commands.add_parser("replay", help="run one case again and judge it")
    replaying.add_argument("case", type=Path, metavar="CASE.json")
    replaying.add_argument("implementation", nargs="?", default="reference", help="as for run (default: reference)")
    replaying.add_argument(
        "--contracts", nargs="+", default=["*"], metavar="GLOB", help="names or globs (default: all that apply)"
    )
    replaying.add_argument("--python", metavar="FILE", help="interpreter of the environment the implementation lives in")
    _common(replaying)
    replaying.set_defaults(command=_replay)

    proving = commands.add_parser("prove", help="show that every contract catches its mutants and no good neighbour")
    proving.add_argument("--only", metavar="NAME", help="one mutant or good neighbour")
    proving.add_argument(
        "--contracts", nargs="+", default=["*"], metavar="GLOB", help="mutants of these, and neighbours judged by these"
    )
    proving.add_argument("--list", action="store_true", help="name them all, with what each must be caught by, and run none")
    proving.add_argument("--json", type=Path, metavar="FILE", help="write the matrix as JSON")
    _common(proving)
    proving.set_defaults(command=_prove)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="gloo on cores, or NCCL with a GPU per rank (default: cpu)"
    )
    parser.add_argument(
        "--directory", type=Path, default=Path(".contracts"), metavar="DIR",
        help="where the cases of broken verdicts are kept, and the evidence of the last command (default: .contracts)",
    )  # fmt: skip


def _worlds(text: str) -> tuple[int, ...]:
    try:
        worlds = tuple(int(part) for part in text.split(","))
    except ValueError:
        worlds = ()
    if not worlds or min(worlds) < 1:
        raise argparse.ArgumentTypeError(f"expected world sizes such as 1,2,4, got {text!r}")
    return worlds


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"expected minutes such as 30, got {text!r}")
    return minutes


def _list(options: argparse.Namespace) -> int:
    from contracts.suite import select

    chosen = select()
    if options.json:
        fields = [
            {"name": c.name, "family": c.family, "statement": c.statement, "needs": sorted(c.needs), "seen": list(c.seen)}
            for c in chosen
        ]
        print(json.dumps(fields, indent=1, ensure_ascii=False))
        return 0
    for contract in chosen:
        print(contract.name)
        print(f"    {contract.statement}")
        print(f"    needs: {', '.join(sorted(contract.needs))}")
        if contract.seen:
            print(f"    seen: {', '.join(contract.seen)}")
    return 0


def _run(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from contracts.bindings.known import resolve
    from contracts.report import text
    from contracts.rounds import judge_for
    from contracts.suite import PROFILES, Suite, select

    target, chosen = resolve(options.implementation, options.python), select(options.contracts)
    profile = PROFILES[options.profile]
    if options.no_shrink:
        profile = replace(profile, shrink_seconds=0.0)
    minutes = options.minutes or (60.0 if options.profile == "nightly" else None)
    line, stories = _Progress(), text.Stories()
    seeds: list[int] = []
    verdicts: list[Verdict] = []
    with _lab(target, options, line) as lab:
        line(f"importing {target.implementation}")
        about = _about(lab)
        line.end(f"{target.name}: {about['statement']}")
        line.end(f"torch {about['environment']['torch']}, transformers {about['environment']['transformers']}")

        def write_report() -> None:
            environment = about["environment"] | {"device": options.device, "cores": os.cpu_count(), "seeds": seeds}
            found = [verdict.to_json() for verdict in verdicts]
            if options.json and found:  # an empty one would take the place of an older one
                _write(options.json, {"implementation": target.name, "environment": environment, "contracts": found})

        def make_suite(**settings: Any) -> Suite:
            common = {"worlds": options.worlds, "lab": lab, "directory": options.directory, "progress": line}
            return Suite(target, **common | {"profile": profile} | settings)

        def round_begins(number: int, seed: int) -> None:
            seeds.append(seed)
            line.end(f"round {number}, seed {seed}" if minutes else f"seed {seed}")

        def told(suite: Suite, contract: Contract, verdict: Verdict) -> None:
            line.end(f"{text.mark(verdict.verdict):14}  {verdict.name}")
            if verdict.verdict in ("broken", "unknown"):
                line.end(stories(verdict))
            if verdict.verdict == "broken" and profile.shrink_seconds:
                smaller = suite.smaller(contract, verdict)
                if smaller is not None:
                    line.end("A smaller case of the same:\n" + stories(smaller))

        try:
            if minutes:
                verdicts = judge_for(60 * minutes, chosen, replace(profile, seed=None), make_suite, told, round_begins)
            else:
                suite = make_suite()
                round_begins(1, suite.seed)
                for contract in chosen:
                    verdicts.append(suite.verdict(contract))
                    told(suite, contract, verdicts[-1])
        finally:  # What was judged before an interrupt, or a fault of our own, is worth keeping.
            write_report()
    line.end()
    print(text.table(verdicts, dict(target.known)))
    print(text.censuses(verdicts))
    print(text.summary(verdicts))
    if not any(verdict.verdict in ("kept", "broken") for verdict in verdicts):
        print("nothing was judged")
        return 1
    return 1 if any(verdict.verdict in ("broken", "unknown") for verdict in verdicts) else 0


def _replay(options: argparse.Namespace) -> int:
    from contracts.bindings.known import resolve
    from contracts.case import Case
    from contracts.suite import Suite, select

    case, target, chosen = Case.read(options.case), resolve(options.implementation, options.python), select(options.contracts)
    line = _Progress()
    print(case)
    verdicts = []
    with _lab(target, options, line) as lab:
        line(f"running on {target.name}")
        _about(lab)
        suite = Suite(target, lab=lab, directory=options.directory)
        history = lab.run(case)
        line.end()
        for failure in history.failures:
            print(failure)
        for contract in chosen:
            if not suite.applies(contract):
                continue
            judgement = contract(history)
            # Most contracts say nothing of most cases; only one that was asked for by name owes an answer.
            if judgement.evidence or judgement.verdict == "broken" or options.contracts != ["*"]:
                verdicts.append(judgement.verdict)
                print(f"{judgement.verdict:14}  {contract.name}  ({judgement.evidence} pieces of evidence)")
                for failure in judgement.failures[:5]:
                    print(f"    {failure}")
    print(f"evidence: {history.directory}")
    return 0 if verdicts and not {"broken", "unknown"} & set(verdicts) else 1


def _prove(options: argparse.Namespace) -> int:
    from contracts import proof
    from reference_impl import mutants

    if options.list:
        for name, its in mutants.MUTANTS.items():
            print(f"{name:40} {its.caught_by}")
        for name in mutants.NEIGHBOURS:
            print(f"{name:40} (good neighbour)")
        return 0
    if options.only is not None and options.only not in mutants.names():
        near = difflib.get_close_matches(options.only, mutants.names(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`fsdp-contracts prove --list` names them all"
        raise ValueError(f"no mutant or good neighbour is named {options.only!r}; {hint}")
    line = _Progress()
    found: list[Any] = []
    asked = {"only": options.only, "globs": options.contracts}
    for item in proof.prove(device=options.device, directory=_evidence(options.directory), progress=line, **asked):
        found.append(item)
        if isinstance(item, proof.Mutant):
            verb = "caught by" if item.ok else "NOT CAUGHT by"
            also = [name for name in item.killed_by if name != item.caught_by]
            line.end(f"{item.name:36} {verb} {item.caught_by}" + (f"  (also {', '.join(also)})" if also else ""))
            if item.message:
                line.end(f"    {item.message.splitlines()[0]}")
        else:
            line.end(f"{item.name:36} {'left alone' if item.ok else 'NOT LEFT ALONE: ' + item.message}")
    if options.json:
        _write(options.json, proof.to_json(found))
    mutants = [item for item in found if isinstance(item, proof.Mutant)]
    caught, well = sum(item.ok for item in mutants), sum(item.ok for item in found) - sum(item.ok for item in mutants)
    print(f"{caught} of {len(mutants)} mutants caught, {well} of {len(found) - len(mutants)} good neighbours left alone")
    return 0 if found and all(item.ok for item in found) else 1


def _lab(target: Target, options: argparse.Namespace, progress: _Progress) -> Lab:
    from contracts.lab.lab import Lab

    directory = _evidence(options.directory)
    return Lab(target.implementation, python=target.python, device=options.device, directory=directory, progress=progress)


def _about(lab: Lab) -> dict[str, Any]:
    """What the stack says of itself; a stack that cannot be imported is bad usage, and the last lines say why."""
    from contracts.lab.lab import LabError

    try:
        return lab.about()
    except LabError as error:
        first, _, rest = str(error).partition("\n")
        files = [
            line
            for line in rest.splitlines()
            if line.lstrip().startswith("File ") and not re.search("contracts/lab|importlib", line)
        ]
        raise ValueError("\n".join([f"{lab.implementation} cannot be imported: {first}", *files[-4:]])) from error


def _evidence(directory: Path) -> Path:
    """A folder of this command's own under `directory`; those of commands that have ended are removed.

    Histories are not kept between commands, for an implementation may have changed since they were made.
    """
    for old in directory.glob("evidence-*"):
        if not Path(f"/proc/{old.name.removeprefix('evidence-')}").exists():
            shutil.rmtree(old, ignore_errors=True)
    own = directory / f"evidence-{os.getpid()}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    return own


class _Progress:
    """One line on standard error that is written over; where that is no terminal, a line of its own every quarter minute."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.started = time.monotonic()
        self.said = self.started

    def __call__(self, text: str) -> None:
        if self.live:
            sys.stderr.write(f"\r\033[K{time.monotonic() - self.started:6.0f} s  {text}"[:118])
            sys.stderr.flush()
        elif time.monotonic() - self.said > 15:
            self.said = time.monotonic()
            print(f"{self.said - self.started:6.0f} s  {text}", file=sys.stderr, flush=True)

    def end(self, text: str = "") -> None:
        if self.live:
            sys.stderr.write("\r\033[K")
        if text:
            print(text, file=sys.stderr, flush=True)


def _write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def _usage(message: str) -> int:
    print(f"fsdp-contracts: {message}", file=sys.stderr)
    return BAD_USAGE


if __name__ == "__main__":
    sys.exit(main())
