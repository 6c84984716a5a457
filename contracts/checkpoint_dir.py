"""Reading any checkpoint directory on disk, without the code that wrote it.

Knows DCP (`.metadata` beside `.distcp` files) and safetensors. Nothing is executed: `.metadata` is a pickle, so it is
read by an unpickler which admits DCP's own record classes and torch's dtypes, and refuses the rest by name.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

_SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a checkpoint's metadata describes it.

    Attributes:
        dtype: torch's name for it, "float32".
        chunks: `(offsets, sizes, file)` of every stored piece; `file` is relative to the checkpoint directory.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]

    def joined(self, other: StoredTensor) -> StoredTensor:
        """The same tensor with the pieces of another file; the whole is as large as the furthest piece."""
        shape = tuple(map(max, self.shape, other.shape)) if len(self.shape) == len(other.shape) else self.shape
        return StoredTensor(self.dtype, shape, (*self.chunks, *other.chunks))


@dataclass(frozen=True)
class CheckpointDirectory:
    """What a directory holds: files with their sizes in bytes, tensors by key, and what is wrong with it.

    Keys are those of the writer; where several stores lie in one checkpoint, the store's sub-directory comes first:
    `optim:state.layers.0.weight.exp_avg`.
    """

    files: dict[str, int]
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def is_readable(self) -> bool:
        """Whether there is anything in a format that this module knows."""
        return any(name.endswith((".metadata", ".distcp", ".safetensors")) for name in self.files)

    def to_json(self) -> dict[str, Any]:
        tensors = {key: [t.dtype, t.shape, t.chunks] for key, t in self.tensors.items()}
        return {"files": self.files, "tensors": tensors, "problems": self.problems}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CheckpointDirectory:
        tensors = {
            key: StoredTensor(dtype, tuple(shape), tuple((tuple(o), tuple(s), file) for o, s, file in chunks))
            for key, (dtype, shape, chunks) in data["tensors"].items()
        }
        return cls(dict(data["files"]), tensors, tuple(data["problems"]))


def read(directory: Path) -> CheckpointDirectory:
    """Read a checkpoint directory; damage becomes `problems` that name the file, never an exception."""
    files: dict[str, int] = {}
    for parent, _, names in os.walk(directory):
        for name in names:
            path = Path(parent) / name
            try:
                files[str(path.relative_to(directory))] = path.stat().st_size
            except FileNotFoundError:
                continue
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for file in sorted(files):
        store = os.path.dirname(file)
        try:
            if os.path.basename(file) == ".metadata":
                found, wrong = _read_dcp(directory / file, store, files)
            elif file.endswith(".safetensors"):
                found, wrong = _read_safetensors(directory / file, file)
            else:
                continue
        except Exception as error:
            problems.append(f"{file} cannot be read: {type(error).__name__}: {error}")
            continue
        for key, tensor in found.items():
            name = f"{store}:{key}" if store else key
            tensors[name] = tensors[name].joined(tensor) if name in tensors else tensor
        problems += wrong
    written = {os.path.dirname(file) for file in files if file.endswith(".distcp")}
    problems += [
        f"{store or '.'} has shards and no .metadata"
        for store in sorted(written)
        if os.path.join(store, ".metadata") not in files
    ]
    return CheckpointDirectory(files, tensors, tuple(problems))


def _read_dcp(path: Path, store: str, files: dict[str, int]) -> tuple[dict[str, StoredTensor], list[str]]:
    with open(path, "rb") as file:
        metadata = _MetadataUnpickler(file).load()
    where = {}
    problems = []
    for index, info in metadata.storage_data.items():
        name = os.path.join(store, info.relative_path)
        where[index.fqn, tuple(index.offset) if index.offset is not None else ()] = name
        if name not in files:
            problems.append(f"{name} is named by {path.name} and missing")
        elif files[name] < info.offset + info.length:
            problems.append(f"{name} has {files[name]} bytes; {index.fqn} ends at byte {info.offset + info.length}")
    tensors = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            if (key, ()) not in where:
                problems.append(f"{key} is listed and stored nowhere")
            continue
        chunks = []
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if (key, offsets) not in where:
                problems.append(f"{key} at {list(offsets)} is listed and stored nowhere")
            chunks.append((offsets, sizes, where.get((key, offsets), "")))
        if (stored := sum(math.prod(sizes) for _, sizes, _ in chunks)) != math.prod(entry.size):
            problems.append(f"{key} has {math.prod(entry.size)} elements; its chunks hold {stored}")
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[key] = StoredTensor(dtype, tuple(entry.size), tuple(chunks))
    return tensors, problems


def _read_safetensors(path: Path, file: str) -> tuple[dict[str, StoredTensor], list[str]]:
    """The format: an unsigned 64-bit little-endian length, a JSON header of that length, then the data.

    DCP's HuggingFace writer stores a rank's shards under the whole tensor's name, and their offsets in the header.
    """
    size = path.stat().st_size
    with open(path, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > size - 8:
            raise ValueError(f"its header should have {length} bytes and the file has {size}")
        header = json.loads(stream.read(length))
    sharding = json.loads((header.pop("__metadata__", None) or {}).get("DCP_SHARDING_INFO", "{}"))
    tensors = {}
    for key, entry in header.items():
        sizes = tuple(entry["shape"])
        offsets = tuple(sharding.get(key, {}).get("saved_offsets", (0,) * len(sizes)))
        shape = tuple(offset + size for offset, size in zip(offsets, sizes, strict=True))
        tensors[key] = StoredTensor(_SAFETENSORS_DTYPES.get(entry["dtype"], entry["dtype"]), shape, ((offsets, sizes, file),))
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    return tensors, [] if end == size else [f"{file} has {size} bytes; its header describes {end}"]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        if module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem") and "." not in name:
            found = super().find_class(module, name)
            # Records only, and the module's own: what it imported is in its namespace too, and `io.FileIO` is a class.
            if isinstance(found, type) and found.__module__ == module and (is_dataclass(found) or issubclass(found, Enum)):
                return found
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no DCP metadata needs")


_PLAIN = {
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch.serialization", "_get_layout"),
}
