"""The warm parent: one single-threaded process per stack, which has imported everything and forks an agent per generation.

It reads one JSON object a line from standard input and answers with one a line on descriptor 3. It stays clean: it runs
no backward pass, opens no process group and saves nothing, for autograd's threads do not survive a fork and DCP's planner
and async executor keep caches that would leak into ranks. Model directories are therefore written in a forked child.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def main() -> None:
    from contracts.processes import become_subreaper

    become_subreaper()
    replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    for line in sys.stdin:
        job = json.loads(line)
        # What is here now stays: the collector of whatever is forked need not walk all that was imported.
        gc.freeze()
        try:
            reply = {"ok": True, **_ANSWERS[job["do"]](job)}
        except Exception as error:
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")


def _import_stack(job: dict[str, Any]) -> dict[str, Any]:
    # Imported by torch on a rank's first failure and in AdamW's first step; here it costs each rank nothing.
    import platform

    import torch
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import transformers

    from contracts.lab import rank

    # What agents, ranks and writers of model directories need before they can say what else they import.
    for name in (
        "contracts.fixtures",
        "contracts.models",
        "contracts.rendezvous",
        "encodings.idna",
        "multiprocessing.popen_fork",
        "safetensors.torch",
        "tokenizers",
        "torch.distributed.launcher.api",
    ):
        importlib.import_module(name)

    _compute_what_ranks_would()
    _gather_memory()
    implementation = rank.load(job["implementation"])
    if implementation.start_method == "fork" and (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(
            f"importing {job['implementation']} started {threads - 1} threads, which forking loses; set start_method = 'spawn'"
        )
    return {
        "name": implementation.__name__,
        "statement": (implementation.__doc__ or "").strip().split("\n")[0],
        "capabilities": sorted(implementation.capabilities),
        "layout": vars(implementation.layout) | {"companions": list(implementation.layout.companions)},
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": torch.version.cuda,
        },
    }


@functools.cache
def _gather_memory() -> None:
    """Once, have the kernel put what was imported into large pages, if it can: a fork copies an entry for each page.

    See madvise(2), MADV_COLLAPSE, since Linux 6.1; an older kernel refuses, and nothing changes.
    """
    large, collapse = 2 << 20, 25
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_, name = f"{line} [anonymous]".split()[:6]
        start, end = (int(address, 16) for address in span.split("-"))
        if mode == "rw-p" and name in ("[anonymous]", "[heap]") and end - start >= large:
            madvise(start, end - start, collapse)


def _compute_what_ranks_would() -> None:
    """Have transformers compile its rename patterns, which it keeps: each rank's first `from_pretrained` would, for 0.1 s."""
    with contextlib.suppress(ImportError, AttributeError):  # where this version has none
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")


def _prepare(job: dict[str, Any]) -> dict[str, Any]:
    from contracts import fixtures
    from contracts.case import Case

    case = Case.read(Path(job["case"]))
    models, records = [Path(path) for path in job["models"]], Path(job["records"])

    def write() -> None:
        for path, generation in zip(models, case.generations, strict=True):
            fixtures.write_model(case.model, path, seed=case.seed * 100 + generation.seed)
        fixtures.write_records(case.data, records, seed=case.seed)

    _in_child(write)
    return {}


def _run(job: dict[str, Any]) -> dict[str, Any]:
    from contracts.lab import rank
    from contracts.torchrun import launch

    implementation = rank.load(job["implementation"])
    result = launch(
        rank.main,
        job["ranks"],
        args=(job["job_file"],),
        timeout=job["deadline"],
        start_method=implementation.start_method,
        directory=Path(job["directory"]),
        env=job["env"],
    )
    if implementation.start_method == "fork":
        _import_what_ranks_imported(Path(job["job_file"]).parent)
    return {"launch": result.to_json()}


def _import_what_ranks_imported(evidence: Path) -> None:
    """Import here what rank 0 had to import by itself, so that the next generation's ranks find it done."""
    try:
        last = json.loads((evidence / "events-0.jsonl").read_text().splitlines()[-1])
    except (FileNotFoundError, IndexError, ValueError):
        return  # The rank ended before it had anything to say, or in the middle of a line.
    for name in last["data"]["imported"] if last["kind"] == "ends" else []:
        if name not in sys.modules and not name.startswith("__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _in_child(work: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError("a child of the warm parent failed; its traceback is in the parent's log")


_ANSWERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"import": _import_stack, "prepare": _prepare, "run": _run}

if __name__ == "__main__":
    main()
