"""The families resume and reshard judge hand-written histories: kept, broken in these words, or unknown."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_judges import assert_broken, assert_kept, judge

import contracts.catalog  # noqa: F401  fills the registry
from contracts.bindings.known import Target
from contracts.case import Case, Data, Draw, Finalize, Generation, Model, Resume, Retune, Save, Train
from contracts.checkpoint_dir import CheckpointDirectory, StoredTensor
from contracts.history import Event, History, Shard, State
from contracts.implementation import Capability, Layout
from contracts.judging import REGISTRY
from contracts.strategies.drawing import Cases, Scope
from contracts.strategies.worlds import (
    CONTINUED_RUNS,
    MESH_CHANGES,
    ODD_RUNS,
    PARTLY_TRAINED_RUNS,
    REGROUPED_RUNS,
    RESHARDED_RUNS,
)
from contracts.suite import PROFILES, Suite

WEIGHT, NORM = "model.layers.0.weight", "model.norm.weight"
NOTHING: dict[str, Any] = {}


# --- words to write a history with -----------------------------------------------------------------------------------


def whole(seed: int) -> dict[str, torch.Tensor]:
    """A (5, 4) weight and a (3,) norm, other values for another seed."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in ((WEIGHT, (5, 4)), (NORM, (3,)))}


def piece(tensor: torch.Tensor, index: int, of: int) -> Shard:
    """Piece `index` of `of`, as `torch.chunk` makes them; one that is not there is empty and lies at the end."""
    rows = -(-len(tensor) // of)
    start = index * rows
    if start >= len(tensor):
        return Shard(tensor[:0].clone(), tuple(tensor.shape), tuple(tensor.shape))
    return Shard(tensor[start : start + rows].clone(), tuple(tensor.shape), (start, *[0] * (tensor.dim() - 1)))


def states(
    label: str, step: int, ranks: int, *, seed: int | None = None, mesh: tuple[int, ...] = (), moments: bool = True,
    idle: tuple[str, ...] = (), **small: Any,
) -> list[State]:  # fmt: skip
    """Every rank's state under `label` at `step`; its values follow from the step unless told otherwise."""
    seed = step if seed is None else seed
    parameters, first, second = whole(seed), whole(seed + 1000), whole(seed + 2000)
    parameters |= {name: whole(77)[name] for name in idle}
    shards = mesh[1] if mesh else ranks
    made = []
    for rank in range(ranks):
        its: dict[tuple[str, str], Shard] = {}
        for name in parameters.keys() - set(idle) if moments else ():
            its[name, "exp_avg"], its[name, "exp_avg_sq"] = (piece(m[name], rank % shards, shards) for m in (first, second))
            its[name, "step"] = Shard(torch.tensor(float(seed)), (), ())
        values = {"groups": groups(step), "scheduler": {"last_epoch": seed, "_step_count": seed + 1}, "aliases": []} | small
        buffers = {"model.forwards": Shard(torch.tensor(seed), (), ())}
        made.append(
            State(label, rank, step, {n: piece(t, rank % shards, shards) for n, t in parameters.items()}, its, buffers, values)
        )
    return made


def groups(step: int, **changes: Any) -> list[dict[str, Any]]:
    matrices = {"lr": float(step), "initial_lr": 0.01, "weight_decay": 0.3, "size": 1, "names": [WEIGHT]}
    return [matrices | changes, matrices | {"weight_decay": 0.0, "names": [NORM]}]


def on(ranks: int, kind: str, **data: Any) -> list[Event]:
    return [Event(kind, rank, data) for rank in range(ranks)]


def trained(ranks: int, *steps: int, records: int = 8, batch: int = 4, **changes: Any) -> list[Event]:
    """Steps that consume `batch` records, in order and over and over, from the first step on."""
    events = []
    for step in steps:
        positions = range((step - 1) * batch, step * batch)
        for rank in range(ranks):
            data = {
                "step": step,
                "loss": 1.0 / step,
                "lr": float(step),
                "consumed": step * batch,
                "epoch": step * batch // records,
            }
            data["samples"] = [position % records for position in positions][rank::ranks]
            events.append(Event("trained", rank, data | changes))
    return events


def drew(ranks: int, seed: int = 0) -> list[Event]:
    return [Event("drew", rank, {"values": [seed + rank / 8, 0.5]}) for rank in range(ranks)]


def saves(ranks: int, step: int) -> list[Event]:
    return [*on(ranks, "save-begins", step=step), *on(ranks, "save-returns", step=step)]


def stored(ranks: int = 2, without: tuple[str, ...] = ()) -> CheckpointDirectory:
    """A checkpoint of both parameters and their moments, as `ranks` ranks write it."""
    tensors = {}
    for name, tensor in whole(0).items():
        pieces = [piece(tensor, rank, ranks) for rank in range(ranks)]
        chunks = tuple(
            (p.offset, tuple(p.local.shape), f"__{rank}_0.distcp") for rank, p in enumerate(pieces) if p.local.numel()
        )
        for key in (f"model.{name}", *(f"optimizer.state.{name}.{moment}" for moment in ("exp_avg", "exp_avg_sq"))):
            if key not in without:
                tensors[key] = StoredTensor("float32", tuple(tensor.shape), chunks)
    return CheckpointDirectory({f"__{rank}_0.distcp": 100 for rank in range(ranks)}, tensors)


# --- a chain: train 2, save, train 4 more · three resumes of a step each, of which two save · a twin --------------------


@dataclasses.dataclass
class Chain:
    """A chain of resumes over epochs of two steps that keeps every contract; a test spoils one piece of it."""

    events: list[list[Event]]
    states: list[list[State]]
    ranks: int = 2

    @classmethod
    def good(cls) -> Chain:
        def begins(number: int) -> list[Event]:
            return [Event("begins", rank, {"pid": 100 * number + rank}) for rank in range(2)]

        def after(*steps: int) -> list[State]:
            return [state for step in steps for state in states("trained", step, 2)]

        def resumed(step: int) -> list[State]:
            return [*states("built", 0, 2, seed=50 + step, moments=False), *states("resumed", step, 2), *after(step + 1)]

        return cls(
            events=[
                [*begins(0), *trained(2, 1, 2), *saves(2, 2), *drew(2), *trained(2, 3, 4, 5, 6)],
                [*begins(1), *on(2, "resume-returns", step=2), *drew(2), *trained(2, 3), *saves(2, 3)],
                [*begins(2), *trained(2, 4), *saves(2, 4)],
                [*begins(3), *trained(2, 5)],
                [*begins(4), *trained(2, 1, 2, 3, 4, 5, 6)],
            ],
            states=[
                [*after(1, 2), *states("saving", 2, 2), *after(3, 4, 5, 6)],
                [*resumed(2), *states("saving", 3, 2)],
                [*resumed(3), *states("saving", 4, 2)],
                resumed(4),
                after(1, 2, 3, 4, 5, 6),
            ],
        )

    def history(self) -> History:
        case = Case(
            generations=(
                Generation(ranks=2, steps=(Train(2), Save(), Finalize(), Draw(), Train(4))),
                Generation(ranks=2, steps=(Resume(), Draw(), Train(1), Save(), Finalize()), seed=1),
                Generation(ranks=2, steps=(Resume(), Train(1), Save(), Finalize()), seed=2),
                Generation(ranks=2, steps=(Resume(), Train(1)), seed=3),
                Generation(ranks=2, steps=(Train(6),), root="twin"),
            ),
            data=Data(records=8, global_batch=4),
        )
        return History.of(case, *self.events, states=self.states)


CHAIN_CONTRACTS = (
    "resume.chain-of-resumes", "resume.learning-rates", "resume.every-sample-once", "resume.random-streams-per-rank",
    "resume.counters", "resume.fresh-process",
)  # fmt: skip


@pytest.mark.parametrize("name", CHAIN_CONTRACTS)
def test_a_chain_of_exact_resumes_keeps(name):
    assert_kept(judge(name, Chain.good().history()))


@pytest.mark.parametrize("name", CHAIN_CONTRACTS)
def test_a_chain_in_which_nothing_was_seen_is_unknown_to(name):
    run = Chain([[] for _ in range(5)], [[] for _ in range(5)])
    # A resume without a step is what every-sample-once looks for.
    assert judge(name, run.history()).verdict == ("broken" if name == "resume.every-sample-once" else "unknown")


def test_what_is_lost_at_the_second_resume_breaks_chain_of_resumes():
    run = Chain.good()
    run.states[2][4:6] = states("trained", 4, 2, seed=99)
    assert_broken(judge("resume.chain-of-resumes", run.history()), f"resume 2, after step 4: {WEIGHT} element 0 is")


def test_a_chain_whose_twin_differs_cannot_be_judged():
    run = Chain.good()
    run.states[4][0:2] = states("trained", 1, 2, seed=99)
    judgement = judge("resume.chain-of-resumes", run.history())
    assert judgement.verdict == "unknown"
    assert "cannot judge: two fault-free runs differ after step 1" in judgement.message


def test_a_rate_that_warms_up_again_breaks_learning_rates():
    run = Chain.good()
    run.events[2] = [*trained(2, 4, lr=0.5), *saves(2, 4)]
    assert_broken(judge("resume.learning-rates", run.history()), "resume 2, rank 0: step 4 used rate 0.5, uninterrupted 4.0")


def test_another_initial_rate_breaks_learning_rates():
    run = Chain.good()
    for state in run.states[1]:
        if state.label == "trained":
            state.small["groups"][0]["initial_lr"] = 0.002
    assert_broken(
        judge("resume.learning-rates", run.history()), "initial_lr of group 0 is 0.002 after step 3, uninterrupted 0.01"
    )


def test_samples_that_come_again_break_every_sample_once():
    run = Chain.good()
    run.events[2] = [*trained(2, 3), *saves(2, 3)]  # the first half of the epoch that the resume before it was in
    for event in run.events[2]:
        event.data["step"] = 4
    assert_broken(
        judge("resume.every-sample-once", run.history()),
        "after step 4, in generation 2, 16 samples of 8 have been consumed:"
        " sample 0 was seen 3 times; sample 1 was seen 3 times",
        "8 of 8 samples lost or repeated",
    )


def test_a_resume_that_takes_no_step_breaks_every_sample_once():
    run = Chain.good()
    run.events[3] = []
    assert_broken(judge("resume.every-sample-once", run.history()), "rank 0 trained 0 steps after the resume, asked for 1")


def test_one_stream_for_all_ranks_breaks_random_streams_per_rank():
    run = Chain.good()
    run.events[1] = [Event("drew", rank, {"values": [0.0, 0.5]}) for rank in range(2)]
    assert_broken(
        judge("resume.random-streams-per-rank", run.history()),
        "rank 1 drew [0.0000, 0.5000, …] after the resume, its own stream goes on with [0.1250, 0.5000, …]",
        "(and 1 more)",
    )


def test_a_step_that_is_counted_anew_breaks_counters():
    run = Chain.good()
    run.states[2][2:4] = [dataclasses.replace(state, step=0) for state in states("resumed", 3, 2)]
    assert_broken(judge("resume.counters", run.history()), "rank 0 is at step 0 after the resume, saved at step 3")


def test_a_scheduler_and_an_optimizer_that_count_anew_break_counters():
    run = Chain.good()
    run.states[1][2:4] = states("resumed", 2, 2, seed=1)
    assert_broken(
        judge("resume.counters", run.history()), "rank 0: last_epoch of the scheduler is 1 after the resume, saved as 2"
    )


def test_an_epoch_that_is_forgotten_breaks_counters():
    run = Chain.good()
    run.events[1] = [*trained(2, 3, epoch=0), *saves(2, 3)]
    assert_broken(judge("resume.counters", run.history()), "resume 1, rank 0: epoch is 0 after step 3, uninterrupted 1")


def test_a_process_that_lives_on_breaks_fresh_process():
    run = Chain.good()
    run.events[1][0] = Event("begins", 0, {"pid": 1})
    assert_broken(judge("resume.fresh-process", run.history()), "rank 0 of generation 1 is process 1, which ran generation 0")


def test_a_build_that_loads_breaks_fresh_process():
    run = Chain.good()
    run.states[1][0:2] = states("built", 0, 2, seed=2, moments=False)
    assert_broken(
        judge("resume.fresh-process", run.history()), f"{WEIGHT} holds its values of step 2 before the resume has begun"
    )


# --- one resume: groups, ties, buffers ---------------------------------------------------------------------------------

ODD = Case(
    generations=(
        Generation(ranks=2, steps=(Train(1), Retune(), Train(1), Save(), Finalize())),
        Generation(ranks=2, steps=(Resume(), Train(1)), seed=1),
    ),
    model=Model(architecture="odd"),
)


def odd(
    resumed: list[State] | None = None, saving: list[State] | None = None, disk: CheckpointDirectory | None = None
) -> History:
    saving = states("saving", 2, 2) if saving is None else saving
    resumed = states("resumed", 2, 2) if resumed is None else resumed
    return History.of(ODD, [], [], states=[saving, resumed], disk=[{"step_2": disk or stored()}, {}])


ODD_CONTRACTS = ("resume.param-groups", "resume.tied-weights", "resume.buffers")


@pytest.mark.parametrize("name", ODD_CONTRACTS)
def test_an_exact_resume_of_an_odd_model_keeps(name):
    assert_kept(judge(name, odd()))


@pytest.mark.parametrize("name", ODD_CONTRACTS)
def test_a_resume_of_which_there_is_no_state_is_unknown_to(name):
    assert judge(name, odd(resumed=[])).verdict == "unknown"


def test_a_setting_from_the_configuration_breaks_param_groups():
    resumed = states("resumed", 2, 2, groups=groups(2, weight_decay=0.1))
    assert_broken(
        judge("resume.param-groups", odd(resumed)), "rank 0: weight_decay of group 0 is 0.1 after the resume, saved as 0.3"
    )


def test_groups_whose_parameters_are_exchanged_break_param_groups():
    resumed = states("resumed", 2, 2, groups=groups(2, names=[NORM]))
    assert_broken(
        judge("resume.param-groups", odd(resumed)), f"names of group 0 is ['{NORM}'] after the resume, saved as ['{WEIGHT}']"
    )


def test_a_group_that_is_gone_breaks_param_groups():
    assert_broken(
        judge("resume.param-groups", odd(states("resumed", 2, 2, groups=groups(2)[:1]))),
        "1 groups after the resume, 2 were saved",
    )


def test_a_tie_that_is_lost_breaks_tied_weights():
    tied = states("saving", 2, 2, aliases=[[WEIGHT, "output.weight"]])
    assert_broken(
        judge("resume.tied-weights", odd(saving=tied)),
        f"rank 0: nothing is tied after the resume, {WEIGHT} = output.weight when it was saved",
    )


def test_a_name_that_is_left_out_breaks_tied_weights_unless_its_alias_is_there():
    disk = stored(without=(f"model.{NORM}",))
    assert_broken(judge("resume.tied-weights", odd(disk=disk)), f"step_2 has no {NORM}, which shares its storage with nothing")
    shared = {"aliases": [[NORM, WEIGHT]]}
    assert_kept(judge("resume.tied-weights", odd(states("resumed", 2, 2, **shared), states("saving", 2, 2, **shared), disk)))


def test_a_buffer_of_another_value_breaks_buffers():
    resumed = states("resumed", 2, 2)
    resumed[1].buffers["model.forwards"] = Shard(torch.tensor(0), (), ())
    assert_broken(
        judge("resume.buffers", odd(resumed)),
        "rank 1: buffers at step 2 after the resume: model.forwards element 0 is 0, expected 2",
    )


# --- frozen and unused parameters --------------------------------------------------------------------------------------


def partly(
    resumed: list[State] | None = None, after: list[State] | None = None, idle: tuple[str, ...] = (NORM,), frozen=None
) -> History:
    """Train 1, save, train 1 more · resume, train the same · a twin."""
    case = Case(
        generations=(
            Generation(ranks=2, steps=(Train(1), Save(), Finalize(), Train(1))),
            Generation(ranks=2, steps=(Resume(), Train(1)), seed=1, frozen=frozen),
            Generation(ranks=2, steps=(Train(2),), root="twin"),
        ),
        model=Model(frozen="norm" if idle else ""),
    )
    one, two = states("trained", 1, 2, idle=idle), states("trained", 2, 2, idle=idle)
    saving = states("saving", 1, 2, idle=idle)
    resumed = states("resumed", 1, 2, idle=idle) if resumed is None else resumed
    again = [*resumed, *(two if after is None else after)]
    return History.of(case, [], [], [], states=[[*one, *saving, *two], again, [*one, *two]])


def test_an_exact_resume_keeps_frozen_and_unused():
    assert_kept(judge("resume.frozen-and-unused", partly()))


def test_state_that_was_invented_breaks_frozen_and_unused():
    resumed = states("resumed", 1, 2, idle=(NORM,))
    for state in resumed:
        state.moments[NORM, "exp_avg"] = piece(torch.zeros(3), state.rank, 2)
    assert_broken(judge("resume.frozen-and-unused", partly(resumed)), f"state at step 1: exp_avg of {NORM} is unexpected")


def test_room_that_the_save_made_for_what_is_frozen_keeps_frozen_and_unused():
    history = partly()
    for state in history.generations[0].snapshot("trained", 2).ranks:
        state.moments[NORM, "exp_avg"] = piece(torch.zeros(3), state.rank, 2)
    assert_kept(judge("resume.frozen-and-unused", history))


def test_a_frozen_parameter_that_moves_breaks_frozen_and_unused():
    assert_broken(
        judge("resume.frozen-and-unused", partly(after=states("trained", 2, 2))),
        f"what does not train, after step 2: {NORM} element 0 is",
    )


def test_a_run_in_which_everything_trains_is_unknown_to_frozen_and_unused():
    assert judge("resume.frozen-and-unused", partly(idle=())).verdict == "unknown"


def test_what_is_frozen_only_after_the_resume_has_to_stay_as_it_was_saved():
    assert_broken(
        judge("resume.frozen-and-unused", partly(idle=(), frozen="norm")),
        f"what is frozen now, after step 2: {NORM} element 0 is",
    )


def test_what_is_frozen_no_more_has_to_move():
    history = partly(frozen="layers", after=states("trained", 2, 2, idle=(NORM,)))
    assert (
        "model.norm.weight is not frozen now, and is what it was at step 1 after step 2"
        in judge("resume.frozen-and-unused", history).failures
    )


# --- another world: train 1, save, train 1 more on 2 · resume, train 1, save on 4 · resume on 2 · a twin of the first ---


@dataclasses.dataclass
class Resharded:
    """A run that goes from 2 to 4 to 2 ranks and keeps every contract."""

    loss: float = 0.5
    resumed: list[State] = dataclasses.field(default_factory=lambda: states("resumed", 1, 4))
    last: int = 2
    draws: list[Event] = dataclasses.field(default_factory=lambda: drew(4, 5))
    middle: list[Event] = dataclasses.field(default_factory=lambda: trained(4, 2))
    disk: CheckpointDirectory = dataclasses.field(default_factory=lambda: stored(4))
    mesh: tuple[int, ...] = ()

    def history(self) -> History:
        case = Case(
            generations=(
                Generation(ranks=2, steps=(Train(1), Save(), Finalize(), Draw(), Train(1))),
                Generation(ranks=4, mesh=self.mesh, steps=(Resume(), Draw(), Train(1), Save(), Finalize()), seed=1),
                Generation(ranks=2, steps=(Resume(), Train(1)), seed=2),
                Generation(ranks=2, steps=(Train(2),), root="twin"),
            ),
            data=Data(records=8, global_batch=4),
        )
        for event in self.middle:
            event.data["loss"] = self.loss
        first = [*trained(2, 1), *saves(2, 1), *drew(2), *trained(2, 2)]
        middle = [*on(4, "resume-returns", step=1), *self.draws, *self.middle, *saves(4, 2)]
        last = [*on(2, "resume-returns", step=self.last), *trained(2, 3)]
        one, two = states("trained", 1, 2), states("trained", 2, 2)
        return History.of(
            case, first, middle, last, trained(2, 1, 2),
            states=[
                [*one, *states("saving", 1, 2), *two],
                [*self.resumed, *states("trained", 2, 4, mesh=self.mesh), *states("saving", 2, 4, mesh=self.mesh)],
                states("resumed", 2, 2, seed=self.last),
                [*one, *two],
            ],
            disk=[{"step_1": stored()}, {"step_1": stored(), "step_2": self.disk}, {}, {}],
        )  # fmt: skip


RESHARD_CONTRACTS = (
    "reshard.values-across-worlds", "reshard.shards-tile-exactly-once", "reshard.new-ranks-new-streams",
    "reshard.samples-across-worlds", "reshard.newest-on-every-rank",
)  # fmt: skip


@pytest.mark.parametrize("name", RESHARD_CONTRACTS)
def test_a_run_through_three_worlds_keeps(name):
    assert_kept(judge(name, Resharded().history()))


@pytest.mark.parametrize("name", RESHARD_CONTRACTS)
def test_a_run_through_three_worlds_in_which_nothing_was_seen_is_unknown_to(name):
    case = Resharded().history().case
    assert judge(name, History.of(case, [], [], [], [])).verdict == "unknown"


def test_another_moment_on_another_world_breaks_values_across_worlds():
    run = Resharded()
    run.resumed[3].moments[NORM, "step"] = run.resumed[3].moments[NORM, "step"]
    run.resumed[0].moments[WEIGHT, "exp_avg"].local.zero_()
    assert_broken(
        judge("reshard.values-across-worlds", run.history()),
        f"2 → 4: state at step 1: exp_avg of {WEIGHT} element 0 is 0.0, expected",
    )


def test_a_loss_beyond_the_tolerance_breaks_values_across_worlds_and_one_within_it_does_not():
    assert_broken(
        judge("reshard.values-across-worlds", Resharded(loss=0.51).history()),
        "2 → 4: loss of step 2 is 0.51, uninterrupted 0.5",
    )
    assert_kept(judge("reshard.values-across-worlds", Resharded(loss=0.50001).history()))


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([((0,), (2,)), ((3,), (2,))], "has 5 elements and its pieces hold 4"),
        ([((0,), (3,)), ((2,), (3,))], "is stored twice: pieces of [3] at [0] and of [3] at [2] overlap"),
        ([((0,), (3,)), ((3,), (3,))], "has a piece of [3] at [3], outside of [5]"),
    ],
)
def test_pieces_that_do_not_tile_break_shards_tile_exactly_once(chunks, words):
    run = Resharded()
    run.disk.tensors["model.odd"] = StoredTensor("float32", (5,), tuple((*chunk, "__0_0.distcp") for chunk in chunks))
    assert_broken(
        judge("reshard.shards-tile-exactly-once", run.history()), f"step_2 in generation 1, 4 ranks: model.odd {words}"
    )


def test_an_empty_piece_keeps_shards_tile_exactly_once():
    run = Resharded()
    run.disk.tensors["model.odd"] = StoredTensor("float32", (1,), (((0,), (1,), "a"), ((1,), (0,), "b")))
    assert_kept(judge("reshard.shards-tile-exactly-once", run.history()))


def test_new_ranks_that_draw_alike_break_new_ranks_new_streams():
    run = Resharded(draws=[*drew(2), *(Event("drew", rank, {"values": [0.9, 0.5]}) for rank in (2, 3))])
    assert_broken(judge("reshard.new-ranks-new-streams", run.history()), "ranks 2 and 3 drew the same numbers after the resume")


def test_a_new_rank_that_draws_what_another_drew_before_breaks_new_ranks_new_streams():
    run = Resharded()
    run.draws[2] = Event("drew", 2, {"values": [0.0, 0.5]})
    assert_broken(
        judge("reshard.new-ranks-new-streams", run.history()),
        "rank 2, new among 4, draws what rank 0 of 2 drew before the change",
    )


def test_samples_that_are_skipped_break_samples_across_worlds():
    middle = trained(4, 3)  # the next epoch's first half, in place of this one's second
    for event in middle:
        event.data["step"] = 2
    assert_broken(
        judge("reshard.samples-across-worlds", Resharded(middle=middle).history()),
        "after step 2, in generation 1, 8 samples of 8 have been consumed: sample 0 was seen 2 times",
    )


def test_an_older_save_breaks_newest_on_every_rank():
    assert_broken(
        judge("reshard.newest-on-every-rank", Resharded(last=1).history()),
        "rank 0 of 2 resumed step 1, the newest save is of step 2",
        "(and 3 more)",
    )


def hybrid(**changes: Any) -> History:
    return Resharded(mesh=(2, 2), **{"resumed": states("resumed", 1, 4, mesh=(2, 2))} | changes).history()


def test_a_run_through_hybrid_sharding_keeps_mesh_change():
    assert_kept(judge("reshard.mesh-change", hybrid()))


def test_a_replica_with_other_bits_breaks_mesh_change():
    resumed = states("resumed", 1, 4, mesh=(2, 2))
    resumed[3].moments[WEIGHT, "exp_avg"].local.zero_()
    assert_broken(
        judge("reshard.mesh-change", hybrid(resumed=resumed)),
        f"exp_avg of {WEIGHT} differs between ranks 1 and 3, which hold the same piece, when resumed at step 1",
    )


def test_a_mesh_that_is_not_hybrid_breaks_mesh_change():
    assert_broken(
        judge("reshard.mesh-change", hybrid(resumed=states("resumed", 1, 4))),
        f"{WEIGHT} has 1 copies of a piece on 4 ranks of a 2 × 2 mesh",
    )


def test_a_run_without_a_mesh_and_without_states_is_unknown_to_mesh_change():
    case = Resharded().history().case
    assert judge("reshard.mesh-change", History.of(case, [], [], [], [])).verdict == "unknown"


# --- what is drawn -----------------------------------------------------------------------------------------------------

KINDS = (CONTINUED_RUNS, ODD_RUNS, REGROUPED_RUNS, PARTLY_TRAINED_RUNS, RESHARDED_RUNS, MESH_CHANGES)


def drawn(kind: Cases, ranks: int, with_seed: int = 0) -> list[Case]:
    return kind.draw(ranks, Scope(frozenset(Capability)), 4, with_seed)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_case_goes_to_json_and_back_fills_its_world_and_divides_its_batch(kind, ranks):
    cases = drawn(kind, ranks)
    assert cases
    for case in cases:
        assert Case.from_json(case.to_json()) == case
        assert max(case.worlds) == ranks
        assert all(case.data.global_batch % (world * case.optimizer.accumulation) == 0 for world in case.worlds)


@pytest.mark.parametrize("with_seed", range(3))
def test_worlds_grow_and_shrink_and_come_back_within_the_ci_profile(with_seed):
    chains = [tuple(g.ranks for g in case.generations if g.root == "run") for case in drawn(RESHARDED_RUNS, 4, with_seed)]
    assert {(4, 2, 4), (2, 4, 2), (2, 4, 1, 2)} <= set(chains)


def test_a_single_rank_has_no_other_world_and_no_mesh():
    assert drawn(RESHARDED_RUNS, 1) == drawn(MESH_CHANGES, 1) == []


def test_a_mesh_of_four_ranks_replicates_and_shards():
    assert {g.mesh for case in drawn(MESH_CHANGES, 4) for g in case.generations} == {(), (2, 2)}


def test_a_chain_saves_at_the_end_of_an_epoch_and_in_the_middle_of_a_later_one():
    consumed = [
        case.generations[0].steps[0].steps * case.data.global_batch / case.data.records for case in drawn(CONTINUED_RUNS, 2)
    ]
    assert 1.0 in consumed
    assert any(epochs > 1 and epochs % 1 for epochs in consumed)


def test_frozen_unused_and_tied_parameters_are_all_tried():
    models = [case.model for case in drawn(PARTLY_TRAINED_RUNS, 2)]
    assert any(model.unused for model in models)
    assert any(model.frozen for model in models)
    assert any(g.frozen is not None for case in drawn(PARTLY_TRAINED_RUNS, 2) for g in case.generations)
    assert {case.model.tied for case in drawn(ODD_RUNS, 2)} == {"no", "shared", "declared"}


class AnyStack:
    """A lab that runs nothing: a stack that can do everything, of which every history is empty."""

    def about(self, name: str) -> dict[str, Any]:
        return {"layout": {**vars(Layout()), "companions": []}, "capabilities": list(Capability)}

    def run(self, case: Case, name: str) -> History:
        return History.of(case, *[[] for _ in case.generations])


def test_a_smaller_case_is_looked_for_in_worlds_that_have_one(tmp_path):
    suite = Suite(Target("any", "any:Stack"), profile=PROFILES["ci"], worlds=(1, 2), lab=AnyStack(), directory=tmp_path)
    assert not RESHARDED_RUNS.corners(1, suite.scope)
    reshard = REGISTRY["reshard.values-across-worlds"]
    broken = max(suite.cases(reshard.cases), key=lambda case: len(str(case)))
    always = dataclasses.replace(reshard, judge=lambda history, check: check(False, "broken"))
    found = suite.shrink(always, broken, seconds=60)
    assert max(found.worlds) == 2 and len(str(found)) < len(str(broken))
    never = dataclasses.replace(reshard, judge=lambda history, check: check(True, "kept"))
    assert suite.shrink(never, broken, seconds=60) is broken
