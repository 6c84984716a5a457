"""What one training example is, and reading examples from retrieval files.

A file is JSON Lines, or JSON with a top-level ``data`` list, of records

    {"query" | "question": str, "pos_doc": str | [str, …], "neg_doc": [str, …]}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_impl.errors import UsageError


class RecordError(UsageError):
    """A data file is missing or holds a malformed record. The message names the file and the line or index."""


@dataclass(frozen=True)
class Example:
    """A query, a passage that answers it, and passages that nearly do. ``source`` says where it came from."""

    query: str
    positive: str
    negatives: tuple[str, ...]
    source: str


def read_records(path: str | Path) -> list[Example]:
    """All examples of a ``.jsonl`` or ``.json`` file, in file order; several positives make several examples.

    Raises :class:`RecordError` naming file and line (JSON Lines) or index (JSON).
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(
            f"cannot read the data file {path}: {error.strerror or error}; check the options data, eval_data"
        ) from error
    except UnicodeDecodeError as error:
        raise RecordError(f"{path} is not UTF-8 text: {error}") from error
    records = _json_list(path, text) if path.suffix == ".json" else _json_lines(path, text)
    examples = [example for where, record in records for example in _examples(where, record)]
    if not examples:
        raise RecordError(f"{path} holds no records")
    return examples


def fingerprint(examples: Iterable[Example]) -> str:
    """The identity of a data set: a sha256 over every example in order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.query, example.positive, example.negatives]).encode())
    return digest.hexdigest()


def _json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise RecordError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from error


def _json_list(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        loaded = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(
            f"{path}:{error.lineno}: not JSON: {error.msg}; one record per line belongs in a .jsonl file"
        ) from error
    if not isinstance(loaded, dict) or not isinstance(loaded.get("data"), list):
        raise RecordError(f"{path} must be an object with a top-level 'data' list")
    for index, record in enumerate(loaded["data"]):
        yield f"{path}: data[{index}]", record


def _examples(where: str, record: Any) -> Iterator[Example]:
    if not isinstance(record, dict):
        raise RecordError(f"{where}: a record must be an object, not {_short(record)}")
    query = record.get("query", record.get("question"))
    if not isinstance(query, str) or not query.strip():
        raise RecordError(f"{where}: 'query' (or 'question') must be non-empty text, not {_short(query)}")
    positives = record.get("pos_doc")
    positives = [positives] if isinstance(positives, str) else positives
    negatives = record.get("neg_doc", [])
    for key, passages in (("pos_doc", positives), ("neg_doc", negatives)):
        if not isinstance(passages, list) or not all(isinstance(passage, str) and passage.strip() for passage in passages):
            wanted = "non-empty text or a list of it" if key == "pos_doc" else "a list of non-empty texts"
            raise RecordError(f"{where}: {key!r} must be {wanted}, not {_short(passages)}")
    if not positives:
        raise RecordError(f"{where}: 'pos_doc' is empty; a record needs at least one positive passage")
    for positive in positives:
        yield Example(query.strip(), positive, tuple(negatives), where)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
