"""The order in which torch's DDP has laid its buckets, kept for a training that goes on in a new process.

A ring adds up an element's terms in an order that depends on its place in its bucket. DDP lays its buckets anew after
the first step, in the order in which gradients arrived in it: so without this the step after a resume would round in
another way.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def arrival(ddp: DistributedDataParallel) -> list[int] | None:
    """The places of the trainable parameters in the order in which their gradients came; None before the first step.

    None too where buckets are never laid anew, as with find_unused_parameters. Every rank calls it, between two steps:
    what torch would do at the next forward is done now, where it is due.
    """
    _rebuild(ddp)
    told = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    return [int(place) for place in told.replace(",", " ").split()] if told else None


def rehearse(ddp: DistributedDataParallel, parameters: Sequence[nn.Parameter], order: Sequence[int]) -> None:
    """Have a new DDP lay its buckets as one did whose `arrival` was `order`: by a backward of zeros in that order.

    `parameters` are all trainable ones, in the model's order. Every rank calls it before the first step. Raises
    ValueError where the order is not one of these.
    """
    if sorted(order) != list(range(len(parameters))):
        raise ValueError("the order of arrival is not one of this model's gradients")
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    # Of what is ready autograd takes first what was made last.
    terms = [parameters[place].sum() * 0 for place in reversed(order)]
    torch.stack([term.float() for term in terms]).sum().backward()
    for parameter in parameters:
        parameter.grad = None
    _rebuild(ddp)


def _rebuild(ddp: DistributedDataParallel) -> None:
    assert ddp.logger is not None
    ddp.reducer._rebuild_buckets()
    ddp.logger.set_runtime_stats_and_log()  # else its data are those of the step before
