"""Calls that other libraries make through torch.distributed, entered in the ledger like ours."""

import contextlib
from collections.abc import Iterator

from cos598d.comm.communicator import Communicator
from cos598d.comm.dispatcher import BARRIER, DispatchedCall, listening
from cos598d.comm.ledger import Row, dtype_name
from cos598d.records.conventions import AGREEMENT, GRADIENTS, PARAMETERS

_watchers: list[tuple[Communicator, str | None]] = []


def purpose_in_training(call: DispatchedCall) -> str:
    """The purpose of an engine's call in a step: sums are gradients; everything else is parameters."""
    if sum(tensor.numel() for tensor in call.tensors) == 1:  # a norm, or whether it is finite
        return AGREEMENT
    return GRADIENTS if "reduce" in call.op else PARAMETERS


@contextlib.contextmanager
def watched(comm: Communicator, purpose: str | None = None) -> Iterator[None]:
    """A context in which `comm`'s ledger gets every call of a torch.distributed function, from any thread.

    Their `purpose` is `purpose_in_training` by default. Calls through a Communicator are skipped, since they are in the
    ledger already. Calls that torch makes in C++, as its DDP's reducer does, are skipped too. If contexts are nested,
    the innermost enters the calls. Durations are not recorded: many calls end later.
    """
    watcher = comm, purpose
    _watchers.append(watcher)
    try:
        with listening(_enter):
            yield
    finally:
        _watchers.remove(watcher)


def row_of(comm: Communicator, call: DispatchedCall, purpose: str, name: str) -> Row | None:
    """The ledger's row for a call without seconds; None if nothing is sent."""
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
