"""Implementations known by name, and how to resolve what a user names."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class UnknownImplementation(ValueError):
    """The name is no known implementation and no `module:Class`."""


@dataclass(frozen=True)
class Target:
    """An implementation and the interpreter of the environment it lives in.

    Attributes:
        known: contracts it is known to break, each with the reason.
    """

    name: str
    implementation: str
    python: str = sys.executable
    known: Mapping[str, str] = field(default_factory=dict)


KNOWN = {
    "reference": "reference_impl.under_contract:Reference",
    "torch_dcp": "contracts.bindings.torch_dcp:TorchDCP",
    "nemo_automodel": "contracts.bindings.nemo_automodel:NemoAutomodel",
    "transformers": "contracts.bindings.transformers_keys:TransformersKeys",
}

KNOWN_FAILURES: dict[str, dict[str, str]] = {}
"""What each known stack was seen to break, with the reason; confirmed by hand where a reason says so."""

ENVIRONMENTS = {"nemo_automodel"}
"""Stacks that live in an environment of their own, made by `make env-NAME` under `.venvs/`."""


def resolve(name: str) -> Target:
    """Return the target for a known name, the name of a mutant or good neighbour, or `module:Class`.

    `FSDP_CONTRACTS_PYTHON_<NAME>` names the interpreter of a stack's environment where it is not `.venvs/<name>`.

    Raises:
        UnknownImplementation: nothing has that name.
    """
    if name in KNOWN:
        return Target(name, KNOWN[name], _python(name), KNOWN_FAILURES.get(name, {}))
    if ":" in name:
        return Target(name, name)
    from reference_impl import mutants

    if name in mutants.names():
        return Target(name, mutants.names()[name])
    raise UnknownImplementation(
        f"{name!r} is no implementation: name one of {', '.join(KNOWN)}, a mutant (see `fsdp-contracts prove`), or module:Class"
    )


def _python(name: str) -> str:
    if name not in ENVIRONMENTS:
        return sys.executable
    given = os.environ.get(f"FSDP_CONTRACTS_PYTHON_{name.upper()}")
    own = Path(".venvs") / name / "bin" / "python"
    return given or (str(own.absolute()) if own.exists() else sys.executable)
