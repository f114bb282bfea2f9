"""Do all ranks hold a model of the same tensors? Told by digests, before anything of it is sent."""

import hashlib
import json

from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import dtype_name
from cos598d.errors import UserError


def check_models(comm: Communicator, model: nn.Module) -> None:
    """Compare the model's parameters and buffers with the other ranks': names, order, shapes, dtypes, what is frozen.

    Every rank calls it. Raises UserError, the same on every rank, naming the first tensor that differs from rank 0's.
    """
    mine = [
        [name, list(tensor.shape), dtype_name(tensor.dtype), tensor.requires_grad]
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    digests = comm.exchange(digest)
    if len(set(digests)) == 1:
        return
    models = comm.exchange(mine)
    rank = next(r for r, other in enumerate(digests) if other != digests[0])
    theirs, first = models[rank], models[0]
    place = next((i for i, pair in enumerate(zip(theirs, first)) if pair[0] != pair[1]), min(len(theirs), len(first)))

    def describe(model: list) -> str:
        if place >= len(model):
            return f"only {len(model)} tensors"
        name, shape, dtype, trainable = model[place]
        return f"{name} {tuple(shape)} {dtype}{'' if trainable else ' frozen'}"

    raise UserError(
        f"the ranks' models differ: rank {rank} has {describe(theirs)} where rank 0 has {describe(first)}; "
        f"start every rank with the same model."
    )
