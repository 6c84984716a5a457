"""Verdicts as text that can be read without knowing how a contract works."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from contracts.case import Case
from contracts.census import Census
from contracts.judging import REGISTRY
from contracts.suite import Verdict

WIDTH = 112
LEGEND = """\
Contracts of one kind share its runs, and the first of them takes the seconds. Shards are uneven where ranks hold parts of
different size, empty where one holds nothing; 2x1 is a mesh of two replicas of one shard."""
WRAPPING: dict[str, Any] = {"replace_whitespace": False, "break_long_words": False, "break_on_hyphens": False}
"""A path stays in one piece, to be copied."""


def table(verdicts: Sequence[Verdict], known: dict[str, str] | None = None) -> str:
    """One line per contract: verdict, name, cases, pieces of evidence, worlds, seconds."""
    width = max([len(verdict.name) for verdict in verdicts], default=8)
    lines = [f"{'':14}  {'contract':{width}}  {'cases':>5}  {'evidence':>8}  {'worlds':<9}  seconds"]
    for verdict in verdicts:
        worlds = ",".join(map(str, verdict.worlds)) or "-"
        note = f"  known: {known[verdict.name]}" if known and verdict.name in known and verdict.verdict == "broken" else ""
        if verdict.verdict in ("not-applicable", "not-run"):
            note = "  " + verdict.message.partition("\n")[0]
        lines.append(
            f"{mark(verdict.verdict):14}  {verdict.name:{width}}  {verdict.cases:>5}  {verdict.evidence:>8}  {worlds:<9}  "
            f"{verdict.seconds:7.1f}{note}"
        )
    return "\n".join(lines)


def censuses(verdicts: Sequence[Verdict]) -> str:
    """One line per kind of case: what there was to judge in the histories that held evidence."""
    by_kind: dict[str, Verdict] = {}
    for verdict in verdicts:
        known = by_kind.setdefault(verdict.kind, verdict)
        if verdict.census.generations > known.census.generations:  # contracts that found evidence in more of them
            by_kind[verdict.kind] = verdict
    seen = {kind: verdict for kind, verdict in by_kind.items() if verdict.census.generations}
    if not seen:
        return ""
    names = [item.name for item in fields(Census)]
    width = max(len("kind of case"), *map(len, seen))
    lines = ["", f"{'kind of case':{width}}  " + "  ".join(f"{name:>11}" for name in names) + f"  {'worlds':14}  modes"]
    for kind, verdict in sorted(seen.items()):
        counts = "  ".join(f"{getattr(verdict.census, name):>11}" for name in names)
        worlds = ",".join([*map(str, verdict.worlds), *verdict.meshes])
        lines.append(f"{kind:{width}}  {counts}  {worlds:14}  {','.join(verdict.modes)}")
    whole = sum((verdict.census for verdict in seen.values()), Census())
    lines.append(f"{'all':{width}}  " + "  ".join(f"{getattr(whole, name):>11}" for name in names))
    return "\n".join([*lines, LEGEND, ""])


def mark(verdict: str) -> str:
    return verdict if verdict in ("kept", "not-applicable", "not-run") else verdict.upper()


class Stories:
    """Tells verdicts that are broken or unknown in full, and of one cause the details once."""

    def __init__(self) -> None:
        self.told: dict[str, str] = {}

    def __call__(self, verdict: Verdict) -> str:
        """Statement, what was seen, the case, how to replay it, and who saw it before."""
        contract = REGISTRY[verdict.name]
        said, details = _parts(verdict.message)
        first = self.told.setdefault("\n".join(details), verdict.name)
        lines = [f"{verdict.verdict.upper()}  {verdict.name}"]
        lines += _wrapped(contract.statement)
        lines += _wrapped(said)
        if first == verdict.name:
            lines += [f"    {line}" for line in details]
        elif details:
            lines.append(f"    the traceback stands under {first}, above")
        if verdict.case_file:
            script = str(Case.read(Path(verdict.case_file))).splitlines()
            lines += [f"  {'case' if number == 0 else '':7} {line}" for number, line in enumerate(script)]
            lines.append(f"  replay  {verdict.replay}")
        if contract.seen:
            lines.append(f"  seen    {', '.join(contract.seen)}")
        return "\n".join(lines)


def _parts(message: str) -> tuple[str, list[str]]:
    """A message's sentences, and the lines of the tracebacks or logs in it, without what a reader skips."""
    said, details, ours = [], [], False
    for line in message.splitlines():
        if not line.startswith("  "):
            said.append(textwrap.shorten(line, 300, placeholder=" …") if line.startswith(("then:", "also:")) else line)
            continue
        line = line[2:]
        if line.startswith('  File "'):
            line = re.sub(r'File ".*/site-packages/', 'File "', line)
            ours = re.search(r"/contracts/(torchrun|lab/rank)\.py", line) is not None
        elif not line.startswith("    "):
            ours = False
        if not ours and line.strip(" ^~"):
            details.append(line)
    return "\n".join(said), details


def summary(verdicts: Sequence[Verdict]) -> str:
    counts: dict[str, int] = {}
    for verdict in verdicts:
        counts[verdict.verdict] = counts.get(verdict.verdict, 0) + 1
    order = ("broken", "unknown", "kept", "not-applicable", "not-run")
    return ", ".join(f"{counts[name]} {name}" for name in order if name in counts)


def _wrapped(text: str) -> list[str]:
    return [
        line
        for paragraph in text.splitlines()
        for line in textwrap.wrap(paragraph, WIDTH, initial_indent="  ", subsequent_indent="  ", **WRAPPING) or [""]
    ]
