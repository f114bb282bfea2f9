"""What other people's code sends through torch.distributed, entered in the ledger as our own calls are."""

import contextlib
from collections.abc import Iterator

from cos598d.comm.communicator import Communicator
from cos598d.comm.dispatcher import BARRIER, DispatchedCall, listening
from cos598d.comm.ledger import Row, dtype_name
from cos598d.records.conventions import AGREEMENT, GRADIENTS, PARAMETERS

_watchers: list[tuple[Communicator, str | None]] = []


def purpose_in_training(call: DispatchedCall) -> str:
    """What a call of an engine is for, in a step: what is summed is gradients, what is handed round is parameters."""
    if sum(tensor.numel() for tensor in call.tensors) == 1:  # a norm, or whether it is finite
        return AGREEMENT
    return GRADIENTS if "reduce" in call.op else PARAMETERS


@contextlib.contextmanager
def watched(comm: Communicator, purpose: str | None = None) -> Iterator[None]:
    """Enter in `comm`'s ledger every call of a torch.distributed function that is made meanwhile, by whichever thread.

    Their `purpose`: by default `purpose_in_training`. Calls through a Communicator are in the ledger already, and are
    left out. So are calls that torch makes in C++, as its DDP's reducer does. Of several watchers the innermost enters
    them. Seconds are not told: many calls end later.
    """
    watcher = comm, purpose
    _watchers.append(watcher)
    try:
        with listening(_enter):
            yield
    finally:
        _watchers.remove(watcher)


def row_of(comm: Communicator, call: DispatchedCall, purpose: str, name: str) -> Row | None:
    """The ledger's row for a call whose seconds are not known; None where nothing is sent."""
    if call.op == BARRIER or call.group.size() == 1 or not call.payload_bytes:
        return None
    elements = sum(tensor.numel() for tensor in call.tensors)
    return Row(
        comm.ledger.iteration,
        purpose,
        call.function or call.op,
        name,
        tuple(call.tensors[0].shape) if len(call.tensors) == 1 else (elements,),
        dtype_name(call.tensors[0].dtype),
        call.payload_bytes,
        *call.moved(comm.bytes_are_assumed),
        None,
    )


def _enter(call: DispatchedCall) -> None:
    if not call.function or call.module.startswith("cos598d.comm."):
        return
    comm, purpose = _watchers[-1]
    name = f"{call.function} {len(comm.ledger.rows)}"
    row = row_of(comm, call, purpose or purpose_in_training(call), name)
    if row is not None:
        comm.ledger.enter(row)
