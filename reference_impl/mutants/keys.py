"""Mutants of the family keys."""

from __future__ import annotations

from contracts.published_names import PublishedNames
from reference_impl.keys import KeyMapping, Rule
from reference_impl.mutants.registry import mutant
from reference_impl.under_contract import Mapping, Reference


@mutant(caught_by="keys.mapping-is-idempotent")
class PrefixesWhatIsPrefixed(Reference):
    """Adds the base model's prefix to every name, one that has it already included."""

    def key_mapping(self, published: PublishedNames) -> Mapping | None:
        mapping = super().key_mapping(published)
        if mapping is not None:
            mapping.rules = KeyMapping([Rule(r"^", "bert.", undo=r"^bert\.", redo="")])
        return mapping


@mutant(caught_by="keys.nothing-falls-through")
class ForgetsTheBasePrefix(Reference):
    """Maps no name, so that every tensor of a base model falls through."""

    def key_mapping(self, published: PublishedNames) -> Mapping | None:
        mapping = super().key_mapping(published)
        if mapping is not None:
            mapping.rules = KeyMapping()
        return mapping


@mutant(caught_by="keys.nothing-falls-through")
class DropsATower(Reference):
    """Declares the names of one sub-module ignored, and leaves its parameters random."""

    def key_mapping(self, published: PublishedNames) -> Mapping | None:
        mapping = super().key_mapping(published)
        if mapping is not None:
            keep = mapping.map
            mapping.map = lambda name: None if "embed" in name else keep(name)
        return mapping
