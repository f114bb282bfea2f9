"""What a rank of whole replicas sends in a step, by what its gradient sync states of its calls."""

from dataclasses import replace

from cos598d.comm.gloo import all_reduce_bytes, broadcast_bytes
from cos598d.comm.ledger import size_in_bytes
from cos598d.strategies.formula import Sent, TrainingSpec
from cos598d.sync.base import GradientSync
from cos598d.sync.codecs import in_code
from cos598d.sync.cost import CollectiveCall, Step
from cos598d.sync.local_sgd import LocalSGD
from cos598d.sync.options import DEFAULTS, SyncOptions

# torch's hooks that make the calls of other algorithms after some steps.
OTHERS_LATER = ("powersgd", "post_localsgd")


def sent_by_replicas(job: TrainingSpec, sync: GradientSync, precision: str = "fp32") -> Sent:
    """What whole replicas send which average by `sync`; it need not be attached."""
    if job.ranks == 1:
        return Sent()
    options = getattr(sync, "options", DEFAULTS)  # a class of a user's own need not have them
    step = Step(job.tensors, options, job.hosts or [range(job.ranks)], job.tensors[::-1])
    travels = sync.calls(step) or _calls_whatever_is_touched(sync, step)
    if travels is None and sync.averages_weights:
        return _sent_by_averages(job, sync, step, precision)
    if travels is None or options.ddp_hook in OTHERS_LATER:
        return Sent(unsaid="this sync states no calls before a step: what travels only the step tells")
    moved = [bytes_sent for travel in travels for bytes_sent in sent_in_call(travel, job, options)]
    if not travels:  # replicas that drift apart do not settle
        return Sent()
    agreed = agreement(job) if getattr(sync, "find_unused_parameters", True) else 0
    buffers = settled(job) if sync.sends_buffers else 0
    return Sent(sum(moved), agreed + buffers, settled(job), len(moved))


def _sent_by_averages(job: TrainingSpec, sync: GradientSync, step: Step, precision: str) -> Sent:
    """Of a sync that averages weights: in the mean of the steps in which all of them are averaged once."""
    whole, sent, steps = all_reduce_bytes(job.weights, job.ranks), None, step.options.sync_every
    if isinstance(sync, LocalSGD):
        steps = sync.round_steps(step.options)
        sent = sum(each for travel in sync.averages(step) for each in sent_in_call(travel, job, step.options))
    overflows = all_reduce_bytes(4, job.ranks) if precision == "fp16" else 0
    rest = whole if steps > 1 else 0
    return Sent(round((whole if sent is None else sent) / steps), overflows, rest + settled(job), calls=1)


def _calls_whatever_is_touched(sync: GradientSync, step: Step) -> list[CollectiveCall] | None:
    """The calls of a step, where no large embedding is in it of which only some rows would travel."""
    none, every = (sync.calls(replace(step, touched=share)) for share in (0.0, 1.0))
    return every if none == every else None


def agreement(job: TrainingSpec) -> int:
    """What it takes to agree on which parameters some rank has used: an all-reduce of 4 bytes for each."""
    return all_reduce_bytes(4 * len(job.trainable), job.ranks)


def settled(job: TrainingSpec) -> int:
    """What it takes to give all ranks rank 0's buffers."""
    return broadcast_bytes(sum(map(size_in_bytes, job.model.buffers())), job.ranks, job.rank)[0]


def sent_in_call(travel: CollectiveCall, job: TrainingSpec, options: SyncOptions) -> list[int]:
    """What `job.rank` sends in one call, or in each of those that a codec makes of it."""
    members = range(job.ranks) if travel.members is None else travel.members
    word = "fp16" if options.ddp_hook == "fp16" else options.compress
    if word is None or len(members) < 2 or job.rank not in members:
        return [travel.moved(job.ranks, job.rank)[0]]
    place = members.index(job.rank)
    return [payload.moved(len(members), place)[0] for payload in in_code(travel, word, len(members))]
