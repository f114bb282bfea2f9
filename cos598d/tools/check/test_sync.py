"""What every gradient sync must do. Each test exists because of a real mistake.

A test has two parts: `drive_...` runs on every rank, where the file's code runs, and returns what came out; `judge_...`
runs in the parent, and computes what is right from the seed.
"""

import torch
from torch import nn

from cos598d.comm.ledger import Ledger
from cos598d.errors import UserError
from cos598d.tools.check.drawn import many_steps, models, overflowing
from cos598d.tools.check.driving import BUCKETS, Run, Step, drive, hooks_of, noted, whole_state, wrap
from cos598d.tools.check.judging import are_means, payload_of
from cos598d.tools.check.of_drawn import do_not_drift, drive_drawn, judge_drawn
from cos598d.tools.check.training import drive_training, judge_training
from cos598d.tools.exam.explain import is_wrong
from cos598d.tools.exam.models import LARGE, SMALL, WIDTH, Shape, gradients_of, local_batch, own_gradients, toy_model

FEW, MORE = 2, 9
ALL_USED, SHARING = Shape(all_used=True), Shape(shares_gradients=True)
MORE_FROZEN = Shape(is_tied=False, more_frozen=1_013)
SECONDS = 30.0
PLAIN = tuple(Step((number,)) for number in range(MORE))


def with_buckets(steps: tuple[Step, ...], **about: Shape) -> list[Run]:
    """The same steps for each way of cutting buckets."""
    return [Run(steps, label, options=options, **about) for label, options in BUCKETS.items()]


def test_starts_from_rank_0(sync, seed, n):
    """Once wrapped, every parameter (frozen ones too) and every buffer has rank 0's values, on every rank."""
    judge_start(sync(n, drive_start, seed), seed)


def drive_start(comm, module, name, seed):
    model = toy_model(seed + comm.rank)
    model.register_buffer("kept_back", torch.full((3,), float(comm.rank)), persistent=False)
    wrap(name, model)
    return whole_state(model)


def judge_start(world, seed):
    model = toy_model(seed)
    model.register_buffer("kept_back", torch.zeros(3), persistent=False)
    for what, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for tensor_name, right in named:
            for rank, value in enumerate(world.values):
                is_same = torch.equal(value[tensor_name], right)
                words = f"the {what} {tensor_name} differs from rank 0's after attach, on rank {rank}"
                world.require(is_same, f"{words}: send rank 0's to all ranks there", rank)


# Of the last ones autograd keeps two gradients in one memory, and needs it later in backward.
AVERAGING = [Run(PLAIN), Run(PLAIN[:FEW], "with long tensors", LARGE), *with_buckets(PLAIN[:FEW])[1:]]
AVERAGING += with_buckets(PLAIN[:FEW], shape=SHARING)


def test_averages_gradients(sync, seed, n):
    """After backward .grad is the mean of all ranks' gradients on every rank, step after step; no weight changes."""
    are_means(sync(n, drive, seed, AVERAGING, seconds=SECONDS), seed, AVERAGING)


def unused(n: int) -> list[Run]:
    """Steps in which only the first rank uses the layer `sometimes`, only the last, and none."""
    users: tuple[frozenset[int], ...] = (frozenset({0}), frozenset({n - 1}), frozenset())
    return with_buckets(tuple(Step((number,), users=those) for number, those in enumerate(users)))


def test_handles_unused_parameters(sync, seed, n):
    """A parameter that no rank used keeps .grad None; one that some used gets the mean, the others counting as 0."""
    are_means(sync(n, drive, seed, unused(n), seconds=SECONDS), seed, unused(n))


AGREED = [Run(PLAIN[:FEW], shape=ALL_USED, options={"find_unused_parameters": False})]


def test_needs_no_agreement(sync, seed, n):
    """With find_unused_parameters=False it sends nothing to agree on what was used; and a parameter without a gradient
    is an error."""
    world = sync(n, drive, seed, AGREED)
    are_means(world, seed, AGREED)
    judge_agreement(world)
    judge_missing(sync(n, drive_missing, seed))


def judge_agreement(world):
    for rank, (value,) in enumerate(world.values):
        calls = value["calls to agree"]
        words = f"rank {rank} made {calls} calls to agree on which parameters were used, with find_unused_parameters="
        world.require(not calls, f"{words}False: expected none", rank)


def drive_missing(comm, module, name, seed):
    """The exception of a step that leaves a parameter unused, or of the next forward."""
    model = toy_model(seed, ALL_USED)
    model.left_out = nn.Parameter(torch.ones(3))
    wrapped = wrap(name, model, find_unused_parameters=False)
    try:
        for step in range(FEW):
            wrapped(**local_batch(comm.rank, step, True, seed))[0].backward()
    except Exception as error:
        return type(error).__name__
    return ""


def judge_missing(world):
    for rank, raised in enumerate(world.values):
        words = "with find_unused_parameters=False a parameter without a gradient is no error: the ranks would part"
        world.require(bool(raised), f"{words} silently where another rank has one. Call self.agree(...)", rank)


def test_leaves_frozen_weights_alone(sync, seed, n):
    """A frozen weight gets no gradient and is not sent; a weight used in two places is sent once."""
    judge_frozen(sync(n, drive, seed, FROZEN))


# Both train the same tensors; only one ties them, and only the other has many frozen ones.
FROZEN = [Run(PLAIN[:1], "tied", SMALL), Run(PLAIN[:1], "with more frozen", MORE_FROZEN)]


def judge_frozen(world):
    for rank, values in enumerate(world.values):
        for run, value in zip(FROZEN, values, strict=True):
            for name, p in toy_model(0, run.shape).named_parameters():
                is_left = p.requires_grad or value["grads"][0][name] is None
                world.require(is_left, f"the frozen {name} has a gradient on rank {rank}", rank)
        once, other = (value["payload"] for value in values)
        why = "frozen weights are sent" if other > once else "a weight that is used in two places is sent twice"
        words = f"rank {rank} sent {once} bytes of a model with a tied weight, {other} of one with the same to train"
        world.require(once == other, f"{words} and more that is frozen: {why}", rank)


ACCUMULATED = with_buckets((Step((0, 1), within=True), Step((2, 3, 4), within=True)))


def test_accumulates(sync, seed, n):
    """Within no_sync nothing is sent; the next backward gives the mean of the gradients summed over micro-batches."""
    world = sync(n, drive, seed, ACCUMULATED, seconds=SECONDS)
    judge_no_sync(world)
    are_means(world, seed, ACCUMULATED)


def judge_no_sync(world):
    for rank, values in enumerate(world.values):
        for value in filter(None, values):
            calls = value["calls within no_sync"]
            world.require(not calls, f"rank {rank} made {calls} calls in backwards within no_sync: expected none", rank)


def test_waits_for_its_calls(sync, seed, n):
    """When backward returns, no call is still running: each that was started has been waited for."""
    sync(n, drive, seed, [Run(PLAIN[:FEW])])  # which raises Wrong for a call that nobody waits for


ONE_STEP = [Run(PLAIN[:1])]


def test_goes_through_comm(sync, seed, n):
    """Ranks reach each other by torch.distributed, and send all of the gradients' bytes there."""
    judge_payload(sync(n, drive, seed, ONE_STEP), seed)


def judge_payload(world, seed):
    right = payload_of(seed, world.size)
    for rank, (value,) in enumerate(world.values):
        words = f"rank {rank} sent {value['payload']} bytes by torch.distributed for {right} bytes of gradients"
        world.require(value["payload"] >= right or world.size == 1, words, rank)


UNEVEN = [Run((Step((0,), users=frozenset({0})), Step((1,), users=frozenset({0}))))]


def test_calls_in_one_order(sync, seed, n):
    """Every rank makes the same calls in the same order, and together they receive what they send."""
    judge_order(sync(n, drive, seed, UNEVEN))


def judge_order(world):
    sent, received = (sum(values[0][way] for values in world.values) for way in ("sent", "received"))
    calls = sum(len(trace.calls) for trace in world.traces)
    is_even = abs(sent - received) <= calls + world.size  # each call's bytes are rounded
    world.require(is_even, f"the ranks sent {sent} bytes together, and received {received}")
    world.agree()


def test_refuses_different_models(sync, seed, n):
    """When one rank's model differs, attach raises UserError on every rank and names that rank and the parameter."""
    judge_refusal(sync(n, drive_refusal, seed))


def drive_refusal(comm, module, name, seed):
    model = toy_model(seed)
    if comm.rank and comm.rank == comm.world_size - 1:
        model.sometimes = nn.Linear(WIDTH, WIDTH + 1)
    try:
        wrap(name, model)
    except UserError as error:
        return str(error)
    return ""


def judge_refusal(world):
    odd = world.size - 1
    for rank, sentence in enumerate(world.values if odd else ()):
        world.require(
            bool(sentence), f"attach took models that differ, on rank {rank}: call super().attach(model)", rank
        )
        names_both = f"rank {odd}" in sentence and "sometimes.weight" in sentence
        world.require(names_both, f"attach's error does not name rank {odd} and sometimes.weight: {sentence}", rank)


def test_lets_go(sync, seed, n):
    """After detach the model is the user's own again: no hook is left, backward makes no call, .grad is this rank's.
    Another model, under a sync of the same class, is averaged as before."""
    judge_release(sync(n, drive_release, seed), seed)


def drive_release(comm, module, name, seed):
    model, other, ledger = toy_model(seed), toy_model(seed), Ledger()
    before = hooks_of(model)
    with noted(comm, ledger):
        wrapped, kept = wrap(name, model, ledger), wrap(name, other, ledger)
        for each in (wrapped, kept):
            each(**local_batch(comm.rank, 0, True, seed))[0].backward()
        wrapped.detach()
        model.zero_grad(set_to_none=True)
        other.zero_grad(set_to_none=True)
        ledger.rows.clear()
        model(**local_batch(comm.rank, 1, True, seed))[0].backward()
        calls = len(ledger.rows)
        kept(**local_batch(comm.rank, 2, True, seed))[0].backward()
    left = [each for each in hooks_of(model) if each not in before]
    return {"hooks": left, "calls": calls, "own": gradients_of(model), "grads": [gradients_of(other)]}


def judge_release(world, seed):
    for rank, value in enumerate(world.values):
        world.require(not value["calls"], f"after detach backward still makes {value['calls']} calls", rank)
        left = ", ".join(value["hooks"][:3])
        world.require(not left, f"detach leaves hooks behind: {left}", rank)
        own = own_gradients(seed, rank, 1, SMALL)
        for name, gradient in own.items():
            is_own = not is_wrong(value["own"][name], gradient, [gradient])
            world.require(is_own, f"after detach {name}'s gradient is not this rank's own, on rank {rank}", rank)
    step = Run((Step((2,)),), "after the detach of another model's sync")
    are_means(world, seed, [step], [[value] for value in world.values], with_weights=False)


def test_averages_any_tensors(sync, seed, n):
    """Tensors of any size, shape, dtype and values are averaged to the last bit of their dtype, over many steps, each
    of 1 to 4 backward passes. Half precision, and tensors that are not contiguous, may be refused on every rank."""
    draws = [*models(seed, n)]
    judge_drawn(sync(n, drive_drawn, draws, seconds=2 * SECONDS), draws)
    draws = [*many_steps(seed, n)]
    world = sync(n, drive_drawn, draws, seconds=2 * SECONDS)
    judge_drawn(world, draws)
    do_not_drift(world, draws[0])


def test_passes_overflow_on(sync, seed, n):
    """If one rank's gradient is infinite or NaN, every rank's is; the next step is clean."""
    draws = [overflowing(seed, n)]
    judge_drawn(sync(n, drive_drawn, draws, seconds=SECONDS), draws)


def test_trains_like_one_process(sync, seed, n):
    """A training of a BERT-shaped model gives the gradients, weights and buffers of one process: with dropout, uneven
    use, evaluations and exceptions between steps, a new sync that goes on with the state of the first, and a settle
    that gives all ranks rank 0's buffers."""
    judge_training(sync(n, drive_training, seed, seconds=2 * SECONDS), seed)
