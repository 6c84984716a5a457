"""The registry of broken twins and good neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T", bound=type)


@dataclass(frozen=True)
class Mutant:
    """A broken twin: where it is, and the contract that must catch it."""

    implementation: str
    caught_by: str


MUTANTS: dict[str, Mutant] = {}
NEIGHBOURS: dict[str, str] = {}


def mutant(*, caught_by: str) -> Callable[[T], T]:
    """Register a twin of the reference with one mistake, which the contract `caught_by` must catch."""

    def register(cls: T) -> T:
        MUTANTS[cls.__name__] = Mutant(f"{cls.__module__}:{cls.__qualname__}", caught_by)
        return cls

    return register


def neighbour(cls: T) -> T:
    """Register a correct but unusual twin, which no contract may call broken."""
    NEIGHBOURS[cls.__name__] = f"{cls.__module__}:{cls.__qualname__}"
    return cls


def names() -> dict[str, str]:
    """Every mutant and good neighbour by name, as `module:Class`."""
    return {name: its.implementation for name, its in MUTANTS.items()} | NEIGHBOURS
