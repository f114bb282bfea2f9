"""Where the ranks meet before anything is sent: who is here, who is missing, and do all of them want the same run."""

import contextlib
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from cos598d.errors import UserError
from cos598d.terminal.printable import printable
from cos598d.world.channel import make_key
from cos598d.world.doorway import find_rank_0, open_listener
from cos598d.world.launch import Identity, check_launcher, place_of
from cos598d.world.limits import allow_descriptors
from cos598d.world.meeting import Meeting, ranks_in_words
from cos598d.world.network import address_facing, choose_interface, is_loopback, network_identity
from cos598d.world.reception import Reception, Verdict
from cos598d.world.secret import new_secret
from cos598d.world.store import NotInTime, RankStore

# How long rank 0 stays so that the others can hear why the run ends.
LINGER_SECONDS = 3.0
TELL_SECONDS = 2.0  # what is waited for longer is said
POLL_SECONDS = 0.5
# Rank 0 alone decides who is missing, so the others allow it a little longer than itself.
PATIENCE_SECONDS = 5.0


def meet(identity: Identity, seconds: float, facts: Mapping[str, Any]) -> Meeting:
    """Meet the other ranks within `seconds`, and make sure that `facts` (flag: JSON value) are the same on all.

    Raises UserError, the same sentence on every rank that came: the port is taken, ranks are missing (named), one
    rank came twice, a rank failed before it came, or was started with another world size or flag than rank 0.
    """
    deadline = time.monotonic() + seconds
    allow_descriptors(identity.rank, identity.world_size)
    me = {
        "host": _host(),
        "network": network_identity(),
        "world_size": identity.world_size,
        "facts": dict(facts),
    }
    if identity.rank == 0:
        store, verdict = _receive(identity, seconds, deadline, me)
    else:
        store, verdict = _come(identity, seconds, deadline, me)
    address = _own_address(identity.rank, store.local_address, verdict)
    choose_interface(address)
    store.key = make_key(identity.secret, verdict.run_key)  # for the threads that will use it
    return Meeting(identity, store, verdict.hosts, seconds, address, identity.secret)


def tell_failure(identity: Identity, sentence: str) -> None:
    """For a rank that fails before the meeting: tell those who wait there, if they are there already.

    Rank 0 serves the meeting point for a moment, so that ranks which are on their way hear it too.
    """
    sentence = f"rank {identity.rank} could not start: {sentence}"
    deadline = time.monotonic() + LINGER_SECONDS
    with contextlib.suppress(UserError, DistError):
        if identity.rank == 0:
            reception = Reception(identity, open_listener(identity), {}, LINGER_SECONDS)
            reception.start()
            reception.close_with(Verdict(sentence), range(1, identity.world_size), deadline)
        else:
            store = find_rank_0(identity, LINGER_SECONDS, deadline, lambda sentence: None)
            store.request("object", sentence)


def _receive(identity: Identity, seconds: float, deadline: float, me: dict) -> tuple[RankStore, Verdict]:
    """Rank 0: serve the meeting point, wait until all are here or something is wrong, and give the verdict."""
    _warn_of_strangers(identity)
    reception = Reception(identity, open_listener(identity), me, seconds)
    reception.start()
    try:
        in_vain = _wait_for_all(identity, reception, seconds, deadline)
    except BaseException as error:  # those who have come shall hear it
        reception.close_with(Verdict(f"rank 0 left the meeting: {str(error) or 'it was stopped.'}"), (), 0.0)
        raise
    if reception.objection:
        verdict = Verdict(reception.objection)
        # Those who have not come may be on their way, unless they were waited for in vain.
        expected = [rank for rank in range(1, identity.world_size) if rank not in in_vain]
        reception.close_with(verdict, expected, time.monotonic() + LINGER_SECONDS)
        raise UserError(verdict.sentence)
    verdict = reception.verdict(new_secret())
    reception.begin(verdict)
    store = RankStore(reception.place, make_key(identity.secret, verdict.run_key), 0, seconds)
    store.use(*reception.join())
    return store, verdict


def _wait_for_all(identity: Identity, reception: Reception, seconds: float, deadline: float) -> list[int]:
    """Wait until all have come or there is an objection; return the ranks that were waited for in vain."""
    told, pause = time.monotonic(), TELL_SECONDS
    waited_for: list[int] = []
    in_vain: list[int] = []
    while not reception.objection and (missing := reception.missing()):
        check_launcher()
        now = time.monotonic()
        if now > deadline:
            in_vain = missing
            refused = reception.door.refused
            reception.objection = (
                f"{ranks_in_words(missing)} did not come to {place_of(identity)} within {seconds:g} s (--timeout)"
                + (f"; {refused} came with another --secret or from another run." if refused else ".")
            )
        elif now - told > pause and missing != waited_for:
            _say(identity, f"waiting for {ranks_in_words(missing)} at {place_of(identity)} ...")
            told, pause, waited_for = now, 2 * pause, missing
        reception.changed.wait(POLL_SECONDS)
        reception.changed.clear()
    return in_vain


def _come(identity: Identity, seconds: float, deadline: float, me: dict) -> tuple[RankStore, Verdict]:
    """Any rank but 0: find rank 0, and wait for its verdict."""
    store = find_rank_0(identity, seconds, deadline, lambda sentence: _say(identity, sentence))
    try:
        answer = store.request("arrive", me, seconds=seconds + PATIENCE_SECONDS)
    except DistError as error:
        gone = "left" if isinstance(error, NotInTime) else "is gone from"
        raise UserError(f"rank 0 {gone} {place_of(identity)} without a word.") from None
    except BaseException:
        with contextlib.suppress(DistError):  # started again, this rank is no second one
            store.request("leave", seconds=1)
        raise
    verdict = Verdict(*answer)
    if verdict.sentence:
        raise UserError(printable(verdict.sentence))
    return store, verdict


def _own_address(rank: int, local: str, verdict: Verdict) -> str:
    """The address by which the other ranks reach this one.

    That by which it reached rank 0; but where rank 0's name means loopback on its own host, and there are other hosts,
    ranks of that host take the address that faces one of these.
    """
    others = [r for r, network in enumerate(verdict.networks) if network != verdict.networks[rank]]
    if not is_loopback(local) or not others:
        return local
    return address_facing(verdict.addresses[others[0]]) or local


def _warn_of_strangers(identity: Identity) -> None:
    if not identity.secret and not is_loopback(identity.meeting_ip):
        _say(
            identity,
            f"no --secret: whoever reaches {place_of(identity)} can take part in this run; on a network that others "
            f"use give every rank the same --secret FILE.",
        )


def _host() -> str:
    """This host's name, made unlike that of another machine of the same name."""
    try:
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:  # not Linux
        return socket.gethostname()


def _say(identity: Identity, sentence: str) -> None:
    print(f"rank {identity.rank}: {sentence}", file=sys.stderr, flush=True)
