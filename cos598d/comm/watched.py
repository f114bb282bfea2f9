"""What other people's code sends through torch.distributed, entered in the ledger as our own calls are."""

import contextlib
from collections.abc import Callable, Iterator

from cos598d.comm.communicator import Communicator
from cos598d.comm.dispatcher import BARRIER, DispatchedCall, listening
from cos598d.comm.ledger import Row, dtype_name
from cos598d.records.conventions import AGREEMENT, GRADIENTS, PARAMETERS

# Of a call its purpose, and its tensor's name, "" for a number; None for a call that is left out.
Describe = Callable[[DispatchedCall], tuple[str, str] | None]

_watchers: list[tuple[Communicator, Describe]] = []


def purpose_in_training(call: DispatchedCall) -> str:
    """What a call of an engine is for, in a step: what is summed is gradients, what is handed round is parameters."""
    if sum(tensor.numel() for tensor in call.tensors) == 1:  # a norm, or whether it is finite
        return AGREEMENT
    return GRADIENTS if "reduce" in call.op else PARAMETERS


@contextlib.contextmanager
def watched(comm: Communicator, purpose: str | None = None, describe: Describe | None = None) -> Iterator[None]:
    """Enter in `comm`'s ledger every call of a torch.distributed function that is made meanwhile, by whichever thread.

    Their `purpose`: by default `purpose_in_training`. Calls through a Communicator are in the ledger already, and are
    left out. So are calls that torch makes in C++ (its DDP's reducer), unless `describe` names them. Of several
    watchers the innermost that does not leave a call out enters it. Seconds are not told: many calls end later.
    """

    def of_functions(call: DispatchedCall) -> tuple[str, str] | None:
        if not call.function or call.module.startswith("cos598d.comm."):
            return None
        return purpose or purpose_in_training(call), ""

    watcher = comm, describe or of_functions
    _watchers.append(watcher)
    try:
        with listening(_enter):
            yield
    finally:
        _watchers.remove(watcher)


def _enter(call: DispatchedCall) -> None:
    if call.op == BARRIER or call.group.size() == 1 or not call.payload_bytes:
        return
    for comm, describe in reversed(_watchers):
        found = describe(call)
        if found is not None:
            function, (purpose, name) = call.function or call.op, found
            elements = sum(tensor.numel() for tensor in call.tensors)
            comm.ledger.enter(
                Row(
                    comm.ledger.iteration,
                    purpose,
                    function,
                    name or f"{function} {len(comm.ledger.rows)}",
                    tuple(call.tensors[0].shape) if len(call.tensors) == 1 else (elements,),
                    dtype_name(call.tensors[0].dtype),
                    call.payload_bytes,
                    *call.moved(comm.bytes_are_assumed),
                    None,
                )
            )
            return
