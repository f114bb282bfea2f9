"""Every registered gradient sync keeps every claim, at every world size; and each known mistake is caught and named."""

import pytest
from mutants import MUTANTS

from cos598d.check import claims as conformance
from cos598d.check import ranks
from cos598d.check.causes import causes_of
from cos598d.check.claims.base import Claim, World
from cos598d.check.judge import FAILED, PASSED, judge_claims
from cos598d.check.spawn import run_world
from cos598d.check.trace import trace_direct_calls
from cos598d.sync import SYNCS, get_sync

NONCE = 598  # in a check it is drawn anew each time


def try_mutant(comm, name, claims, nonce):
    """On a rank: what `ranks.observe_by_name` does, for a mutant."""
    direct = []
    trace_direct_calls(direct.append)
    ranks.observe(comm, MUTANTS[name].make(), claims, nonce, direct)


def outcomes(world_size, function, name, claims):
    """By claim, what became of it on a world of that size; all in one world."""
    ends = run_world(world_size, function, name, claims, NONCE, seconds=120)
    tried = [claim for claim in conformance.CLAIMS if claim.name in claims]
    found = judge_claims(tried, ends, NONCE, "", 120)
    return {claim.name: each for claim, each in zip(tried, found, strict=True)}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SYNCS)
def test_sync_keeps_every_claim(name, world_size):
    # Without a sync only a single rank has the global average; more ranks share no more than their first state.
    claims = [claim.name for claim in conformance.claims_of(get_sync(name))]
    if name == "none" and world_size > 1:
        claims = ["starts_from_rank_0", "refuses_different_models"]
    found = outcomes(world_size, ranks.observe_by_name, name, claims)
    assert {claim: (each.status, list(each.reports)) for claim, each in found.items()} == dict.fromkeys(
        claims, (PASSED, [])
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught_by_its_claim_and_its_cause_is_named(name):
    mutant = MUTANTS[name]
    found = [outcomes(size, try_mutant, name, [mutant.claim])[mutant.claim] for size in mutant.world_sizes]
    assert PASSED not in [each.status for each in found]
    said = " ".join(report["message"] for each in found for report in each.reports)
    assert mutant.says in said, said
    (cause,) = causes_of([(mutant.claim, found)], "")
    assert mutant.cause in cause["cause"], cause["cause"]


def test_on_one_rank_the_order_of_clipping_does_not_matter():
    """So the mutant above is caught for its order, and for nothing else."""
    found = outcomes(1, try_mutant, "clip before sync, in the loop", ["trains_like_one_process"])
    assert [each.status for each in found.values()] == [PASSED], found


def test_no_sync_on_two_ranks_is_caught():
    found = outcomes(2, ranks.observe_by_name, "none", ["averages_gradients"])["averages_gradients"]
    assert found.status == FAILED
    assert "off the mean over ranks" in found.reports[0]["message"]


def test_a_claim_without_its_judgement_is_never_kept():
    with pytest.raises(AttributeError):
        Claim(lambda on: None).judge(World("", NONCE, []))
