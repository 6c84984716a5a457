"""A case is plain data: it goes to JSON and back, names what is wrong in a file, reads as a script, and is drawn again."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts import published_names
from contracts.case import (
    Blind,
    Case,
    Checkpoint,
    Data,
    Finalize,
    Generation,
    Hold,
    Kill,
    MapNames,
    Model,
    Optimizer,
    Overwrite,
    PowerLoss,
    Precision,
    Resume,
    Save,
    Train,
)  # fmt: skip
from contracts.implementation import Capability, Layout
from contracts.strategies.drawing import Cases, Scope
from contracts.strategies.runs import INTERRUPTED_RUNS, MAPPINGS, SAVED_RUNS
from contracts.suite import PROFILES

EVERYTHING = Scope(frozenset(Capability), Layout(companions=("tokenizer.json", "config.json")))
KINDS = {kind.name: kind for kind in (INTERRUPTED_RUNS, SAVED_RUNS, MAPPINGS)}
SMALL = Case(generations=(Generation(ranks=1, steps=(Train(1),)),))


def any_case() -> st.SearchStrategy[Case]:
    """Any case that can be written down, whether or not the suite would draw it."""
    ranks = 4
    steps = st.one_of(
        st.builds(Train, st.integers(1, 9)), st.builds(Save, st.booleans()), st.just(Finalize()), st.just(Resume()),
        st.builds(Overwrite, st.floats(allow_nan=False)), st.builds(MapNames, st.text()),
    )  # fmt: skip
    faults = st.one_of(
        st.builds(
            Hold, rank=st.integers(0, ranks - 1), at=st.text(), until=st.text(), grace=st.floats(0, 1), at_most=st.floats(0, 9)
        ),
        st.builds(Kill, rank=st.integers(0, ranks - 1), event=st.integers(0, 99)),
        st.builds(PowerLoss, rank=st.integers(0, ranks - 1), event=st.integers(0, 99), lost=st.just("bytes")),
        st.builds(Blind, rank=st.integers(0, ranks - 1), at=st.text()),
    )
    generations = st.builds(
        Generation, ranks=st.just(ranks), steps=st.lists(steps, min_size=1, max_size=4).map(tuple),
        faults=st.lists(faults, max_size=2).map(tuple), root=st.text(min_size=1), seed=st.integers(),
    )  # fmt: skip
    parts = {"model": Model, "optimizer": Optimizer, "precision": Precision, "checkpoint": Checkpoint, "data": Data}
    return st.builds(
        Case, generations=st.lists(generations, min_size=1, max_size=3).map(tuple), seed=st.integers(),
        **{name: st.from_type(kind).filter(lambda part: "nan" not in repr(part)) for name, kind in parts.items()},
    )  # fmt: skip


# --- JSON ------------------------------------------------------------------------------------------------------------


@given(any_case())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_case_goes_to_json_and_back_unchanged(case):
    again = Case.from_json(json.loads(json.dumps(case.to_json())))
    assert again == case
    assert again.key == case.key


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_case_that_is_drawn_goes_to_a_file_and_back(kind, tmp_path):
    for case in kind.draw(2, EVERYTHING, 8, 0):
        assert Case.read(case.write(tmp_path / "cases" / f"{case.key}.json")) == case


def test_equal_cases_have_equal_keys_and_others_have_others():
    again = Case(generations=(Generation(ranks=1, steps=(Train(1),)),))
    assert again == SMALL
    assert again.key == SMALL.key
    assert len(SMALL.key) == 12
    others = [dataclasses.replace(SMALL, seed=1), dataclasses.replace(SMALL, model=Model(layers=1))]
    assert len({case.key for case in (SMALL, *others)}) == 3


def test_a_field_that_is_left_out_has_its_default():
    assert Case.from_json({"generations": [{"ranks": 1, "steps": [{"do": "Train"}]}]}) == SMALL


def test_a_whole_number_is_a_float_where_one_is_wanted():
    data = SMALL.to_json() | {"optimizer": {"lr": 1}}
    assert Case.from_json(data).optimizer.lr == 1.0


def generation(**changes) -> dict:
    return {"generations": [{"ranks": 2, "steps": [{"do": "Train", "steps": 1}], **changes}]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "case: expected an object, got []"),
        ({}, "case: .*missing .*'generations'"),
        ({"generations": []}, "case.*at least one generation"),
        ({"generations": {}}, "case.generations: expected a list, got {}"),
        (generation(rank=2), "case.generations[0]: unknown field 'rank'; known: ranks, steps, faults, root, seed"),
        (generation(ranks="two"), "case.generations[0].ranks: expected int, got 'two'"),
        (generation(ranks=2.0), "case.generations[0].ranks: expected int, got 2.0"),
        (generation(ranks=True), "case.generations[0].ranks: expected int, got True"),
        (generation(ranks=0), "case.*at least one rank, got 0"),
        (generation(steps=[]), "case.*at least one step"),
        (generation(steps=[{"do": "Sleep"}]), 'case.generations[0].steps[0]: expected an object with "do" one of Train, Save'),
        (generation(steps=["Train"]), 'case.generations[0].steps[0]: expected an object with "do" one of'),
        (
            generation(steps=[{"do": "Kill", "rank": 0, "event": 1}]),
            'case.generations[0].steps[0]: expected an object with "do" one of',
        ),
        (
            generation(steps=[{"do": "Train"}, {"do": "Train", "count": 1}]),
            "case.generations[0].steps[1]: unknown field 'count'",
        ),
        (generation(steps=[{"do": "Save", "final": 1}]), "case.generations[0].steps[0].final: expected bool, got 1"),
        (generation(faults=[{"do": "Kill", "rank": 0}]), "case.generations[0].faults[0]: .*missing .*'event'"),
        (generation(faults=[{"do": "Kill", "rank": 2, "event": 0}]), "case.*names rank 2 of 2"),
        (generation() | {"model": {"layers": None}}, "case.model.layers: expected int, got None"),
        (
            generation() | {"checkpoint": {"mode": "later"}},
            "case.checkpoint.mode: expected one of sync, thread, process, got 'later'",
        ),
        (generation() | {"checkpoint": {"mode": []}}, "case.checkpoint.mode: expected one of sync, thread, process, got []"),
    ],
)
def test_what_is_wrong_with_a_case_is_said_with_its_place(data, words):
    start, *rest = words.split(".*")
    with pytest.raises(ValueError) as caught:
        Case.from_json(data)
    said = str(caught.value)
    assert said.startswith(start) or start == "case"
    assert all(part in said for part in rest), said


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.json: cannot read the case file: No such file or directory"):
        Case.read(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("text", "words"), [("{", "Expecting property name"), ("[]", "a case is an object"), ("\xff", "Expecting value")]
)
def test_a_file_that_is_no_case_is_named_with_its_trouble(tmp_path, text, words):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.json: .*{words}"):
        Case.read(tmp_path / "bad.json")


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"bad\.json: "):
        Case.read(tmp_path / "bad.json")


# --- the script ------------------------------------------------------------------------------------------------------


def test_a_case_reads_as_a_script():
    case = Case(
        generations=(
            Generation(
                ranks=2,
                steps=(Train(2), Save(), Overwrite(), Finalize()),
                faults=(Hold(rank=1, at="x$", until="finalize-begins"),),
            ),
            Generation(ranks=1, steps=(Resume(), Train(3), Save(final=True)), faults=(Kill(rank=0, event=4),)),
            Generation(ranks=2, steps=(MapNames("bert"),), root="twin"),
        ),
        model=Model(layers=1),
        checkpoint=Checkpoint(mode="thread"),
        seed=7,
    )  # fmt: skip
    assert str(case).splitlines() == [
        "2 ranks: train 2, save, overwrite, finalize [rank 1 held at x$ until finalize-begins]",
        "1 rank: resume, train 3, save final [rank 0 killed at file event 4]",
        "2 ranks: map the names of bert (in twin)",
        "llama model.layers=1 checkpoint.mode=thread seed=7",
    ]
    assert case.worlds == (1, 2)


def test_a_case_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.seed = 1


# --- drawing ---------------------------------------------------------------------------------------------------------


def drawn(kind: Cases, ranks: int, *, profile: str = "ci", scope: Scope = EVERYTHING, with_seed: int = 0) -> list[Case]:
    return kind.draw(ranks, scope, PROFILES[profile].examples * kind.weight, with_seed)


def corner(case: Case) -> tuple[str, str]:
    """The save policy, and what is held until when."""
    (faults,) = {generation.faults for generation in case.generations if generation.faults} or {()}
    return case.checkpoint.mode, {"finalize-begins": "writer", "save-returns": "companion"}[faults[0].until] if faults else ""


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_same_seed_draws_the_same_cases(kind):
    assert drawn(kind, 2) == drawn(kind, 2)


def test_another_seed_draws_other_cases():
    assert drawn(SAVED_RUNS, 2, with_seed=1) != drawn(SAVED_RUNS, 2)


@pytest.mark.parametrize("with_seed", range(5))
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_save_policy_and_every_race_is_tried_within_the_ci_profile(ranks, with_seed):
    tried = {corner(case) for case in drawn(SAVED_RUNS, ranks, with_seed=with_seed)}
    assert tried >= {("thread", "writer"), ("sync", "companion"), ("thread", "companion"), ("sync", ""), ("thread", "")}
    assert "process" in {mode for mode, _ in tried}


@pytest.mark.parametrize("with_seed", range(5))
def test_a_world_of_one_has_no_other_rank_to_hold_a_companion_for(with_seed):
    tried = {corner(case) for case in drawn(SAVED_RUNS, 1, with_seed=with_seed)}
    assert tried == {("thread", "writer"), ("sync", ""), ("process", ""), ("thread", "")}


@pytest.mark.parametrize("with_seed", range(5))
def test_every_policy_and_dtype_of_the_weights_is_resumed_within_the_ci_profile(with_seed):
    tried = {(case.checkpoint.mode, case.model.weights_dtype) for case in drawn(INTERRUPTED_RUNS, 2, with_seed=with_seed)}
    assert tried == {(mode, dtype) for mode in ("sync", "thread") for dtype in ("float32", "bfloat16")}


def test_the_smoke_profile_tries_the_most_telling_corners():
    assert [corner(case) for case in drawn(SAVED_RUNS, 2, profile="smoke")] == [("thread", "writer"), ("sync", "companion")]
    assert [case.model.weights_dtype for case in drawn(INTERRUPTED_RUNS, 2, profile="smoke")] == ["bfloat16"]


def test_every_list_of_published_names_is_mapped():
    cases = MAPPINGS.draw(1, EVERYTHING, 100, 0)
    assert {case.generations[0].steps[0].source for case in cases} == set(published_names.available())


def test_nothing_is_drawn_that_the_implementation_cannot_do():
    plain = Scope(frozenset({Capability.TRAIN, Capability.RESUME}))
    for kind in (INTERRUPTED_RUNS, SAVED_RUNS):
        assert {corner(case) for case in drawn(kind, 4, scope=plain)} == {("sync", "")}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", (INTERRUPTED_RUNS, SAVED_RUNS), ids=lambda kind: kind.name)
def test_every_case_of_a_world_has_that_many_ranks_and_as_many_cases_are_drawn_as_asked_for(kind, ranks):
    cases = drawn(kind, ranks)
    assert all(case.worlds == (ranks,) for case in cases)
    assert len({case.key for case in cases}) == len(cases) == PROFILES["ci"].examples * kind.weight


def test_an_interrupted_run_resumes_from_another_seed_and_has_a_twin():
    for case in drawn(INTERRUPTED_RUNS, 2):
        first, again, twin = case.generations
        assert (first.root, again.root, twin.root) == ("run", "run", "twin")
        assert first.seed == twin.seed != again.seed
        assert isinstance(again.steps[0], Resume)
