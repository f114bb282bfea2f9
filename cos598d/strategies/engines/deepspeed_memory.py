"""What a rank holds under DeepSpeed between two steps, by formula."""

from collections.abc import Mapping

from torch import nn

from cos598d.strategies.formula import Held, MemoryEstimate, TrainingSpec
from cos598d.strategies.optimizers import decayed_and_plain

SMALL = 100_000  # elements: DeepSpeed's own threshold, up to which stage 3 leaves parameters whole
UNSAID = "DeepSpeed copies gradients on their way by rules of its own, so no formula for the peak"


def sizes(model: nn.Module, bucket_mb: float) -> dict[str, int]:
    """DeepSpeed's settings in elements, for this model; its defaults are for models of billions of them.

    By default a bucket is of 5e8 elements, and a model of fewer than 1e9 stays whole for all of a step.
    """
    elements = sum(p.numel() for p in model.parameters())
    bucket = max(1, min(elements, int(bucket_mb * (1 << 20)) // 4))
    return {
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        # What is needed again within so many is not freed, as at the turn from forward to backward.
        "stage3_max_reuse_distance": bucket,
        "stage3_param_persistence_threshold": SMALL,
        # All that stay whole together: a small model would consist of nothing else.
        "stage3_model_persistence_threshold": elements // 100,
    }


def held_by_deepspeed(job: TrainingSpec, stage: int, settings: Mapping[str, int]) -> MemoryEstimate:
    """Between two steps, of float32 weights, with these `sizes`.

    0      all weights and their state
    1, 2   the weights of each of the optimizer's groups, padded to a multiple of 2n elements; of an n-th of these a
           copy that is stepped, and its state
    3      an n-th of each parameter, padded to a multiple of n elements, and as much for its gradient; its state; the
           parameters that stay whole, padded alike; one bucket
    """
    if stage == 0:
        state = job.state(job.weights, len(job.trainable))
        return _expected(job.weights + job.frozen, state)
    groups = [group for group in decayed_and_plain(job.trainable) if group]
    if stage < 3:
        flat = sum(4 * _up(sum(p.numel() for p in group), 2 * job.ranks) for group in groups)
        part = flat // job.ranks
        return _expected(flat + job.frozen, part + job.state(part, len(groups)))
    parts = {p: 4 * _up(p.numel(), job.ranks) // job.ranks for p in job.model.parameters()}
    own = sum(parts[p] for _, p in job.trainable)
    parameters = sum(parts.values()) + sum(job.ranks * parts[p] for p in _persistent(job.model, settings))
    bucket = 4 * settings["reduce_bucket_size"]
    return _expected(parameters, job.state(own, len(groups)), gradients=own, buckets=bucket)


def _expected(parameters: int, optimizer: int, gradients: int = 0, buckets: int = 0) -> MemoryEstimate:
    held: Held = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "buckets": buckets}
    return MemoryEstimate(between_steps=held, unsaid=UNSAID)


def _persistent(model: nn.Module, settings: Mapping[str, int]) -> list[nn.Parameter]:
    """The parameters that stage 3 leaves whole: in order, the small ones that fit into what may be left so together."""
    found: list[nn.Parameter] = []
    room = settings["stage3_model_persistence_threshold"]
    for p in model.parameters():
        if p.numel() <= min(room, settings["stage3_param_persistence_threshold"]):
            found.append(p)
            room -= p.numel()
    return found


def _up(elements: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-elements // unit) * unit
