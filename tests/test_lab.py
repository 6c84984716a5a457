"""The lab on real processes: what an implementation does wrong becomes evidence, and what the lab starts it ends."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import pytest

from contracts.case import Case, Checkpoint, Finalize, Generation, Hold, Kill, Save, Train
from contracts.history import History
from contracts.lab.lab import Lab, LabError
from contracts.lab.leases import cores, exclusive, lease, whole_worlds

HERE = Path(__file__).parent
MARK = f"FSDP_CONTRACTS_TEST_{uuid.uuid4().hex}"
"""Set in the environment of every process that a lab of this module starts, so that all of them can be found."""


@pytest.fixture(scope="module")
def labs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # The warm parent imports the faults of lab_faults.py by name, wherever pytest was started.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])))
        patch.setenv(MARK, "1")
        with Lab("lab_faults:Honest", directory=tmp_path_factory.mktemp("lab"), deadline=60) as lab:
            yield lab
        assert started_processes() == set()


@pytest.fixture
def lab(labs):
    """The module's lab; after each test nothing but its warm parent runs, and nothing is locked or watched."""
    yield labs
    parent = set() if labs._parent is None else {labs._parent.process.pid}
    assert started_processes() == parent
    assert [name for name in open_files() if "fsdp-contracts-" in name or "inotify" in name or name.endswith(".lock")] == []


def started_processes() -> set[int]:
    found = set()
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if MARK.encode() in file.read_bytes():
                found.add(int(file.parent.name))
        except OSError:
            continue
    return found


def open_files() -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except OSError:
            continue
    return found


def one_save(*, ranks: int = 2, faults: tuple = (), **policies) -> Case:
    return Case(generations=(Generation(ranks=ranks, steps=(Train(1), Save(), Finalize()), faults=faults),), **policies)


def launch_of(history: History):
    return history.generations[0].launch


def created(history: History) -> list[str]:
    return [event.path for event in history.generations[0].files("created")]


# --- what goes wrong becomes evidence --------------------------------------------------------------------------------


def test_a_run_without_a_fault_has_no_failure(lab):
    history = lab.run(one_save())
    assert history.failures == []
    assert [outcome.status for outcome in launch_of(history).outcomes] == ["returned", "returned"]
    assert list(history.generations[0].disk) == ["step_1"]


def test_a_rank_that_hangs_in_save_is_named_with_its_stack(lab, monkeypatch):
    monkeypatch.setattr(lab, "deadline", 8.0)
    history = lab.run(one_save(), "lab_faults:HangsInSave")
    (failure,) = history.failures
    assert "rank 1 still ran" in failure
    assert "in never_comes_back" in failure
    assert "rank 0 waited for its peers" in failure
    assert launch_of(history).timed_out
    assert launch_of(history).seconds < 8 + 5


def test_a_rank_that_raises_in_save_comes_before_the_peers_that_waited(lab):
    history = lab.run(one_save(), "lab_faults:RaisesInSave")
    (failure,) = history.failures
    assert "(2 ranks: train 1, save, finalize): rank 1 raised OSError: [Errno 28] No space left on device" in failure
    assert launch_of(history).outcomes[0].is_consequence


def test_a_rank_that_exits_in_save_has_failed_whatever_its_code(lab):
    history = lab.run(one_save(), "lab_faults:ExitsInSave")
    (failure,) = history.failures
    assert "rank 0 exited with code 0 without returning" in failure
    assert [event.kind for event in history.generations[0].of("save-begins", "save-returns", rank=0)] == ["save-begins"]


def test_ranks_that_exit_before_they_begin_are_evidence_too(lab):
    history = lab.run(one_save(), "lab_faults:ExitsBeforeItBegins")
    assert "exited with code 0 without returning" in history.failures[0]


def test_a_child_that_is_left_behind_is_named_and_ended(lab):
    history = lab.run(one_save(), "lab_faults:LeavesAChild")
    pid = int((history.directory / "run" / "child.pid").read_text())
    assert launch_of(history).left_behind == [f"process {pid} (sleep 600)"]
    assert not Path(f"/proc/{pid}/cwd").exists()


def test_a_stack_that_falls_back_to_ddp_is_not_judged(lab):
    history = lab.run(one_save(), "lab_faults:FallsBackToDDP")
    assert "the case asks for FSDP2, but build() made 0 FSDPModules and 0 DTensor parameters" in history.failures[0]
    assert history.generations[0].of("trained") == []


def test_a_flood_of_output_is_cut_and_harms_nothing(lab):
    history = lab.run(one_save(), "lab_faults:Floods")
    assert history.failures == []
    assert all(len(outcome.log) <= 4000 and "039999 xxx" in outcome.log for outcome in launch_of(history).outcomes)


def test_generations_after_one_that_failed_run_all_the_same(lab):
    twice = Case(generations=(*one_save().generations, *one_save(ranks=1).generations), seed=2)
    history = lab.run(twice, "lab_faults:RaisesInSave")
    assert [generation.launch.ok for generation in history.generations] == [False, True]


# --- faults that the lab injects -------------------------------------------------------------------------------------


def test_a_held_writer_writes_after_what_it_was_held_for(lab):
    hold = Hold(rank=0, at=r"held\.bin$", until="save-returns", at_most=30.0)
    history = lab.run(one_save(ranks=3, faults=(hold,)), "lab_faults:ReturnsBeforeRank0HasWritten")
    assert history.failures == []
    generation = history.generations[0]
    (held,) = (event for event in generation.files("created") if event.path == "held.bin")
    others = [event.order for event in generation.of("save-returns") if event.rank != 0]
    assert len(others) == 2
    assert max(others) < held.order < generation.of("save-returns", rank=0)[0].order
    assert launch_of(history).seconds < 30


def test_a_held_writer_that_nobody_releases_goes_on_in_the_end(lab):
    hold = Hold(rank=0, at=r"held\.bin$", until="never", at_most=0.3)
    history = lab.run(one_save(faults=(hold,)), "lab_faults:ReturnsBeforeRank0HasWritten")
    assert history.failures == []
    assert "held.bin" in created(history)


def test_a_hold_on_one_rank_holds_no_other(lab):
    hold = Hold(rank=1, at=r"held\.bin$", until="never", at_most=30.0)
    history = lab.run(one_save(faults=(hold,)), "lab_faults:ReturnsBeforeRank0HasWritten")
    assert history.failures == []
    assert launch_of(history).seconds < 30


@pytest.mark.parametrize("event", [0, 2, 4])
def test_a_rank_is_killed_at_the_file_event_that_the_case_names(lab, event):
    history = lab.run(one_save(faults=(Kill(rank=1, event=event),)), "lab_faults:WritesFourFiles")
    primary = launch_of(history).primary
    assert (primary.rank, primary.status, primary.signal) == (1, "killed", "SIGKILL")
    everything = ["rank-1", "rank-1/a", "rank-1/b", "rank-1/c", "rank-1/d"]
    assert {path for path in created(history) if path.startswith("rank-1")} == set(everything[:event])


def test_the_same_case_kills_at_the_same_event_again(lab, monkeypatch, tmp_path):
    case = one_save(faults=(Kill(rank=0, event=3),), seed=5)
    seen = []
    for number in range(2):
        monkeypatch.setattr(lab, "directory", tmp_path / str(number))
        history = lab.run(case, "lab_faults:Honest")
        logs = history.directory.glob("generation-0/files-*.jsonl")
        files = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
        seen.append([(line["operation"], line["paths"]) for line in files if line["rank"] == 0])
    assert len(seen[0]) == 4
    assert seen[0] == seen[1]


# --- who did it, and when --------------------------------------------------------------------------------------------


def test_native_writers_are_attributed_to_their_rank(lab):
    writers = lab.run(one_save()).generations[0].writers
    assert writers["step_1/tokenizer.json"] == {0}
    assert writers["step_1/tokenizer_config.json"] == {0}
    assert writers["step_1/model.safetensors"] == {0}


def test_writers_in_processes_that_a_rank_starts_are_attributed_to_that_rank(lab):
    history = lab.run(one_save(), "lab_faults:WritesFromItsChildren")
    assert history.failures == []
    files = [f"{method}/{name}" for method in ("spawn", "fork") for name in ("python.txt", "native.safetensors")]
    assert [history.generations[0].writers.get(file) for file in files] == [{1}] * 4


def test_the_background_process_of_an_asynchronous_save_is_attributed_to_its_rank(lab):
    case = one_save(checkpoint=Checkpoint(mode="process"))
    history = lab.run(case, "contracts.bindings.torch_dcp:TorchDCP")
    assert history.failures == []
    shards = {
        os.path.basename(path): ranks for path, ranks in history.generations[0].writers.items() if path.endswith(".distcp")
    }
    assert shards == {"__0_0.distcp": {0}, "__1_0.distcp": {1}}


def test_marks_of_all_ranks_and_file_events_stand_in_one_order(lab):
    generation = lab.run(one_save()).generations[0]
    begins, returns = generation.of("save-begins"), generation.of("save-returns")
    written = [event.order for event in generation.files() if event.path == "step_1/model.safetensors"]
    assert begins[0].order < min(written) <= max(written) < min(event.order for event in returns)
    orders = [event.order for event in generation.events]
    assert orders == sorted(orders)
    steps = ["begins", "trained", "save-begins", "save-returns", "finalize-begins", "finalize-returns", "ends"]
    assert [event.kind for event in generation.of(*steps, rank=1)] == steps


# --- the lab itself --------------------------------------------------------------------------------------------------


def test_a_case_runs_once_and_is_loaded_afterwards(lab, monkeypatch):
    first = lab.run(one_save(seed=7))
    monkeypatch.setattr(lab, "_run", lambda *_: pytest.fail("the case ran again"))
    again = lab.run(one_save(seed=7))
    assert again.directory == first.directory
    assert [event.kind for event in again.generations[0].events] == [event.kind for event in first.generations[0].events]


def test_a_case_whose_run_was_interrupted_runs_again(lab):
    first = lab.run(one_save(seed=8))
    assert first.failures == []
    (first.directory / "complete").unlink()
    (first.directory / "stale").touch()
    again = lab.run(one_save(seed=8))
    assert again.failures == []
    assert not (again.directory / "stale").exists()


def test_another_implementation_has_a_history_of_its_own(lab):
    assert lab.run(one_save(), "lab_faults:Honest").directory != lab.run(one_save(), "lab_faults:Floods").directory


def test_the_death_of_the_warm_parent_in_a_run_is_the_labs_own_error(lab):
    with pytest.raises(LabError, match="the warm parent died while it did 'run'"):
        lab.run(one_save(), "lab_faults:EndsTheLab")
    assert started_processes() == set()
    assert lab.run(one_save(seed=9)).failures == []


def test_the_death_of_the_warm_parent_at_the_import_is_said_with_its_last_words(lab):
    with pytest.raises(LabError, match=r"died while it did 'import'(.|\n)*this stack cannot be imported here"):
        lab.about("lab_faults:ExitsWhenItIsImported")
    assert started_processes() == set()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:Class", "No module named 'no_such_module'"),
        ("lab_faults:NoSuchClass", "lab_faults has no implementation 'NoSuchClass'; it has: Honest, "),
        ("lab_faults:never_comes_back", "lab_faults has no implementation 'never_comes_back'"),
        ("lab_faults", "has no implementation ''.* Name module:Class"),
    ],
)
def test_a_name_that_is_no_implementation_is_the_labs_own_error(lab, name, words):
    with pytest.raises(LabError, match=words):
        lab.about(name)


def test_about_gives_name_capabilities_and_versions(lab):
    about = lab.about()
    assert (about["name"], about["capabilities"]) == ("Honest", ["companions", "train"])
    assert about["statement"] == "Rank 0 writes a tokenizer and one tensor under the final name, and everybody waits for it."
    assert set(about["environment"]) >= {"python", "torch", "transformers"}


# --- leases ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_slots(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_worlds_that_run_at_once_share_no_core(own_slots, monkeypatch):
    monkeypatch.setattr("contracts.lab.leases.cores", lambda: 4)
    with lease("cpu", 2) as one, lease("cpu", 2) as other:
        assert sorted(one + other) == [0, 1, 2, 3]


def test_a_world_waits_for_its_cores_and_says_so_when_it_gets_none(own_slots, monkeypatch):
    monkeypatch.setattr("contracts.lab.leases.cores", lambda: 2)
    with lease("cpu", 1), pytest.raises(TimeoutError, match="1 of 2 cpu slots came free"), lease("cpu", 2, timeout=0.05):
        pass
    with lease("cpu", 2, timeout=0.05) as slots:
        assert slots == [0, 1]


def test_a_world_larger_than_the_machine_holds_all_of_it(own_slots):
    with lease("cpu", 1000) as slots:
        assert slots == list(range(cores()))


def test_more_ranks_than_gpus_cannot_run_here(own_slots, monkeypatch):
    monkeypatch.setattr("contracts.lab.leases.gpus", lambda: 1)
    with pytest.raises(LookupError, match="2 NCCL ranks need 2 GPUs; this machine has 1"), lease("cuda", 2):
        pass


def test_at_least_one_world_fits(monkeypatch):
    monkeypatch.setattr("contracts.lab.leases.cores", lambda: 5)
    assert [whole_worlds("cpu", ranks) for ranks in (1, 2, 8)] == [5, 2, 1]


def test_a_lock_excludes_and_is_free_again(tmp_path):
    again = exclusive(tmp_path / "lock", timeout=0.02)
    with exclusive(tmp_path / "lock"), pytest.raises(TimeoutError, match="another process holds"), again:
        pass
    with exclusive(tmp_path / "lock", timeout=0.02):
        pass
