"""Published checkpoint names to parameter names and back, with nothing falling through.

    mapping = KeyMapping()
    mapping.install(Rule(r"^encoder\\.", "model.encoder.", undo=r"^model\\.encoder\\.", redo="encoder."))
    report = mapping.plan(published, parameters)
    report.refuse_losses("my/checkpoint")

Rules apply in order. A sound rule leaves its own results alone, so ``map(map(name)) == map(name)``; so does its inverse.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from reference_impl.errors import UsageError


class KeyMappingError(UsageError):
    """A checkpoint's names and a model's do not match up. The message lists examples."""


@dataclass(frozen=True)
class Rule:
    """Rename ``pattern`` to ``replacement`` (as :func:`re.sub`, once); ``undo`` to ``redo`` goes back."""

    pattern: str
    replacement: str
    undo: str
    redo: str


@dataclass
class LoadReport:
    """What a load would do with each name; published names on the left, parameter names on the right."""

    renamed: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    initialised: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def refuse_losses(self, source: str) -> None:
        """Raise :class:`KeyMappingError` if a tensor would be dropped or a parameter left unfilled, undeclared."""
        faults = []
        if self.unexpected:
            faults.append(f"{len(self.unexpected)} tensors of the checkpoint fit no parameter: {_some(self.unexpected)}")
        if self.missing:
            faults.append(f"{len(self.missing)} parameters are in no tensor of the checkpoint: {_some(self.missing)}")
        if faults:
            raise KeyMappingError(
                f"{source}: " + "; ".join(faults) + "; install a rename Rule, or declare the names as ignored or fresh"
            )


class KeyMapping:
    """An ordered list of rename rules and its inverse."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules: list[Rule] = []
        for rule in rules:
            self.install(rule)

    def install(self, rule: Rule) -> bool:
        """Append a rule, once: False if it is already there. Two rules with one pattern and different results are refused."""
        for known in self.rules:
            if known == rule:
                return False
            if known.pattern == rule.pattern:
                raise KeyMappingError(
                    f"pattern {rule.pattern!r} is already renamed to {known.replacement!r}, not {rule.replacement!r}"
                )
        self.rules.append(rule)
        return True

    def map(self, name: str) -> str:
        """The parameter name of a published name; a parameter name stays itself."""
        for rule in self.rules:
            name = re.sub(rule.pattern, rule.replacement, name, count=1)
        return name

    def inverse(self, name: str) -> str:
        """The published name of a parameter name: undoes the rules, last first."""
        for rule in reversed(self.rules):
            name = re.sub(rule.undo, rule.redo, name, count=1)
        return name

    def plan(
        self,
        published: Collection[str],
        parameters: Collection[str],
        *,
        ignored: Sequence[str] = (),
        fresh: Sequence[str] = (),
    ) -> LoadReport:
        """Match every published name with a parameter. Reads only; loads nothing.

        ``ignored`` are patterns of published names that may be dropped, ``fresh`` of parameters that may stay as
        initialised; both are honoured only for names that do not match. Raises :class:`KeyMappingError` when two
        published names claim one parameter.
        """
        report, wanted = LoadReport(), set(parameters)
        for name in published:
            target = self.map(name)
            if target not in wanted:
                (report.ignored if _matches(name, ignored) else report.unexpected).append(name)
            elif target in report.renamed.values():
                rival = next(other for other, taken in report.renamed.items() if taken == target)
                raise KeyMappingError(f"{rival} and {name} both map to {target}; one of them would be lost")
            else:
                report.renamed[name] = target
        filled = set(report.renamed.values())
        for name in parameters:
            if name not in filled:
                (report.initialised if _matches(name, fresh) else report.missing).append(name)
        return report


def base_model_rule(prefix: str, heads: Sequence[str]) -> Rule:
    """Put a base model's names (``embeddings.…``) under ``prefix`` of a model that has a task head beside it."""
    others = "|".join(re.escape(name) + r"\." for name in (prefix, *heads))
    return Rule(rf"^(?!{others})", f"{prefix}.", undo=rf"^{re.escape(prefix)}\.", redo="")


LEGACY_NORM_RULES = (
    Rule(r"LayerNorm\.gamma$", "LayerNorm.weight", undo=r"LayerNorm\.weight$", redo="LayerNorm.gamma"),
    Rule(r"LayerNorm\.beta$", "LayerNorm.bias", undo=r"LayerNorm\.bias$", redo="LayerNorm.beta"),
)
"""BERT's first published checkpoints named a norm's weight and bias after the paper."""


def rules_for(published: Collection[str], *, base_prefix: str, heads: Sequence[str]) -> KeyMapping:
    """The mapping that a published checkpoint needs, judged by its own names, so that its inverse gives them back."""
    mapping = KeyMapping()
    if base_prefix and not any(name.startswith(f"{base_prefix}.") for name in published):
        mapping.install(base_model_rule(base_prefix, heads))
    for rule in LEGACY_NORM_RULES:
        if any(re.search(rule.pattern, name) for name in published):
            mapping.install(rule)
    return mapping


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _some(names: Sequence[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (f", … {len(names) - count} more" if len(names) > count else "")
