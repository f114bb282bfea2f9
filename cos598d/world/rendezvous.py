"""The rendezvous: all ranks meet before anything is sent, or all hear which are missing or want another run."""

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed import DistError

from cos598d.errors import WARNING, UserError
from cos598d.terminal.printable import printable
from cos598d.terminal.words import ranks_in_words
from cos598d.world.connection import make_key
from cos598d.world.endpoint import TELL_SECONDS, find_rank_0, open_listener
from cos598d.world.identity import Identity, check_launcher
from cos598d.world.limits import allow_descriptors
from cos598d.world.meeting import Meeting
from cos598d.world.network import address_facing, choose_interface, host_identity, is_loopback, network_identity
from cos598d.world.secret import new_secret
from cos598d.world.server import Admission, RendezvousServer
from cos598d.world.store import PATIENCE_SECONDS, Rank0Store, StoreClient, StoreTimeout

LINGER_SECONDS = 3.0  # how long rank 0 stays so that the others can read why there is no run
POLL_SECONDS = 0.5


def meet(identity: Identity, seconds: float, facts: Mapping[str, Any]) -> Meeting:
    """Meet the other ranks within `seconds`, and check that `facts` (flag: JSON value) are the same on all.

    Raises UserError, the same on every rank that arrived, if the port is taken or ranks are missing (with their
    numbers). Also raises it if a rank arrived twice, failed before, or has another world size or flag than rank 0.
    """
    deadline = time.monotonic() + seconds
    allow_descriptors(identity.rank, identity.world_size)
    mine = {
        "host": host_identity(),
        "network": network_identity(),
        "world_size": identity.world_size,
        "facts": dict(facts),
    }
    role = _admit_all if identity.rank == 0 else _arrive
    store, verdict = role(identity, seconds, deadline, mine)
    address = _own_address(store.local_address, verdict.elsewhere)
    choose_interface(address)
    store.key = make_key(identity.secret, verdict.run_key)  # for the threads that will use it
    return Meeting(identity, store, verdict.hosts, seconds, address, identity.secret)


def tell_failure(identity: Identity, sentence: str) -> None:
    """Tell the ranks that already wait at the rendezvous that this one has failed before it.

    Rank 0 listens for a moment, so that ranks which arrive a little later get the error too.
    """
    sentence = f"rank {identity.rank} could not start: {sentence}"
    deadline = time.monotonic() + LINGER_SECONDS
    with contextlib.suppress(UserError, DistError):
        if identity.rank == 0:
            server = RendezvousServer(identity, open_listener(identity), {})
            server.start()
            server.close_with(Admission(sentence), range(1, identity.world_size), deadline)
        else:
            store = find_rank_0(identity, LINGER_SECONDS, deadline, lambda sentence: None)
            store.request("object", sentence)


def _admit_all(identity: Identity, seconds: float, deadline: float, mine: dict) -> tuple[StoreClient, Admission]:
    """On rank 0: serve, wait until all have arrived or something is wrong, and give the verdict."""
    _warn_of_strangers(identity)
    server = RendezvousServer(identity, open_listener(identity), mine)
    server.start()
    while True:
        try:
            missing = _wait_for_all(identity, server, seconds, deadline)
        except BaseException as error:  # the ranks that have arrived should get the error
            reason = str(error) if isinstance(error, Exception) else "it was stopped. Start all ranks again."
            said = f"rank 0 left before the run began: {reason}"
            server.close_with(Admission(said), (), 0.0)
            raise
        if server.objection:
            verdict = Admission(server.objection)
            # Other ranks may still be on their way; those that are missing after all this time are not.
            expected = [rank for rank in range(1, identity.world_size) if rank not in missing]
            server.close_with(verdict, expected, time.monotonic() + LINGER_SECONDS)
            raise UserError(verdict.sentence)
        if begun := server.begin(new_secret()):
            return Rank0Store(server.table, server.address, seconds), begun


def _wait_for_all(identity: Identity, server: RendezvousServer, seconds: float, deadline: float) -> list[int]:
    """Wait until all have arrived or there is an objection. Return the ranks that are missing at the deadline."""
    told, pause = time.monotonic(), TELL_SECONDS
    waited_for: list[int] = []
    while not server.objection and (missing := server.missing()):
        check_launcher()
        now = time.monotonic()
        if now > deadline:
            refused = server.acceptor.refused
            server.objection = (
                f"{ranks_in_words(missing)} did not come to {identity.endpoint} within {seconds:g} s (--timeout)"
                + (f"; {refused} came with another --secret or from another run" if refused else "")
                + ". Start them again, or check --master_ip, --master_port and the firewall."
            )
            return missing
        if now - told > pause and missing != waited_for:
            _say(identity, f"waiting for {ranks_in_words(missing)} at {identity.endpoint} ...")
            told, pause, waited_for = now, 2 * pause, missing
        server.changed.wait(POLL_SECONDS)
        server.changed.clear()
    return []


def _arrive(identity: Identity, seconds: float, deadline: float, mine: dict) -> tuple[StoreClient, Admission]:
    """On any rank except 0: find rank 0, and wait for its verdict."""
    while True:
        store, verdict = _ask(identity, seconds, deadline, mine)
        if not verdict.sentence:
            return store, verdict
        # After torchrun's restart, the new rank 0 publishes its port a moment after the last one's run has ended.
        if not (verdict.is_late and identity.store_is_served) or time.monotonic() > deadline:
            raise UserError(printable(verdict.sentence))
        time.sleep(POLL_SECONDS)


def _ask(identity: Identity, seconds: float, deadline: float, mine: dict) -> tuple[StoreClient, Admission]:
    """Find rank 0, send it what this rank was started with, and return its verdict."""
    store = find_rank_0(identity, seconds, deadline, lambda sentence: _say(identity, sentence))
    try:
        answer, _ = store.arrive(mine, seconds + PATIENCE_SECONDS)
    except DistError as error:
        gone = "does not answer" if isinstance(error, StoreTimeout) else "closed the connection"
        raise UserError(f"rank 0 {gone} at {identity.endpoint}. See its own error, then repeat the command.") from None
    return store, Admission(*answer)


def _own_address(local: str, elsewhere: str) -> str:
    """The address by which the other ranks reach this one.

    It is the one from which it reached rank 0. The exception: rank 0's name means loopback on its own host, and ranks
    have come from `elsewhere`. Then the ranks of that host take the address that faces these.
    """
    return (address_facing(elsewhere) or local) if elsewhere and is_loopback(local) else local


def _warn_of_strangers(identity: Identity) -> None:
    if not identity.secret and not is_loopback(identity.listening_ip):
        print(
            f"{WARNING}rank {identity.rank}: no --secret, so anyone who reaches {identity.endpoint} can join this run. "
            "On a network that others use, give every rank the same --secret FILE.",
            file=sys.stderr,
            flush=True,
        )


def _say(identity: Identity, sentence: str) -> None:
    print(f"rank {identity.rank}: {sentence}", file=sys.stderr, flush=True)
