"""The command line as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from contracts.case import Case, Generation, Train
from contracts.census import Census, census
from contracts.cli import main
from contracts.history import Event, History, Shard, State
from contracts.implementation import Capability, Layout, require_owed
from contracts.judging import REGISTRY, Contract
from contracts.report.text import Stories
from contracts.rounds import added
from contracts.suite import Suite, Verdict
from contracts.trainer import CheckpointerOnly

MUTANT = "CastsAfterOptimizerLoad"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`fsdp-contracts`, called in this process from a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> SimpleNamespace:
        try:
            code = main(arguments)
        except SystemExit as exit:
            code = exit.code
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call


def test_list_names_every_contract_in_json(run):
    listed = json.loads(run("list", "--json").out)
    assert [one["name"] for one in listed] == list(REGISTRY)
    assert set(listed[0]) == {"name", "family", "statement", "needs", "seen"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "refrence"), "'refrence' is no implementation: name one of reference,"),
        (("run", "reference", "--contracts", "resume.trajectry"), "did you mean resume.trajectory"),
        (("run", "reference", "--contracts", "trajectory"), "did you mean resume.trajectory"),
        (("run", "reference", "--contracts", "zzz.*"), "`fsdp-contracts list` names them all"),
        (("run", "reference", "--worlds", "2,x"), "expected world sizes such as 1,2,4, got '2,x'"),
        (("run", "reference", "--minutes", "0"), "expected minutes such as 30, got '0'"),
        (("replay", "no-such.json"), "no-such.json: cannot read the case file"),
    ],
)
def test_bad_usage_is_one_plain_line_and_exit_2(run, arguments, said):
    done = run(*arguments)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_run_that_is_interrupted_leaves_a_report_of_what_was_judged(run, tmp_path, monkeypatch):
    def judge(self: Suite, contract: Contract) -> Verdict:
        if contract.name == "resume.counters":
            raise KeyboardInterrupt
        return Verdict(contract.name, "kept", cases=1, evidence=1)

    monkeypatch.setattr(Suite, "verdict", judge)
    done = run("run", "reference", "--contracts", "precision.params-*", "resume.counters", "--json", "report.json")
    assert done.code == 130
    judged = json.loads((tmp_path / "report.json").read_text())["contracts"]
    assert [(one["name"], one["verdict"]) for one in judged] == [("precision.params-declared", "kept")]


def test_a_run_with_minutes_draws_afresh_and_tries_what_failed_before_first(run, tmp_path):
    arguments = ("run", MUTANT, "--contracts", "precision.moments-survive-resume", "precision.params-declared",
                 "--worlds", "1", "--profile", "nightly", "--no-shrink", "--json", "report.json")  # fmt: skip
    first = run(*arguments, "--minutes", "0.1")
    assert first.code == 1, first.err
    assert "round 1, seed" in first.err
    report = json.loads((tmp_path / "report.json").read_text())
    verdicts = {one["name"]: one for one in report["contracts"]}
    assert verdicts["precision.moments-survive-resume"]["verdict"] == "broken"
    assert len(set(report["environment"]["seeds"])) == len(report["environment"]["seeds"]) >= 1
    assert verdicts["precision.moments-survive-resume"]["census"]["tensors"] > 0
    kept = list((tmp_path / ".contracts" / "failures" / MUTANT).rglob("*.json"))
    assert [path.parent.name for path in kept] == ["precision.moments-survive-resume"]
    (older := kept[0].with_name("older.json")).write_text("{}")
    with pytest.warns(UserWarning, match=f"passing over a case that failed before: .*{older.name}: it is no case"):
        again = run(*arguments, "--minutes", "0.02")
    assert Path(json.loads((tmp_path / "report.json").read_text())["contracts"][0]["case_file"]).stem == kept[0].stem, again.err


# --- stories ---------------------------------------------------------------------------------------------------------

TRACEBACK = """\
  Traceback (most recent call last):
    File "/home/me/contracts/lab/rank.py", line 178, in _take
      implementation.resume()
    File "/home/me/.venv/lib/python3.11/site-packages/torch/serialization.py", line 776, in __init__
      super().__init__(open(name, mode))
                       ^^^^^^^^^^^^^^^^
  FileNotFoundError: rng_dp_rank_1.pt"""


def test_one_cause_is_told_once_and_short():
    stories = Stories()
    names = "resume.trajectory", "resume.counters"
    first, second = (stories(Verdict(name, "broken", message=f"rank 1 raised\n{TRACEBACK}\nthen: rank 0")) for name in names)
    assert '    Traceback (most recent call last):\n      File "torch/serialization.py", line 776, in __init__' in first
    assert "rank.py" not in first and "^^^" not in first and "FileNotFoundError: rng_dp_rank_1.pt" in first
    assert "  rank 1 raised\n  then: rank 0\n    the traceback stands under resume.trajectory, above" in second
    assert "Traceback" not in second


def test_a_path_in_a_story_stays_whole():
    path = "/somewhere/" + "deep-er/" * 20 + "file"
    assert path in Stories()(Verdict("resume.trajectory", "broken", message=f"{path} is gone"))


# --- rounds and censuses ---------------------------------------------------------------------------------------------


def test_rounds_add_up_under_the_graver_verdict():
    first = Verdict("a.b", "kept", "kind", cases=2, evidence=5, worlds=[2], census=Census(tensors=3), seconds=1.0)
    second = Verdict(
        "a.b", "broken", "kind", cases=1, evidence=4, worlds=[1], census=Census(tensors=4), message="seen", seconds=0.5
    )
    both = added(first, second)
    assert (both.verdict, both.message) == ("broken", "seen")
    assert (both.cases, both.evidence, both.worlds, both.census.tensors, both.seconds) == (3, 9, [1, 2], 7, 1.5)


def test_a_round_for_which_there_was_no_time_takes_nothing_away():
    first = Verdict("a.b", "kept", "kind", cases=2, evidence=5)
    assert added(first, Verdict("a.b", "not-run", message="the time was up")).verdict == "kept"


def test_a_census_counts_whole_tensors_once_and_sees_uneven_and_empty_shards():
    case = Case(generations=(Generation(ranks=2, steps=(Train(1),)),))
    trained = [Event("trained", rank, {"samples": [rank, rank + 2]}) for rank in (0, 1)]
    pieces = {
        "odd": (Shard(torch.ones(2, 2), (3, 2), (0, 0)), Shard(torch.ones(1, 2), (3, 2), (2, 0))),
        "single": (Shard(torch.ones(1), (1,), (0,)), Shard(torch.ones(0), (1,), (1,))),
        "even": (Shard(torch.ones(1), (2,), (0,)), Shard(torch.ones(1), (2,), (1,))),
    }
    states = [State("trained", rank, 1, {name: its[rank] for name, its in pieces.items()}, {}) for rank in (0, 1)]
    found = census(History.of(case, trained, states=[states]))
    assert found == Census(generations=1, steps=1, samples=4, tensors=3, elements=9, uneven=2, empty=1)


# --- declarations ----------------------------------------------------------------------------------------------------


def test_a_layout_is_refused_that_would_be_misread():
    with pytest.raises(
        TypeError, match=r"companions must be a tuple of file names, such as \('tokenizer.json',\); got a string"
    ):
        Layout(companions="tokenizer.json")
    with pytest.raises(ValueError, match=r"published must hold a group \(\?P<step>...\) around the step's number, got 'ckpt-"):
        Layout(published=r"ckpt-\d+")


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"train", "RESUMME"}, "Ours declares 'RESUMME', which is no capability; did you mean 'resume'?"),
        ({"train", "zzz"}, "which is no capability; there are train, resume,"),
        ({Capability.TRAIN, Capability.COMPANIONS}, "Ours declares COMPANIONS; name its files in layout.companions"),
    ],
)
def test_a_capability_is_refused_that_is_none_or_that_the_layout_does_not_bear_out(declared, said):
    with pytest.raises(TypeError, match=re.escape(said)):
        type("Ours", (CheckpointerOnly,), {"capabilities": declared})


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"train"}, "Ours declares TRAIN and has no method 'save'"),
        ({"resume"}, "Ours declares RESUME and has no method 'resume'"),
    ],
)
def test_a_stack_that_lacks_a_method_it_owes_is_refused_before_anything_runs(declared, said):
    with pytest.raises(TypeError, match=said):
        require_owed(type("Ours", (CheckpointerOnly,), {"capabilities": declared}))
    require_owed(type("Ours", (CheckpointerOnly,), {"capabilities": set()}))


def test_capabilities_may_be_written_as_strings():
    assert type("Ours", (CheckpointerOnly,), {"capabilities": {"train", "resume"}}).capabilities == {"train", "resume"}
