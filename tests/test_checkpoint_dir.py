"""Our own reader of checkpoint directories: what is there, what is damaged, and nothing is executed."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from contracts.checkpoint_dir import CheckpointDirectory, StoredTensor, read

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def saved(tmp_path) -> Path:
    """A checkpoint that torch.distributed.checkpoint wrote: a float32 weight, a bfloat16 moment, a step and a name."""
    state = {
        "model": {"weight": torch.arange(12.0).view(3, 4)},
        "optimizer": {"state": {"weight": {"exp_avg": torch.zeros(3, 4, dtype=torch.bfloat16), "step": torch.tensor(2.0)}}},
        "run": {"name": "a run", "step": 2},
    }
    dcp.save(state, checkpoint_id=tmp_path / "step_2", no_dist=True)
    return tmp_path / "step_2"


def shard(directory: Path) -> Path:
    (found,) = directory.glob("*.distcp")
    return found


# --- what is there ---------------------------------------------------------------------------------------------------


def test_tensors_of_a_dcp_checkpoint_are_listed_with_dtype_shape_and_file(saved):
    found = read(saved)
    name = shard(saved).name
    assert found.problems == ()
    assert found.tensors == {
        "model.weight": StoredTensor("float32", (3, 4), (((0, 0), (3, 4), name),)),
        "optimizer.state.weight.exp_avg": StoredTensor("bfloat16", (3, 4), (((0, 0), (3, 4), name),)),
        "optimizer.state.weight.step": StoredTensor("float32", (), (((), (), name),)),
    }
    assert found.files == {path.name: path.stat().st_size for path in saved.iterdir()}


def test_tensors_of_a_safetensors_file_are_listed_with_dtype_shape_and_file(tmp_path):
    save_file({"weight": torch.zeros(2, 3, dtype=torch.float16), "count": torch.tensor(5)}, tmp_path / "model.safetensors")
    found = read(tmp_path)
    assert found.problems == ()
    assert found.tensors == {
        "weight": StoredTensor("float16", (2, 3), (((0, 0), (2, 3), "model.safetensors"),)),
        "count": StoredTensor("int64", (), (((), (), "model.safetensors"),)),
    }


def test_stores_in_one_checkpoint_are_told_apart_by_their_folder(tmp_path):
    dcp.save({"weight": torch.zeros(2)}, checkpoint_id=tmp_path / "optim", no_dist=True)
    (tmp_path / "model").mkdir()
    save_file({"weight": torch.zeros(2)}, tmp_path / "model" / "model.safetensors")
    found = read(tmp_path)
    assert found.problems == ()
    assert set(found.tensors) == {"optim:weight", "model:weight"}
    assert found.tensors["optim:weight"].chunks[0][2].startswith("optim/")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_dtypes_have_torchs_names_in_both_formats(tmp_path, dtype):
    tensors = {"weight": torch.zeros(2, dtype=dtype)}
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)
    save_file(tensors, tmp_path / "model.safetensors")
    name = str(dtype).removeprefix("torch.")
    assert {key: tensor.dtype for key, tensor in read(tmp_path).tensors.items()} == {"dcp:weight": name, "weight": name}


def test_a_directory_goes_to_json_and_back(saved):
    found = read(saved)
    assert CheckpointDirectory.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_an_empty_or_missing_directory_holds_nothing(tmp_path):
    assert read(tmp_path) == read(tmp_path / "nowhere") == CheckpointDirectory({})


# --- what is damaged -------------------------------------------------------------------------------------------------


def test_a_shard_that_is_missing_is_named(saved):
    name = shard(saved).name
    shard(saved).unlink()
    assert read(saved).problems[0] == f"{name} is named by .metadata and missing"


def test_a_shard_that_is_cut_short_is_named_with_what_it_lacks(saved):
    path, size = shard(saved), shard(saved).stat().st_size
    path.write_bytes(path.read_bytes()[: size - 100])
    problems = read(saved).problems
    assert problems
    assert all(problem.startswith(f"{path.name} has {size - 100} bytes; ") for problem in problems)


def test_shards_without_metadata_are_named(saved):
    (saved / ".metadata").unlink()
    found = read(saved)
    assert found.problems == (". has shards and no .metadata",)
    assert found.tensors == {}


def test_shards_without_metadata_in_one_of_two_stores_are_named(tmp_path):
    for store in ("model", "optim"):
        dcp.save({"weight": torch.zeros(2)}, checkpoint_id=tmp_path / store, no_dist=True)
    (tmp_path / "optim" / ".metadata").unlink()
    found = read(tmp_path)
    assert found.problems == ("optim has shards and no .metadata",)
    assert set(found.tensors) == {"model:weight"}


@pytest.mark.parametrize("keep", [0, 1, 10, 200])
def test_metadata_that_is_cut_short_is_named(saved, keep):
    (saved / ".metadata").write_bytes((saved / ".metadata").read_bytes()[:keep])
    (problem,) = read(saved).problems
    assert problem.startswith(".metadata cannot be read: ")


def test_metadata_that_is_something_else_is_named(saved):
    (saved / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    (problem,) = read(saved).problems
    assert problem.startswith(".metadata cannot be read: ")


def test_a_tensor_that_is_listed_and_stored_nowhere_is_named(saved):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "model.weight"}
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    assert read(saved).problems == ("model.weight at [0, 0] is listed and stored nowhere",)


def test_chunks_that_leave_a_hole_are_named(saved):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.weight"].size = torch.Size([5, 4])
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    assert read(saved).problems == ("model.weight has 20 elements; its chunks hold 12",)


@pytest.mark.parametrize("cut", [1, 8])
def test_a_safetensors_file_that_is_cut_short_is_named_with_both_sizes(tmp_path, cut):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(4)}, path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-cut])
    assert read(tmp_path).problems == (f"model.safetensors has {size - cut} bytes; its header describes {size}",)


@pytest.mark.parametrize(
    "content", [b"", b"1234", struct.pack("<Q", 1 << 60), struct.pack("<Q", 4) + b"{{{{", struct.pack("<Q", 2) + b"[]"]
)
def test_a_safetensors_file_whose_header_is_damaged_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    (problem,) = read(tmp_path).problems
    assert problem.startswith("model.safetensors cannot be read: ")


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_to_metadata_is_an_exception(saved, data):
    whole = (
        (saved / ".metadata.whole").read_bytes() if (saved / ".metadata.whole").exists() else (saved / ".metadata").read_bytes()
    )
    (saved / ".metadata.whole").write_bytes(whole)
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    (saved / ".metadata").write_bytes(damaged)
    assert isinstance(read(saved), CheckpointDirectory)


# --- nothing is executed ---------------------------------------------------------------------------------------------


class Harmful:
    """Touches a file where it is unpickled."""

    def __init__(self, canary: Path, function) -> None:
        self.canary = canary
        self.function = function

    def __reduce__(self):
        return self.function, (str(self.canary),)


def touch(path: str) -> None:
    Path(path).touch()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("function", [touch, eval, open, __import__, getattr], ids=lambda function: function.__name__)
def test_metadata_that_would_run_code_is_refused_by_name(saved, function, protocol):
    canary = saved.parent / "canary"
    (saved / ".metadata").write_bytes(pickle.dumps(Harmful(canary, function), protocol=protocol))
    (problem,) = read(saved).problems
    assert problem.startswith(".metadata cannot be read: UnpicklingError: it names ")
    assert f".{function.__name__}, which no DCP metadata needs" in problem
    assert not canary.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "pickle.loads"),
        ("torch.distributed.checkpoint.filesystem", "io.FileIO"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "FileSystem.rm_file"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
        ("torch.distributed.checkpoint.filesystem", "Path"),
        ("torch", "load"),
        ("torch", "Size.__class__"),
        ("pathlib", "PosixPath.unlink"),
        ("torch.distributed.checkpoint.planner", "os.system"),
    ],
)
def test_a_name_reached_through_an_admitted_module_is_refused(saved, module, name):
    # Protocol 4 lets a dotted name walk attributes, and a module's attributes are whatever it imported.
    words = [pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode() for word in (module, name)]
    (saved / ".metadata").write_bytes(pickle.PROTO + b"\x04" + b"".join(words) + pickle.STACK_GLOBAL + pickle.STOP)
    (problem,) = read(saved).problems
    assert f"it names {module}.{name}, which no DCP metadata needs" in problem
