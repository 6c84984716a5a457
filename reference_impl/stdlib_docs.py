"""Training pairs that every Python installation carries: docstrings of the standard library.

The summary line is the query, the rest of the text its passage, other passages of the same module the hard negatives.
Modules are parsed, never imported, so reading them has no side effects.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from functools import cache
from pathlib import Path

from reference_impl.records import Example

LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "turtledemo",
    "ensurepip",
    "__pycache__",
}
"""Folders that hold tests, vendored code or an installation's own packages rather than the standard library's prose."""

SHORTEST_PASSAGE = 40
"""Characters. Shorter rests of a docstring ('See above.') answer no query."""


@cache
def stdlib_examples(root: str | Path | None = None) -> tuple[Example, ...]:
    """One example per documented object whose docstring has a summary and more; ``source`` is the dotted module name.

    Sorted by module, then by place in the file: the same list on every rank of the same Python. Reads about 600 files in
    a few seconds, once per process. ``root`` is the folder to read, the running Python's ``stdlib`` by default.
    """
    root = Path(root or sysconfig.get_paths()["stdlib"])
    examples, seen = [], set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT & set(relative.parts):
            continue
        pairs = [pair for pair in _pairs(path) if not (pair[1] in seen or seen.add(pair[1]))]
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        for index, (query, passage) in enumerate(pairs):
            others = tuple(other for _, other in pairs[:index] + pairs[index + 1 :])
            examples.append(Example(query, passage, others, module))
    return tuple(examples)


def package_of(example: Example) -> str:
    """The top-level package of a stdlib example. Splitting by it keeps near-copies, such as xml.dom.*, on one side."""
    return example.source.partition(".")[0]


def _pairs(path: Path) -> list[tuple[str, str]]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # Some installations carry templates and Python 2 remnants.
        return []
    pairs = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            summary, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
            summary, rest = _one_line(summary), _one_line(rest)
            if 12 <= len(summary) <= 200 and len(rest) >= SHORTEST_PASSAGE:
                pairs.append((summary, rest))
    return pairs


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
