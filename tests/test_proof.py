"""Contracts can fail: a mutant of each dies by it, good neighbours live. `make prove` shows every mutant."""

import itertools

import pytest

from contracts.catalog import __all__ as families
from contracts.judging import REGISTRY
from contracts.lab.lab import Lab
from contracts.proof import judge_mutant, judge_neighbour
from contracts.suite import select
from reference_impl.mutants import MUTANTS, NEIGHBOURS


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("proof")


@pytest.fixture(scope="module")
def lab(directory):
    # Some mutants hang; a sound generation takes a second or two.
    with Lab("reference_impl.under_contract:Reference", directory=directory, deadline=15) as lab:
        yield lab


ONE_OF_EACH = {mutant.caught_by: name for name, mutant in reversed(MUTANTS.items())}
"""The first mutant of each contract."""


@pytest.mark.parametrize("name", ONE_OF_EACH.values(), ids=list(ONE_OF_EACH))
def test_a_mutant_is_caught_by_the_contract_it_names(name, lab, directory):
    mutant = MUTANTS[name]
    seen = judge_mutant(name, mutant.implementation, mutant.caught_by, lab, directory)
    assert seen.ok, f"{mutant.caught_by} did not catch it; {', '.join(seen.killed_by) or 'nothing'} did: {seen.message}"
    assert seen.message


NEAR = {
    "LoadsTheOptimizerTwice": ("order.params-*", "order.scheduler-*", "precision.moments-*", "resume.trajectory"),
    "UnfusedAdamW": ("precision.moments-*", "resume.trajectory"),
    "WritesCompanionsInTwoGoes": ("writers.replicated-*", "writers.visible-*"),
    "FinalizesSlowly": ("publish.finalize-before-*", "publish.published-*"),
    "InstallsItsRulesTwice": ("keys.*",),
    "FlushesInItsOwnOrder": ("crash.power-loss",),
    "EveryRankHasASay": ("writers.no-local-*",),
    "RefusesInItsOwnWords": ("precision.master-dtype-*", "order.drift-*"),
}
"""The contracts that each of these comes closest to breaking; `make prove` judges every neighbour by all of them."""

ALSO_NEAR = {
    "AveragesWholeGradientsAtOnce": ("reshard.whole-*",),
    "CastsBeforeEveryStep": ("precision.params-*",),
    "CompilesInsideRecomputation": ("resume.wrappers-*",),
    "KeepsItsPlaceInAnEpoch": ("resume.counters", "resume.every-*", "reshard.samples-*"),
    "KeepsStreamsInFiles": ("resume.random-*", "order.loading-leaves-random-*", "reshard.new-*"),
    "LoadsThroughDCPsStateDict": ("order.fresh-*", "order.pending-*"),
    "MakesItsScalerAnew": ("order.loading-leaves-small-*",),
    "MakesStateInItsFirstSave": ("order.saving-*",),
    "MakesStateWhenItIsBuilt": ("order.saving-*", "resume.fresh-*", "resume.frozen-*", "precision.declared-*"),
    "NamesStateItsOwnWay": (
        *("precision.moments-*", "precision.small-*", "precision.masters-*", "precision.no-stale-*", "precision.step-*"),
        "publish.published-is-whole",
    ),
    "OneGroupPerParameter": ("resume.param-*", "resume.learning-*"),
    "RebuildsTheScheduler": ("order.scheduler-*", "resume.learning-*", "resume.chain-*", "reshard.newest-*"),
    "RecomputesActivations": ("resume.trajectory", "resume.wrappers-*"),
    "RecomputesBuffers": ("resume.buffers",),
    "ReducesItsMetricsToo": ("precision.reduction-*",),
    "RefusesInItsOwnWords": ("precision.no-silent-*",),
    "StoresPlainShards": ("reshard.shards-*", "reshard.values-*", "reshard.mesh-*", "resume.tied-*"),
    "TakesSlicesFromTheEnd": ("resume.every-*", "reshard.samples-*"),
    "OpensItsShardsAtOnce": ("publish.save-returns-*",),
    "PointsWithAFile": ("retention.one-whole-*", "retention.latest-*"),
    "PrefersTheOlderOfEqualOnes": ("retention.latest-and-*",),
    "PrunesBeforeItReturns": ("retention.*", "publish.finalize-is-*"),
    "PublishesInTwoPhases": ("publish.finalize-before-*", "publish.saves-*", "writers.one-publisher"),
    "RefusesADamagedCheckpoint": ("crash.torn-*", "crash.bit-*"),
    "RenamesItsCompanions": ("writers.replicated-*", "writers.visible-*", "writers.one-writer-*"),
    "SavesBesideLeftovers": ("crash.stale-*", "crash.every-*", "retention.incomplete-*"),
    "VerifiesOnlyWhatItLoads": ("crash.torn-*",),
}
"""More of them, left to `make prove`: which contract each is there for."""


def test_every_contract_about_state_has_a_good_neighbour_near_it():
    state = {contract.name for contract in select(("precision.*", "order.*", "resume.*", "reshard.*"))}
    near = [*itertools.chain(*NEAR.values(), *ALSO_NEAR.values())]
    assert state <= {contract.name for contract in select(near)}
    assert NEAR.keys() | ALSO_NEAR.keys() <= NEIGHBOURS.keys()


@pytest.mark.parametrize("name", NEAR)
def test_a_good_neighbour_is_left_alone(name, lab, directory):
    seen = judge_neighbour(name, NEIGHBOURS[name], lab, directory, globs=NEAR[name])
    assert seen.ok, seen.message


def test_every_contract_has_a_mutant():
    assert set(REGISTRY) == {mutant.caught_by for mutant in MUTANTS.values()}


def test_every_family_is_in_the_catalogue():
    assert {contract.family for contract in REGISTRY.values()} == set(families)
