"""Broken twins of the reference, one mistake each, and good neighbours: correct but unusual variants.

A mutant overrides one method, says its mistake in one sentence, and names the contract that must catch it.
"""

from reference_impl.mutants import (
    crash,
    keys,
    neighbours,
    neighbours_saves,
    neighbours_state,
    order,
    precision,
    publish,
    reshard,
    resume,
    retention,
    writers,
)
from reference_impl.mutants.registry import MUTANTS, NEIGHBOURS, names

__all__ = [
    "MUTANTS",
    "NEIGHBOURS",
    "crash",
    "keys",
    "names",
    "neighbours",
    "neighbours_saves",
    "neighbours_state",
    "order",
    "precision",
    "publish",
    "reshard",
    "resume",
    "retention",
    "writers",
]
