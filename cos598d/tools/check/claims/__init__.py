"""The requirements for every gradient sync, as claims that run on real ranks. Each exists because of a real mistake.

A claim has two sides. The first drives the sync on every rank and hands in the results: gradients, weights, counts. The
second runs in the grader's own process, where no student's code runs. It computes the right results itself, from the
trial's nonce, and reports what was expected and found. So a sync passes by its values, not by what it reports.
"""

from cos598d.errors import UsageError
from cos598d.sync.base import GradientSync
from cos598d.tools.check.claims.base import Claim
from cos598d.tools.check.claims.calls import (
    calls_in_one_order,
    goes_through_comm,
    lets_go,
    refuses_different_models,
    starts_from_rank_0,
    waits_for_its_calls,
)
from cos598d.tools.check.claims.drawn import (
    averages_any_tensors,
    averages_many_steps,
    goes_on_from_its_state,
    passes_overflow_on,
)
from cos598d.tools.check.claims.gradients import (
    accumulates,
    accumulates_without_no_sync,
    averages_gradients,
    averages_gradients_that_share_memory,
    handles_unused_parameters,
    leaves_frozen_weights_alone,
    needs_no_agreement,
)
from cos598d.tools.check.claims.holding import frees_memory, keeps_models_apart, settles_buffers
from cos598d.tools.check.claims.training import trains_like_one_process

CLAIMS: tuple[Claim, ...] = (
    starts_from_rank_0,
    averages_gradients,
    handles_unused_parameters,
    needs_no_agreement,
    leaves_frozen_weights_alone,
    averages_gradients_that_share_memory,
    accumulates,
    accumulates_without_no_sync,
    waits_for_its_calls,
    goes_through_comm,
    calls_in_one_order,
    refuses_different_models,
    lets_go,
    averages_any_tensors,
    averages_many_steps,
    passes_overflow_on,
    goes_on_from_its_state,
    keeps_models_apart,
    settles_buffers,
    frees_memory,
    trains_like_one_process,
)


def claims_of(sync: type[GradientSync]) -> tuple[Claim, ...]:
    """The claims that a registered sync makes: all, or with `exact = False` those that its `claims` names."""
    if sync.exact:
        return CLAIMS
    unknown = set(sync.claims) - {claim.name for claim in CLAIMS}
    if unknown:
        raise UsageError(f"{sync.__name__} claims {min(unknown)}, which is no test of cos598d.tools.check.claims.")
    return tuple(claim for claim in CLAIMS if claim.name in sync.claims)
